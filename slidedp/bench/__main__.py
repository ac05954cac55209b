"""slidedp bench: SlideDP beside its peers on random weights and tokens; one table, one JSON file.

slidedp bench --preset 8b --json 8b.json
slidedp bench --size 8B --ranks 2 --batch 16 --layout '{"schedule": "in_backward"}' --fsdp2 16,0.5
"""

import argparse
import json
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slidedp.bench.fsdp2 import Case, run_fsdp2
from slidedp.bench.presets import PRESETS, Preset
from slidedp.bench.shapes import SIZES, shape, title
from slidedp.bench.slide import random_samples, run_chosen, run_layouts
from slidedp.bench.table import row
from slidedp.bench.zero import run_zero2
from slidedp.layout import Layout

NO_PRESET: dict[str, Any] = {
    "size": "8B", "ranks": 1, "batch": 16, "layout": None, "fsdp2": [], "zero2": [],
}  # fmt: skip
"""Options whose place a preset takes, and what they are where neither is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints each measurement as it comes, and keeps all in the JSON file from the first on."""
    asked = _asked(arguments)
    wanted = PRESETS[asked.preset] if asked.preset else _preset(asked)
    found: list[dict[str, Any]] = []
    for measured in _measure(wanted, asked):
        print(row(title(wanted.size, asked.layers), wanted.ranks, measured), flush=True)
        found.append(measured)
        if asked.json:
            machine = {
                "date": date.today().isoformat(),
                "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
                "torch": torch.__version__,
                "command": _command(sys.argv[1:] if arguments is None else arguments),
            }
            head = {"size": wanted.size, "ranks": wanted.ranks, "length": asked.length, **machine}
            head |= {"layers": asked.layers} if asked.layers else {}
            asked.json.write_text(json.dumps(head | {"measured": found}, indent=1))
    return 0


def _command(arguments: Sequence[str]) -> str:
    """What was asked, without where the answer goes."""
    kept = list(arguments)
    if "--json" in kept:
        at = kept.index("--json")
        del kept[at : at + 2]
    return shlex.join(["slidedp", "bench", *kept])


def _measure(wanted: Preset, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    config, ranks = shape(wanted.size, asked.layers), wanted.ranks
    settings = {
        "length": asked.length,
        "steps": asked.steps,
        "ranks": ranks,
        "host_memory_budget": asked.host_gib,
        "gpu_memory_budget": asked.gpu_gib,
    }
    for batch, layouts in wanted.slidedp.items():
        if asked.auto:
            yield run_chosen(config, batch, **settings)
        if layouts:
            yield from run_layouts(config, batch, layouts, **settings)
    largest = max([case.batch for case in wanted.fsdp2] + wanted.zero2, default=0)
    if not largest:
        return
    with tempfile.TemporaryDirectory() as folder:
        random_samples(Path(folder), largest * ranks, asked.length, config.vocab_size)
        yield from run_fsdp2(config, folder, wanted.fsdp2, steps=asked.steps, ranks=ranks)
        if wanted.zero2 and not (asked.preset and find_spec("deepspeed") is None):  # a preset's, where it is
            yield from run_zero2(config, folder, wanted.zero2, steps=asked.steps, ranks=ranks)


def _preset(asked: argparse.Namespace) -> Preset:
    given = asked.layout or ([] if asked.auto else [{}])
    layouts = {asked.batch: [Layout(**fields) for fields in given]}
    return Preset(asked.size, asked.ranks, layouts, asked.fsdp2, asked.zero2)


def _case(text: str) -> Case:
    batch, _, activations = text.partition(",")
    return Case(int(batch), activations or "none")


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process with one line if it is asked for what contradicts itself."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    given = [f"--{name}" for name in NO_PRESET if getattr(asked, name) is not None]
    if asked.preset and given:
        parser.error(f"--preset {asked.preset} says what is measured: leave out {', '.join(given)}")
    for name, value in NO_PRESET.items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slidedp bench", description="Measure SlideDP and its peers.")
    parser.add_argument("--preset", choices=PRESETS, help="a comparison of README")
    parser.add_argument(
        "--size", choices=SIZES, metavar="SIZE", help=f"Qwen3 or OLMoE: {', '.join(SIZES)} (8B)"
    )
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--ranks", type=int, help="GPUs (1)")
    parser.add_argument("--batch", type=int, help="sequences per rank (16)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (1024)")
    parser.add_argument("--steps", type=int, default=14, help="steps of each setting (14)")
    parser.add_argument(
        "--layout", action="append", type=json.loads, help="JSON of Layout fields; repeat to compare"
    )
    parser.add_argument("--auto", action="store_true", help="also the layout that the run chooses for itself")
    parser.add_argument(
        "--fsdp2",
        action="append",
        type=_case,
        metavar="BATCH,MODE",
        help="also FSDP2; MODE: none, full, or the fraction of activations that the partitioner keeps",
    )
    parser.add_argument("--zero2", action="append", type=int, metavar="BATCH", help="also ZeRO-2-Offload")
    parser.add_argument("--host-gib", type=float, help="host memory budget in GiB (what is free)")
    parser.add_argument("--gpu-gib", type=float, help="memory budget of each GPU in GiB (all)")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
