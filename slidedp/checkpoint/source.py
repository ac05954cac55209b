"""What a checkpoint reads of a unit: the state itself, or a copy once the unit has had to change."""

import threading

import numpy as np
import torch

from slidedp.checkpoint.room import Room
from slidedp.host import kernels
from slidedp.host.state import HostState
from slidedp.model.units import Unit

KINDS = ("master", "exp_avg", "exp_avg_sq")


class Source:
    """The arrays of one unit, read in pieces by the thread that writes its shard. Another thread may copy
    them meanwhile."""

    def __init__(self, state: HostState, unit: Unit) -> None:
        held = state.unit(unit)
        self._arrays = {kind: getattr(held, kind) for kind in (KINDS[:1] if unit.frozen else KINDS)}
        self._lock = threading.Lock()
        self.nbytes = sum(array.nbytes for array in self._arrays.values())

    def read(self, kind: str, start: int, stop: int, into: np.ndarray) -> np.ndarray:
        """Elements [start, stop) of an array, read to the beginning of `into`, which is returned."""
        piece = into[: stop - start]
        # Only while it is read: a write to a file lasts as long as the disk likes, and an update that waited
        # for those of its unit to end was seen to wait for 2 s.
        with self._lock:
            np.copyto(piece, self._arrays[kind][start:stop])
        return piece

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
