"""The watch over a tuned run: which steps are a drift, what is proposed, and that real ranks take it."""

import dataclasses
from pathlib import Path

import pytest

from slidedp import Config, ConfigError, Data, Layout, Optimizer, launch
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.drift import GAIN, STEPS, THRESHOLD, DriftWatch
from slidedp.policy.machines import H200
from slidedp.policy.rates import Rates
from slidedp.policy.step_time import predict
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, plan
from slidedp.telemetry import RunLog
from tests.launching import nothing_left, small_config, until
from tests.policy.test_auto import WIDE

RANKS = 2


def decided(planned: Plan, compute: float = 1.0) -> AutoPolicy:
    """On a machine whose worker keeps up with its GPUs, of `compute` times the speed."""
    rates = H200.rates(workload_of(planned)).faster("update", 5.0).faster("compute", compute)
    none = dict.fromkeys(("copy", "collective", "update", "message"), 0.0)
    rates = dataclasses.replace(rates, **{f"{what}_latency": seconds for what, seconds in none.items()})
    policy = AutoPolicy(planned, rates)
    policy.decide_all()
    return policy


class Steps:
    """A log of steps as a machine with some rates would report them."""

    def __init__(self, policy: AutoPolicy) -> None:
        self.log = RunLog(Path("unused"), {"ranks": RANKS, "memory": {}})
        self._workload, self.layout, self._next = policy.workload, policy.layout, 0

    def run(self, rates: Rates, count: int, factor: float = 1.0) -> float:
        """Adds `count` steps; returns their seconds."""
        p = predict(self._workload, rates, self.layout, timeline=True)
        there = {self._workload.unit_name(u) for u in self.layout.updated_on_gpu(self._workload.layers)}
        ranks = [s for s in p.timeline if s.track != "update" or s.unit in there]
        worker = [(s.unit, s.start / 1e3, s.end / 1e3) for s in p.timeline if s not in ranks]
        for step in range(self._next, self._next + count):
            self.log.add({"kind": "update", "step": step, "spans": worker})
            for rank in range(RANKS):
                event = {
                    "kind": "step",
                    "step": step,
                    "rank": rank,
                    "step_seconds": p.step_seconds * factor,
                    "compute_seconds": p.step_seconds * factor,
                    "began": 0.0,
                }
                if step % 10 == 1:
                    event["timeline"] = [tuple(span) for span in ranks]
                self.log.add(event)
        self._next += count
        return p.step_seconds * factor


def test_steps_that_take_longer_lead_to_a_proposal(capsys):
    """Another process takes the host's cores: the GPUs should do the updates."""
    policy = decided(WIDE)
    steps, slow = Steps(policy), policy.rates.faster("update", 1 / 15)
    watch = DriftWatch(steps.log, policy)
    expected = steps.run(policy.rates, 2 * STEPS)
    assert watch.look() is None
    steps.run(policy.rates, 2 * STEPS, 1 + 0.8 * THRESHOLD)
    assert watch.look() is None
    steps.run(slow, STEPS)  # not yet
    assert watch.look() is None
    seconds = steps.run(slow, STEPS)
    assert seconds > 1.5 * expected
    event = watch.look()
    assert steps.log.events("drift") == [event]
    assert event["measured_seconds"] == pytest.approx(seconds)
    assert event["expected_seconds"] == pytest.approx(expected, rel=1e-3)
    assert event["present_seconds"] == pytest.approx(seconds, rel=0.1)  # the timeline says what is slow
    assert Layout(**event["layout"]).gpu_updates > policy.layout.gpu_updates and not event["taken"]
    assert event["predicted_seconds"] < (1 - GAIN) * event["present_seconds"]
    assert f"slidedp: {event['text']}\n" == capsys.readouterr().err and "gpu_updates" in event["text"]
    # This is what steps take now; only another change is another drift.
    steps.run(slow, 10 * STEPS)
    assert watch.look() is None
    steps.run(policy.rates, 2 * STEPS)
    back = watch.look()
    assert back["measured_seconds"] == pytest.approx(expected) and back["layout"] is None
    assert "no layout is predicted" in back["text"] and capsys.readouterr().err == ""


def test_a_switch_by_the_user_is_no_drift():
    policy = decided(WIDE)
    steps = Steps(policy)
    watch = DriftWatch(steps.log, policy)
    steps.run(policy.rates, 2 * STEPS)
    other = Layout(delivery="replicated", reduction="cpu", schedule=policy.layout.schedule)
    for rank in range(RANKS):
        fields = dataclasses.asdict(other)
        steps.log.add({"kind": "layout", "step": 2 * STEPS, "rank": rank, "layout": fields})
    steps.layout = other
    slower = policy.rates.faster("links", 0.1)
    assert steps.run(slower, 4 * STEPS) > 2 * policy.records[-1].choice.seconds
    assert watch.look() is None


def test_a_better_layout_is_taken_on_real_ranks(tmp_path):
    """The times are injected; the switch and the steps after it are real."""
    config = small_config(tmp_path, optimizer=Optimizer(lr=1e-2, eps=1e-6, clip_norm=None))
    policy = decided(plan(config), compute=1e-3)
    steps, slow = Steps(policy), policy.rates.faster("update", 1 / 15)
    with nothing_left(), launch(dataclasses.replace(config, layout=policy.layout)) as run:
        watch = DriftWatch(steps.log, policy, run.set_layout)
        steps.run(slow, 2 * STEPS)
        event = watch.look()
        assert event["taken"] and run.layout == Layout(**event["layout"]) and run.layout != policy.layout
        until(lambda: len(run.log.events("layout")) == RANKS, "all ranks have switched")
        switched = run.log.events("layout")[0]["step"]
        until(lambda: run.log.steps_done > switched + 20, "the run goes on")
        run.stop()
        run.wait()
        loss = run.metrics()["loss"]
    assert loss.iloc[-5:].mean() < 0.8 * loss.iloc[:3].mean()


def test_retune_needs_something_tuned():
    with pytest.raises(ConfigError, match="retune=True with tune=False: nothing was tuned"):
        Config(model="m", data=Data(path="d"), retune=True)
    assert Config(model="m", data=Data(path="d"), retune=True, layout="auto").tune
