"""python -m slidedp.bench.speedup 8B --batch 4 32 --json docs/step_time.json

What choosing a layout gains over a fixed policy: per workload, the step under the fixed layout against
the step under the policy's own choice. Predicted for every machine of `slidedp.policy.machines`, with
host memory assumed to suffice; and measured, from rows that `slidedp.bench.predicted` has written.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from slidedp.bench.measured import CHOICE, predictions, read
from slidedp.bench.shapes import QWEN3, qwen3
from slidedp.bench.table import describe
from slidedp.config import Config, Data, Optimizer
from slidedp.layout import Layout
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.machines import MACHINES, Machine
from slidedp.policy.step_time import predict
from slidedp.policy.workload import workload_of
from slidedp.preflight import plan

FIXED = Layout(delivery="replicated", reduction="cpu", schedule="in_forward", activations="offload")
"""Every rank copies and lands all, the worker sums, every layer's input goes to the host: what fits
anywhere."""
PLENTY = 1e14
"""Bytes of host memory."""


def predicted(size: str, batch: int, machine: Machine, length: int = 1024) -> dict[str, Any]:
    """One row: Qwen3-`size` with `batch` sequences per GPU on a machine, without clipping."""
    config = Config(
        model=qwen3(size),
        data=Data(path="unused"),
        sequence_length=length,
        batch_size=batch * machine.gpus,
        ranks=machine.gpus,
        device="cpu",  # nothing is run or allocated
        compute_dtype="bfloat16",
        compile=True,
        layout=FIXED,
        optimizer=Optimizer(clip_norm=None),
    )
    planned = dataclasses.replace(
        plan(config), device_available=int(machine.device_bytes), host_available=int(PLENTY)
    )
    workload = workload_of(planned)
    rates = machine.rates(workload)
    chosen = AutoPolicy(planned, rates).decide_all()
    fixed = predict(workload, rates, FIXED).step_seconds
    best = predict(workload, rates, chosen)
    return _row(f"Qwen3-{size}", batch, machine.name, fixed, best.step_seconds, chosen) | {
        "binding": best.binding
    }


def measured(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same of rows of `slidedp.bench.measured.predictions`, for each workload that was run under both
    layouts."""
    workloads: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found = workloads.setdefault((row["model"], row["batch"], row["ranks"]), {})
        if row["note"] == CHOICE:
            found["chosen"] = row
        if _is_fixed(row["layout"]):
            found["fixed"] = row
    return [
        _row(
            model,
            batch,
            f"measured, {ranks} GPUs",
            found["fixed"]["measured_seconds"],
            found["chosen"]["measured_seconds"],
            Layout(**found["chosen"]["layout"]),
        )
        | {"binding": found["chosen"]["binding"]}
        for (model, batch, ranks), found in workloads.items()
        if len(found) == 2
    ]


def _is_fixed(fields: dict[str, Any]) -> bool:
    """Whether a layout is the fixed policy in all that makes it one, whatever its buffers."""
    names = ("delivery", "reduction", "schedule", "activations", "gpu_updates")
    return all(fields[name] == getattr(FIXED, name) for name in names)


def _row(model: str, batch: int, machine: str, fixed: float, chosen: float, layout: Layout) -> dict[str, Any]:
    return {
        "model": model,
        "sequences per GPU": batch,
        "machine": machine,
        "fixed, s": fixed,
        "chosen, s": chosen,
        "speed-up": fixed / chosen,
        "layout": describe({"layout": dataclasses.asdict(layout)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m slidedp.bench.speedup", description="What choosing a layout gains."
    )
    parser.add_argument("sizes", choices=QWEN3, nargs="+", metavar="SIZE", help=f"Qwen3: {', '.join(QWEN3)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16], help="sequences per GPU (4 16)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (1024)")
    parser.add_argument("--json", type=Path, help="what slidedp.bench.predicted has measured")
    asked = parser.parse_args()
    rows = [
        predicted(size, batch, machine, asked.length)
        for size in asked.sizes
        for batch in asked.batch
        for machine in MACHINES
    ]
    if asked.json:
        rows += measured(row for found in read(asked.json) for row in predictions(found))
    with pd.option_context("display.width", 250, "display.max_colwidth", None, "display.max_columns", None):
        print(pd.DataFrame(rows).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
