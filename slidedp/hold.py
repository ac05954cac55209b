"""One run at a time in a run folder: who prepares or runs one holds the folder, by a lock on itself."""

import fcntl
import os
import time
from pathlib import Path

from slidedp.errors import ConfigError

ATTEMPTS = 10
"""Whoever asks `is_held` has the lock for a moment."""


class Hold:
    """The folder is this process's alone until `close` or its end; not where files cannot be locked."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(ATTEMPTS):
            if not _taken(self._descriptor):
                return
            time.sleep(0.01)
        self.close()
        raise ConfigError(
            f"run_folder={str(folder)!r}: a run writes there now: stop it first, or give another folder"
        )

    def close(self) -> None:
        """Lets others have the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(folder: Path) -> bool:
    """Whether a process of this machine runs or prepares a run there; False where files cannot be locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return _taken(descriptor)
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    """Whether somebody else has the lock; else it is this descriptor's now, if there are locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without them
        pass
    return False
