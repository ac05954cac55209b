"""How links and the worker, which share the host's memory, slow each other down.

What a phase moves each way is known from the layout alone. So the slowdown is decided before the
recurrence runs, as if everything that moves in a phase moved beside everything else in it.
"""

from typing import NamedTuple

from slidedp.policy.rates import Rates


class LinkRates(NamedTuple):
    """Bytes per second of one link, one way alone, and each way where both are busy."""

    up: float
    down: float
    both: float

    def times(self, up: float, down: float | None = None, both: float | None = None) -> "LinkRates":
        """Each rate times a factor of its own, or all times the same one."""
        down, both = up if down is None else down, up if both is None else both
        return LinkRates(self.up * up, self.down * down, self.both * both)


def seconds_per_byte(up: float, down: float, links: LinkRates) -> tuple[float, float]:
    """Of one link's way up and way down, where `up` and `down` bytes move in the same time: the lesser
    of the two always has company, the other one only for as many bytes."""
    shared = min(up, down)
    per_up = (shared / links.both + (up - shared) / links.up) / up if up else 1 / links.up
    per_down = (shared / links.both + (down - shared) / links.down) / down if down else 1 / links.down
    return per_up, per_down


def update_seconds(r: Rates, up: float, down: float, links: LinkRates) -> float:
    """Seconds of the worker per parameter, while all links together move `up` and `down` bytes per
    parameter at `links`: its rate beside both ways, one way, and alone, each for as long as that lasts."""
    shared, more_up, more_down = min(up, down), max(0.0, up - down), max(0.0, down - up)
    beside_both = min(1.0, shared * r.update_both / links.both)
    beside_up = min(1.0 - beside_both, more_up * r.update_up / links.up)
    beside_down = min(1.0 - beside_both, more_down * r.update_down / links.down)
    alone = 1.0 - beside_both - beside_up - beside_down
    return (
        alone / r.update + beside_both / r.update_both + beside_up / r.update_up + beside_down / r.update_down
    )
