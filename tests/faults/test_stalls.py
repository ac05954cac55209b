"""A process that is held, or a run in which nothing moves: named with its place, and over when it goes on."""

import os
import signal
import time

from slidedp import launch, stalls
from slidedp.stalls import BEHIND, LONGEST, SILENT, StallWatch
from tests.launching import nothing_left, small_config, until


def test_a_held_process_is_reported_with_its_place_and_the_run_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(stalls, "SILENT", 2.5)
    with nothing_left(), launch(small_config(tmp_path, run_folder=str(tmp_path / "run"))) as run:
        for i, (index, name) in enumerate([(1, "rank 1"), (2, "the optimizer worker")]):
            # Longer than between two signs of life, so that one of them tells of a step.
            began = time.monotonic() if run.log.steps_done else None
            while began is None or time.monotonic() - began < 2:
                assert run.running, run.failure
                began = began or (time.monotonic() if run.log.steps_done else None)
                time.sleep(0.01)
            pid = [process.pid for process in run._processes][index]
            os.kill(pid, signal.SIGSTOP)
            until(lambda i=i: len(run.log.events("stall")) > i or not run.running, "a stall")
            os.kill(pid, signal.SIGCONT)
            done = run.log.steps_done
            stall = run.log.events("stall")[i]
            assert stall["process"] == name
            assert f"{name} is stalled: no sign of life for" in stall["text"]
            assert "(stopped by a signal); last seen: " in stall["text"] and "in step" in stall["text"]
            until(lambda i=i: len(run.log.events("stall_over")) > i, "its end")
            until(lambda done=done: run.log.steps_done > done + 5, "more steps")
            assert run.trouble is None and run.running
        assert len(run.log.events("stall")) == 2  # the others only wait, and are not accused
        run.stop()
        run.wait(60)
        assert run.status == "stopped"
    assert "slidedp: rank 1 goes on after" in capfd.readouterr().err


# --- the rules, on a clock of our own -------------------------------------------------------------


def watch():
    made = StallWatch(["rank 0", "rank 1", "the optimizer worker"], [os.getpid()] * 3)
    for index in range(3):
        made.alive(index, {"compute": (4, f"layers.{index}", "forward")}, 0.0)
    return made


def texts(events):
    return [(event["kind"], event["process"]) for event in events]


def asked(made, end, start=0.0, talking=(0, 1, 2), stepping=False):
    """All that a watch says from `start` to `end`, asked and told once a second."""
    events, now = [], start
    while now < end:
        now += 1.0
        for index in talking:
            made.alive(index, {"compute": (4, f"layers.{index}", "forward")}, now)
        if stepping:
            made.stepped(now)
        events += made.check(now)
    return events


def test_silence_is_reported_once_and_its_end_once():
    made = watch()
    assert asked(made, SILENT, talking=(0, 2)) == []
    events = asked(made, 5 * SILENT, SILENT, talking=(0, 2))
    assert texts(events) == [("stall", "rank 1")]
    assert "compute in step 4, forward layers.1" in events[0]["text"]
    events = asked(made, 6 * SILENT, 5 * SILENT)
    assert texts(events) == [("stall_over", "rank 1")]


def test_a_run_without_steps_names_every_place():
    made = watch()
    assert asked(made, 20.0, stepping=True) == []
    events = asked(made, 22.0 + max(BEHIND, LONGEST), 20.0)
    assert texts(events) == [("stall", "the run")]
    assert all(f"forward layers.{i}" in events[0]["text"] for i in range(3))
    made.stepped(23.0 + BEHIND)
    assert texts(asked(made, 24.0 + BEHIND, 23.0 + BEHIND)) == [("stall_over", "the run")]


def test_slow_steps_are_no_stall():
    made = watch()
    for step in range(5):
        made.stepped(1.0 * BEHIND * step)
    assert asked(made, 4 * BEHIND + (LONGEST - 1) * BEHIND, 4 * BEHIND) == []


def test_a_long_evaluation_is_no_stall():
    """No step ends meanwhile, and units pass by."""
    made = watch()
    assert asked(made, 20.0, stepping=True) == []
    for second in range(10 * int(BEHIND)):
        for index in range(3):
            made.alive(index, {"compute": (4, f"layers.{second % 7}", "forward")}, 20.0 + second)
        assert made.check(20.0 + second) == []
    events = asked(
        made, 30.0 + 10 * BEHIND + max(BEHIND, LONGEST), 20.0 + 10 * BEHIND
    )  # and now nothing does
    assert texts(events) == [("stall", "the run")]


def test_a_long_save_at_the_end_is_no_stall():
    """Ranks have ended, and the worker still writes."""
    made = watch()
    assert asked(made, 20.0, stepping=True) == []
    made.ended(0)
    made.ended(1)
    assert asked(made, 20.0 + 10 * BEHIND, 20.0, talking=(2,)) == []


def test_first_steps_and_a_new_layout_may_take_their_time():
    made = watch()
    assert asked(made, 10 * BEHIND) == []
    assert asked(made, 10 * BEHIND + 20, 10 * BEHIND, stepping=True) == []
    made.restarted()
    assert asked(made, 20 * BEHIND, 10 * BEHIND + 20) == []


def test_a_held_launcher_accuses_nobody():
    made = watch()
    assert asked(made, 20.0, stepping=True) == []
    assert made.check(20.0 + 10 * BEHIND) == []
    assert asked(made, 30.0 + 10 * BEHIND, 20.0 + 10 * BEHIND) == []


def test_a_process_that_has_ended_is_not_silent():
    made = watch()
    made.ended(1)
    assert asked(made, 3 * SILENT, talking=(0, 2)) == []
