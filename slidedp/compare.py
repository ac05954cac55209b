"""Several layouts in turn on one live run: every layout computes the same step, so trying is training."""

import time
from collections.abc import Mapping

import pandas as pd

from slidedp.config import TIMELINE_EVERY
from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.preflight import under
from slidedp.session import Run

SETTLE = 2
"""Steps after a switch that do not count: buffers are new, and a layer may be compiled again."""


def compare_layouts(
    run: Run, layouts: Mapping[str, Layout], steps: int = TIMELINE_EVERY + SETTLE
) -> pd.DataFrame:
    """Trains `steps` steps under each layout, one after another, and returns one row per layout. Blocks.

    Medians over the steps but the first two: step_seconds; tokens_per_second (target tokens);
    compute_seconds, and wait_<cause>: seconds of a step that compute was busy or waited, of the mean
    rank. device_gib: planned memory of one rank's device; gpu_peak_gib: what its allocator reached at most
    (0 on a CPU). first_step; sampled_step: the last of its steps with a timeline (`run.log.timeline`), or -1.

    Raises ConfigError for a layout that does not fit, or if the run ends before all have had their steps.
    """
    if steps <= SETTLE:
        raise ConfigError(f"compare_layouts: steps={steps}: expected at least {SETTLE + 1}")
    rows = {}
    for name, layout in layouts.items():
        first = switch(run, layout)
        _until_step(run, first + steps)
        rows[name] = _row(run, layout, first, first + steps)
    table = pd.DataFrame.from_dict(rows, orient="index")
    waits = [column for column in table if column.startswith("wait_")]
    return table.fillna(dict.fromkeys(waits, 0.0))


def switch(run: Run, layout: Layout) -> int:
    """Sets a layout and waits until it runs: the first step under it, or the next one if it runs already.
    Raises ConfigError where it does not fit, or if the run ends before."""
    if layout == run.layout:
        return run.log.steps_done
    ranks = int(run.config.ranks or 1)
    expected = len(run.log.events("layout")) + ranks
    run.set_layout(layout)
    while len(run.log.events("layout")) < expected:
        _pause(run)
    return int(run.log.events("layout")[-1]["step"])


def _until_step(run: Run, step: int) -> None:
    while run.log.steps_done < step:
        _pause(run)


def _pause(run: Run) -> None:
    if not run.running:
        run.wait()  # raises what it failed of
        raise ConfigError(f"switch: the run is {run.status}; give it more steps")
    time.sleep(0.02)


def _row(run: Run, layout: Layout, first: int, end: int) -> dict[str, float]:
    metrics = run.metrics().loc[first + SETTLE : end - 1]
    ranks = run.log.ranks().query(f"{first + SETTLE} <= step < {end}")
    waits = ranks.filter(like="wait_").fillna(0.0).groupby(ranks["step"]).mean().median()
    waiting = ranks.filter(like="wait_").fillna(0.0).sum(axis=1)
    busy = (ranks["compute_seconds"] - waiting).groupby(ranks["step"]).mean().median()
    sampled = [step for step in run.log.sampled_steps() if first <= step < end]
    return {
        "step_seconds": float(metrics["step_seconds"].median()),
        "tokens_per_second": float(metrics["tokens_per_second"].median()),
        "compute_seconds": float(busy),
        **{str(name): float(seconds) for name, seconds in waits.items() if seconds > 0},
        "device_gib": sum(under(run.plan, layout).device.values()) / 2**30,
        "gpu_peak_gib": float(ranks["gpu_peak_gib"].max()),
        "first_step": first,
        "sampled_step": sampled[-1] if sampled else -1,
    }
