"""What a run on GPUs holds does not grow with its steps."""

import gc
import os
import time
from pathlib import Path

import pytest
from transformers import AutoConfig

from slidedp import Layout, Optimizer, launch
from slidedp.gpus import free_gpu_bytes
from tests.faults.test_long_runs import held
from tests.faults.trials import trials
from tests.launching import DEADLINE, nothing_left, small_config, until
from tests.pool import small_model

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", trials(ci=1, soak=2))
def test_a_run_on_a_gpu_does_not_grow(tmp_path: Path, seed: int) -> None:
    steps = 400 if seed == 0 else 10_000
    layout = Layout(schedule="in_backward", activations="keep", gpu_updates=2, resident_updates=1)
    model = AutoConfig.from_pretrained(small_model(tmp_path / "shape"), num_hidden_layers=2)
    model.layer_types = model.layer_types[:2]
    config = small_config(
        tmp_path,
        model=model,
        device="cuda",
        ranks=1,
        compile=False,
        layout=layout,
        optimizer=Optimizer(lr=1e-3, clip_norm=None),
        run_folder=str(tmp_path / "run"),
    )
    with nothing_left(), launch(config) as run:
        pids = [os.getpid(), *(process.pid for process in run._processes)]
        looks, begun = [], time.monotonic()
        for part in range(steps // 4, steps + 1, steps // 20):
            until(lambda part=part: run.log.steps_done >= part or not run.running, f"{part} steps", 900)
            gc.collect()
            looks.append((held(pids), free_gpu_bytes(1)[0]))
            print(f"{part} steps, {time.monotonic() - begun:.0f} s", flush=True)
        run.stop()
        run.wait(DEADLINE)
        retries = run.log.ranks()["allocator_retries"]
    (early, free_then), *_, (late, free) = looks
    growth = [(b[0] - a[0], b[1] - a[1], b[2] - a[2]) for a, b in zip(early, late, strict=True)]
    print(f"{steps} steps: descriptors, threads, KiB more than after a quarter: {growth}")
    assert all(descriptors <= 1 and threads <= 0 for descriptors, threads, _ in growth), growth
    assert max(kib for *_, kib in growth[1:]) < 8192, growth
    assert free_then - free < 2**24 and retries.max() == 0
