"""Bytes that a layer keeps: against what autograd really saves, and what was measured on a GPU."""

import pytest
import torch
from transformers import AutoConfig

from slidedp.bench.shapes import qwen3
from slidedp.model.families import (
    layer_function,
    layer_halves,
    layer_kinds,
    load_config,
    position_tables,
    skeleton,
)
from slidedp.model.footprint import kept_per_token
from tests.stream.cases import model

BF16 = torch.bfloat16


def saved(layer, config, dtype, tokens: int) -> int:
    """Bytes that a layer on real memory saves, its input and its weights left out."""
    template = skeleton(config)
    parameters = {
        name: torch.randn(p.shape, dtype=dtype).requires_grad_()
        for name, p in template.model.layers[0].named_parameters()
    }
    places = position_tables(config, template, tokens, torch.device("cpu"), dtype)[layer_kinds(config)[0]]
    tables = [table for table in places if table is not None]
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(parameters, hidden, *places)
    for tensor in (hidden, *parameters.values(), *tables):
        found.pop(tensor.untyped_storage().data_ptr(), None)
    del output
    return sum(found.values())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])  # no window: its mask is not per token
def test_eager_layers_keep_what_is_measured_without_memory(kind, dtype):
    config = load_config(model(kind))
    layer = layer_function(skeleton(config))
    found = (saved(layer, config, dtype, 48) - saved(layer, config, dtype, 16)) // 32
    width = config.hidden_size * dtype.itemsize
    assert kept_per_token(config, dtype, compiled=False, tiled=False) == found + width


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("kind", ["olmoe", "qwen3_moe"])
@pytest.mark.parametrize(
    "experts",
    [
        {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
        {"num_experts": 16, "num_experts_per_tok": 5, "intermediate_size": 32},
    ],
)
def test_eager_mixtures_keep_what_autograd_saves(kind, normed, dtype, experts):
    config = AutoConfig.for_model(
        kind, hidden_size=64, moe_intermediate_size=experts["intermediate_size"], num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100, num_hidden_layers=1, norm_topk_prob=normed, eos_token_id=1,
        **experts,
    )  # fmt: skip
    layer = layer_function(skeleton(config))
    found = (saved(layer, config, dtype, 96) - saved(layer, config, dtype, 32)) // 64
    width = config.hidden_size * dtype.itemsize
    assert kept_per_token(config, dtype, compiled=False, tiled=False) == pytest.approx(
        found + width, rel=0.01
    )


DENSE: dict[str, dict[str, int | None]] = {
    "gemma3_text": {"query_pre_attn_scalar": 16}, "granite": {}, "llama": {}, "mistral": {}, "olmo2": {},
    "olmo3": {}, "phi3": {"pad_token_id": None}, "qwen2": {}, "qwen3": {}, "smollm3": {"pad_token_id": None},
}  # fmt: skip


@pytest.mark.parametrize("kind", DENSE)
def test_a_compiled_layer_keeps_what_the_partitioner_saves(kind):
    """The backend has inductor's decompositions and partitioner, and compiles nothing."""
    config = AutoConfig.for_model(
        kind, hidden_size=128, intermediate_size=320, num_attention_heads=8, num_key_value_heads=2,
        head_dim=16, vocab_size=100, num_hidden_layers=1, **DENSE[kind],
    )  # fmt: skip
    whole = layer_function(skeleton(config))
    half = layer_halves(skeleton(config))[0]
    torch._dynamo.reset()  # one function has so many variants, and each family makes some
    for layer, tiled in ((whole, False), (half, True)):
        compiled = torch.compile(layer, dynamic=False, backend="aot_eager_decomp_partition")
        found = saved(compiled, config, BF16, 64) / 64
        mine = config.hidden_size * 2 * (1 + tiled)  # the layer's input, and the MLP's
        said = kept_per_token(config, BF16, compiled=True, tiled=tiled)
        assert said == pytest.approx(found + mine, rel=0.02)


@pytest.mark.parametrize(("size", "compiled", "kib"), [
    ("4B", True, 102), ("8B", True, 126), ("14B", True, 168), ("8B", False, 210),
])  # fmt: skip
def test_layers_keep_what_a_gpu_was_seen_to(size, compiled, kib):
    """Saved on an H200 by layers of 16 x 1,024 tokens in BF16, the layer's input left out."""
    config = qwen3(size)
    kept = kept_per_token(config, BF16, compiled, tiled=False) - 2 * config.hidden_size
    assert kept / 1024 == pytest.approx(kib, rel=0.01)
