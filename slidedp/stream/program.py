"""The order of one step's transfers, as data.

Compute visits units in the order embed, layers up, head, layers down, embed. One thread per rank
enqueues all transfers in the order listed here, which is the same on every rank, so collectives match
without any agreement at run time. Each transfer stands behind the visit that frees what it needs.

A layer always streams through slot `layer mod window`. So when it comes back in the backward pass, it
comes back to the same addresses, and tensors that autograd saved from a slot are valid again.
"""

from typing import NamedTuple

PIECE_SLOTS = 2
"""Slots, and gradient buffers, that pieces of embed and head take in turn."""
FETCH_AHEAD = 2
"""Layers whose offloaded input, or spilled intermediates, are on the GPU ahead of their backward."""


class Deliver(NamedTuple):
    """Fill the unit's slot, or a slot for pieces with one of its pieces. `release` is the visit after which
    the slot may be overwritten."""

    unit: int
    visit: float
    release: float
    piece: int | None = None


class Reduce(NamedTuple):
    """Sum the gradient of the unit, or of one of its pieces, over ranks and land it on the host."""

    unit: int
    piece: int | None = None


class Load(NamedTuple):
    """Start to bring up the state of what is updated on the GPU first."""


class Update(NamedTuple):
    """Update the unit on the GPU."""

    unit: int


class Stash(NamedTuple):
    """Copy a layer's input, or what it keeps, to the host."""

    unit: int


class Fetch(NamedTuple):
    """Bring that back."""

    unit: int


class Balance(NamedTuple):
    """Sum over ranks what the routers of all layers up to the last, `unit`, chose; backward needs it."""

    unit: int


Transfer = Deliver | Reduce | Load | Update | Stash | Fetch | Balance


class Visits:
    """Numbers of the compute visits of one step. Units: 0 embed, 1..layers, layers + 1 head."""

    def __init__(self, layers: int) -> None:
        self.layers, self.head = layers, layers + 1
        self.embed_backward = 2 * layers + 2

    def forward(self, unit: int) -> int:
        return unit

    def backward(self, unit: int) -> int:
        return 2 * self.layers + 2 - unit


class PieceVisit(NamedTuple):
    """Compute on one piece of `embed` or `head`."""

    unit: int
    """Whose matrix is read."""
    piece: int
    visit: float
    """Lies before the visit that it is a part of, and after the one before that."""


def piece_visits(
    layers: int, pieces: int, tied: bool
) -> tuple[list[PieceVisit], list[PieceVisit], list[PieceVisit]]:
    """Visits of the pieces in forward, head and backward. The head goes through them downwards and up
    again, and meets piece 0 once. Backward reads a tied matrix only."""
    visits = Visits(layers)
    up = list(range(pieces))

    def parts(unit: int, visit: int, order: list[int]) -> list[PieceVisit]:
        return [
            PieceVisit(unit, piece, visit - 1 + (i + 1) / (len(order) + 1)) for i, piece in enumerate(order)
        ]

    head = parts(0 if tied else visits.head, visits.head, up[:0:-1] + up)
    return parts(0, 0, up), head, parts(0, visits.embed_backward, up)


def _in_pieces(
    layers: int, window: int, pieces: int, tied: bool, embed_trained: bool
) -> list[tuple[float, Transfer]]:
    """The deliveries and reductions of embed and head, but for a tied head's norm, as in `transfers`."""
    visits, start = Visits(layers), -1
    forward, head, backward = piece_visits(layers, pieces, tied)
    turn = max(start, visits.forward(layers - window))  # behind the last layer's delivery
    down = visits.backward(window + 1) if layers > window else visits.head
    order = [(start, visit) for visit in forward] + [(turn, visit) for visit in head]
    if tied and embed_trained:
        order += [(down, visit) for visit in backward]
    placed: list[tuple[float, Transfer]] = []
    for i, (after, (unit, piece, visit)) in enumerate(order):
        freed = order[i - PIECE_SLOTS][1].visit if i >= PIECE_SLOTS else start
        placed.append((max(after, freed), Deliver(unit, visit, visit, piece)))
    if not tied:
        placed += [(visit, Reduce(unit, piece)) for unit, piece, visit in head[pieces - 1 :]]
    if embed_trained:
        placed += [(visit, Reduce(unit, piece)) for unit, piece, visit in backward]
    return placed


def transfers(
    layers: int,
    window: int,
    modes: tuple[str, ...],
    tied: bool,
    on_gpu: frozenset[int] = frozenset(),
    schedule: str = "in_forward",
    pieces: int = 1,
    lowest: int = 0,
    routed: bool = False,
) -> list[Transfer]:
    """All transfers of one step in issue order; `modes` has one activation mode per layer, `on_gpu` are
    the units that are updated on the GPU, `pieces` is what embed and head are cut in, `lowest` is the unit
    where backward ends, and the layers of a `routed` model choose experts."""
    visits = Visits(layers)
    head, start = visits.head, -1
    resident = layers - window  # layers above this stay in the window from forward to backward
    placed: list[tuple[float, Transfer]] = []  # (the visit it stands behind, transfer)

    if pieces > 1:
        placed += _in_pieces(layers, window, pieces, tied, lowest == 0)
    else:
        placed.append((start, Deliver(0, visits.forward(0), head if tied else visits.forward(0))))
    for unit in range(1, layers + 1):
        after = visits.forward(unit - window) if unit > window else start
        returns = unit > resident and unit >= lowest
        release = visits.backward(unit) if returns else visits.forward(unit)
        placed.append((after, Deliver(unit, visits.forward(unit), release)))
    if pieces == 1 or tied:
        placed.append((max(start, visits.forward(layers - window)), Deliver(head, head, head)))
        placed.append((head, Reduce(head)))
    for unit in range(layers, max(lowest, 1) - 1, -1):
        placed.append((visits.backward(unit), Reduce(unit)))
        if (lower := unit - window) >= max(lowest, 1):
            deliver = Deliver(lower, visits.backward(lower), visits.backward(lower))
            placed.append((visits.backward(unit), deliver))
    if pieces == 1 and lowest == 0:
        placed.append((visits.embed_backward, Reduce(0)))

    away = [unit for unit in range(1, layers + 1) if modes[unit - 1] in ("offload", "spill")]
    placed += [(visits.forward(unit), Stash(unit)) for unit in away]
    waiting = away[::-1]
    for i, unit in enumerate(waiting):
        freed = visits.backward(waiting[i - FETCH_AHEAD]) if i >= FETCH_AHEAD else layers
        placed.append((freed, Fetch(unit)))

    if on_gpu:
        # The forward's deliveries come first: their link is the one that the state takes.
        placed.append((max(start, visits.forward(layers - window)), Load()))
        last = visits.embed_backward
        updated = {reduce.unit: visit for visit, reduce in placed if isinstance(reduce, Reduce)}
        in_backward = schedule == "in_backward"
        placed += [(updated[unit] if in_backward else last, Update(unit)) for unit in sorted(on_gpu)]

    if routed:
        placed.append((layers, Balance(layers)))

    # What leaves the GPU goes first: it frees a buffer that compute is about to need.
    rank = {Reduce: 0, Stash: 0, Balance: 0, Fetch: 1, Deliver: 2, Load: 3, Update: 4}
    return [transfer for _, transfer in sorted(placed, key=lambda p: (p[0], rank[type(p[1])]))]


def head_in_visits(matrix: int, layer: int, pieces: int) -> int:
    """How many of backward's visits the loss takes as long as, by its FLOPs: parameters of the output matrix
    and of a layer. The link up has nothing to bring meanwhile but state for updates on the GPU; 0 where the
    vocabulary comes up in pieces."""
    return matrix // layer if pieces == 1 else 0


def evaluation(layers: int, tied: bool, pieces: int = 1) -> list[Transfer]:
    """The deliveries of a forward pass that nothing follows: every slot is free after its visit."""
    visits = Visits(layers)
    above: list[Transfer] = [
        Deliver(unit, visits.forward(unit), visits.forward(unit)) for unit in range(1, layers + 1)
    ]
    whole = Deliver(visits.head, visits.head, visits.head)
    if pieces > 1:
        forward, head, _ = (
            [Deliver(unit, visit, visit, piece) for unit, piece, visit in some]
            for some in piece_visits(layers, pieces, tied)
        )
        return [*forward, *above, *([whole] if tied else []), *head[:pieces]]
    embed = Deliver(0, visits.forward(0), visits.head if tied else visits.forward(0))
    return [embed, *above, whole]
