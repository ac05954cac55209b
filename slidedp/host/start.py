"""How processes are started: those of a run, of a probe, and those that tokenise.

They are forked from one that has imported everything, multiprocessing's forkserver. It imports while the
launcher still prepares the data, serves every later launch too, and ends with the launcher. It must never
start CUDA, which no fork survives: importing torch does not, asking for GPUs does.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from typing import Any

import torch.multiprocessing as mp
from tqdm import tqdm

from slidedp.host.process import STOPPING, die_with_parent

IMPORTED = ["slidedp.session"]
"""Modules that the server imports: all that a process of a run needs."""


def import_ahead() -> BaseContext:
    """Starts the server unless it runs, and returns at once. Processes of the context that it returns are
    forked from it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with _deaf():
        forkserver.ensure_running()
    return context


def start(function: Callable[..., None], arguments: tuple[Any, ...], processes: int) -> mp.ProcessContext:
    """Starts `processes` processes that call `function(index, *arguments)`, and end with this one."""
    import_ahead()
    started = None
    try:
        with _later():
            started = mp.start_processes(
                _enter,
                # The server has the environment of its own start.
                (function, dict(os.environ), *arguments),
                nprocs=processes,
                join=False,
                daemon=True,
                start_method="forkserver",
            )
    except BaseException:
        for process in started.processes if started is not None else ():
            process.kill()
            process.join()
        raise
    assert started is not None
    return started


def _enter(index: int, function: Callable[..., None], environment: dict[str, str], *arguments: Any) -> None:
    """Entry of every process."""
    die_with_parent()
    os.umask(os.umask(0o077) | 0o002)  # checkpoints and traces are not for every user to change
    gc.freeze()  # half a million objects of imports, which every full collection would look at for 0.2 s
    os.environ.clear()
    os.environ.update(environment)
    # Where this says "forkserver", Numba makes a named lock, which a process that is killed would leave; so
    # does tqdm, for a bar of torch's compiler that nobody sees.
    mp.set_start_method("spawn", force=True)
    tqdm.set_lock(threading.RLock())
    function(index, *arguments)


@contextmanager
def _deaf() -> Iterator[None]:
    """What is started inside ignores the signals that mean a stop: one that meets a process which still
    imports must not end it."""
    previous = {ending: signal.signal(ending, signal.SIG_IGN) for ending in STOPPING}
    try:
        yield
    finally:
        for ending, handler in previous.items():
            signal.signal(ending, handler)


@contextmanager
def _later() -> Iterator[None]:
    """A signal that means a stop takes effect when the block ends: neither lost nor in the middle of it."""
    missed: list[int] = []
    previous = {ending: signal.signal(ending, lambda s, _: missed.append(s)) for ending in STOPPING}
    try:
        yield
    finally:
        for ending, handler in previous.items():
            signal.signal(ending, handler)
    for number in missed:
        signal.raise_signal(number)
