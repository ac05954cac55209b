"""AutoPolicy: decides a layout in a few stages, each of which leaves a record that can be overruled.

    policy = AutoPolicy(config, rates)
    while (record := policy.decide()) is not None:
        print(record)
    policy.layout

Every candidate is predicted with the activation modes that use its memory best, so a larger window or a
second landing lane competes with what the same bytes would gain as kept activations. Nothing that
exceeds a memory budget is ever chosen.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slidedp.config import DELIVERIES, REDUCTIONS, Config, Layout
from slidedp.errors import ConfigError
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.records import Candidate, Record, save_records
from slidedp.policy.step_time import Prediction, predict
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, plan, under

GPU_SHARE = 0.92
"""Part of the free GPU memory that a layout may plan for: activations are estimates, and allocators
leave gaps."""
TIE = 0.003
"""Relative difference of predicted steps below which the layout with less memory wins."""
CHUNKS = tuple(2**20 * mib for mib in (8, 16, 32, 64, 128))
WINDOWS = (2, 3, 4, 6)
GRADIENT_SLOTS = (1, 2, 3)
PARTIAL_BUDGETS = (0.2, 0.35, 0.5, 0.75)
SHORT_LIST = 4
"""Layouts tried with real steps, besides the one that the run starts with."""
NEAR = 1.15
"""No layout is tried whose prediction is longer than the best one's by more than this factor."""
STAGES = {
    "route": "How do parameters reach the GPUs, and gradients the host?",
    "update": "When and where are units updated?",
    "buffers": "Which chunk size, window and number of gradient buffers?",
    "activations": "What does each layer leave for its backward?",
    "measure": "Which of the best predictions is fastest in real steps?",
    "final": "Which layout trains, and does the choice pay?",
}
FIELDS = {
    "route": ("delivery", "reduction"),
    "update": ("schedule", "landing", "gpu_updates"),
    "buffers": ("chunk_bytes", "window", "gradient_slots"),
    "activations": ("activations", "partial_budget"),
}
"""What each stage decides."""


class Trial(NamedTuple):
    """What real steps under one layout took."""

    seconds: float
    """Median of the steps that count."""
    steps: int
    """All steps run under the layout, those that settle it included."""
    wall: float
    """Seconds of all of them, the switch included."""


class AutoPolicy:
    """Chooses a layout for one run on one machine.

    `trial` runs real steps under a layout; without it the choice rests on predictions. It may raise
    ConfigError for a layout that cannot be tried after all. `spent` is what the rates have cost, in
    seconds; it counts in the final record.
    """

    def __init__(
        self,
        run: Plan | Config,
        rates: Rates,
        trial: Callable[[Layout], Trial] | None = None,
        spent: float = 0.0,
    ) -> None:
        self.plan = run if isinstance(run, Plan) else plan(run)
        self.rates, self.trial, self.spent = rates, trial, spent
        self.workload: Workload = workload_of(self.plan)
        self.records: list[Record] = []
        self.trials: dict[Layout, Trial] = {}
        """Real steps so far, by layout."""
        self._known: dict[Layout, Candidate] = {}
        self.start = self.plan.config.layout
        """The layout of the config, against which a saving is counted."""
        self._lightest = self._light_layout()

    # --- what a user calls ------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return bool(self.records) and self.records[-1].stage == "final"

    @property
    def layout(self) -> Layout:
        """The layout that the records so far lead to; the final one when `done`."""
        return Layout(**self.records[-1].choice.layout) if self.records else self._lightest

    def decide(self) -> Record | None:
        """Takes the next decision and returns its record; None when all are taken."""
        if self.done:
            return None
        stage = list(STAGES)[len(self.records)]
        begun = time.monotonic()
        if stage == "measure":
            record = self._measure()
        elif stage == "final":
            record = self._conclude()
        else:
            record = self._choose(stage, self._options(stage))
            record = dataclasses.replace(record, cost_seconds=time.monotonic() - begun)
        self.records.append(record)
        return record

    def decide_all(self) -> Layout:
        """Takes all decisions that are left; returns the final layout."""
        while self.decide() is not None:
            pass
        return self.layout

    def override(self, stage: str, choice: int | Layout) -> Record:
        """Replaces a decision that was taken, by a candidate's index or by a layout, and takes back all
        decisions after it; `decide` goes on from there."""
        index = next((i for i, record in enumerate(self.records) if record.stage == stage), None)
        if index is None:
            raise ConfigError(f"override: stage {stage!r} is not decided; decided: {self._decided()}")
        record = self.records[index]
        candidates = list(record.candidates)
        if isinstance(choice, Layout):
            candidates.append(dataclasses.replace(self._candidate(choice), note="given by the user"))
            choice = len(candidates) - 1
        if not 0 <= choice < len(candidates):
            raise ConfigError(f"override: candidate {choice} of {stage}: expected 0 to {len(candidates) - 1}")
        if not candidates[choice].fits:
            raise ConfigError(
                f"override: candidate {choice} of {stage} does not fit the memory: take another"
            )
        best = candidates[record.chosen]
        lost = candidates[choice].seconds / best.seconds - 1
        record = dataclasses.replace(
            record,
            candidates=tuple(candidates),
            chosen=choice,
            overridden=True,
            why=f"chosen by the user; {lost:+.1%} of step time against the policy's choice",
        )
        self.records[index:] = [record]
        return record

    def save(self, path: str | Path) -> None:
        """Writes the records as JSON; see slidedp.policy.records.load_records."""
        save_records(self.records, path)

    def _decided(self) -> str:
        return ", ".join(record.stage for record in self.records) or "none"

    # --- candidates -------------------------------------------------------------------------------

    def _candidate(self, layout: Layout) -> Candidate:
        """Memory and prediction of a layout. ConfigError for one that cannot run at all."""
        if layout not in self._known:
            there = under(self.plan, layout)
            device = sum(there.device.values())
            fits = there.host_bytes <= there.host_available and (
                there.device_limit is None or device <= GPU_SHARE * there.device_limit
            )
            p: Prediction = predict(self.workload, self.rates, layout)
            trial = self.trials.get(layout)
            self._known[layout] = Candidate(
                layout=dataclasses.asdict(layout),
                predicted_seconds=p.step_seconds,
                measured_seconds=trial.seconds if trial else None,
                bound_seconds=p.bound_seconds,
                binding=p.binding,
                exposed=p.exposed,
                gpu_bytes=device,
                host_bytes=there.host_bytes,
                fits=fits,
            )
        return self._known[layout]

    def _fits(self, layout: Layout) -> bool:
        return self._candidate(layout).fits

    def _light_layout(self) -> Layout:
        """The start layout, or the one next to it that takes least memory, if that is too much."""
        layout = self.start
        smaller: list[dict[str, Any]] = [
            {},
            {"activations": "recompute"},
            {"activations": "offload"},
            {"window": 1, "gradient_slots": 1},
            {"reduction": "gpu", "landing": "ring", "gpu_updates": 0},
        ]
        for change in smaller:
            layout = dataclasses.replace(layout, **change)
            if self._fits(layout):
                return layout
        under(self.plan, layout).check()
        raise ConfigError(
            "not enough GPU memory with room to spare: use a smaller batch_size or sequence_length"
        )

    def _options(self, stage: str) -> Iterator[tuple[Layout, str]]:
        """Layouts that a stage compares, and what sets each apart."""
        now = self.layout
        if stage == "route":
            if self.plan.config.optimizer.clip_norm is None:  # the schedule that most runs end up with
                early = dataclasses.replace(now, schedule="in_backward", landing="full")
                now = early if self._fits(early) else now
            if self.workload.ranks == 1:
                yield self._filled(now), "the only rank copies all itself"
                return
            for delivery in DELIVERIES:
                for reduction in REDUCTIONS:
                    count = now.gpu_updates if reduction == "gpu" else 0
                    layout = dataclasses.replace(
                        now, delivery=delivery, reduction=reduction, gpu_updates=count
                    )
                    yield self._filled(layout), f"{delivery} + {reduction}"
        elif stage == "update":
            clips = self.plan.config.optimizer.clip_norm is not None
            ways = [("in_forward", "full", "in_forward")]
            if not clips:
                ways += [
                    ("in_backward", "full", "in_backward, room for all gradients"),
                    ("in_backward", "ring", "in_backward, ring"),
                ]
            for schedule, landing, name in ways:
                for count in self._gpu_updates(now):
                    layout = dataclasses.replace(now, schedule=schedule, landing=landing, gpu_updates=count)
                    where = f", {count} unit(s) on the GPUs" if count else ""
                    yield self._filled(layout), name + where
        elif stage == "buffers":
            for chunk in sorted({*CHUNKS, now.chunk_bytes}):
                for window in sorted({*WINDOWS, now.window}):
                    for slots in sorted({*GRADIENT_SLOTS, now.gradient_slots}):
                        layout = dataclasses.replace(
                            now, chunk_bytes=chunk, window=window, gradient_slots=slots
                        )
                        note = f"{chunk / 2**20:g} MiB, window {window}, {slots} gradient slot(s)"
                        yield self._filled(layout), note
        elif stage == "activations":
            for layout in self._mixes(now):
                yield layout, describe_modes(layout, self.workload.layers)

    def _gpu_updates(self, layout: Layout) -> list[int]:
        """Numbers of units to update on the GPUs."""
        if layout.reduction != "gpu" or not self.rates.gpu_update:
            return [0]
        units = self.workload.layers + 2
        # The embedding; the units at the turn from backward to forward; then shares of all.
        turn = 1 + min(layout.window, self.workload.layers)
        return sorted({0, 1, turn, *(turn + (units - turn) * part // 6 for part in range(1, 7))})

    def _mixes(self, layout: Layout) -> Iterator[Layout]:
        """Activation layouts worth a look: a small knapsack.

        Layers are alike, so each mode is one point (bytes, seconds, link bytes) and an optimal mix has at
        most two modes: as many layers as fit in the richer one, the rest in the leaner one. The richer
        ones are the last layers, whose backward comes first: what they keep lives shortest.
        """
        layers = self.workload.layers
        leanest = ["offload", "recompute"]
        richer: list[tuple[str, float]] = [("keep", layout.partial_budget)]
        if self.plan.config.compile:
            richer = [("partial", budget) for budget in PARTIAL_BUDGETS] + richer
        pairs = [("offload", "recompute", layout.partial_budget)]
        pairs += [(lean, rich, budget) for lean in leanest for rich, budget in richer]
        pairs += [("partial", "keep", budget) for rich, budget in richer if rich == "partial"]
        seen = set()
        for lean, rich, budget in pairs:

            def mix(count: int, lean: str = lean, rich: str = rich, budget: float = budget) -> Layout:
                modes = (lean,) * (layers - count) + (rich,) * count
                activations = modes if 0 < count < layers else modes[0]
                budget = budget if "partial" in modes else layout.partial_budget
                return dataclasses.replace(layout, activations=activations, partial_budget=budget)

            most = layers
            if not self._fits(mix(layers)):
                fits, most = 0, layers  # the largest count that fits is in [fits, most)
                while most - fits > 1:
                    middle = (fits + most) // 2
                    fits, most = (middle, most) if self._fits(mix(middle)) else (fits, middle)
                most = fits
            for count in {0, most}:
                candidate = mix(count)
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate

    def _filled(self, layout: Layout) -> Layout:
        """`layout` with the activation modes that suit it best; as it is if none fits."""
        fitting = [mix for mix in self._mixes(layout) if self._fits(mix)]
        return min(fitting, key=self._rank) if fitting else layout

    def _rank(self, layout: Layout) -> tuple[float, int]:
        candidate = self._candidate(layout)
        # In steps of TIE, so that a gain nobody could measure does not cost gigabytes.
        return round(candidate.seconds / (TIE * self._scale), 0), candidate.gpu_bytes

    @property
    def _scale(self) -> float:
        return self._candidate(self._lightest).predicted_seconds

    # --- decisions --------------------------------------------------------------------------------

    def _choose(self, stage: str, options: Iterable[tuple[Layout, str]]) -> Record:
        layouts: list[Layout] = []
        candidates: list[Candidate] = []
        for layout, note in options:
            layouts.append(layout)
            candidates.append(dataclasses.replace(self._candidate(layout), note=note))
        fitting = [i for i, candidate in enumerate(candidates) if candidate.fits]
        if not fitting:
            raise ConfigError(f"policy: no candidate of {stage} fits the memory: use a smaller batch_size")
        ranked = sorted(fitting, key=lambda i: self._rank(layouts[i]))
        chosen = ranked[0]
        why, flip = self._reasons(stage, layouts, candidates, ranked)
        return Record(
            stage=stage,
            question=STAGES[stage],
            candidates=tuple(candidates),
            chosen=chosen,
            why=why,
            flip=flip,
        )

    def _reasons(
        self, stage: str, layouts: list[Layout], candidates: list[Candidate], ranked: list[int]
    ) -> tuple[str, str]:
        best = candidates[ranked[0]]
        why = f"{best.note}: {best.seconds:.3f} s a step, decided by {NAMES[best.binding]}"
        fields = FIELDS.get(stage, ())
        chosen = layouts[ranked[0]]
        others = [i for i in ranked[1:] if any(
            getattr(layouts[i], f) != getattr(chosen, f) for f in fields)]  # fmt: skip
        if not others:
            return why, "there is no other candidate that fits"
        other = candidates[others[0]]
        slower = other.seconds - best.seconds
        if slower <= TIE * best.seconds:
            why += f"; {other.note} is as fast within {TIE:.1%}"
            if other.gpu_bytes > best.gpu_bytes:
                why += f" and takes {(other.gpu_bytes - best.gpu_bytes) / 2**30:.1f} GiB more per GPU"
        else:
            why += f"; next is {other.note}, {slower / best.seconds:.1%} slower"
            causes = {c: other.exposed.get(c, 0.0) - best.exposed.get(c, 0.0) for c in other.exposed}
            if causes and max(causes.values()) > 0.2 * slower:
                cause = max(causes, key=lambda name: causes[name])
                why += f", as compute waits {causes[cause]:.3f} s more for {WAITS[cause]}"
        rejected = [c for c in candidates if not c.fits]
        faster = [c for c in rejected if c.seconds < best.seconds * (1 - TIE)]
        if faster:
            lead = min(faster, key=lambda c: c.seconds)
            why += f"; {lead.note} would take {lead.seconds:.3f} s but does not fit"
        return why, flip(self.workload, self.rates, chosen, layouts[others[0]], other.note)

    def _pinned(self, layout: Layout) -> bool:
        """Whether a layout agrees with everything a user has overruled."""
        for record in self.records:
            if record.overridden:
                for name in FIELDS[record.stage]:
                    if getattr(layout, name) != Layout(**record.choice.layout).__dict__[name]:
                        return False
        return True

    def _short_list(self) -> list[Layout]:
        """The choice so far, then the best predicted layout that differs in each stage's fields."""
        chosen = self.layout
        slowest = NEAR * self._candidate(chosen).predicted_seconds
        near = (layout for layout, c in self._known.items() if c.fits and c.predicted_seconds <= slowest)
        ranked = sorted(filter(self._pinned, near), key=self._rank)
        short = [chosen]
        for fields in FIELDS.values():
            differs = [
                layout
                for layout in ranked
                if all(any(getattr(layout, f) != getattr(taken, f) for f in fields) for taken in short)
            ]
            if differs and len(short) < SHORT_LIST:
                short.append(differs[0])
        if self._fits(self.start) and self.start not in short and self._pinned(self.start):
            short.append(self.start)
        return short

    def _measure(self) -> Record:
        short, notes = self._short_list(), []
        for layout in short if self.trial is not None else ():
            if layout not in self.trials:
                assert self.trial is not None
                try:
                    self.trials[layout] = self.trial(layout)
                except ConfigError as error:
                    notes.append(str(error))
        tried = [self.trials[layout] for layout in short if layout in self.trials]
        candidates = []
        for layout in short:
            trial = self.trials.get(layout)
            candidate = self._known[layout] = dataclasses.replace(
                self._candidate(layout), measured_seconds=trial.seconds if trial else None
            )
            what = "the policy's prediction" if layout == short[0] else describe(layout, short[0])
            candidates.append(
                dataclasses.replace(candidate, note="the config's layout" if layout == self.start else what)
            )
        measured = [i for i, c in enumerate(candidates) if c.measured_seconds is not None]
        chosen = min(measured, key=lambda i: candidates[i].seconds, default=0)
        best = candidates[chosen]
        cost = 0.0
        if tried:
            cost = sum(trial.wall - trial.steps * best.seconds for trial in tried)
            off = best.seconds / best.predicted_seconds - 1
            why = f"{best.note}: {best.seconds:.3f} s measured, {off:+.1%} against its prediction"
        else:
            why = "nothing was tried: the prediction decides"
        why = "; ".join([why, *notes])
        others = sorted((c for i, c in enumerate(candidates) if i != chosen), key=lambda c: c.seconds)
        turn = "there is no other candidate"
        if others:
            turn = f"{others[0].note} is {others[0].seconds / best.seconds - 1:+.1%} away"
        return Record(
            stage="measure",
            question=STAGES["measure"],
            candidates=tuple(candidates),
            chosen=chosen,
            why=why,
            flip=turn,
            cost_seconds=cost,
        )

    def _conclude(self) -> Record:
        chosen = dataclasses.replace(self._candidate(self.layout), note="chosen")
        candidates = [chosen]
        cost = self.spent + sum(record.cost_seconds for record in self.records)
        start = dataclasses.replace(self._candidate(self.start), note="the config's layout")
        why = f"{chosen.seconds:.3f} s a step"
        turn = "nothing: it is the config's own layout"
        if self.layout != self.start:
            candidates.append(start)
            pair = (chosen, start)
            if any(c.measured_seconds is None for c in pair):  # compare like with like
                saving = start.predicted_seconds - chosen.predicted_seconds
                kind = "predicted"
            else:
                saving, kind = start.seconds - chosen.seconds, "measured"
            why += f"; deciding cost {cost:.1f} s"
            if saving > 0:
                why += (
                    f", each step saves {saving:.3f} s ({kind}), break-even after {cost / saving:,.0f} steps"
                )
                turn = f"a run of fewer than {cost / saving:,.0f} steps does not earn the cost back"
            else:
                turn = "the config's layout is as fast"
        return Record(
            stage="final",
            question=STAGES["final"],
            candidates=tuple(candidates),
            chosen=0,
            why=why,
            flip=turn,
            cost_seconds=cost,
        )


NAMES = {
    "compute": "the GPUs' compute",
    "update": "the optimizer worker",
    "to_device": "copies to the GPUs",
    "to_host": "copies to the host",
    "collective": "collectives between GPUs",
    "host_memory": "the host's memory bandwidth",
}
"""Resources of a prediction in words."""
WAITS = {
    "delivery": "parameters on their way",
    "update": "updates",
    "reduction": "gradients to land",
    "offload": "offloaded layer inputs",
}
"""Causes of waits in words."""
CHANGES = {
    "compute": "the GPUs' compute",
    "links": "the links to the host",
    "collectives": "collectives between GPUs",
    "update": "the host's update",
}
FACTORS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


def flip(workload: Workload, rates: Rates, chosen: Layout, other: Layout, name: str) -> str:
    """The smallest change of batch or hardware with which `other` would beat `chosen`."""
    for factor in FACTORS:
        for times in (factor, 1 / factor):
            w, r = workload.scaled(times), rates.scaled(times)
            if predict(w, r, other).step_seconds < predict(w, r, chosen).step_seconds * (1 - TIE):
                return f"{name} wins with {times:.2g} times the tokens in a step"
            for group, words in CHANGES.items():
                r = rates.faster(group, times)
                first, second = (predict(workload, r, layout).step_seconds for layout in (chosen, other))
                if second < first * (1 - TIE):
                    return f"{name} wins where {words} are {times:.2g} times as fast"
    return f"no single change up to {FACTORS[-1]:g} times makes {name} win"


def describe_modes(layout: Layout, layers: int) -> str:
    """Activation modes in words, such as `30 recompute, 6 keep`."""
    modes = layout.activation_modes(layers)
    parts = []
    for mode in sorted(set(modes), key=modes.index):
        budget = f" {layout.partial_budget:g}" if mode == "partial" else ""
        parts.append(f"{modes.count(mode)} {mode}{budget}")
    return ", ".join(parts)


def describe(layout: Layout, reference: Layout) -> str:
    """What sets a layout apart from another one."""
    parts = []
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if value == getattr(reference, field.name):
            continue
        if field.name == "activations":
            parts.append(value if isinstance(value, str) else describe_modes(layout, len(value)))
        elif field.name == "chunk_bytes":
            parts.append(f"chunks of {value / 2**20:g} MiB")
        else:
            parts.append(f"{field.name} {value}")
    return ", ".join(parts) or "the same"
