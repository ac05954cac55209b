"""Recordings of `Run.profile`: torch.profiler traces in, DataFrames of timelines and tables out.

A recording is one trace of every rank over the same consecutive steps. Each function below answers one
question about it; nothing here draws.
"""

import gc
import gzip
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from slidedp.errors import ConfigError
from slidedp.stream.recorder import PHASE
from slidedp.telemetry import TRACES, RunLog, open_run

NAME = re.compile(r"(.+)_(?P<rank>\d+)\.(?P<first>\d+)\.pt\.trace\.json(\.gz)?")
TIMELINE = ["rank", "track", "unit", "phase", "start", "end"]
EVENTS = ["row", "name", "category", "start", "end"]
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace that are work of a GPU."""


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace file."""

    rank: int
    path: Path

    def read(self) -> dict[str, Any]:
        """The file's JSON: for a trace of 100 MB, 0.4 GB of objects that nobody should hold on to."""
        data = self.path.read_bytes()
        if self.path.suffix == ".gz":
            data = gzip.decompress(data)
        with _no_garbage_collection():
            return json.loads(data)

    @cached_property
    def _head(self) -> tuple[float, list[dict[str, Any]]]:
        """The first lines of the file, where the recorder puts our phases: no need to parse the rest."""
        base, found = 0.0, []
        opener = gzip.open if self.path.suffix == ".gz" else open
        with opener(self.path, "rt") as lines:
            for line in map(str.strip, lines):
                if line.startswith('"baseTimeNanoseconds"'):
                    base = float(line.partition(":")[2].rstrip(",")) / 1e3
                elif line.startswith(f'{{"cat": "{PHASE}"'):
                    found.append(json.loads(line.rstrip(",")))
                elif found:
                    break
        return base, found

    @property
    def base(self) -> float:
        """Microseconds since the epoch that the trace's times count from."""
        return self._head[0]

    @cached_property
    def _tables(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """`events` and `memory`, so that the file is parsed once for both."""
        with _no_garbage_collection():
            found = self.read()["traceEvents"]
            timed = [e for e in found if e.get("ph") == "X" and "cat" in e]
            keys = {"name": "name", "category": "cat", "thread": "tid", "ts": "ts", "dur": "dur"}
            events = pd.DataFrame({column: [e[key] for e in timed] for column, key in keys.items()})
            arguments = {"Device Type": "type", "Device Id": "index"}
            arguments |= {"Total Allocated": "allocated", "Total Reserved": "reserved"}
            marks = [e for e in found if e.get("name") == "[memory]"]
            memory = pd.DataFrame({"ts": [e["ts"] for e in marks]}, dtype=float)
            for key, column in arguments.items():
                memory[column] = np.array([e["args"][key] for e in marks], dtype=np.int64)
        # Some hundred different values in hundreds of thousands of events: what is not kept frees memory.
        types = {"name": "category", "category": "category", "thread": "category", "ts": float, "dur": float}
        return events.astype(types), memory

    @property
    def events(self) -> pd.DataFrame:
        """Everything with a duration: name, category, thread (of the CPU, or a GPU's stream), ts and dur
        in microseconds."""
        return self._tables[0]

    @property
    def memory(self) -> pd.DataFrame:
        """Every allocation and release: ts in microseconds, type (0 for the CPU) and index of the device,
        bytes allocated and reserved from then on."""
        return self._tables[1]

    @cached_property
    def profile(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What `operators` and `kernels` give."""
        with _no_garbage_collection():
            return _profile(self.read())

    @cached_property
    def phases(self) -> pd.DataFrame:
        """SlideDP's own phases: step, track, unit, phase, and ts and end in microseconds."""
        _, found = self._head
        begins = {e["id"]: e for e in found if e["ph"] == "b"}
        ends = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
        rows = [{**e["args"], "ts": e["ts"], "end": ends[i]} for i, e in begins.items()]
        return pd.DataFrame(rows, columns=["step", "track", "unit", "phase", "ts", "end"])


@dataclass(frozen=True)
class Recording:
    """The traces of all ranks over steps `first`, `first + 1`, ..."""

    log: RunLog = field(repr=False)
    """Of the run: it knows when the optimizer worker updated what."""
    first: int
    ranks: tuple[RankTrace, ...]

    @property
    def steps(self) -> list[int]:
        first = self.ranks[0]
        if first.phases.empty:
            raise ConfigError(f"{first.path}: no phases of SlideDP: only Run.profile writes such traces")
        return sorted(int(step) for step in first.phases["step"].unique())

    def began(self, step: int) -> float:
        """When the first rank began `step`, in microseconds since the epoch."""
        return min(trace.base + self._own(trace, step)["ts"].min() for trace in self.ranks)

    def ended(self, step: int) -> float:
        """When the last transfer of `step` was over, in microseconds since the epoch."""
        return max(trace.base + self._own(trace, step)["end"].max() for trace in self.ranks)

    def trace(self, rank: int) -> RankTrace:
        """The trace of one rank."""
        found = [trace for trace in self.ranks if trace.rank == rank]
        if not found:
            raise ConfigError(f"rank={rank}: this recording has ranks {[t.rank for t in self.ranks]}")
        return found[0]

    def _own(self, trace: RankTrace, step: int) -> pd.DataFrame:
        own = trace.phases[trace.phases["step"] == step]
        if own.empty:
            raise ConfigError(f"step={step}: rank {trace.rank} recorded steps {self.steps}")
        return own


def recordings(source: RunLog | str | Path) -> list[int]:
    """The first steps of the recordings in a run folder that every rank has written."""
    log = source if isinstance(source, RunLog) else open_run(source)
    ranks = int(log.description["ranks"])
    return [first for first, paths in sorted(_files(log.folder).items()) if len(paths) == ranks]


def load(source: RunLog | str | Path, first: int | None = None) -> Recording:
    """The recording that begins with step `first`, or the latest; `source` is a run's log or its folder.

    Files are read when they are first asked for.
    """
    log = source if isinstance(source, RunLog) else open_run(source)
    found = recordings(log)
    if not found:
        raise ConfigError(f"{log.folder}: no recording: call run.profile(steps=2) while the run goes on")
    first = found[-1] if first is None else first
    if first not in found:
        raise ConfigError(f"first={first}: {log.folder} has recordings that begin with steps {found}")
    ranks = tuple(RankTrace(rank, path) for rank, path in sorted(_files(log.folder)[first].items()))
    return Recording(log, first, ranks)


def _files(folder: Path) -> dict[int, dict[int, Path]]:
    """Trace files of a run folder by first step and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in (folder / TRACES).glob("*.pt.trace.json*"):
        if match := NAME.fullmatch(path.name):
            found.setdefault(int(match["first"]), {})[int(match["rank"])] = path
    return found


def timeline(recording: Recording, step: int | None = None) -> pd.DataFrame:
    """SlideDP's phases of one recorded step (the last by default) over all ranks, in milliseconds since
    the first rank began it. Columns as RunLog.timeline: rank (-1 is the optimizer worker), track
    (`compute`, `deliver`, `reduce`, `update`), unit, phase, start, end.

    Unlike RunLog.timeline it has all ranks on one clock.
    """
    step = recording.steps[-1] if step is None else step
    began = recording.began(step)
    parts = []
    for trace in recording.ranks:
        own = trace.phases[trace.phases["step"] == step]
        offset = trace.base - began
        parts.append(
            own.assign(rank=trace.rank, start=(own["ts"] + offset) / 1e3, end=(own["end"] + offset) / 1e3)
        )
    worker = [
        (-1, "update", unit, "update", start * 1e3 - began / 1e3, end * 1e3 - began / 1e3)
        for unit, start, end in recording.log.worker_spans(step)
    ]
    parts.append(pd.DataFrame(worker, columns=TIMELINE))
    return pd.concat([part[TIMELINE] for part in parts if len(part)], ignore_index=True)


def events(recording: Recording, rank: int = 0, step: int | None = None) -> pd.DataFrame:
    """What ran on one rank during a step, in milliseconds since the first rank began it: kernels and
    copies by GPU stream, outermost operators by CPU thread. Columns: row (the stream or thread, named by
    what it does), name, category, start, end."""
    step = recording.steps[-1] if step is None else step
    trace = recording.trace(rank)
    began, ended = recording.began(step), recording.ended(step)
    table = trace.events
    table = table[table["category"].isin([*DEVICE, "cpu_op"])]
    start = (table["ts"] + (trace.base - began)) / 1e3  # in this order: a double holds 1/4 µs since 1970
    table = table.assign(start=start, end=start + table["dur"] / 1e3)
    table = table[(table["end"] > 0) & (table["start"] < (ended - began) / 1e3)]
    parts = []
    for (on_gpu, _), part in table.groupby([table["category"] != "cpu_op", "thread"], sort=True):
        part = part.sort_values(["start", "end"], ascending=[True, False])
        if not on_gpu:
            part = part[_outermost(part["end"].to_numpy())]
        parts.append(part.assign(row=_row_name(part)))
    return pd.concat(parts, ignore_index=True)[EVENTS] if parts else pd.DataFrame(columns=EVENTS)


def _outermost(ends: np.ndarray) -> np.ndarray:
    """Of nested intervals sorted by their start: those that lie in no other."""
    latest = np.maximum.accumulate(ends)
    return np.concatenate([[True], ends[1:] > latest[:-1] + 1e-5])


def _row_name(part: pd.DataFrame) -> str:
    """What a stream or thread does, by the work that takes most of its time."""
    thread = part["thread"].iloc[0]
    if (part["category"] == "cpu_op").all():
        return f"CPU thread {thread}"
    kind = part["category"].astype(object).where(part["category"] != "gpu_memcpy", part["name"])
    kind = kind.where(~part["name"].str.contains("nccl", case=False), "collectives")
    most = str(part.groupby(kind)["dur"].sum().idxmax())
    for mark, name in (("HtoD", "host to GPU"), ("DtoH", "GPU to host"), ("kernel", "compute")):
        if mark in most:
            return f"{name} (stream {thread})"
    return f"{most} (stream {thread})"


def memory(recording: Recording, rank: int = 0, step: int | None = None) -> pd.DataFrame:
    """Memory of the tensor allocator over a step: start (milliseconds since the first rank began it),
    allocated and reserved (bytes), device (`cpu` or `cuda:<i>`)."""
    step = recording.steps[-1] if step is None else step
    trace = recording.trace(rank)
    began, ended = recording.began(step), recording.ended(step)
    table = trace.memory.assign(
        start=(trace.memory["ts"] + (trace.base - began)) / 1e3,
        device=[
            "cpu" if kind == 0 else f"cuda:{index}"
            for kind, index in zip(trace.memory["type"], trace.memory["index"], strict=True)
        ],
    )
    table = table[table["start"].between(0, (ended - began) / 1e3)].sort_values("start", ignore_index=True)
    return table[["start", "allocated", "reserved", "device"]]


def operators(recording: Recording, rank: int = 0) -> pd.DataFrame:
    """One row per operator over the recorded steps, dearest first: calls, and milliseconds on the CPU
    and GPU, with (`total`) and without (`self`) the operators it calls."""
    return recording.trace(rank).profile[0]


def kernels(recording: Recording, rank: int = 0) -> pd.DataFrame:
    """One row per GPU kernel over the recorded steps, dearest first: calls, total and mean in
    milliseconds, whether it uses tensor cores. Empty on a machine without a GPU."""
    return recording.trace(rank).profile[1]


def _profile(content: dict[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Operators and kernels of a trace. The one place that knows torch-tb-profiler, whose interface is not
    declared stable."""
    from torch_tb_profiler.profiler.data import RunProfileData

    # It takes a rounded nanosecond for a fault of the trace, and says so thousands of times.
    logging.getLogger("pytorch_profiler").setLevel(logging.CRITICAL)
    # It expects names of before torch 2.1 (else no kernel belongs to an operator), and no event of ours.
    old = {"cuda_runtime": "runtime", "cuda_driver": "runtime", "fwdbwd": "forward_backward"}
    events = [
        e | {"cat": old[e["cat"]]} if e.get("cat") in old else e
        for e in content["traceEvents"]
        if e.get("cat") != PHASE
    ]
    data = RunProfileData("", "0", content | {"traceEvents": events})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is older than the pandas of today
        data.process()
    rows = [
        {
            "operator": o.name,
            "calls": o.calls,
            "self_cpu_ms": o.self_host_duration / 1e3,
            "total_cpu_ms": o.host_duration / 1e3,
            "self_gpu_ms": o.self_device_duration / 1e3,
            "total_gpu_ms": o.device_duration / 1e3,
        }
        for o in data.op_list_groupby_name
    ]
    columns = ["operator", "calls", "self_cpu_ms", "total_cpu_ms", "self_gpu_ms", "total_gpu_ms"]
    by = ["self_gpu_ms", "self_cpu_ms"]
    operators = pd.DataFrame(rows, columns=columns).sort_values(by, ascending=False, ignore_index=True)
    columns = ["kernel", "calls", "total_ms", "mean_ms", "tensor_cores"]
    if (statistics := data.kernel_stat) is None:
        return operators, pd.DataFrame(columns=columns)
    columns_of = {
        "kernel": statistics.index.astype(str),
        "calls": statistics["count"].to_numpy(),
        "total_ms": statistics["sum"].to_numpy() / 1e3,
        "mean_ms": statistics["mean"].to_numpy() / 1e3,
        "tensor_cores": statistics["tc_used"].to_numpy(),
    }
    return operators, pd.DataFrame(columns_of, columns=columns)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A hundred thousand events are a million objects, none of them garbage: looking for some, again and
    again as they become more, takes three times as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
