"""Compiles what a step calls before the training state is there: loading a large model takes as long.

Nothing depends on it. What it leaves out (pieces of the vocabulary, layouts to come) is compiled when a step
first calls it.
"""

import torch

from slidedp.layout import NOTHING, Layout
from slidedp.model.families import LayerFunction
from slidedp.model.loss import tokens_at_once
from slidedp.model.units import Unit, lowest_trained, vocabulary_matrix
from slidedp.stream.activations import Keep, LayerCall, Nothing, Recompute
from slidedp.stream.buffers import Slot
from slidedp.stream.device import Device
from slidedp.stream.functions import Batch, ModelFunctions

WAYS: dict[str, type[Keep] | type[Nothing] | type[Recompute]] = {
    NOTHING: Nothing,
    "keep": Keep,
    "partial": Keep,
    "recompute": Recompute,
    "offload": Recompute,
    "spill": Keep,
}
"""How each mode calls a layer; where what it keeps goes makes no difference to the compiler."""


def rehearse(
    layout: Layout,
    units: tuple[Unit, ...],
    functions: ModelFunctions,
    batch: Batch,
    device: Device,
    dtype: torch.dtype,
    evaluates: bool,
) -> None:
    """Calls the functions of a step under `layout` as `Engine` does, on zeros of the shapes of `batch`.
    `evaluates`: those of an evaluation too."""
    embedding = vocabulary_matrix(units[0])
    assert embedding is not None
    vocabulary, width = embedding.shape
    parameters = Slot(device.zeros(units[1].numel, dtype)).parameters(units[1], 1)
    hidden = torch.zeros(*batch.labels.shape, width, dtype=dtype, device=device.torch)
    modes = layout.activation_modes(len(units) - 2, lowest_trained(units))
    for mode, kind in sorted({*zip(modes, functions.kinds, strict=True)}):

        def call(function: LayerFunction, kind: str = kind) -> LayerCall:
            return lambda parameters, hidden: function(parameters, hidden, *batch.positions[kind])[0]

        forward, again = map(call, functions.of_mode(mode, layout))
        way = WAYS[mode]()
        gradient = way.forward(forward, parameters, hidden)
        if mode != NOTHING:
            way.backward(again, parameters, gradient)
    if evaluates:
        with torch.no_grad():
            for kind in sorted({*functions.kinds}):
                functions.of_mode("evaluation", layout)[0](parameters, hidden, *batch.positions[kind])
    tokens = batch.labels.numel()
    if layout.vocabulary_pieces == 1:
        most = min(tokens, tokens_at_once(vocabulary, device.is_cuda))
        for size in sorted({most, tokens % most} - {0}):
            logits = torch.zeros(size, vocabulary, dtype=dtype, device=device.torch)
            functions.softmax(logits, batch.labels.flatten()[:size], 1.0 / tokens)
