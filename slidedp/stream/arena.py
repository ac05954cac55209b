"""The device memory of a layout's buffers: one block, laid out alike on every rank.

So a rank finds in another's block, at the same place, what it knows from its own. Ranks that share their
blocks map one another's, and tell by counters at the block's beginning what may be read or overwritten.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from slidedp.host.memory import Segment
from slidedp.model.units import aligned
from slidedp.stream import cuda_driver
from slidedp.stream.device import Abort, Device

COUNTERS = 4096
"""Bytes at a shared block's beginning."""
_BOUNDARY = 512
"""Bytes; what torch's own allocator gives."""


def block_bytes(pieces: list[int]) -> int:
    """Size of a block that holds pieces of these many bytes."""
    return COUNTERS + sum(aligned(piece, _BOUNDARY) for piece in pieces)


class Arena:
    """One rank's block, zeroed. Pieces are taken in the same order on every rank."""

    def __init__(self, device: Device, nbytes: int, shared: bool) -> None:
        self._segment = Segment(nbytes, "arena") if shared and not device.is_cuda else None
        self.memory = (
            device.zeros(nbytes, torch.uint8) if self._segment is None else self._segment.tensor(torch.uint8)
        )
        self._taken = COUNTERS

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next [numel] elements."""
        nbytes = numel * dtype.itemsize
        piece = self.memory[self._taken : self._taken + nbytes]
        self._taken += aligned(nbytes, _BOUNDARY)
        # `data`: pieces share no version counter, so that writing to one is not, in autograd's eyes, a
        # change of all.
        return piece.view(dtype).data

    def offset(self, piece: torch.Tensor) -> int:
        """Bytes from the block's beginning to a tensor in it."""
        return piece.data_ptr() - self.memory.data_ptr()

    def share(self, device: Device, rank: int, ranks: int, abort: Abort) -> "CudaPeers | HostPeers":
        """Maps the blocks of all ranks; every rank must call it."""
        if self._segment is None:
            return CudaPeers(self, device, rank, ranks)
        return HostPeers(self, self._segment, rank, ranks, abort)


class CudaPeers:
    """The other ranks' blocks on other GPUs. Everything is enqueued; nothing waits here."""

    def __init__(self, arena: Arena, device: Device, rank: int, ranks: int) -> None:
        self._arena = arena
        self._own = arena.memory.data_ptr()
        torch.cuda.synchronize(device.torch)  # zeroed before anybody counts there
        handles: list[cuda_driver.MemoryHandle | None] = [None] * ranks
        dist.all_gather_object(handles, cuda_driver.export_memory(arena.memory))
        self._handles = {peer: h for peer, h in enumerate(handles) if peer != rank and h is not None}
        self._blocks = {peer: cuda_driver.map_memory(handle) for peer, handle in self._handles.items()}

    def pull(
        self, target: torch.Tensor, place: torch.Tensor, peer: int, stream: torch.cuda.Stream | None
    ) -> None:
        """Copies to `target` what `peer` has where this rank has `place`."""
        source = self._blocks[peer] + self._arena.offset(place)
        cuda_driver.copy(target.data_ptr(), source, place.nbytes, stream)

    def write(self, peer: int, counter: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """Sets a counter of `peer`, behind the stream's work."""
        cuda_driver.write(self._blocks[peer] + 4 * counter, value, stream)

    def wait(self, counter: int, value: int, stream: torch.cuda.Stream | None) -> None:
        """Lets the stream wait until this rank's counter has reached `value`."""
        cuda_driver.wait_at_least(self._own + 4 * counter, value, stream)

    def close(self) -> None:
        """Unmaps the other blocks; every rank must call it, with all its work enqueued."""
        torch.cuda.synchronize()
        dist.barrier()  # nobody pulls any more
        for peer, block in self._blocks.items():
            cuda_driver.unmap_memory(block, self._handles[peer])
        dist.barrier()  # nobody maps this rank's block any more: it may be freed


class HostPeers:
    """The same between processes whose device memory is host memory: a wait blocks the caller. A counter is
    seen after the data that it vouches for, as x86 keeps the order of stores."""

    def __init__(self, arena: Arena, segment: Segment, rank: int, ranks: int, abort: Abort) -> None:
        self._arena, self._abort = arena, abort
        handles = [segment.handle] * ranks
        dist.all_gather_object(handles, segment.handle)
        opened = {peer: Segment.open(handle) for peer, handle in enumerate(handles) if peer != rank}
        self._blocks = {peer: segment.tensor(torch.uint8) for peer, segment in opened.items()}
        self._counters = {peer: _counters(block) for peer, block in self._blocks.items()}
        self._own = _counters(arena.memory)
        self._segments = [segment, *opened.values()]

    def pull(
        self, target: torch.Tensor, place: torch.Tensor, peer: int, stream: torch.cuda.Stream | None
    ) -> None:
        offset = self._arena.offset(place)
        target.copy_(self._blocks[peer][offset : offset + place.nbytes].view(place.dtype))

    def write(self, peer: int, counter: int, value: int, stream: torch.cuda.Stream | None) -> None:
        self._counters[peer][counter] = value

    def wait(self, counter: int, value: int, stream: torch.cuda.Stream | None) -> None:
        while self._own[counter] < value:
            time.sleep(2e-5)
            self._abort.check()

    def close(self) -> None:
        dist.barrier()
        for segment in self._segments:
            segment.close()


def _counters(block: torch.Tensor) -> np.ndarray:
    return block[:COUNTERS].numpy().view(np.uint32)
