"""When updates run: on the GPUs behind a ring of buffers, and on the worker with the most urgent first."""

from slidedp.policy.demands import GpuUpdate

ROUNDING = 1e-9
"""Part of a share that is no part of the next one."""
Slice = tuple[int, float, int, bool, bool]
"""A part of a chunk's state that comes up with one share: place of the chunk in the order of updates,
seconds, share, and whether it is the chunk's first, which takes a buffer, and its last."""


def shared_out(brings: list[float], shares: int) -> list[Slice]:
    """Seconds to bring up the state of each chunk, cut into equal shares as the engine cuts it."""
    before, slices = 0.0, []
    size = sum(brings) / shares
    for place, bring in enumerate(brings):
        first, ends = before, False
        while not ends:
            share = int(first / size + ROUNDING)
            last = min(before + bring, (share + 1) * size)
            ends = last >= before + bring - ROUNDING * size
            slices.append((place, last - first, share, first == before, ends))
            first = last
        before += bring
    return slices


class Loads:
    """State on its way through the ring of GPU buffers, in the order in which units are updated: a share for
    each visit of backward, behind its delivery.

    The links are other transfers' too. Each method is given when they are free, and returns when they are
    then; state that waits for its buffer lets others pass.
    """

    def __init__(self, slots: int, brings: list[float], shares: int) -> None:
        """`brings`: seconds to bring up each chunk's state, in the order of updates."""
        self._slots, self._slices = slots, shared_out(brings, shares)
        self._loaded, self._before, self._written = ([0.0] * len(brings) for _ in range(3))
        self._position = self._begun = self._taken = self._due = 0
        self._stream = self._busy = 0.0
        self.out = 0.0
        """When the last piece so far is on the host again."""

    def begin(self, shares: int, thread: float, up: float) -> float:
        """A step's first shares."""
        self._before, self._written = self._written, self._before
        self._position = self._begun = self._taken = self._due = 0
        return self.share(shares, thread, up)

    def share(self, shares: int, thread: float, up: float) -> float:
        """More shares may come up, behind what is being delivered."""
        self._due += shares
        self._stream = max(self._stream, up)
        return self._load(-1, thread, up)

    def _load(self, needed: int, thread: float, up: float) -> float:
        """Loads what is due, as far as there are buffers, and the chunks to the place `needed`."""
        # Local variables: this is the innermost loop of the model.
        slices, position, slots = self._slices, self._position, self._slots
        due, most, stream = self._due, self._taken + slots, self._stream
        while position < len(slices):
            place, seconds, share, begins, ends = slices[position]
            if place > needed and (share >= due or (begins and self._begun == most)):
                break
            position += 1
            free = thread if thread > up else up
            start = free if free > stream else stream
            if begins:
                self._begun += 1
                start = max(start, self._before[place])
                if place >= slots:
                    start = max(start, self._written[place - slots])
            stream = start + seconds
            if ends:
                self._loaded[place] = stream
            up = free + seconds
        self._position, self._stream = position, stream
        return up

    def update(
        self, chunks: GpuUpdate, ready: float, thread: float, up: float, down: float
    ) -> tuple[float, float, float, float]:
        """One unit, whose gradients are there at `ready`: when its first and its last chunk are updated, and
        when the links are free. `out` is when all of it is written."""
        number, _, work, write = chunks
        first, out, busy = 0.0, self.out, self._busy
        loaded, written, taken = self._loaded, self._written, self._taken
        for place in range(taken, taken + number):
            up = self._load(place, thread, up)
            there = loaded[place]
            begin = busy if busy > ready else ready
            busy = (begin if begin > there else there) + work
            out = max(out, busy, down) + write
            down = (down if down > thread else thread) + write
            written[place] = out
            self._taken = place + 1
            if place == taken:
                first = busy
        self.out, self._busy = out, busy
        return first, busy, self._load(-1, thread, up), down

    def update_resident(
        self, chunks: GpuUpdate, ready: float, thread: float, down: float
    ) -> tuple[float, float, float]:
        """As `update`, for a unit whose state is there and stays: no buffer of the ring is taken."""
        number, _, work, write = chunks
        first = max(self._busy, ready) + work
        self._busy = first + (number - 1) * work
        self.out = max(max(self.out, first, down) + number * write, self._busy + write)
        return first, self._busy, max(down, thread) + number * write


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
