"""Measured runs of SlideDP: under given layouts, and under the one that the policy chooses."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from slidedp.bench.table import WARM_UP, speed
from slidedp.compare import switch
from slidedp.config import Config, Data, Optimizer
from slidedp.data.samples import write_samples
from slidedp.host.memory import anonymous_bytes
from slidedp.layout import Layout
from slidedp.memory_plan import GIB, PROCESSES
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.probe import probe
from slidedp.policy.tune import Tuner
from slidedp.preflight import plan, with_layout
from slidedp.session import Run, launch

FOREVER = 1_000_000
"""Steps of a run that is stopped when every layout has had its share."""


def random_samples(folder: Path, count: int, length: int, vocabulary: int) -> None:
    """Uniform random tokens, each one the target of the one before; no padding."""
    stream = np.random.default_rng(0).integers(0, vocabulary, (count, length + 1), dtype=np.int32)
    write_samples(folder, stream[:, :-1], stream[:, 1:])


def bench_config(
    model: PretrainedConfig, folder: Path, batch: int, *, length: int, ranks: int, **settings: Any
) -> Config:
    """A run of `batch` sequences per rank that repeats one global batch of random tokens, which this writes
    to `folder`, until it is stopped; `settings` are further fields of the config. On random weights, more
    positions than the model has learnt are no loss."""
    random_samples(folder, batch * ranks, length, model.vocab_size)
    positions = length if length > model.max_position_embeddings else None
    return Config(
        model=model,
        data=Data(path=str(folder)),
        sequence_length=length,
        batch_size=batch * ranks,
        steps=FOREVER,
        ranks=ranks,
        max_position_embeddings=positions,
        optimizer=Optimizer(lr=1e-5, clip_norm=None),
        run_folder=str(folder / "run"),
        **settings,
    )


def run_layouts(
    model: PretrainedConfig,
    batch: int,
    layouts: list[Layout],
    *,
    length: int = 1024,
    steps: int = 20,
    ranks: int = 1,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """Trains `model` with `batch` sequences per rank, `steps` steps under each layout in turn, in
    one run that repeats one global batch; yields a measurement as soon as a layout has had its steps."""
    with tempfile.TemporaryDirectory() as name:
        settings |= {"length": length, "ranks": ranks, "layout": layouts[0]}
        config = bench_config(model, Path(name), batch, **settings)
        launched = time.monotonic()
        with launch(config) as run:
            wait_for_step(run, 1)
            passed = time.monotonic() - launched
            print(f"{batch} sequences per rank: first step {passed:.0f} s after launch", file=sys.stderr)
            begin = 0
            for i, layout in enumerate(layouts):
                wait_for_step(run, begin + steps)
                end = begin + steps
                if i + 1 < len(layouts):
                    begin = switch(run, layouts[i + 1])
                else:
                    run.stop()
                yield summary(run, layout, batch, end - max(1, steps - WARM_UP), end)


def run_chosen(
    model: PretrainedConfig,
    batch: int,
    *,
    length: int = 1024,
    steps: int = 20,
    ranks: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """The same under the layout that the run chooses for itself; `tuning_seconds` is what that has cost."""
    with tempfile.TemporaryDirectory() as name:
        config = bench_config(model, Path(name), batch, length=length, ranks=ranks, **settings)
        with launch_tuned(config) as (run, tuner):
            end = run.log.steps_done + steps
            wait_for_step(run, end)
            measured = summary(run, run.layout, batch, end - max(1, steps - WARM_UP), end)
            return measured | {"tuning_seconds": tuner.policy.records[-1].cost_seconds}


@contextmanager
def launch_tuned(config: Config) -> Iterator[tuple[Run, Tuner]]:
    """What `launch` does under `layout="auto"`, but returns when the layout is chosen, and watches for no
    drifts: whoever goes on to other layouts would cause them."""
    planned, begun = plan(config), time.monotonic()
    rates = probe(planned)
    policy = AutoPolicy(planned, rates, spent=time.monotonic() - begun)
    with launch(replace(config, layout=policy.predict())) as run:
        tuner = Tuner(run, policy)
        tuner.tune()
        yield run, tuner


def wait_for_step(run: Run, step: int) -> None:
    """Returns when every rank has reported `step` steps, and the worker their updates."""
    while min(run.log.steps_done, len(run.log.events("update"))) < step:
        run.wait(0.05)


def host_bytes(run: Run, layout: Layout) -> int:
    """Host memory of all processes: the segments that they share, and what each alone held at most."""
    own = {-2: anonymous_bytes()}
    for event in [*run.log.events("step"), *run.log.events("update")]:
        process = event.get("rank", -1)
        own[process] = max(own.get(process, 0), event["anonymous_bytes"])
    there = with_layout(run.plan, layout)
    return there.host_bytes - there.host.get(PROCESSES, 0) + sum(own.values())


def summary(run: Run, layout: Layout, batch: int, first: int, end: int) -> dict[str, Any]:
    """Medians over steps [first, end). A first step follows none: its compute is its time."""
    table = run.metrics().loc[first : end - 1]
    ranks = run.log.ranks()
    ranks = ranks[(ranks["step"] >= first) & (ranks["step"] < end)]
    seconds = table["step_seconds"].fillna(ranks.groupby("step")["compute_seconds"].max())
    return {
        "system": "SlideDP",
        "batch": batch,
        "layout": asdict(layout),
        "steps": end - first,
        **speed(
            median(seconds),
            int(table["targets"].iloc[0]),
            float(run.log.description["flops_per_token"]),
            int(run.config.ranks or 1),
        ),
        "wait_seconds": {c: float(ranks[c].fillna(0).mean()) for c in ranks if c.startswith("wait_")},
        "update_seconds": float(table["update_seconds"].median()),
        "gpu_peak_gib": float(ranks["gpu_peak_gib"].max()),
        "allocator_retries": int(ranks["allocator_retries"].max() - ranks["allocator_retries"].min()),
        "host_gib": host_bytes(run, layout) / GIB,
        "losses": [float(x) for x in table["loss"]],
    }
