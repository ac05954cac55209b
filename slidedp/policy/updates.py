"""When updates run: on the GPUs behind a ring of buffers, and on the worker with the most urgent first."""

from slidedp.policy.demands import GpuUpdate


class Loads:
    """State on its way through the ring of GPU buffers, in the order in which units are updated."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._written: list[float] = []
        self._begun = self._up = self._busy = 0.0
        self.out = 0.0
        """When the last piece so far is on the host again."""

    def begin(self, time: float) -> None:
        """The step's first pieces start to come up, behind what the last step wrote."""
        self._begun = max(time, self.out)
        self._written.clear()

    def update(self, chunks: GpuUpdate, ready: float) -> tuple[float, float, float]:
        """One unit, whose gradients are there at `ready`: when its first and its last chunk are updated,
        and when all of it is written."""
        count, bring, work, write = chunks
        first = 0.0
        for i in range(count):
            place = len(self._written) - self._slots
            free = self._begun if place < 0 else self._written[place]
            self._up = max(self._up, free) + bring
            self._busy = max(self._busy, self._up, ready) + work
            self.out = max(self.out, self._busy) + write
            self._written.append(self.out)
            if i == 0:
                first = self._busy
        return first, self._busy, self.out


def newest_first(
    landing: list[int],
    worker: float,
    landed_first: list[float],
    landed: list[float],
    update: list[float],
    message: float,
    published: list[float],
) -> list[tuple[int, float, float]]:
    """The worker with room for all gradients: what landed last is needed first, and interrupts the rest.

    `landing` are its units in the order in which they land, `worker` is when it is free. Fills
    `published`; returns (unit, from, to) of all that it does, in order.
    """
    waiting: list[tuple[int, float]] = []  # (unit, seconds left), the most urgent one last
    served: list[tuple[int, float, float]] = []
    arrivals = [(landed_first[unit] + message, unit) for unit in landing]
    for arrival, unit in [*arrivals, (float("inf"), -1)]:
        while waiting and worker < arrival:
            top, left = waiting.pop()
            begin = worker
            if worker + left > arrival:
                waiting.append((top, left - (arrival - worker)))
                worker = arrival
            else:
                worker = max(worker + left, landed[top] + message)
                published[top] = worker + message
            served.append((top, begin, worker))
        if worker < arrival and unit >= 0:
            worker = arrival
        if unit >= 0:
            waiting.append((unit, update[unit]))
    return served
