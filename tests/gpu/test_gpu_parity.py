"""Every route on real GPUs against the plain loop; one run visits them all through live switches."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from slidedp.config import Config, Data, Optimizer
from slidedp.data.samples import write_samples
from slidedp.layout import DELIVERIES, REDUCTIONS, TRANSPORTS, Layout
from slidedp.session import launch
from tests import reference
from tests.pool import small_model

MIXES = (
    "recompute",
    "keep",
    "offload",
    "spill",
    ("keep", "spill", "recompute", "offload", "spill"),
)


def layouts(schedule: str) -> list[Layout]:
    cases = product(DELIVERIES, REDUCTIONS)
    return [
        Layout(
            delivery=delivery,
            reduction=reduction,
            chunk_bytes=(4096, 16384, 2**20)[i % 3],
            window=1 + i % 5,
            gradient_slots=1 + i % 3,
            activations=MIXES[i % 5],
            mlp_tile_tokens=(0, 20, 0, 1000)[i % 4],
            vocabulary_pieces=(1, 3, 4)[i % 3],
            schedule=schedule,
            gpu_updates=(2, 4, 7)[i % 3] if reduction == "gpu" else 0,
            resident_updates=(0, 3, 7)[i % 3] if reduction == "gpu" else 0,
            update_slots=1 + 2 * (i % 3),
            transport=TRANSPORTS[i % 2],
        )
        for i, (delivery, reduction) in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("gpu")
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 97, (40, 17), dtype=np.int32)
    labels = np.roll(ids, -1, 1)
    labels[generator.random(labels.shape) < np.linspace(0, 0.9, 40)[:, None]] = -100
    (folder / "samples").mkdir()
    write_samples(folder / "samples", ids, labels)
    return Config(
        model=small_model(folder / "model", tied=False),
        data=Data(path=str(folder / "samples")),
        sequence_length=17,
        batch_size=8,
        steps=45,
        device="cuda",
        compute_dtype="float32",
        compile=False,
        optimizer=Optimizer(lr=1e-3, eps=1e-6, clip_norm=0.5),
        run_folder=str(folder / "run"),
    )


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


@CLIPPING
@pytest.mark.multigpu
def test_two_gpus(config: Config, clip_norm: float | None) -> None:
    agree(with_clipping(config, clip_norm, 2))
