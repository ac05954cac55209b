"""The step-time model: how long a step takes under a layout, what binds it, and where time is lost.

Numbers in, numbers out, step by step in files of their own:

- `traffic` and `contention`: what a layout moves, and how much links and worker slow each other down;
- `demands`: with that, the seconds of every task;
- `capacity`: their sum for each resource, which no schedule of the same work can beat;
- `operations` and `recurrence` (with `updates`): the order of a step, and when each task ends.
"""

from dataclasses import dataclass

from slidedp.layout import Layout
from slidedp.policy.capacity import COMPUTE, busy_seconds
from slidedp.policy.demands import Demands, demands
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.recurrence import STEADY, steady_step
from slidedp.stream.timeline import Span

IDLE = 0.02
"""Part of a step that compute may wait while it still counts as what decides the step."""


@dataclass(frozen=True)
class Prediction:
    """What the model says about one layout."""

    step_seconds: float
    """From one step's end of compute to the next one's, once steady."""
    drain_seconds: float
    """From the last backward to the last published update."""
    bound_seconds: float
    """The longest demand on any one resource: no schedule of the same work is faster."""
    compute_seconds: float
    """Demand on a GPU's compute alone."""
    binding: str
    """The resource that decides the step: one of capacity.RESOURCES."""
    demand: dict[str, float]
    """Busy seconds of each resource in a step."""
    exposed: dict[str, float]
    """Seconds that compute waits in a step, by cause: `delivery` (parameters on their way), `update`
    (their version is not published), `reduction` (gradients have not landed), `offload` (layer inputs)."""
    timeline: tuple[Span, ...]
    """The spans of a steady step if they were asked for, else empty."""

    @property
    def host_bound(self) -> bool:
        """Whether something other than the GPU's compute decides the step."""
        return self.binding != COMPUTE


def step_seconds(workload: Workload, rates: Rates, layout: Layout) -> float:
    """Prediction.step_seconds alone, in half the time: what binds the step is not asked."""
    tasks = demands(workload, rates, layout)
    busy = busy_seconds(workload, rates, layout, tasks)
    return max(steady_step(workload, rates, layout, tasks).step, *busy.values())


def bound_seconds(workload: Workload, rates: Rates, layout: Layout) -> float:
    """Prediction.bound_seconds alone, in a fifth of the time."""
    return max(busy_seconds(workload, rates, layout, demands(workload, rates, layout)).values())


def predict(workload: Workload, rates: Rates, layout: Layout, *, timeline: bool = False) -> Prediction:
    """The steady step under `layout`. Costs about half a millisecond, and a few where the state of
    many units is streamed to be updated on the GPUs; `timeline` a little more."""
    tasks = demands(workload, rates, layout)
    busy = busy_seconds(workload, rates, layout, tasks)
    steady = steady_step(workload, rates, layout, tasks, record=timeline)
    longest = max(busy, key=lambda name: busy[name])
    step = max(steady.step, busy[longest])
    pace = COMPUTE if busy[COMPUTE] >= busy["threads"] else "threads"
    if busy[longest] > steady.step * (1 + STEADY):
        binding = longest
    elif sum(steady.exposed.values()) < IDLE * step:
        binding = pace
    else:
        # What would slightly faster visits gain? At least half of it: they decide the step.
        faster = steady_step(workload, rates, layout, tasks.with_visits(0.98))
        gained = (steady.step - faster.step) / (0.02 * steady.step)
        binding = pace if gained >= 0.5 else _waited_for(steady.exposed, tasks)
    return Prediction(
        step_seconds=step,
        drain_seconds=steady.drain,
        bound_seconds=busy[longest],
        compute_seconds=busy[COMPUTE],
        binding=binding,
        demand=busy,
        exposed={cause: seconds for cause, seconds in steady.exposed.items() if seconds > 1e-9},
        timeline=tuple(steady.spans),
    )


def _waited_for(exposed: dict[str, float], tasks: Demands) -> str:
    """The resource behind the longest wait."""
    cause = max(exposed, key=lambda name: exposed[name])
    if cause == "update":
        return "update"
    if cause == "delivery":
        layer = tasks.deliver[1]
        return "collective" if layer.collective > layer.link else "to_device"
    layer = tasks.reduce[1]
    return "collective" if cause == "reduction" and layer.collective > layer.link else "to_host"
