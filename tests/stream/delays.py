"""Delays that tests inject, each where a gate must make it harmless."""

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import barrier

from slidedp.stream.device import Abort, Signal
from slidedp.stream.signals import Step
from slidedp.stream.spill import SpillStore, offsets
from slidedp.stream.stash import ActivationStash
from slidedp.stream.update import ShardUpdate

PAUSE = 0.03
"""Seconds. Everything that an open gate would let through takes a millisecond."""

Wrap = Callable[[Callable], Callable]


def pausing(seconds: float = PAUSE) -> Wrap:
    """Sleeps before the function."""

    def wrap(function: Callable) -> Callable:
        def paused(*arguments: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments, **named)

        return paused

    return wrap


def pausing_inside(enter: Callable) -> Callable:
    """`_Visit.__enter__`: sleeps after all waits and before compute reads anything."""

    def paused(visit: Any) -> None:
        enter(visit)
        time.sleep(PAUSE / 5)

    return paused


def on_a_thread(to_host: Callable) -> Callable:
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


def spilling_on_a_thread(to_host: Callable) -> Callable:
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


def writing_on_a_thread(enqueue: Callable) -> Callable:
    """`ShardUpdate.update` as a GPU does it: the rank's share reaches the host some time later."""

    def enqueued(updates: ShardUpdate, unit: Any, number: int) -> Signal:
        parts = updates._parts[unit.index]
        shares = [share for part in parts for share in (*part.state, part.working) if share is not None]
        before = [share.clone() for share in shares]
        enqueue(updates, unit, number)
        after = [share.clone() for share in shares]
        for share, old in zip(shares, before, strict=True):
            share.copy_(old)
        written = Signal(Abort())
        updates._written |= {part.key: written for part in parts}

        def later() -> None:
            time.sleep(PAUSE)
            for share, new in zip(shares, after, strict=True):
                share.copy_(new)
            written.fire(None)

        threading.Thread(target=later, daemon=True).start()
        return written

    return enqueued


def written_back_after_a_reading(close: Callable) -> Callable:
    """The first `ShardUpdate.close` of one rank: the resident state reaches the host when the other rank has
    read what its next layout needs (`read_before_a_write_back`)."""
    first = True

    def late(updates: ShardUpdate) -> None:
        nonlocal first
        if first:
            first = False
            barrier()
        close(updates)

    return late


def read_before_a_write_back(bring: Callable) -> Callable:
    """`ShardUpdate._bring` of the other rank, in its second layout."""
    layouts = 0

    def early(updates: ShardUpdate, parts: list) -> dict:
        nonlocal layouts
        layouts += 1
        brought = bring(updates, parts)
        if layouts == 2:
            barrier()
        return brought

    return early
