"""Between GPUs: how ranks get parts of a buffer from one another.

`Collectives` are NCCL's (gloo's on a CPU): kernels that hold SMs while they run, and while they wait for
another rank. `Copies` pull from the other ranks' memory with copy engines, which need no SM; instead of
meeting in a collective, ranks count what each has ready and what each has read.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from slidedp.layout import Layout
from slidedp.model.units import Unit, chunks, shard
from slidedp.stream.arena import Arena
from slidedp.stream.device import Abort, Device, Signal, on

DELIVERY, UPDATE, GRADIENT, GATHERED, REDUCED = range(5)
"""What ranks count. Of each, all ranks make the same posts in the same order, from one stream."""


def staging_shape(units: tuple[Unit, ...], layout: Layout, ranks: int, itemsize: int) -> tuple[int, int]:
    """[ranks, n] elements that `Copies` needs to sum the largest chunk's parts on any rank."""
    if layout.reduction == "cpu":
        return ranks, 0
    cut = layout.chunk_bytes, itemsize, ranks, layout.vocabulary_pieces
    most = max(stop - start for unit in units for start, stop in chunks(unit, *cut))
    return ranks, shard(0, most, 0, ranks)[1] if layout.reduction == "gpu" else most


class Offer(NamedTuple):
    """A rank's own part of a buffer, for the others to read."""

    ready: Signal
    """Fired when it is in place."""
    kind: int
    """DELIVERY or UPDATE."""
    number: int
    """How many of that kind there are with it."""


class Receipt(Protocol):
    """That the others have read what this rank offered."""

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Makes what is enqueued on `stream` next run after that."""


class Transport(Protocol):
    """One way between GPUs. Buffers are flat; of [ranks * n] elements, rank r's part is the r-th n."""

    gathers: torch.cuda.Stream | None
    """Where gathers and broadcasts are enqueued, in the same order on every rank."""
    reduces: torch.cuda.Stream | None
    """Where reductions are enqueued, in the same order on every rank."""

    def offer(self, kind: int, stream: torch.cuda.Stream | None) -> Offer:
        """Makes this rank's part known, as it is when the work enqueued on `stream` so far has run."""

    def all_gather(self, whole: torch.Tensor, offer: Offer) -> None:
        """Fills in the other ranks' parts."""

    def broadcast(self, whole: torch.Tensor, offer: Offer) -> None:
        """Fills the buffer from rank 0's."""

    def reduce_scatter(self, whole: torch.Tensor) -> None:
        """Makes this rank's part the sum over ranks; the rest is undefined."""

    def reduce(self, whole: torch.Tensor) -> None:
        """Makes rank 0's buffer the sum over ranks; the others' are undefined."""

    def gathered(self) -> Receipt | None:
        """That of all offers so far; None where the enqueued work itself says so."""

    def reduced(self) -> Receipt | None:
        """That of all gradients so far."""

    def close(self) -> None:
        """Every rank must call it, with all its work enqueued."""


class Collectives:
    """Collectives of torch.distributed, all on one stream: two communicators could wait for each other."""

    def __init__(self, device: Device, rank: int, ranks: int, abort: Abort) -> None:
        self._rank, self._ranks, self._abort = rank, ranks, abort
        self.gathers = self.reduces = device.collective

    def offer(self, kind: int, stream: torch.cuda.Stream | None) -> Offer:
        ready = Signal(self._abort)
        ready.fire(stream)
        return Offer(ready, kind, 0)

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        n = whole.numel() // self._ranks
        return whole[self._rank * n : (self._rank + 1) * n]

    def all_gather(self, whole: torch.Tensor, offer: Offer) -> None:
        offer.ready.wait(self.gathers)
        if self._ranks > 1:
            with on(self.gathers):
                dist.all_gather_into_tensor(whole, self._part(whole))

    def broadcast(self, whole: torch.Tensor, offer: Offer) -> None:
        offer.ready.wait(self.gathers)
        with on(self.gathers):
            dist.broadcast(whole, 0)

    def reduce_scatter(self, whole: torch.Tensor) -> None:
        if self._ranks > 1:
            with on(self.reduces):
                dist.reduce_scatter_tensor(self._part(whole), whole)

    def reduce(self, whole: torch.Tensor) -> None:
        with on(self.reduces):
            dist.reduce(whole, 0)

    def gathered(self) -> None:
        return None

    def reduced(self) -> None:
        return None

    def close(self) -> None:
        pass


class Copies:
    """Copies from the other ranks' memory. Sums are taken in rank order, in FP32.

    Before a rank overwrites what others read, it waits until they have counted that they did: a `Receipt`.
    """

    def __init__(
        self, device: Device, arena: Arena, rank: int, ranks: int, staging: torch.Tensor, abort: Abort
    ) -> None:
        """`staging` [ranks, n]: where a reduction brings all ranks' parts together."""
        self._rank, self._abort, self._staging = rank, abort, staging
        self._ranks = ranks
        self._others = [(rank + i) % ranks for i in range(1, ranks)]  # not all from one rank at once
        self.gathers, self.reduces = device.gather, device.collective
        self._peers = arena.share(device, rank, ranks, abort)
        self._posted = [0] * 5

    def _post(self, kind: int, stream: torch.cuda.Stream | None) -> int:
        """Tells the others, once the stream's work so far has run."""
        self._posted[kind] += 1
        for peer in self._others:
            self._peers.write(peer, kind * self._ranks + self._rank, self._posted[kind], stream)
        return self._posted[kind]

    def _wait(self, kind: int, peer: int, count: int, stream: torch.cuda.Stream | None) -> None:
        self._peers.wait(kind * self._ranks + peer, count, stream)

    def offer(self, kind: int, stream: torch.cuda.Stream | None) -> Offer:
        ready = Signal(self._abort)
        ready.fire(stream)
        return Offer(ready, kind, self._post(kind, stream))

    def all_gather(self, whole: torch.Tensor, offer: Offer) -> None:
        offer.ready.wait(self.gathers)
        parts = whole.chunk(self._ranks)
        for peer in self._others:
            self._wait(offer.kind, peer, offer.number, self.gathers)
            self._peers.pull(parts[peer], parts[peer], peer, self.gathers)
        self._post(GATHERED, self.gathers)

    def broadcast(self, whole: torch.Tensor, offer: Offer) -> None:
        offer.ready.wait(self.gathers)
        if self._rank:
            self._wait(offer.kind, 0, offer.number, self.gathers)
            self._peers.pull(whole, whole, 0, self.gathers)
        self._post(GATHERED, self.gathers)

    def reduce_scatter(self, whole: torch.Tensor) -> None:
        self._sum(whole.chunk(self._ranks)[self._rank])

    def reduce(self, whole: torch.Tensor) -> None:
        self._sum(None if self._rank else whole)

    def _sum(self, part: torch.Tensor | None) -> None:
        """Makes `part` the sum over ranks; None: this rank sums nothing."""
        count = self._post(GRADIENT, self.reduces)
        if part is None:
            self._post(REDUCED, self.reduces)
            return
        staging = self._staging[:, : part.numel()]
        for peer in self._others:
            self._wait(GRADIENT, peer, count, self.reduces)
            self._peers.pull(staging[peer], part, peer, self.reduces)
        self._post(REDUCED, self.reduces)
        with on(self.reduces):
            staging[self._rank].copy_(part)
            torch.sum(staging, 0, out=part)

    def gathered(self) -> Receipt:
        return self._receipt(GATHERED)

    def reduced(self) -> Receipt:
        return self._receipt(REDUCED)

    def _receipt(self, kind: int) -> Receipt:
        count = self._posted[kind]

        def wait(stream: torch.cuda.Stream | None) -> None:
            for peer in self._others:
                self._wait(kind, peer, count, stream)

        return _Read(wait)

    def close(self) -> None:
        self._peers.close()


class _Read:
    """A receipt by the other ranks' counts of what they have read."""

    def __init__(self, wait: Callable[[torch.cuda.Stream | None], None]) -> None:
        self._wait = wait

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        self._wait(stream)
