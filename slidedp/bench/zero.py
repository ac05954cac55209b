"""DeepSpeed's ZeRO-Offload on the same model, tokens and loss, where DeepSpeed is installed."""

import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from slidedp.bench.fsdp2 import Trained
from slidedp.bench.peers import results_of
from slidedp.bench.table import WARM_UP, speed
from slidedp.data.order import Order
from slidedp.data.samples import Samples
from slidedp.errors import ConfigError
from slidedp.model.families import flops_per_token, skeleton
from slidedp.model.loss import softmax_gradient


def run_zero2(
    config: PretrainedConfig, samples: str, batches: list[int], *, steps: int, ranks: int
) -> Iterator[dict[str, Any]]:
    """ZeRO-2 with the optimizer on the CPU and full checkpointing; one measurement per batch."""
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise ConfigError(
            "zero2: DeepSpeed is not installed: pip install deepspeed, or leave it out"
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        arguments = (config, samples, batches, steps, ranks, f"{folder}/ranks")
        yield from results_of(_rank, arguments, ranks)


def _rank(
    rank: int,
    config: PretrainedConfig,
    samples: str,
    batches: list[int],
    steps: int,
    ranks: int,
    rendezvous: str,
    results: Connection,
) -> None:
    import deepspeed

    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), OMP_NUM_THREADS=str(threads)
    )
    torch.set_num_threads(threads)
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks
    )
    deepspeed.init_distributed("nccl")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(
        model=Trained(model, torch.compile(softmax_gradient, dynamic=False)),
        config={
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_bucket_size": 500_000_000,
            },
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        },
    )
    known = Samples(samples)
    flops = flops_per_token(skeleton(config), known.length)
    for batch in batches:
        order = Order(known.count, batch * ranks, 0)
        torch.cuda.reset_peak_memory_stats()
        seconds, losses = [], []
        for step in range(steps):
            rows = order.step(step)[rank * batch : (rank + 1) * batch]
            input_ids, labels = (tensor.cuda() for tensor in known.rows(rows))
            torch.cuda.synchronize()
            begun = time.perf_counter()
            loss = engine(input_ids, labels, 1.0 / labels.numel())
            engine.backward(loss)
            engine.step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
            losses.append(float(loss))
        tokens = batch * known.length * ranks
        if rank == 0:
            results.send(
                {
                    "system": "ZeRO-2-Offload",
                    "batch": batch,
                    "activations": "full",
                    **speed(median(seconds[min(WARM_UP, steps - 1) :]), tokens, flops, ranks),
                    "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
                    "losses": losses,
                }
            )
    torch.distributed.destroy_process_group()
