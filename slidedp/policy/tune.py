"""Finds the best layout of a live run: what the policy predicts, tried on the run's own steps; and watches
over it afterwards.

Every layout computes the same step, so trials are training. They cost the difference between a trial
layout and the best one, and the switches.
"""

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from slidedp.config import TIMELINE_EVERY
from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.policy.auto import MEASURE, AutoPolicy
from slidedp.policy.calibrate import calibrated
from slidedp.policy.candidates import Trial
from slidedp.policy.drift import SETTLE, DriftWatch
from slidedp.preflight import Plan, under

if TYPE_CHECKING:
    from slidedp.session import Run

POLICY = "policy.json"
"""The decisions, in the run folder."""
CALIBRATION = TIMELINE_EVERY + 1
"""The step after which tuning begins, and whose timeline corrects the rates of CPU ranks: the second one that
is recorded, as the first steps still warm up.

A probe says more of a GPU than the start of a run, where the GPU is cool and the host is busy: compute of
Qwen3-0.6B on an H200 was 14% faster and the worker 20% slower than probed, and than later.
"""
STEPS = 4
"""Steps whose median is a layout's measured time."""
LOOK_EVERY = 1.0
"""Seconds between two looks at the steps of a run that is tuned."""


class RunOver(Exception):
    """The run ended before all trials were done."""


def less_by_excess(planned: Plan, layout: Layout, peak: int) -> Plan:
    """`planned` with so much less of the GPU to plan for as a rank took more than was planned under `layout`,
    `peak` bytes at most: a trial that runs out of memory would end the run."""
    expected, limit = sum(under(planned, layout).device.values()), planned.device_limit
    if limit is None or peak <= expected:
        return planned
    return dataclasses.replace(planned, device_available=int(limit * expected / peak))


class Tuner:
    """Tries layouts on one run, which nothing else may switch meanwhile."""

    def __init__(self, run: "Run", policy: AutoPolicy) -> None:
        """`policy` has the preflight from before the run took its memory. What it has decided without real
        steps stands; the rest is decided again."""
        self.policy, self._run = policy, run
        self.rates = policy.rates
        """As probed."""
        self._since = 0  # the first step under the present layout
        policy.trial = self.trial
        del policy.records[MEASURE:]

    def follow(self) -> None:
        """Tunes, and then watches for drifts until the run is over."""
        if not self.tune().done:
            return
        run = self._run
        watch = DriftWatch(run.log, self.policy, run.set_layout if run.config.retune else None)
        while run.running:
            watch.look()
            time.sleep(LOOK_EVERY)

    def tune(self) -> AutoPolicy:
        """Decides, with the rates of CPU ranks and the plan for GPUs corrected, tries, and leaves the run
        under the best layout.

        Blocks for some dozens of steps; the records so far are in the run folder at any time."""
        run = self._run
        try:
            self._until(lambda: run.log.steps_done > CALIBRATION)
            self.policy = self._corrected()
            self._decide()
            try:
                self._switch(self.policy.layout)
            except ConfigError as error:  # the host has less room than when it was tried, for one
                self.policy.stay(run.layout, f"{self.policy.layout!r} cannot be taken: {error}")
                self._decide()
        except RunOver:
            pass  # the records say how far it came
        return self.policy

    def _corrected(self) -> AutoPolicy:
        """The policy, with what the first steps of the run say."""
        run, before = self._run, self.policy
        rates, peak = before.rates, max(event["gpu_peak_bytes"] for event in run.log.events("step"))
        planned = less_by_excess(before.plan, run.layout, peak)
        if rates.synchronous:
            rates = calibrated(rates, before.workload, run.layout, run.log, CALIBRATION)
        if rates == before.rates and planned == before.plan:
            return before
        try:
            return before.again(planned, rates, self.trial)
        except ConfigError:  # nothing fits that much less: no trial is safe
            return before.again(before.plan, rates, None)

    def _decide(self) -> None:
        """Takes all decisions that are left; the records so far are in the run folder."""
        while self.policy.decide() is not None:
            self.policy.save(self._run.folder / POLICY)

    def trial(self, layout: Layout) -> Trial:
        """Runs a few steps under `layout`. ConfigError where the host has no room to switch to it."""
        begun, done = time.monotonic(), self._run.log.steps_done
        self._switch(layout)
        start = max(self._since + SETTLE, done)
        self._until(lambda: self._run.log.steps_done >= start + STEPS)
        ranks = self._run.log.ranks()
        steps = ranks[ranks["step"].between(start, start + STEPS - 1)].groupby("step")
        # A step that follows an evaluation is not timed; where all do, their compute must serve.
        timed = steps["step_seconds"].max().dropna()
        seconds = timed if len(timed) else steps["compute_seconds"].max()
        return Trial(float(median(seconds)), start + STEPS - done, time.monotonic() - begun)

    def _switch(self, layout: Layout) -> None:
        run = self._run
        if layout == run.layout:
            return
        expected = len(run.log.events("layout")) + int(run.config.ranks or 1)
        try:
            run.set_layout(layout)
        except ConfigError:
            if run.stopping or not run.running:
                raise RunOver from None
            raise
        self._until(lambda: len(run.log.events("layout")) >= expected)
        self._since = run.log.events("layout")[-1]["step"]

    def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self._run.running:
                raise RunOver
            time.sleep(0.02)
