"""What the tests of the worker share."""

import pytest

from tests.host.bench import Bench


@pytest.fixture
def bench():
    made = []

    def make(*arguments, **named):
        made.append(Bench(*arguments, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()
