"""Every layout computes the same training: losses, norms and parameters of a plain single process."""

from itertools import product
from random import Random

import numpy as np
import pytest

from slidedp.config import Config
from slidedp.layout import ACTIVATIONS
from tests.pool import Outcome, pool
from tests.stream.cases import CHUNKS, LAYERS, ROUTES, config, expected, samples, some_layout

MODELS = tuple(product(("qwen3", "llama", "qwen2", "mistral"), (True, False)))
CLIP = 1.4
"""Below some norms of these runs and above others (test_the_clipping_limit_is_met_and_missed)."""
SCHEDULES = (("in_forward", CLIP), ("in_forward", None), ("in_backward", None))


def assert_parity(outcome: Outcome, config: Config) -> None:
    """Losses and parameters to 1e-5, gradient norms to a relative 1e-5."""
    want = expected(config)
    assert len(outcome.updates) == config.steps
    assert not any(update["skipped"] for update in outcome.updates)
    np.testing.assert_allclose(outcome.losses(), want.losses, rtol=0, atol=1e-5)
    found = outcome.parameters()
    assert found.keys() == want.parameters.keys()
    for name, parameter in want.parameters.items():
        np.testing.assert_allclose(found[name].numpy(), parameter.numpy(), rtol=0, atol=1e-5, err_msg=name)
    norms = np.array(outcome.norms())
    known = np.isfinite(norms)  # units that update in backward have no global norm
    np.testing.assert_allclose(norms[known], np.array(want.norms)[known], rtol=1e-5)


def single(ranks: int, route: tuple[str, str], case: int, schedule: str, clip: float | None) -> None:
    """30 steps under one layout; what the route leaves open follows from `case`."""
    random = Random(1000 * ranks + case)
    kind, tied = MODELS[case % len(MODELS)]
    layout = some_layout(random, route, schedule=schedule, chunk_bytes=CHUNKS[case % len(CHUNKS)])
    run = config(layout, kind=kind, tied=tied, clip_norm=clip)
    outcome = pool(ranks).run(run)
    assert_parity(outcome, run)
    norms = np.isfinite(outcome.norms())
    assert norms.all() if schedule == "in_forward" else not norms.any()


def switching(
    ranks: int, model: tuple[str, bool], schedules: tuple[str, ...], clip: float | None, seed: int
) -> None:
    """One run that visits all nine routes (under each schedule) and changes everything else too."""
    random = Random(seed)
    wanted = [
        some_layout(random, route, schedule=schedules[i % len(schedules)])
        for i, route in enumerate(random.sample(ROUTES, len(ROUTES)))
    ]
    run = config(wanted[0], kind=model[0], tied=model[1], clip_norm=clip)
    outcome = pool(ranks).run(run, layouts={3 * i: layout for i, layout in enumerate(wanted) if i})
    assert [layout for _, layout in outcome.layouts] == wanted
    assert_parity(outcome, run)


@pytest.mark.parametrize(("ranks", "route"), [*((2, i) for i in range(9)), (3, 3), (3, 4), (3, 8)])
def test_route(ranks, route):
    schedule, clip = SCHEDULES[(route + ranks) % 3]
    single(ranks, ROUTES[route], route + 9 * (ranks - 2), schedule, clip)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_routes_in_one_run(ranks):
    switching(ranks, MODELS[ranks], ("in_forward",), CLIP, seed=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_routes_and_both_schedules_in_one_run(ranks):
    switching(ranks, MODELS[ranks + 3], ("in_forward", "in_backward"), None, seed=10 + ranks)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("route", ROUTES, ids="-".join)
def test_every_route_chunk_and_schedule(route, ranks, chunk, schedule):
    # 36 numbers with case % 4 == chunk, whose models come in turn
    case = chunk + 4 * (ROUTES.index(route) + 9 * SCHEDULES.index(schedule))
    single(ranks, route, case, *schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedules", [(("in_forward",), CLIP), (("in_forward", "in_backward"), None)], ids=str
)
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_model_over_all_routes(ranks, model, schedules):
    switching(ranks, model, *schedules, seed=100 * ranks + MODELS.index(model))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ACTIVATIONS)
@pytest.mark.parametrize("window", range(1, LAYERS + 1))
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_window_and_mode(window, slots, mode):
    random = Random(window * slots)
    layout = some_layout(
        random, ROUTES[(window + slots) % 9], window=window, gradient_slots=slots, activations=mode
    )
    run = config(layout, clip_norm=CLIP, tied=bool(slots % 2))
    assert_parity(pool(2).run(run), run)


def test_the_clipping_limit_is_met_and_missed():
    norms = expected(config(some_layout(Random(0), ROUTES[0]), clip_norm=CLIP)).norms
    assert min(norms) < CLIP < max(norms)


def test_ranks_have_unequal_numbers_of_targets():
    """Else a mean of the ranks' means would pass for the global mean."""
    labels = np.load(f"{samples()}/labels.npy")
    counts = (labels != -100).sum(1)
    assert counts.min() == 0 and counts.max() == labels.shape[1] and len(set(counts)) > 4
