"""What a checkpoint reads of a unit: the state itself, or a copy once the unit has had to change."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slidedp.checkpoint.room import Room
from slidedp.host import kernels
from slidedp.host.state import HostState
from slidedp.model.units import Unit

KINDS = ("master", "exp_avg", "exp_avg_sq")


class Source:
    """The arrays of one unit, read in pieces by the thread that writes its shard. Another thread may copy
    them between two pieces."""

    def __init__(self, state: HostState, unit: Unit) -> None:
        held = state.unit(unit)
        self._arrays = {kind: getattr(held, kind) for kind in (KINDS[:1] if unit.frozen else KINDS)}
        self._lock = threading.Lock()
        self.nbytes = sum(array.nbytes for array in self._arrays.values())

    @contextmanager
    def reading(self, kind: str, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of elements [start, stop) of an array; they stay as they are within the block."""
        with self._lock:
            yield self._arrays[kind][start:stop].data.cast("B")

    def copy(self, room: Room) -> bool:
        """From then on only a copy is read, and the unit may change. False where no memory is left."""
        memory = room.take(self.nbytes)
        if memory is None:
            return False
        copies, start = {}, 0
        for kind, array in self._arrays.items():
            copies[kind] = memory[start : start + array.nbytes].view(torch.float32).numpy()
            kernels.copy(array, copies[kind])
            start += array.nbytes
        with self._lock:
            if self._arrays:  # else it is written by now
                self._arrays = copies
        return True

    def close(self) -> None:
        """Nothing is read any more."""
        with self._lock:
            self._arrays = {}
