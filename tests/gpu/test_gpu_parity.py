"""Every route on real GPUs against the plain loop; one run visits them all through live switches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slidedp.config import Config
from slidedp.layout import DELIVERIES, REDUCTIONS, TRANSPORTS, Layout
from slidedp.session import launch
from tests import reference

MIXES = (
    "recompute",
    "keep",
    "offload",
    "spill",
    ("keep", "spill", "recompute", "offload", "spill"),
)


def layouts(schedule: str) -> list[Layout]:
    """Every route once, the other settings as different as nine layouts can be."""
    return [
        Layout(
            delivery=delivery,
            reduction=reduction,
            chunk_bytes=(16384, 2**20, 4096)[(d + r) % 3],
            window=1 + (3 * d + r) % 5,
            gradient_slots=1 + (d + 2 * r) % 3,
            activations=MIXES[(3 * d + r) % 5],
            mlp_tile_tokens=(0, 20, 0, 1000)[(3 * d + r) % 4],
            vocabulary_pieces=(1, 3, 4)[(2 * d + r + 2) % 3],
            schedule=schedule,
            gpu_updates=(2, 4, 7)[d] if reduction == "gpu" else 0,
            resident_updates=(0, 2, 5)[d] if reduction == "gpu" else 0,
            update_slots=(1, 2, 5)[d],
            transport=TRANSPORTS[(d + r) % 2],
        )
        for d, delivery in enumerate(DELIVERIES)
        for r, reduction in enumerate(REDUCTIONS)
    ]


def visit_all(config: Config) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters of a run that changes its layout every few steps."""
    with launch(config) as run:
        pending = layouts("in_forward" if config.optimizer.clip_norm else "in_backward")
        switched = 0
        while run.running:
            run.wait(0.02)
            if pending and run.log.steps_done > switched:
                run.set_layout(pending.pop())
                switched = run.log.steps_done + 2
        run.wait()
        assert run._state is not None
        parameters = {}
        for unit in run._state.units:
            master = torch.from_numpy(run._state.unit(unit).master)
            parameters |= {p.name: p.view(master).clone() for p in unit.parameters}
        return list(run.metrics()["loss"]), parameters


def agree(config: Config) -> None:
    losses, parameters = visit_all(config)
    expected = reference.train(config)
    np.testing.assert_allclose(losses, expected.losses, atol=1e-4)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(parameters[name], value, atol=1e-4, rtol=0)


CLIPPING = pytest.mark.parametrize("clip_norm", [0.5, None])


def with_clipping(config: Config, clip_norm: float | None, ranks: int) -> Config:
    return replace(
        config,
        ranks=ranks,
        optimizer=replace(config.optimizer, clip_norm=clip_norm),
        run_folder=f"{config.run_folder}-{ranks}-{clip_norm}",
    )


@CLIPPING
@pytest.mark.gpu
def test_one_gpu(config: Config, clip_norm: float | None) -> None:
    agree(with_clipping(config, clip_norm, 1))


@pytest.mark.gpu
def test_backward_that_ends_early(config: Config) -> None:
    """The embedding and two layers are not trained."""
    optimizer = replace(config.optimizer, freeze=("embed", "layers.[01]"))
    agree(replace(config, ranks=1, optimizer=optimizer, run_folder=f"{config.run_folder}-frozen"))


@CLIPPING
@pytest.mark.multigpu
def test_two_gpus(config: Config, clip_norm: float | None) -> None:
    agree(with_clipping(config, clip_norm, 2))
