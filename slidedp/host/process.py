"""What every process of a run does first and last."""

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from slidedp.host import kernels

STOPPING = (signal.SIGINT, signal.SIGTERM)
"""Signals that mean a stop at the next step boundary. Jupyter, a terminal and most schedulers send them
to all processes at once, but only the launcher may act on them."""


def die_with_parent() -> None:
    """Leaves signals that mean a stop to the launcher, and ends with it: the kernel kills this process,
    whatever its threads do."""
    for ending in STOPPING:
        signal.signal(ending, signal.SIG_IGN)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    # The parent of a forked process is the server, which lives as long as any of them. What tells of the
    # launcher is its end of a pipe: when that closes, SIGKILL is what we get.
    with contextlib.suppress(OSError):  # a kernel that cannot: the next message to the launcher fails
        fcntl.fcntl(launcher.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(launcher.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(launcher.sentinel, fcntl.F_GETFL)
        fcntl.fcntl(launcher.sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
    if not launcher.is_alive():  # it died while we imported: no signal will come
        raise SystemExit(1)


def share_cores(processes: int) -> None:
    """Leaves torch and the kernels of this thread their share of the cores that `processes` compute on.

    The kernels come first: when their threads start, OpenMP's count for the calling thread becomes theirs,
    all cores, and torch goes by it. Ranks whose threads outnumber the cores wait for each other spinning.
    """
    threads = max(1, torch.get_num_threads() // processes)
    kernels.set_threads(threads)
    torch.set_num_threads(threads)


def yield_cores() -> None:
    """Lets this thread run where no other wants to: one that is in no hurry, beside kernels whose slowest
    thread decides."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def bound_freed_memory() -> None:
    """Makes malloc give back blocks of 2 MiB and more when they are freed, and what is free at the end of a
    thread's memory from 4 MiB on.

    By default it soon keeps all blocks that are under 32 MiB: far more than the buffers of a CPU rank. From
    1 MiB on, page faults make steps of a small model a fifth longer (1.19 s against 0.99; 0.93 where up to
    4 MiB are kept: 10 M parameters, 8 x 256 tokens, two ranks on two cores). With 4 MiB, two ranks held 5%
    more than one of a model of 300 M parameters.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    malloc = ctypes.CDLL(None).mallopt
    malloc(M_MMAP_THRESHOLD, 2**21)
    malloc(M_TRIM_THRESHOLD, 2**22)


doing: dict[str, tuple[int, str, str]] = {}
"""What this process is about: thread -> (step, unit, what). Set as a thread moves on, which costs less
than a microsecond, and read once a second."""


def show_signs_of_life(to_launcher: Connection) -> None:
    """Tells the launcher once a second that this process lives and what it does, on a thread and a pipe
    of its own: whatever blocks the other threads, it goes on until the process is held as a whole."""

    def tell() -> None:
        with contextlib.suppress(OSError):  # the launcher is gone
            while True:
                to_launcher.send(dict(doing))
                time.sleep(1.0)

    threading.Thread(target=tell, name="slidedp-alive", daemon=True).start()


@contextlib.contextmanager
def reporting(name: str, launcher: Connection) -> Iterator[None]:
    """Sends the traceback of a failure to the launcher before the process ends with it."""
    try:
        yield
    except BaseException as error:
        report = {
            "kind": "error",
            "process": name,
            "type": type(error).__name__,
            "text": traceback.format_exc(),
            "time": time.time(),
        }
        with contextlib.suppress(OSError):  # the launcher itself is gone
            launcher.send(report)
        raise SystemExit(1) from None
