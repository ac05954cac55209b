"""The dashboard's state and figure, without a browser."""

import asyncio
import math

import numpy as np
import pytest

from slidedp import Run, open_run
from slidedp.telemetry import RunLog
from slidedp.widgets import Dashboard
from slidedp.widgets.dashboard import MAX_POINTS


class FakeRun(Run):
    """A run without processes."""

    def __init__(self, log):
        self.log, self.status, self.failure, self.stops = log, "running", None, 0

    @property
    def running(self):
        return self.status == "running"

    def stop(self):
        self.stops += 1

    def end(self, status, failure=None):
        self.log.add({"kind": "end", "status": status, "failure": failure, "time": 0.0})
        self.status = status


@pytest.fixture
def log(tmp_path):
    """Makes the log of a run that has reported no step yet."""

    def make(ranks=2, steps=100, device="cpu"):
        description = {
            "ranks": ranks,
            "config": {"steps": steps, "device": device},
            "flops_per_token": 6e6,
            "parameters": 10**6,
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
                "step_seconds": 0.5 + 0.1 * rank if step else None,
                "wait_seconds": {"delivery": 0.05} | ({"update": 0.1} if step >= 2 else {}),
                "gpu_peak_bytes": (rank + 1) * 2**30 if gpu else 0,
                "anonymous_bytes": 2**29,
                "began": 0.0,
            }
        )


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


def test_it_follows_a_run_to_its_end(log):
    run = FakeRun(log(device="cuda"))

    async def follow():
        dashboard = Dashboard(run)
        assert dashboard.step == 0 and "step 0 of 100" in dashboard.summary()
        add_step(run.log, 0)
        add_step(run.log, 1, only=1)  # rank 0 has not reported yet: the step does not count
        await asyncio.sleep(0.5)
        assert dashboard.step == 1
        add_step(run.log, 1, only=0)
        add_step(run.log, 2)
        await asyncio.sleep(0.5)
        assert dashboard.step == 3
        assert dashboard.summary().endswith("0:58 left")  # 97 steps at 0.6 s
        assert list(curve(dashboard, "memory 1").y) == [2.0, 2.0, 2.0]
        assert list(curve(dashboard, "wait update").y) == [0.0, 0.0, 20.0]
        run.end("failed", "rank 1 failed:\n<lost>")
        await asyncio.wait_for(dashboard._task, 5)
        return dashboard

    dashboard = asyncio.run(follow())
    assert (dashboard.status, dashboard.failure) == ("failed", "rank 1 failed:\n<lost>")
    assert "&lt;lost&gt;" in dashboard._error.value
    assert dashboard._stop.disabled


def test_the_stop_button_stops_the_run_once(log):
    run = FakeRun(log())
    dashboard = Dashboard(run)
    assert not dashboard._stop.disabled
    dashboard._stop.click()
    dashboard.update()
    assert run.stops == 1
    assert dashboard._stop.disabled


def test_a_fault_of_the_dashboard_is_shown_under_it(log):
    run = FakeRun(log())

    async def follow():
        dashboard = Dashboard(run)
        run.log.add({"kind": "step", "step": 0, "rank": 0})
        run.log.add({"kind": "step", "step": 0, "rank": 1})
        await asyncio.wait_for(dashboard._task, 5)
        return dashboard._error.value

    assert "KeyError" in asyncio.run(follow())


def test_long_runs_send_few_points(log):
    run = FakeRun(log(ranks=1, steps=5000))
    for step in range(5000):
        add_step(run.log, step)
    dashboard = Dashboard(run)
    loss = curve(dashboard, "loss")
    assert len(loss.x) <= MAX_POINTS
    assert (loss.x[0], loss.x[-1]) == (0, 4999)
    assert len(curve(dashboard, "memory 0").x) == 250
    assert math.isnan(curve(dashboard, "speed").y[0])


def test_the_figure_names_its_units(log):
    figure = Dashboard(log()).figure
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles == ["nats per target token", "target tokens/s", "GiB", "% of compute's time"]
    assert {axis.title.text for axis in figure.select_xaxes()} == {"step"}
