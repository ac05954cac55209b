"""Rank and worker processes that stay up between test cases, and what a case gives them.

A case is a real run of `slidedp.rank.run_rank` and `slidedp.host.worker.run_worker` over real shared
memory and real gloo; only starting Python and importing torch is saved. `patch` names a context manager
that the processes enter around the case, to inject delays, remove a gate or record what happens: it
gets `index` (the rank, None in the worker), and what it yields comes back in `Outcome.recorded`.
"""

import dataclasses
import gc
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slidedp.checkpoint import resume as resuming
from slidedp.checkpoint.folder import Progress
from slidedp.checkpoint.save import Saving
from slidedp.config import DTYPES, Config
from slidedp.host import kernels
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.memory import Handle, Segment
from slidedp.host.messages import SetLayout
from slidedp.host.start import import_ahead, start
from slidedp.host.state import HostState
from slidedp.host.worker import run_worker
from slidedp.layout import Layout
from slidedp.model.families import load_config, skeleton
from slidedp.model.load import fill_random, load_pretrained
from slidedp.model.units import Unit, units_of
from slidedp.rank import RankSetup, run_rank

DEADLINE = 120.0
"""Seconds without any news after which a case counts as hung. A busy machine may be slow for longer than
that, but it is not silent."""


def _patched(patch: str | None, arguments: dict) -> Any:
    if patch is None:
        return nullcontext()
    module, name = patch.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(**arguments)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _serve(index: int, ranks: int, rendezvous: str, jobs: list[Connection]) -> None:
    sys.setswitchinterval(0.0005)  # as a rank's own entry does
    kernels.set_threads(1)  # first: see share_cores
    torch.set_num_threads(1)
    if index < ranks:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=ranks)
    while (job := jobs[index].recv()) is not None:
        with _closing_segments():
            _serve_one(*job)
        del job
        gc.collect()


def _serve_one(function: Any, patch: str | None, arguments: dict, launcher: Connection) -> None:
    try:
        with _patched(patch, arguments.pop("patch_arguments")) as recorded:
            function(**arguments)
        launcher.send({"kind": "done", "recorded": recorded})
    except BaseException:
        launcher.send({"kind": "failed", "text": traceback.format_exc()})


@contextmanager
def _closing_segments() -> Iterator[None]:
    """A process of a real run ends with its case, and so do its descriptors; ours stays."""
    made: list[Segment] = []
    init, open_ = Segment.__init__, Segment.open

    def recording_init(segment: Segment, *arguments: Any) -> None:
        init(segment, *arguments)
        made.append(segment)

    def recording_open(handle: Handle) -> Segment:
        made.append(open_(handle))
        return made[-1]

    with replaced(Segment, "__init__", recording_init), replaced(Segment, "open", recording_open):
        yield
    for segment in made:
        segment.close()


class Pool:
    """`ranks` rank processes and one optimizer worker."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.broken = False
        context = import_ahead()
        self._folder = tempfile.TemporaryDirectory()
        pipes = [context.Pipe() for _ in range(ranks + 1)]
        self._jobs = [ours for ours, _ in pipes]
        arguments = ranks, f"{self._folder.name}/rendezvous", [theirs for _, theirs in pipes]
        self._processes = start(_serve, arguments, ranks + 1).processes

    def run(
        self,
        config: Config,
        *,
        layouts: dict[int, Layout] | None = None,
        patch: str | None = None,
        patch_arguments: dict | None = None,
        folder: Path | None = None,
        resume: Path | None = None,
    ) -> "Outcome":
        """Trains `config` from its model folder, or goes on from the checkpoint `resume`. Checkpoints go
        to `folder`.

        `layouts` maps a step to the layout that is asked for then; it takes effect a step or two
        later (`Outcome.layouts` says when), and the next one is asked for only after that.
        """
        config = dataclasses.replace(config, ranks=self.ranks, device="cpu").resolved()
        model = load_config(config.model)
        units = units_of(skeleton(model, config.sequence_length), config.optimizer.freeze)
        state = HostState(units, DTYPES[str(config.compute_dtype)])
        start = Progress()
        if resume is not None:
            start = resuming.check(resume, units, config)
            resuming.load(resume, state)
        elif isinstance(config.model, str):
            load_pretrained(state, config.model)
        else:
            fill_random(state, model, config.seed)
        dtype = config.gradient_dtype
        landing = Landing(LandingPlan(units, self.ranks, config.layout, dtype.itemsize), dtype)
        pipe = import_ahead().Pipe
        to_worker = [pipe() for _ in range(self.ranks)]
        outputs = [pipe() for _ in range(self.ranks + 1)]
        setup = RankSetup(
            config, model, state.handle, landing.handle, config.data.path, "", "", start=start.step
        )
        for rank in range(self.ranks):
            arguments = {
                "rank": rank,
                "setup": setup,
                "worker": to_worker[rank][0],
                "launcher": outputs[rank][1],
                "patch_arguments": {"index": rank, **(patch_arguments or {})},
            }
            self._jobs[rank].send((run_rank, patch, arguments, outputs[rank][1]))
            outputs[rank][0].send(None)  # the state is there
        arguments = {
            "config": config,
            "state": state.handle,
            "landing": landing.handle,
            "saving": saving(folder or Path(self._folder.name), config, start),
            "ranks": [theirs for _, theirs in to_worker],
            "launcher": outputs[-1][1],
            "patch_arguments": {"index": None, **(patch_arguments or {})},
        }
        self._jobs[-1].send((run_worker, patch, arguments, outputs[-1][1]))
        outcome = Outcome(state.units, config.layout, dtype)
        try:
            outcome.collect([ours for ours, _ in outputs], layouts or {}, self.ranks, state, landing)
        except BaseException:
            self.close()  # its processes wait for each other: the next case gets a new pool
            raise
        finally:
            landing.close()
            state.close()
        return outcome

    def close(self) -> None:
        """Ends the processes, at once if a case has failed."""
        if self.broken:
            return
        self.broken = True
        for job in self._jobs:
            try:
                job.send(None)
            except OSError:
                continue
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def saving(
    folder: Path,
    config: Config,
    start: Progress = Progress(),  # noqa: B008 (a tuple)
    spare_bytes: int = 100_000,
) -> Saving:
    """What a worker needs to write checkpoints of `config` to `folder`."""
    assets = folder / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    description = {"config": dataclasses.asdict(config), "samples": {}}
    return Saving(folder, assets, description, start, spare_bytes=spare_bytes)


class Outcome:
    """Losses, updates and the final state of a case."""

    def __init__(self, units: tuple[Unit, ...], layout: Layout, dtype: torch.dtype) -> None:
        self.units, self.dtype = units, dtype
        self.steps: list[dict] = []
        self.updates: list[dict] = []
        self.checkpoints: list[dict] = []
        self.evaluations: list[dict] = []
        self.layouts = [(0, layout)]
        """(first step, layout) of every layout in turn."""
        self.recorded: list[Any] = []
        """What the patch yielded: one item for each rank, then the worker's."""
        self.masters: list[torch.Tensor] = []
        """Final FP32 buffer of every unit, padding included."""

    def collect(
        self,
        outputs: list[Connection],
        layouts: dict[int, Layout],
        ranks: int,
        state: HostState,
        landing: Landing,
    ) -> None:
        """Reads events until every process is done."""
        waiting, asked = sorted(layouts.items()), 0
        self.recorded = [None] * len(outputs)
        open_outputs, landings = list(outputs), [landing]
        while open_outputs:
            ready = wait(open_outputs, timeout=DEADLINE)
            assert ready, f"no news for {DEADLINE} s; {len(self.updates)} steps are done"
            for output in ready:
                event = output.recv()  # type: ignore[union-attr]
                if event["kind"] == "failed":
                    raise AssertionError(event["text"])
                if event["kind"] == "done":
                    open_outputs.remove(output)  # type: ignore[arg-type]
                    self.recorded[outputs.index(output)] = event["recorded"]  # type: ignore[arg-type]
                elif event["kind"] == "step":
                    self.steps.append(event)
                elif event["kind"] == "layout" and event["rank"] == 0:
                    self.layouts.append((event["step"], waiting[asked - 1][1]))
                elif event["kind"] == "update":
                    self.updates.append(event)
                elif event["kind"] == "checkpoint":
                    self.checkpoints.append(event)
                elif event["kind"] == "eval":
                    self.evaluations.append(event)
            done = len(self.updates)
            if asked < len(waiting) and len(self.layouts) > asked and done >= waiting[asked][0]:
                layout = waiting[asked][1]
                plan = LandingPlan(self.units, ranks, layout, self.dtype.itemsize)
                if plan.shape != landings[-1].plan.shape:
                    landings.append(Landing(plan, self.dtype))
                outputs[-1].send(SetLayout(layout, landings[-1].handle))
                asked += 1
        for later in landings[1:]:
            later.close()
        self.masters = [torch.from_numpy(state.unit(unit).master.copy()) for unit in self.units]

    def losses(self) -> list[float]:
        """Global mean loss of every step."""
        steps = sorted({e["step"] for e in self.steps})
        sums = [sum(e["loss_sum"] for e in self.steps if e["step"] == s) for s in steps]
        targets = [sum(e["targets"] for e in self.steps if e["step"] == s) for s in steps]
        return [a / b for a, b in zip(sums, targets, strict=True)]

    def rank_losses(self) -> dict[tuple[int, int], float]:
        """Summed loss by (step, rank)."""
        return {(e["step"], e["rank"]): e["loss_sum"] for e in self.steps}

    def norms(self) -> list[float]:
        """Gradient norm of every step, before clipping; NaN where units updated in backward."""
        return [e["gradient_norm"] for e in self.updates]

    def parameters(self) -> dict[str, torch.Tensor]:
        """FP32 masters by checkpoint name."""
        return {
            p.name: p.view(master)
            for unit, master in zip(self.units, self.masters, strict=True)
            for p in unit.parameters
        }


_pools: dict[int, Pool] = {}


def pool(ranks: int) -> Pool:
    """The pool of this many ranks, started on first use and again after a failure."""
    if ranks not in _pools or _pools[ranks].broken:
        _pools[ranks] = Pool(ranks)
    return _pools[ranks]


def close_pools() -> None:
    """Ends all pools."""
    while _pools:
        _pools.popitem()[1].close()


def small_model(folder: Path, *, tied: bool = True, kind: str = "qwen3") -> str:
    """A random Hugging Face folder whose sizes divide by nothing convenient. Every unit but a tied
    head is two to four chunks of 4 KiB, and five layers do not fit a landing ring of four."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    heads = {} if kind in ("qwen2", "olmoe") else {"head_dim": 8}
    if kind in ("qwen3_moe", "olmoe"):
        heads |= {"num_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.2}
    if kind == "qwen3_moe":
        heads |= {"moe_intermediate_size": 12, "norm_topk_prob": True}
    if kind == "mistral":
        heads |= {"sliding_window": 5}
    if kind == "granite":
        heads |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.7}
        heads |= {"logits_scaling": 1.7}
    if kind == "smollm3":
        heads |= {"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 3}
    if kind == "phi3":
        turned = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
        heads |= {"sliding_window": 5, "rope_parameters": turned}
    if kind in ("olmo2", "olmo3"):
        heads |= {"initializer_range": 0.1}
    if kind == "olmo3":
        sliding, full = "sliding_attention", "full_attention"
        heads |= {"layer_types": [sliding, full, sliding, sliding, full], "sliding_window": 3}
    if kind == "gemma3_text":
        sliding, full = "sliding_attention", "full_attention"
        heads |= {"layer_types": [sliding, full, sliding, sliding, full], "sliding_window": 3}
        heads |= {"query_pre_attn_scalar": 11, "final_logit_softcapping": 5.0, "initializer_range": 0.3}
    config = AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=20, intermediate_size=28, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, max_position_embeddings=64,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, **heads,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases that are not all alike
        if parameter.dim() == 1:
            parameter.data.normal_(0.0 if kind == "gemma3_text" else 1.0, 0.1)  # which adds 1 itself
    model.save_pretrained(folder)
    return os.fspath(folder)
