"""What would have to change for another layout to win, or another resource to bind."""

from slidedp.layout import Layout
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.step_time import predict, step_seconds
from slidedp.policy.words import CHANGES

TIE = 0.003
"""Relative difference of predicted steps below which the layout with less memory wins."""
FACTORS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
MOST = 64.0
"""Largest and, inverted, smallest factor on the batch that is searched for a change of regime."""


def flip(workload: Workload, rates: Rates, chosen: Layout, other: Layout, name: str) -> str:
    """The smallest change of batch or hardware with which `other` would beat `chosen`."""
    for factor in FACTORS:
        for times in (factor, 1 / factor):
            w, r = workload.scaled(times), rates.scaled(times)
            if step_seconds(w, r, other) < step_seconds(w, r, chosen) * (1 - TIE):
                return f"{name} wins with {times:.2g} times the tokens in a step"
            for group, words in CHANGES.items():
                r = rates.faster(group, times)
                first, second = (step_seconds(workload, r, layout) for layout in (chosen, other))
                if second < first * (1 - TIE):
                    return f"{name} wins with {times:.2g} times the speed of {words}"
    return f"no single change up to {FACTORS[-1]:g} times makes {name} win"


def regime_change(workload: Workload, rates: Rates, layout: Layout) -> float | None:
    """The factor on the batch at which the step turns from host-bound to GPU-bound, or back."""

    def host_bound(factor: float) -> bool:
        return predict(workload.scaled(factor), rates.scaled(factor), layout).host_bound

    now = host_bound(1.0)
    near, far = 1.0, MOST if now else 1 / MOST
    if host_bound(far) == now:
        return None
    while abs(far / near - 1) > 0.02:
        middle = (near * far) ** 0.5
        near, far = (middle, far) if host_bound(middle) == now else (near, middle)
    return far
