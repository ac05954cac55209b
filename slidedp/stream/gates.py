"""The rank's view of the optimizer worker: which versions are published, what may be overwritten."""

import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from slidedp.host.messages import Begin, Coefficients, Consumed, Finished, Landed, Published, Started, Written
from slidedp.stream.device import Abort


class PeerLost(Exception):
    """Another process of the run has ended. The launcher reports that one's failure, not this."""


class Gates:
    """Version gates of all units, fed by a thread that reads the worker's pipe."""

    def __init__(
        self,
        worker: Connection,
        units: int,
        abort: Abort,
        start: int = 0,
        frozen: frozenset[int] = frozenset(),
    ) -> None:
        """`start`: the version of all units now, which is the first step's number. The indices in `frozen`
        have every version already."""
        self._worker, self._abort = worker, abort
        self._published = [sys.maxsize if index in frozen else start for index in range(units)]
        self._consumed = [start - 1] * units  # the step whose gradient was last taken from the landing zone
        self._begins: dict[int, Begin] = {}
        self._coefficients: Coefficients | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()  # the main thread and those that report share the pipe
        threading.Thread(target=self._listen, name="slidedp-gates", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                message = self._worker.recv()
                with self._changed:
                    self._apply(message)
                    self._changed.notify_all()
        except (EOFError, OSError):
            self._abort.fail(PeerLost("the optimizer worker has ended"))

    def _apply(self, message: Begin | Published | Consumed | Coefficients) -> None:
        if isinstance(message, Begin):
            self._begins[message.step] = message
        elif isinstance(message, Coefficients):
            self._coefficients = message
        elif isinstance(message, Published):
            self._published[message.unit] = message.version
            self._consumed[message.unit] = message.version - 1
        else:
            self._consumed[message.unit] = message.step

    def send(self, message: Started | Landed | Written | Finished) -> None:
        with self._sending:
            self._worker.send(message)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            while not self._changed.wait_for(condition, timeout=0.5):
                self._abort.check()

    def is_published(self, unit: int, version: int) -> bool:
        """Whether the working copy of `unit` holds `version`."""
        return self._published[unit] >= version

    def wait_published(self, unit: int, version: int) -> None:
        """Returns once the working copy of `unit` holds `version`."""
        self._wait(lambda: self.is_published(unit, version))

    def wait_consumed(self, unit: int, step: int) -> None:
        """Returns once the worker no longer needs the gradient that `unit` landed in `step`."""
        self._wait(lambda: self._consumed[unit] >= step)

    def wait_coefficients(self, step: int) -> Coefficients:
        """What the update of `step` on this rank's device needs. The worker sends the next step's only
        when every rank has written this one's updates."""
        self._wait(lambda: self._coefficients is not None and self._coefficients.step == step)
        assert self._coefficients is not None
        return self._coefficients

    def wait_begin(self, step: int) -> Begin:
        """How `step` starts, as the worker decided for all ranks."""
        self._wait(lambda: step in self._begins)
        return self._begins.pop(step)
