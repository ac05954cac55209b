"""Ranks compile what their first step calls before they have the training state."""

from dataclasses import replace

import pytest

from slidedp import Layout
from tests.pool import pool
from tests.stream.cases import LAYERS, config

MIXED = ("keep", "offload", "recompute", "partial", "spill")


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3", Layout(activations="keep", schedule="in_backward")),
        ("qwen3", Layout(activations=MIXED)),
        ("qwen3", Layout(activations=MIXED, mlp_tile_tokens=8)),
        ("gemma3_text", Layout(activations="offload")),
        ("qwen3_moe", Layout(activations="recompute")),
    ],
    ids=["keep", "mixed", "tiles", "sliding", "experts"],
)
def test_a_step_compiles_nothing_more(kind, layout):
    assert len(MIXED) == LAYERS
    settings = config(layout, kind=kind, steps=2, compile=True, eval_every=2)
    settings = replace(settings, data=replace(settings.data, eval_fraction=0.25))
    pool(2).run(settings, patch="tests.stream.compiling.apply")
