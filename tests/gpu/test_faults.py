"""Runs on real GPUs that are killed, saved and resumed, or that another program leaves little memory."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slidedp import Config, ConfigError, Data, Layout, Optimizer, RunFailed, launch
from slidedp.bench.shapes import qwen3
from slidedp.bench.slide import random_samples
from slidedp.gpus import free_gpu_bytes
from tests.launching import DEADLINE, nothing_left, small_config, until

pytestmark = pytest.mark.gpu
RANKS = min(2, torch.cuda.device_count())
RESIDENT = Layout(
    schedule="in_backward", transport="copy", gpu_updates=7, resident_updates=5, chunk_bytes=6000
)


def config(folder: Path, **settings: object) -> Config:
    optimizer = Optimizer(lr=1e-2, eps=1e-6, clip_norm=None)
    layout = {"layout": RESIDENT, "optimizer": optimizer, "compile": False}
    return small_config(folder, device="cuda", ranks=RANKS, **layout | settings)


def processes_on_gpus() -> set[int]:
    """As the driver lists them; empty where a container hides them."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return {int(line) for line in told.split() if line.isdecimal()}


@pytest.mark.parametrize("victim", [0, -1], ids=["rank 0", "worker"])
def test_a_killed_process_leaves_no_gpu_memory(tmp_path: Path, victim: int) -> None:
    before = free_gpu_bytes(RANKS)
    with nothing_left(), launch(config(tmp_path)) as run:
        until(lambda: run.log.steps_done > 3, "some steps")
        during = free_gpu_bytes(RANKS)
        ours = {process.pid for process in run._processes}
        os.kill(list(run._processes)[victim].pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match="was ended by SIGKILL"):
            run.wait(DEADLINE)
    assert all(free < was - 2**27 for free, was in zip(during, before, strict=True))  # it would show
    until(
        lambda: all(free > was - 2**26 for free, was in zip(free_gpu_bytes(RANKS), before, strict=True)),
        "the memory is free again",
    )
    assert not processes_on_gpus() & ours


def test_a_killed_run_resumes_from_state_that_was_on_gpus(tmp_path: Path) -> None:
    whole = config(tmp_path, steps=600, run_folder=str(tmp_path / "whole"))
    with launch(whole) as run:
        run.wait()
        expected = run.metrics()["loss"].to_numpy()
    killed = replace(whole, run_folder=str(tmp_path / "killed"))
    with nothing_left(), launch(killed) as run:
        until(lambda: run.log.steps_done > 20, "some steps")
        saved = run.save()
        os.kill(next(iter(run._processes)).pid, signal.SIGKILL)
        with pytest.raises(RunFailed):
            run.wait(DEADLINE)
    assert saved is not None
    step = int(saved.name.removeprefix("step-"))
    with launch(killed, resume="latest") as run:
        run.wait()
        resumed = run.metrics()["loss"].to_numpy()
    np.testing.assert_allclose(resumed[step:], expected[step:], rtol=1e-3)
    # What the host held before anything was written back is the state of step 0.
    assert abs(expected[0] - expected[step]) > 1e-2


LOCKED = """
import pathlib, pickle, resource
from slidedp import launch
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    launch(pickle.loads(pathlib.Path({config!r}).read_bytes())).wait()
"""


def test_a_limit_on_locked_memory_is_no_obstacle_or_named(tmp_path: Path) -> None:
    """Drivers differ in whether they count what they register."""
    kept = tmp_path / "config.pickle"
    kept.write_bytes(pickle.dumps(config(tmp_path, steps=5, run_folder=str(tmp_path / "run"))))
    (tmp_path / "script.py").write_text(LOCKED.format(config=str(kept)))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0 or "raise the limit on locked memory" in done.stderr, done.stderr
    print("exit code under a limit of 64 KiB:", done.returncode)


HOLD = """
import torch
held = torch.empty(torch.cuda.mem_get_info()[0] - {leaves}, dtype=torch.uint8, device="cuda")
print("held", flush=True)
input()
"""


@contextmanager
def another_program(leaves: int) -> Iterator[None]:
    """It holds all but `leaves` bytes of the first GPU."""
    command = [sys.executable, "-c", HOLD.format(leaves=leaves)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        yield
        holder.communicate()


def test_a_gpu_that_another_program_fills(tmp_path: Path) -> None:
    random_samples(tmp_path, 32, 1024, qwen3("0.6B").vocab_size)
    little = Config(
        model=qwen3("0.6B"),
        data=Data(path=str(tmp_path)),
        sequence_length=1024,
        batch_size=2,
        steps=1_000_000,
        ranks=1,
        compile=False,
        layout=Layout(schedule="in_backward", activations="recompute"),
        optimizer=Optimizer(clip_norm=None),
        run_folder=str(tmp_path / "run"),
    )
    much = replace(little, batch_size=32, layout=Layout(schedule="in_backward", activations="keep"))
    with nothing_left(), another_program(leaves=16 * 2**30):
        with pytest.raises(ConfigError, match=r"^not enough GPU memory: a rank .* may take 1[56]\."):
            launch(much)
        with launch(little) as run:
            until(lambda: run.log.steps_done > 3, "some steps")
            with another_program(leaves=2**28):
                done = run.log.steps_done
                with pytest.raises(ConfigError, match=r"^not enough GPU memory: "):
                    run.set_layout(Layout(schedule="in_backward", window=24, gpu_updates=26))
                until(lambda: run.log.steps_done > done + 3, "more steps")
            run.stop()
            run.wait(DEADLINE)
        assert np.isfinite(run.metrics()["loss"]).all()
