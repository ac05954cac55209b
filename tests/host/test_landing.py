"""Landing zones: where gradients lie, and whose gradient was there before."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.host.landing import RING, Landing, LandingPlan
from slidedp.host.memory import PAGE
from slidedp.layout import LANDINGS, REDUCTIONS, SCHEDULES, Layout
from slidedp.model.units import Parameter, Unit, aligned


def units_of_sizes(sizes):
    """Units with one matrix each."""
    return tuple(
        Unit(i, f"unit{i}", (Parameter(f"p{i}", "weight", (n, 1), 0),), aligned(n), aligned(n))
        for i, n in enumerate(sizes)
    )


@st.composite
def shapes(draw):
    """(units, ranks, bytes of an element)."""
    layers = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 9000), min_size=layers + 2, max_size=layers + 2))
    return units_of_sizes(sizes), draw(st.integers(1, 4)), draw(st.sampled_from((2, 4)))


LAYOUTS = [
    Layout(reduction=reduction, schedule=schedule, landing=landing)
    for reduction, schedule, landing in product(REDUCTIONS, SCHEDULES, LANDINGS)
]


def every_plan(test):
    """Calls `test(plan, ranks, layout)` for each layout and drawn units."""

    @pytest.mark.parametrize("layout", LAYOUTS, ids=lambda at: f"{at.reduction}-{at.schedule}-{at.landing}")
    @settings(max_examples=30)
    @given(shapes())
    def over_all(layout, shape):
        units, ranks, itemsize = shape
        test(LandingPlan(units, ranks, layout, itemsize), ranks, layout)

    over_all.__name__ = test.__name__
    return over_all


def spans(plan):
    """(start, stop) of every place of every lane and of the store, by what shares it."""
    found = {}
    for unit in plan.units:
        for lane in range(plan.lanes):
            start = lane * plan.lane_stride + plan.zone(unit)
            old = found.get(("zone", lane, plan.zone(unit)), (start, start))
            found["zone", lane, plan.zone(unit)] = (start, max(old[1], start + unit.numel))
        if plan.stored:
            found["store", unit.index] = (plan.store(unit), plan.store(unit) + unit.numel)
    return sorted(found.values())


@every_plan
def test_places_never_overlap_and_stay_inside(plan, ranks, layout):
    places = spans(plan)
    assert places[0][0] == 0 and places[-1][1] <= plan.numel
    for (_, stop), (start, _) in pairwise(places):
        assert stop <= start
    assert plan.nbytes == plan.numel * plan.itemsize


@every_plan
def test_places_begin_on_pages(plan, ranks, layout):
    for start, _ in spans(plan):
        assert start * plan.itemsize % PAGE == 0
    assert plan.nbytes % PAGE == 0


@every_plan
def test_pieces_tile_the_lanes_and_each_holds_whole_zones(plan, ranks, layout):
    """What is registered with CUDA: no gap, no overlap, and no DMA across two registrations."""
    pieces = plan.pieces()
    assert pieces[0][0] == 0 and pieces[-1][1] == plan.lanes * plan.lane_stride
    assert all(stop == start for (_, stop), (start, _) in pairwise(pieces))
    assert all(start * plan.itemsize % PAGE == 0 for start, _ in pieces)
    for unit in plan.units:
        for lane in range(plan.lanes):
            first = lane * plan.lane_stride + plan.zone(unit)
            assert any(start <= first and first + unit.numel <= stop for start, stop in pieces)


@every_plan
def test_lanes_and_store_follow_from_route_and_schedule(plan, ranks, layout):
    assert plan.lanes == (ranks if layout.reduction == "cpu" else 1)
    assert plan.stored == (layout.schedule == "in_forward" and plan.lanes > 1)
    places = {plan.store(unit) for unit in plan.units}
    if layout.schedule == "in_forward":  # all gradients wait at once, so all have their own place
        assert len(places) == len(plan.units)
    elif layout.landing == "full":
        assert len({plan.zone(unit) for unit in plan.units}) == len(plan.units)
    else:  # two layers share a zone only where there are more than the ring holds
        assert len({plan.zone(unit) for unit in plan.units}) == min(len(plan.units), RING + 2)


@every_plan
def test_previous_is_what_a_simulation_finds(plan, ranks, layout):
    """Three steps of landing, head first, embed last."""
    content = {}
    for step in range(3):
        for unit in reversed(plan.units):
            before = content.get(plan.zone(unit))
            found = plan.previous(unit, step)
            if before is None:
                assert found[1] < 0  # Gates counts a gradient before the first step as consumed
            else:
                assert found == before
            content[plan.zone(unit)] = (unit.index, step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_of_a_landing_are_its_plan(dtype):
    units = units_of_sizes([100, 5000, 3000, 70])
    plan = LandingPlan(units, 3, Layout(reduction="cpu"), dtype.itemsize)
    landing = Landing(plan, dtype)
    opened = Landing(plan, dtype, landing.handle)
    try:
        assert landing.tensor.numel() == plan.numel and not landing.tensor.any()
        for lane in range(3):
            for unit in units:
                landing.lane(unit, lane).fill_(10 * lane + unit.index)
        for lane in range(3):
            for unit in units:
                other = opened.lane(unit, lane)
                assert other.numel() == unit.numel and other.eq(10 * lane + unit.index).all()
    finally:
        opened.close()
        landing.close()
