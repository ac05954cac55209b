"""Host to GPU: how one chunk of a unit gets into every rank's slot."""

from typing import Protocol

import torch

from slidedp.model.units import shard
from slidedp.stream.buffers import Elements
from slidedp.stream.device import Device, on
from slidedp.stream.transport import DELIVERY, Transport


class Delivery(Protocol):
    """One way of delivery. Chunks go in order; the slot is complete when `stream` has run."""

    stream: torch.cuda.Stream | None
    """Where the last operation of a chunk is enqueued."""

    def chunk(self, host: torch.Tensor, slot: Elements, start: int, stop: int) -> None:
        """Enqueues elements [start, stop) of `host` (the unit on the host) into `slot`."""


class Replicated:
    """Every rank copies the whole chunk over its own link."""

    def __init__(self, device: Device) -> None:
        self.stream = device.to_device

    def chunk(self, host: torch.Tensor, slot: Elements, start: int, stop: int) -> None:
        with on(self.stream):
            slot[start:stop].copy_(host[start:stop], non_blocking=True)


class Sharded:
    """Each rank copies 1/N of the chunk to its place in the slot; an all-gather fills in the rest."""

    def __init__(self, device: Device, transport: Transport, rank: int, ranks: int) -> None:
        self._to_device, self._transport = device.to_device, transport
        self._rank, self._ranks = rank, ranks
        self.stream = transport.gathers

    def chunk(self, host: torch.Tensor, slot: Elements, start: int, stop: int) -> None:
        first, last, host_last = shard(start, stop, self._rank, self._ranks)
        with on(self._to_device):
            slot[first:host_last].copy_(host[first:host_last], non_blocking=True)
        offer = self._transport.offer(DELIVERY, self._to_device)
        self._transport.all_gather(slot[start : start + (last - first) * self._ranks], offer)


class Broadcast:
    """Rank 0 copies the chunk and broadcasts it between GPUs."""

    def __init__(self, device: Device, transport: Transport, rank: int) -> None:
        self._to_device, self._transport, self._rank = device.to_device, transport, rank
        self.stream = transport.gathers

    def chunk(self, host: torch.Tensor, slot: Elements, start: int, stop: int) -> None:
        if self._rank == 0:
            with on(self._to_device):
                slot[start:stop].copy_(host[start:stop], non_blocking=True)
        self._transport.broadcast(slot[start:stop], self._transport.offer(DELIVERY, self._to_device))


def make_delivery(name: str, device: Device, transport: Transport, rank: int, ranks: int) -> Delivery:
    """The delivery of a layout. A single rank copies everything itself, whatever the name."""
    if name == "replicated" or ranks == 1:
        return Replicated(device)
    if name == "sharded":
        return Sharded(device, transport, rank, ranks)
    return Broadcast(device, transport, rank)
