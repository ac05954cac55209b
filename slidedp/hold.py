"""One run at a time in a run folder: who prepares or runs one holds the folder, by a lock on itself."""

import fcntl
import os
import time
from pathlib import Path

from slidedp.errors import ConfigError

ATTEMPTS = 10
"""Somebody who asks whether the folder is held has it for a moment."""


class Hold:
    """The folder is this process's alone until `close` or its end; not where files cannot be locked."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01 * (attempt < ATTEMPTS - 1))
            except OSError:
                return
            else:
                return
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
