"""Gradients and losses that are no numbers, or stand out: nothing is spoiled, and the user is told."""

import math

import numpy as np
import pytest

from slidedp import Layout, Optimizer, RunFailed, launch
from slidedp.host.worker import MAX_SKIPPED
from slidedp.losses import FEWEST, WINDOW, LossWatch
from tests.launching import DEADLINE, nothing_left, small_config
from tests.pool import pool
from tests.stream.cases import ROUTES, config

STEPS = 4


def run(layout, steps, *names):
    """A run whose gradients are clipped to almost nothing in no step, and spoiled by `names`."""
    case = config(layout, steps=steps, clip_norm=0.5)
    return pool(2).run(case, patch="tests.stream.patches.apply", patch_arguments={"names": names})


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(delivery=ROUTES[i][0], reduction=ROUTES[i][1], chunk_bytes=6000) for i in (0, 4, 8)),
        Layout(gpu_updates=5, chunk_bytes=6000),
        Layout(gpu_updates=6, resident_updates=4, chunk_bytes=6000),
    ],
    ids=lambda at: f"{at.delivery}-{at.reduction}-{at.gpu_updates}",
)
def test_one_ranks_nan_skips_the_step_on_all_ranks_and_changes_no_bit(layout):
    spoiled = run(layout, 2, "nan in rank 1")
    assert [e["skipped"] for e in spoiled.updates] == [False, True]
    assert spoiled.updates[1]["not_finite"] == spoiled.units[3].name
    assert "not_finite" not in spoiled.updates[0]
    # Two steps of which the second is skipped are one step. Rates differ only where a schedule knows
    # the number of steps: still in the warm-up, they do not.
    clean = run(layout, 1)
    for master, wanted in zip(spoiled.masters, clean.masters, strict=True):
        assert master.numpy().tobytes() == wanted.numpy().tobytes()


def test_steps_go_on_after_a_skipped_one():
    spoiled = run(Layout(), STEPS, "nan in rank 1")
    assert [e["skipped"] for e in spoiled.updates] == [False, True, False, False]
    assert all(np.isfinite(spoiled.losses()))
    assert all(np.isfinite(master.numpy()).all() for master in spoiled.masters)


def test_too_many_in_a_row_stop_the_run_and_keep_its_state(tmp_path):
    """A rate that sends the weights out of range in one step."""
    settings = small_config(tmp_path, run_folder=str(tmp_path / "run"), optimizer=Optimizer(lr=1e30))
    with nothing_left(), launch(settings) as run:
        with pytest.raises(
            RunFailed, match=r"steps in a row, up to step \d+, were not finite, first in "
        ) as failure:
            run.wait(DEADLINE)
        message = str(failure.value)
        assert "\n" not in message and "lower optimizer.lr" in message
        metrics = run.metrics()
        assert metrics["skipped"].sum() >= MAX_SKIPPED
        assert metrics["skipped"].iloc[-MAX_SKIPPED:].all()
        assert run.log.events("diverged")[0]["unit"] in message
        run.export(tmp_path / "out")  # the state of the last step that was applied


@pytest.mark.slow
def test_in_backward_a_loss_that_is_no_number_stops_the_run_at_once(tmp_path):
    settings = small_config(
        tmp_path,
        run_folder=str(tmp_path / "run"),
        optimizer=Optimizer(lr=1e30, clip_norm=None),
        layout=Layout(schedule="in_backward"),
    )
    with nothing_left(), launch(settings) as run, pytest.raises(RunFailed, match="the state is spoiled"):
        run.wait(DEADLINE)
    assert not (tmp_path / "run" / "checkpoints").exists()


# --- the loss -------------------------------------------------------------------------------------


def told(losses, ranks=2):
    """What a watch says about each of these global losses; targets differ between the ranks."""
    watch, said = LossWatch(ranks), []
    for step, loss in enumerate(losses):
        events = [
            {"rank": r, "step": step, "loss_sum": loss * (r + 1), "targets": r + 1} for r in range(ranks)
        ]
        answers = [watch.add(event) for event in events]
        assert answers[:-1] == [None] * (ranks - 1)
        said.append(answers[-1])
    return said


def test_a_spike_is_reported_with_what_it_stands_out_from():
    random = np.random.default_rng(0)
    losses = list(4.0 + 0.1 * random.standard_normal(2 * WINDOW))
    losses[70] = 6.0
    said = told(losses)
    assert [i for i, event in enumerate(said) if event] == [70]
    assert said[70]["kind"] == "loss_spike" and said[70]["loss"] == pytest.approx(6.0)
    assert said[70]["median"] == pytest.approx(4.0, abs=0.05)


@pytest.mark.parametrize(
    "losses",
    [
        [9.0] * (FEWEST - 1) + [90.0],  # too early to tell
        list(np.linspace(9.0, 2.0, 200)),
        [2.0] * 100 + [2.1] * 10,  # no spread at all, and no more than a share of the median
    ],
    ids=["start", "descent", "plateau"],
)
def test_what_is_no_spike(losses):
    assert told(losses) == [None] * len(losses)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_an_event_of_its_own(value):
    said = told([3.0] * 30 + [value] + [3.0] * 5)
    assert said[30]["kind"] == "loss_not_finite" and said[30]["step"] == 30
    assert [e for e in said if e] == [said[30]]
