"""A recording of 100 MB a rank opens, holds little memory and draws little at a time."""

import gzip
import time
from pathlib import Path

import pytest
from transformers import Qwen3Config

from slidedp import launch, trace
from slidedp.widgets import TraceView
from tests.launching import VOCABULARY, small_config, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYERS = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two ranks through many layers: what makes a trace long is operators, not their size."""
    folder = tmp_path_factory.mktemp("large")
    model = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True,
    )  # fmt: skip
    with launch(small_config(folder, model=model, run_folder=str(folder / "run"))) as run:
        run.profile(steps=2, start=3)
        until(lambda: len(run.log.events("trace")) == 2 or not run.running, "a recording", 300)
        print("seconds that writing took:", [e["seconds"] for e in run.log.events("trace")])
    return run.folder


def resident_bytes():
    """Private memory of this process."""
    rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * next(int(size) for name, size, *_ in rows if name == "Pss_Anon:")


def drawn(view):
    """Bars of operators on show."""
    return next(bars for bars in view.figure.data if bars.name == "operators")


def test_a_hundred_megabytes_a_rank_open_and_let_go_of_what_was_parsed(folder, record_property):
    path = min((folder / "traces").iterdir())
    raw = gzip.decompress(path.read_bytes())
    size, events = len(raw), raw.count(b'"ph": "X"')
    del raw
    assert size > 100e6
    before, begun = resident_bytes(), time.monotonic()
    view = TraceView(folder)
    seconds = time.monotonic() - begun
    view.rank = 1
    view.view = "memory"
    held = resident_bytes() - before
    record_property("seconds", seconds)
    print(f"{size / 1e6:.0f} MB opened in {seconds:.1f} s; {held / 1e6:.0f} MB held for both ranks")
    assert not view._error.value
    assert len(view.recording.trace(0).events) == events > 200_000
    assert held < 1.5 * size  # parsed, one rank is four times as large as its file


def test_only_what_can_be_seen_is_sent_to_the_browser(folder):
    view = TraceView(folder)
    events = trace.events(view.recording, 0, view.step)
    assert len(events) > 10_000 and len(drawn(view).x) < 2_000
    assert len(view.figure.to_json()) < 1e6
    # Of the part that one zooms into, everything is there.
    begin, end = events["start"].iloc[5_000], events["end"].iloc[5_020]
    view._plot.x_range = [begin, end]
    visible = events[(events["end"] >= begin) & (events["start"] <= end)]
    wide = visible[visible["end"] - visible["start"] >= (end - begin) / 1200]
    assert list(drawn(view).customdata) == list(wide["name"]) and len(wide) > 10


def test_the_operator_table_counts_them_all(folder):
    recording = trace.load(folder)
    table = trace.operators(recording).set_index("operator")
    raw = recording.trace(0).events
    multiplied = raw[(raw["category"] == "cpu_op") & (raw["name"] == "aten::mm")]
    assert table.loc["aten::mm", "calls"] == len(multiplied) > 2 * 7 * LAYERS
    assert table.loc["aten::mm", "total_cpu_ms"] == pytest.approx(multiplied["dur"].sum() / 1e3, rel=1e-3)
