"""Mixtures of experts: training, loading and export are those of transformers."""

import json
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig

from slidedp import ConfigError
from slidedp.host.state import HostState
from slidedp.model.families import flops_per_token, load_config, skeleton
from slidedp.model.load import load_pretrained
from slidedp.model.save import export
from slidedp.model.units import units_of
from tests.pool import pool, small_model
from tests.stream.cases import ROUTES, config, some_layout
from tests.stream.test_parity import assert_parity

KINDS = ("qwen3_moe", "olmoe")


@pytest.mark.parametrize(("kind", "ranks", "route"), [("qwen3_moe", 2, 4), ("olmoe", 1, 0), ("olmoe", 2, 6)])
def test_training_is_that_of_one_expert_after_another(kind, ranks, route):
    layout = some_layout(Random(route), ROUTES[route], mlp_tile_tokens=7)
    run = config(layout, kind=kind, tied=kind == "olmoe", clip_norm=1.4, steps=8)
    assert_parity(pool(ranks).run(run), run)


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
        (OlmoeConfig(num_hidden_layers=1, output_router_logits=True), "set output_router_logits to false"),
    ],
)
def test_what_no_template_computes_is_refused(tmp_path, made, words):
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        skeleton(load_config(str(tmp_path)))
