"""python -m slidedp.bench 8B --batch 16 --layout '{"schedule": "in_backward", "activations": "partial"}'"""

import argparse
import json
from typing import Any

from slidedp.bench.shapes import QWEN3
from slidedp.bench.slide import run_layouts
from slidedp.config import Layout


def row(size: str, batch: int, ranks: int, measured: dict[str, Any]) -> str:
    """One line of the table; every figure is the median over the measured steps."""
    layout, waits = measured["layout"], measured["wait_seconds"]
    route = f"{layout['delivery']}+{layout['reduction']}"
    return (
        f"Qwen3-{size} {ranks} x batch {batch:<3} {route:<16} {layout['schedule']:<11} "
        f"{layout['activations']!s:<10} {measured['step_seconds']:7.3f} s "
        f"{measured['tokens_per_second']:8,.0f} tokens/s {measured['tflops_per_gpu']:5.0f} TFLOPS/GPU "
        f"{measured['gpu_peak_gib']:6.1f} GiB/GPU  waits {sum(waits.values()):.3f} s "
        f"loss {measured['losses'][0]:.4f} -> {measured['losses'][-1]:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m slidedp.bench", description="Measure SlideDP on random weights and tokens."
    )
    parser.add_argument("size", choices=QWEN3, help="Qwen3 shape")
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank (16)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (1024)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (1)")
    parser.add_argument("--steps", type=int, default=20, help="steps under each layout (20)")
    parser.add_argument(
        "--layout", action="append", type=json.loads, help="JSON of Layout fields; repeat to compare"
    )
    parser.add_argument("--host-gib", type=float, help="host memory budget in GiB (what is free)")
    parser.add_argument("--json", help="also write the measurements to this file")
    asked = parser.parse_args()
    layouts = [Layout(**fields) for fields in asked.layout or [{}]]
    measured = run_layouts(
        asked.size,
        asked.batch,
        layouts,
        length=asked.length,
        steps=asked.steps,
        ranks=asked.ranks,
        host_gib=asked.host_gib,
    )
    for measurement in measured:
        print(row(asked.size, asked.batch, asked.ranks, measurement))
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(measured, file, indent=1)


if __name__ == "__main__":
    main()
