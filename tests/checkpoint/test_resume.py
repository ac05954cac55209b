"""A run that goes on is one that never stopped."""

import os
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from slidedp import Checkpoint, CheckpointFailed, ConfigError, Layout, RunFailed, cli, launch
from slidedp.checkpoint.resume import verify
from slidedp.data.samples import Samples, write_samples
from slidedp.steps import StepReader
from tests.checkpoint.contents import arrays
from tests.launching import DEADLINE, nothing_left, small_config, until
from tests.pool import pool
from tests.stream.cases import config as case


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(schedule="in_forward", reduction="cpu"), "float32"),
        (Layout(schedule="in_backward", landing="ring", chunk_bytes=4096), "bfloat16"),
    ],
    ids=["in_forward", "in_backward"],
)
def test_a_resumed_run_is_one_that_never_stopped(tmp_path, layout, dtype):
    clip = None if layout.schedule == "in_backward" else 0.5
    settings = case(layout, steps=9, clip_norm=clip, compute_dtype=dtype)
    whole = pool(2).run(replace(settings, checkpoint=Checkpoint(every_steps=5)), folder=tmp_path)
    resumed = pool(2).run(settings, resume=tmp_path / "step-00000005")
    assert resumed.losses() == whole.losses()[5:]
    assert [e["lr"] for e in resumed.updates] == [e["lr"] for e in whole.updates[5:]]
    for master, wanted in zip(resumed.masters, whole.masters, strict=True):
        assert torch.equal(master.view(torch.int32), wanted.view(torch.int32))
    if dtype == "float32":
        for ranks in (1, 3):
            other = pool(ranks).run(settings, resume=tmp_path / "step-00000005")
            np.testing.assert_allclose(other.losses(), whole.losses()[5:], rtol=2e-5)


def test_a_killed_run_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    """A whole run: a save that the disk refuses, one that it takes, a kill, and a resume."""
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"), checkpoint=Checkpoint(keep_last=1))
    saved = tmp_path / "run" / "checkpoints"
    with nothing_left():
        run = launch(config)
        first = run.save()
        assert list(saved.iterdir()) == [first] and verify(first) is None
        run.set_layout(Layout(window=1))
        run.profile(steps=1)
        until(lambda: len(run.log.events("trace")) == 2, "a recording")
        worker = list(run._processes)[-1].pid
        limits = resource.prlimit(worker, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointFailed, match="File too large"):
            run.save()
        assert list(saved.iterdir()) == [first] and verify(first) is None
        assert "failed: " in run.trouble and run.trouble in capsys.readouterr().err
        resource.prlimit(worker, resource.RLIMIT_FSIZE, limits)
        second = run.save()
        assert run.trouble is None
        assert list(saved.iterdir()) == [second] and run.running
        until(lambda: run._progress.step > check_step(second) + 2, "some steps more")
        os.kill(next(iter(run._processes)).pid, signal.SIGKILL)
        with pytest.raises(RunFailed):
            run.wait(DEADLINE)
        run.close()
    assert [bool(e["error"]) for e in run.log.events("checkpoint")] == [False, True, False]
    with pytest.raises(ConfigError, match="give another folder, or resume='latest' to go on with it"):
        launch(config)
    steps = check_step(second) + 6
    config = replace(config, steps=steps)
    alone = replace(config, run_folder=str(tmp_path / "whole"))
    with pytest.raises(ConfigError, match="holds the metrics of 2 rank"):
        launch(replace(config, ranks=1), resume="latest")
    samples, elsewhere = Samples(config.data.path), tmp_path / "other data"
    write_samples(elsewhere, samples.input_ids, samples.labels[::-1])
    with pytest.raises(ConfigError, match="other tokens, targets or documents"):
        launch(replace(config, data=replace(config.data, path=str(elsewhere))), resume="latest")
    shard, log = second / "layers.2.safetensors", Path(config.run_folder, "events.jsonl")
    whole_shard, events = shard.read_bytes(), log.read_bytes()
    shard.write_bytes(whole_shard[:-9] + bytes([whole_shard[-9] ^ 4]) + whole_shard[-8:])
    with nothing_left(), pytest.raises(ConfigError, match=r"layers\.2\.safetensors: has another CRC-32"):
        launch(config, resume="latest")
    assert log.read_bytes() == events
    shard.write_bytes(whole_shard)
    with launch(config, resume="latest") as resumed, launch(alone) as whole:
        # What the folder holds of before is not taken for what goes on now.
        reader = StepReader(resumed.log)
        reader.new_steps()
        assert reader.memory == resumed.plan.memory()
        resumed.profile(steps=1)
        with pytest.raises(ConfigError, match="a recording is under way"):
            resumed.profile(steps=1)
        resumed.wait(DEADLINE)
        whole.wait(DEADLINE)
        assert resumed.status == "finished" and resumed.log.steps_done == steps
        here, there = resumed.metrics()["loss"], whole.metrics()["loss"]
        assert list(here.index) == list(there.index) and (here == there).all()
        assert arrays(resumed._state) == arrays(whole._state)
        with pytest.raises(ConfigError, match="holds a run already"):
            launch(config, resume=Path(shutil.copytree(second, tmp_path / "elsewhere")))
        last = resumed.save()  # of a run that is over
        assert last.name == f"step-{steps:08}" and resumed.save() == last
        assert cli.main(["export", str(last), str(tmp_path / "out"), "--dtype", "float32"]) == 0
        resumed.export(tmp_path / "own", dtype="float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "own").state_dict()
    assert exported.keys() == own.keys() and all(torch.equal(exported[n], own[n]) for n in own)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in (tmp_path / "own").iterdir()}


def check_step(folder):
    return int(folder.name.removeprefix("step-"))
