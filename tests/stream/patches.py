"""What tests do to the processes of a pool: inject delays, remove a gate, record what compute reads.

`apply` is the context manager that a pool enters in every process of a case.
"""

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import torch

from slidedp.checkpoint import save
from slidedp.host.messages import Written
from slidedp.host.worker import OptimizerWorker
from slidedp.model.units import shard
from slidedp.stream import delivery, reduction, step, transport, update
from slidedp.stream.arena import HostPeers
from slidedp.stream.device import Abort, Signal
from slidedp.stream.gates import Gates
from slidedp.stream.signals import Step
from slidedp.stream.spill import SpillStore, offsets
from slidedp.stream.stash import ActivationStash
from slidedp.stream.step import Engine
from slidedp.stream.transfers import Transfers
from slidedp.stream.update import ShardUpdate
from slidedp.stream.vocabulary import Vocabulary
from tests.pool import replaced

PAUSE = 0.03
"""Seconds. Everything that an open gate would let through takes a millisecond."""


@contextmanager
def apply(index: int | None, names: tuple[str, ...] = (), record: bool = False) -> Iterator[Any]:
    """Applies the named delays and removals to the process of rank `index` (None is the worker).

    With `record`, yields a list that fills with what this process saw.
    """
    with ExitStack() as stack:
        for name in names:
            where, owner, attribute, wrap = PATCHES[name]
            if where == "all" or where == index:
                stack.enter_context(replaced(owner, attribute, wrap(getattr(owner, attribute))))
        if not record:
            yield None
        elif index is None:
            yield stack.enter_context(_recording_worker())
        else:
            yield stack.enter_context(_recording_rank())


Wrap = Callable[[Callable], Callable]


def _pausing(seconds: float = PAUSE) -> Wrap:
    """Sleeps before the function."""

    def wrap(function: Callable) -> Callable:
        def paused(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments, **named)

        return paused

    return wrap


def _pausing_inside(enter: Callable) -> Callable:
    """`_Visit.__enter__`: sleeps after all waits and before compute reads anything."""

    def paused(visit: Any) -> None:
        enter(visit)
        time.sleep(PAUSE / 5)

    return paused


def _on_a_thread(to_host: Callable) -> Callable:
    """`ActivationStash.to_host` as a GPU does it: enqueued at once, copied some time later."""

    def enqueued(stash: ActivationStash, at: Step, unit: Any) -> None:
        at.signal("held", unit.index).wait(None)
        held = at.held.pop(unit.index)

        def later() -> None:
            time.sleep(PAUSE)
            stash._host[unit.index].copy_(held)
            at.signal("stashed", unit.index).fire(None)

        threading.Thread(target=later, daemon=True).start()

    return enqueued


def _spilling_on_a_thread(to_host: Callable) -> Callable:
    """`SpillStore.to_host` as a GPU does it."""

    def enqueued(store: SpillStore, at: Step, unit: Any) -> None:
        at.signal("held", unit.index).wait(None)
        storages = store._held.pop(unit.index)
        starts = offsets(storages)
        memory = store._place(unit, starts[-1])

        def later() -> None:
            time.sleep(PAUSE)
            for start, storage in zip(starts, storages, strict=False):
                memory[start : start + storage.numel()].copy_(storage)
            at.signal("stashed", unit.index).fire(None)

        threading.Thread(target=later, daemon=True).start()

    return enqueued


def _writing_on_a_thread(enqueue: Callable) -> Callable:
    """`ShardUpdate.update` as a GPU does it: the rank's share reaches the host some time later."""

    def enqueued(updates: ShardUpdate, unit: Any, number: int) -> Signal:
        arrays = [*updates._state.tensors(unit), updates._state.delivered(unit)]
        cuts = [shard(*chunk, updates._rank, updates._ranks) for chunk in updates._chunks[unit.index]]
        shares = [array[first:last] for array in arrays for first, _, last in cuts]
        before = [share.clone() for share in shares]
        enqueue(updates, unit, number)
        after = [share.clone() for share in shares]
        for share, old in zip(shares, before, strict=True):
            share.copy_(old)
        written = Signal(Abort())
        updates._written |= {(unit.index, start): written for start, _ in updates._chunks[unit.index]}

        def later() -> None:
            time.sleep(PAUSE)
            for share, new in zip(shares, after, strict=True):
                share.copy_(new)
            written.fire(None)

        threading.Thread(target=later, daemon=True).start()
        return written

    return enqueued


def _at_once(function: Callable) -> Callable:
    """A gate that lets everything through."""
    return lambda *arguments: None


def _without_free(attribute: str) -> Wrap:
    """A method of compute or transfers that takes the unit's slot or gradient buffer as never used before."""

    def wrap(function: Callable) -> Callable:
        def careless(mover: Engine | Transfers, at: Step, unit: Any, *rest: Any) -> Any:
            getattr(mover.buffers, attribute)(unit).free = None
            return function(mover, at, unit, *rest)

        return careless

    return wrap


def _taking_all_offers(wait: Callable) -> Callable:
    """`Copies._wait`: what another rank offers is read whether it is in place or not."""

    def careless(copies: transport.Copies, kind: int, *rest: Any) -> None:
        if kind in (transport.GATHERED, transport.REDUCED):
            wait(copies, kind, *rest)

    return careless


def _without_free_pieces(attribute: str) -> Wrap:
    """A method of an engine, or of its vocabulary, that takes all slots or gradient buffers of pieces as
    never used before."""

    def wrap(function: Callable) -> Callable:
        def careless(owner: Any, *rest: Any) -> Any:
            for buffer in getattr(getattr(owner, "vocabulary", owner), attribute):
                buffer.free = None
            return function(owner, *rest)

        return careless

    return wrap


def _without_free_ring(hold: Callable) -> Callable:
    def careless(stash: ActivationStash, *arguments: Any) -> None:
        stash._out.free = [None] * len(stash._out.free)
        hold(stash, *arguments)

    return careless


def _fired() -> Signal:
    signal = Signal(Abort())
    signal.fire(None)
    return signal


def _never_waiting(kind: str, thread: str) -> Wrap:
    """`Step.signal`: this thread sees signals of this kind as fired already."""

    def wrap(signal: Callable) -> Callable:
        def careless(at: Step, name: str, index: int) -> Signal:
            if name == kind and threading.current_thread().name == thread:
                return _fired()
            return signal(at, name, index)

        return careless

    return wrap


def _first_arrival_is_enough(landed: Callable) -> Callable:
    """`OptimizerWorker._landed`: the first rank's chunk completes it, the others' are ignored."""

    def eager(worker: OptimizerWorker, message: Any) -> None:
        key = message.unit, message.chunk
        if message.step == worker.step and key not in worker._arrivals:
            worker._arrivals[key] = [0.0] * (len(worker.ranks) - 1)
            landed(worker, message)

    return eager


def _first_write_is_enough(handle: Callable) -> Callable:
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


def _mean_of_means(scale: Callable) -> Callable:
    """`OptimizerWorker._denominator_scale` as if every rank had as many targets as the first."""

    def wrong(worker: OptimizerWorker) -> float:
        nominal = worker.config.batch_size // len(worker.ranks) * worker.config.sequence_length
        return nominal / (len(worker.ranks) * max(1, worker._started[worker.step][0]))

    return wrong


def _spoiled(submit: Callable) -> Callable:
    """`Engine._submit`: in the second step, one element of one layer's gradient is not a number."""

    def spoiling(engine: Engine, at: Step, unit: Any, gradients: dict) -> None:
        if at.number == 1 and unit.index == 3:
            next(iter(gradients.values())).view(-1)[5] = torch.nan
        submit(engine, at, unit, gradients)

    return spoiling


# name -> (process: "all", a rank or None for the worker; owner; attribute; wrapper)
PATCHES: dict[str, tuple[Any, Any, str, Wrap]] = {
    "slow update": (None, OptimizerWorker, "_update", _pausing()),
    "slow worker": (None, OptimizerWorker, "_landed", _pausing(PAUSE / 10)),
    "slow visits": ("all", step._Visit, "__enter__", _pausing_inside),
    "slow visits of rank 1": (1, step._Visit, "__enter__", _pausing_inside),
    "slow deliveries": ("all", Transfers, "_deliver", _pausing(PAUSE / 5)),
    "slow deliveries of rank 0": (0, Transfers, "_deliver", _pausing(PAUSE / 5)),
    "slow reductions": ("all", Transfers, "_reduce", _pausing()),
    "slow reductions of rank 1": (1, Transfers, "_reduce", _pausing()),
    "slow updates of rank 1": (1, ShardUpdate, "update", _pausing()),
    "slow landing of rank 1": (1, reduction._Land, "__call__", _pausing(PAUSE / 10)),
    "slow pulls of rank 1": (1, HostPeers, "pull", _pausing()),
    "writes of rank 1 on a thread": (1, ShardUpdate, "update", _writing_on_a_thread),
    "no wait for all writes": (None, OptimizerWorker, "handle", _first_write_is_enough),
    "slow write-back of rank 1": (1, ShardUpdate, "close", _pausing(20 * PAUSE)),  # a new engine takes time
    "no wait for write-backs": ("all", update.dist, "barrier", _at_once),
    "slow stash": ("all", ActivationStash, "to_host", _pausing()),
    "stash on a thread": ("all", ActivationStash, "to_host", _on_a_thread),
    "spill on a thread": ("all", SpillStore, "to_host", _spilling_on_a_thread),
    "no wait for published": ("all", Gates, "wait_published", _at_once),
    "no wait for consumed": ("all", Gates, "wait_consumed", _at_once),
    "no wait for all ranks": (None, OptimizerWorker, "_landed", _first_arrival_is_enough),
    "no check of landings": (None, OptimizerWorker, "_expect", _at_once),
    "no wait for slot": ("all", Transfers, "_deliver", _without_free("slot")),
    "no wait for others' reading": ("all", transport._Read, "wait", _at_once),
    "no wait for others' offers": ("all", transport.Copies, "_wait", _taking_all_offers),
    "no wait for gradient buffer": ("all", Engine, "_submit", _without_free("gradient")),
    "no wait for piece slot": ("all", Transfers, "_deliver", _without_free_pieces("_slots")),
    "no wait for piece buffer": ("all", Vocabulary, "_submit", _without_free_pieces("_gradients")),
    "no wait for delivered": ("all", Step, "signal", _never_waiting("delivered", "MainThread")),
    "no wait for gradient": ("all", Step, "signal", _never_waiting("gradient", "slidedp-transfer")),
    "no wait for outgoing ring": ("all", ActivationStash, "hold", _without_free_ring),
    "no wait for stashed": ("all", Step, "signal", _never_waiting("stashed", "slidedp-transfer")),
    "slow checkpoint": (None, save, "write_shard", _pausing()),
    "no wait for checkpoint": (None, save.Snapshot, "wait", _at_once),
    "nan in rank 1": (1, Engine, "_submit", _spoiled),
    "mean of means": (None, OptimizerWorker, "_denominator_scale", _mean_of_means),
}


# --- random delays --------------------------------------------------------------------------------

HAND_OVERS: tuple[tuple[Any, str], ...] = (
    *(
        (kind, "chunk") for kind in (delivery.Replicated, delivery.Sharded, delivery.Broadcast)
    ),  # copy, gather
    *((kind, "chunk") for kind in (reduction.OnHost, reduction.Scattered, reduction.ToRoot)),  # reduce
    (reduction._Land, "__call__"),
    *((HostPeers, name) for name in ("pull", "write")),
    (Signal, "fire"),
    (Gates, "send"),  # landed
    (Gates, "_apply"),  # published
    (step._Visit, "__enter__"),
    (step._Visit, "__exit__"),
    (ActivationStash, "to_host"),
    (ActivationStash, "to_device"),
    (SpillStore, "to_host"),
    (SpillStore, "to_device"),
    (OptimizerWorker, "handle"),
    (OptimizerWorker, "update_one"),
    (OptimizerWorker, "_send"),  # publish
)


@contextmanager
def shaken(index: int | None, seed: int, share: float, seconds: float) -> Iterator[list[int]]:
    """A random `share` of all hand-overs of this process waits up to `seconds`, before or after it.

    Yields a list that ends with how many did.
    """
    random, count = Random(f"{seed} {index}"), [0]

    def wrap(function: Callable) -> Callable:
        def shaking(*arguments: Any, **named: Any) -> Any:
            early, late = (random.random() < share / 2 for _ in range(2))
            count[0] += early + late
            if early:
                time.sleep(random.random() * seconds)
            result = function(*arguments, **named)
            if late:
                time.sleep(random.random() * seconds)
            return result

        return shaking

    with ExitStack() as stack:
        for owner, name in HAND_OVERS:
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield count


# --- recording ------------------------------------------------------------------------------------


def _digest(memory: torch.Tensor) -> int:
    return zlib.crc32(memory.detach().view(torch.uint8).numpy().tobytes())


@contextmanager
def _recording_rank() -> Iterator[list]:
    """(step, visit, unit, digest, time) of what a visit reads, after its waits and at its end."""
    seen: list[tuple[int, int, int, int, float]] = []
    enter, leave = step._Visit.__enter__, step._Visit.__exit__

    def look(visit: Any) -> None:
        engine = visit._engine
        units = [visit._unit]
        if engine.tied and visit._visit == engine.visits.head:
            units.append(engine.units[0])
        for unit in units:
            memory = engine.buffers.slot(unit).memory[: unit.numel]
            seen.append((visit._step.number, visit._visit, unit.index, _digest(memory), time.monotonic()))

    def recording_enter(visit: Any) -> None:
        enter(visit)
        look(visit)

    def recording_leave(visit: Any, *failure: Any) -> None:
        look(visit)
        leave(visit, *failure)

    with (
        replaced(step._Visit, "__enter__", recording_enter),
        replaced(step._Visit, "__exit__", recording_leave),
    ):
        yield seen


@contextmanager
def _recording_worker() -> Iterator[list]:
    """(unit, version, digest, time) of every version that is published, and of version 0."""
    seen: list[tuple[int, int, int, float]] = []
    use, send = OptimizerWorker._use, OptimizerWorker._send

    def look(worker: OptimizerWorker, unit: int, version: int) -> None:
        delivered = worker.state.delivered(worker.state.units[unit])
        seen.append((unit, version, _digest(delivered), time.monotonic()))

    def recording_use(worker: OptimizerWorker, *arguments: Any) -> None:
        use(worker, *arguments)
        if not seen:
            for unit in worker.state.units:
                look(worker, unit.index, 0)

    def recording_send(worker: OptimizerWorker, message: Any) -> None:
        if type(message).__name__ == "Published":
            look(worker, message.unit, message.version)
        send(worker, message)

    with (
        replaced(OptimizerWorker, "_use", recording_use),
        replaced(OptimizerWorker, "_send", recording_send),
    ):
        yield seen
