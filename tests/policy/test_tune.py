"""Runs that choose their layout on their own steps."""

import dataclasses
import json
from typing import Any

import pytest

from slidedp import ConfigError, Data, Layout, Optimizer, launch, open_run
from slidedp.policy.auto import STAGES, AutoPolicy
from slidedp.policy.calibrate import THREADS, calibrated
from slidedp.policy.candidates import GPU_SHARE, Trial
from slidedp.policy.demands import demands
from slidedp.policy.drift import DriftWatch
from slidedp.policy.machines import H200
from slidedp.policy.probe import cache_folder, probe
from slidedp.policy.rates import Rates
from slidedp.policy.records import Record, load_records
from slidedp.policy.tune import POLICY, Tuner, less_by_excess
from slidedp.policy.workload import workload_of
from slidedp.preflight import plan, under
from slidedp.telemetry import RunLog
from tests.launching import nothing_left, small_config, until
from tests.policy.test_auto import GIB, WIDE


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[RunLog, list[Record]]:
    """The log and the decisions of a run with `layout="auto"` on two CPU ranks, from start to end."""
    folder = tmp_path_factory.mktemp("auto")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    optimizer = Optimizer(lr=1e-2, eps=1e-6, clip_norm=None)
    data = Data(path=folder / "data", eval_fraction=0.1)
    config = small_config(
        folder, layout="auto", data=data, eval_every=5, optimizer=optimizer, run_folder=str(folder / "run")
    )
    with nothing_left(), launch(config) as run:
        until(lambda: run.tuner.policy.done, "the policy has decided")
        until(lambda: run.layout == run.tuner.policy.layout, "the run has the chosen layout")
        log, records = run.log, run.tuner.policy.records
        done = log.steps_done
        until(lambda: log.steps_done > done + 20, "the run goes on")
        run.stop()
        run.wait()
    assert cache_folder() == folder / "cache" / "slidedp"
    rates = probe(config)  # from the cache: no process starts
    assert calibrated(rates, workload_of(plan(config)), run.layout, log, 0) == rates  # no timeline there
    patch.undo()
    return log, records


def test_a_run_tunes_itself_on_its_own_steps(tuned):
    log, records = tuned
    assert [record.stage for record in records] == list(STAGES)
    assert load_records(log.folder / POLICY) == records
    measure, final = records[-2:]
    # Steps that follow an evaluation, every fifth, are not timed.
    assert all(c.measured_seconds is not None and c.measured_seconds > 0 for c in measure.candidates)
    assert measure.choice.seconds == min(c.seconds for c in measure.candidates)
    assert final.choice.layout == measure.choice.layout
    switches = {event["step"] for event in log.events("layout")}
    assert len(switches) >= len(measure.candidates) - 1
    # Trials are training: the loss falls across all the switches.
    loss = open_run(log.folder).metrics()["loss"]
    assert loss.iloc[-10:].mean() < 0.7 * loss.iloc[:3].mean()


@pytest.mark.parametrize("synchronous", [True, False])
def test_only_rates_of_cpu_ranks_are_corrected_at_the_start(tmp_path, monkeypatch, synchronous):
    """A GPU is cool then, and its probe says more of it."""
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"))
    planned = plan(config)
    rates = dataclasses.replace(H200.rates(workload_of(planned)), synchronous=synchronous)
    other = rates.faster("compute", 2.0)
    monkeypatch.setattr("slidedp.policy.tune.calibrated", lambda *_: other)
    with nothing_left(), launch(config) as run:
        policy = Tuner(run, AutoPolicy(planned, rates)).tune()
    assert policy.done and policy.rates == (other if synchronous else rates)


def test_a_choice_that_is_refused_after_all_leaves_the_run_as_it_is(tmp_path, monkeypatch):
    """Its host memory was given away, say, between the trials and the end: the watch goes on with the layout
    that runs."""
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"))
    planned = plan(config)
    with nothing_left(), launch(config) as run:
        tuner = Tuner(run, AutoPolicy(planned, H200.rates(workload_of(planned))))
        started = run.layout
        tuner.policy.trial = lambda layout: Trial(2.0 if layout == started else 1.0, 6, 6.0)

        def refuse(layout: Layout) -> None:
            raise ConfigError("set_layout: there is no room")

        monkeypatch.setattr(run, "set_layout", refuse)
        policy = tuner.tune()
        assert policy.done and policy.layout == run.layout == started
        records = load_records(tmp_path / "run" / POLICY)
        assert records == policy.records and "there is no room" in records[-2].why
        assert DriftWatch(run.log, policy).look() is None  # what `follow` goes on to


def test_what_a_user_has_overruled_holds_in_the_run(tmp_path):
    """Through the correction of the rates too, for which the policy is made anew."""
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"))
    planned = plan(config)
    policy = AutoPolicy(
        planned, dataclasses.replace(H200.rates(workload_of(planned)), synchronous=True), spent=3.0
    )
    policy.predict()
    route = {"delivery": "replicated", "reduction": "cpu"}
    policy.override("route", dataclasses.replace(policy.layout, **route, gpu_updates=0, resident_updates=0))
    with nothing_left(), launch(dataclasses.replace(config, layout=policy.predict())) as run:
        with pytest.raises(ConfigError, match="tune: 'auto': expected a slidedp"):
            run.tune("auto")
        run.tune(policy)
        until(lambda: run.tuner.policy.done, "the policy has decided")
        until(lambda: run.layout == run.tuner.policy.layout, "the run has the chosen layout")
        records = run.tuner.policy.records
        tried = [c for c in records[-2].candidates if c.measured_seconds is not None]
    assert run.tuner.policy is not policy and records[0].overridden and tried
    for candidate in (*tried, records[-1].choice):
        assert {field: candidate.layout[field] for field in route} == route
    assert records[-1].cost_seconds > 3.0


def test_what_takes_more_than_planned_leaves_less_to_plan_for():
    layout = Layout(activations="keep")
    expected = sum(under(WIDE, layout).device.values())
    assert less_by_excess(WIDE, layout, 0) == less_by_excess(WIDE, layout, expected) == WIDE
    more = int(1.1 * expected)
    assert less_by_excess(WIDE, layout, more).device_limit == pytest.approx(80 * GIB / 1.1)
    limited = dataclasses.replace(WIDE, config=dataclasses.replace(WIDE.config, gpu_memory_budget=40))
    assert less_by_excess(limited, layout, more).device_limit == pytest.approx(40 * GIB / 1.1)
    on_cpus = dataclasses.replace(WIDE, device_available=None)
    assert less_by_excess(on_cpus, layout, more) == on_cpus


@pytest.mark.parametrize(("excess", "left"), [(1.5, 2.0), (1e6, 3.0)])
def test_layouts_that_may_take_more_than_there_is_are_not_tried(tmp_path, monkeypatch, excess, left):
    """A trial that runs out of memory would end the run. Where nothing fits then, none is made."""
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"))
    needed = sum(plan(config).device.values())
    planned = dataclasses.replace(plan(config), device_available=3 * needed)
    with nothing_left(), launch(config) as run:
        events = run.log.events

        def taking_more(kind: str) -> list[dict[str, Any]]:
            """What ranks on GPUs would report."""
            return [event | {"gpu_peak_bytes": int(excess * needed)} for event in events(kind)]

        monkeypatch.setattr(run.log, "events", taking_more)
        policy = Tuner(run, AutoPolicy(planned, H200.rates(workload_of(planned)))).tune()
    assert policy.done and policy.plan.device_limit == pytest.approx(left * needed)
    tried = [c for c in policy.records[-2].candidates if c.measured_seconds is not None]
    assert bool(tried) == (left < 3) and all(c.gpu_bytes <= GPU_SHARE * left * needed for c in tried)


def test_a_timeline_corrects_compute(tuned):
    """Rates that are wrong by a factor come back to what the step's own spans say."""
    log, _ = tuned
    step = log.sampled_steps()[-1]
    spans = log.timeline(step)
    layout = _layout_of(log, step)
    workload = dataclasses.replace(workload_of(WIDE), layers=5)
    wrong = H200.rates(workload)
    right = calibrated(wrong, workload, layout, log, step)
    modes = layout.activation_modes(5)
    alike = [f"layers.{i}" for i, mode in enumerate(modes) if mode == modes[0]]
    every = [f"layers.{i}" for i in range(5)]
    for phase, units, found in (
        ("forward", every, right.forward),
        ("backward", alike, right.backward(modes[0], layout.partial_budget)),
    ):
        rows = spans[(spans["phase"] == phase) & spans["unit"].isin(units)]
        assert found == pytest.approx((rows["end"] - rows["start"]).median() / 1e3)
    assert json.dumps(right.to_dict())


def test_a_timeline_of_waiting_for_threads_corrects_these(tuned):
    log, _ = tuned
    step = log.sampled_steps()[-1]
    layout = _layout_of(log, step)
    workload = dataclasses.replace(workload_of(WIDE), layers=5)
    spans = log.timeline(step)
    backward = spans[(spans["phase"] == "backward") & spans["unit"].str.startswith("layers.")]
    measured = (backward["end"] - backward["start"]).median() / 1e3

    def with_threads(seconds: float) -> Rates:
        """A GPU that waits for nothing but threads, which take as long for everything."""
        fast = H200.rates(workload).faster("compute", 1e6)
        return dataclasses.replace(fast, **dict.fromkeys(THREADS, seconds))

    of_one = demands(workload, with_threads(1.0), layout).enqueue_backward[0]
    probed = with_threads(measured / of_one / 3)  # a third of what backward has taken
    right = calibrated(probed, workload, layout, log, step)
    assert right.forward == probed.forward and right.backward_keep == probed.backward_keep
    (factor,) = {getattr(right, name) / getattr(probed, name) for name in THREADS}
    assert factor > 1


def _layout_of(log: RunLog, step: int) -> Layout:
    """The layout at the end of a tuned run."""
    assert step > max((event["step"] for event in log.events("layout")), default=-1)
    return Layout(**load_records(log.folder / POLICY)[-1].choice.layout)
