"""PyTorch's FSDP2 on the same model, tokens, loss and optimizer: everything stays on the GPUs, sharded.

Layers are compiled one by one and sharded one by one, with BF16 compute and reduction over FP32 weights
and moments, as its own documentation recommends; the head's loss is SlideDP's, chunked.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig

from slidedp.bench.peers import results_of
from slidedp.bench.table import WARM_UP, speed
from slidedp.config import DTYPES, Optimizer
from slidedp.data.order import Order
from slidedp.data.samples import Samples
from slidedp.model.families import flops_per_token, skeleton
from slidedp.model.loss import IGNORED, linear_cross_entropy, softmax_gradient


class Case(NamedTuple):
    """One measured setting."""

    batch: int
    """Sequences per rank."""
    activations: str
    """`none`: no checkpointing; `full`: every layer is recomputed; a number: the partitioner's budget."""


class _Setup(NamedTuple):
    config: PretrainedConfig
    weights: str | None
    samples: str
    cases: list[Case]
    steps: int
    ranks: int
    device: str
    dtype: str
    compile: bool
    optimizer: Optimizer
    rendezvous: str


def run_fsdp2(
    config: PretrainedConfig,
    samples: str,
    cases: list[Case],
    *,
    steps: int,
    ranks: int,
    weights: str | None = None,
    device: str = "cuda",
    dtype: str = "bfloat16",
    compiled: bool = True,
    optimizer: Optimizer | None = None,
) -> Iterator[dict[str, Any]]:
    """Trains each case for `steps` steps and yields its measurement, or `{"error": ...}` where it does not
    fit. `samples` is a folder of prepared samples, `weights` a Hugging Face folder to start from."""
    with tempfile.TemporaryDirectory() as folder:
        setup = _Setup(
            config, weights, samples, cases, steps, ranks, device, dtype, compiled,
            optimizer or Optimizer(lr=1e-4, clip_norm=None), f"{folder}/ranks",
        )  # fmt: skip
        yield from results_of(_rank, (setup,), ranks)


def _rank(rank: int, setup: _Setup, results: Connection) -> None:
    cuda = setup.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    else:  # as SlideDP's ranks do: threads that outnumber the cores wait for each other spinning
        torch.set_num_threads(max(1, torch.get_num_threads() // setup.ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{setup.rendezvous}",
        rank=rank,
        world_size=setup.ranks,
        device_id=torch.device("cuda", rank) if cuda else None,
    )
    for mode in dict.fromkeys(case.activations for case in setup.cases):
        cases = sorted(case for case in setup.cases if case.activations == mode)
        for result in _measure(rank, setup, mode, cases):
            if rank == 0:
                results.send(result)
    dist.barrier()
    # At once: when gloo's threads outlive the interpreter, C++ ends the process with SIGABRT.
    os._exit(0)


class _Loss(torch.autograd.Function):
    """Mean cross-entropy of a linear head, its gradients computed on the way forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Any, weight: Any, targets: Any, scale: float, softmax: Any) -> Any:
        gradient = torch.zeros_like(weight, dtype=torch.float32)
        loss, upstream = linear_cross_entropy(hidden, weight, targets, scale, gradient, softmax)
        ctx.save_for_backward(upstream, gradient.to(weight.dtype))
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        return hidden, weight, None, None, None


class Trained(torch.nn.Module):
    """A model and its loss in one module, as wrappers want it."""

    def __init__(self, model: Any, softmax: Any) -> None:
        super().__init__()
        self.model, self.softmax = model, softmax

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        hidden = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        weight = self.model.lm_head.weight
        return _Loss.apply(hidden.flatten(0, 1), weight, labels.flatten(), scale, self.softmax)


def _sharded(setup: _Setup, mode: str) -> tuple[Any, torch.optim.Optimizer]:
    torch._dynamo.reset()
    budget = float(mode) if mode not in ("none", "full") else 1.0
    functorch_config.activation_memory_budget = budget
    if setup.weights is not None:
        model = AutoModelForCausalLM.from_pretrained(setup.weights, dtype=torch.float32)
    else:
        model = skeleton(setup.config).float()
    precision = DTYPES[setup.dtype]
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=precision)
    for i, layer in enumerate(model.model.layers):
        if mode == "full":
            layer = model.model.layers[i] = checkpoint_wrapper(layer)
        if setup.compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    softmax = torch.compile(softmax_gradient, dynamic=False) if setup.compile else softmax_gradient
    trained = Trained(model, softmax)
    fully_shard(trained, mp_policy=policy)
    if setup.weights is None:
        trained.to_empty(device=setup.device)
        for parameter in trained.parameters():
            local = parameter.data.to_local()  # type: ignore[attr-defined]
            local.normal_(0, 0.02) if parameter.dim() > 1 else local.fill_(1.0)
        with torch.device(setup.device):
            fresh = type(model.model.rotary_emb)(model.config)
        model.model.rotary_emb = fresh
    else:
        trained.to(setup.device)
    settings = setup.optimizer
    parameters = list(trained.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=setup.device == "cuda"
    )
    return trained, optimizer


def _measure(rank: int, setup: _Setup, mode: str, cases: list[Case]) -> Iterator[dict[str, Any]]:
    trained, optimizer = _sharded(setup, mode)
    samples = Samples(setup.samples)
    flops = flops_per_token(skeleton(setup.config), samples.length)
    cuda = setup.device == "cuda"
    for case in cases:
        order = Order(samples.count, case.batch * setup.ranks, 0)
        seconds, losses = [], []
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            for step in range(setup.steps):
                rows = order.step(step)[rank * case.batch : (rank + 1) * case.batch]
                input_ids, labels = (tensor.to(setup.device) for tensor in samples.rows(rows))
                if bool((labels == IGNORED).any()):
                    raise ValueError("padding is no throughput: every position must be a target")
                for group in optimizer.param_groups:
                    group["lr"] = setup.optimizer.lr_at(step, setup.steps)
                _wait(cuda)
                begun = time.perf_counter()
                # FSDP averages gradients over ranks; every rank has the same number of targets.
                loss = trained(input_ids, labels, 1.0 / labels.numel())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                _wait(cuda)
                seconds.append(time.perf_counter() - begun)
                dist.all_reduce(loss.detach())
                losses.append(float(loss.detach()) / setup.ranks)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            yield {"system": "FSDP2", **case._asdict(), "error": "out of memory"}
            return  # larger batches come later
        tokens = case.batch * samples.length * setup.ranks
        yield {
            "system": "FSDP2",
            **case._asdict(),
            **speed(median(seconds[min(WARM_UP, setup.steps - 1) :]), tokens, flops, setup.ranks),
            "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
            "losses": losses,
        }


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
