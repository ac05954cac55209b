"""Delays on a rank's CUDA streams, where events alone keep the order."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch

from slidedp import processes
from slidedp.stream.device import Device, Signal
from tests.pool import replaced

CYCLES = 2_000_000
"""Of the GPU's clock, about a millisecond: everything that these small models compute takes less."""
SHARE = 0.1
"""Of the hand-overs between streams that are delayed."""


def spawned(index: int, ranks: int, *rest: Any, seed: int = 0, blind: str | None = None) -> None:
    """`slidedp.processes._enter` with delays in every rank. `blind` names the stream that waits for
    nothing."""
    with streams_shaken(Random(f"{seed} {index}"), blind):
        processes._enter(index, ranks, *rest)


@contextmanager
def streams_shaken(random: Random, blind: str | None = None) -> Iterator[None]:
    """At random, a stream stands still before what it marks, or before what it does after a wait."""
    named: dict[str, torch.cuda.Stream] = {}
    init, fire, wait = Device.__init__, Signal.fire, Signal.wait

    def shake(stream: torch.cuda.Stream | None) -> None:
        if stream is not None and random.random() < SHARE:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(random.random() * CYCLES))

    def starting(device: Device, *arguments: Any) -> None:
        init(device, *arguments)
        named.update({name: it for name, it in vars(device).items() if isinstance(it, torch.cuda.Stream)})

    def firing(signal: Signal, stream: torch.cuda.Stream | None) -> None:
        shake(stream)
        fire(signal, stream)

    def waiting(signal: Signal, stream: torch.cuda.Stream | None) -> None:
        wait(signal, None if blind is not None and stream == named.get(blind) else stream)
        shake(stream)

    with (
        replaced(Device, "__init__", starting),
        replaced(Signal, "fire", firing),
        replaced(Signal, "wait", waiting),
    ):
        yield
