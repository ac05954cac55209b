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
        number, bring, work, write = chunks
        # Local variables and no calls: this is the innermost loop of the model.
        up, busy, out, written = self._up, self._busy, self.out, self._written
        first = 0.0
        behind = len(written) - self._slots
        for place in range(behind, behind + number):
            free = written[place] if place >= 0 else self._begun
            up = (free if free > up else up) + bring
            begin = busy if busy > up else up
            busy = (ready if ready > begin else begin) + work
            out = (busy if busy > out else out) + write
            written.append(out)
            if place == behind:
                first = busy
        self._up, self._busy, self.out = up, busy, out
        return first, self._busy, self.out

    def update_resident(self, chunks: GpuUpdate, ready: float) -> tuple[float, float, float]:
        """As `update`, for a unit whose state is there and stays: no buffer of the ring is taken."""
        number, _, work, write = chunks
        first = max(self._busy, ready) + work
        self._busy = first + (number - 1) * work
        self.out = max(max(self.out, first) + number * write, self._busy + write)
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
