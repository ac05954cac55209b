"""What every spawned process does first and last."""

import ctypes
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection


def die_with_parent() -> None:
    """Jupyter's stop button must not kill a process that only the launcher may stop, and the
    launcher's death must end it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def reporting(name: str, launcher: Connection) -> Iterator[None]:
    """Sends the traceback of a failure to the launcher before the process ends with it."""
    try:
        yield
    except BaseException as error:
        launcher.send(
            {
                "kind": "error",
                "process": name,
                "type": type(error).__name__,
                "text": traceback.format_exc(),
            }
        )
        raise SystemExit(1) from None
