"""The log of a run: what is in memory, what is on disk, and that both tell the same."""

import resource

import pandas as pd
import pytest

from slidedp import open_run
from slidedp.events import DETAILED
from slidedp.telemetry import RunLog

RANKS = 2
DESCRIPTION = {"ranks": RANKS, "first_step": 0}


def add_steps(log: RunLog, steps: range) -> None:
    """Sampled ones, whose spans name them."""
    for step in steps:
        for rank in range(RANKS):
            spans = [("compute", f"layers.{step}", "forward", float(rank), step + 1.0)]
            log.add({"kind": "step", "step": step, "rank": rank, "began": 10.0, "timeline": spans})
        log.add({"kind": "update", "step": step, "spans": [(f"layers.{step}", 10.0 + step, 11.0 + step)]})


def wanted(step: int) -> pd.DataFrame:
    name = f"layers.{step}"
    rows = [(rank, "compute", name, "forward", float(rank), step + 1.0) for rank in range(RANKS)]
    rows.append((-1, "update", name, "update", step * 1e3, (step + 1) * 1e3))
    return pd.DataFrame(rows, columns=["rank", "track", "unit", "phase", "start", "end"])


def in_memory(log: RunLog) -> int:
    """Events whose spans are."""
    return sum(not isinstance(event["timeline"], int) for event in log.events("step")) + sum(
        not isinstance(event["spans"], int) for event in log.events("update")
    )


def test_spans_of_early_steps_are_read_from_the_file(tmp_path):
    log = RunLog.create(tmp_path, DESCRIPTION)
    add_steps(log, range(50))
    for each in (log, open_run(tmp_path)):
        assert in_memory(each) == DETAILED
        assert each.sampled_steps() == list(range(50)) and each.steps_done == 50
        for step in (0, 1, 27, 28, 29, 49):
            pd.testing.assert_frame_equal(each.timeline(step), wanted(step))
    log.close()
    resumed = RunLog.resume(tmp_path, DESCRIPTION, 30)
    assert resumed.sampled_steps() == list(range(30))
    add_steps(resumed, range(30, 60))
    for each in (resumed, open_run(tmp_path)):
        for step in (0, 29, 30, 59):
            pd.testing.assert_frame_equal(each.timeline(step), wanted(step))
    resumed.close()


def test_a_log_without_a_file_keeps_all():
    log = RunLog("nowhere", DESCRIPTION)
    add_steps(log, range(50))
    assert in_memory(log) == 50 * (RANKS + 1)


@pytest.fixture
def room():
    """Sets how long files may get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (soft if nbytes is None else nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_events_wait_for_a_disk_that_is_full(tmp_path, capsys, room):
    log = RunLog.create(tmp_path, {})
    events = [{"kind": "mark", "what": str(i)} for i in range(4)]
    log.add(events[0])
    room((tmp_path / "events.jsonl").stat().st_size + 9)
    log.add(events[1])
    log.add(events[2])
    room(None)
    assert "File too large" in log.trouble and len(log.events("mark")) == 3
    log.add(events[3])
    assert log.trouble is None
    log.close()
    assert open_run(tmp_path).events("mark") == events
    assert capsys.readouterr().err.count("events wait in memory") == 1


def test_spans_that_the_disk_has_not_taken_stay_in_memory(tmp_path, room):
    log = RunLog.create(tmp_path, DESCRIPTION)
    add_steps(log, range(2))
    room((tmp_path / "events.jsonl").stat().st_size + 9)
    add_steps(log, range(2, 50))
    room(None)
    assert in_memory(log) >= 47 * (RANKS + 1)
    for step in (0, 2, 20):
        pd.testing.assert_frame_equal(log.timeline(step), wanted(step))
    add_steps(log, range(50, 51))
    assert in_memory(log) == DETAILED
    for step in (0, 2, 20, 50):
        pd.testing.assert_frame_equal(log.timeline(step), wanted(step))
    log.close()
