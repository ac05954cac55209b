"""GPU buffers that are made once per layout and reused behind signals."""

import torch

from slidedp.config import Layout
from slidedp.model.units import Unit, padded_numel
from slidedp.stream.device import Device, Signal


class Slot:
    """A reusable device buffer that holds one unit's parameters."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self._buffer = device.zeros(numel, dtype)
        # A second tensor over the same memory with a version counter of its own: refilling the slot
        # is not an in-place change in autograd's eyes. The window guarantees what autograd cannot
        # see: a layer's backward finds that layer's parameters in the slot again.
        self.memory = self._buffer.data
        self.free: Signal | None = None
        """Fired when the present content is not needed any more; None in a fresh slot."""
        self._views: dict[tuple[int, bool], dict[str, torch.Tensor]] = {}

    def parameters(self, unit: Unit, structure: int) -> dict[str, torch.Tensor]:
        """The unit's tensors by local name, as leaf views; one set for each `structure` (layers
        are all alike). Those of a frozen unit require no gradient."""
        key = structure, unit.frozen
        if key not in self._views:
            self._views[key] = {
                p.local: p.view(self._buffer).detach().requires_grad_(not unit.frozen) for p in unit.views
            }
        return self._views[key]


class GradientBuffer:
    """A device buffer for one unit's flat gradient. Padding stays zero: it is summed and landed too."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self.memory = device.zeros(numel, dtype)
        self.free: Signal | None = None
        """Fired when the last gradient has left; None in a fresh buffer."""


class Buffers:
    """All slots and gradient buffers of a layout.

    `embed` and `head` share one slot and one gradient buffer, as their visits never overlap; when
    tied, the head is a norm alone and has tiny ones of its own.
    """

    def __init__(
        self,
        device: Device,
        units: tuple[Unit, ...],
        layout: Layout,
        ranks: int,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype,
    ) -> None:
        shapes = buffer_numels(units, layout, ranks)
        self.last = len(units) - 1
        self._tied = "tied_head" in shapes
        self._slots = [Slot(device, n, dtype) for n in shapes["slots"]]
        self._gradients = [GradientBuffer(device, n, gradient_dtype) for n in shapes["gradients"]]
        edge, head = shapes["edge"][0], shapes.get("tied_head", [0])[0]
        self._edge_slot, self._edge_gradient = (
            Slot(device, edge, dtype),
            GradientBuffer(device, edge, gradient_dtype),
        )
        self._head_slot, self._head_gradient = (
            (Slot(device, head, dtype), GradientBuffer(device, head, gradient_dtype))
            if self._tied
            else (self._edge_slot, self._edge_gradient)
        )

    def slot(self, unit: Unit) -> Slot:
        if unit.index == 0:
            return self._edge_slot
        if unit.index == self.last:
            return self._head_slot
        return self._slots[unit.index % len(self._slots)]

    def gradient(self, unit: Unit) -> GradientBuffer:
        if unit.index == 0:
            return self._edge_gradient
        if unit.index == self.last:
            return self._head_gradient
        return self._gradients[unit.index % len(self._gradients)]

    def parameters(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The unit's parameters as views into its slot."""
        return self.slot(unit).parameters(unit, min(unit.index, 1) + (unit.index == self.last))


def is_tied(units: tuple[Unit, ...]) -> bool:
    """Whether the head uses the embedding's matrix."""
    return all(p.local != "lm_head.weight" for p in units[-1].parameters)


def buffer_numels(units: tuple[Unit, ...], layout: Layout, ranks: int) -> dict[str, list[int]]:
    """Elements of every slot and gradient buffer of one rank, by kind."""
    layer = max(padded_numel(unit, ranks) for unit in units[1:-1])
    embed, head = padded_numel(units[0], ranks), padded_numel(units[-1], ranks)
    layers = len(units) - 2
    shapes = {
        "slots": [layer] * min(layout.window, layers),
        "gradients": [layer] * min(layout.gradient_slots, layers),
        "edge": [embed if is_tied(units) else max(embed, head)],
    }
    if is_tied(units):
        shapes["tied_head"] = [head]
    return shapes
