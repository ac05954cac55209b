"""Random delays at every hand-over."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

from slidedp.host.worker import OptimizerWorker
from slidedp.stream import delivery, reduction, step
from slidedp.stream.arena import HostPeers
from slidedp.stream.device import Signal
from slidedp.stream.gates import Gates
from slidedp.stream.spill import SpillStore
from slidedp.stream.stash import ActivationStash
from tests.pool import replaced

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
