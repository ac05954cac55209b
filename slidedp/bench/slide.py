"""One measured case of SlideDP."""

import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from slidedp.bench.shapes import qwen3
from slidedp.config import Config, Data, Layout, Optimizer
from slidedp.data.samples import write_samples
from slidedp.host.memory import anonymous_bytes
from slidedp.preflight import GIB, with_layout
from slidedp.session import Run, launch

WARM_UP = 5
"""Steps left out of the medians: compilation, first collectives, caches."""


def random_samples(folder: Path, count: int, length: int, vocabulary: int) -> None:
    """Uniform random tokens, each one the target of the one before; no padding."""
    stream = np.random.default_rng(0).integers(0, vocabulary, (count, length + 1), dtype=np.int32)
    write_samples(folder, stream[:, :-1], stream[:, 1:])


def run_layouts(
    size: str,
    batch: int,
    layouts: list[Layout],
    *,
    length: int = 1024,
    steps: int = 20,
    ranks: int = 1,
    host_gib: float | None = None,
) -> list[dict[str, Any]]:
    """Trains Qwen3-<size> with `batch` sequences per rank, `steps` steps under each layout in turn, in
    one run that repeats one global batch; returns one measurement per layout."""
    model = qwen3(size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_samples(folder, batch * ranks, length, model.vocab_size)
        config = Config(
            model=model,
            data=Data(path=name),
            sequence_length=length,
            batch_size=batch * ranks,
            steps=steps * len(layouts),
            ranks=ranks,
            layout=layouts[0],
            optimizer=Optimizer(lr=1e-4, clip_norm=None),
            host_memory_budget=host_gib,
            run_folder=str(folder / "run"),
        )
        with launch(config) as run:
            # A layout is asked for while the one before still runs: it takes effect a step or two later.
            for i, layout in enumerate(layouts[1:], 1):
                wait_for_step(run, i * steps - 2)
                run.set_layout(layout)
            run.wait()
            return [summary(run, layout, begin, end) for layout, begin, end in spans(run, layouts)]


def wait_for_step(run: Run, step: int) -> None:
    """Returns when every rank has reported `step` steps."""
    while run.log.steps_done < step:
        run.wait(0.05)


def spans(run: Run, layouts: list[Layout]) -> list[tuple[Layout, int, int]]:
    """(layout, first step, end) of each layout of a run, warm-up steps left out."""
    switched = sorted({event["step"] for event in run.log.events("layout")})
    starts = [0, *switched]
    ends = [*switched, run.config.steps]
    return [
        (layout, start + min(WARM_UP, end - start - 1), end)
        for layout, start, end in zip(layouts, starts, ends, strict=True)
    ]


def host_bytes(run: Run, layout: Layout) -> int:
    """Host memory of all processes: the segments that they share, and what each alone held at most."""
    own = {-2: anonymous_bytes()}
    for event in [*run.log.events("step"), *run.log.events("update")]:
        process = event.get("rank", -1)
        own[process] = max(own.get(process, 0), event["anonymous_bytes"])
    return with_layout(run.plan, layout).host_bytes + sum(own.values())


def summary(run: Run, layout: Layout, first: int, end: int) -> dict[str, Any]:
    """Medians over steps [first, end)."""
    table = run.metrics().loc[first : end - 1]
    ranks = run.log.ranks()
    ranks = ranks[(ranks["step"] >= first) & (ranks["step"] < end)]
    seconds = median(table["step_seconds"])
    tokens = int(table["targets"].iloc[0])
    flops = float(run.log.description["flops_per_token"])
    return {
        "layout": asdict(layout),
        "steps": end - first,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops_per_gpu": tokens / seconds * flops / int(run.config.ranks or 1) / 1e12,
        "wait_seconds": {c: float(ranks[c].fillna(0).mean()) for c in ranks if c.startswith("wait_")},
        "update_seconds": float(table["update_seconds"].median()),
        "gpu_peak_gib": float(ranks["gpu_peak_gib"].max()),
        "host_gib": host_bytes(run, layout) / GIB,
        "losses": [float(x) for x in table["loss"]],
    }
