"""torch.profiler over consecutive steps of one rank, written as one trace.

The trace holds what the compute thread and the GPU did, with memory, and SlideDP's own phases twice: as
ranges of the compute thread (so that tools attribute operators and kernels to them), and as asynchronous
events of every track from the engine's own timeline, which knows when a delivery or a reduction really
began and ended. `slidedp.trace` reads it; so do TensorBoard's profiler plugin and Perfetto.
"""

import gzip
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from slidedp.stream.device import Abort, Device
from slidedp.stream.timeline import TRACKS, Timeline

PHASE = "slidedp"
"""Category of SlideDP's own phases in a trace."""


class Recorder:
    """Records steps `first` to `first + steps - 1` of a rank."""

    def __init__(self, device: Device, rank: int, folder: str, first: int, steps: int) -> None:
        self.first, self.steps = first, steps
        self._device, self._rank = device, rank
        # TensorBoard's plugin takes <host>_<rank> for the worker and the step for the span.
        self.path = Path(folder, f"{socket.gethostname()}_{rank}.{first}.pt.trace.json.gz")
        self._timelines: list[tuple[int, Timeline]] = []
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes of its own start and stop
        # Without acc_events, which would make Python objects of all events here: that stops training five
        # times as long.
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * device.is_cuda,
            record_shapes=True,
            profile_memory=True,
        )
        self._drain()
        self._profile.start()
        distributed = {"backend": "nccl" if device.is_cuda else "gloo", "rank": rank}
        self._profile.add_metadata_json("distributedInfo", json.dumps(distributed))

    def _drain(self) -> None:
        if self._device.is_cuda:  # else kernels of earlier steps would count as the first one's
            torch.cuda.synchronize()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Marks one step; `ProfilerStep#` is what every reader of traces looks for."""
        with record_function(f"ProfilerStep#{number}"):
            yield

    def add(self, number: int, timeline: Timeline) -> None:
        """The engine's own timeline of a recorded step."""
        self._timelines.append((number, timeline))

    @property
    def complete(self) -> bool:
        return len(self._timelines) == self.steps

    def write(self, abort: Abort) -> dict[str, Any]:
        """Ends the recording and writes the trace. Returns the event that tells about it."""
        begun = time.time()
        while not all(timeline.transferred for _, timeline in self._timelines):
            abort.check()
            time.sleep(0.001)
        self._drain()
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="slidedp-") as folder:
            plain = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(plain))
            self._write_with_phases(plain)
        return {
            "kind": "trace",
            "rank": self._rank,
            "step": self.first,
            "steps": len(self._timelines),
            "path": self.path.name,
            "seconds": time.time() - begun,
        }

    def _write_with_phases(self, plain: Path) -> None:
        """Copies the trace with our events as its first ones; parsing 100 MB would stop training longer."""
        partial = self.path.with_suffix(".partial")
        with open(plain) as source, gzip.open(partial, "wt", compresslevel=1) as target:
            base = 0.0  # microseconds since the epoch that the trace counts from
            for line in source:
                target.write(line)
                key, _, value = line.partition(":")
                if key.strip() == '"baseTimeNanoseconds"':
                    base = int(value.strip().rstrip(",")) / 1e3
                elif key.strip() == '"traceEvents"':
                    break
            for event in self._phases(base):
                target.write(json.dumps(event) + ",\n")
            target.writelines(source)
        partial.rename(self.path)

    def _phases(self, base: float) -> Iterator[dict[str, Any]]:
        count = 0
        for step, timeline in self._timelines:
            began = timeline.began() * 1e6 - base
            for span in timeline.resolve(TRACKS):
                args = {"step": step, "track": span.track, "unit": span.unit, "phase": span.phase}
                common = {"cat": PHASE, "name": f"{span.phase} {span.unit}", "id": count, "pid": os.getpid()}
                common |= {"tid": span.track}
                yield common | {"ph": "b", "ts": began + span.start * 1e3, "args": args}
                yield common | {"ph": "e", "ts": began + span.end * 1e3}
                count += 1
