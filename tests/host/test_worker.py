"""The optimizer worker alone, in this process: what it waits for, what it computes, what it answers."""

import math
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from slidedp.checkpoint.folder import Progress
from slidedp.checkpoint.save import Saving
from slidedp.config import Config, Data, Optimizer
from slidedp.host import worker as worker_module
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.messages import (
    Begin,
    Consumed,
    Finished,
    Landed,
    Profile,
    Published,
    SetLayout,
    Started,
    Stop,
)
from slidedp.host.state import HostState
from slidedp.host.worker import OptimizerWorker, run_worker
from slidedp.layout import Layout
from slidedp.model.units import Parameter, Unit, chunks

RANKS = 2
SAVING = Saving(Path("none"), Path("none"), {}, Progress())
# unit -> (matrix elements, norm elements)
SIZES = [(2000, 0), (1500, 70), (1500, 70), (0, 100)]


def make_units(sizes):
    units = []
    for index, (matrix, norm) in enumerate(sizes):
        first = -(-matrix // 64) * 64
        parameters = []
        if matrix:
            parameters.append(Parameter(f"{index}.w", "w", (matrix, 1), 0))
        if norm:
            parameters.append(Parameter(f"{index}.n", "n", (norm,), first))
        units.append(Unit(index, f"unit{index}", tuple(parameters), first + -(-norm // 64) * 64, first))
    return tuple(units)


class Bench:
    """A worker, the rank ends of its pipes, and the ranks' gradients."""

    def __init__(self, layout, *, dtype="float32", ranks=RANKS, sizes=SIZES, saving=SAVING, **settings):
        self.units = make_units(sizes)
        optimizer = Optimizer(**{"lr": 0.01, "clip_norm": None, **settings})
        self.config = Config(
            model="none",
            data=Data(path="none"),
            optimizer=optimizer,
            layout=layout,
            batch_size=2 * ranks,
            sequence_length=8,
            steps=50,
            ranks=ranks,
            compute_dtype=dtype,
            device="cpu",
        )
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.state = HostState(self.units, self.dtype)
        self.random = torch.Generator().manual_seed(0)
        for unit in self.units:
            for p in unit.parameters:
                p.view(torch.from_numpy(self.state.unit(unit).master)).normal_(generator=self.random)
        self.state.refresh_working()
        pipes = [Pipe() for _ in range(ranks)]
        self.ranks = [ours for ours, _ in pipes]
        self.landing = self.new_landing(layout)
        self.reports = []
        ends = [theirs for _, theirs in pipes]
        self.worker = OptimizerWorker(
            self.config, self.state, layout, self.landing, ends, self.reports.append, saving
        )

    def new_landing(self, layout):
        plan = LandingPlan(self.units, len(self.ranks), layout, self.dtype.itemsize)
        return Landing(plan, self.dtype)

    def close(self):
        self.worker.landing.close()
        self.state.close()

    def snapshot(self):
        """All state, to the bit."""
        states = [self.state.unit(unit) for unit in self.units]
        return [a.tobytes() for state in states for a in state if a is not None]

    def said(self, rank=0):
        """What the worker has told a rank since the last call."""
        messages = []
        while self.ranks[rank].poll(0):
            messages.append(self.ranks[rank].recv())
        return messages

    def start(self, step, targets=(3, 5)):
        for count in targets[: len(self.ranks)]:
            self.worker.handle(Started(step, count))

    def gradients(self, scale=1.0):
        """One flat gradient per unit and rank; padding is zero."""
        found = []
        for unit in self.units:
            ranks = torch.zeros(len(self.ranks), unit.numel)
            for rank in ranks:
                for p in unit.parameters:
                    p.view(rank).normal_(generator=self.random).mul_(scale)
            found.append(ranks)
        return found

    def parts(self, unit, layout=None):
        wanted = layout or self.worker.layout
        return chunks(unit, wanted.chunk_bytes, self.dtype.itemsize, len(self.ranks))

    def land(self, step, unit, chunk, rank, gradient, *, update=True):
        """What `rank` does for one chunk: `gradient` is [ranks, unit.numel]. With `update`, the worker
        then does all that it can."""
        start, stop = self.parts(unit)[chunk]
        landing = self.worker.landing
        squares = 0.0
        if landing.plan.lanes > 1:
            landing.lane(unit, rank)[start:stop] = gradient[rank, start:stop]
        else:
            total = gradient.sum(0)[start:stop]
            half = (stop - start) // 128 * 64  # rank 0 lands the first part, rank 1 the rest
            cut = (0, half, stop - start) if len(self.ranks) == 2 else (0, stop - start)
            first, last = cut[rank], cut[rank + 1]
            landing.lane(unit, 0)[start + first : start + last] = total[first:last]
            squares = float(total[first:last].double().square().sum())
        self.worker.handle(Landed(step, unit.index, chunk, squares))
        while update and self.worker.waiting:
            self.worker.update_one()

    def land_all(self, step, gradients):
        """All chunks in landing order: head first, embed last."""
        for unit in reversed(self.units):
            for chunk in range(len(self.parts(unit))):
                for rank in range(len(self.ranks)):
                    self.land(step, unit, chunk, rank, gradients[unit.index])

    def masters(self):
        return [torch.from_numpy(self.state.unit(unit).master.copy()) for unit in self.units]


@pytest.fixture
def bench():
    made = []

    def make(*arguments, **named):
        made.append(Bench(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


def layout(reduction="gpu", schedule="in_forward", chunk_bytes=4096):
    return Layout(reduction=reduction, schedule=schedule, chunk_bytes=chunk_bytes)


ALL = [(r, s) for r in ("cpu", "gpu") for s in ("in_forward", "in_backward")]


class TorchAdamW:
    """torch.optim.AdamW over the bench's masters, with its groups."""

    def __init__(self, bench):
        settings = bench.config.optimizer
        self.bench, self.settings = bench, settings
        self.parameters = [m.clone().requires_grad_() for m in bench.masters()]
        self.views = [
            [p.view(flat.detach()).clone().requires_grad_() for p in unit.parameters]
            for unit, flat in zip(bench.units, self.parameters, strict=True)
        ]
        flat = [view for views in self.views for view in views]
        groups = [
            {"params": [p for p in flat if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in flat if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.flat = flat
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)

    def step(self, gradients, targets):
        """Returns the norm before clipping."""
        nominal = self.bench.config.batch_size // len(self.bench.ranks) * 8
        for unit, views in zip(self.bench.units, self.views, strict=True):
            total = gradients[unit.index].sum(0) * (nominal / targets)
            for p, view in zip(unit.parameters, views, strict=True):
                view.grad = p.view(total).clone()
        limit = self.settings.clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.flat, limit))
        self.optimizer.step()
        return norm

    def assert_equal(self, state):
        for unit, views in zip(self.bench.units, self.views, strict=True):
            master = torch.from_numpy(state.unit(unit).master)
            for p, view in zip(unit.parameters, views, strict=True):
                torch.testing.assert_close(p.view(master), view.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("reduction", "schedule"), ALL)
def test_updates_are_those_of_torch_on_the_global_mean(bench, reduction, schedule):
    made = bench(layout(reduction, schedule))
    torch_adamw = TorchAdamW(made)
    for step in range(5):
        gradients = made.gradients()
        made.start(step, (3 + step, 5))
        made.land_all(step, gradients)
        norm = torch_adamw.step(gradients, 8 + step)
        report = made.reports[-1]
        assert (report["kind"], report["step"], report["skipped"]) == ("update", step, False)
        if schedule == "in_forward":
            assert report["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    torch_adamw.assert_equal(made.state)


@pytest.mark.parametrize("reduction", ["cpu", "gpu"])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_is_that_of_torch(bench, reduction, share):
    """The limit is below or above every norm of the run."""
    norm = math.sqrt(2 * sum(map(sum, SIZES))) * 16 / 8  # of a sum of two unit normals, rescaled
    made = bench(layout(reduction), clip_norm=share * norm)
    torch_adamw = TorchAdamW(made)
    for step in range(4):
        gradients = made.gradients()
        made.start(step)
        made.land_all(step, gradients)
        assert made.reports[-1]["gradient_norm"] == pytest.approx(torch_adamw.step(gradients, 8), rel=1e-6)
        assert (made.reports[-1]["gradient_norm"] > share * norm) == (share < 1)
    torch_adamw.assert_equal(made.state)


@pytest.mark.parametrize("reduction", ["cpu", "gpu"])
def test_in_forward_changes_nothing_before_the_last_chunk_of_the_last_rank(bench, reduction):
    made = bench(layout(reduction))
    made.start(0)
    gradients, before = made.gradients(), made.snapshot()
    made.said()
    everything = [
        (unit, chunk, rank)
        for unit in reversed(made.units)
        for chunk in range(len(made.parts(unit)))
        for rank in range(RANKS)
    ]
    for unit, chunk, rank in everything[:-1]:
        made.land(0, unit, chunk, rank, gradients[unit.index])
        assert made.snapshot() == before
    assert not [m for m in made.said() if isinstance(m, Published)]
    unit, chunk, rank = everything[-1]
    made.land(0, unit, chunk, rank, gradients[unit.index])
    assert made.snapshot() != before
    # in the order in which the next forward needs them
    assert [m for m in made.said() if isinstance(m, Published)] == [Published(i, 1) for i in range(4)]


@pytest.mark.parametrize("reduction", ["cpu", "gpu"])
def test_in_backward_updates_a_chunk_when_every_rank_has_landed_it(bench, reduction):
    made = bench(layout(reduction, "in_backward"))
    made.start(0)
    made.said()
    gradients = made.gradients()
    for unit in reversed(made.units):
        parts = made.parts(unit)
        for chunk, (start, stop) in enumerate(parts):
            before = made.masters()
            made.land(0, unit, chunk, 0, gradients[unit.index])
            assert all(map(torch.equal, made.masters(), before))  # one rank is not enough
            made.land(0, unit, chunk, 1, gradients[unit.index])
            changed = made.masters()[unit.index] != before[unit.index]
            assert changed[start:stop].any()
            changed[start:stop] = False
            assert not changed.any()  # and nothing but the chunk
            published = [m for m in made.said() if isinstance(m, Published)]
            assert published == ([Published(unit.index, 1)] if chunk == len(parts) - 1 else [])


@pytest.mark.parametrize("reduction", ["cpu", "gpu"])
def test_in_backward_updates_first_what_the_next_forward_needs_first(bench, reduction):
    """Where every layer has a zone of its own."""
    made = bench(layout(reduction, "in_backward"))
    made.start(0)
    made.said()
    gradients = made.gradients()
    for unit in reversed(made.units):
        for chunk in range(len(made.parts(unit))):
            for rank in range(RANKS):
                made.land(0, unit, chunk, rank, gradients[unit.index], update=False)
    assert made.said() == []  # nothing is published that is not updated
    while made.worker.waiting:
        made.worker.update_one()
    assert [m for m in made.said() if isinstance(m, Published)] == [Published(i, 1) for i in range(4)]


def test_in_backward_updates_a_ring_in_landing_order(bench):
    """So that a zone is free before the ring comes round to it."""
    ring = Layout(reduction="cpu", schedule="in_backward", chunk_bytes=4096, landing="ring")
    made = bench(ring, sizes=[SIZES[0], *[SIZES[1]] * 5, SIZES[-1]])
    made.start(0)
    made.said()
    gradients = made.gradients()
    for unit in reversed(made.units[3:]):
        for chunk in range(len(made.parts(unit))):
            for rank in range(RANKS):
                made.land(0, unit, chunk, rank, gradients[unit.index], update=False)
    while made.worker.waiting:
        made.worker.update_one()
    published = [m.unit for m in made.said() if isinstance(m, Published)]
    assert published == [6, 5, 4, 3]


def test_chunks_may_arrive_in_any_order_across_ranks(bench):
    """Rank 1 may be whole units behind."""
    results = []
    for ranks_in_turn in (True, False):
        made = bench(layout("cpu"))
        made.start(0)
        gradients = made.gradients()
        order = [
            (unit, chunk, rank)
            for unit in reversed(made.units)
            for chunk in range(len(made.parts(unit)))
            for rank in range(RANKS)
        ]
        if not ranks_in_turn:
            order.sort(key=lambda item: item[2])
        for unit, chunk, rank in order:
            made.land(0, unit, chunk, rank, gradients[unit.index])
        results.append(made.snapshot())
    assert results[0] == results[1]


@pytest.mark.parametrize("reduction", ["cpu", "gpu"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_skipped_whole(bench, reduction, value):
    made = bench(layout(reduction), clip_norm=1.0)
    gradients, bad = made.gradients(), made.gradients()
    bad[2][1, 700] = value
    made.start(0)
    before = made.snapshot()
    made.land_all(0, bad)
    assert made.snapshot() == before
    assert made.reports[-1]["skipped"]
    assert [m for m in made.said() if isinstance(m, Published)] == [Published(i, 1) for i in range(4)]
    made.start(1)
    made.land_all(1, gradients)
    assert not made.reports[-1]["skipped"]
    # AdamW's own step count has not moved: the same as a run that never saw the bad step
    clean = bench(layout(reduction), clip_norm=1.0)
    clean.start(0)
    clean.land_all(0, gradients)
    assert made.snapshot() == clean.snapshot()


@pytest.mark.parametrize(("reduction", "schedule"), ALL)
def test_bf16_working_copy_is_the_rounded_master(bench, reduction, schedule):
    made = bench(layout(reduction, schedule), dtype="bfloat16")
    made.start(0)
    made.land_all(0, made.gradients())
    for unit in made.units:
        master = torch.from_numpy(made.state.unit(unit).master)
        assert torch.equal(made.state.delivered(unit), master.bfloat16())


@pytest.mark.parametrize(("reduction", "schedule"), ALL)
def test_padding_stays_zero(bench, reduction, schedule):
    made = bench(layout(reduction, schedule), weight_decay=0.5)
    for step in range(3):
        made.start(step)
        made.land_all(step, made.gradients())
    for unit, master in zip(made.units, made.masters(), strict=True):
        for p in unit.parameters:
            p.view(master).zero_()
        assert not master.any()


def test_stored_lanes_are_free_before_the_step_is_over(bench):
    """`cpu` with `in_forward`: the zone may be written again once it is summed into the store."""
    made = bench(layout("cpu"))
    made.start(0)
    gradients = made.gradients()
    made.said()
    head = made.units[-1]
    for chunk in range(len(made.parts(head))):
        for rank in range(RANKS):
            made.land(0, head, chunk, rank, gradients[head.index])
    assert made.said() == [Consumed(head.index, 0)]


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_a_chunk_too_many_or_of_another_step_fails_at_once(bench, schedule):
    made = bench(layout(schedule=schedule))
    made.start(0)
    made.worker.handle(Landed(0, 2, 1, 0.0))
    made.worker.handle(Landed(0, 2, 1, 0.0))
    before = made.snapshot()
    for surplus in (Landed(0, 2, 1, 0.0), Landed(2, 1, 0, 0.0), Landed(-1, 1, 0, 0.0)):
        with pytest.raises(RuntimeError, match=r"of step 0 are collected, of which \d of 2 ranks"):
            made.worker.handle(surplus)
    assert made.snapshot() == before


# --- how a step begins ----------------------------------------------------------------------------


def finish(made, step):
    made.land_all(step, made.gradients())
    return [[m for m in made.said(rank) if isinstance(m, Begin)] for rank in range(RANKS)]


def test_the_first_start_answers_for_the_next_step(bench):
    made = bench(layout())
    made.worker.handle(Started(0, 3))
    assert [made.said(rank) for rank in range(RANKS)] == [[Begin(1)]] * RANKS
    made.worker.handle(Started(0, 5))
    assert made.said() == []


def test_all_ranks_stop_at_the_same_step(bench):
    made = bench(layout())
    made.worker.handle(Started(0, 3))  # the answer for step 1 is out: on with it
    made.worker.command(Stop())
    made.worker.handle(Started(0, 5))
    assert finish(made, 0) == [[Begin(1)]] * RANKS
    made.start(1)
    assert finish(made, 1) == [[Begin(2, stop=True)]] * RANKS


def test_a_new_layout_begins_when_the_old_one_has_published_everything(bench):
    made, new = bench(layout()), layout("cpu", "in_forward", 8192)
    landing = made.new_landing(new)
    made.start(0)
    made.worker.command(SetLayout(new, landing.handle))
    assert finish(made, 0) == [[Begin(1)]] * RANKS  # was promised before
    made.start(1)
    assert made.said() == []  # no answer yet: the layout changes after step 1
    assert finish(made, 1) == [[Begin(2, False, new, landing.handle)]] * RANKS
    gradients, before = made.gradients(), TorchAdamW(made)
    assert before.parameters
    made.start(2)
    state = made.snapshot()
    made.land_all(2, gradients)
    assert made.snapshot() != state and made.reports[-1]["step"] == 2
    landing.close()


@pytest.mark.parametrize("stop_first", [True, False])
def test_a_stop_is_never_overruled_by_a_layout(bench, stop_first):
    made, new = bench(layout()), layout("cpu")
    landing = made.new_landing(new)
    commands = [Stop(), SetLayout(new, landing.handle)]
    for command in commands if stop_first else commands[::-1]:
        made.worker.command(command)
    made.start(0)
    assert finish(made, 0) == [[Begin(1, stop=True)]] * RANKS
    landing.close()


def test_a_stop_after_the_layout_was_accepted_wins(bench):
    made, new = bench(layout()), layout("cpu")
    landing = made.new_landing(new)
    made.worker.command(SetLayout(new, landing.handle))
    made.start(0)  # step 0 ends with a switch
    made.worker.command(Stop())
    assert finish(made, 0) == [[Begin(1, stop=True)]] * RANKS
    landing.close()


def test_a_recording_is_asked_for_once_and_beside_a_new_layout(bench):
    made, new = bench(layout()), layout("cpu")
    landing = made.new_landing(new)
    made.worker.command(SetLayout(new, landing.handle))
    made.worker.command(Profile(2, 0))
    made.start(0)
    assert finish(made, 0) == [[Begin(1, False, new, landing.handle, profile=2)]] * RANKS
    made.start(1)
    assert made.said() == [Begin(2)]
    for step in (1, 2):
        finish(made, step)
        made.start(step + 1)
    finish(made, 3)
    spans = {r["step"]: "spans" in r for r in made.reports if r["kind"] == "update"}
    assert spans == {0: False, 1: True, 2: True, 3: False}
    landing.close()


def test_a_recording_waits_for_its_step(bench):
    made = bench(layout())
    made.worker.command(Profile(1, start=2))
    for step in range(3):
        made.start(step)
        assert made.said() == [Begin(step + 1, profile=int(step + 1 == 2))]
        finish(made, step)


# --- the process ----------------------------------------------------------------------------------


def test_run_worker_ends_when_every_rank_has_finished(bench):
    """Also when one rank's pipe breaks first: the launcher reports that, the worker stays calm."""
    made = bench(layout())
    pipes = [Pipe() for _ in range(RANKS)]
    launcher, theirs = Pipe()
    thread = threading.Thread(
        target=run_worker,
        args=(made.config, made.state.handle, made.landing.handle, SAVING, [t for _, t in pipes], theirs),
        daemon=True,
    )
    thread.start()
    assert launcher.poll(30) and launcher.recv() == {"kind": "ready"}
    for ours, _ in pipes:
        ours.send(Started(0, 1))
    assert pipes[0][0].poll(30) and pipes[0][0].recv() == Begin(1)
    launcher.send(Stop())
    pipes[0][0].send(Finished())
    pipes[0][0].close()
    thread.join(0.3)
    assert thread.is_alive()
    pipes[1][0].send(Finished())
    thread.join(30)
    assert not thread.is_alive()


def test_threads_leave_a_core_to_each_rank(monkeypatch):
    monkeypatch.setattr(worker_module.os, "sched_getaffinity", lambda _: set(range(16)))
    assert [worker_module.worker_threads(ranks) for ranks in (1, 8, 15, 16, 40)] == [15, 8, 1, 1, 1]


def test_sizes_of_these_tests_need_several_chunks():
    made = Bench(layout())
    assert sorted(len(made.parts(unit)) for unit in made.units) == [1, 2, 2, 2]
    made.close()
