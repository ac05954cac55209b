"""GPU to host: how one chunk of every rank's gradient becomes a sum in host memory."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from slidedp.config import Layout
from slidedp.host.landing import Landing
from slidedp.model.units import Unit, shard
from slidedp.stream.device import Abort, Device, Signal, on


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

    def chunk(self, unit: Unit, gradient: torch.Tensor, start: int, stop: int) -> Arrival:
        """Enqueues the reduction of elements [start, stop); `gradient` is complete on the streams."""


class OnHost:
    """Every rank lands its whole gradient in its own lane; the worker sums the lanes."""

    def __init__(self, device: Device, landing: Landing, rank: int, abort: Abort) -> None:
        self._device, self._landing, self._rank, self._abort = device, landing, rank, abort

    def chunk(self, unit: Unit, gradient: torch.Tensor, start: int, stop: int) -> Arrival:
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

    def __init__(self, device: Device, place: Place, rank: int, ranks: int, abort: Abort, norm: bool) -> None:
        self._device, self._place, self._abort, self._norm = device, place, abort, norm
        self._rank, self._ranks = rank, ranks

    def chunk(self, unit: Unit, gradient: torch.Tensor, start: int, stop: int) -> Arrival:
        first, last, host_last = shard(start, stop, self._rank, self._ranks)
        if self._ranks > 1:
            with on(self._device.collective):
                whole = gradient[start : start + (last - first) * self._ranks]
                dist.reduce_scatter_tensor(gradient[first:last], whole)
        source, target = gradient[first:host_last], self._place(unit, start, stop)
        return _land(self._device, self._abort, source, target, self._norm)


class ToRoot:
    """Reduce to rank 0, which lands the whole sum."""

    def __init__(self, device: Device, landing: Landing, rank: int, abort: Abort, norm: bool) -> None:
        self._device, self._landing, self._rank, self._abort = device, landing, rank, abort
        self._norm = norm

    def chunk(self, unit: Unit, gradient: torch.Tensor, start: int, stop: int) -> Arrival:
        with on(self._device.collective):
            dist.reduce(gradient[start:stop], 0)
        if self._rank == 0:
            lane = self._landing.lane(unit, 0)
            return _land(self._device, self._abort, gradient[start:stop], lane[start:stop], self._norm)
        done = Signal(self._abort)
        done.fire(self._device.collective)
        return Arrival(done, None)


def in_lane(landing: Landing, rank: int, ranks: int) -> Place:
    """A rank's shares in the landing's only lane."""

    def place(unit: Unit, start: int, stop: int) -> torch.Tensor:
        first, _, last = shard(start, stop, rank, ranks)
        return landing.lane(unit, 0)[first:last]

    return place


def _land(device: Device, abort: Abort, source: torch.Tensor, target: torch.Tensor, norm: bool) -> Arrival:
    """Copies a reduced piece to its place, behind the collective; sums its squares if there is a `norm`."""
    reduced, done = Signal(abort), Signal(abort)
    squares = None
    with on(device.collective):
        if norm:
            squares = device.take(_sum_of_squares(source))
        reduced.fire(device.collective)
    reduced.wait(device.to_host)
    with on(device.to_host):
        target.copy_(source, non_blocking=True)
        done.fire(device.to_host)
    return Arrival(done, squares)


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """In FP64: a norm over billions of elements must not depend on how they were cut."""
    if not x.is_cuda:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square()
    from slidedp.stream import triton_kernels  # Triton comes with torch where there is a GPU

    return triton_kernels.sum_of_squares(x)


def make_reduction(
    layout: Layout, device: Device, landing: Landing, rank: int, ranks: int, abort: Abort
) -> Reduction:
    """The reduction of a layout. A single rank's gradient is the sum already, whatever its name."""
    norm = layout.schedule == "in_forward"
    if layout.reduction == "cpu" and ranks > 1:
        return OnHost(device, landing, rank, abort)
    if layout.reduction == "gpu" or ranks == 1:
        return Scattered(device, in_lane(landing, rank, ranks), rank, ranks, abort, norm)
    return ToRoot(device, landing, rank, abort, norm)
