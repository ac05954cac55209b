"""Checkpoints: what is written is read, to the bit and at one version, or refused; nothing half done."""

import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from slidedp import Checkpoint, CheckpointFailed, Config, ConfigError, Data, Layout, RunFailed, cli, launch
from slidedp.checkpoint import save as saving_module
from slidedp.checkpoint.folder import ASSETS, INDEX, Progress, checkpoints, find
from slidedp.checkpoint.resume import check, check_samples, load, verify
from slidedp.host.messages import Begin, Coefficients, SetLayout, Stop, Written
from slidedp.host.state import HostState, state_bytes
from slidedp.model.units import Parameter, Unit
from slidedp.telemetry import StepReader
from tests.host.test_worker import Bench, make_units
from tests.killing import filled, save, save_and_die, saving
from tests.launching import DEADLINE, nothing_left, small_config, until
from tests.pool import pool
from tests.stream.cases import config as case

SIZES = [(2000, 0), (1500, 70), (1500, 70), (0, 100)]
CONFIG = Config(model="none", data=Data(path="none"))


def arrays(state):
    """All state, to the bit."""
    return [a.tobytes() for unit in state.units for a in state.unit(unit) if a is not None]


def loaded(folder, units, dtype=torch.float32):
    """(progress, all state) of a checkpoint."""
    state = HostState(units, dtype)
    try:
        progress = check(folder, units, CONFIG)
        load(folder, state)
        return progress, arrays(state)
    finally:
        state.close()


# --- the files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 200)), min_size=3, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_back(tmp_path_factory, dtype, sizes, seed):
    """NaNs with payload, infinities, denormals and negative zero among them."""
    folder, units = tmp_path_factory.mktemp("any"), make_units(sizes)
    state = HostState(units, dtype)
    bits = np.random.default_rng(seed)
    for unit in units:
        for array in state.unit(unit)[:3]:
            for p in unit.parameters:
                values = bits.integers(0, 2**32, p.numel, np.uint32)
                array[p.offset : p.offset + p.numel] = values.view(np.float32)
    state.refresh_working()
    event = save(state, 7, folder)
    assert event["error"] is None and event["path"] == str(folder / "step-00000007")
    assert loaded(folder / "step-00000007", units, dtype) == (Progress(7, 6), arrays(state))
    verify(folder / "step-00000007")
    state.close()
    shutil.rmtree(folder)


def test_tensors_are_known_by_their_names(tmp_path):
    """Another version of transformers may declare a layer's parameters in another order."""
    two = [Parameter(f"{name}.weight", name, (600, 1), 0) for name in ("q", "o")]
    orders = []
    for names in (two, two[::-1]):
        parameters = tuple(replace(p, offset=i * 640) for i, p in enumerate(names))
        orders.append((Unit(0, "layers.0", parameters, 1280, 1280),))
    first, second = filled(orders[0], 1), HostState(orders[1], torch.float32)
    first.unit(orders[0][0]).master[:600] *= -1
    assert save(first, 1, tmp_path)["error"] is None
    check(tmp_path / "step-00000001", orders[1], CONFIG)
    load(tmp_path / "step-00000001", second)
    for (unit,), state in zip(orders, (first, second), strict=True):
        for p in unit.parameters:
            signs = {"q": -1, "o": 1}
            assert np.sign(state.unit(unit).master[p.offset + 1]) == signs[p.local], p
    first.close()
    second.close()


def test_a_killed_save_leaves_the_last_good_checkpoint(tmp_path):
    """Killed at every call by which it touches the disk."""
    units = make_units(SIZES)
    old, new = filled(units, 1), filled(units, 2)
    wanted = {1: (Progress(1, 0), arrays(old)), 2: (Progress(2, 1), arrays(new))}
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["slidedp.rank", "slidedp.host.worker", "torch.distributed"])
    ours, theirs = context.Pipe()
    process = context.Process(target=save_and_die, args=(units, tmp_path, theirs))
    process.start()
    theirs.close()
    through, status = ours.recv()
    process.join()
    assert status == 0 and through > 40
    found = []
    for fatal in range(1, through + 1):
        folder = tmp_path / str(fatal)
        last = checkpoints(folder)[-1]
        version = check(last, units, CONFIG).step
        assert loaded(last, units) == wanted[version]
        found.append(version)
        save(new, 3, folder)  # takes away whatever was left
        assert sorted(p.name for p in folder.iterdir()) == ["assets", "step-00000003"]
    # First the old one, from some point on the new one.
    assert found == sorted(found) and found.count(1) > 30 and found.count(2) > 2
    old.close()
    new.close()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """The order that a power cut needs: every file and the folder, then the name, then the parent."""
    synced, units = [], make_units(SIZES)
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (synced.append(("rename", str(b))), rename(a, b)))
    state = filled(units, 1)
    path = Path(save(state, 1, tmp_path)["path"])
    state.close()
    at = synced.index(("rename", str(path)))
    partial = tmp_path / f".{path.name}.partial"
    files = {str(partial / p.relative_to(path)) for p in path.rglob("*")} | {str(partial)}
    assert set(synced[:at]) == files and synced[at - 1] == str(partial)
    assert synced[at + 1] == str(tmp_path)


def test_the_last_ones_are_kept(tmp_path):
    state = filled(make_units(SIZES), 1)
    for step in (3, 5, 9, 7):  # the last one went on from an earlier step
        save(state, step, tmp_path, keep_last=3)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-00000009", "step-00000007"]
    assert len(list(tmp_path.iterdir())) == 4
    save(state, 9, tmp_path, keep_last=3)  # again: takes the place of the old one
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-00000007", "step-00000009"]
    state.close()


# --- what is refused --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    state = filled(make_units(SIZES), 1)
    save(state, 1, folder)
    state.close()
    return folder / "step-00000001"


def test_any_flipped_bit_is_found(good, tmp_path):
    """By checks that allocate nothing, or while it is read."""
    draw = random.Random(0)
    for path in sorted(p for p in good.rglob("*") if p.is_file()):
        for _ in range(6):
            at, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
            folder = tmp_path / "copy"
            shutil.copytree(good, folder)
            content = bytearray(path.read_bytes())
            content[at] ^= bit
            (folder / path.relative_to(good)).write_bytes(content)
            with pytest.raises(ConfigError) as refusal:
                verify(folder)
            assert "\n" not in str(refusal.value)
            if ASSETS not in path.parts:
                with pytest.raises(ConfigError):
                    loaded(folder, make_units(SIZES))
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["unit1.safetensors", INDEX])
def test_a_truncated_or_missing_file_is_named_before_anything_is_allocated(good, tmp_path, name):
    shutil.copytree(good, tmp_path / "step-00000002")
    shutil.copytree(good, tmp_path / "step-00000001")
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=f"{name}: .* damaged: take step-00000001 beside it"):
        check(path.parent, make_units(SIZES), CONFIG)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}: "):
        check(path.parent, make_units(SIZES), CONFIG)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (SIZES[:3], "only the checkpoint has unit3.safetensors"),
        ([*SIZES, (0, 100)], "only the model has unit4.safetensors"),
        ([SIZES[0], (1500, 71), *SIZES[2:]], r"master.1.n is \[70\], the model needs \[71\]"),
        ([SIZES[0], (1500, 0), *SIZES[2:]], "master.1.n has no place in the model"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(good, sizes, message):
    with pytest.raises(ConfigError, match=f"{message}.*: the checkpoint is of another model"):
        check(good, make_units(sizes), CONFIG)


def test_settings_that_decide_the_data_must_be_the_same(good):
    for name, value in (("seed", 3), ("batch_size", 4), ("sequence_length", 8)):
        with pytest.raises(ConfigError, match=f"{name}={value}: .* set {name}="):
            check(good, make_units(SIZES), replace(CONFIG, **{name: value}))
    with pytest.raises(ConfigError, match="steps=1: the checkpoint has done 1 already"):
        check(good, make_units(SIZES), replace(CONFIG, steps=1))
    check_samples(good, 9)
    with pytest.raises(ConfigError, match="8 samples, the checkpoint was written with 9"):
        check_samples(good, 8)


def test_what_holds_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for resume in ("none", tmp_path):
        with pytest.raises(ConfigError, match="no checkpoint there"):
            find(resume, None)
    for run_folder in (None, "run"):
        with pytest.raises(ConfigError, match=f"no checkpoint in {run_folder or 'runs'}"):
            find("latest", run_folder)


def test_latest_is_the_last_written_of_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = filled(make_units(SIZES), 1)
    for run, step in (("a", 4), ("b", 9), ("a", 6)):
        folder = tmp_path / "runs" / run / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        save(state, step, folder)
    state.close()
    a, b = (tmp_path / "runs" / run / "checkpoints" for run in "ab")
    assert find("latest", None) == find("runs/a", None) == a / "step-00000006"
    assert find("latest", "runs/b") == find("runs/b/checkpoints/step-00000009", None) == b / "step-00000009"


def test_loading_takes_no_memory_beside_the_state(tmp_path):
    """So that a machine which could train can resume."""
    unit = Unit(0, "large", (Parameter("w", "w", (5000, 1000), 0),), 5_000_000, 5_000_000)
    with nothing_left():
        state = filled((unit,), 1)
        save(state, 1, tmp_path)
        state.close()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        before = _high_water()
        state = HostState((unit,), torch.float32)
        load(tmp_path / "step-00000001", state)
        assert _high_water() - before < 1.1 * state_bytes((unit,), torch.float32)
        state.close()


def _high_water():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")))


# --- one version ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_an_update_waits_for_the_shard_of_its_unit(tmp_path, monkeypatch, schedule):
    """Two shards are not written before the next step tries to update them."""
    made = Bench(Layout(schedule=schedule, chunk_bytes=4096), saving=saving(tmp_path))
    open_, write = threading.Event(), saving_module.write_shard

    def late(file, state, unit):
        if unit.index in (1, 2):
            assert open_.wait(DEADLINE)
        return write(file, state, unit)

    monkeypatch.setattr(saving_module, "write_shard", late)
    made.start(0)
    made.land_all(0, made.gradients())
    version_1 = made.snapshot()
    made.worker.checkpoints.request(5)
    made.worker.checkpoints.boundary(made.worker.progress, made.units)
    snapshot = made.worker.checkpoints.snapshot
    gradients = made.gradients()
    made.start(1)
    step = threading.Thread(target=made.land_all, args=(1, gradients), daemon=True)
    step.start()
    until(lambda: snapshot.waiting or not step.is_alive(), "the step waits or ends")
    open_.set()
    step.join(DEADLINE)
    snapshot.join()
    assert made.snapshot() != version_1
    event = made.reports[-1] if made.reports[-1]["kind"] == "checkpoint" else made.reports[-2]
    assert (event["step"], event["error"], event["requests"]) == (1, None, [5])
    assert loaded(tmp_path / "step-00000001", made.units) == (Progress(1, 1), version_1)
    made.close()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(schedule="in_forward", reduction="cpu"),
        Layout(schedule="in_forward", gpu_updates=4, chunk_bytes=6000),
        Layout(schedule="in_backward", gpu_updates=2, chunk_bytes=6000),
        Layout(schedule="in_backward", gpu_updates=4, resident_updates=3, chunk_bytes=6000),
    ],
    ids=lambda layout: f"{layout.schedule}-{layout.gpu_updates}",
)
def test_a_snapshot_is_what_a_run_that_stopped_there_holds(tmp_path, layout):
    every = Checkpoint(every_steps=3, keep_last=9)
    settings = case(layout, steps=8, checkpoint=every, compute_dtype="bfloat16")
    settings = replace(settings, optimizer=replace(settings.optimizer, lr_schedule="constant"))
    slow = {"patch": "tests.stream.patches.apply", "patch_arguments": {"names": ("slow checkpoint",)}}
    whole = pool(2).run(settings, folder=tmp_path / "whole", **slow)
    steps = [event["step"] for event in whole.checkpoints]
    assert steps[0] == 3 and len(steps) == 2  # the second is 6, or later if the first took its time
    for step in steps:
        stop = replace(settings, steps=step, checkpoint=Checkpoint(every_steps=step))
        first = pool(2).run(stop, folder=tmp_path / str(step))
        names = {f.name for f in (tmp_path / "whole" / f"step-{step:08}").glob("*.safetensors")}
        assert len(names) == 7
        for name in names:
            stopped = tmp_path / str(step) / f"step-{step:08}" / name
            assert (tmp_path / "whole" / f"step-{step:08}" / name).read_bytes() == stopped.read_bytes()
        assert first.losses() == whole.losses()[:step]


def test_state_that_stays_on_gpus_is_saved_by_a_step_that_writes_it(tmp_path):
    """A request that comes too late for a step's writing waits for the next step's."""
    stays = Layout(schedule="in_backward", gpu_updates=4, resident_updates=4)
    made = Bench(stays, dtype="bfloat16", saving=saving(tmp_path))

    def stored(step):
        if step != 2:
            made.start(step)
        said = [m.store for m in made.said() if isinstance(m, Coefficients)]
        if step == 1:
            made.worker.checkpoints.request(5)
            made.start(2)  # ranks run ahead; what they are told of this step may not change
            said += [m.store for m in made.said() if isinstance(m, Coefficients)]
        for unit in made.units:
            for _ in made.ranks:
                made.worker.handle(Written(step, unit.index))
        return said

    assert [stored(step) for step in range(4)] == [[False], [False], [True], [False]]
    made.worker.checkpoints.snapshot.join()
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]
    made.close()


@pytest.mark.parametrize("end", ["stop", "last step", "layout"])
def test_a_write_back_waits_for_the_shards_of_the_checkpoint_before(tmp_path, monkeypatch, end):
    """Whatever lets ranks write their state to the host is told when a slow disk has taken it."""
    stays = Layout(schedule="in_backward", gpu_updates=4, resident_updates=4)
    made = Bench(stays, dtype="bfloat16", saving=saving(tmp_path))
    made.worker.config = replace(made.worker.config, steps=3 if end == "last step" else 50)
    open_, write = threading.Event(), saving_module.write_shard

    def late(file, state, unit):
        assert open_.wait(DEADLINE)
        return write(file, state, unit)

    monkeypatch.setattr(saving_module, "write_shard", late)

    def update(step):
        for unit in made.units:
            for _ in made.ranks:
                made.worker.handle(Written(step, unit.index))

    made.worker.checkpoints.request(5)
    made.start(0)
    update(0)  # the checkpoint of step 1 begins
    made.start(1)
    landing = made.new_landing(Layout())
    if end != "last step":
        made.worker.command(Stop() if end == "stop" else SetLayout(Layout(), landing.handle))
    if end == "layout":
        made.start(2)
    update(1)
    made.said()

    def rest():
        if end != "layout":
            made.start(2)
        else:
            update(2)

    thread, snapshot = threading.Thread(target=rest, daemon=True), made.worker.checkpoints.snapshot
    thread.start()
    until(lambda: snapshot.waiting or not thread.is_alive(), "the worker waits or goes on")
    told = [m for m in made.said() if isinstance(m, Begin | Coefficients)]
    assert not any(isinstance(m, Coefficients) or m.stop or m.layout for m in told), told
    open_.set()
    thread.join(DEADLINE)
    told = made.said()
    kind = Coefficients if end == "last step" else Begin
    assert any(isinstance(m, kind) for m in told), told
    snapshot.join()
    landing.close()
    made.close()


@pytest.mark.parametrize("spoiled", [True, False])
def test_a_spoiled_state_never_takes_the_place_of_a_good_one(tmp_path, spoiled):
    made = Bench(Layout(), saving=saving(tmp_path))
    made.start(0)
    made.worker.command(Stop(save=not spoiled))
    made.land_all(0, made.gradients())
    made.worker.checkpoints.finish(made.worker.progress, stopped=True)
    assert [p.name for p in checkpoints(tmp_path)] == ([] if spoiled else ["step-00000001"])
    made.close()


# --- resume -----------------------------------------------------------------------------------------


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
        resource.prlimit(worker, resource.RLIMIT_FSIZE, limits)
        second = run.save()
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
