"""What a layout moves between the host and the GPUs: bytes of one layer on one rank's link."""

from typing import NamedTuple

from slidedp.layout import Layout
from slidedp.policy.contention import LinkRates
from slidedp.policy.rates import Rates, Workload


class Traffic(NamedTuple):
    """Bytes of the mean layer, each way and pass, on a link that moves: deliveries and landings, what
    layers offload or spill, and what GPUs say to each other where it takes the same links."""

    forward_up: float
    forward_down: float
    backward_up: float
    backward_down: float
    share_up: float
    """Part of a unit that a rank copies up to deliver it."""
    share_down: float
    """Part of a unit's gradient that a rank lands."""
    movers_up: int
    """Ranks that copy up; `movers_down`: ranks that copy down."""
    movers_down: int
    again: float
    """Part of the layers that are delivered a second time, for backward."""

    def links(self, r: Rates) -> LinkRates:
        """The rates of one link while as many of them are busy as move."""
        alone = self.movers_up == 1 and self.movers_down == 1
        return LinkRates(
            r.up if self.movers_up == 1 else r.up_all,
            r.down if self.movers_down == 1 else r.down_all,
            r.both if alone else r.both_all,
        )


def traffic(w: Workload, peers: str, layout: Layout) -> Traffic:
    """The traffic of a layout; `peers` is what GPUs talk over, see Rates.peers."""
    n = w.ranks
    delivery, reduction = route(w, layout)
    layer = w.layer_params * w.itemsize
    gradient = w.layer_params * w.gradient_itemsize * w.trained(1) / w.layers
    share_up = 1 / n if delivery == "sharded" else 1.0
    share_down = 1 / n if reduction == "gpu" else 1.0
    over_links = n > 1 and peers != "fabric"
    peer = (n - 1) / n if over_links else 0.0
    gathered = peer if delivery == "sharded" else (1.0 if over_links and delivery == "broadcast" else 0.0)
    scattered = peer if reduction == "gpu" else (1.0 if over_links and reduction == "gpu_root" else 0.0)
    away = sum(w.away_bytes(layout)) / w.layers
    again = max(0, w.layers - min(layout.window, w.layers) + 1 - w.first_backward) / w.layers
    forward_up = layer * share_up + layer * gathered
    return Traffic(
        forward_up=forward_up,
        forward_down=away + layer * gathered,
        backward_up=again * forward_up + away + gradient * scattered,
        backward_down=gradient * (share_down + scattered) + layer * again * gathered,
        share_up=share_up,
        share_down=share_down,
        movers_up=1 if delivery == "broadcast" else n,
        movers_down=1 if reduction == "gpu_root" else n,
        again=again,
    )


def route(w: Workload, layout: Layout) -> tuple[str, str]:
    """Delivery and reduction as they are: a single rank copies whole units, and its gradient is the sum."""
    return (layout.delivery, layout.reduction) if w.ranks > 1 else ("replicated", "gpu")
