"""GPU to host: how one chunk of every rank's gradient becomes a sum in host memory."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from slidedp.host.landing import Landing
from slidedp.layout import Layout
from slidedp.model.units import Unit, shard
from slidedp.stream.buffers import Elements
from slidedp.stream.device import Abort, Device, Signal, on
from slidedp.stream.transport import Transport


class Arrival(NamedTuple):
    """What a rank tells the worker once a chunk has landed."""

    done: Signal
    """Fired when this rank's part of the reduction and its copy to the host are over."""
    sum_of_squares: torch.Tensor | None
    """FP64 scalar of the elements that this rank lands, on the host when `done` has fired; None where
    the worker sums, or no norm is asked for."""


Place = Callable[[Unit, int, int], torch.Tensor]


class Reduction(Protocol):
    """One way of reduction. The gradient buffer is free when every arrival of its chunks is done."""

    def chunk(self, unit: Unit, gradient: Elements, start: int, stop: int) -> Arrival:
        """Enqueues the reduction of elements [start, stop); `gradient` is complete on the streams."""


class OnHost:
    """Every rank lands its whole gradient in its own lane; the worker sums the lanes."""

    def __init__(self, device: Device, landing: Landing, rank: int, abort: Abort) -> None:
        self._device, self._landing, self._rank, self._abort = device, landing, rank, abort

    def chunk(self, unit: Unit, gradient: Elements, start: int, stop: int) -> Arrival:
        done = Signal(self._abort)
        with on(self._device.to_host):
            lane = self._landing.lane(unit, self._rank)
            lane[start:stop].copy_(gradient[start:stop], non_blocking=True)
            done.fire(self._device.to_host)
        return Arrival(done, None)


class Scattered:
    """Reduce-scatter between GPUs, in place; each rank lands its 1/N of the sum.

    `place(unit, start, stop)` is where a rank's share of chunk [start, stop) lands.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        place: Place,
        rank: int,
        ranks: int,
        abort: Abort,
        norm: bool,
    ) -> None:
        self._transport, self._place, self._rank, self._ranks = transport, place, rank, ranks
        self._land = _Land(device, transport, abort, norm)

    def chunk(self, unit: Unit, gradient: Elements, start: int, stop: int) -> Arrival:
        first, last, host_last = shard(start, stop, self._rank, self._ranks)
        self._transport.reduce_scatter(gradient[start : start + (last - first) * self._ranks])
        return self._land(gradient[first:host_last], self._place(unit, start, stop))


class ToRoot:
    """Reduce to rank 0, which lands the whole sum."""

    def __init__(
        self,
        device: Device,
        transport: Transport,
        landing: Landing,
        rank: int,
        abort: Abort,
        norm: bool,
    ) -> None:
        self._transport, self._landing, self._rank, self._abort = transport, landing, rank, abort
        self._land = _Land(device, transport, abort, norm)

    def chunk(self, unit: Unit, gradient: Elements, start: int, stop: int) -> Arrival:
        self._transport.reduce(gradient[start:stop])
        if self._rank == 0:
            return self._land(gradient[start:stop], self._landing.lane(unit, 0)[start:stop])
        done = Signal(self._abort)
        done.fire(self._transport.reduces)
        return Arrival(done, None)


def in_lane(landing: Landing, rank: int, ranks: int) -> Place:
    """A rank's shares in the landing's only lane."""

    def place(unit: Unit, start: int, stop: int) -> torch.Tensor:
        first, _, last = shard(start, stop, rank, ranks)
        return landing.lane(unit, 0)[first:last]

    return place


class _Land:
    """Copies a reduced piece to its place, behind its reduction; sums its squares if there is a `norm`."""

    def __init__(self, device: Device, transport: Transport, abort: Abort, norm: bool) -> None:
        self._device, self._reduces, self._abort, self._norm = device, transport.reduces, abort, norm

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> Arrival:
        reduced, done = Signal(self._abort), Signal(self._abort)
        squares = None
        with on(self._reduces):
            if self._norm:
                squares = _sum_of_squares(source)
            reduced.fire(self._reduces)
        reduced.wait(self._device.to_host)
        with on(self._device.to_host):
            target.copy_(source, non_blocking=True)
            if squares is not None:  # here, not on the reductions' stream: large copies may be ahead of it
                squares = self._device.copied(squares)
            done.fire(self._device.to_host)
        return Arrival(done, squares)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """In FP64: a norm over billions of elements must not depend on how they were cut."""
    if not x.is_cuda:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
    from slidedp.stream import triton_kernels  # Triton comes with torch where there is a GPU

    return triton_kernels.sum_of_squares(x)


def make_reduction(
    layout: Layout,
    device: Device,
    transport: Transport,
    landing: Landing,
    rank: int,
    ranks: int,
    abort: Abort,
) -> Reduction:
    """The reduction of a layout. A single rank's gradient is the sum already, whatever its name."""
    norm = layout.schedule == "in_forward"
    if layout.reduction == "cpu" and ranks > 1:
        return OnHost(device, landing, rank, abort)
    if layout.reduction == "gpu" or ranks == 1:
        return Scattered(device, transport, in_lane(landing, rank, ranks), rank, ranks, abort, norm)
    return ToRoot(device, transport, landing, rank, abort, norm)
