"""Losses of a run are those of transformers' own Trainer with the same settings and data."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from slidedp.data.order import Order
from slidedp.data.samples import Samples
from tests.pool import pool
from tests.stream.cases import ROUTES, config, some_layout

STEPS, CLIP = 20, 1.4


class RecordingTrainer(Trainer):
    """Takes samples in their order; its logs round losses, so it keeps them."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.losses = []

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    def compute_loss(self, *arguments, **settings):
        loss = super().compute_loss(*arguments, **settings)
        self.losses.append(float(loss.detach()))
        return loss


def rows_for_trainer(run):
    """Every sample in the order of the run. transformers shifts labels itself: a token more a row."""
    samples = Samples(run.data.path)
    order = Order(samples.count, run.batch_size, run.seed)
    input_ids, labels = samples.rows(np.concatenate([order.step(t) for t in range(run.steps)]))
    last = labels[:, -1:].clamp(min=0)
    none = torch.full_like(last, -100)
    columns = torch.cat([input_ids, last], 1), torch.cat([none, labels], 1)
    return [{"input_ids": i, "labels": row} for i, row in zip(*columns, strict=True)]


@pytest.mark.filterwarnings("ignore")  # of the library, about settings that it sets itself
def test_losses_are_those_of_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    run = config(some_layout(Random(5), ROUTES[4]), steps=STEPS, clip_norm=CLIP)
    settings = replace(run.optimizer, warmup_steps=0)  # the Trainer's warm-up starts at a rate of 0
    run, accumulated = replace(run, optimizer=settings), 3
    trainer = RecordingTrainer(
        AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32),
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=run.batch_size // accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=STEPS,
            learning_rate=settings.lr,
            lr_scheduler_type=settings.lr_schedule,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_epsilon=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=CLIP,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=rows_for_trainer(run),
    )
    trainer.train()
    expected = np.reshape(trainer.losses, (STEPS, accumulated)).sum(1)  # each is its part of the mean
    found = pool(2).run(run).losses()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.01
