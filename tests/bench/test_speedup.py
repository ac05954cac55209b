"""What the policy gains over a fixed one: never less than nothing, most where the host binds."""

import dataclasses
import json

import pytest

from slidedp import Layout
from slidedp.bench import speedup
from slidedp.bench.measured import CHOICE, write
from slidedp.bench.predicted import sweep
from slidedp.bench.speedup import FIXED, measured, predicted
from slidedp.policy.machines import H200, WORKSTATION
from tests.bench.test_measured import recorded


def test_host_bound_work_gains_most_and_nothing_loses():
    small, large = (predicted("0.6B", batch, H200)["speed-up"] for batch in (2, 64))
    assert small > 1.3 * large >= 1.3
    assert predicted("0.6B", 16, WORKSTATION)["speed-up"] >= 1


def test_measured_workloads_need_both_layouts():
    """And the sweep that is measured has the fixed one in it."""
    assert all(FIXED in sweep(4, ranks, compiled) for ranks in (1, 2) for compiled in (True, False))
    chosen = Layout(schedule="in_backward", activations="keep")

    def row(model: str, layout: Layout, note: str, seconds: float) -> dict:
        fields = json.loads(json.dumps(dataclasses.asdict(layout)))
        found = {"model": model, "batch": 8, "ranks": 2, "layout": fields, "note": note}
        return found | {"measured_seconds": seconds, "binding": "compute"}

    rows = [row("A", FIXED, "", 3.0), row("A", chosen, CHOICE, 2.0), row("A", Layout(), "", 9.0)]
    rows += [row("B", chosen, CHOICE, 1.0)]
    (found,) = measured(rows)
    assert found["model"] == "A" and found["speed-up"] == pytest.approx(1.5) and "keep" in found["layout"]


def test_a_file_of_measurements_is_taken_along(tmp_path, capsys, monkeypatch):
    file = tmp_path / "measured.json"
    write(file, [recorded([FIXED, Layout(schedule="in_backward", activations="keep")])])
    monkeypatch.setattr(speedup, "MACHINES", ())
    monkeypatch.setattr("sys.argv", ["speedup", "8B", "--json", str(file)])
    speedup.main()
    assert "measured, 2 GPUs" in capsys.readouterr().out
