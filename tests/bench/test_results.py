"""The table of what `slidedp bench --json` wrote."""

import json

import pytest

from slidedp.bench.results import COLUMNS, load_results
from slidedp.errors import ConfigError

FILE = {
    "size": "8B", "ranks": 2, "length": 1024, "date": "2026-11-29", "gpu": "NVIDIA H200", "torch": "2.11.0",
    "command": "slidedp bench --preset 8b",
    "measured": [
        {
            "system": "SlideDP", "batch": 24, "steps": 10, "step_seconds": 2.0, "tokens_per_second": 24576.0,
            "tflops_per_gpu": 570.0, "gpu_peak_gib": 120.0, "host_gib": 130.0, "wait_seconds": {},
            "layout": {
                "delivery": "sharded", "reduction": "gpu", "schedule": "in_backward", "gpu_updates": 6,
                "resident_updates": 2, "activations": ["keep", "keep", "partial"], "partial_budget": 0.5,
            },
        },
        {
            "system": "FSDP2", "batch": 12, "activations": "none", "step_seconds": 1.2,
            "tokens_per_second": 20480.0, "tflops_per_gpu": 475.0, "gpu_peak_gib": 116.0,
        },
        {"system": "FSDP2", "batch": 16, "activations": "0.5", "error": "out of memory"},
    ],
}  # fmt: skip


def test_every_measurement_is_a_row(tmp_path):
    (tmp_path / "8b.json").write_text(json.dumps(FILE))
    table = load_results(tmp_path)
    assert list(table) == COLUMNS and len(table) == 3
    assert set(table["model"]) == {"Qwen3-8B"} and set(table["ranks"]) == {2}
    assert list(table["how"]) == [
        "sharded+gpu in_backward 2 keep+1 partial 0.5, 6 on GPU, 2 resident",
        "all kept",
        "0.5 of activations kept",
    ]
    assert table["tokens_per_second"].to_list()[:2] == [24576.0, 20480.0]
    assert table["error"].to_list()[2] == "out of memory" and table["error"].isna().sum() == 2


def test_no_file_is_an_empty_table_and_a_wrong_one_is_named(tmp_path):
    assert load_results(tmp_path / "none").empty and list(load_results(tmp_path)) == COLUMNS
    (tmp_path / "other.json").write_text('{"size": "8B"}')
    with pytest.raises(ConfigError, match=r"other\.json: not what `slidedp bench --json` writes"):
        load_results(tmp_path)
