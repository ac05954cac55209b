"""What compute reads and what the worker publishes, as digests."""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slidedp.host.worker import OptimizerWorker
from slidedp.stream import step
from tests.pool import replaced


def digest(memory: torch.Tensor) -> int:
    return zlib.crc32(memory.detach().view(torch.uint8).numpy().tobytes())


@contextmanager
def recording_rank() -> Iterator[list]:
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
            seen.append((visit._step.number, visit._visit, unit.index, digest(memory), time.monotonic()))

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
def recording_worker() -> Iterator[list]:
    """(unit, version, digest, time) of every version that is published, and of version 0."""
    seen: list[tuple[int, int, int, float]] = []
    use, send = OptimizerWorker._use, OptimizerWorker._send

    def look(worker: OptimizerWorker, unit: int, version: int) -> None:
        delivered = worker.state.delivered(worker.state.units[unit])
        seen.append((unit, version, digest(delivered), time.monotonic()))

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
