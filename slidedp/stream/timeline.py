"""When each piece of a step ran, on every stream: CUDA events on a GPU, the clock on a CPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch.profiler import record_function

from slidedp.stream.device import Device

TRACKS = ("compute", "deliver", "reduce", "update", "load", "write")

Mark = torch.cuda.Event | float


class Span(NamedTuple):
    """A resolved piece of a step; times are milliseconds since the step began."""

    track: str
    """One of TRACKS."""
    unit: str
    phase: str
    """`forward`, `head`, `backward`, `deliver`, `gather`, `reduce`, `update`, `load` and `write` (state of
    updates on the GPU), or `wait <cause>`."""
    start: float
    end: float


class Timeline:
    """Spans of one step: all if it is `detailed`, else only what compute waits for. Recording costs two
    events a span; nothing waits.

    `profiled`: a torch.profiler records this step, and gets the spans as named ranges.
    """

    def __init__(self, device: Device, detailed: bool = False, profiled: bool = False) -> None:
        self._device, self.detailed, self.profiled = device, detailed, profiled
        self._spans: list[tuple[str, str, str, Mark, Mark]] = []
        self._origin = self._mark(device.compute)
        self._last = self._origin
        self._began = time.time()
        self.transferred = False
        """Whether the step's transfers are all recorded; some still are when its compute is over."""

    def _mark(self, stream: torch.cuda.Stream | None) -> Mark:
        if stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @contextmanager
    def span(
        self,
        track: str,
        unit: str,
        phase: str,
        begin: torch.cuda.Stream | None = None,
        end: torch.cuda.Stream | None = None,
    ) -> Iterator[None]:
        """Marks what is enqueued inside, from `begin` to `end` (the compute stream by default)."""
        if not self.detailed and not phase.startswith("wait"):
            yield
            return
        start = self._mark(begin or self._device.compute)
        with record_function(f"{phase} {unit}") if self.profiled else nullcontext():
            yield
        stop = self._mark(end or self._device.compute)
        self._spans.append((track, unit, phase, start, stop))

    def close(self) -> None:
        """Marks the end of the step's compute."""
        self._last = self._mark(self._device.compute)

    def done(self) -> bool:
        """Whether the step's compute has run, so that resolving its spans does not wait."""
        return isinstance(self._last, float) or self._last.query()

    def all_done(self) -> bool:
        """Whether the step's transfers have run too."""
        return self.transferred and all(isinstance(end, float) or end.query() for *_, end in self._spans)

    def began(self) -> float:
        """When the step's compute began, in seconds of time.time()."""
        if isinstance(self._origin, float):
            return self._began
        return self._device.epoch_time + self._device.epoch.elapsed_time(self._origin) / 1e3

    def seconds_since(self, earlier: "Timeline") -> float:
        """From the beginning of an earlier step to the beginning of this one."""
        return self._elapsed(earlier._origin, self._origin) / 1e3

    def total_ms(self) -> float:
        """From the step's beginning to the end of its compute."""
        return self._elapsed(self._origin, self._last)

    @staticmethod
    def _elapsed(start: Mark, end: Mark) -> float:
        if isinstance(start, float) or isinstance(end, float):
            return (float(end) - float(start)) * 1e3  # type: ignore[arg-type]
        # What goes to the host may still run when an evaluation after the step is over: it needs none of it.
        end.synchronize()
        return start.elapsed_time(end)

    def resolve(self, tracks: tuple[str, ...]) -> list[Span]:
        """The spans of some tracks; waits for those that have not run."""
        resolved = []
        for track, unit, phase, start, end in list(self._spans):
            if track in tracks:
                times = self._elapsed(self._origin, start), self._elapsed(self._origin, end)
                resolved.append(Span(track, unit, phase, *times))
        return resolved
