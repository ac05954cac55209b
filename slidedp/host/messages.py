"""What ranks and the optimizer worker say to each other, one pipe per rank, and what the launcher tells the
worker.

Pipes keep order and report the other side's death, and a blocked reader costs no CPU. Traffic is a
few hundred small messages a step.
"""

from typing import NamedTuple

from slidedp.host.memory import Handle
from slidedp.layout import Layout


class Started(NamedTuple):
    """Rank to worker: step `step` begins here, with `targets` target tokens."""

    step: int
    targets: int


class Landed(NamedTuple):
    """Rank to worker: this rank's part in a chunk's reduction is over, its bytes are on the host.

    `sum_of_squares` is that of the elements this rank landed (0 where the worker sums the lanes).
    """

    step: int
    unit: int
    chunk: int
    sum_of_squares: float


class Written(NamedTuple):
    """Rank to worker: this rank has updated its share of `unit` on its GPU, and written it to the host."""

    step: int
    unit: int


class Finished(NamedTuple):
    """Rank to worker: no further step will come."""


class Published(NamedTuple):
    """Worker to rank: the working copy of `unit` is now at `version` (the steps it has taken)."""

    unit: int
    version: int


class Consumed(NamedTuple):
    """Worker to rank: the landing zone that held `unit` in `step` may be written again."""

    unit: int
    step: int


class Coefficients(NamedTuple):
    """Worker to rank: what an update of step `step` on the GPUs needs, once it is known."""

    step: int
    grad_scale: float | None
    """Factor of the summed gradients, clipping included; None where the step is skipped."""
    lr: float
    update: int
    """AdamW's step count, from 1."""
    store: bool
    """Whether state that stays on the GPUs is written to the host too: a checkpoint follows this step."""


class Begin(NamedTuple):
    """Worker to rank: how step `step` starts. Every rank gets the same, so all agree."""

    step: int
    stop: bool = False
    layout: Layout | None = None
    landing: Handle | None = None
    profile: int = 0
    """Record this many steps with torch.profiler, from this one on; 0 for none."""


class SetLayout(NamedTuple):
    """Launcher to worker: use this layout from the next step boundary on."""

    layout: Layout
    landing: Handle


class Stop(NamedTuple):
    """Launcher to worker: end at the next step boundary."""

    save: bool = True
    """Whether the state is worth a checkpoint."""


class Save(NamedTuple):
    """Launcher to worker: write a checkpoint of the next step boundary."""

    number: int
    """Comes back in the event that tells its end."""


class Profile(NamedTuple):
    """Launcher to worker: let every rank record `steps` steps with torch.profiler, from `start` on or from
    the next one if that is later."""

    steps: int
    start: int
