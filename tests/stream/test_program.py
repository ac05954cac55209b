"""The order of transfers: complete, free of deadlock, and right about what a slot holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.layout import ACTIVATIONS, SCHEDULES, Layout
from slidedp.stream.program import (
    FETCH_AHEAD,
    PIECE_SLOTS,
    Balance,
    Deliver,
    Fetch,
    Load,
    Reduce,
    Stash,
    Update,
    Visits,
    evaluation,
    piece_visits,
    transfers,
)
from slidedp.stream.stash import OUTGOING

AWAY = ("offload", "spill")
"""Modes that move something to the host."""
STEPS = 3
"""Steps that a simulation runs: buffers are handed on from one step to the next."""


@st.composite
def programs(draw):
    """(layers, window, modes, tied, gradient_slots, units updated on the GPU, schedule, pieces, whether
    layers choose experts, the first unit that is trained); the window is at most the layers, as in Engine."""
    layers = draw(st.integers(1, 6))
    window = min(layers, draw(st.integers(1, 7)))
    lowest = draw(st.one_of(st.just(0), st.integers(0, layers + 1)))
    modes = tuple(draw(st.lists(st.sampled_from(ACTIVATIONS), min_size=layers, max_size=layers)))
    layout = Layout(activations=modes, window=window, gpu_updates=draw(st.integers(0, layers + 2)))
    modes, on_gpu = layout.activation_modes(layers, lowest), layout.updated_on_gpu(layers, {*range(lowest)})
    schedule = draw(st.sampled_from(SCHEDULES))
    pieces = draw(st.sampled_from([1, 1, 2, 3, 5]))
    tied, slots, routed = draw(st.booleans()), draw(st.integers(1, 3)), draw(st.booleans())
    return layers, window, modes, tied, slots, on_gpu, schedule, pieces, routed, lowest


def slot_of(unit: int, layers: int, window: int, tied: bool) -> str:
    """The slot's name, as Buffers shares slots out."""
    if unit == 0:
        return "edge"
    if unit == layers + 1:
        return "head" if tied else "edge"
    return f"layer {unit % window}"


def gradient_of(unit: int, layers: int, slots: int, tied: bool) -> str:
    if unit == 0:
        return "edge"
    if unit == layers + 1:
        return "head" if tied else "edge"
    return f"layer {unit % min(slots, layers)}"


def visits_of(layers: int, tied: bool, lowest: int = 0) -> list[tuple[int, tuple[int, ...]]]:
    """(visit, units whose parameters it reads) in compute order."""
    visits = Visits(layers)
    ups = [(visits.forward(u), (u,)) for u in range(layers + 1)]
    head = [(visits.head, (layers + 1, 0) if tied else (layers + 1,))]
    downs = [(visits.backward(u), (u,)) for u in range(layers, max(lowest, 1) - 1, -1)]
    return ups + head + downs


def stays(visit: int, unit: int, layers: int, window: int) -> bool:
    """Whether the visit needs no delivery of its own, as step._Visit decides."""
    return visit > layers + 1 and unit > layers - window


class Ring:
    """Buffers taken in turn, each behind the signal of what it held."""

    def __init__(self, count: int) -> None:
        self.free: list[tuple | None] = [None] * count
        self.next = 0

    def take(self, behind: tuple) -> tuple | None:
        before, self.free[self.next] = self.free[self.next], behind
        self.next = (self.next + 1) % len(self.free)
        return before


class Simulation:
    """Compute and transfer threads as generators that yield the signal they wait for.

    Each follows slidedp.stream.step line by line. The contents of slots are kept, so that a visit can
    check that it reads its own unit.
    """

    def __init__(
        self,
        layers,
        window,
        modes,
        tied,
        gradient_slots,
        on_gpu=frozenset(),
        schedule="in_forward",
        pieces=1,
        routed=True,
        lowest=0,
    ):
        self.layers, self.window, self.modes, self.tied, self.routed = layers, window, modes, tied, routed
        self.gradient_slots, self.on_gpu, self.schedule = gradient_slots, on_gpu, schedule
        self.pieces, self.lowest = pieces, lowest
        self.fresh: set[int] = set()
        # A piece's slot and gradient buffer, as Vocabulary shares them out: in turn.
        some = piece_visits(layers, pieces, tied) if pieces > 1 else ()
        self.turn = {at.visit: i % PIECE_SLOTS for i, at in enumerate(at for part in some for at in part)}
        self.visits = Visits(layers)
        self.fired: set[tuple] = set()
        self.content: dict[str, int] = {}
        self.slot_free: dict[str, tuple] = {}
        self.gradient_free: dict[str, tuple] = {}
        self.out = {mode: Ring(OUTGOING) for mode in AWAY}
        self.back = {mode: Ring(FETCH_AHEAD) for mode in AWAY}
        self.reading: dict[str, int] = {}  # slot -> unit that a visit is reading now
        self.waiting: dict[str, tuple | None] = {}

    def compute(self):
        for step in range(STEPS):
            self.fired.add((step, "put", 0))
            for visit, units in visits_of(self.layers, self.tied, self.lowest):
                unit = units[0]
                if self.pieces > 1 and unit in (0, self.visits.head):
                    yield from self.in_pieces(step, unit)
                    if unit and self.routed:
                        yield (step, "balanced", 0)
                    continue
                mode = self.modes[unit - 1] if 1 <= unit <= self.layers else None
                offload = mode in AWAY
                backward = visit > self.visits.head
                if not (backward and stays(visit, unit, self.layers, self.window)):
                    yield (step, "delivered", visit)
                slots = {slot_of(u, self.layers, self.window, self.tied): u for u in units}
                self.reading |= slots
                if offload and not backward:
                    before = self.out[mode].take((step, "stashed", unit))
                    if before is not None:
                        yield before
                    self.fired.add((step, "held", unit))
                if offload and backward:
                    yield (step, "fetched", unit)
                yield None  # others may run while this visit reads
                for slot, wanted in slots.items():
                    assert self.content[slot] == wanted, f"visit {visit} reads {self.content[slot]}"
                    del self.reading[slot]
                self.fired.add((step, "visited", visit))
                if visit == self.layers:
                    self.fired.add((step, "routed", 0))
                if backward or visit == self.visits.head:
                    yield from self.submit(step, unit)
                if visit == self.visits.head and self.routed:
                    yield (step, "balanced", 0)
            if self.lowest:
                continue
            if self.pieces > 1:
                for at in piece_visits(self.layers, self.pieces, self.tied)[2]:
                    if self.tied:
                        yield from self.visit_piece(step, at)
                    yield from self.submit_piece(step, at)
            else:
                yield from self.submit(step, 0)

    def in_pieces(self, step, unit):
        """Forward of embed, or the head, as slidedp.stream.vocabulary goes through them."""
        forward, head, _ = piece_visits(self.layers, self.pieces, self.tied)
        if unit and self.tied:
            yield (step, "delivered", self.visits.head)
            self.fired.add((step, "visited", self.visits.head))
        for i, at in enumerate(head if unit else forward):
            yield from self.visit_piece(step, at)
            if unit and not self.tied and i >= self.pieces - 1:
                yield from self.submit_piece(step, at)
        if unit and self.tied:
            yield from self.submit(step, unit)

    def visit_piece(self, step, at):
        slot = f"piece {self.turn[at.visit]}"
        yield (step, "delivered", at.visit)
        self.reading[slot] = at
        yield None
        assert self.content[slot] == at[:2], f"{at} reads {self.content[slot]}"
        del self.reading[slot]
        self.fired.add((step, "visited", at.visit))

    def piece_gradient(self, unit, piece):
        return f"piece {((self.pieces if unit == 0 and not self.tied else 0) + piece) % PIECE_SLOTS}"

    def submit_piece(self, step, at):
        buffer = self.piece_gradient(at.unit, at.piece)
        if buffer in self.gradient_free:
            yield self.gradient_free[buffer]
        self.gradient_free[buffer] = (step, "reduced", (at.unit, at.piece))
        self.fired.add((step, "gradient", (at.unit, at.piece)))

    def submit(self, step, unit):
        buffer = gradient_of(unit, self.layers, self.gradient_slots, self.tied)
        before = self.gradient_free.get(buffer)
        if before is not None:
            yield before
        self.gradient_free[buffer] = (step, "reduced", unit)
        self.fired.add((step, "gradient", unit))

    def transfer(self):
        program = transfers(
            self.layers,
            self.window,
            self.modes,
            self.tied,
            self.on_gpu,
            self.schedule,
            self.pieces,
            self.lowest,
            self.routed,
        )
        in_slots = range(int(self.pieces > 1), self.window + 1)  # units that are updated where they compute
        last = {u: u for u in range(self.layers + 2)}  # whose reduction is a unit's last
        if self.pieces > 1:
            last |= {u: (u, self.pieces - 1) for u in ((0,) if self.tied else (0, self.layers + 1))}
        for step in range(STEPS):
            yield (step, "put", 0)
            for item in program:
                if isinstance(item, Load):
                    continue  # waits on the GPU only
                if isinstance(item, Update):
                    slot = slot_of(item.unit, self.layers, self.window, self.tied)
                    if item.unit in in_slots:
                        yield self.slot_free[slot]
                        assert slot not in self.reading, f"{item} while unit {self.reading[slot]} is read"
                        self.content[slot] = item.unit
                        self.fresh.add(item.unit)
                    yield (step, "reduced", last[item.unit])
                elif isinstance(item, Deliver) and item.visit <= self.visits.head and item.unit in self.fresh:
                    slot = slot_of(item.unit, self.layers, self.window, self.tied)
                    assert self.content[slot] == item.unit, f"{item} finds unit {self.content[slot]}"
                    self.slot_free[slot] = (step, "visited", item.release)
                    self.fired.add((step, "delivered", item.visit))
                elif isinstance(item, Deliver):
                    if item.visit <= self.visits.head and step > 0:
                        # in_forward, the later of the schedules: published when all have landed
                        for unit in range(self.lowest, self.layers + 2):
                            yield (step - 1, "reduced", last[unit])
                    slot = slot_of(item.unit, self.layers, self.window, self.tied)
                    if item.piece is not None:
                        slot = f"piece {self.turn[item.visit]}"
                    if slot in self.slot_free:
                        yield self.slot_free[slot]
                    self.slot_free[slot] = (step, "visited", item.release)
                    assert slot not in self.reading, f"{item} while unit {self.reading[slot]} is read"
                    self.content[slot] = item.unit if item.piece is None else (item.unit, item.piece)
                    self.fired.add((step, "delivered", item.visit))
                elif isinstance(item, Reduce):
                    index = item.unit if item.piece is None else (item.unit, item.piece)
                    yield (step, "gradient", index)
                    self.fired.add((step, "reduced", index))
                elif isinstance(item, Balance):
                    yield (step, "routed", 0)
                    self.fired.add((step, "balanced", 0))
                elif isinstance(item, Stash):
                    yield (step, "held", item.unit)
                    self.fired.add((step, "stashed", item.unit))
                else:
                    before = self.back[self.modes[item.unit - 1]].take(
                        (step, "visited", self.visits.backward(item.unit))
                    )
                    if before is not None:
                        yield before
                    yield (step, "stashed", item.unit)
                    self.fired.add((step, "fetched", item.unit))
                yield None

    def run(self, choose):
        """Advances one runnable thread at a time; fails when none is."""
        threads = {"compute": self.compute(), "transfer": self.transfer()}
        self.waiting = dict.fromkeys(threads)
        while threads:
            able = [n for n in threads if self.waiting[n] is None or self.waiting[n] in self.fired]
            assert able, f"deadlock: {self.waiting}"
            name = able[choose(len(able))]
            try:
                self.waiting[name] = next(threads[name])
            except StopIteration:
                del threads[name], self.waiting[name]


@settings(max_examples=250, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_no_deadlock_and_no_slot_overwritten(program, random):
    """Under any interleaving: also the two in which one thread always runs ahead."""
    for choose in (random.randrange, lambda able: 0, lambda able: able - 1):
        Simulation(*program).run(choose)


def test_every_small_program_ends():
    """All layers 1..6, windows 1..7, gradient slots 1..3, tied or not, with one mode throughout."""
    for layers in range(1, 7):
        for window in {min(layers, w) for w in range(1, 8)}:
            for slots in (1, 2, 3):
                for tied in (False, True):
                    for mode in ("keep", "offload"):
                        for pieces in (1, 3):
                            simulation = Simulation(
                                layers, window, (mode,) * layers, tied, slots, pieces=pieces
                            )
                            simulation.run(lambda able: able - 1)


@given(programs())
def test_every_visit_has_what_it_needs(program):
    layers, window, modes, tied, *_, lowest = program
    visits, order = Visits(layers), transfers(layers, window, modes, tied, lowest=lowest)
    delivered = [(t.visit, t.unit) for t in order if isinstance(t, Deliver)]
    needed = [
        (visit, units[0])
        for visit, units in visits_of(layers, tied, lowest)
        if not stays(visit, units[0], layers, window)
    ]
    assert sorted(delivered) == sorted(needed)
    assert [t.visit for t in order if isinstance(t, Deliver)] == sorted(v for v, _ in needed)
    assert [t.unit for t in order if isinstance(t, Reduce)] == list(range(layers + 1, lowest - 1, -1))
    offloaded = [u for u in range(1, layers + 1) if modes[u - 1] in AWAY]
    assert [t.unit for t in order if isinstance(t, Stash)] == offloaded
    assert [t.unit for t in order if isinstance(t, Fetch)] == offloaded[::-1]
    assert visits.embed_backward == 2 * layers + 2


@given(programs())
def test_a_release_is_the_last_visit_before_the_slot_is_refilled(program):
    layers, window, modes, tied, *_, lowest = program
    order = [t for t in transfers(layers, window, modes, tied, lowest=lowest) if isinstance(t, Deliver)]
    visits = Visits(layers)
    for i, deliver in enumerate(order):
        slot = slot_of(deliver.unit, layers, window, tied)
        later = [t.visit for t in order[i + 1 :] if slot_of(t.unit, layers, window, tied) == slot]
        until = min(later, default=visits.embed_backward + 1)
        readers = [
            visit
            for visit, units in visits_of(layers, tied, lowest)
            if deliver.unit in units and deliver.visit <= visit < until
        ]
        assert deliver.release == max(readers)


@given(programs())
def test_only_the_window_is_ever_resident(program):
    """A layer that is not in the top `window` comes twice, one that is, or that has no backward, once."""
    layers, window, modes, tied, *_, lowest = program
    order = transfers(layers, window, modes, tied, lowest=lowest)
    units = [t.unit for t in order if isinstance(t, Deliver)]
    for unit in range(1, layers + 1):
        assert units.count(unit) == (1 if unit > layers - window or unit < lowest else 2)
    assert units.count(0) == units.count(layers + 1) == 1


@given(st.integers(1, 6), st.data(), st.integers(2, 5), st.booleans(), st.booleans())
def test_pieces_come_when_they_are_visited(layers, data, pieces, tied, embed_trained):
    window = data.draw(st.integers(1, layers))
    lowest = 0 if embed_trained else 1
    order = transfers(layers, window, ("keep",) * layers, tied, pieces=pieces, lowest=lowest)
    forward, head, backward = piece_visits(layers, pieces, tied)
    needed = forward + head + (backward if tied and embed_trained else [])
    found = [(t.unit, t.piece, t.visit) for t in order if isinstance(t, Deliver) and t.piece is not None]
    assert found == needed
    assert all(t.release == t.visit for t in order if isinstance(t, Deliver) and t.piece is not None)
    up = list(range(pieces))
    assert [at.piece for at in forward] == up and [at.piece for at in head] == [*up[:0:-1], *up]
    reduced = [(t.unit, t.piece) for t in order if isinstance(t, Reduce) and t.piece is not None]
    of_head = [] if tied else [(layers + 1, p) for p in up]
    assert reduced == of_head + ([(0, p) for p in up] if embed_trained else [])
    later = [t for t in evaluation(layers, tied, pieces) if t.piece is not None]
    assert [(t.unit, t.piece, t.visit) for t in later] == forward + head[:pieces]
