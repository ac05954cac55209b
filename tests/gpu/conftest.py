"""What the GPU tests train."""

import numpy as np
import pytest

from slidedp.config import Config, Data, Optimizer
from slidedp.data.samples import write_samples
from tests.pool import small_model


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
