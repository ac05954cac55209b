"""A few sentences about a layout, made from the model's numbers."""

from slidedp.layout import Layout
from slidedp.policy.flips import TIE, regime_change
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.step_time import predict, step_seconds
from slidedp.policy.words import CHANGES, NAMES, WAITS


def explain(workload: Workload, rates: Rates, layout: Layout) -> str:
    """What decides the step under `layout`, where it loses time, and what would change that."""
    now = predict(workload, rates, layout)
    step = now.step_seconds
    lines = [
        f"A step takes {step:.3f} s and {NAMES[now.binding]} decide{'' if _plural(now.binding) else 's'} it: "
        f"compute is busy {now.compute_seconds / step:.0%} of the time. No schedule of the same work is "
        f"faster than {now.bound_seconds:.3f} s, {1 - now.bound_seconds / step:.0%} less than this."
    ]
    waits = sorted(now.exposed.items(), key=lambda item: -item[1])
    waits = [(cause, seconds) for cause, seconds in waits if seconds > 0.005 * step]
    if waits:
        lines.append(
            "Compute waits "
            + ", ".join(f"{seconds:.3f} s for {WAITS[cause]}" for cause, seconds in waits)
            + "."
        )
    gains = {
        words: 1 - step_seconds(workload, rates.faster(group, 1.25), layout) / step
        for group, words in CHANGES.items()
    }
    useful = sorted(((g, w) for w, g in gains.items() if g > TIE), reverse=True)
    useless = [w for w, g in gains.items() if g <= TIE]
    if useful:
        lines.append(
            "A quarter more speed would shorten it by "
            + ", ".join(f"{gain:.1%} ({words})" for gain, words in useful)
            + (f"; nothing comes of faster {' or '.join(useless)}." if useless else ".")
        )
    factor = regime_change(workload, rates, layout)
    if factor is None:
        lines.append(f"It stays {'host' if now.host_bound else 'GPU'}-bound at any batch size.")
    else:
        turn = "GPU-bound" if now.host_bound else "host-bound"
        lines.append(
            f"It turns {turn} at {factor:.3g} times this batch "
            f"({round(workload.tokens * factor):,} tokens per rank and step)."
        )
    return " ".join(lines)


def _plural(resource: str) -> bool:
    return resource in ("threads", "to_device", "to_host", "collective")
