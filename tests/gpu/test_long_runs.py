"""What a run on GPUs holds does not grow with its steps."""

import gc
import os
from pathlib import Path

import pytest

from slidedp import Layout, Optimizer, launch
from slidedp.gpus import free_gpu_bytes
from tests.faults.test_long_runs import held
from tests.faults.trials import trials
from tests.launching import DEADLINE, nothing_left, small_config, until

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", trials(ci=1, soak=2))
def test_a_run_on_a_gpu_does_not_grow(tmp_path: Path, seed: int) -> None:
    steps = 400 if seed == 0 else 10_000
    layout = Layout(schedule="in_backward", gpu_updates=5, resident_updates=3, chunk_bytes=6000)
    config = small_config(
        tmp_path,
        device="cuda",
        ranks=1,
        compile=False,
        layout=layout,
        optimizer=Optimizer(lr=1e-3, clip_norm=None),
        run_folder=str(tmp_path / "run"),
    )
    with nothing_left(), launch(config) as run:
        pids = [os.getpid(), *(process.pid for process in run._processes)]
        looks = []
        for part in (steps // 4, steps):
            until(lambda part=part: run.log.steps_done >= part or not run.running, f"{part} steps", 900)
            gc.collect()
            looks.append((held(pids), free_gpu_bytes(1)[0]))
        seconds = run.metrics()["step_seconds"].median()
        run.stop()
        run.wait(DEADLINE)
        retries = run.log.ranks()["allocator_retries"]
    (early, free_then), (late, free) = looks
    growth = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(early, late, strict=True)]
    print(f"{steps} steps of {seconds:.4f} s: descriptors, threads, KiB more than after a quarter: {growth}")
    assert all(descriptors <= 1 and threads <= 0 for descriptors, threads, _ in growth), growth
    assert max(kib for *_, kib in growth[1:]) < 8192, growth
    assert free_then - free < 2**24 and retries.max() == 0
