"""What some families have and others have not: layers of several kinds, scaled embeddings, bent logits."""

from dataclasses import replace
from random import Random

import pytest
import torch

from slidedp.config import Data
from slidedp.host.state import HostState
from slidedp.model.documents import within_window
from slidedp.model.families import flops_per_token, load_config, skeleton
from slidedp.model.load import fill_random
from slidedp.model.loss import linear_cross_entropy, summed_cross_entropy
from slidedp.model.units import units_of
from tests.pool import pool
from tests.stream.cases import ROUTES, config, expected, some_layout
from tests.stream.test_documents import bounded as bounded  # a fixture
from tests.stream.test_evaluation import EVERY, FRACTION, STEPS, assert_evaluated
from tests.stream.test_parity import assert_parity


@pytest.mark.parametrize(("ranks", "tied", "separate"), [(1, False, False), (2, True, True)])
def test_gemma_trains_and_is_evaluated_as_in_transformers(bounded, ranks, tied, separate):
    layout = some_layout(
        Random(ranks), ROUTES[4 * ranks - 1], mlp_tile_tokens=7 * separate, vocabulary_pieces=1 + 2 * separate
    )
    run = config(layout, kind="gemma3_text", tied=tied, clip_norm=1.4, steps=STEPS, eval_every=EVERY)
    data = bounded if separate else run.data.path
    run = replace(run, data=Data(path=data, eval_fraction=FRACTION))
    outcome = pool(ranks).run(run)
    assert_parity(outcome, run)
    assert_evaluated(outcome, run, ranks)
    assert outcome.losses()[0] == pytest.approx(expected(run).losses[0], rel=1e-6)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["granite", "olmo2", "olmo3", "phi3", "smollm3"])
def test_families_train_and_are_evaluated_as_in_transformers(bounded, kind, separate):
    layout = some_layout(
        Random(kind), ROUTES[3], mlp_tile_tokens=7 * separate, vocabulary_pieces=1 + 2 * separate
    )
    run = config(layout, kind=kind, tied=separate, clip_norm=1.4, steps=STEPS, eval_every=EVERY)
    run = replace(run, data=Data(path=bounded if separate else run.data.path, eval_fraction=FRACTION))
    outcome = pool(2).run(run)
    assert_parity(outcome, run)
    assert_evaluated(outcome, run, 2)
    assert outcome.losses()[0] == pytest.approx(expected(run).losses[0], rel=1e-6)


def test_random_weights_are_those_of_transformers():
    shape = load_config(config(some_layout(Random(0), ROUTES[0]), kind="gemma3_text").model)
    state = HostState(units_of(skeleton(shape)), torch.float32)
    try:
        fill_random(state, shape, seed=0)
        units = {unit.name: unit for unit in state.units}
        for name, parameter in [("layers.0", "q_norm"), ("layers.4", "pre_feedforward"), ("head", "norm")]:
            found = next(p for p in units[name].parameters if parameter in p.name)
            assert not state.values(units[name], found, torch.float32).any()  # they count from 1
    finally:
        state.close()


def test_a_window_is_as_wide_as_transformers_has_it():
    seen = within_window(3, 6, torch.device("cpu"))[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [
        [0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5],
    ]  # fmt: skip


def test_attention_costs_what_a_window_lets_through():
    """Counted in the masks, but for the half of a token's own place that a triangle leaves out."""
    shape = load_config(config(some_layout(Random(0), ROUTES[0]), kind="gemma3_text").model)
    heads, kinds = shape.num_attention_heads * shape.head_dim, shape.layer_types
    assert {*kinds} == {"full_attention", "sliding_attention"}
    length = 64 * shape.sliding_window
    everything = torch.ones(length, length, dtype=torch.bool).tril()
    window = within_window(shape.sliding_window, length, torch.device("cpu"))
    seen = {"full_attention": everything, "sliding_attention": window}
    pairs = sum(float(seen[kind].sum()) - length / 2 for kind in kinds)
    model, short = skeleton(shape), shape.sliding_window  # where the window hides nothing
    more = pairs / length - len(kinds) * short / 2
    found = flops_per_token(model, length) - flops_per_token(model, short)
    assert found == pytest.approx(12 * heads * more, rel=0.01)


def test_bent_logits_have_autograds_gradient():
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(0, 50, (9,))
    targets[::4] = -100
    logits = 2.5 * torch.tanh(hidden @ weight.t() / 2.5)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    wanted = torch.autograd.grad(0.25 * loss, [hidden, weight])

    def softmax(logits, targets, scale):
        from slidedp.model.loss import softmax_gradient

        return softmax_gradient(logits, targets, scale, 2.5)

    found_weight = torch.zeros_like(weight)
    with torch.no_grad():
        found, gradient = linear_cross_entropy(hidden, weight, targets, 0.25, found_weight, softmax)
        alone = summed_cross_entropy(hidden, weight, targets, 2.5)
    torch.testing.assert_close([found, alone], [loss.detach()] * 2)
    torch.testing.assert_close([gradient, found_weight], list(wanted), rtol=1e-4, atol=1e-6)
