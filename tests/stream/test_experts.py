"""Mixtures of experts: training, loading and export are those of transformers."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig, Qwen3MoeConfig

from slidedp import ConfigError
from slidedp.data.order import Order
from slidedp.data.samples import Samples
from slidedp.host.state import HostState
from slidedp.model.experts import experts_of, tokens_that_count
from slidedp.model.families import flops_per_token, load_config, skeleton
from slidedp.model.load import load_pretrained
from slidedp.model.save import export
from slidedp.model.units import units_of
from tests.pool import pool, small_model
from tests.stream.cases import LAYERS, LENGTH, ROUTES, config, expected, some_layout
from tests.stream.test_parity import assert_parity

KINDS = ("qwen3_moe", "olmoe")


@pytest.mark.parametrize(
    ("kind", "ranks", "route", "coefficient", "passes"),
    [("qwen3_moe", 2, 4, 0.3, 1), ("olmoe", 1, 0, 0.3, 3), ("olmoe", 2, 6, None, 1)],
)
def test_training_is_that_of_one_expert_after_another(kind, ranks, route, coefficient, passes):
    """With the experts' balance as a part of the loss, and without."""
    layout = some_layout(Random(route), ROUTES[route], gpu_updates=0, mlp_tile_tokens=0)
    run = config(layout, kind=kind, tied=kind == "olmoe", clip_norm=1.4, steps=8)
    run = replace(run, router_aux_loss_coef=coefficient, gradient_accumulation=passes)
    outcome = pool(ranks).run(run)
    assert_parity(outcome, run)
    balances = [e["router_loss"] for e in outcome.steps if e["rank"] == 0]
    assert len(balances) == run.steps and not any("router_loss" in e for e in outcome.steps if e["rank"])
    if coefficient is not None:
        np.testing.assert_allclose(balances, expected(run).balances, rtol=1e-5)


def test_tokens_of_experts_are_counted_over_all_ranks():
    run = config(some_layout(Random(0), ROUTES[4], mlp_tile_tokens=0), kind="olmoe", steps=2)
    outcome = pool(2).run(run)
    known = Samples(run.data.path)
    rows = Order(known.count, run.batch_size, run.seed).step(1)
    labels = known.rows(rows)[1]
    behind = sum(max((i + 1 for i in range(LENGTH) if row[i] != -100), default=0) for row in labels)
    first, second = (e for e in outcome.steps if e["rank"] == 0)
    assert "expert_tokens" not in first  # not every step's are reported
    tokens = torch.tensor(second["expert_tokens"])
    assert tokens.shape == (LAYERS, 6) and (tokens.sum(1) == 2 * behind).all()  # two experts a token
    assert second["expert_load"] == pytest.approx(float((tokens.max(1).values * 6 / (2 * behind)).max()))


def test_what_comes_behind_the_last_target_of_a_document_does_not_count():
    x = -100
    labels = torch.tensor([[x, 1, 1, x, 1, x], [x, x, x, x, x, x], [x, 1, x, x, 1, x], [1, x, x, x, x, 1]])
    assert tokens_that_count(labels, None).int().tolist() == [[1] * 5 + [0], [0] * 6, [1] * 5 + [0], [1] * 6]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 0, 1]])
    assert tokens_that_count(labels, positions).int().tolist() == [
        [1, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [1, 0, 0, 0, 1, 1],
    ]


def test_the_balance_counts_as_in_transformers_unless_the_run_says_otherwise():
    model = {"num_hidden_layers": 1, "router_aux_loss_coef": 0.02}
    for output, given, weight in ((False, None, 0), (True, None, 0.02), (True, 0.0, 0), (False, 0.5, 0.5)):
        found = experts_of(OlmoeConfig(**model, output_router_logits=output), given)
        assert found is not None and found.weight == weight
    assert experts_of(LlamaConfig()) is None
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.1: LlamaConfig has no experts"):
        experts_of(LlamaConfig(), 0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_the_model_that_was_loaded(tmp_path, kind, tied):
    model = small_model(tmp_path / "model", kind=kind, tied=tied)
    plan = load_config(model)
    state = HostState(units_of(skeleton(plan)), torch.float32)
    try:
        load_pretrained(state, model)
        export(state, plan, tmp_path / "out", dtype="float32")
    finally:
        state.close()
    ids = torch.arange(24).view(2, 12)
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=ids).logits
        for folder in (model, tmp_path / "out")
    ]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


def test_a_token_costs_the_experts_that_it_goes_to():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    one = {"moe_intermediate_size": 32, "num_experts": 8, "head_dim": 16}
    costs = [
        flops_per_token(skeleton(Qwen3MoeConfig(**sizes, **one, num_experts_per_tok=k)), 10) for k in (1, 3)
    ]
    assert costs[1] - costs[0] == 2 * 6 * 2 * 3 * 64 * 32  # experts, FLOPs, layers, matrices


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[1]), "its layers differ"),
    ],
)
def test_what_no_template_computes_is_refused(tmp_path, made, words):
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        skeleton(load_config(str(tmp_path)))
