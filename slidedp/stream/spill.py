"""Host memory for what spilled layers keep for their backward, and the GPU buffers that it returns through.

A layer's saved tensors leave from where they are; they are let go of when they have left, and at most
OUTGOING layers are on their way. They come back as one run of bytes, ahead of their backward. Nothing is
read back before `stashed` has fired.
"""

from typing import NamedTuple

import torch

from slidedp.host.memory import Segment
from slidedp.model.units import Unit, aligned
from slidedp.stream.device import Device, Signal, on
from slidedp.stream.program import FETCH_AHEAD
from slidedp.stream.signals import Step
from slidedp.stream.stash import OUTGOING

_APART = 512
"""Bytes. Storages start on multiples of it, as the GPU's allocator would place them."""


class _Place(NamedTuple):
    """A layer's room on the host."""

    segment: Segment
    memory: torch.Tensor
    """uint8"""


def offsets(storages: list[torch.Tensor]) -> list[int]:
    """Where each of these uint8 tensors starts in a layer's run of bytes, and the bytes of all."""
    starts = [0]
    for storage in storages:
        starts.append(starts[-1] + aligned(storage.numel(), _APART))
    return starts


class SpillStore:
    """What the spilled layers of an engine keep. A layer's bytes are known when it first runs, and are
    those of all layers then, as they are alike."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: dict[int, _Place] = {}
        self._back: list[torch.Tensor | None] = [None] * FETCH_AHEAD
        self._free: list[Signal | None] = [None] * FETCH_AHEAD
        self._next = 0
        self._leaving: dict[int, tuple[Signal, list[torch.Tensor]]] = {}  # compute thread's
        self._held: dict[int, list[torch.Tensor]] = {}
        self._returned: dict[int, torch.Tensor] = {}

    def room(self) -> None:
        """Compute thread: waits until one layer less than may be is on its way out, and lets go of what has
        left. The compute stream waits too, so that it may reuse that memory."""
        while len(self._leaving) >= OUTGOING:
            left, _ = self._leaving.pop(next(iter(self._leaving)))
            left.wait(self._device.compute)

    def hold(self, step: Step, unit: Unit, storages: list[torch.Tensor]) -> None:
        """Compute thread: hands over what the layer has saved, uint8 tensors."""
        self._leaving[unit.index] = step.signal("stashed", unit.index), storages
        self._held[unit.index] = storages
        step.signal("held", unit.index).fire(self._device.compute)

    def to_host(self, step: Step, unit: Unit) -> None:
        """Transfer thread: copies what is held out."""
        stream = self._device.to_host
        step.signal("held", unit.index).wait(stream)
        storages = self._held.pop(unit.index)
        starts = offsets(storages)
        memory = self._place(unit, starts[-1])
        with on(stream):
            for start, storage in zip(starts, storages, strict=False):
                memory[start : start + storage.numel()].copy_(storage, non_blocking=True)
        step.signal("stashed", unit.index).fire(stream)

    def _place(self, unit: Unit, nbytes: int) -> torch.Tensor:
        """The layer's room on the host; made when it is first asked for, or has become too small."""
        place = self._host.get(unit.index)
        if place is None or place.memory.numel() < nbytes:
            if place is not None:
                self._close(place)
            segment = Segment(nbytes, "activations")
            segment.touch()
            place = self._host[unit.index] = _Place(segment, segment.tensor(torch.uint8))
            self._device.register(place.memory)
        return place.memory

    def to_device(self, step: Step, unit: Unit, release: Signal) -> None:
        """Transfer thread: brings a layer's bytes back; `release` frees their buffer."""
        stream, index = self._device.to_device, self._next
        self._next = (index + 1) % FETCH_AHEAD
        free = self._free[index]
        if free is not None:
            free.wait(stream)
        self._free[index] = release
        step.signal("stashed", unit.index).wait(stream)
        host, buffer = self._host[unit.index].memory, self._back[index]
        if buffer is None or buffer.numel() < host.numel():
            # A smaller one is dropped behind the event that has just been waited for.
            with on(stream):
                buffer = self._back[index] = self._device.empty(host.numel(), torch.uint8)
        with on(stream):
            buffer[: host.numel()].copy_(host, non_blocking=True)
        self._returned[unit.index] = buffer
        step.signal("fetched", unit.index).fire(stream)

    def returned(self, step: Step, unit: Unit) -> torch.Tensor:
        """Compute thread: the layer's bytes, once they are back."""
        step.signal("fetched", unit.index).wait(self._device.compute)
        self._leaving.pop(unit.index, None)  # they had left before
        return self._returned.pop(unit.index)

    def _close(self, place: _Place) -> None:
        if self._device.to_device is not None:
            self._device.to_device.synchronize()  # the last step's copy may still read it
        self._device.unregister(place.memory)
        place.segment.close()

    def close(self) -> None:
        """Gives the host memory back."""
        while self._host:
            _, place = self._host.popitem()
            self._close(place)
