"""TraceView over a recording of a real run, without a browser."""

import pytest

from slidedp import launch, trace
from slidedp.policy.machines import H200
from slidedp.policy.step_time import predict
from slidedp.policy.workload import workload_of
from slidedp.widgets import TraceView
from tests.launching import DEADLINE, small_config, until


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run over, recorded by the view's own button."""
    folder = tmp_path_factory.mktemp("view")
    with launch(small_config(folder, run_folder=str(folder / "run"))) as run:
        view = TraceView(run)
        assert "run.profile" in view._body.children[0].value
        view._record_button.click()
        view._record_button.click()  # one too many
        assert "under way" in view._error.value
        until(lambda: trace.recordings(run.log) or not run.running, "a recording")
        view.refresh()
        assert view.step == view.recording.steps[-1] and not view._error.value
        run.stop()
        run.wait(DEADLINE)
        view.refresh()
        assert view._record_button.disabled
    return run


def bars(figure, phase):
    return next(b for b in figure.data if b.name == phase)


def test_the_timeline_shows_all_ranks_and_zooming_in_shows_more(run):
    view = TraceView(run.folder)
    step = view.recording.steps[0]
    view.step = step
    spans = trace.timeline(view.recording, step)
    for phase in ("forward", "backward", "deliver", "reduce", "update"):
        assert len(bars(view.figure, phase).x) == (spans["phase"] == phase).sum()
    labels = view.figure.layout.yaxis.categoryarray
    assert {"rank 0 compute", "rank 1 GPU to host", "AdamW"} <= set(labels)
    events = trace.events(view.recording, 0, step)
    shown = len(bars(view.figure, "operators").x)
    first = events.iloc[len(events) // 2]
    view._plot.x_range = [first["start"] - 1e-4, first["end"] + 1e-4]
    assert first["name"] in bars(view.figure, "operators").customdata
    view._plot.x_range = [spans["start"].min(), spans["end"].max()]
    assert len(bars(view.figure, "operators").x) in range(shown - 2, shown + 3) and shown < len(events)


def test_the_prediction_lies_under_every_rank(run):
    layout = run.config.layout
    workload = workload_of(run.plan)
    prediction = predict(workload, H200.rates(workload), layout, timeline=True)
    view = TraceView(run.folder, prediction.timeline)
    forward = sum(span.phase == "forward" for span in prediction.timeline)
    predicted = bars(view.figure, "forward, predicted")
    assert len(predicted.x) == 2 * forward and set(predicted.y) == {"rank 0 compute", "rank 1 compute"}


def test_tables_and_memory(run):
    view = TraceView(run.folder)
    view.view = "operators"
    table = view._body.children[0]
    assert view.figure is None and "aten::mm" in table.value and "self_cpu_ms" in table.value
    view._view.value = "kernels"  # what a click does
    assert view.view == "kernels" and "no GPU" in view._body.children[0].value
    view.rank = 1
    view.view = "memory"
    memory = trace.memory(view.recording, 1, view.step)
    assert max(view.figure.data[0].y) == pytest.approx(memory["allocated"].max() / 2**20)
    assert view.figure.layout.yaxis.title.text == "MiB in tensors"
    view.rank = 9
    assert view._error.value
    view.record()
    assert "run that goes on" in view._error.value
