"""Seconds of each piece of one rank's compute, at the run's shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from slidedp.config import DTYPES
from slidedp.model.loss import linear_cross_entropy
from slidedp.model.units import Unit
from slidedp.policy.phases import SUSTAINED, Setup, compute_seconds, enqueue_seconds
from slidedp.stream.activations import Activations, Keep, LayerCall, Parameters, Recompute
from slidedp.stream.buffers import is_tied, output_matrix
from slidedp.stream.compiled import model_functions
from slidedp.stream.device import Device
from slidedp.stream.functions import ModelFunctions

PARTIAL_BUDGET = 0.5
"""The one fraction of kept intermediates that is measured; each costs a compilation."""


def compute_rates(setup: Setup, device: Device) -> dict[str, float]:
    """Seconds of each piece of compute at the run's shapes; on a GPU also those of the thread that enqueues,
    and `enqueue_under_update`, how many times as long it takes beside the worker.

    All is compiled first, while the worker prepares: a GPU that has paused is faster than in a step."""
    planned = setup.planned
    config, units = planned.config, planned.units
    dtype = DTYPES[str(config.compute_dtype)]
    functions = model_functions(config, planned.model, device, dtype)
    batch, length = config.batch_size // int(config.ranks or 1), config.sequence_length
    width = planned.model.hidden_size

    def parameters(unit: Unit) -> Parameters:
        flat = device.empty(unit.numel, dtype).normal_(std=0.02)
        return {p.local: p.view(flat).detach().requires_grad_() for p in unit.views}

    layer, embed, head = parameters(units[1]), parameters(units[0]), parameters(units[-1])
    hidden = torch.randn(batch, length, width, device=device.torch, dtype=dtype)
    gradient = torch.randn_like(hidden) * 1e-3
    ids = torch.randint(0, planned.model.vocab_size, (batch, length), device=device.torch)

    def call(function: Any) -> LayerCall:
        return lambda p, h: function(p, h, *functions.positions[functions.kinds[0]])[0]

    def both(mode: Activations, function: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """A forward, and its backward."""
        return (
            lambda: mode.forward(call(function), layer, hidden),
            lambda: mode.backward(call(function), layer, gradient),
        )

    matrix = embed["weight"].detach()
    weight = matrix if is_tied(units) else head["lm_head.weight"].detach()
    trained = not output_matrix(units).frozen

    def loss() -> None:
        _head(functions, head, weight, hidden, ids, trained)

    def enqueue() -> dict[str, float]:
        """Seconds of the thread that enqueues them."""
        kept, function = Keep(), call(functions.layer)
        forward = enqueue_seconds(device, lambda: kept.forward(function, layer, hidden))
        pair = enqueue_seconds(
            device, lambda: (kept.forward(function, layer, hidden), kept.backward(function, layer, gradient))
        )
        return {"enqueue_forward": forward, "enqueue_backward": max(0.0, pair - forward)}

    works = [*both(Keep(), functions.layer), *both(Recompute(), functions.layer)]
    if config.compile:
        works += both(Keep(), functions.partial(PARTIAL_BUDGET))
    for work in (*works, loss):
        work()
    setup.barrier.wait()
    forward, keep, _, recompute, *partial = compute_seconds(device, *works, sustained=SUSTAINED)
    found = {"forward": forward, "backward_keep": keep, "backward_recompute": recompute}
    found |= {"backward_partial": partial[1]} if partial else {}
    (found["head"],) = compute_seconds(device, loss, sustained=SUSTAINED / 3)
    if device.is_cuda:
        alone, beside = enqueue(), setup.beside_worker(enqueue)
        slower = sum(beside.values()) / sum(alone.values())
        found |= alone | {"enqueue_under_update": max(1.0, slower)}
    flat = device.zeros(units[1].numel, dtype)
    other = torch.ones_like(flat)
    found["embed_forward"], found["embed_backward"], copied = compute_seconds(
        device,
        lambda: functional.embedding(ids, matrix),
        lambda: torch.ops.aten.embedding_dense_backward(
            gradient, ids, len(matrix), functions.padding_index, False
        ),
        lambda: flat.copy_(other),
    )
    found["device_copy"] = 2 * flat.nbytes / copied
    return found


def _head(
    functions: ModelFunctions,
    head: Parameters,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    trained: bool,
) -> None:
    """The final norm and the loss, forward and backward, as the engine computes them."""
    norm, hidden = head["norm.weight"], hidden.detach().requires_grad_()
    with torch.enable_grad():
        normed = functions.norm(norm, hidden)
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trained else None
    _, upstream = linear_cross_entropy(
        normed.detach().flatten(0, 1), weight, labels.flatten(), 1e-4, weight_gradient, functions.softmax
    )
    torch.autograd.grad(normed, [hidden, norm], upstream.view_as(normed))
