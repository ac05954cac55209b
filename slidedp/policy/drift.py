"""Watches a run: when its steps no longer take what was expected, looks for a layout that is better now."""

import dataclasses
from collections.abc import Callable
from statistics import median
from typing import Any

from slidedp.config import TIMELINE_EVERY
from slidedp.errors import ConfigError
from slidedp.events import say
from slidedp.layout import Layout
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.calibrate import calibrated
from slidedp.policy.words import describe
from slidedp.steps import StepReader
from slidedp.telemetry import RunLog

STEPS = 2 * TIMELINE_EVERY
"""Steps whose median is compared; some of them have a timeline."""
SETTLE = 2
"""Steps after a switch that do not count: buffers are new, and a layer may be compiled again."""
THRESHOLD = 0.1
"""Relative change of the median, twice in a row, that counts as drift."""
GAIN = 0.05
"""A layout is better if its predicted step is shorter than the present one's by this part."""


class DriftWatch:
    """Follows a run's log; call `look` now and then.

    What is expected at first is the policy's figure for its layout; after a drift, and after a switch by
    anyone, the median of the steps that follow. After each drift it rests for twice as many steps as after
    the one before, so that a restless machine is not judged again and again.
    """

    def __init__(
        self, log: RunLog, policy: AutoPolicy, switch: Callable[[Layout], None] | None = None
    ) -> None:
        """`policy` has decided on the layout that runs. `switch` takes a better one; without it, a better
        one is only proposed."""
        self._log, self._plan, self._switch = log, policy.plan, switch
        self._rates, self._workload = policy.candidates.rates, policy.workload
        self._layout = policy.layout
        self._expected: float | None = policy.records[-1].choice.seconds
        self._reader = StepReader(log)
        self._reader.new_steps()  # those before the decision
        self._switches = len(self._reader.layouts)
        self._recent: list[float] = []
        self._off = False
        """Whether the last STEPS steps were off."""
        self._from, self._rest = 0, STEPS

    def look(self) -> dict[str, Any] | None:
        """Reads the steps since the last look. Returns the event `drift`, which is in the log then, if
        they have drifted: `step`, `expected_seconds`, `measured_seconds`, `layout` (the fields of a better
        one, or None), `present_seconds` and `predicted_seconds` (what the model says of the present and of
        the better layout now), `taken`, and all that as `text`."""
        found = None
        for step in self._reader.new_steps():
            if len(self._reader.layouts) > self._switches:
                self._switches = len(self._reader.layouts)
                at, fields = self._reader.layouts[-1]
                self._layout, self._expected = Layout(**fields), None
                self._recent.clear()
                self._off = False
                self._from = max(self._from, at + SETTLE)
            if step.step < self._from or not step.seconds > 0:
                continue
            self._recent.append(step.seconds)
            if len(self._recent) < STEPS:
                continue
            now = median(self._recent)
            self._recent.clear()
            if self._expected is None:
                self._expected = now
                continue
            off = abs(now / self._expected - 1) > THRESHOLD
            if off and self._off:
                found = self._drifted(step.step, self._expected, now)
                self._expected, off = None, False
                self._from, self._rest = step.step + self._rest, 2 * self._rest
            self._off = off
        return found

    def _drifted(self, step: int, expected: float, now: float) -> dict[str, Any]:
        # The newest timeline may lack the worker's part still.
        sampled = [number for number in self._log.sampled_steps() if number < step - 1]
        if sampled:
            self._rates = calibrated(self._rates, self._workload, self._layout, self._log, sampled[-1])
        policy = AutoPolicy(self._plan, self._rates)
        layout = policy.decide_all()
        best = policy.candidates.of(layout).predicted_seconds
        present = policy.candidates.of(self._layout).predicted_seconds
        better = best < present * (1 - GAIN)
        text = (
            f"a step takes {now:.3f} s around step {step}, {now / expected - 1:+.0%} against the "
            f"{expected:.3f} s that were expected"
        )
        taken = False
        if better:
            text += f"; with {describe(layout, self._layout)} the policy predicts {best / present - 1:+.0%}"
            taken, how = self._take(layout)
            text += f": {how}"
        else:
            text += f"; no layout is predicted to be {GAIN:.0%} faster"
        event = {
            "kind": "drift",
            "step": step,
            "expected_seconds": expected,
            "measured_seconds": now,
            "layout": dataclasses.asdict(layout) if better else None,
            "present_seconds": present,
            "predicted_seconds": best,
            "taken": taken,
            "text": text,
        }
        self._log.add(event)
        if better:
            say(text)
        return event

    def _take(self, layout: Layout) -> tuple[bool, str]:
        if self._switch is None:
            return False, f"run.set_layout({layout!r}) takes it"
        try:
            self._switch(layout)
        except ConfigError as error:
            return False, f"it cannot be taken: {error}"
        return True, "taken"
