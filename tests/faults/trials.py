"""How often a fault is injected: a few times by `make test`, many times by `make soak`."""

from typing import Any

import pytest


def trials(ci: int, soak: int) -> list[Any]:
    """Seeds 0 to `soak`, of which all from `ci` on are for the soak alone."""
    long = (pytest.mark.slow, pytest.mark.soak)
    return [pytest.param(seed, marks=long if seed >= ci else ()) for seed in range(soak)]
