"""Layouts compared on a live run, and the figure of that."""

import pytest

from slidedp import ConfigError, Layout, launch
from slidedp.compare import SETTLE, compare_layouts
from slidedp.widgets import phases_figure
from tests.launching import nothing_left, small_config

STEPS = 12


def test_each_layout_is_measured_over_its_own_steps(tmp_path):
    layouts = {"first": Layout(), "other": Layout(delivery="replicated", reduction="cpu", activations="keep")}
    with nothing_left(), launch(small_config(tmp_path, run_folder=str(tmp_path / "run"))) as run:
        table = compare_layouts(run, layouts, STEPS)
        with pytest.raises(ConfigError, match="at least 3"):
            compare_layouts(run, layouts, SETTLE)
        run.stop()
        run.wait()
        with pytest.raises(ConfigError, match="stopped"):
            compare_layouts(run, layouts)
    assert [*table.index] == [*layouts]
    switched = [event["step"] for event in run.log.events("layout") if event["rank"] == 0]
    assert table["first_step"]["other"] == switched[0] >= table["first_step"]["first"] + STEPS
    metrics, ranks = run.metrics(), run.log.ranks()
    for name, row in table.iterrows():
        own = range(int(row["first_step"]) + SETTLE, int(row["first_step"]) + STEPS)
        assert row["step_seconds"] == metrics["step_seconds"].loc[[*own]].median(), name
        assert int(row["first_step"]) <= row["sampled_step"] < own.stop
        assert len(run.log.timeline(int(row["sampled_step"])))
        # Compute's time is all that it worked and waited; medians of parts need not add up exactly.
        mine = ranks[ranks["step"].isin(own)]
        waits = [column for column in table if column.startswith("wait_")]
        assert row["compute_seconds"] + row[waits].sum() <= 1.5 * mine["compute_seconds"].max()
    assert table["device_gib"]["other"] > table["device_gib"]["first"] > 0  # it keeps activations
    figure = phases_figure(table)
    bars = {trace.name: list(trace.x) for trace in figure.data}
    assert bars["compute"] == pytest.approx(list(1e3 * table["compute_seconds"]))
    assert bars["whole step"] == pytest.approx(list(1e3 * table["step_seconds"]))
    assert figure.layout.xaxis.title.text == "ms per step (median)"
