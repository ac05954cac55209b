"""A small discrete-event simulator of one rank and the worker, chunk by chunk.

It shares nothing with the step-time model but the order of transfers, which both take from the engine:
threads and streams are generators that wait for events and let time pass.
"""

import heapq
from collections import deque
from collections.abc import Generator, Iterator
from itertools import count
from typing import Any, NamedTuple

from slidedp.layout import Layout
from slidedp.policy.rates import Rates, Workload
from slidedp.stream.program import Deliver, Fetch, Load, Reduce, Stash, Update, Visits, transfers

Activity = Generator[Any, None, None]


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self.fired, self.waiting = False, []
        self.at = 0.0
        """When that was."""


class Clock:
    """Runs activities; each yields seconds to pass or an event to wait for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Activity]] = []
        self._turn = count()

    def start(self, activity: Activity, after: float = 0.0) -> None:
        heapq.heappush(self._heap, (self.now + after, next(self._turn), activity))

    def fire(self, event: Event) -> None:
        event.fired, event.at = True, self.now
        while event.waiting:
            self.start(event.waiting.pop())

    def run(self) -> None:
        while self._heap:
            self.now, _, activity = heapq.heappop(self._heap)
            for wish in activity:
                if isinstance(wish, Event):
                    if wish.fired:
                        continue
                    wish.waiting.append(activity)
                else:
                    self.start(activity, wish)
                break


class Stream:
    """Does what is put on it, one after another."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._work, self._idle = clock, deque(), True

    def put(self, activity: Activity) -> None:
        self._work.append(activity)
        if self._idle:
            self._idle = False
            self._clock.start(self._serve())

    def _serve(self) -> Activity:
        while self._work:
            yield from self._work.popleft()
        self._idle = True


class Engine:
    """A copy engine: serves streams in the order in which they ask."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free = clock, 0.0

    def use(self, seconds: float) -> Activity:
        self._free = max(self._free, self._clock.now) + seconds
        yield self._free - self._clock.now


class Events(dict):
    def __missing__(self, key: Any) -> Event:
        return self.setdefault(key, Event())


class Simulated(NamedTuple):
    """The last of some steps."""

    step: float
    drain: float
    """From the end of its compute to its last publication."""


def simulate(w: Workload, r: Rates, layout: Layout, steps: int = 5) -> Simulated:
    """Seconds of the last step and its drain. For two or more ranks, `sharded` or `replicated`, `gpu` or
    `cpu`; the rates must not depend on what else is busy."""
    clock, events, visits = Clock(), Events(), Visits(w.layers)
    up, down, between = Stream(clock), Stream(clock), Stream(clock)
    state_in, updates, state_out = Stream(clock), Stream(clock), Stream(clock)
    engine_up, engine_down = Engine(clock), Engine(clock)
    head, frozen = w.layers + 1, frozenset(w.frozen)
    trained = [unit for unit in range(head + 1) if unit not in frozen]
    lowest = trained[0]
    there, resident = layout.updated_on_gpu(w.layers, frozen), layout.resident_on_gpu(w.layers, frozen)
    modes, window = layout.activation_modes(w.layers, lowest), min(layout.window, w.layers)
    slots, away = min(layout.gradient_slots, w.layers), w.away_bytes(layout)
    program = transfers(w.layers, window, modes, w.tied, there, layout.schedule, lowest=lowest)
    lanes = w.ranks if layout.reduction == "cpu" else 1
    ends: list[float] = []

    gradient = 4 if w.wide_gradients else w.itemsize
    part = layout.partial_budget if w.compiled else 1.0

    def chunks(unit: int) -> Iterator[float]:
        """Bytes of each chunk."""
        left = w.unit_params(unit) * w.itemsize
        number = -(-left // layout.chunk_bytes)
        for _ in range(number):
            yield left / number

    def serve(seconds: float, waits: list[Any], done: Any, engine: Engine | None = None) -> Activity:
        """Waits for other things, takes its time on a stream, and is done."""
        for key in waits:
            yield events[key]
        if engine is None:
            yield seconds
        else:
            yield from engine.use(seconds)
        clock.fire(events[done])

    def copy_up(size: float, waits: list[Any], done: Any) -> Activity:
        return serve(size / r.up_all + r.copy_latency, waits, done, engine_up)

    def gather(size: float, waits: list[Any], done: Any) -> Activity:
        return serve(size / r.all_gather + r.collective_latency, waits, done)

    def scatter(size: float, waits: list[Any], done: Any) -> Activity:
        return serve(size / r.reduce_scatter + r.collective_latency, waits, done)

    def land(size: float, waits: list[Any], done: Any) -> Activity:
        return serve(size / r.down_all + r.copy_latency, waits, done, engine_down)

    order = sorted(there, reverse=layout.schedule == "in_backward")
    pieces = [(unit, i, size / w.itemsize / w.ranks) for unit in order for i, size in enumerate(chunks(unit))]
    moving = [piece for piece in pieces if piece[0] not in resident]

    # The head counts as so many visits, if the vocabulary is in one piece.
    as_visits = (w.embed_params if w.tied else w.head_params) // w.layer_params
    shares = max(1, w.layers + 1 - max(lowest, 1)) + as_visits
    # (piece, from, to, share), in parameters: cut where one share ends.
    slices: list[tuple[int, float, float, int]] = []
    whole, before = sum(share for *_, share in moving), 0.0
    for place, (*_, numel) in enumerate(moving):
        first = 0.0
        while first < numel - 1e-6:
            share_of = int((before + first) / whole * shares + 1e-9)
            last = min(numel, (share_of + 1) * whole / shares - before)
            slices.append((place, first, last, share_of))
            first = last
        before += numel
    loads = {"slice": 0, "begun": 0, "taken": 0, "due": 0}

    def load_next(step: int) -> None:
        """A slice of the state comes up once its buffer and its last writing allow."""
        place, first, last, _ = slices[loads["slice"]]
        unit, chunk, numel = moving[place]
        loads["slice"] += 1
        waits: list[Any] = []
        if not first:
            loads["begun"] += 1
            waits += [("written", step - 1, unit, chunk)] if step else []
            if place >= layout.update_slots:
                waits.append(("written", step, *moving[place - layout.update_slots][:2]))
        key = ("loaded", step, unit, chunk)
        done: Any = key if last > numel - 1e-6 else (*key, first)
        state_in.put(serve((last - first) * 12 / 14 / r.gpu_update, waits, done, engine_up))

    def load_due(step: int) -> None:
        while loads["slice"] < len(slices):
            _, first, _, share_of = slices[loads["slice"]]
            full = not first and loads["begun"] == loads["taken"] + layout.update_slots
            if full or share_of >= loads["due"]:
                return
            load_next(step)

    def load_share(step: int, number: int, behind: Any) -> None:
        """Behind a delivery."""
        loads["due"] += number
        if behind is not None:
            state_in.put(serve(0.0, [behind], ("share", step, loads["due"])))
        load_due(step)

    def update_chunk(step: int, unit: int, chunk: int, share: float) -> Activity:
        waits: list[Any] = [("landed", step, unit, chunk)]
        if unit not in resident:
            waits.append(("loaded", step, unit, chunk))
        return serve(share * 28 / r.device_copy, waits, ("updated", step, unit, chunk))

    def write(step: int, unit: int, chunk: int, share: float) -> Activity:
        waits = [("updated", step, unit, chunk)]
        size = w.itemsize if unit in resident else 14
        return serve(share * size / 14 / r.gpu_update, waits, ("written", step, unit, chunk), engine_down)

    def publish_written(step: int, unit: int, chunk: int) -> Activity:
        return serve(2 * r.message_latency, [("written", step, unit, chunk)], ("published", step + 1, unit))

    def transfer_thread() -> Activity:
        occupant: dict[Any, Any] = {}
        came_up: Any = None
        for step in range(steps):
            fetches: list[int] = []
            for t in program:
                if isinstance(t, Load):
                    loads.update(dict.fromkeys(loads, 0))
                    load_share(step, window + 1 + as_visits, came_up)
                    continue
                unit = t.unit
                if isinstance(t, Update):
                    if layout.schedule == "in_forward":
                        yield events["coefficients", step]
                    number = len(list(chunks(unit)))
                    for each, chunk, share in pieces:
                        if each != unit:
                            continue
                        place = -1 if unit in resident else moving.index((each, chunk, share))
                        while loads["slice"] < len(slices) and slices[loads["slice"]][0] <= place:
                            load_next(step)
                        updates.put(update_chunk(step, unit, chunk, share))
                        state_out.put(write(step, unit, chunk, share))
                        if place >= 0:
                            loads["taken"] += 1
                            load_due(step)
                    clock.start(publish_written(step, unit, number - 1))
                elif isinstance(t, Deliver):
                    fresh = step and t.visit <= window and unit in there
                    if step and not fresh and unit not in frozen:
                        yield events["published", step, unit]
                    edge = unit in (0, head)
                    slot = ("edge", unit if w.tied else 0) if edge else ("layer", unit % window)
                    free = [occupant[slot]] if slot in occupant else []
                    occupant[slot] = ("visited", step, t.release)
                    sizes = list(chunks(unit))
                    for i, size in enumerate(sizes):
                        key = ("delivered", step, t.visit)
                        done: Any = key if i == len(sizes) - 1 else (*key, i)
                        if fresh:
                            between.put(gather(size, [("updated", step - 1, unit, i)], done))
                        elif layout.delivery == "replicated":
                            up.put(copy_up(size, free, done))
                            came_up = done
                        else:
                            came_up = (*key, i, "copied")
                            up.put(copy_up(size / w.ranks, free, came_up))
                            between.put(gather(size, [*free, (*key, i, "copied")], done))
                    if t.visit > visits.head and there:
                        load_share(step, 1, came_up)
                elif isinstance(t, Reduce) and unit in frozen:
                    continue
                elif isinstance(t, Reduce):
                    sizes = list(chunks(unit))
                    ring = lanes > 1 if layout.schedule == "in_forward" else layout.landing == "ring"
                    landing = [layer for layer in range(w.layers, 0, -1) if layer not in there | frozen]
                    if ring and unit in landing[4:]:
                        yield events["consumed", step, landing[landing.index(unit) - 4]]
                    for i, size in enumerate(sizes):
                        size *= gradient / w.itemsize
                        key, ready = ("landed", step, unit, i), ("gradient", step, unit)
                        if layout.reduction == "cpu":
                            down.put(land(size, [ready], key))
                        elif unit in there:
                            between.put(scatter(size, [ready], (*key, "reduced")))
                            copied = 2 * size / w.ranks / r.device_copy
                            down.put(serve(copied, [(*key, "reduced")], key))
                        else:
                            between.put(scatter(size, [ready], (*key, "reduced")))
                            down.put(land(size / w.ranks, [(*key, "reduced")], key))
                        if unit not in there or layout.schedule == "in_forward":
                            clock.start(report(step, unit, i))
                    down.put(serve(0.0, [], ("reduced", step, unit)))
                elif isinstance(t, Stash):
                    held = ("visited", step, visits.forward(unit))
                    size = away[unit - 1] / r.down_all
                    down.put(serve(size, [held], ("stashed", step, unit), engine_down))
                elif isinstance(t, Fetch):
                    waits = [("stashed", step, unit)]
                    if len(fetches) >= 2:
                        waits.append(("visited", step, visits.backward(fetches[-2])))
                    fetches.append(unit)
                    up.put(serve(away[unit - 1] / r.up_all, waits, ("fetched", step, unit), engine_up))

    def compute_thread() -> Activity:
        outgoing: list[Any] = []
        last: dict[Any, Any] = {}  # by gradient buffer
        again = {t.visit for t in program if isinstance(t, Deliver) and t.visit > visits.head}
        for step in range(steps):

            def visit(number: int, seconds: float, step: int = step) -> Activity:
                if number <= visits.head or number in again:
                    yield events["delivered", step, number]
                yield seconds
                clock.fire(events["visited", step, number])

            def submit(unit: int, step: int = step) -> Activity:
                if unit in frozen:
                    return
                edge = "head" if w.tied and unit == head else "edge"
                buffer = unit % slots if 0 < unit < head else edge
                if buffer in last:
                    yield events[last[buffer]]
                last[buffer] = ("reduced", step, unit)
                yield w.unit_params(unit) * (w.itemsize + gradient) / r.device_copy
                clock.fire(events["gradient", step, unit])

            yield from visit(0, r.embed_forward)
            for unit in range(1, head):
                if away[unit - 1]:
                    yield events["delivered", step, unit]
                    if len(outgoing) >= 2:
                        yield events[outgoing[-2]]
                    outgoing.append(("stashed", step, unit))
                yield from visit(unit, r.forward)
            yield from visit(visits.head, r.head)
            yield from submit(head)
            for unit in range(w.layers, max(lowest, 1) - 1, -1):
                if away[unit - 1]:
                    yield events["fetched", step, unit]
                seconds = r.backward(modes[unit - 1], part)
                yield from visit(visits.backward(unit), seconds)
                yield from submit(unit)
            if lowest == 0:
                yield r.embed_backward
                yield from submit(0)
                clock.fire(events["visited", step, visits.embed_backward])
            ends.append(clock.now)

    # --- the worker: one activity that takes work from a heap -------------------------------------

    waiting: list[tuple[Any, float, int, int]] = []
    left: dict[tuple[int, int], int] = {}
    arrived = [Event()]

    def read(gradients: int) -> float:
        """How much longer the worker takes than with one gradient in the compute dtype."""
        state = 26 if w.itemsize == 2 else 24
        return (state + gradients * gradient) / (state + w.itemsize)

    def report(step: int, unit: int, chunk: int) -> Activity:
        yield events["landed", step, unit, chunk]
        yield r.message_latency
        number = len(list(chunks(unit)))
        if layout.schedule == "in_forward":
            turn: Any = (step, clock.now)
            work = w.unit_params(unit) * gradient * (lanes + 1) / r.sum_lanes if lanes > 1 else 0.0
            work += r.update_latency if lanes > 1 else 0.0
        else:
            turn = (step, unit if layout.landing == "full" else -unit)
            work = w.unit_params(unit) / r.update * read(lanes)
            work += number * r.update_latency
        heapq.heappush(waiting, (turn, chunk, step, unit, work / number))
        left.setdefault((step, unit), number)
        clock.fire(arrived[0])

    def worker() -> Activity:
        finished = {step: 0 for step in range(steps)}
        expected = len(trained) - (len(there) if layout.schedule == "in_backward" else 0)
        while min(finished.values()) < expected:
            while not waiting:
                arrived[0] = Event()
                yield arrived[0]
            *_, step, unit, work = heapq.heappop(waiting)
            yield work
            left[step, unit] -= 1
            if left[step, unit]:
                continue
            finished[step] += 1
            clock.start(serve(r.message_latency, [], ("consumed", step, unit)))
            if layout.schedule == "in_backward":
                clock.start(serve(r.message_latency, [], ("published", step + 1, unit)))
            elif finished[step] == len(trained):
                clock.start(serve(r.message_latency, [], ("coefficients", step)))
                for each in trained:
                    if each in there:
                        continue
                    yield (
                        w.unit_params(each) / r.update * read(1) + len(list(chunks(each))) * r.update_latency
                    )
                    clock.start(serve(r.message_latency, [], ("published", step + 1, each)))

    for activity in (transfer_thread(), compute_thread(), worker()):
        clock.start(activity)
    clock.run()
    assert len(ends) == steps, "the simulated step deadlocked"
    published = max(events["published", steps, unit].at for unit in range(w.layers + 2))
    return Simulated(ends[-1] - ends[-2], published - ends[-1])
