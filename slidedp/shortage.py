"""Host memory that runs out while a run goes on: said before the kernel kills a process for it."""

from typing import Any

from slidedp.host.memory import available_bytes

LOW, ENOUGH = 1.0, 1.5
"""GiB of free host memory (or of the container's) below which a run says so, and above which it is over.

A run takes all its memory at its start, so it is another program that takes more.
"""


class MemoryWatch:
    """Asked now and then; an event `memory_low` or `memory_enough` when it has become so."""

    def __init__(self) -> None:
        self._low = False

    def check(self) -> list[dict[str, Any]]:
        free = available_bytes() / 2**30
        if free >= LOW if not self._low else free < ENOUGH:
            return []
        self._low = not self._low
        text = f"{free:.1f} GiB of host memory are free"
        if self._low:
            text += (
                ": soon the kernel will kill a process, of this run or another: end other programs of this "
                "machine or container, or stop the run"
            )
        kind = "memory_low" if self._low else "memory_enough"
        return [{"kind": kind, "free_gib": free, "text": text}]
