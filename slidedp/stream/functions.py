"""What a rank's compute is given, once and for every pass, and what a pass gives back."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from slidedp.layout import Layout
from slidedp.model.documents import PositionsByKind
from slidedp.model.experts import Experts
from slidedp.model.families import LayerFunction, LayerHalf
from slidedp.model.loss import SoftmaxGradient
from slidedp.model.tiles import tiled
from slidedp.stream.device import HostCopy
from slidedp.stream.timeline import Timeline
from slidedp.stream.vocabulary import PieceFunctions


class ModelFunctions(NamedTuple):
    """The compute of every kind of unit, compiled or not, shared by all layouts."""

    layer: LayerFunction
    partial: Callable[[float], LayerFunction]
    """The layer, compiled so that it keeps this fraction of its intermediates."""
    attention: LayerHalf
    """The layer's first half, for layers whose second half runs over tiles of tokens."""
    partial_attention: Callable[[float], LayerHalf]
    """The same as `partial`."""
    mlp: LayerHalf
    """The layer's second half."""
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    softmax: SoftmaxGradient
    pieces: PieceFunctions
    """Used in its place where the vocabulary is on the GPU in pieces."""
    kinds: tuple[str, ...]
    """The kind of each layer, by which `positions` differ."""
    positions: PositionsByKind
    """Those of sequences that are one document each."""
    within_documents: Callable[[torch.Tensor], PositionsByKind]
    """Those of sequences with these position ids, int64 [batch, length] on the CPU."""
    padding_index: int
    """Row of the embedding that gets no gradient; -1 for none."""
    embedding_scale: float
    """What the embedding's rows are multiplied by."""
    logit_cap: float | None
    """What logits are bent below, as `softmax` does it; None for no limit."""
    experts: Experts | None
    """Those of each layer; None if the model is dense."""

    def of_mode(self, mode: str, layout: Layout) -> tuple[LayerFunction, LayerFunction]:
        """The layer of forward, and the one that runs again for backward, where nobody reads its output."""
        partial = mode in ("partial", "spill")
        if not layout.mlp_tile_tokens:
            whole = self.partial(layout.partial_budget) if partial else self.layer
            return whole, whole
        attention = self.partial_attention(layout.partial_budget) if partial else self.attention
        return (
            tiled(attention, self.mlp, layout.mlp_tile_tokens),
            tiled(attention, self.mlp, layout.mlp_tile_tokens, read=False),
        )


class Batch(NamedTuple):
    """What one rank takes in a pass."""

    input_ids: torch.Tensor
    """int64 [batch, length] on the device, as `labels`."""
    labels: torch.Tensor
    positions: PositionsByKind
    targets: int
    """Labels that are not IGNORED."""
    counted: torch.Tensor | None = None
    """Of a mixture, bool [batch, length] on the device: tokens whose experts count."""
    step_targets: int = 0
    """Targets of all ranks and passes of the step; not used where no balance is learnt."""


class Passed(NamedTuple):
    """What a pass has computed."""

    loss: HostCopy
    """Summed over this rank's targets, FP32 scalar."""
    timeline: Timeline
    routing: HostCopy | None
    """`Routing.sums` over all ranks, if the model is a mixture."""
