"""Rank and worker processes that stay up between test cases, and what a case gives them.

A case is a real run of `slidedp.rank.run_rank` and `slidedp.host.worker.run_worker` over real shared
memory and real gloo; only starting Python and importing torch is saved. `patch` names a function that
the processes run around the case, to inject delays or remove a gate.
"""

import importlib
import os
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slidedp.config import Config
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.state import HostState
from slidedp.host.worker import SetLayout, run_worker
from slidedp.model.families import load_config, skeleton
from slidedp.model.load import fill_random, load_pretrained
from slidedp.model.units import units_of
from slidedp.rank import RankSetup, die_with_parent, run_rank


def _patched(patch: str | None, arguments: dict):
    if patch is None:
        return nullcontext()
    module, name = patch.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**arguments)


def _serve(index: int, ranks: int, rendezvous: str, jobs: list[Connection]) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    if index < ranks:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=index, world_size=ranks
        )
    while (job := jobs[index].recv()) is not None:
        function, patch, arguments, launcher = job
        try:
            with _patched(patch, arguments.pop("patch_arguments")):
                function(**arguments)
            launcher.send({"kind": "done"})
        except BaseException:
            launcher.send({"kind": "failed", "text": traceback.format_exc()})


class Pool:
    """`ranks` rank processes and one optimizer worker."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder = tempfile.TemporaryDirectory()
        pipes = [mp.get_context("spawn").Pipe() for _ in range(ranks + 1)]
        self._jobs = [ours for ours, _ in pipes]
        self.processes = mp.start_processes(
            _serve,
            (ranks, f"{self._folder.name}/rendezvous", [theirs for _, theirs in pipes]),
            nprocs=ranks + 1,
            join=False,
            start_method="spawn",
        )

    def run(
        self,
        config: Config,
        *,
        layouts: dict[int, Any] | None = None,
        patch: str | None = None,
        patch_arguments: dict | None = None,
    ) -> "Outcome":
        """Trains `config` from its model folder; `layouts` maps a step to the layout set before it."""
        config = replace(config, ranks=self.ranks, device="cpu").resolved()
        model = load_config(config.model)
        units = units_of(skeleton(model, config.sequence_length))
        state = HostState(units, {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.compute_dtype])
        if isinstance(config.model, str):
            load_pretrained(state, config.model)
        else:
            fill_random(state, model, config.seed)
        plan = LandingPlan(units, self.ranks, config.layout, state.dtype.itemsize)
        landing = Landing(plan, state.dtype)
        pipe = mp.get_context("spawn").Pipe
        to_worker = [pipe() for _ in range(self.ranks)]
        outputs = [pipe() for _ in range(self.ranks + 1)]
        setup = RankSetup(config, model, state.handle, landing.handle, config.data.path, "")
        for rank in range(self.ranks):
            arguments = {
                "rank": rank,
                "setup": setup,
                "worker": to_worker[rank][0],
                "launcher": outputs[rank][1],
                "patch_arguments": {"index": rank, **(patch_arguments or {})},
            }
            self._jobs[rank].send((run_rank, patch, arguments, outputs[rank][1]))
        arguments = {
            "config": config,
            "state": state.handle,
            "landing": landing.handle,
            "ranks": [theirs for _, theirs in to_worker],
            "launcher": outputs[-1][1],
            "patch_arguments": {"index": None, **(patch_arguments or {})},
        }
        self._jobs[-1].send((run_worker, patch, arguments, outputs[-1][1]))
        outcome = Outcome(state)
        outcome.collect([ours for ours, _ in outputs], layouts or {}, self.ranks)
        return outcome

    def close(self) -> None:
        for job in self._jobs:
            job.send(None)
        self.processes.join()
        self._folder.cleanup()


class Outcome:
    """Losses, updates and the final state of a case."""

    def __init__(self, state: HostState) -> None:
        self.state = state
        self.steps: list[dict] = []
        self.updates: list[dict] = []
        self.landings: list[Landing] = []

    def collect(self, outputs: list[Connection], layouts: dict[int, Any], ranks: int) -> None:
        worker, open_outputs = outputs[-1], list(outputs)
        layouts = dict(layouts)
        while open_outputs:
            for output in wait(open_outputs):
                event = output.recv()
                if event["kind"] == "failed":
                    raise AssertionError(event["text"])
                if event["kind"] == "done":
                    open_outputs.remove(output)
                elif event["kind"] == "step":
                    self.steps.append(event)
                elif event["kind"] == "update":
                    self.updates.append(event)
                    # The next layout goes out as soon as the one before has begun to work.
                    if layouts and event["step"] + 1 >= min(layouts):
                        layout = layouts.pop(min(layouts))
                        plan = LandingPlan(
                            self.state.units, ranks, layout, self.state.dtype.itemsize
                        )
                        self.landings.append(Landing(plan, self.state.dtype))
                        worker.send(SetLayout(layout, self.landings[-1].handle))

    def losses(self) -> list[float]:
        """Global mean loss of every step."""
        count = 1 + max(e["step"] for e in self.steps)
        sums = [sum(e["loss_sum"] for e in self.steps if e["step"] == s) for s in range(count)]
        targets = [sum(e["targets"] for e in self.steps if e["step"] == s) for s in range(count)]
        return [a / b for a, b in zip(sums, targets, strict=True)]

    def parameters(self) -> dict[str, torch.Tensor]:
        """FP32 masters by checkpoint name."""
        found = {}
        for unit in self.state.units:
            master = torch.from_numpy(self.state.unit(unit).master)
            found |= {p.name: p.view(master).clone() for p in unit.parameters}
        return found


_pools: dict[int, Pool] = {}


def pool(ranks: int) -> Pool:
    """The pool of this many ranks, started on first use."""
    if ranks not in _pools:
        _pools[ranks] = Pool(ranks)
    return _pools[ranks]


def close_pools() -> None:
    while _pools:
        _pools.popitem()[1].close()


def small_model(folder: Path, *, tied: bool = True, kind: str = "qwen3") -> str:
    """A random Hugging Face folder whose sizes divide by nothing convenient."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    configs = {"qwen3": Qwen3Config, "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = configs[kind](
        vocab_size=211, hidden_size=36, intermediate_size=52, num_hidden_layers=5, num_attention_heads=3,
        num_key_value_heads=1, head_dim=12, tie_word_embeddings=tied, max_position_embeddings=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases that are not all alike
        if parameter.dim() == 1:
            parameter.data.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return os.fspath(folder)
