"""The layouts of one run: what each takes and is predicted to cost, and the activation modes that suit it.

Every layout is compared with the modes that use its memory best, so a larger window or a second gradient
buffer competes with what the same bytes would gain as kept activations.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.policy.flips import TIE
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.records import Candidate
from slidedp.policy.step_time import bound_seconds, predict, step_seconds
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, frugal, under

GPU_SHARE = 0.92
"""Part of the free GPU memory that a layout may plan for: activations are estimates, and allocators
leave gaps."""
PARTIAL_BUDGETS = (0.2, 0.35, 0.5, 0.75)
SOME_BUDGETS = (0.2, 0.5)
"""What they are tried with before the stage that decides on them."""
CAUTION = 1.3
"""How much slower links, worker and enqueueing may be than probed: by a neighbour, or the model's error."""


class Trial(NamedTuple):
    """What real steps under one layout took, once or several times."""

    seconds: float
    """Median of the steps that count; of several times, the median of these."""
    steps: int
    """All steps run under the layout, those that settle it included."""
    wall: float
    """Seconds of all of them, the switch included."""


def slowed(rates: Rates, factor: float) -> Rates:
    """The same machine where all but compute takes `factor` times as long."""
    for group in ("links", "collectives", "update", "host_memory"):
        rates = rates.faster(group, 1 / factor)
    threads = ("enqueue_forward", "enqueue_backward", "enqueue_operation")
    return dataclasses.replace(rates, **{name: getattr(rates, name) * factor for name in threads})


def fits(there: Plan) -> bool:
    """Whether a plan is within both memory budgets, with room to spare on the GPUs."""
    return min(_room(there)) >= 0


def _room(there: Plan) -> tuple[float, float]:
    """Bytes that a plan leaves of the host's and of a GPU's budget; negative: that it lacks."""
    free = there.device_limit
    device = math.inf if free is None else GPU_SHARE * free - sum(there.device.values())
    return there.host_available - there.host_bytes, device


class Candidates:
    """Layouts as candidates; each is predicted once."""

    def __init__(self, plan: Plan, rates: Rates) -> None:
        self.plan, self.rates = plan, rates
        self._slow = slowed(rates, CAUTION)
        self.workload: Workload = workload_of(plan)
        self._workloads = {plan.config.layout.mlp_tile_tokens > 0: self.workload}
        self.trials: dict[Layout, Trial] = {}
        """Real steps so far, by layout."""
        self._rounds: dict[Layout, list[Trial]] = {}
        self.known: dict[Layout, Candidate] = {}
        """All that were predicted, by layout."""
        self._plans: dict[Layout, Plan] = {}
        self._expected: dict[Layout, float] = {}
        self._filled: dict[Layout, Layout] = {}
        self._bounds: dict[Layout, float] = {}
        self.lightest = self._lightest()
        """A layout that fits, from which the stages start."""

    def of(self, layout: Layout) -> Candidate:
        """Memory and prediction of a layout. ConfigError for one that cannot run at all."""
        if layout not in self.known:
            there = self._plan(layout)
            p = predict(self._workload(layout), self.rates, layout)
            self.known[layout] = Candidate(
                layout=dataclasses.asdict(layout),
                predicted_seconds=p.step_seconds,
                bound_seconds=p.bound_seconds,
                binding=p.binding,
                exposed=p.exposed,
                gpu_bytes=sum(there.device.values()),
                host_bytes=there.host_bytes,
                fits=fits(there),
            )
        return self.known[layout]

    def _workload(self, layout: Layout) -> Workload:
        """A layer keeps less, and has less to spill, where its MLP runs over tiles."""
        tiled = layout.mlp_tile_tokens > 0
        if tiled not in self._workloads:
            self._workloads[tiled] = workload_of(self._plan(layout))
        return self._workloads[tiled]

    def fit(self, layout: Layout) -> bool:
        """Whether a layout is within both memory budgets."""
        return fits(self._plan(layout))

    def _plan(self, layout: Layout) -> Plan:
        """ConfigError for a layout that cannot run at all."""
        if layout not in self._plans:
            # Thousands of mixes are looked at, on hundreds of sets of buffers, which cost ten times as much.
            buffers = dataclasses.replace(layout, activations="recompute", partial_budget=1.0)
            if buffers not in self._plans:
                self._plans[buffers] = under(self.plan, buffers)
            self._plans[layout] = under(self._plans[buffers], layout)
        return self._plans[layout]

    def measured(self, layout: Layout, trial: Trial) -> None:
        """Real steps were run under a layout, maybe not for the first time."""
        rounds = self._rounds.setdefault(layout, [])
        rounds.append(trial)
        seconds, steps, wall = zip(*rounds, strict=True)
        self.trials[layout] = Trial(median(seconds), sum(steps), sum(wall))
        self.known[layout] = dataclasses.replace(self.of(layout), measured_seconds=median(seconds))

    def filled(self, layout: Layout) -> Layout:
        """`layout` with the activation modes that suit it best; as it is if none fits."""
        if layout not in self._filled:
            self._filled[layout] = self.best(self.mixes(layout, SOME_BUDGETS)) or layout
        return self._filled[layout]

    def best(self, layouts: Iterable[Layout]) -> Layout | None:
        """The first by `rank` that fits; None if none does."""
        best, fitting = None, filter(self.fit, layouts)
        for bound, layout in sorted(((self._bound(one), one) for one in fitting), key=itemgetter(0)):
            if best is not None and bound > self.expected(best) * (1 + TIE):
                break  # neither this one nor any after it can be as fast
            best = layout if best is None else min(best, layout, key=self.rank)
        return best

    def expected(self, layout: Layout) -> float:
        """Seconds by which layouts are ranked: measured, or midway between what is predicted from the rates
        and from rates that are slower by CAUTION in all but compute. Where nothing has to wait, every layout
        is as fast as compute; what tells them apart is how much can go wrong before something waits."""
        if layout in self.trials:
            return self.trials[layout].seconds
        if layout not in self._expected:
            both = (step_seconds(self._workload(layout), rates, layout) for rates in (self.rates, self._slow))
            self._expected[layout] = sum(both) / 2
        return self._expected[layout]

    def _bound(self, layout: Layout) -> float:
        """What `expected` is at least, before anything was measured."""
        if layout not in self._bounds:
            both = (
                bound_seconds(self._workload(layout), rates, layout) for rates in (self.rates, self._slow)
            )
            self._bounds[layout] = sum(both) / 2
        return self._bounds[layout]

    def rank(self, layout: Layout) -> tuple[int, int, int, int]:
        """Orders layouts: the fastest first, and of equal ones the one whose vocabulary and MLPs are in fewer
        pieces, then the one that takes less of the GPU."""
        # In steps of TIE, so that a gain nobody could measure does not cost gigabytes.
        seconds = round(math.log(self.expected(layout)) / TIE)
        tiles = math.ceil(self.workload.tokens / (layout.mlp_tile_tokens or self.workload.tokens))
        return seconds, layout.vocabulary_pieces, tiles, sum(self._plan(layout).device.values())

    def mixes(self, layout: Layout, budgets: tuple[float, ...] = PARTIAL_BUDGETS) -> Iterator[Layout]:
        """Activation layouts worth a look: a small knapsack.

        Layers are alike, so each mode is one point (bytes, seconds, link bytes) and an optimal mix has at
        most two modes: as many layers as fit in the richer one, the rest in the leaner one. The richer
        ones are the last layers, whose backward comes first: what they keep lives shortest.
        """
        leanest = ["offload", "recompute"]
        richer: list[tuple[str, float]] = [("keep", layout.partial_budget)]
        if self.plan.config.compile:
            richer = [("partial", budget) for budget in budgets] + richer
        pairs = [("offload", "recompute", layout.partial_budget)]
        pairs += [(lean, rich, budget) for lean in leanest for rich, budget in richer]
        pairs += [("partial", "keep", budget) for rich, budget in richer if rich == "partial"]
        if not self.fit(dataclasses.replace(layout, activations="keep")):
            # Where the host has room: what is not computed again takes the link's time instead.
            spilled = [budget for rich, budget in richer if rich == "partial"] or [1.0]
            pairs += [pair for b in spilled for pair in (("offload", "spill", b), ("spill", "keep", b))]
        seen = set()
        for lean, rich, budget in pairs:
            mix = partial(self._mix, layout, lean, rich, budget)
            for count in {0, self._richest(mix)}:
                candidate = mix(count)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate

    def _mix(self, layout: Layout, lean: str, rich: str, budget: float, count: int) -> Layout:
        """`layout` with the last `count` layers under mode `rich` and the others under `lean`; `budget` is
        the partial budget where one of them has a use for it."""
        modes = (lean,) * (self.workload.layers - count) + (rich,) * count
        used = {"partial", "spill"} & {*modes}
        return dataclasses.replace(
            layout,
            activations=modes if len({*modes}) > 1 else modes[0],
            partial_budget=budget if used else self.plan.config.layout.partial_budget,
        )

    def _richest(self, mix: Callable[[int], Layout]) -> int:
        """The largest count whose `mix` fits; 0 if none does."""
        none, every = 0, self.workload.layers
        if self.fit(mix(every)):
            return every
        # Bytes grow by as much with each layer, but for a few that are on their way: a straight line between
        # the ends says where to look first.
        ends = zip(_room(self._plan(mix(none))), _room(self._plan(mix(every))), strict=True)
        shares = [lean / (lean - rich) for lean, rich in ends if rich < 0 < lean]
        guess = int(every * min(shares, default=0))
        while every - none > 1:
            count = guess if none < guess < every else (none + every) // 2
            none, every = (count, every) if self.fit(mix(count)) else (none, count)
            guess = none + 1 if count == guess and none == count else -1
        return none

    def _lightest(self) -> Layout:
        """The layout of the config with the transport that suits the machine, or the one next to it that
        takes least memory, if that is too much."""
        first = dataclasses.replace(self.plan.config.layout, transport=self.plan.transport)
        if self.fit(first):
            return first
        least = frugal(self.plan.model)
        smaller: list[dict[str, Any]] = [
            {},
            {"window": 1, "gradient_slots": 1},
            {"landing": "ring"},
            # Only where no update waits for all gradients does a ring hold a part of them.
            {} if self.plan.config.optimizer.clip_norm is not None else {"schedule": "in_backward"},
            {"vocabulary_pieces": least.vocabulary_pieces},
            # Last: the stages decide all but this.
            {"mlp_tile_tokens": least.mlp_tile_tokens},
        ]
        # The least of the GPU's memory is with the second, the least of the host's with the third.
        for activations, count in (("recompute", 0), ("offload", 0), ("recompute", self.workload.layers + 2)):
            layout = dataclasses.replace(
                first, reduction="gpu", activations=activations, gpu_updates=count, resident_updates=0
            )
            for change in smaller:
                layout = dataclasses.replace(layout, **change)
                if self.fit(layout):
                    return layout
        under(self.plan, layout).check()
        raise ConfigError(
            "not enough GPU memory with room to spare: use a smaller batch_size or sequence_length"
        )
