"""What a checkpoint that is written while training goes on costs the steps meanwhile.

python -m slidedp.bench.saves --size 8B --layers 4 --batch 40 --layout '{"schedule": "in_backward"}'

One run on random weights; under each layout some steps, and then a save. Memory for copies is taken before
the save begins: those steps are counted apart.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from slidedp.bench.shapes import SIZES, shape, title
from slidedp.bench.slide import bench_config, wait_for_step
from slidedp.bench.table import WARM_UP
from slidedp.compare import switch
from slidedp.config import Checkpoint
from slidedp.layout import Layout
from slidedp.session import launch

USUAL = 10
"""Steps without a save that those with one are compared with."""


def save_costs(
    model: PretrainedConfig,
    batch: int,
    layouts: list[Layout],
    *,
    length: int = 1024,
    ranks: int = 1,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """One row per layout: mean seconds of a step before, while memory for the copies was taken, and while the
    checkpoint was written, the longest of these, and the checkpoint's event."""
    with tempfile.TemporaryDirectory() as name:
        settings |= {"layout": layouts[0], "checkpoint": Checkpoint(keep_last=1, on_stop=False)}
        config = bench_config(model, Path(name), batch, length=length, ranks=ranks, **settings)
        with launch(config) as run:
            for i, layout in enumerate(layouts):
                begin = switch(run, layout)
                wait_for_step(run, begin + WARM_UP + USUAL)
                asked = run.log.steps_done
                run.save(wait=False)
                while len(run.log.events("checkpoint")) <= i:
                    run.wait(0.01)
                saved = run.log.events("checkpoint")[i]
                end = max(saved["step"], run.log.steps_done)  # the step that ran when all was written
                wait_for_step(run, end + 1)
                steps = run.metrics()["step_seconds"]
                during = steps.loc[saved["step"] : end]
                yield {
                    "layout": layout,
                    "usual_seconds": float(steps.loc[asked - USUAL : asked - 1].mean()),
                    "room_seconds": float(steps.loc[asked : saved["step"] - 1].mean()),
                    "during_seconds": float(during.mean()),
                    "longest_seconds": float(during.max()),
                    "steps": len(during),
                    **{key: saved[key] for key in ("bytes", "seconds", "copied_bytes", "waited_seconds")},
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=40, help="sequences per rank")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument(
        "--layout", action="append", type=json.loads, help="JSON of Layout fields; repeatable"
    )
    asked = parser.parse_args()
    layouts = [Layout(**fields) for fields in asked.layout or [{}]]
    model = shape(asked.size, asked.layers)
    name = title(asked.size, asked.layers)
    for row in save_costs(model, asked.batch, layouts, length=asked.length, ranks=asked.ranks):
        ratio = row["during_seconds"] / row["usual_seconds"]
        print(
            f"{name} {asked.ranks} x {asked.batch}: step {row['usual_seconds']:.3f} s, while memory is taken "
            f"{row['room_seconds']:.3f}, during the save {row['during_seconds']:.3f} ({ratio:.2f} times, "
            f"mean of {row['steps']}), at most {row['longest_seconds']:.3f}; {row['bytes'] / 1e9:.1f} GB in "
            f"{row['seconds']:.1f} s, {row['copied_bytes'] / 1e9:.1f} copied, updates waited "
            f"{row['waited_seconds']:.2f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
