"""Measured steps are kept as they were, and predicted by today's model."""

import dataclasses
import json
from pathlib import Path

import pytest

from slidedp import ConfigError, Layout
from slidedp.bench.measured import CHOICE, Measured, accuracy, predictions, read, write
from slidedp.policy.machines import H200
from slidedp.policy.step_time import predict
from tests.policy.test_step_time import qwen3_8b

DOCS = Path(__file__).parents[2] / "docs" / "step_time.json"


def recorded(layouts: list[Layout]) -> Measured:
    """Two GPUs that took 3 s under the first layout, and a second less under each that follows."""
    w = qwen3_8b(2, 16)
    rates = H200.rates(w)
    rows = [
        {
            "layout": dataclasses.asdict(layout),
            "note": CHOICE if i else "",
            "measured_seconds": 3.0 - i,
        }
        for i, layout in enumerate(layouts)
    ]
    faster = rates.faster("compute", 2.0).to_dict()
    return Measured("A", 8, 64, "GPU", "today", dataclasses.asdict(w), rates.to_dict(), faster, rows)


def test_what_is_read_is_predicted_from_its_own_rates(tmp_path):
    layouts = [Layout(activations=("keep", "offload") * 18), Layout(schedule="in_backward")]
    write(tmp_path / "file.json", [recorded(layouts)])
    (found,) = read(tmp_path / "file.json")
    w = qwen3_8b(2, 16)
    for row, layout in zip(predictions(found), layouts, strict=True):
        assert row["probed_seconds"] == pytest.approx(predict(w, H200.rates(w), layout).step_seconds)
        assert row["predicted_seconds"] == pytest.approx(
            predict(w, H200.rates(w).faster("compute", 2.0), layout).step_seconds
        )
    assert accuracy([*predictions(found)])["choice_behind_best"] == 0


@pytest.mark.parametrize("text", ["", "[]]", json.dumps([{"model": "A"}]), json.dumps([1])])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ConfigError, match=r"file.json: not what slidedp.bench.predicted writes"):
        read(tmp_path / "file.json")


def test_the_model_says_what_steps_took_on_a_gpu():
    """Of every workload in the docs."""
    for found in read(DOCS):
        told = accuracy([*predictions(found)])
        assert told["layouts"] >= 30
        assert told["median_error"] < 0.06 and told["worst_error"] < 0.15
        assert told["rank_correlation"] > 0.95
        assert not told["choice_behind_best"] > 0.03  # where it was measured
