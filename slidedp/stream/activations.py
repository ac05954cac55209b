"""What a decoder layer leaves behind for its backward pass: one small class per mode.

Every mode computes the same output and the same gradients. None of them holds weights: a layer's
parameters are views into its slot, which holds them again when its backward runs.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Parameters = dict[str, torch.Tensor]
LayerCall = Callable[[Parameters, torch.Tensor], torch.Tensor]
"""The layer with its positions bound: (parameters, hidden) -> hidden, [batch, sequence, width]."""


class Activations(Protocol):
    """One layer's mode during one step."""

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output; remembers what backward needs."""

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Gradients of (hidden, *parameters) from the gradient of the output; forgets the rest. Parameters
        that require no gradient are left out."""


def _gradients(
    output: torch.Tensor, hidden: torch.Tensor, parameters: Parameters, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    return torch.autograd.grad(output, [hidden, *trained], gradient)


class Keep:
    """Intermediates stay on the GPU. Which ones, the layer's compilation decides: all of them for
    `keep`, the part that is dear to recompute for `partial`."""

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            self._output = layer(parameters, self._hidden)
        return self._output.detach()

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden, output = self._hidden, self._output
        del self._hidden, self._output
        return _gradients(output, hidden, parameters, gradient)


class Recompute:
    """Only the layer's input stays on the GPU; backward runs the layer again."""

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden
        with torch.no_grad():
            return layer(parameters, hidden)

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden = self._hidden.detach().requires_grad_()
        del self._hidden
        with torch.enable_grad():
            output = layer(parameters, hidden)
        return _gradients(output, hidden, parameters, gradient)


class Offload:
    """The layer's input goes to host memory and comes back before backward, which runs it again.

    `stash` takes the input over before it returns; `fetch` returns it on the device, ready to use.
    """

    def __init__(self, stash: Callable[[torch.Tensor], None], fetch: Callable[[], torch.Tensor]) -> None:
        self._stash, self._fetch = stash, fetch

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        self._stash(hidden)
        with torch.no_grad():
            return layer(parameters, hidden)

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        hidden = self._fetch().detach().requires_grad_()
        with torch.enable_grad():
            output = layer(parameters, hidden)
        return _gradients(output, hidden, parameters, gradient)
