"""Gates taken out, and faults put in: tests show that each is noticed."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from slidedp.host.messages import Written
from slidedp.host.worker import OptimizerWorker
from slidedp.stream import transport
from slidedp.stream.device import Abort, Signal
from slidedp.stream.signals import Step
from slidedp.stream.stash import ActivationStash
from slidedp.stream.step import Engine
from slidedp.stream.transfers import Transfers
from tests.stream.delays import Wrap


def at_once(function: Callable) -> Callable:
    """A gate that lets everything through."""
    return lambda *arguments: None


def without_free(attribute: str) -> Wrap:
    """A method of compute or transfers that takes the unit's slot or gradient buffer as never used before."""

    def wrap(function: Callable) -> Callable:
        def careless(mover: Engine | Transfers, at: Step, unit: Any, *rest: Any) -> Any:
            getattr(mover.buffers, attribute)(unit).free = None
            return function(mover, at, unit, *rest)

        return careless

    return wrap


def taking_all_offers(wait: Callable) -> Callable:
    """`Copies._wait`: what another rank offers is read whether it is in place or not."""

    def careless(copies: transport.Copies, kind: int, *rest: Any) -> None:
        if kind in (transport.GATHERED, transport.REDUCED):
            wait(copies, kind, *rest)

    return careless


def without_free_pieces(attribute: str) -> Wrap:
    """A method of an engine, or of its vocabulary, that takes all slots or gradient buffers of pieces as
    never used before."""

    def wrap(function: Callable) -> Callable:
        def careless(owner: Any, *rest: Any) -> Any:
            for buffer in getattr(getattr(owner, "vocabulary", owner), attribute):
                buffer.free = None
            return function(owner, *rest)

        return careless

    return wrap


def without_free_ring(hold: Callable) -> Callable:
    def careless(stash: ActivationStash, *arguments: Any) -> None:
        stash._out.free = [None] * len(stash._out.free)
        hold(stash, *arguments)

    return careless


def fired() -> Signal:
    signal = Signal(Abort())
    signal.fire(None)
    return signal


def never_waiting(kind: str, thread: str) -> Wrap:
    """`Step.signal`: this thread sees signals of this kind as fired already."""

    def wrap(signal: Callable) -> Callable:
        def careless(at: Step, name: str, index: int) -> Signal:
            if name == kind and threading.current_thread().name == thread:
                return fired()
            return signal(at, name, index)

        return careless

    return wrap


def first_arrival_is_enough(landed: Callable) -> Callable:
    """`OptimizerWorker._landed`: the first rank's chunk completes it, the others' are ignored."""

    def eager(worker: OptimizerWorker, message: Any) -> None:
        key = message.unit, message.chunk
        if message.step == worker.step and key not in worker._arrivals:
            worker._arrivals[key] = [0.0] * (len(worker.ranks) - 1)
            landed(worker, message)

    return eager


def first_write_is_enough(handle: Callable) -> Callable:
    """`OptimizerWorker.handle`: a unit counts as updated on the GPUs when the first rank has written."""
    seen: set[tuple[int, int]] = set()

    def eager(worker: OptimizerWorker, message: Any) -> None:
        if isinstance(message, Written) and message.step == worker.step:
            if (message.step, message.unit) in seen:
                return
            seen.add((message.step, message.unit))
            worker._to_update[message.unit] = 1
        if not isinstance(message, Written) or message.step >= worker.step:
            handle(worker, message)

    return eager


def mean_of_means(scale: Callable) -> Callable:
    """`OptimizerWorker._denominator_scale` as if every rank had as many targets as the first."""

    def wrong(worker: OptimizerWorker) -> float:
        nominal = worker.config.batch_size // len(worker.ranks) * worker.config.sequence_length
        return nominal / (len(worker.ranks) * max(1, worker._started[worker.step][0]))

    return wrong


def spoiled(submit: Callable) -> Callable:
    """`Engine._submit`: in the second step, one element of one layer's gradient is not a number."""

    def spoiling(engine: Engine, at: Step, unit: Any, gradients: dict) -> None:
        if at.number == 1 and unit.index == 3:
            next(iter(gradients.values())).view(-1)[5] = torch.nan
        submit(engine, at, unit, gradients)

    return spoiling


# name -> (process: "all", a rank or None for the worker; owner; attribute; wrapper)
