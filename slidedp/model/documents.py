"""What a layer's attention needs to know: rotary tables, and bounds of what a token may see.

Without bounds it is all before it. Where several documents share a sequence, position ids, int64 [batch,
length], count from 0 in each. The layer then gets rotary tables by position and bounds: a mask, or for the
flash kernel of CUDA the documents' ends, which leave out what the mask would only hide.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

VARLEN = "slidedp_varlen"
"""Name of `slidedp.model.varlen`'s attention among transformers' own."""


class Positions(NamedTuple):
    """What a layer takes besides its parameters and its input."""

    cos: torch.Tensor
    """[1 or batch, length, head_dim], as `sin`."""
    sin: torch.Tensor
    bounds: torch.Tensor | None = None
    """None where a token sees its whole sequence. Else a bool mask [1 or batch, 1, length, length], or with
    VARLEN int32 ends [documents + 1] in the batch's row of tokens, the last repeated to a power of two."""


PositionsByKind = dict[str, Positions]
"""Those of each kind of layer, by the names that transformers has for kinds of attention."""


def has_varlen(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether VARLEN computes the attention of a model with this config."""
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    fast = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and fast and head_dim % 8 == 0 and head_dim <= 256


def within_documents(
    tables: PositionsByKind,
    varlen: bool,
    bring: Callable[[torch.Tensor], torch.Tensor],
    position_ids: torch.Tensor,
) -> PositionsByKind:
    """Positions of a batch from the tables of one whole sequence and its position ids, on the CPU. `bring`
    copies a tensor to the device of the tables."""
    rows = bring(position_ids)
    bounds = bring(document_ends(position_ids)) if varlen else same_document(rows)
    return {
        kind: Positions(cos[0][rows], sin[0][rows], bounds if window is None else bounds & window)
        for kind, (cos, sin, window) in tables.items()
    }


def within_window(window: int, length: int, device: torch.device) -> torch.Tensor:
    """Bool [1, 1, length, length]: whether a token sees another, itself and the `window` - 1 before it."""
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril().triu(1 - window)[None, None]


def same_document(position_ids: torch.Tensor) -> torch.Tensor:
    """Bool [batch, 1, length, length]: whether a token (third axis) sees another (last axis)."""
    documents = (position_ids == 0).cumsum(1)
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def document_ends(position_ids: torch.Tensor) -> torch.Tensor:
    """Int32 [power of two + 1]: 0, and the end of every document of the batch. Few lengths, since a layer
    is compiled for each."""
    starts = torch.nonzero(position_ids.flatten() == 0)[:, 0]
    ends = torch.full((1 << (len(starts) - 1).bit_length(),), position_ids.numel())
    ends[: len(starts) - 1] = starts[1:]
    return torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()])
