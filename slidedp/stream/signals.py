"""What the threads of a rank share about one step."""

import threading

import torch

from slidedp.model.experts import Routing
from slidedp.stream.device import Abort, Signal
from slidedp.stream.timeline import Timeline

Index = float | tuple[int, int]
"""A visit or a unit; or a piece of a unit."""


class Step:
    """A step's number, its signals by name, its timeline, and inputs that are between two rings.

    An evaluation between two steps is a step that has the number of the second and learns nothing.
    """

    def __init__(self, number: int, abort: Abort, timeline: Timeline, learns: bool = True) -> None:
        self.number, self.timeline, self.learns = number, timeline, learns
        self.held: dict[int, torch.Tensor] = {}
        self.routing: Routing | None = None
        self._abort = abort
        self._signals: dict[tuple[str, Index], Signal] = {}
        self._lock = threading.Lock()

    def signal(self, kind: str, index: Index) -> Signal:
        """The signal of this name; whichever side asks first makes it."""
        with self._lock:
            return self._signals.setdefault((kind, index), Signal(self._abort))
