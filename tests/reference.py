"""The plain loop that every route must agree with: one process, one model, torch.optim.AdamW."""

import tempfile
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from slidedp.config import Config
from slidedp.data.order import Order, split
from slidedp.data.samples import Samples


def train(config: Config) -> SimpleNamespace:
    """Losses (global mean), norms before clipping and final parameters of `config` in FP32 on the CPU."""
    # Beside a pool's processes, a second thread only spins for the first.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train(config)
    finally:
        torch.set_num_threads(threads)


def _unit(name: str) -> str:
    """The unit of a parameter."""
    if "embed_tokens" in name:
        return "embed"
    return ".".join(name.split(".")[1:3]) if ".layers." in name else "head"


def _train(config: Config) -> SimpleNamespace:
    model = AutoModelForCausalLM.from_pretrained(
        config.model,
        dtype=torch.float32,
        experts_implementation="eager",  # if it has some: one after another
    )
    model.train()
    settings = config.optimizer
    groups = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatch(_unit(name), pattern) for pattern in settings.freeze))
        decay, factor = settings.weight_decay if parameter.dim() >= 2 else 0.0, 1.0
        for group in [group for group in settings.groups if fnmatch(name, group.pattern)][:1]:
            factor = group.lr_factor
            decay = decay if group.weight_decay is None else group.weight_decay
        groups.append({"params": [parameter], "weight_decay": decay, "factor": factor})
    groups = [group for group in groups if group["params"][0].requires_grad]
    parameters = [group["params"][0] for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    samples = Samples(config.data.path)
    learnt, _ = split(samples.count, config.data.eval_fraction, config.seed)
    order = Order(len(learnt), config.batch_size, config.seed)
    losses, norms, balances = [], [], []
    for step in range(config.steps):
        rows = learnt[order.step(step)]
        input_ids, labels = samples.rows(rows)
        logits = logits_of(model, input_ids, samples.positions(rows))
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        if config.router_aux_loss_coef:
            # A pass is a part of the rows that one rank has: with several passes, for one rank only.
            parts = zip(*(t.chunk(config.gradient_accumulation) for t in (input_ids, labels)), strict=True)
            balance = sum(balance_of(model, *part) for part in parts) / config.gradient_accumulation
            (config.router_aux_loss_coef * balance).backward()
            balances.append(float(balance.detach()))
        limit = float("inf") if settings.clip_norm is None else settings.clip_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, limit)))
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * settings.lr_at(step, config.steps)
        optimizer.step()
        losses.append(float(loss.detach()))
    return SimpleNamespace(losses=losses, norms=norms, balances=balances, parameters=_stored(model))


def balance_of(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """transformers' load-balancing loss; what comes behind a row's last target is padding."""
    mask = torch.zeros_like(labels)
    for row, targets in enumerate(labels != -100):
        mask[row, : max((i + 1 for i, target in enumerate(targets) if target), default=0)] = 1
    logits = model(input_ids=input_ids, output_router_logits=True).router_logits
    if not mask.any():  # transformers divides by no tokens here
        return logits[0].sum() * 0
    assert len(logits) == model.config.num_hidden_layers
    return load_balancing_loss_func(
        logits, model.config.num_experts, model.config.num_experts_per_tok, mask if 0 in mask else None
    )


def _stored(model: Any) -> dict[str, torch.Tensor]:
    """Parameters by the names that a checkpoint has for them."""
    if not hasattr(model.config, "num_experts"):
        return {name: parameter.detach() for name, parameter in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:  # experts, one by one
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def logits_of(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Logits of whole sequences, or of their documents one by one."""
    if position_ids is None:
        return model(input_ids=input_ids).logits
    rows = []
    for ids, positions in zip(input_ids, position_ids, strict=True):
        sizes = torch.diff(torch.nonzero(positions == 0)[:, 0], append=torch.tensor([len(ids)])).tolist()
        rows.append(torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(sizes)]))
    return torch.stack(rows)
