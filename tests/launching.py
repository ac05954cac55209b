"""What the tests of whole runs share: a model that can learn, and a look at what is left behind."""

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slidedp import Config, Data, Optimizer
from slidedp.data.samples import write_samples
from tests.pool import small_model

LENGTH = 16
VOCABULARY = 97
"""That of `small_model`."""
DEADLINE = 90.0
"""Seconds after which something that must happen counts as never happening."""


def small_config(folder: Path, **settings: Any) -> Config:
    """Two CPU ranks on a small random model in `folder`, with samples that follow a simple rule."""
    model, samples = folder / "model", folder / "data"
    if not model.exists():
        small_model(model)
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (64, 1))
        for _ in range(LENGTH):
            tokens = np.hstack([tokens, (5 * tokens[:, -1:] + 3) % VOCABULARY])
        tokens = tokens.astype(np.int32)
        write_samples(samples, tokens[:, :-1].copy(), tokens[:, 1:].copy())
    values: dict[str, Any] = {
        "model": model,
        "data": Data(path=str(samples)),
        "sequence_length": LENGTH,
        "batch_size": 4,
        "steps": 1_000_000,
        "optimizer": Optimizer(lr=1e-2, eps=1e-6),
        "ranks": 2,
        "device": "cpu",
    }
    return Config(**values | settings)


SCRIPT = """
import pathlib, pickle
from slidedp import launch
{guard}
    run = launch(pickle.loads(pathlib.Path({config!r}).read_bytes()))
    print(*[process.pid for process in run._processes], flush=True)
    run.wait()
"""


def script(config: Config, folder: Path, guard: bool = True) -> list[str]:
    """The command of a script that launches `config`, prints its processes and waits."""
    (folder / "config.pickle").write_bytes(pickle.dumps(config))
    guarding = 'if __name__ == "__main__":' if guard else "if True:"
    text = SCRIPT.format(guard=guarding, config=str(folder / "config.pickle"))
    (folder / "script.py").write_text(text)
    return [sys.executable, str(folder / "script.py")]


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> None:
    """Returns once `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process exists and is not a mere exit code."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


def children(pid: int | None = None) -> set[int]:
    """Processes that this one, or `pid`, has started and that run; not multiprocessing's own helpers."""
    found: dict[int, set[int]] = {}
    servers = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            state, parent = _stat(int(name))[:2]
            command = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue  # it has just ended
        if state == "Z" or b"resource_tracker" in command:
            continue
        found.setdefault(int(parent), set()).add(int(name))
        if b"multiprocessing.forkserver" in command:  # its children have its command line too
            servers.add(int(name))
    own = found.get(pid or os.getpid(), set())
    return own - servers | {forked for server in own & servers for forked in found.get(server, ())}


def memfds() -> int:
    """Shared segments of SlideDP that this process holds open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:slidedp-")
        except OSError:
            continue  # the listing's own descriptor
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """What is started inside ends inside, and what is held is given back."""
    processes, segments = children(), memfds()
    yield
    assert children() <= processes
    assert memfds() == segments


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
