"""A step is reported while the next one runs, since a step of a long sequence takes minutes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slidedp.layout import Layout
from slidedp.metrics import MetricsQueue
from tests.pool import pool, replaced
from tests.stream.cases import config

STEPS = 4


@contextmanager
def behind(index: int | None) -> Iterator[list[int]]:
    """A rank whose GPU never has run a step when all of it is enqueued. Yields how many steps were not
    reported yet when the run was over."""
    left: list[int] = []

    def counting(flush: Callable[[MetricsQueue], None]) -> Callable[[MetricsQueue], None]:
        def call(queue: MetricsQueue) -> None:
            left.append(len(queue._pending))
            flush(queue)

        return call

    def add(queue: MetricsQueue, *step: Any) -> None:
        queue._pending.append(step)

    with (
        replaced(MetricsQueue, "add", add),
        replaced(MetricsQueue, "flush", counting(MetricsQueue.flush)),
    ):
        yield left


def test_a_step_is_reported_before_the_next_one_ends():
    outcome = pool(2).run(config(Layout(), steps=STEPS), patch=f"{__name__}.behind")
    assert outcome.recorded[:2] == [[1], [1]]  # the last step has none after it
    for rank in range(2):
        assert [event["step"] for event in outcome.steps if event["rank"] == rank] == list(range(STEPS))
