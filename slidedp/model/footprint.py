"""What a decoder layer keeps on the GPU for its backward, in bytes per token: see docs/memory.md.

Compiled, by a formula that is what the compiler's partitioner saves; in eager mode, by running the layer on
tensors without memory, but for the experts of a mixture: their grouped products need memory to run.
"""

import json
from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig

from slidedp.model.families import layer_function, layer_halves, layer_kinds, position_tables, skeleton

TOKENS = 64
"""Of a sequence that is measured; its double is measured too."""


def kept_per_token(model: Any, dtype: torch.dtype, compiled: bool, tiled: bool) -> int:
    """Bytes per token that a layer with this transformers config keeps under `keep`, its input included.
    `tiled`: its MLP runs over tiles of tokens, and keeps its input alone."""
    if compiled:
        return _by_formula(model, dtype.itemsize, tiled)
    mixture = hasattr(model, "num_experts")
    measured = _measured(model.to_json_string(use_diff=False), dtype, tiled or mixture)
    return measured + (_mixture(model, dtype.itemsize) if mixture else 0)


def _by_formula(model: Any, size: int, tiled: bool) -> int:
    """Input, normed input, what attention reads and writes (queries and keys twice where they are normed, or
    one tensor with the values), input of the MLP, and without tiles: that normed, gate, up, their product.

    Of a mixture each expert that a token goes to counts, with its own copies of the input and the output.
    """
    width, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    head_dim = getattr(model, "head_dim", None) or width // heads
    kind = model.model_type
    each_head = kind in ("qwen3", "qwen3_moe", "gemma3_text")
    all_heads = kind in ("olmo2", "olmo3", "olmoe")
    attention = (2 + (each_head or all_heads or kind == "phi3")) * (heads + kv_heads) * head_dim
    # FP32: root mean squares, logsumexp.
    scalars = 2 + heads + each_head * (heads + kv_heads) + 2 * all_heads
    if kind == "gemma3_text":  # norms behind attention and MLP too
        attention, scalars = attention + width, scalars + 2
    mlp = width + 3 * model.intermediate_size
    if hasattr(model, "num_experts"):
        expert = getattr(model, "moe_intermediate_size", model.intermediate_size)
        mlp = width + model.num_experts_per_tok * (3 * expert + 2 * width)
    return size * (3 * width + attention + (0 if tiled else mlp)) + 4 * scalars


def _mixture(model: Any, size: int) -> int:
    """Of a mixture in eager mode, besides its input: that normed, before and behind the norm's weight, and in
    half precision its FP32 copy, which is kept in its place; of each expert that a token goes to the input,
    gate and up, the activated gate, the product and the output, its place in three orders and its weight;
    what the router computes in FP32.
    """
    width, chosen = model.hidden_size, model.num_experts_per_tok
    expert = getattr(model, "moe_intermediate_size", model.intermediate_size)
    normed = 2 * size * width + (4 - size) * width + 4
    routed = 4 * model.num_experts + 8 * chosen + model.norm_topk_prob * 4 * (chosen + 1)
    return normed + routed + chosen * (size * (2 * width + 4 * expert) + 3 * 8 + size)


@lru_cache(maxsize=256)
def _measured(values: str, dtype: torch.dtype, tiled: bool) -> int:
    config = AutoConfig.for_model(**json.loads(values))
    return (_saved(config, dtype, tiled, 2 * TOKENS) - _saved(config, dtype, tiled, TOKENS)) // TOKENS


def _saved(config: Any, dtype: torch.dtype, tiled: bool, tokens: int) -> int:
    """Bytes that autograd saves in one layer's forward, weights and rotary tables left out."""
    model = skeleton(config)
    whole, (half, _) = layer_function(model), layer_halves(model)
    tables = position_tables(config, model, tokens, torch.device("cpu"), dtype)[layer_kinds(config)[0]]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parameters = {
            name: torch.empty(p.shape, dtype=dtype, requires_grad=True)
            for name, p in model.model.layers[0].named_parameters()
        }
        places = [None if table is None else mode.from_tensor(table) for table in tables]
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
        others = {_storage(tensor) for tensor in (*parameters.values(), *places) if tensor is not None}
        saved = {_storage(hidden): hidden.nbytes}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if _storage(tensor) not in others:
                saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = half(parameters, hidden, *places) if tiled else whole(parameters, hidden, *places)[0]
        if tiled:  # the MLP's input
            saved[_storage(output)] = output.nbytes
        return sum(saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
