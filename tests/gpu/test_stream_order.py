"""Whatever takes long on a GPU's streams, the result stays that of the plain loop."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from slidedp import Config, RunFailed, processes
from tests.gpu.delays import spawned
from tests.gpu.test_gpu_parity import agree, with_clipping

pytestmark = pytest.mark.gpu
RANKS = min(2, torch.cuda.device_count())


@pytest.fixture
def here(config: Config, tmp_path: Path) -> Config:
    return replace(with_clipping(config, None, RANKS), run_folder=str(tmp_path / "run"))


@pytest.mark.parametrize("seed", range(2))
def test_delays_on_streams_change_nothing(here, monkeypatch, seed):
    monkeypatch.setattr(processes, "_enter", partial(spawned, seed=seed))
    agree(here)


@pytest.mark.parametrize(
    "blind",
    [
        "compute",
        "to_device",
        "to_host",
        pytest.param("collective", marks=pytest.mark.multigpu),  # one rank has no sums to wait with
        "update",
        "state_in",
        "state_out",
    ],
)
def test_a_stream_that_waits_for_nothing_is_found(here, monkeypatch, blind):
    monkeypatch.setattr(processes, "_enter", partial(spawned, blind=blind))
    with pytest.raises((AssertionError, RunFailed)):
        agree(here)
