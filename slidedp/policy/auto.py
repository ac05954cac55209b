"""AutoPolicy: decides a layout in a few stages, each of which leaves a record that can be overruled.

    policy = AutoPolicy(config, rates)
    while (record := policy.decide()) is not None:
        print(record)
    policy.layout

Nothing that exceeds a memory budget is ever chosen.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from slidedp.config import Config
from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.policy.candidates import CAUTION, Candidates, Trial
from slidedp.policy.flips import TIE, flip
from slidedp.policy.options import options
from slidedp.policy.rates import Rates
from slidedp.policy.records import Candidate, Record, save_records
from slidedp.policy.words import NAMES, WAITS, describe, mostly
from slidedp.preflight import Plan, plan

SHORT_LIST = 4
"""Layouts tried with real steps, besides the config's."""
CLOSE = 1.1
"""What is predicted to take longer than the choice by more than this factor is not tried. On an H200 the
model's median error was 3%, and 6 of 93 layouts were further off than this."""
CLOSE_ON_CPUS = 1.5
"""The same of ranks on CPUs, which share cores with the worker: the model says less of them."""
RIVAL = 1.05
"""Layouts whose trials differ by less than this factor from the fastest one's are tried again."""
ROUNDS = 3
"""How often they are tried at most. A few steps of 0.2 s each said 3% less of one layout than of another that
was 3% faster over a minute (Qwen3-0.6B, 4 x 4,096 tokens, H200)."""
LONG = 5.0
"""Seconds of trials that are long enough to tell."""
STAGES = {
    "route": "How do parameters reach the GPUs, and gradients the host?",
    "update": "When and where are units updated, and is the vocabulary in pieces to make room for it?",
    "buffers": "Which chunk size, window and number of gradient buffers?",
    "activations": "What does each layer leave for its backward?",
    "measure": "Which of the best predictions is fastest in real steps?",
    "final": "Which layout trains, and does the choice pay?",
}
MEASURE = list(STAGES).index("measure")
"""The first stage that needs real steps."""
FIELDS = {
    "route": ("delivery", "reduction", "transport"),
    "update": ("schedule", "landing", "gpu_updates", "resident_updates", "vocabulary_pieces"),
    "buffers": ("chunk_bytes", "window", "gradient_slots"),
    "activations": ("activations", "partial_budget"),
}
"""What each stage decides."""


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
        if (passes := self.plan.config.gradient_accumulation) > 1:
            raise ConfigError(
                f"gradient_accumulation={passes}: the policy knows steps of one pass only; give a layout"
            )
        self.rates, self.trial, self.spent = rates, trial, spent
        self.records: list[Record] = []
        self.candidates = Candidates(self.plan, rates)
        self.workload = self.candidates.workload
        self.start = self.plan.config.layout
        """The layout of the config, against which a saving is counted."""

    # --- what a user calls ------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return bool(self.records) and self.records[-1].stage == "final"

    @property
    def layout(self) -> Layout:
        """The layout that the records so far lead to; the final one when `done`."""
        return Layout(**self.records[-1].choice.layout) if self.records else self.candidates.lightest

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
            record = self._choose(stage, options(self.candidates, stage, self.layout))
            record = dataclasses.replace(record, cost_seconds=time.monotonic() - begun)
        self.records.append(record)
        return record

    def decide_all(self) -> Layout:
        """Takes all decisions that are left; returns the final layout."""
        while self.decide() is not None:
            pass
        return self.layout

    def predict(self) -> Layout:
        """Takes those of them that need no real steps; returns the layout that they lead to."""
        while len(self.records) < MEASURE:
            self.decide()
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
            candidates.append(dataclasses.replace(self.candidates.of(choice), note="given by the user"))
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

    def again(self, plan: Plan, rates: Rates, trial: Callable[[Layout], Trial] | None) -> "AutoPolicy":
        """A policy for other memory or rates, which goes on from what was overruled in this one and counts
        what this one has cost."""
        cost = self.spent + sum(record.cost_seconds for record in self.records)
        policy = AutoPolicy(plan, rates, trial, cost)
        overruled = [record for record in self.records if record.overridden]
        while overruled and (record := policy.decide()) is not None:
            if record.stage == overruled[0].stage:
                policy.override(record.stage, Layout(**overruled.pop(0).choice.layout))
        return policy

    def stay(self, layout: Layout, why: str) -> None:
        """`layout` runs, and what `measure` has chosen cannot be taken, for the reason `why`: replaces that
        choice and takes back what follows; `decide` goes on from there."""
        record = self.records[MEASURE]
        running = dataclasses.replace(self.candidates.of(layout), note="the layout that runs")
        self.records[MEASURE:] = [
            dataclasses.replace(
                record, candidates=(*record.candidates, running), chosen=len(record.candidates), why=why
            )
        ]

    def save(self, path: str | Path) -> None:
        """Writes the records as JSON; see slidedp.policy.records.load_records."""
        save_records(self.records, path)

    def _decided(self) -> str:
        return ", ".join(record.stage for record in self.records) or "none"

    # --- decisions --------------------------------------------------------------------------------

    def _choose(self, stage: str, options: Iterable[tuple[Layout, str]]) -> Record:
        layouts: list[Layout] = []
        candidates: list[Candidate] = []
        for layout, note in options:
            layouts.append(layout)
            candidates.append(dataclasses.replace(self.candidates.of(layout), note=note))
        fitting = [i for i, candidate in enumerate(candidates) if candidate.fits]
        if not fitting:
            raise ConfigError(f"policy: no candidate of {stage} fits the memory: use a smaller batch_size")
        ranked = sorted(fitting, key=lambda i: self.candidates.rank(layouts[i]))
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
        expected = [self.candidates.expected(layouts[i]) for i in (ranked[0], others[0])]
        if expected[1] - expected[0] <= TIE * expected[0]:
            why += f"; {other.note} is as fast within {TIE:.1%}"
            if other.gpu_bytes - best.gpu_bytes > 0.05 * 2**30:
                why += f" and takes {(other.gpu_bytes - best.gpu_bytes) / 2**30:.1f} GiB more per GPU"
        elif slower <= TIE * best.seconds:
            why += (
                f"; {other.note} is predicted as fast or faster, but loses more where all but compute is "
                f"{CAUTION - 1:.0%} slower than probed"
            )
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
        return all(
            getattr(layout, name) == getattr(Layout(**record.choice.layout), name)
            for record in self.records
            if record.overridden
            for name in FIELDS[record.stage]
        )

    def _short_list(self) -> list[Layout]:
        """The choice so far, and of these what is predicted to be nearly as fast: the choice with one thing
        changed that the model may be wrong about, and the config's layout."""
        chosen, known = self.layout, self.candidates
        factor = CLOSE_ON_CPUS if self.rates.synchronous else CLOSE
        slowest = factor * known.of(chosen).predicted_seconds

        def close(layout: Layout) -> bool:
            return (
                layout != chosen
                and self._pinned(layout)
                and known.fit(layout)
                and known.of(layout).predicted_seconds <= slowest
            )

        short = sorted(filter(close, dict.fromkeys(self._variants(chosen))), key=known.rank)[: SHORT_LIST - 1]
        return [chosen, *short] + [self.start] * (close(self.start) and self.start not in short)

    def _variants(self, chosen: Layout) -> Iterator[Layout]:
        """`chosen` with one thing changed that makes a real difference: 31 layers recomputed and 32 are the
        same to a trial."""
        units, layers = self.workload.layers + 2, self.workload.layers
        if chosen.reduction == "gpu" and self.rates.gpu_update:
            for count in (units, 0):  # all that can be asks least of the host, where a model errs most
                yield dataclasses.replace(chosen, gpu_updates=count, resident_updates=count)
        for route in self.records[0].candidates:
            with suppress(ConfigError):  # updates on the GPUs need their sum there
                yield dataclasses.replace(chosen, **{f: route.layout[f] for f in FIELDS["route"]})
        if chosen.vocabulary_pieces > 1:
            yield dataclasses.replace(chosen, vocabulary_pieces=-(-chosen.vocabulary_pieces // 4))
        usual = mostly(chosen, layers)
        others: dict[str, list[Layout]] = {}
        for mix in self.candidates.mixes(chosen):
            others.setdefault(mostly(mix, layers), []).append(mix)
        for mode, mixes in others.items():
            best = self.candidates.best(mixes)
            if mode != usual and best is not None:
                yield best

    def _try(self, layouts: Iterable[Layout]) -> list[str]:
        """Runs real steps under each, where there are any; returns why some could not be tried."""
        notes: list[str] = []
        if self.trial is None:
            return notes
        for layout in layouts:
            try:
                self.candidates.measured(layout, self.trial(layout))
            except ConfigError as error:
                notes.append(str(error))
        return notes

    def _rivals(self, short: list[Layout]) -> list[Layout]:
        """Layouts that short trials do not tell from the fastest one, and this one; the last tried first, so
        that what changes meanwhile does not favour any."""
        tried = {layout: trial for layout, trial in self.candidates.trials.items() if layout in short}
        fastest = min((trial.seconds for trial in tried.values()), default=0.0)
        near = [layout for layout in tried if tried[layout].seconds <= RIVAL * fastest]
        brief = [layout for layout in near if tried[layout].wall < LONG]
        return brief[::-1] if len(near) > 1 else []

    def _measure(self) -> Record:
        short, trials = self._short_list(), self.candidates.trials
        notes = self._try(layout for layout in short if layout not in trials)
        for _ in range(ROUNDS - 1):
            notes += self._try(self._rivals(short))
        tried = [trials[layout] for layout in short if layout in trials]
        candidates = []
        for layout in short:
            what = "the policy's prediction" if layout == short[0] else describe(layout, short[0])
            what = "the config's layout" if layout == self.start else what
            candidates.append(dataclasses.replace(self.candidates.of(layout), note=what))
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
        chosen = dataclasses.replace(self.candidates.of(self.layout), note="chosen")
        candidates = [chosen]
        cost = self.spent + sum(record.cost_seconds for record in self.records)
        start = dataclasses.replace(self.candidates.of(self.start), note="the config's layout")
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
            why += f", {self.spent:.1f} s of it before the run" if self.spent else ""
            if saving > 0:
                even = math.ceil(cost / saving)
                steps = f"{even:,} step{'s' * (even != 1)}"
                why += f", each step saves {saving:.3f} s ({kind}), break-even after {steps}"
                turn = f"a run of fewer than {steps} does not earn the cost back"
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
