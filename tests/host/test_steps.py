"""How the worker lets a step begin: on, stop, another layout, a recording."""

import pytest

from slidedp.host.messages import Begin, Profile, SetLayout, Started, Stop
from tests.host.bench import RANKS, layout


def finish(made, step):
    made.land_all(step, made.gradients())
    return [[m for m in made.said(rank) if isinstance(m, Begin)] for rank in range(RANKS)]


def asked_to_switch(bench):
    """A worker before step 0, the layout that it is asked for, and that one's landing."""
    made, new = bench(layout()), layout("cpu")
    landing = made.new_landing(new)
    made.worker.command(SetLayout(new, landing.handle))
    return made, new, landing


def test_the_first_start_answers_for_the_next_step(bench):
    made = bench(layout())
    made.worker.handle(Started(0, 3))
    assert [made.said(rank) for rank in range(RANKS)] == [[Begin(1)]] * RANKS
    made.worker.handle(Started(0, 5))
    assert made.said() == []


def test_all_ranks_stop_at_the_same_step(bench):
    made = bench(layout())
    made.worker.handle(Started(0, 3))  # the answer for step 1 is out: on with it
    made.worker.command(Stop())
    made.worker.handle(Started(0, 5))
    assert finish(made, 0) == [[Begin(1)]] * RANKS
    made.start(1)
    assert finish(made, 1) == [[Begin(2, stop=True)]] * RANKS


def test_a_new_layout_begins_when_the_old_one_has_published_everything(bench):
    made, new = bench(layout()), layout("cpu", "in_forward", 8192)
    landing = made.new_landing(new)
    made.start(0)
    made.worker.command(SetLayout(new, landing.handle))
    assert finish(made, 0) == [[Begin(1)]] * RANKS  # was promised before
    made.start(1)
    assert made.said() == []  # no answer yet: the layout changes after step 1
    assert finish(made, 1) == [[Begin(2, False, new, landing.handle)]] * RANKS
    gradients = made.gradients()
    made.start(2)
    state = made.snapshot()
    made.land_all(2, gradients)
    assert made.snapshot() != state and made.reports[-1]["step"] == 2
    landing.close()


@pytest.mark.parametrize("stop_first", [True, False])
def test_a_stop_is_never_overruled_by_a_layout(bench, stop_first):
    made, new = bench(layout()), layout("cpu")
    landing = made.new_landing(new)
    commands = [Stop(), SetLayout(new, landing.handle)]
    for command in commands if stop_first else commands[::-1]:
        made.worker.command(command)
    made.start(0)
    assert finish(made, 0) == [[Begin(1, stop=True)]] * RANKS
    landing.close()


def test_a_stop_after_the_layout_was_accepted_wins(bench):
    made, _, landing = asked_to_switch(bench)
    made.start(0)  # step 0 ends with a switch
    made.worker.command(Stop())
    assert finish(made, 0) == [[Begin(1, stop=True)]] * RANKS
    landing.close()


def test_a_recording_is_asked_for_once_and_beside_a_new_layout(bench):
    made, new, landing = asked_to_switch(bench)
    made.worker.command(Profile(2, 0))
    made.start(0)
    assert finish(made, 0) == [[Begin(1, False, new, landing.handle, profile=2)]] * RANKS
    made.start(1)
    assert made.said() == [Begin(2)]
    for step in (1, 2):
        finish(made, step)
        made.start(step + 1)
    finish(made, 3)
    spans = {r["step"]: "spans" in r for r in made.reports if r["kind"] == "update"}
    assert spans == {0: False, 1: True, 2: True, 3: False}
    landing.close()


def test_a_recording_waits_for_its_step(bench):
    made = bench(layout())
    made.worker.command(Profile(1, start=2))
    for step in range(3):
        made.start(step)
        assert made.said() == [Begin(step + 1, profile=int(step + 1 == 2))]
        finish(made, step)
