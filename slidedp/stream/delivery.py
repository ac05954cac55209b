"""Host to GPU: how one chunk of a unit gets into every rank's slot."""

from typing import Protocol

import torch
import torch.distributed as dist

from slidedp.model.units import shard
from slidedp.stream.device import Abort, Device, Signal, on


class Delivery(Protocol):
    """One way of delivery. Chunks go in order; the slot is complete when `stream` has run."""

    stream: torch.cuda.Stream | None
    """Where the last operation of a chunk is enqueued."""

    def chunk(self, host: torch.Tensor, slot: torch.Tensor, start: int, stop: int) -> None:
        """Enqueues elements [start, stop) of `host` (the unit on the host) into `slot`."""


class Replicated:
    """Every rank copies the whole chunk over its own link."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream = device.to_device

    def chunk(self, host: torch.Tensor, slot: torch.Tensor, start: int, stop: int) -> None:
        with on(self.stream):
            slot[start:stop].copy_(host[start:stop], non_blocking=True)


class Sharded:
    """Each rank copies 1/N of the chunk to its place in the slot; an all-gather fills in the rest."""

    def __init__(self, device: Device, rank: int, ranks: int, abort: Abort) -> None:
        self._device, self._rank, self._ranks, self._abort = device, rank, ranks, abort
        self.stream = device.collective

    def chunk(self, host: torch.Tensor, slot: torch.Tensor, start: int, stop: int) -> None:
        first, last, host_last = shard(start, stop, self._rank, self._ranks)
        copied = Signal(self._abort)
        with on(self._device.to_device):
            slot[first:host_last].copy_(host[first:host_last], non_blocking=True)
            copied.fire(self._device.to_device)
        copied.wait(self.stream)
        with on(self.stream):
            gathered = slot[start : start + (last - first) * self._ranks]
            dist.all_gather_into_tensor(gathered, slot[first:last])


class Broadcast:
    """Rank 0 copies the chunk and broadcasts it between GPUs."""

    def __init__(self, device: Device, rank: int, abort: Abort) -> None:
        self._device, self._rank, self._abort = device, rank, abort
        self.stream = device.collective

    def chunk(self, host: torch.Tensor, slot: torch.Tensor, start: int, stop: int) -> None:
        if self._rank == 0:
            copied = Signal(self._abort)
            with on(self._device.to_device):
                slot[start:stop].copy_(host[start:stop], non_blocking=True)
                copied.fire(self._device.to_device)
            copied.wait(self.stream)
        with on(self.stream):
            dist.broadcast(slot[start:stop], 0)


def make_delivery(name: str, device: Device, rank: int, ranks: int, abort: Abort) -> Delivery:
    """The delivery of a layout. A single rank copies everything itself, whatever the name."""
    if name == "replicated" or ranks == 1:
        return Replicated(device)
    if name == "sharded":
        return Sharded(device, rank, ranks, abort)
    return Broadcast(device, rank, abort)
