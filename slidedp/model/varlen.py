"""Attention within documents by CUDA's flash kernel.

A file of its own since it takes torch's compiler along: 0.9 s of every process that imports it.
"""

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slidedp.model.documents import VARLEN

# torch 2.11 takes fewer heads of keys than of queries without being told.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def register_varlen() -> None:
    """Lets transformers' layers find it by its name."""
    AttentionInterface.register(VARLEN, _attend)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention as transformers calls it: [batch, heads, length, head_dim] in, [batch, length,
    heads, head_dim] out."""
    if bounds is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **more)
    batch, heads, length, head_dim = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    causal = (-1, 0)
    out = varlen_attn(q, k, v, bounds, bounds, length, length, scale=scaling, window_size=causal, **_GROUPED)
    assert isinstance(out, torch.Tensor)
    return out.view(batch, length, heads, head_dim), None
