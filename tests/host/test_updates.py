"""What the optimizer worker waits for, and what it computes."""

import math

import pytest
import torch

from slidedp.host.messages import (
    Consumed,
    Landed,
    Published,
)
from slidedp.layout import Layout
from tests.host.bench import RANKS, SIZES, Bench, layout

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


def test_sizes_of_these_tests_need_several_chunks():
    made = Bench(layout())
    assert sorted(len(made.parts(unit)) for unit in made.units) == [1, 2, 2, 2]
    made.close()
