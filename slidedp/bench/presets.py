"""The comparisons that README reports, by name: what each system runs, at the batch that suits it.

The peers' batches and modes are the best of sweeps on the same GPUs (see docs/performance.md).
"""

from typing import NamedTuple

from slidedp.bench.fsdp2 import Case
from slidedp.bench.speedup import FIXED
from slidedp.layout import Layout


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


def _resident(activations: str | tuple[str, ...], units: int, **settings: object) -> Layout:
    return _layout(activations, units, resident_updates=units, **settings)


PRESETS = {
    "4b-one-gpu": Preset(
        "4B",
        1,
        {
            8: [_resident("keep", 38), FIXED],
            16: [_resident("keep", 20), FIXED],
            24: [_resident("keep", 6)],
            32: [_resident(("partial",) * 10 + ("keep",) * 26, 6), FIXED],
        },
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
        {16: [_resident("keep", 18, window=36), _resident("keep", 24)]},
        [Case(16, "0.5")],
        [16],
    ),
    "8b-batch-4": Preset(
        "8B",
        2,
        {4: [_resident("keep", 38, window=36, chunk_bytes=mib * 2**20) for mib in (64, 512)]},
        [Case(4, "none")],
        [4],
    ),
    "14b": Preset(
        "14B",
        2,
        {16: [_resident("partial", 16)], 24: [_resident("partial", 8)]},
        [Case(24, "full")],
        [],
    ),
}
