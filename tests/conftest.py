"""Skips the tests that this machine has no hardware for."""

import sys

import pytest


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


def pytest_sessionfinish() -> None:
    """Ends the processes of tests/pool.py, if any test has started some."""
    module = sys.modules.get("tests.pool")
    if module is not None:
        module.close_pools()
