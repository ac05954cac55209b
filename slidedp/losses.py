"""What a run's loss says about its health, step by step: spikes, and losses that are no numbers."""

import math
from collections import deque
from statistics import median
from typing import Any

from slidedp.steps import Reports, mean_loss

WINDOW, FEWEST = 50, 20
"""Steps that a loss is compared with, at most and at least."""
SPREADS, SHARE = 8.0, 0.1
"""A spike is above the window's median by this many standard deviations (estimated from the median
absolute deviation, which earlier spikes do not widen) and by this share of the median."""


class LossWatch:
    """Told each rank's step events; returns an event when the global loss of a step stands out."""

    def __init__(self, ranks: int) -> None:
        self._reports = Reports(ranks)
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def add(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """None, or an event `loss_spike` or `loss_not_finite`."""
        if (ranks := self._reports.add(event)) is None:
            return None
        step, loss = event["step"], mean_loss(ranks)
        if not math.isfinite(loss):
            return {"kind": "loss_not_finite", "step": step, "text": f"the loss of step {step} is {loss}"}
        middle = median(self._losses) if len(self._losses) >= FEWEST else math.inf
        spread = 1.4826 * median(abs(x - middle) for x in self._losses) if self._losses else 0.0
        self._losses.append(loss)
        if loss <= middle + max(SPREADS * spread, SHARE * abs(middle)):
            return None
        text = f"the loss of step {step} is {loss:.3f}, against a median of {middle:.3f} before"
        return {"kind": "loss_spike", "step": step, "loss": loss, "median": middle, "text": text}
