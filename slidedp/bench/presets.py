"""The comparisons that README reports, by name: what each system runs, at the batch that suits it.

The peers' batches and modes are the best of sweeps on the same GPUs (see docs/performance.md).
"""

from typing import NamedTuple

from slidedp.bench.fsdp2 import Case
from slidedp.config import Layout


class Preset(NamedTuple):
    """One comparison."""

    size: str
    ranks: int
    slidedp: dict[int, list[Layout]]
    """Layouts to measure, by sequences per rank."""
    fsdp2: list[Case]
    zero2: list[int]
    """Batches of ZeRO-2-Offload."""


def _layout(activations: str | tuple[str, ...], gpu_updates: int, **settings: object) -> Layout:
    fields = {"transport": "copy", "schedule": "in_backward", "update_slots": 20} | settings
    return Layout(activations=activations, gpu_updates=gpu_updates, **fields)  # type: ignore[arg-type]


PRESETS = {
    "4b-one-gpu": Preset(
        "4B",
        1,
        {32: [_layout("keep", n, landing="ring") for n in (8, 19)]},
        [Case(16, "none")],
        [32],
    ),
    "8b": Preset(
        "8B",
        2,
        # With every layer kept it took 133 of 140 GiB and 2.10 s, like this 130 and 1.96.
        {24: [_layout(("partial",) * 2 + ("keep",) * 34, 5, update_slots=36)]},
        [Case(12, "none"), Case(16, "0.5")],
        [],
    ),
    "8b-batch-16": Preset(
        "8B",
        2,
        {16: [_layout("keep", n, window=36, update_slots=40) for n in (10, 14)]},
        [Case(16, "0.5")],
        [16],
    ),
    "8b-batch-4": Preset(
        "8B",
        2,
        {4: [_layout("keep", n, window=36, update_slots=60) for n in (12, 18)]},
        [Case(4, "none")],
        [4],
    ),
    "14b": Preset(
        "14B",
        2,
        {32: [_layout("partial", n, landing="ring") for n in (6,)]},
        [Case(24, "full")],
        [],
    ),
}
