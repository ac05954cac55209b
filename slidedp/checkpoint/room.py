"""Host memory for the copies of one checkpoint, taken before the copies are made.

On virtual machines whose hosts hand out memory when it is first used, copying to fresh pages went at
0.9 GB/s (2 cores) and at 5 to 10 GB/s (16 cores); to pages that had been used before, at 17 GB/s (2 cores).
An update waits for the copy of its unit. For fresh pages waits a thread that is in no hurry: copies to
what it has written to go at 28 to 51 GB/s (16 cores).
"""

import ctypes
import threading

import torch

from slidedp.host.kernels import LINE
from slidedp.host.process import yield_cores
from slidedp.model.units import aligned

PIECE = 2**28
"""Bytes that are populated at once. What is smaller needs no thread."""
HUGE = 2**21
MADV_HUGEPAGE = 14


class Room:
    """`nbytes` of private memory, or nothing where a limit refuses it. Given out once, piece by piece."""

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = torch.empty(nbytes + HUGE if nbytes else 0, dtype=torch.uint8)
        except RuntimeError:  # torch's word for it
            nbytes, self._memory = 0, torch.empty(0, dtype=torch.uint8)
        self.nbytes = nbytes
        self._start = self._used = -self._memory.data_ptr() % HUGE
        self._end = self._start + nbytes
        self._closed = False
        self._thread = threading.Thread(target=self._populate_meanwhile, name="slidedp-room", daemon=True)
        if nbytes > PIECE:
            self._thread.start()
        else:
            self._populate()

    def _populate_meanwhile(self) -> None:
        yield_cores()
        self._populate()

    def _populate(self) -> None:
        first, length = self._memory.data_ptr() + self._start, self._end - self._start
        # Refused by some kernels: then there are more pages to write to.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), MADV_HUGEPAGE)
        for start in range(0, length, PIECE):
            ctypes.memset(first + start, 0, min(PIECE, length - start))  # other threads go on meanwhile
            if self._closed:
                return

    @property
    def ready(self) -> bool:
        """Whether all of it has been written to."""
        return not self._thread.is_alive()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """[nbytes] uint8, starting on a cache line; None where less is left."""
        start = aligned(self._used, LINE)
        if start + nbytes > self._end:
            return None
        self._used = start + nbytes
        return self._memory[start : self._used]

    def close(self) -> None:
        """Gives the memory back, once nothing that was taken is held any more."""
        self._closed = True
        if self._thread.is_alive():
            self._thread.join()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._end = 0
