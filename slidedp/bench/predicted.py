"""python -m slidedp.bench.predicted 8B --batch 16 40 --ranks 2 --json docs/step_time.json

Predicted against measured step times: per batch, one run on random weights tunes itself, as under
`layout="auto"`, and then goes through a list of layouts and the one that it has chosen. The model
predicts each of them from a probe of the machine, on CPUs again from the probe corrected by the run's first
timeline. The file keeps what was measured: `slidedp.bench.measured` predicts it again.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from slidedp.bench.measured import CHOICE, Measured, accuracy, predictions, write
from slidedp.bench.shapes import QWEN3, qwen3
from slidedp.bench.slide import WARM_UP, bench_config, launch_tuned, wait_for_step
from slidedp.compare import switch
from slidedp.layout import Layout
from slidedp.policy.candidates import fits
from slidedp.policy.words import describe
from slidedp.preflight import under

MEASURED = 6
"""Steps whose median counts, after WARM_UP steps under the layout."""


def sweep(layers: int, ranks: int, compiled: bool) -> list[Layout]:
    """Layouts that differ in everything a layout can differ in. The first one gives the timeline."""
    first = Layout(schedule="in_backward")
    routes: list[dict[str, Any]] = [  # one rank has one
        {"delivery": "replicated"},
        {"reduction": "cpu"},
        {"reduction": "gpu_root"},
        {"delivery": "broadcast"},
    ]
    everywhere = {"gpu_updates": layers + 2, "resident_updates": layers + 2}
    keep: dict[str, Any] = {"activations": "keep"}
    middle: list[dict[str, Any]] = [
        {"schedule": "in_forward"},
        {"landing": "ring"},
        *(routes if ranks > 1 else []),
        {"delivery": "replicated", "reduction": "cpu", "schedule": "in_forward", "activations": "offload"},
        {"chunk_bytes": 8 * 2**20},
        {"chunk_bytes": 512 * 2**20},
        {"window": 2, "gradient_slots": 1},
        {"activations": "offload"},
        keep,
        {"gpu_updates": 4},
        {"gpu_updates": 12},
        {"gpu_updates": 12, "resident_updates": 12},
        keep | {"gpu_updates": 12},
        keep | everywhere,
        keep | everywhere | {"chunk_bytes": 512 * 2**20},
        {"schedule": "in_forward"} | everywhere,
        {"window": layers},
        keep | {"schedule": "in_forward"},
        keep | {"chunk_bytes": 256 * 2**20, "window": 6},
        keep | {"gpu_updates": 12, "resident_updates": 12},
        keep | {"gpu_updates": layers, "resident_updates": layers // 2},
        {"gpu_updates": layers + 2, "update_slots": 24},
        {"activations": ("recompute", "keep") * (layers // 2) + ("keep",) * (layers % 2)},
        {"activations": "offload"} | everywhere,
        everywhere,
        everywhere | {"window": layers, "chunk_bytes": 256 * 2**20},
        keep | everywhere | {"window": layers},
        keep | everywhere | {"schedule": "in_forward", "chunk_bytes": 256 * 2**20},
    ]
    if compiled:
        partial: dict[str, Any] = {"activations": "partial"}
        middle += [partial, partial | {"schedule": "in_forward"}, partial | everywhere]
    return [first, *(dataclasses.replace(first, **fields) for fields in middle)]


def measure(
    name: str,
    model: PretrainedConfig,
    batch: int,
    layouts: list[Layout] | None = None,
    *,
    length: int = 1024,
    ranks: int = 1,
    **settings: Any,
) -> Iterator[Measured]:
    """The workload as far as it is measured, after every layout that fits has had its steps.

    `name` is the model's, `batch` in sequences per rank; `settings` are further fields of the config.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = bench_config(model, Path(folder), batch, length=length, ranks=ranks, **settings)
        with launch_tuned(config) as (run, tuner):
            policy, chosen = tuner.policy, run.layout
            workload, compiled = policy.workload, bool(run.config.compile)
            layouts = layouts or sweep(workload.layers, workload.ranks, compiled)
            layouts = [chosen, *(other for other in layouts if other != chosen)]
            layouts = [layout for layout in layouts if fits(under(policy.plan, layout))]
            found = Measured(
                name,
                batch,
                length,
                torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
                date.today().isoformat(),
                dataclasses.asdict(workload),
                tuner.rates.to_dict(),
                None if policy.rates == tuner.rates else policy.rates.to_dict(),
                [],
                tuning_seconds=policy.records[-1].cost_seconds,
            )
            for layout in layouts:
                begin = switch(run, layout) + WARM_UP
                wait_for_step(run, begin + MEASURED)
                steps = run.metrics().loc[begin : begin + MEASURED - 1]
                default = Layout()
                note = "all defaults" if layout == default else describe(layout, default)
                note = CHOICE if layout == chosen else note
                found.rows.append(
                    {
                        "layout": dataclasses.asdict(layout),
                        "note": note,
                        "measured_seconds": float(steps["step_seconds"].median()),
                        "busy": float(steps["busy"].median()),
                        "update_seconds": float(steps["update_seconds"].median()),
                    }
                )
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m slidedp.bench.predicted", description="Hold the step-time model against real steps."
    )
    parser.add_argument("sizes", choices=QWEN3, nargs="+", metavar="SIZE", help=f"Qwen3: {', '.join(QWEN3)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[16], help="sequences per rank (16)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (1024)")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs (1)")
    parser.add_argument("--host-gib", type=float, help="host memory budget in GiB (what is free)")
    parser.add_argument("--gpu-gib", type=float, help="memory budget of each GPU in GiB (all)")
    parser.add_argument("--json", type=Path, help="also write what is measured to this file")
    asked = parser.parse_args()
    kept: list[Measured] = []
    for size in asked.sizes:
        for batch in asked.batch:
            run = measure(
                f"Qwen3-{size}",
                qwen3(size),
                batch,
                length=asked.length,
                ranks=asked.ranks,
                host_memory_budget=asked.host_gib,
                gpu_memory_budget=asked.gpu_gib,
            )
            for found in run:
                *_, row = predictions(found)
                error = row["predicted_seconds"] / row["measured_seconds"] - 1
                print(
                    f"Qwen3-{size} {asked.ranks} x {batch:<3} measured {row['measured_seconds']:7.3f} s "
                    f"predicted {row['predicted_seconds']:7.3f} s {error:+6.1%}  {row['note']}",
                    flush=True,
                )
                if asked.json:
                    write(asked.json, [*kept, found])
            kept.append(found)
            print(
                {name: round(value, 4) for name, value in accuracy([*predictions(found)]).items()},
                f"tuning cost {found.tuning_seconds:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
