"""The same training as an independent trainer's: transformers' own Trainer, on a CPU in FP32."""

from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from slidedp import Layout, Optimizer
from slidedp.data.order import Order
from slidedp.data.samples import Samples
from tests.pool import pool
from tests.stream.cases import config as case

STEPS = 20


class Recording(Trainer):
    """Takes the samples in the order given, and keeps each loss (the log rounds it)."""

    def _get_train_sampler(self, dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, *arguments, **named):
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(float(loss.detach()))
        return loss


def trainer_losses(config, folder):
    samples = Samples(config.data.path)
    order = Order(samples.count, config.batch_size, config.seed)
    ids, targets = samples.rows(np.concatenate([order.step(step) for step in range(config.steps)]))
    # transformers shifts the labels itself: one token more, which nothing looks at.
    ids = torch.hstack([ids, torch.zeros_like(ids[:, :1])])
    labels = torch.hstack([torch.full_like(ids[:, :1], -100), targets])
    settings = config.optimizer
    trainer = Recording(
        model=AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=config.batch_size,
            max_steps=config.steps,
            learning_rate=settings.lr,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_epsilon=settings.eps,
            weight_decay=settings.weight_decay,
            max_grad_norm=settings.clip_norm,
            lr_scheduler_type=settings.lr_schedule,
            optim="adamw_torch",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": i, "labels": t} for i, t in zip(ids, labels, strict=True)],
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


def test_the_losses_are_those_of_transformers_trainer(tmp_path):
    config = replace(
        case(Layout(chunk_bytes=6000), steps=STEPS),
        optimizer=Optimizer(lr=3e-3, eps=1e-6, clip_norm=0.8, lr_schedule="cosine", weight_decay=0.1),
    )
    ours, theirs = pool(2).run(config).losses(), trainer_losses(config, tmp_path)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    assert ours[-1] < ours[0] - 0.1
