"""Gives a user's function the rows of a run, on a thread of its own: whatever it does, the run goes on."""

import sys
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

Row = dict[str, Any]


class Listener:
    """Calls a function with each row, in order, and no more once it has raised."""

    def __init__(self, call: Callable[[Row], None]) -> None:
        self._call = call
        self._rows: SimpleQueue[Row | None] = SimpleQueue()
        self._dismissed = Event()
        self._thread = Thread(target=self._listen, name="slidedp-listener", daemon=True)
        self._thread.start()

    def tell(self, row: Row) -> None:
        """Returns at once."""
        if self._thread.is_alive():
            self._rows.put(row)

    def dismiss(self) -> None:
        """No further row is given, and nobody waits for the one that is."""
        self._dismissed.set()

    def finish(self) -> None:
        """Returns when all rows are given, or when it is dismissed."""
        self._rows.put(None)
        while self._thread.is_alive() and not self._dismissed.wait(0.05):
            pass

    def _listen(self) -> None:
        while (row := self._rows.get()) is not None and not self._dismissed.is_set():
            try:
                self._call(row)
            except Exception:  # a logger's fault must not end the training
                text = traceback.format_exc()
                print(f"on_step failed and is not called again:\n{text}", file=sys.stderr)
                return
