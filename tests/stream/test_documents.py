"""Documents that share a sequence train as if each were alone."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from slidedp.config import Data
from slidedp.data.samples import new_samples
from slidedp.model.documents import document_ends, same_document
from tests.pool import pool
from tests.stream.cases import LENGTH, ROUTES, config, expected, some_layout
from tests.stream.test_parity import assert_parity

POSITIONS = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [0, 0, 0, 0, 0, 0, 0, 0],
    [0, 1, 2, 0, 1, 2, 3, 4],
    [0, 1, 2, 3, 4, 5, 6, 0],
    [0, 0, 1, 0, 1, 2, 0, 1],
]


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """Folder of 24 samples with one to eight documents each, and some labels that are no targets."""
    folder = tmp_path_factory.mktemp("bounded")
    random = np.random.default_rng(3)
    input_ids, labels, position_ids = new_samples(folder, 24, LENGTH, positions=True)
    input_ids[:] = random.integers(0, 97, input_ids.shape)
    labels[:] = np.where(random.random(labels.shape) < 0.7, random.integers(0, 97, labels.shape), -100)
    position_ids[:] = np.resize(POSITIONS, position_ids.shape)
    return str(folder)


@pytest.mark.parametrize(("ranks", "kind", "seed"), [(1, "qwen3", 0), (2, "llama", 1)])
def test_training_is_that_of_separate_documents(bounded, ranks, kind, seed):
    random = Random(seed)
    layout = some_layout(random, ROUTES[seed])
    run = config(layout, kind=kind, tied=bool(seed % 2), clip_norm=1.4, steps=8)
    run = replace(run, data=Data(path=bounded))
    outcome = pool(ranks).run(run)
    assert_parity(outcome, run)
    # Before any update, what differs is attention alone.
    assert outcome.losses()[0] == pytest.approx(expected(run).losses[0], abs=1e-6)


def test_a_token_sees_its_own_document_up_to_itself():
    seen = same_document(torch.tensor(POSITIONS))[:, 0]
    for row, positions in enumerate(POSITIONS):
        for i, position in enumerate(positions):
            assert seen[row, i].nonzero()[:, 0].tolist() == list(range(i - position, i + 1))


def test_ends_are_those_of_all_documents_and_few_in_length():
    sizes = [8, *[1] * 8, 3, 5, 7, 1, 1, 2, 3, 2]
    ends = document_ends(torch.tensor(POSITIONS)).tolist()
    assert ends == [*np.cumsum([0, *sizes]), *[40] * (32 - len(sizes))]
    assert document_ends(torch.tensor(POSITIONS[:1])).tolist() == [0, 8]
    assert document_ends(torch.tensor(POSITIONS[1:2])).tolist() == list(range(9))
