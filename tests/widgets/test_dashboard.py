"""The dashboard's state and figure, without a browser."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from slidedp import Layout, Run, open_run
from slidedp.telemetry import RunLog
from slidedp.widgets import Dashboard
from slidedp.widgets.curves import MAX_POINTS
from tests.launching import DEADLINE


class FakeRun(Run):
    """A run without processes."""

    def __init__(self, log):
        self.log, self.status, self.failure, self.stops, self.saves = log, "running", None, 0, []

    @property
    def running(self):
        return self.status == "running"

    def stop(self):
        self.stops += 1

    def save(self, wait=True):
        self.saves.append(wait)

    def end(self, status, failure=None):
        self.log.add({"kind": "end", "status": status, "failure": failure, "time": 0.0})
        self.status = status


@pytest.fixture
def log(tmp_path):
    """Makes the log of a run that has reported no step yet."""

    def make(ranks=2, steps=100, device="cpu", first_step=0):
        description = {
            "ranks": ranks,
            "config": {"steps": steps, "device": device, "layout": dataclasses.asdict(Layout())},
            "first_step": first_step,
            "flops_per_token": 6e6,
            "parameters": 10**6,
            "gpu": "NVIDIA H200" if device == "cuda" else None,
            "memory": {
                "host": {"FP32 master weights": 4 * 2**30},
                "device": {"window": 2**30, "workspace (estimate)": 2**29},
                "host_available": 64 * 2**30,
                "device_available": 3 * 2**30 if device == "cuda" else None,
            },
        }
        return RunLog.create(tmp_path / "run", description)

    return make


def add_step(log, step, only=None):
    """What each rank (or only one) sends for a step; later ranks have higher losses and fewer targets."""
    gpu = log.description["config"]["device"] == "cuda"
    for rank in range(log.description["ranks"]) if only is None else [only]:
        targets = 100 - rank
        log.add(
            {
                "kind": "step",
                "rank": rank,
                "step": step,
                "loss_sum": targets * (5.0 + rank - 0.01 * step),
                "targets": targets,
                "compute_seconds": 0.5,
                "step_seconds": 0.5 + 0.1 * rank if step != log.description["first_step"] else None,
                "wait_seconds": {"delivery": 0.05} | ({"update": 0.1} if step >= 2 else {}),
                "gpu_peak_bytes": (rank + 1) * 2**30 if gpu else 0,
                "allocator_retries": 0,
                "anonymous_bytes": 2**29,
                "began": 0.0,
            }
        )


async def shown(dashboard, step):
    """Returns once the dashboard that follows its run has come to `step`."""
    async with asyncio.timeout(DEADLINE):
        while dashboard.step != step:
            await asyncio.sleep(0.01)


def curve(dashboard, name):
    (trace,) = (trace for trace in dashboard.figure.data if trace.meta == name)
    return trace


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_run_folder_shows_what_its_metrics_say(log, ranks):
    live = log(ranks)
    for step in range(30):
        add_step(live, step)
    live.add({"kind": "end", "status": "stopped", "failure": None, "time": 0.0})
    live.close()
    opened = open_run(live.folder)
    dashboard = Dashboard(opened)
    assert (dashboard.step, dashboard.status, dashboard.failure) == (30, "stopped", "")
    assert dashboard._stop.disabled
    metrics = opened.metrics()
    np.testing.assert_allclose(curve(dashboard, "loss").y, metrics.loss, rtol=1e-6)
    np.testing.assert_allclose(curve(dashboard, "speed").y, metrics.tokens_per_second, rtol=1e-6)
    waits = sum(np.array(t.y) for t in dashboard.figure.data if t.meta.startswith("wait"))
    np.testing.assert_allclose(1 - waits / 100, metrics.busy, rtol=1e-5)
    for rank, table in opened.ranks().groupby("rank"):
        np.testing.assert_allclose(curve(dashboard, f"loss {rank}").y, table.loss, rtol=1e-6)
        assert list(curve(dashboard, f"memory {rank}").x) == list(table.step.unique())


def test_held_out_losses_are_drawn_when_there_are_some(log):
    live = log(2)
    dashboard = Dashboard(live)
    add_step(live, 0)
    dashboard.update()
    assert "held-out" not in {trace.meta for trace in dashboard.figure.data}
    live.add({"kind": "eval", "rank": 0, "step": 1, "loss_sum": 6.0, "targets": 2, "seconds": 1.0})
    dashboard.update()  # the other rank is still at it
    assert "held-out" not in {trace.meta for trace in dashboard.figure.data}
    live.add({"kind": "eval", "rank": 1, "step": 1, "loss_sum": 2.0, "targets": 2, "seconds": 1.0})
    dashboard.update()
    held_out = curve(dashboard, "held-out")
    assert (list(held_out.x), list(held_out.y)) == ([1], [2.0])
    assert "held-out perplexity 7.39" in dashboard.summary()
    assert live.evaluations()["eval_loss"].to_dict() == {1: 2.0}


def test_it_follows_a_run_to_its_end(log):
    run = FakeRun(log(device="cuda"))

    async def follow():
        dashboard = Dashboard(run)
        assert dashboard.step == 0 and "step 0 of 100" in dashboard.summary()
        add_step(run.log, 0)
        add_step(run.log, 1, only=1)  # rank 0 has not reported yet: the step does not count
        await shown(dashboard, 1)
        add_step(run.log, 1, only=0)
        add_step(run.log, 2)
        await shown(dashboard, 3)
        assert dashboard.summary().endswith("0:58 left")  # 97 steps at 0.6 s
        assert list(curve(dashboard, "memory 1").y) == [2.0, 2.0, 2.0]
        assert list(curve(dashboard, "wait update").y) == [0.0, 0.0, 20.0]
        run.end("failed", "rank 1 failed:\n<lost>")
        await asyncio.wait_for(dashboard._task, DEADLINE)
        return dashboard

    dashboard = asyncio.run(follow())
    assert (dashboard.status, dashboard.failure) == ("failed", "rank 1 failed:\n<lost>")
    assert "&lt;lost&gt;" in dashboard._error.value
    assert dashboard._stop.disabled


def test_it_is_never_more_than_one_update_ahead_of_the_browser(log, monkeypatch):
    monkeypatch.setattr("slidedp.widgets.dashboard.UNSEEN_SECONDS", DEADLINE)
    monkeypatch.setattr("slidedp.widgets.dashboard.REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("slidedp.widgets.dashboard.IDLE", 0.0)
    run = FakeRun(log(ranks=1))

    async def follow():
        dashboard = Dashboard(run)
        view = dashboard._view
        add_step(run.log, 0)
        await shown(dashboard, 1)
        for step in range(1, 5):
            add_step(run.log, step)
            for _ in range(100):  # turns of the loop, of which a refresh that does not wait takes one
                await asyncio.sleep(0)
            assert dashboard.step == step and view.drawn < view.shown
            view.drawn = view.shown
            await shown(dashboard, step + 1)
        run.end("finished")
        view.drawn = view.shown
        await asyncio.wait_for(dashboard._task, DEADLINE)

    asyncio.run(follow())


def test_the_stop_button_stops_the_run_once(log):
    run = FakeRun(log())
    dashboard = Dashboard(run)
    assert not dashboard._stop.disabled
    dashboard._stop.click()
    dashboard.update()
    assert run.stops == 1
    assert dashboard._stop.disabled


def test_the_save_button_asks_for_a_checkpoint_and_waits_for_none(log):
    run = FakeRun(log())
    dashboard = Dashboard(run)
    dashboard._save.click()
    dashboard._save.click()
    assert run.saves == [False, False]
    event = {"kind": "checkpoint", "step": 7, "path": None, "error": "disk <full>"}
    run.log.add(event)
    dashboard.update()
    assert "checkpoint of step 7: failed: disk &lt;full&gt;" in dashboard._saved.value
    run.log.add(event | {"step": 8, "path": "/run/step-8", "error": None})
    dashboard.update()
    assert "checkpoint of step 8: /run/step-8" in dashboard._saved.value
    run.end("finished")
    dashboard.update()
    assert dashboard._save.disabled


def test_a_fault_of_the_dashboard_is_shown_under_it(log):
    run = FakeRun(log())

    async def follow():
        dashboard = Dashboard(run)
        run.log.add({"kind": "step", "step": 0, "rank": 0})
        run.log.add({"kind": "step", "step": 0, "rank": 1})
        await asyncio.wait_for(dashboard._task, DEADLINE)
        return dashboard._error.value

    assert "KeyError" in asyncio.run(follow())


def test_long_runs_send_few_points_that_stand_for_all_steps(log):
    steps = 5000
    run = FakeRun(log(ranks=1, steps=steps))
    for step in range(steps):
        add_step(run.log, step)
    dashboard = Dashboard(run)
    loss = curve(dashboard, "loss")
    assert len(loss.x) <= MAX_POINTS
    stride = loss.x[1] - loss.x[0]
    assert loss.x[-1] > steps - 1 - stride
    every = [5.0 - 0.01 * step for step in range(len(loss.x) * stride)]
    np.testing.assert_allclose(loss.y, np.array(every).reshape(-1, stride).mean(axis=1), atol=1e-4)
    assert dashboard.step == steps and "loss -44.990" in dashboard.summary()


def test_a_refresh_does_not_grow_with_the_run(log, monkeypatch):
    """It reads each event once, and never scans the log."""
    run = FakeRun(log(ranks=1))
    dashboard = Dashboard(run)
    monkeypatch.setattr(run.log, "events", lambda kind: pytest.fail(f"scanned for {kind}"))
    for step in range(5):
        add_step(run.log, step)
        dashboard.update()
    assert dashboard.step == 5


def test_one_rank_can_be_looked_at(log):
    run = FakeRun(log(ranks=2))
    for step in range(3):
        add_step(run.log, step)
    run.log.events_since(0)[-1]["wait_seconds"]["delivery"] = 0.25  # rank 1 in the last step
    dashboard = Dashboard(run)
    assert list(curve(dashboard, "wait delivery").y) == [10, 10, 30]
    dashboard._choice.value = 1  # what a click does
    assert dashboard.rank == 1
    assert list(curve(dashboard, "wait delivery").y) == [10, 10, 50]
    assert curve(dashboard, "loss 0").opacity < curve(dashboard, "loss 1").opacity
    by_rank = curve(dashboard, "recent delivery")
    assert list(by_rank.y) == ["rank 0", "rank 1"]
    np.testing.assert_allclose(by_rank.x, [10, 70 / 3])


def test_a_switch_is_marked_and_named(log):
    run = FakeRun(log())
    before = run.log.description["config"]["layout"]
    add_step(run.log, 0)
    for rank in (0, 1):
        layout = before | {"window": 5, "chunk_bytes": 2**16, "activations": ["keep", "offload", "keep"]}
        run.log.add({"kind": "layout", "rank": rank, "step": 1, "layout": layout})
    dashboard = Dashboard(run)
    assert {shape.x0 for shape in dashboard.figure.layout.shapes} == {0.5}
    assert "step 1: chunk_bytes 64 KiB, window 5, activations 2 keep, 1 offload" in dashboard._layouts.value
    shapes = len(dashboard.figure.layout.shapes)
    dashboard.update()
    assert len(dashboard.figure.layout.shapes) == shapes


def test_predicted_steps_utilization_and_memory(log):
    run = FakeRun(log(ranks=1, device="cuda"))
    for step in range(3):
        add_step(run.log, step)
    dashboard = Dashboard(run, predicted=0.4)
    assert list(curve(dashboard, "predicted").y) == [0.4, 0.4]
    dashboard.predicted = 0.3
    assert list(curve(dashboard, "predicted").y) == [0.3, 0.3]
    assert list(curve(dashboard, "seconds").y)[1:] == [0.5, 0.5]
    # 100 targets in 0.5 s at 6e6 FLOPs each: a millionth of an H200's 989 TFLOP/s.
    assert "0 TFLOPS/GPU, MFU 0%" in dashboard.summary()
    assert run.log.metrics()["mfu"].iloc[-1] == pytest.approx(200 * 6e6 / 989e12)
    text = dashboard._memory.value
    for part in ("window: 1.0 GiB", "workspace (estimate): 0.5 GiB", "FP32 master weights: 4.0 GiB"):
        assert part in text
    assert "measured 1.0 GiB" in text  # GPU, peak
    assert "measured 4.5 GiB" in text  # shared segments and what the rank has alone
    run.log.add({"kind": "plan", "memory": run.log.description["memory"] | {"device": {"window": 2**32}}})
    dashboard.update()
    assert "window: 4.0 GiB" in dashboard._memory.value and "does not fit" in dashboard._memory.value


def switch(log, step, layout):
    """What the ranks say when they have switched."""
    for rank in range(log.description["ranks"]):
        event = {"kind": "layout", "rank": rank, "step": step, "layout": dataclasses.asdict(layout)}
        log.add(json.loads(json.dumps(event)))


def test_a_run_resumed_elsewhere_counts_from_the_step_it_started_with(log):
    run = FakeRun(log(first_step=90))
    dashboard = Dashboard(run, predicted=0.4)
    assert dashboard.step == dashboard._bar.value == run.log.steps_done == 90
    for step in (90, 91, 92):
        add_step(run.log, step)
    dashboard.update()
    assert dashboard.step == dashboard._bar.value == run.log.steps_done == 93
    assert dashboard.summary().startswith("running · step 93 of 100")
    assert dashboard.summary().endswith("0:04 left")  # 7 steps at 0.6 s
    assert list(curve(dashboard, "predicted").x) == [90, 92]
    for step in range(93, 100):
        add_step(run.log, step)
    run.end("finished")
    assert Dashboard(run.log)._bar.value == 100


def test_the_prediction_follows_the_layout(log):
    run = FakeRun(log())
    for step in range(4):
        add_step(run.log, step)
    dashboard = Dashboard(run, lambda layout: 0.1 * layout.window)
    assert dashboard.predicted == pytest.approx(0.3)
    switch(run.log, 4, Layout(window=5, activations=("keep", "offload")))
    for step in range(4, 8):
        add_step(run.log, step)
    dashboard.update()
    assert dashboard.predicted == 0.5
    for shown in (dashboard, Dashboard(run.log, lambda layout: 0.1 * layout.window)):
        predicted = curve(shown, "predicted")
        np.testing.assert_allclose(predicted.x, [0, 3.5, 3.5, 7])
        np.testing.assert_allclose(predicted.y, [0.3, 0.3, 0.5, 0.5])


def test_one_number_predicts_the_first_layout_only(log):
    run = FakeRun(log())
    dashboard = Dashboard(run, 0.3)
    add_step(run.log, 0)
    switch(run.log, 1, Layout(window=5))
    add_step(run.log, 1)
    dashboard.update()
    level = curve(dashboard, "predicted").y
    np.testing.assert_array_equal(level, [0.3, 0.3, np.nan, np.nan])
    dashboard.predicted = 0.5  # someone knows better
    np.testing.assert_array_equal(curve(dashboard, "predicted").y, [0.3, 0.3, 0.5, 0.5])


def test_the_figure_names_its_units(log):
    figure = Dashboard(log()).figure
    titles = [axis.title.text for axis in figure.select_yaxes()]
    waits = "% of compute's time"
    assert titles == ["nats per target token", "target tokens/s", "s", "GiB", waits, None]
    assert [axis.title.text for axis in figure.select_xaxes()] == ["step"] * 5 + [waits]
