"""What a decoder layer leaves behind for its backward pass: one small class per mode.

Every mode computes the same output and the same gradients. None of them holds weights: a layer's
parameters are views into its slot, which holds them again when its backward runs.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from slidedp.stream.spill import offsets

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


class Nothing:
    """Backward ends above this layer."""

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return layer(parameters, hidden)

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        raise AssertionError("a layer below all that is trained has no backward")


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


class Spill:
    """What autograd saves goes to host memory and comes back before backward.

    `room` waits until there may be more of them on the GPU; `hold` takes over the storages of all that
    autograd has saved, uint8 tensors; `fetch` returns their bytes on the device, one storage behind another
    as `slidedp.stream.spill.offsets` says. What lies in the storages of `resident` stays where it is.
    """

    def __init__(
        self,
        room: Callable[[], None],
        hold: Callable[[list[torch.Tensor]], None],
        fetch: Callable[[], torch.Tensor],
        resident: Iterable[torch.Tensor],
    ) -> None:
        self._room, self._hold, self._fetch, self._resident = room, hold, fetch, resident

    def forward(self, layer: LayerCall, parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
        self._room()
        self._saved = _Saved([*parameters.values(), *self._resident])
        # Autograd keeps the tensors that gradients are taken of and from. These have no memory: a leaf
        # of one element in the input's shape, and the edge that the output leaves.
        self._leaf = hidden.new_zeros(()).expand(hidden.shape).requires_grad_()
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack),
        ):
            output = layer(parameters, _Enter.apply(self._leaf, hidden))
        self._edge = torch.autograd.graph.get_gradient_edge(output)
        self._hold(self._saved.storages)
        self._saved.storages = []
        return output.detach()

    def backward(
        self, layer: LayerCall, parameters: Parameters, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self._saved.bytes = self._fetch()
        try:
            return torch.autograd.grad([self._edge], [self._leaf, *trained], [gradient])
        finally:
            del self._saved, self._edge, self._leaf


class _Enter(torch.autograd.Function):
    """`hidden`, whose gradient is that of `leaf`."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Spilled(NamedTuple):
    """Where a saved tensor is found again."""

    start: int
    """First byte of its storage."""
    nbytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Saved:
    """The hooks under which a layer runs: every storage that autograd saves something of, once."""

    def __init__(self, resident: list[torch.Tensor]) -> None:
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self._device = resident[0].device
        self._starts: dict[int, int] = {}
        self.storages: list[torch.Tensor] = []
        self.bytes: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> _Spilled | torch.Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._resident or tensor.device != self._device or not storage.nbytes():
            return tensor.detach()
        if place not in self._starts:
            self._starts[place] = offsets(self.storages)[-1]
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        start, nbytes = self._starts[place], storage.nbytes()
        stride, offset = tensor.stride(), int(tensor.storage_offset())
        return _Spilled(start, nbytes, tensor.dtype, tensor.shape, stride, offset)

    def unpack(self, packed: _Spilled | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert self.bytes is not None
        storage = self.bytes[packed.start : packed.start + packed.nbytes].view(packed.dtype)
        # From its own beginning: as_strided counts from that of the whole buffer.
        offset = int(storage.storage_offset()) + packed.offset
        return storage.as_strided(packed.size, packed.stride, offset)
