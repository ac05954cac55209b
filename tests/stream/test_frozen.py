"""Backward ends at the first unit that is trained: below it, nothing is kept, brought again or computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from random import Random

import numpy as np
import pytest

from slidedp import Layout
from slidedp.layout import SCHEDULES
from slidedp.model.families import flops_per_token, load_config, skeleton
from slidedp.model.loss import linear_cross_entropy
from slidedp.model.units import lowest_trained, units_of
from slidedp.policy.workload import workload_of
from slidedp.preflight import plan
from slidedp.stream import step
from tests.pool import pool, replaced
from tests.stream.cases import LAYERS, ROUTES, config, expected, some_layout
from tests.stream.test_parity import assert_parity

FREEZE = {
    1: ("embed",),
    3: ("embed", "layers.[01]"),
    4: ("embed", "layers.[0-2]", "layers.4"),
    LAYERS + 1: ("embed", "layers.*"),
}
"""Patterns by the first unit that is trained."""


def frozen(layout: Layout, lowest: int, **settings):
    run = config(layout, **settings)
    return replace(run, optimizer=replace(run.optimizer, freeze=FREEZE[lowest]))


@pytest.mark.parametrize("lowest", FREEZE)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_above_trains_as_ever(tied, lowest):
    """Under five layouts of one run, of which three update on the GPUs."""
    random, schedule = Random(10 * lowest + tied), SCHEDULES[(lowest + tied) % 2]
    layouts = [some_layout(random, ROUTES[i % 9], schedule=schedule) for i in (0, 1, 4, 7, 4)]
    run = frozen(layouts[0], lowest, tied=tied, steps=15)
    outcome = pool(2).run(run, layouts={3 * i: layout for i, layout in enumerate(layouts) if i})
    assert lowest_trained(outcome.units) == lowest
    assert_parity(outcome, run)


def test_the_balance_of_experts_counts_every_layer():
    """The routers of layers that have no backward too."""
    layout = some_layout(Random(3), ROUTES[4], mlp_tile_tokens=0)
    run = replace(frozen(layout, 3, kind="qwen3_moe", tied=False, steps=8), router_aux_loss_coef=0.3)
    outcome = pool(2).run(run)
    assert_parity(outcome, run)
    balances = [event["router_loss"] for event in outcome.steps if event["rank"] == 0]
    np.testing.assert_allclose(balances, expected(run).balances, rtol=1e-5)


@pytest.mark.parametrize("mode", ["keep", "offload", "spill"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_nothing_happens_below(mode, pieces):
    layout = Layout(window=2, activations=mode, vocabulary_pieces=pieces)
    outcome = pool(2).run(frozen(layout, 3, steps=3))
    (timeline, *_) = (event["timeline"] for event in outcome.steps if event["step"] == 1)
    phases: dict[str, list[str]] = {}
    for track, unit, phase, *_ in timeline:
        if not phase.startswith("wait"):
            phases.setdefault(unit, []).append(f"{track} {phase}")
    for unit in ("layers.0", "layers.1"):
        assert sorted(phases[unit]) == ["compute forward", "deliver deliver"]
    assert {"compute forward", "deliver deliver"} == {*phases["embed"]} - {"compute head"}
    for unit in ("layers.2", "layers.3", "layers.4"):
        assert {"compute backward", "reduce reduce"} <= {*phases[unit]}


@contextmanager
def recording_losses(index: int | None) -> Iterator[list[bool]]:
    """Whether each loss of this process is asked for the gradient of the output matrix."""
    asked: list[bool] = []

    def loss(hidden, weight, targets, scale, weight_gradient, softmax):
        asked.append(weight_gradient is not None)
        return linear_cross_entropy(hidden, weight, targets, scale, weight_gradient, softmax)

    with replaced(step, "linear_cross_entropy", loss):
        yield asked


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("freeze", ["embed", "head"])
def test_a_matrix_that_is_not_trained_gets_no_gradient(tied, freeze):
    run = config(Layout(), tied=tied, steps=3)
    run = replace(run, optimizer=replace(run.optimizer, freeze=(freeze,)))
    outcome = pool(2).run(run, patch=f"{__name__}.recording_losses")
    assert_parity(outcome, run)
    trained = freeze != ("embed" if tied else "head")
    assert outcome.recorded[0] == [trained] * 3
    planned = plan(replace(run, ranks=2))
    matrix, w = planned.model.vocab_size * planned.model.hidden_size, workload_of(planned)
    assert w.matrix_trained == trained and w.head_flops == (6 if trained else 4) * w.tokens * matrix


@pytest.mark.parametrize(
    ("mode", "where", "name"),
    [
        ("keep", "device", "kept intermediates (estimate)"),
        ("recompute", "device", "kept layer inputs"),
        ("offload", "host", "offloaded layer inputs"),
        ("spill", "host", "spilled intermediates (estimate)"),
    ],
)
def test_plans_count_what_backward_reaches(mode, where, name):
    whole, part = (plan(frozen(Layout(activations=mode), lowest, ranks=2)) for lowest in (1, 3))
    before, now = getattr(whole, where)[name], getattr(part, where)[name]
    assert now == pytest.approx(before * (LAYERS - 2) / LAYERS)
    assert workload_of(part).frozen == (0, 1, 2) and workload_of(part).lowest == 3


@pytest.mark.parametrize("tied", [True, False])
def test_floating_point_operations_are_those_that_are_done(tied):
    """In shares of 2 per parameter: forward, the way down to what is trained, and weight gradients."""
    model = skeleton(load_config(config(Layout(), tied=tied).model))
    units, length = units_of(model), 8.0

    def of(index: int) -> int:
        return 0 if index == 0 and not tied else units[index].parameter_count

    layers = range(1, LAYERS + 1)
    pairs = 4 * model.config.num_attention_heads * model.config.head_dim * length / 2
    for lowest, freeze in ((0, ()), *FREEZE.items()):
        reached = [i for i in range(LAYERS + 2) if i >= lowest or i == 0]  # of tied weights, as a head
        trained = [i for i in reached if not any(fnmatch(units[i].name, pattern) for pattern in freeze)]
        shares = sum(map(of, range(LAYERS + 2))) + sum(map(of, reached)) + sum(map(of, trained))
        attention = LAYERS + 2 * sum(i >= lowest for i in layers)
        assert flops_per_token(model, length, freeze) == 2 * shares + pairs * attention
