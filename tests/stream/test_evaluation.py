"""Evaluation between steps: the loss of the weights that are due, and training goes on as without it."""

from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from slidedp.config import Data
from slidedp.data.order import split
from slidedp.data.samples import Samples
from slidedp.layout import Layout
from slidedp.model.loss import summed_cross_entropy
from tests.pool import pool
from tests.reference import logits_of
from tests.stream.cases import ROUTES, config, samples, some_layout
from tests.stream.test_documents import bounded as bounded  # a fixture
from tests.stream.test_parity import assert_parity

EVERY, STEPS = 3, 8
FRACTION = 0.4
"""Of 24 samples: two batches, the second not full, and one rank has fewer rows than the other."""


def held_out_loss(run, parameters=None):
    """The model's own mean loss on the held-out samples, and how many targets they have."""
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    if parameters is not None:
        model.load_state_dict(parameters, strict=False)
    known = Samples(run.data.path)
    rows = split(known.count, FRACTION, run.seed)[1]
    input_ids, labels = known.rows(rows)
    with torch.no_grad():
        logits = logits_of(model, input_ids, known.positions(rows))
    targets = int((labels != -100).sum())
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return float(total) / targets, targets


def assert_evaluated(outcome, run, ranks):
    """Every rank has reported every evaluation, and the first and last losses are the model's own."""
    found = {}
    for event in outcome.evaluations:
        loss, targets, reports = found.get(event["step"], (0.0, 0, 0))
        found[event["step"]] = (loss + event["loss_sum"], targets + event["targets"], reports + 1)
    assert {step: reports for step, (_, _, reports) in found.items()} == dict.fromkeys([0, 3, 6, 8], ranks)
    for step, parameters in ((0, None), (STEPS, outcome.parameters())):
        loss, targets = held_out_loss(run, parameters)
        assert found[step][1] == targets
        assert found[step][0] / targets == pytest.approx(loss, abs=1e-5)
    assert found[0][0] != found[3][0] != found[6][0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_held_out_loss_is_the_models_and_training_is_unchanged(ranks, tied):
    random = Random(ranks + 2 * tied)
    schedule = "in_backward" if tied else "in_forward"
    layout = some_layout(random, ROUTES[3 * ranks + tied], schedule=schedule)
    run = config(layout, tied=tied, steps=STEPS, eval_every=EVERY)
    run = replace(run, data=Data(path=samples(), eval_fraction=FRACTION))
    outcome = pool(ranks).run(run)
    assert_evaluated(outcome, run, ranks)
    assert_parity(outcome, run)


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_slots_that_were_updated_in_place_are_not_taken_twice(schedule):
    """An evaluation uses the slots up in which the next step would have found its first units."""
    layout = Layout(window=2, gpu_updates=3, schedule=schedule)
    run = config(layout, tied=schedule == "in_forward", steps=STEPS, eval_every=EVERY)
    run = replace(run, data=Data(path=samples(), eval_fraction=FRACTION))
    outcome = pool(2).run(run)
    assert_evaluated(outcome, run, 2)
    assert_parity(outcome, run)


def test_documents_are_separate_in_evaluation_too(bounded):
    run = config(Layout(activations="offload"), steps=STEPS, eval_every=EVERY)
    run = replace(run, data=Data(path=bounded, eval_fraction=FRACTION))
    outcome = pool(2).run(run)
    assert_evaluated(outcome, run, 2)
    assert_parity(outcome, run)


def test_the_summed_loss_is_torchs(monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 8), torch.randn(2**18, 8)  # pieces of 16 tokens
    targets = torch.randint(0, 2**18, (70,))
    targets[::3] = -100
    expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    torch.testing.assert_close(summed_cross_entropy(hidden, weight, targets), expected, rtol=1e-5, atol=0)
