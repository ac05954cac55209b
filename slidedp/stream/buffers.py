"""GPU buffers that are made once per layout and reused behind signals."""

from typing import Protocol

import torch

from slidedp.layout import Layout
from slidedp.model.units import ALIGNMENT, Unit, aligned, padded_numel, pieces_of
from slidedp.stream.arena import Arena, block_bytes
from slidedp.stream.device import Device, Signal
from slidedp.stream.program import PIECE_SLOTS
from slidedp.stream.transport import Receipt


class Elements(Protocol):
    """A buffer cut by a unit's own numbers, whether it holds all of the unit or a part."""

    def __getitem__(self, span: slice, /) -> torch.Tensor: ...


class Buffer:
    """Device memory that is used again and again."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.free: Signal | None = None
        """Fired when this rank does not need the present content any more; None in a fresh buffer."""
        self.read: Receipt | None = None
        """That the other ranks do not need it any more either; None where they never read it directly."""

    def wait_free(self, stream: torch.cuda.Stream | None) -> None:
        """Makes what is enqueued on `stream` next run when nobody needs the present content."""
        if self.free is not None:
            self.free.wait(stream)
        if self.read is not None:  # set before `free` is fired
            self.read.wait(stream)


class Slot(Buffer):
    """A buffer that holds one unit's parameters."""

    def __init__(self, memory: torch.Tensor) -> None:
        # A second tensor over the same memory with a version counter of its own: refilling the slot
        # is not an in-place change in autograd's eyes. The window guarantees what autograd cannot
        # see: a layer's backward finds that layer's parameters in the slot again.
        super().__init__(memory.data)
        self._buffer = memory
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


class Buffers:
    """All slots and gradient buffers of a layout, in one block of memory. A gradient buffer holds one unit's
    flat gradient; its padding stays zero, as it is summed and landed too.

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
        edges, pieces = shapes["edge"] + shapes.get("tied_head", []), shapes["pieces"]
        slots, gradients = shapes["slots"] + edges + pieces, shapes["gradients"] + edges + pieces
        sizes = [n * dtype.itemsize for n in slots] + [n * gradient_dtype.itemsize for n in gradients]
        self.arena = Arena(device, block_bytes(sizes), layout.transport == "copy" and ranks > 1)
        all_slots = [Slot(self.arena.take(n, dtype)) for n in slots]
        all_gradients = [Buffer(self.arena.take(n, gradient_dtype)) for n in gradients]
        self._edges, whole = len(edges), -len(pieces) or None
        self._slots, self._gradients = all_slots[:whole], all_gradients[:whole]
        self.piece_slots, self.piece_gradients = (
            all_slots[len(self._slots) :],
            all_gradients[len(self._gradients) :],
        )
        """Taken in turn by the pieces of embed and head; empty where these are whole."""

    def slot(self, unit: Unit) -> Slot:
        return self._slots[self._place(unit, len(self._slots))]

    def gradient(self, unit: Unit) -> Buffer:
        return self._gradients[self._place(unit, len(self._gradients))]

    def _place(self, unit: Unit, count: int) -> int:
        """Which of `count` buffers: the edges come last, embed's before a tied head's."""
        if unit.index == 0:
            return count - self._edges
        if unit.index == self.last:
            return count - 1
        return unit.index % (count - self._edges)

    def parameters(self, unit: Unit) -> dict[str, torch.Tensor]:
        """The unit's parameters as views into its slot."""
        return self.slot(unit).parameters(unit, min(unit.index, 1) + (unit.index == self.last))


def is_tied(units: tuple[Unit, ...]) -> bool:
    """Whether the head uses the embedding's matrix."""
    return all(p.local != "lm_head.weight" for p in units[-1].parameters)


def output_matrix(units: tuple[Unit, ...]) -> Unit:
    """The unit that holds it: the embedding where it is tied, else the head."""
    return units[0 if is_tied(units) else -1]


def buffer_numels(units: tuple[Unit, ...], layout: Layout, ranks: int) -> dict[str, list[int]]:
    """Elements of every slot and gradient buffer of one rank, by kind."""
    layer = max(padded_numel(unit, ranks) for unit in units[1:-1])
    embed, head = padded_numel(units[0], ranks), padded_numel(units[-1], ranks)
    layers = len(units) - 2
    piece = _piece_numel(units, layout, ranks)
    shapes = {
        "slots": [layer] * min(layout.window, layers),
        "gradients": [layer] * min(layout.gradient_slots, layers),
        "edge": [0 if piece else embed if is_tied(units) else max(embed, head)],
        "pieces": [piece] * PIECE_SLOTS if piece else [],
    }
    if is_tied(units):
        shapes["tied_head"] = [head]
    return shapes


def _piece_numel(units: tuple[Unit, ...], layout: Layout, ranks: int) -> int:
    """Elements of a buffer for pieces of embed and head; 0 where these are whole."""
    cut = [pieces_of(unit, layout.vocabulary_pieces, ranks) for unit in (units[0], units[-1])]
    if len(cut[0]) == 1:
        return 0
    with_matrix = cut[:1] if is_tied(units) else cut
    return max(aligned(stop - start, ranks * ALIGNMENT) for pieces in with_matrix for start, stop in pieces)
