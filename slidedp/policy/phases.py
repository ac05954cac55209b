"""What the measuring processes of a probe go through together, and how each of them takes a time."""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from slidedp.host.memory import Handle
from slidedp.preflight import Plan
from slidedp.stream.device import Device

REPEATS = 5
"""Calls whose median counts."""
SUSTAINED = 1.5
"""Seconds of compute, in the second half of which a GPU runs about as fast as it goes on to."""
ENQUEUED = 20
"""The same of calls that are timed until they are enqueued: milliseconds each, on cores that others use. With
5, two machines of a kind told 0.6 and 1.0 ms of one layer, and 1.4 and 1.0 times that beside the worker."""


class Sizes(NamedTuple):
    """How much each measurement moves: past every cache, and no more."""

    seconds: float
    """Of one phase."""
    copy: int
    """Bytes of one copy."""
    region: int
    """Bytes of one rank's region of host memory, each way."""
    params: int
    """Parameters that the worker updates."""
    collective: int
    """Bytes of one collective."""


ON_CUDA = Sizes(0.4, 64 * 2**20, 512 * 2**20, 64 * 2**20, 64 * 2**20)
ON_CPU = Sizes(0.1, 4 * 2**20, 32 * 2**20, 4 * 2**20, 4 * 2**20)

# (name, whether only rank 0 copies, copies up, copies down, the worker updates)
PHASES = (
    ("up", True, True, False, False),
    ("down", True, False, True, False),
    ("both", True, True, True, False),
    ("up_all", False, True, False, False),
    ("down_all", False, False, True, False),
    ("both_all", False, True, True, False),
    ("update", False, False, False, True),
    ("update_up", False, True, False, True),
    ("update_down", False, False, True, True),
    ("update_both", False, True, True, True),
)


Result = TypeVar("Result")


class Setup(NamedTuple):
    """What every process is given. The barrier holds all ranks and the worker."""

    planned: Plan
    memory: Handle
    folder: str
    barrier: Any
    sizes: Sizes

    def beside_worker(self, work: Callable[[], Result]) -> Result:
        """A rank's `work`, while the worker is in `update_meanwhile`."""
        self.barrier.wait()
        result = work()
        self.barrier.wait()
        return result

    def update_meanwhile(self, update: Callable[[], Any]) -> None:
        """The worker's part of `beside_worker`: updates until every rank has finished."""
        self.barrier.wait()
        while self.barrier.n_waiting < int(self.planned.config.ranks or 1):
            update()
        self.barrier.wait()


def compute_seconds(device: Device, *works: Callable[[], Any], sustained: float = 0.0) -> list[float]:
    """Median time of each of `works`, which are called in turn, after two rounds that do not count.

    On a GPU one call follows on another for `sustained` seconds at least, of which the second half counts.
    Right after a pause a layer of Qwen3-0.6B took 4.7 ms on an H200; at its power limit 5.2, as in a step.
    """
    for _ in range(2):
        for work in works:
            work()
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    while len(rounds) < REPEATS or (device.is_cuda and time.perf_counter() - begun < sustained):
        rounds += _on_gpu(works) if device.is_cuda else [_on_cpu(works)]
    counted = rounds[len(rounds) // 2 :] if device.is_cuda else rounds
    return [float(median(times)) for times in zip(*counted, strict=True)]


def _on_gpu(works: tuple[Callable[[], Any], ...]) -> list[list[float]]:
    """Seconds of each of `works` in REPEATS rounds, without a gap."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS * len(works) + 1)]
    marks[0].record()
    for work, mark in zip(works * REPEATS, marks[1:], strict=True):
        work()
        mark.record()
    marks[-1].synchronize()
    times = [begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(marks)]
    return [times[i : i + len(works)] for i in range(0, len(times), len(works))]


def _on_cpu(works: tuple[Callable[[], Any], ...]) -> list[float]:
    """Seconds of each of `works` in one round."""
    times = []
    for work in works:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return times


def seconds(device: Device, work: Callable[[], Any]) -> float:
    """Median time of `work` from its call to its end, after two calls that do not count."""
    times = []
    for _ in range(REPEATS + 2):
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return median(times[2:])


def enqueue_seconds(device: Device, work: Callable[[], Any]) -> float:
    """Median time until `work` is enqueued on an idle GPU, after two calls that do not count."""
    times = []
    for _ in range(ENQUEUED + 2):
        synchronize(device)
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    synchronize(device)
    return median(times[2:])


def synchronize(device: Device) -> None:
    """Waits for all of a GPU's work."""
    if device.is_cuda:
        torch.cuda.synchronize()
