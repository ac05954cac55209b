"""The operations of one step in an order in which their completion times can be evaluated.

The order of transfers is the engine's own (`stream.program.transfers`), so buffers, windows and gates
constrain the model as they do the engine. Compute visits are put between them: a transfer is listed once
the visits that it waits for are.
"""

from functools import lru_cache
from typing import NamedTuple

from slidedp.stream.program import (
    FETCH_AHEAD,
    Deliver,
    Fetch,
    Load,
    Reduce,
    Stash,
    Update,
    Visits,
    transfers,
)

EMBED, FORWARD, HEAD, BACKWARD, EMBED_BACKWARD = range(5)
DELIVER, DELIVER_AGAIN, REDUCE, STASH, FETCH, LOAD, UPDATE = range(5, 12)


class Operation(NamedTuple):
    """A compute visit or a transfer."""

    what: int
    unit: int
    visit: int = -1
    """A visit's own number; of a transfer into a buffer the visit that must have left it. Where that has
    not come yet in this step, the last step's is meant. -1: none."""
    before: int = -1
    """The unit whose gradient was in the same buffer before, or in the same zone of a ring. -1: none."""


@lru_cache(maxsize=4096)
def operations(
    layers: int,
    window: int,
    away: frozenset[int],
    tied: bool,
    slots: int,
    on_gpu: frozenset[int],
    schedule: str,
    ring: int,
    frozen: frozenset[int],
    lowest: int,
) -> tuple[Operation, ...]:
    """One step. Layers that are `away` offload or spill, `slots` are gradient buffers of layers, `ring` is
    the number of their landing zones, 0 if every layer has its own; units that are `frozen` have no gradient,
    and backward ends at the unit `lowest`."""
    modes = tuple("offload" if unit in away else "recompute" for unit in range(1, layers + 1))
    visits = Visits(layers)
    order: list[Operation] = []
    leaves = _SlotUsers(layers, window, tied, lowest)
    zone_before = _zone_users(layers, on_gpu | frozen, ring)
    buffer_before = _buffer_users(layers, frozen, slots)
    end = visits.embed_backward if lowest == 0 else visits.backward(lowest)
    fetched: list[int] = []
    done = -1

    def visit_until(last: int) -> None:
        nonlocal done
        for number in range(done + 1, min(last, end) + 1):
            order.append(_visit(visits, number, buffer_before))
        done = max(done, last)

    for transfer in transfers(layers, window, modes, tied, on_gpu, schedule, lowest=lowest):
        if isinstance(transfer, Load):
            order.append(Operation(LOAD, -1))
            continue
        unit = transfer.unit
        if isinstance(transfer, Deliver):
            freed = leaves.take(unit, int(transfer.release))  # whole: no unit is in pieces
            if order and freed < transfer.visit:
                visit_until(freed)
            again = transfer.visit > visits.head
            order.append(Operation(DELIVER_AGAIN if again else DELIVER, unit, freed))
        elif isinstance(transfer, Reduce) and unit in frozen:
            visit_until(visits.backward(unit))
        elif isinstance(transfer, Reduce):
            visit_until(visits.head if unit == visits.head else visits.backward(unit))
            order.append(Operation(REDUCE, unit, before=zone_before.get(unit, -1)))
        elif isinstance(transfer, Update):
            order.append(Operation(UPDATE, unit))
        elif isinstance(transfer, Stash):
            visit_until(visits.forward(unit))
            order.append(Operation(STASH, unit))
        elif isinstance(transfer, Fetch):
            freed = -1
            if len(fetched) >= FETCH_AHEAD:
                freed = visits.backward(fetched[-FETCH_AHEAD])
                visit_until(freed)
            fetched.append(unit)
            order.append(Operation(FETCH, unit, freed))
    visit_until(visits.embed_backward)
    return tuple(order)


def _visit(visits: Visits, number: int, buffer_before: dict[int, int]) -> Operation:
    if number == 0:
        return Operation(EMBED, 0, number)
    if number < visits.head:
        return Operation(FORWARD, number, number)
    if number == visits.head:
        return Operation(HEAD, number, number)
    if number == visits.embed_backward:
        return Operation(EMBED_BACKWARD, 0, number)
    unit = visits.embed_backward - number
    return Operation(BACKWARD, unit, number, buffer_before.get(unit, -1))


class _SlotUsers:
    """The visit after which each slot's present user leaves it; at first the last step's final one."""

    def __init__(self, layers: int, window: int, tied: bool, lowest: int) -> None:
        visits = Visits(layers)
        self._layers, self._window = layers, window
        self._edges = {0: "embed", layers + 1: "head" if tied else "embed"}  # one slot for both, unless tied
        self._leaves: dict[int | str, int] = {"embed": visits.head, "head": visits.head}
        for unit in range(1, layers + 1):  # forward's last user of each slot
            self._leaves[unit % window] = visits.forward(unit)
        for unit in range(layers, max(lowest, 1) - 1, -1):  # the lowest is its last user in backward
            self._leaves[unit % window] = visits.backward(unit)

    def take(self, unit: int, release: int) -> int:
        """The visit that frees the slot for `unit`, which leaves it after the visit `release`."""
        slot = self._edges.get(unit, unit % self._window)
        freed, self._leaves[slot] = self._leaves[slot], release
        return freed


def _buffer_users(layers: int, frozen: frozenset[int], slots: int) -> dict[int, int]:
    """By layer that is trained, the one whose gradient is in the same buffer before: of each buffer's first,
    its last one in the step before."""
    before: dict[int, int] = {}
    for place in range(slots):
        users = [unit for unit in range(layers, 0, -1) if unit % slots == place and unit not in frozen]
        before |= dict(zip(users, [*users[-1:], *users[:-1]], strict=True))
    return before


def _zone_users(layers: int, on_gpu: frozenset[int], ring: int) -> dict[int, int]:
    """By layer, the one whose gradient is in the same landing zone before; layers land last to first."""
    landing = [unit for unit in range(layers, 0, -1) if unit not in on_gpu]
    return dict(zip(landing[ring:], landing, strict=False)) if ring else {}
