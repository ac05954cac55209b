"""The order of one step's transfers, as data.

Compute visits units in the order embed, layers up, head, layers down, embed. One thread per rank
enqueues all transfers in the order listed here, which is the same on every rank, so collectives match
without any agreement at run time. Each transfer stands behind the visit that frees what it needs.

A layer always streams through slot `layer mod window`. So when it comes back in the backward pass, it
comes back to the same addresses, and tensors that autograd saved from a slot are valid again.
"""

from typing import NamedTuple

FETCH_AHEAD = 2
"""Offloaded layer inputs that are on the GPU ahead of their backward."""


class Deliver(NamedTuple):
    """Fill the unit's slot. `release` is the visit after which the slot may be overwritten."""

    unit: int
    visit: int
    release: int


class Reduce(NamedTuple):
    """Sum the unit's gradient over ranks and land it on the host."""

    unit: int


class Load(NamedTuple):
    """Start to bring up the state of what is updated on the GPU first."""


class Update(NamedTuple):
    """Update the unit on the GPU."""

    unit: int


class Stash(NamedTuple):
    """Copy a layer's input to the host."""

    unit: int


class Fetch(NamedTuple):
    """Bring a layer's input back."""

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


def transfers(
    layers: int,
    window: int,
    modes: tuple[str, ...],
    tied: bool,
    on_gpu: frozenset[int] = frozenset(),
    schedule: str = "in_forward",
    routed: bool = False,
) -> list[Transfer]:
    """All transfers of one step in issue order; `modes` has one activation mode per layer, `on_gpu` are
    the units that are updated on the GPU, and the layers of a `routed` model choose experts."""
    visits = Visits(layers)
    head, start = visits.head, -1
    resident = layers - window  # layers above this stay in the window from forward to backward
    placed: list[tuple[int, Transfer]] = []  # (the visit it stands behind, transfer)

    placed.append((start, Deliver(0, visits.forward(0), head if tied else visits.forward(0))))
    for unit in range(1, layers + 1):
        after = visits.forward(unit - window) if unit > window else start
        release = visits.backward(unit) if unit > resident else visits.forward(unit)
        placed.append((after, Deliver(unit, visits.forward(unit), release)))
    placed.append((max(start, visits.forward(layers - window)), Deliver(head, head, head)))

    placed.append((head, Reduce(head)))
    for unit in range(layers, 0, -1):
        placed.append((visits.backward(unit), Reduce(unit)))
        if unit > window:
            lower = unit - window
            deliver = Deliver(lower, visits.backward(lower), visits.backward(lower))
            placed.append((visits.backward(unit), deliver))
    placed.append((visits.embed_backward, Reduce(0)))

    offloaded = [unit for unit in range(1, layers + 1) if modes[unit - 1] == "offload"]
    placed += [(visits.forward(unit), Stash(unit)) for unit in offloaded]
    waiting = offloaded[::-1]
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


def evaluation(layers: int, tied: bool) -> list[Transfer]:
    """The deliveries of a forward pass that nothing follows: every slot is free after its visit."""
    visits = Visits(layers)
    embed = Deliver(0, visits.forward(0), visits.head if tied else visits.forward(0))
    above = [Deliver(unit, visits.forward(unit), visits.forward(unit)) for unit in range(1, layers + 1)]
    return [embed, *above, Deliver(visits.head, visits.head, visits.head)]
