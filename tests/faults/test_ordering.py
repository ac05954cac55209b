"""Random delays at every hand-over, over many short steps: not one bit of the result changes.

With two ranks in FP32 and no clipping, every layout computes the same bits: a sum of two has no order,
and nothing else that a layout chooses touches a number, but for tiles of tokens and pieces of the
vocabulary. So one undelayed run is the reference of all.
"""

from functools import cache
from random import Random

import pytest

from slidedp.layout import Layout
from tests.faults.trials import trials
from tests.pool import Outcome, pool
from tests.stream.cases import ROUTES, SAME_BITS, config, some_layout

pytestmark = pytest.mark.timeout(1200)


def run(layout: Layout, steps: int, **patch) -> Outcome:
    return pool(2).run(config(layout, steps=steps), **patch)


def result(outcome: Outcome) -> tuple:
    return sorted(outcome.rank_losses().items()), [m.numpy().tobytes() for m in outcome.masters]


@cache
def expected(steps: int) -> tuple:
    return result(run(Layout(delivery="replicated", reduction="cpu", window=5, gradient_slots=3), steps))


@pytest.mark.parametrize("seed", trials(ci=3, soak=80))
def test_random_delays_change_no_bit(seed):
    random = Random(seed)
    schedule = ("in_forward", "in_backward")[seed % 2]
    layout = some_layout(random, ROUTES[4 * seed % 9], schedule=schedule, **SAME_BITS)
    steps = 12 if seed < 3 else 40
    arguments = {"seed": seed, "share": 0.1, "seconds": 0.004}
    outcome = run(layout, steps, patch="tests.stream.shaking.shaken", patch_arguments=arguments)
    assert result(outcome) == expected(steps), layout
    delays = [count for (count,) in outcome.recorded]
    assert min(delays) > steps
    print(f"{steps} steps under {delays} delays: {layout}")
