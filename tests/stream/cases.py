"""Small models, samples and configs that the streaming tests share."""

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from slidedp.config import Config, Data, Optimizer
from slidedp.data.samples import write_samples
from slidedp.layout import ACTIVATIONS, DELIVERIES, LANDINGS, REDUCTIONS, TRANSPORTS, Layout
from tests import reference
from tests.pool import small_model

ROUTES = tuple(product(DELIVERIES, REDUCTIONS))
LAYERS = 5
LENGTH = 8
CHUNKS = (4096, 6000, 9000, 2**20)
"""Bytes: from three or four chunks a unit to one."""


@cache
def _root() -> Path:
    root = tempfile.mkdtemp(prefix="slidedp-tests-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root)


@cache
def model(kind: str = "qwen3", tied: bool = True) -> str:
    """Folder of a small random model."""
    return small_model(_root() / f"{kind}-{tied}", tied=tied, kind=kind)


@cache
def samples() -> str:
    """Folder of 24 samples. The share of positions that are targets differs from row to row, from
    none at all to every one, so the ranks' numbers of targets differ too."""
    random = np.random.default_rng(7)
    tokens = random.integers(0, 97, (24, LENGTH + 1), dtype=np.int32)
    labels = tokens[:, 1:].copy()
    density = np.resize([1.0, 0.0, 0.1, 0.5, 0.9], 24)[:, None]
    labels[random.random(labels.shape) >= density] = -100
    folder = _root() / "samples"
    write_samples(folder, tokens[:, :-1].copy(), labels)
    return str(folder)


def config(
    layout: Layout,
    *,
    kind: str = "qwen3",
    tied: bool = True,
    steps: int = 30,
    clip_norm: float | None = None,
    **settings: Any,
) -> Config:
    """A run on a global batch of six rows, which one, two and three ranks can split.

    eps is 1e-6 and not AdamW's 1e-8: where a gradient is nearly zero, AdamW divides FP32 rounding
    noise by a root of the same size, and a full step of size lr in either direction is the result.
    """
    return Config(
        model=model(kind, tied),
        data=Data(path=samples()),
        sequence_length=LENGTH,
        batch_size=6,
        steps=steps,
        optimizer=Optimizer(lr=1e-3, eps=1e-6, clip_norm=clip_norm, lr_schedule="cosine", warmup_steps=3),
        layout=layout,
        **settings,
    )


SAME_BITS = {"mlp_tile_tokens": 0, "vocabulary_pieces": 1}
"""Of a layout that adds numbers up as every other one does."""


def some_layout(random: Random, route: tuple[str, str], **fixed: Any) -> Layout:
    """A layout of this route; what is not fixed is drawn."""
    settings: dict[str, Any] = {
        "chunk_bytes": random.choice(CHUNKS),
        "window": random.randint(1, LAYERS + 1),
        "gradient_slots": random.randint(1, 3),
        "activations": tuple(random.choice(ACTIVATIONS) for _ in range(LAYERS)),
        "schedule": "in_forward",
        "landing": random.choice(LANDINGS),
        "transport": random.choice(TRANSPORTS),
    }
    if route[1] == "gpu":
        there = random.randint(0, LAYERS + 2)
        resident = random.choice((0, random.randint(0, there), there))
        settings |= {"gpu_updates": there, "resident_updates": resident, "update_slots": random.randint(1, 9)}
    # A rank's tokens are 48 or fewer: one at a time, tiles with a rest, one for all.
    settings["mlp_tile_tokens"] = random.choice((0, 0, 1, 7, 16, 100))
    settings["vocabulary_pieces"] = random.choice((1, 1, 2, 3, 7))
    return Layout(delivery=route[0], reduction=route[1], **settings | fixed)


_references: dict[tuple, SimpleNamespace] = {}


def expected(config: Config) -> SimpleNamespace:
    """The reference's result, which no layout may change."""
    key = (config.model, config.data, config.steps, config.optimizer, config.router_aux_loss_coef)
    if key not in _references:
        _references[key] = reference.train(replace(config, layout=Layout(schedule="in_forward")))
    return _references[key]
