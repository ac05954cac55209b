"""State for updates on the GPU comes up behind deliveries, a little at a time: a copy engine is one queue."""

import math

import pytest

from slidedp.layout import Layout
from tests.pool import pool
from tests.stream.cases import LAYERS, config

UNITS = LAYERS + 2


@pytest.mark.parametrize("window", [1, 2, LAYERS])
@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_state_comes_up_as_backward_proceeds(schedule, window):
    layout = Layout(schedule=schedule, window=window, chunk_bytes=4096, gpu_updates=UNITS, update_slots=99)
    outcome = pool(2).run(config(layout, steps=3))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    spans = sorted(timeline, key=lambda span: span[3])
    moved = [phase for _, _, phase, _, _ in spans if phase in ("deliver", "gather", "load")]
    parts = moved.count("load")
    again = LAYERS - window  # deliveries in backward
    forward = len(moved) - parts - again
    loads = delivered = 0
    for phase in moved:
        loads += phase == "load"
        delivered += phase != "load"
        visits = window + 1 + delivered - forward
        assert loads <= max(0, math.ceil(parts * visits / (LAYERS + 1)) if delivered >= forward else 0)
    assert (forward, loads) == (UNITS, parts) and parts > 2 * UNITS
