"""A process that saves a checkpoint and is killed at one of the calls by which it touches the disk."""

import os
import signal
import threading
import zlib
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from slidedp.checkpoint.folder import Progress
from slidedp.checkpoint.save import Saving, Snapshot
from slidedp.host.state import HostState
from slidedp.model.units import Unit

CALLS = ((os, "mkdir"), (os, "fsync"), (os, "rename"), (os, "unlink"), (zlib, "crc32"))
"""Between two of them lies everything that a save does; the last one is called for each piece written."""
CONTENTS = {"count": 9, "input_ids.npy": 5, "labels.npy": 7}
"""What tells the samples of `saving` from others."""


def filled(units: tuple[Unit, ...], version: int, dtype: torch.dtype = torch.float32) -> HostState:
    """A state whose every value depends on its place and on `version`."""
    state = HostState(units, dtype)
    for unit in units:
        for kind, array in enumerate(state.unit(unit)[:3]):
            for p in unit.parameters:
                values = torch.arange(p.numel) * 3 + 1000 * version + 100 * unit.index + kind
                array[p.offset : p.offset + p.numel] = values.numpy()
    state.refresh_working()
    return state


def saving(folder: Path, spare_bytes: int = 0) -> Saving:
    """Where and what a run with a config's defaults saves."""
    (folder / "assets").mkdir(exist_ok=True)
    (folder / "assets" / "config.json").write_text("{}")
    config = {"seed": 0, "batch_size": 8, "sequence_length": 1024, "data": {"eval_fraction": 0.0}}
    description = {"config": config, "samples": CONTENTS}
    return Saving(folder, folder / "assets", description, Progress(), spare_bytes)


def save(state: HostState, version: int, folder: Path, keep_last: int = 1) -> dict[str, Any]:
    """Writes a checkpoint of step `version` and returns its event."""
    events: list[dict[str, Any]] = []
    progress = Progress(version, version - 1)
    Snapshot(state, state.units, progress, saving(folder), keep_last, events.append).join()
    return events[0]


def save_and_die(units: tuple[Unit, ...], root: Path, result: Connection) -> None:
    """For n = 1, 2, ...: a process saves version 2 in `root/n`, beside version 1, and is killed at its
    n-th call; until one comes through. Sends what n that was."""
    old, new = filled(units, 1), filled(units, 2)
    for fatal in count(1):
        folder = root / str(fatal)
        folder.mkdir()
        save(old, 1, folder)
        if (child := os.fork()) == 0:
            _save_until(fatal, new, folder)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            result.send((fatal, status))
            break
    old.close()
    new.close()


def _save_until(fatal: int, state: HostState, folder: Path) -> None:
    lock, calls = threading.Lock(), count(1)

    def counting(function: Callable) -> Callable:
        def counted(*arguments: Any, **named: Any) -> Any:
            with lock:
                if next(calls) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return counted

    for owner, name in CALLS:
        setattr(owner, name, counting(getattr(owner, name)))
    save(state, 2, folder)
