"""State for updates on the GPU comes up behind deliveries, a little at a time: a copy engine is one queue."""

import re
from collections import Counter

import pytest

from slidedp.layout import Layout
from tests.pool import pool
from tests.stream.cases import LAYERS, config

UNITS = LAYERS + 2
ROUNDED = 64 * (LAYERS + 1)


@pytest.mark.parametrize("window", [1, 2, LAYERS])
@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_state_comes_up_as_backward_proceeds(schedule, window):
    layout = Layout(schedule=schedule, window=window, chunk_bytes=4096, gpu_updates=UNITS, update_slots=99)
    outcome = pool(2).run(config(layout, steps=3))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    spans = sorted(timeline, key=lambda span: span[3])
    moved = [(phase, unit) for _, unit, phase, _, _ in spans if phase in ("deliver", "gather", "load")]
    left = Counter(unit for phase, unit in moved if phase == "load")
    numels = {unit.name: unit.numel for unit in outcome.units}
    assert left.keys() == numels.keys()
    again = LAYERS - window  # deliveries in backward
    forward = len(moved) - left.total() - again
    loaded = delivered = 0
    for phase, unit in moved:
        if phase != "load":
            delivered += 1
            continue
        assert delivered >= forward
        left[unit] -= 1
        loaded += numels[unit] * (left[unit] == 0)
        visits = window + 1 + delivered - forward
        assert loaded <= (sum(numels.values()) + ROUNDED) * visits / (LAYERS + 1)
    assert forward == UNITS and not left.total()


def test_a_unit_larger_than_a_share_does_not_come_at_once():
    """Else a delivery stands behind all of a vocabulary, though the next visit waits for it."""
    layout = Layout(schedule="in_backward", window=1, chunk_bytes=2**20, gpu_updates=1, update_slots=1)
    outcome = pool(2).run(config(layout, steps=3))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    spans = sorted(timeline, key=lambda span: span[3])
    moved = "".join(phase[0] for _, _, phase, _, _ in spans if phase in ("deliver", "load"))
    assert re.fullmatch("d+ll(dl)+d*", moved), moved
