"""State for updates on the GPU comes up behind deliveries, a little at a time: a copy engine is one queue."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from transformers import PretrainedConfig

from slidedp.config import Config
from slidedp.layout import Layout
from slidedp.model.families import load_config
from tests.pool import pool
from tests.stream.cases import LAYERS, config

UNITS = LAYERS + 2


def with_vocabulary(run: Config, size: int) -> PretrainedConfig:
    """The run's model with another vocabulary, and random weights."""
    model = load_config(run.model)
    model.vocab_size = size
    return model


ROUNDED = 64 * (LAYERS + 1)


@pytest.mark.parametrize("vocabulary", [97, 1000])
@pytest.mark.parametrize("window", [1, 2, LAYERS])
@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_state_comes_up_as_backward_proceeds(schedule, window, vocabulary):
    """And while the loss is computed, which takes as long as so many layers as have its weights."""
    layout = Layout(schedule=schedule, window=window, chunk_bytes=4096, gpu_updates=UNITS, update_slots=99)
    run = config(layout, steps=3)
    outcome = pool(2).run(replace(run, model=with_vocabulary(run, vocabulary)))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    spans = sorted(timeline, key=lambda span: span[3])
    moved = [(phase, unit) for _, unit, phase, _, _ in spans if phase in ("deliver", "gather", "load")]
    left = Counter(unit for phase, unit in moved if phase == "load")
    numels = {unit.name: unit.numel for unit in outcome.units}
    assert left.keys() == numels.keys()
    head = numels["embed"] // numels["layers.0"]
    assert (head > 3) == (vocabulary == 1000)
    again = LAYERS - window  # deliveries in backward
    forward = len(moved) - left.total() - again
    loaded = delivered = at_once = 0
    for phase, unit in moved:
        if phase != "load":
            delivered += 1
            continue
        assert delivered >= forward
        left[unit] -= 1
        loaded += numels[unit] * (left[unit] == 0)
        shares = window + 1 + head + delivered - forward
        assert loaded <= (sum(numels.values()) + ROUNDED) * shares / (LAYERS + 1 + head)
        at_once = max(at_once, loaded if delivered == forward else 0)
    assert forward == UNITS and not left.total()
    # The first shares hold whole units, and a part of one more.
    first = sum(numels.values()) * min(1, (window + 1 + head) / (LAYERS + 1 + head))
    assert at_once > first - max(numels.values())


def test_a_unit_larger_than_a_share_does_not_come_at_once():
    """Else a delivery stands behind all of a vocabulary, though the next visit waits for it."""
    layout = Layout(schedule="in_backward", window=1, chunk_bytes=2**20, gpu_updates=1, update_slots=1)
    outcome = pool(2).run(config(layout, steps=3))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    spans = sorted(timeline, key=lambda span: span[3])
    moved = "".join(phase[0] for _, _, phase, _, _ in spans if phase in ("deliver", "load"))
    assert re.fullmatch("d+ll(dl)+d*", moved), moved
