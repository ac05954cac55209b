"""Skips the tests that this machine has no hardware for, and shares its cores among those that run."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings


def pytest_configure() -> None:
    """Of several pytest-xdist workers, each computes with its share of the cores. An example of hypothesis
    takes its time: on a busy machine that is no fault."""
    settings.register_profile("any time", deadline=None)
    settings.load_profile("any time")
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        import torch

        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed = {"gpu": 1, "multigpu": 2}
    marked = [(item, n) for item in items for name, n in needed.items() if item.get_closest_marker(name)]
    if not marked:
        return
    import torch  # here, since most selections never need it

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item, n in marked:
        if found < n:
            reason = f"needs {n} CUDA device{'s' * (n > 1)}, found {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread: small operations are slower with two."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_sessionfinish() -> None:
    """Ends the processes of tests/pool.py, if any test has started some."""
    module = sys.modules.get("tests.pool")
    if module is not None:
        module.close_pools()
