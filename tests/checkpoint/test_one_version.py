"""A checkpoint is of one version of the parameters, whatever the disk's pace."""

import itertools
import threading
from dataclasses import replace
from multiprocessing import Pipe

import pytest

from slidedp import Checkpoint, Layout
from slidedp.checkpoint import save as saving_module
from slidedp.checkpoint.folder import Progress, checkpoints
from slidedp.checkpoint.room import Room
from slidedp.checkpoint.save import AHEAD, Checkpointer
from slidedp.checkpoint.source import Source
from slidedp.host.messages import Begin, Coefficients, Finished, SetLayout, Stop, Written
from slidedp.host.worker import serve
from tests.checkpoint.contents import loaded
from tests.host.bench import Bench
from tests.killing import saving
from tests.launching import DEADLINE, until
from tests.pool import pool
from tests.stream.cases import config as case


@pytest.mark.parametrize("pieces", [0, 2])
@pytest.mark.parametrize("spare_bytes", [0, 10**9])
@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_an_update_waits_for_the_shard_of_its_unit_or_copies_it(
    tmp_path, monkeypatch, schedule, spare_bytes, pieces
):
    """For two shards the disk takes no more than some `pieces` before the next step tries to update them.
    With spare memory it goes on, and they are written of what was."""
    made = Bench(Layout(schedule=schedule, chunk_bytes=4096), saving=saving(tmp_path, spare_bytes))
    open_, write = threading.Event(), saving_module.write_shard

    def late(file, unit, source):
        return write(Slow(file) if unit.index in (1, 2) else file, unit, source)

    class Slow:
        def __init__(self, file):
            self.file, self.written = file, itertools.count()
            self.flush = file.flush

        def write(self, piece):
            if next(self.written) == pieces:
                assert open_.wait(DEADLINE)
            self.file.write(piece)

    monkeypatch.setattr(saving_module, "write_shard", late)
    made.start(0)
    made.land_all(0, made.gradients())
    version_1 = made.snapshot()
    made.worker.checkpoints.request(5)
    made.worker.checkpoints.boundary(made.worker.progress)
    snapshot = made.worker.checkpoints.snapshot
    gradients = made.gradients()
    made.start(1)
    step = threading.Thread(target=made.land_all, args=(1, gradients), daemon=True)
    step.start()
    until(lambda: snapshot.waiting or not step.is_alive(), "the step waits or ends")
    assert step.is_alive() == (not spare_bytes)
    open_.set()
    step.join(DEADLINE)
    snapshot.join()
    assert made.snapshot() != version_1
    event = made.reports[-1] if made.reports[-1]["kind"] == "checkpoint" else made.reports[-2]
    assert (event["step"], event["error"], event["requests"]) == (1, None, [5])
    slow = 12 * sum(unit.numel for unit in made.units if unit.index in (1, 2))
    assert event["copied_bytes"] >= slow if spare_bytes else event["copied_bytes"] == 0
    assert loaded(tmp_path / "step-00000001", made.units) == (Progress(1, 1), version_1)
    made.close()


def test_with_nothing_to_update_the_worker_copies_what_will_change(tmp_path, monkeypatch):
    """No shard is written before the run is over; the worker copies all units in the order of their updates,
    and none twice."""
    open_, copied = threading.Event(), []
    copy, write = Source.copy, saving_module.write_shard

    def noted(source, room):
        copied.append(source)
        return copy(source, room)

    def late(*arguments):
        assert open_.wait(DEADLINE)
        return write(*arguments)

    monkeypatch.setattr(Source, "copy", noted)
    monkeypatch.setattr(saving_module, "write_shard", late)
    made = Bench(Layout(schedule="in_backward"), saving=saving(tmp_path, 10**9))
    before = made.snapshot()
    checkpoints = made.worker.checkpoints
    checkpoints.request(5)
    checkpoints.boundary(made.worker.progress)
    ours, theirs = zip(*(Pipe() for _ in made.ranks), strict=True)
    thread = threading.Thread(target=serve, args=(made.worker, list(theirs), Pipe()[0]), daemon=True)
    thread.start()
    until(lambda: not checkpoints.ahead, "all units are copied")
    for connection in ours:
        connection.send(Finished())
    thread.join(DEADLINE)
    snapshot = checkpoints.snapshot
    assert copied == [snapshot._sources[unit.index] for unit in reversed(made.units)]
    made.start(0)
    made.land_all(0, made.gradients())  # waits for nothing
    assert len(copied) == len(made.units) and made.snapshot() != before
    open_.set()
    snapshot.join()
    assert loaded(tmp_path / "step-00000000", made.units) == (Progress(0, 0), before)
    made.close()


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_are_for_what_a_step_changes_on_the_host(dtype, schedule):
    """FP32 ranks deliver the master, so they write it in every step."""
    layout = Layout(schedule=schedule, gpu_updates=3, resident_updates=2)
    made = Bench(layout, dtype=dtype)
    on_gpu, resident = layout.updated_on_gpu(2, frozenset()), layout.resident_on_gpu(2, frozenset())
    changing = made.worker.checkpoints._changing
    stay = resident if dtype == "bfloat16" else frozenset()
    assert len(resident) == 2 and {unit.index for unit in changing} == {0, 1, 2, 3} - stay
    sign = 1 if schedule == "in_forward" else -1
    keys = [(unit.index not in on_gpu, sign * unit.index) for unit in changing]
    assert keys == sorted(keys)  # GPU updates may begin with the step
    made.close()


def test_a_save_begins_when_there_is_memory_for_its_copies(tmp_path, monkeypatch):
    there = threading.Event()
    monkeypatch.setattr(Room, "ready", property(lambda room: there.is_set()))
    made = Bench(Layout(), saving=saving(tmp_path, 10**9))
    checkpoints = made.worker.checkpoints
    assert not checkpoints.begins(1)
    checkpoints.request(5)
    assert not checkpoints.begins(1)
    there.set()
    assert checkpoints.begins(2)
    made.close()


def test_memory_for_a_save_at_a_certain_step_is_taken_ahead(tmp_path, monkeypatch):
    made, taken = Bench(Layout(), saving=saving(tmp_path, 10**9)), []
    monkeypatch.setattr(saving_module, "Room", lambda nbytes: taken.append(nbytes) or Room(nbytes))
    checkpoints = Checkpointer(
        Checkpoint(every_steps=100), made.state, saving(tmp_path, 10**9), made.reports.append
    )
    found = [(step, checkpoints.begins(step), len(taken)) for step in (1, 99 - AHEAD, 100 - AHEAD, 99, 100)]
    assert [(begins, rooms) for _, begins, rooms in found] == [
        (False, 0), (False, 0), (False, 1), (False, 1), (True, 1),
    ]  # fmt: skip
    assert taken[0] == sum(12 * unit.numel for unit in made.units)
    checkpoints.disable()
    checkpoints.finish(Progress(100, 100), stopped=False)
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

    def late(file, unit, source):
        assert open_.wait(DEADLINE)
        return write(file, unit, source)

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


def test_a_stop_told_before_a_checkpoint_begins_still_waits_for_its_shards(tmp_path, monkeypatch):
    """Ranks run ahead: they hear that step 1 is the last while step 0's updates, and with them the
    checkpoint of step 1, are still to come."""
    stays = Layout(schedule="in_backward", gpu_updates=4, resident_updates=4)
    made = Bench(stays, dtype="bfloat16", saving=saving(tmp_path))
    checkpoints, open_, write = made.worker.checkpoints, threading.Event(), saving_module.write_shard

    def late(file, unit, source):
        assert open_.wait(DEADLINE)
        return write(file, unit, source)

    monkeypatch.setattr(saving_module, "write_shard", late)
    checkpoints.request(5)
    made.start(0)
    made.worker.command(Stop())
    made.start(1)
    assert any(isinstance(m, Begin) and m.stop for m in made.said())

    def update():
        for unit in made.units:
            for _ in made.ranks:
                made.worker.handle(Written(0, unit.index))

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    until(
        lambda: (checkpoints.snapshot is not None and checkpoints.snapshot.waiting) or not thread.is_alive(),
        "the worker waits or goes on",
    )
    assert not any(isinstance(m, Coefficients) for m in made.said())
    open_.set()
    thread.join(DEADLINE)
    assert any(isinstance(m, Coefficients) for m in made.said())
    made.close()


def test_memory_for_copies_is_for_the_layout_that_steps_have_now(tmp_path):
    made = Bench(Layout(gpu_updates=4, resident_updates=4), dtype="bfloat16", saving=saving(tmp_path, 10**9))
    checkpoints = made.worker.checkpoints
    checkpoints.request(5)
    assert checkpoints.begins(1) and checkpoints._room.nbytes == 0
    checkpoints.will_change(made.units)
    assert checkpoints.begins(1) and checkpoints._room.nbytes > 0
    made.close()


def test_a_checkpoint_is_reported_whatever_becomes_of_older_ones(tmp_path, monkeypatch):
    made = Bench(Layout(), saving=saving(tmp_path))

    def moved_away(folder, keep_last):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(saving_module, "prune", moved_away)
    made.worker.checkpoints.request(5)
    made.worker.checkpoints.boundary(made.worker.progress)
    made.worker.checkpoints.snapshot.join()
    (event,) = [event for event in made.reports if event["kind"] == "checkpoint"]
    assert event["requests"] == [5] and event["path"] is not None
    made.close()


def test_a_save_that_failed_at_the_last_step_is_tried_again_at_the_end(tmp_path, monkeypatch):
    made = Bench(Layout(), saving=saving(tmp_path))
    checkpoints_, write = made.worker.checkpoints, saving_module.write_shard

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving_module, "write_shard", full)
    checkpoints_.request(5)
    checkpoints_.boundary(made.worker.progress)
    checkpoints_.snapshot.join()
    assert not checkpoints(tmp_path)
    monkeypatch.setattr(saving_module, "write_shard", write)
    checkpoints_.finish(made.worker.progress, stopped=True)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000000"]
    made.close()
