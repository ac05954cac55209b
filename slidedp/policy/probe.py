"""Measures the rates of this machine for one workload, on the ranks that will run it, in seconds.

One process per rank and one for the worker go through the same phases together, so that every rate is
measured beside what it shares the machine with. Results are kept in the user's cache folder.
"""

import dataclasses
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional

from slidedp.config import DTYPES, Config
from slidedp.errors import ConfigError
from slidedp.host import kernels
from slidedp.host.memory import Handle, Segment
from slidedp.host.process import die_with_parent
from slidedp.host.worker import worker_threads
from slidedp.model.loss import linear_cross_entropy
from slidedp.model.units import Unit
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, plan
from slidedp.rank import ModelFunctions, model_functions
from slidedp.stream.activations import Activations, Keep, LayerCall, Parameters, Recompute
from slidedp.stream.adamw import adamw_update
from slidedp.stream.buffers import is_tied
from slidedp.stream.device import Device, on
from slidedp.stream.group import join_ranks

PARTIAL_BUDGET = 0.5
"""The one fraction of kept intermediates that is measured; each costs a compilation."""
REPEATS = 5
CACHE_VERSION = 1


class _Sizes(NamedTuple):
    """How much each measurement moves: past every cache, and no more."""

    seconds: float
    """Of one phase."""
    copy: int
    """Bytes of one copy."""
    region: int
    """Bytes of one rank's region of host memory, each way."""
    params: int
    """Parameters that the worker updates."""
    collective: int
    """Bytes of one collective."""


ON_CUDA = _Sizes(0.3, 64 * 2**20, 512 * 2**20, 64 * 2**20, 64 * 2**20)
ON_CPU = _Sizes(0.1, 4 * 2**20, 32 * 2**20, 4 * 2**20, 4 * 2**20)

# (name, whether only rank 0 copies, copies up, copies down, the worker updates)
PHASES = (
    ("up", True, True, False, False),
    ("down", True, False, True, False),
    ("both", True, True, True, False),
    ("up_all", False, True, False, False),
    ("down_all", False, False, True, False),
    ("both_all", False, True, True, False),
    ("update", False, False, False, True),
    ("update_up", False, True, False, True),
    ("update_down", False, False, True, True),
    ("update_both", False, True, True, True),
)


def probe(run: Plan | Config, *, fresh: bool = False) -> Rates:
    """The rates of this machine for a run. Measured once per hardware, versions, model and workload, and
    then read from the cache; `fresh` measures again. Call it while nothing else uses the machine."""
    planned = run if isinstance(run, Plan) else plan(run)
    file = cache_folder() / f"rates-{fingerprint(planned)}.json"
    if not fresh and file.exists():
        return Rates.from_dict(json.loads(file.read_text()))
    rates = _measure(planned)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(rates.to_dict(), indent=1))
    partial.replace(file)  # two runs that start together must not read half a file
    return rates


def cache_folder() -> Path:
    """SlideDP's folder where this platform keeps a user's caches."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slidedp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidedp"


def fingerprint(planned: Plan) -> str:
    """A name for everything that the rates depend on."""
    config = planned.config
    gpus = range(int(config.ranks or 1)) if config.device == "cuda" else ()
    facts = {
        "cache": CACHE_VERSION,
        "cpu": platform.processor() or platform.machine(),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numba": numba.__version__,
        "model": planned.model.to_dict(),
        "workload": dataclasses.asdict(workload_of(planned)),
        "sequence_length": config.sequence_length,
        "compile": config.compile,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Setup(NamedTuple):
    planned: Plan
    memory: Handle
    folder: str
    barrier: Any
    sizes: _Sizes


def _measure(planned: Plan) -> Rates:
    ranks = int(planned.config.ranks or 1)
    sizes = ON_CUDA if planned.config.device == "cuda" else ON_CPU
    memory = Segment(2 * ranks * sizes.region, "probe")
    memory.touch()
    barrier = mp.get_context("spawn").Barrier(ranks + 1)
    try:
        with tempfile.TemporaryDirectory(prefix="slidedp-probe-") as folder:
            setup = _Setup(planned, memory.handle, folder, barrier, sizes)
            try:
                mp.spawn(_enter, (setup,), nprocs=ranks + 1)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                raise ConfigError(f"probe: a measuring process failed: {error}") from error
            found = [json.loads(Path(folder, str(i)).read_text()) for i in range(ranks + 1)]
    finally:
        memory.close()
    return _rates(planned, workload_of(planned), found[:-1], found[-1], sizes)


def _rates(
    planned: Plan, w: Workload, ranks: list[dict[str, Any]], worker: dict[str, Any], sizes: _Sizes
) -> Rates:
    """Puts together what the processes have measured."""
    cuda = planned.config.device == "cuda"

    def mean(name: str) -> float:
        return sum(rank[name] for rank in ranks) / len(ranks)

    alone = {name: ranks[0][name] for name in ("up", "down", "both")}
    together = {name: mean(name) for name in ("up_all", "down_all", "both_all")}
    slowed = [mean(f"update_{way}") / together[f"{way}_all"] for way in ("up", "down", "both")]
    per_param = 26 + w.itemsize if w.itemsize == 2 else 28
    traffic = [
        w.ranks * mean(f"update_{way}") * (2 if way == "both" else 1) + worker[f"update_{way}"] * per_param
        for way in ("up", "down", "both")
    ]
    compute = {name: mean(name) for name in ranks[0]["compute"]}
    partial = compute.pop("backward_partial", None)
    between = {name: mean(name) for name in ranks[0]["collectives"]}
    peers = "fabric"
    if cuda and w.ranks > 1 and between["all_gather"] < 2 * alone["up"]:
        peers = "links" if torch.cuda.can_device_access_peer(0, 1) else "host"
    return Rates(
        **compute,
        backward_partial=((PARTIAL_BUDGET, partial),) if partial is not None else (),
        **alone,
        **together,
        under_update=min(1.0, sum(slowed) / len(slowed)),
        **between,
        peers=peers,
        update=worker["update"],
        update_up=min(worker["update"], worker["update_up"]),
        update_down=min(worker["update"], worker["update_down"]),
        update_both=min(worker["update"], worker["update_both"]),
        sum_lanes=worker["sum_lanes"],
        host_memory=max(traffic) if cuda else float("inf"),
        gpu_update=mean("gpu_update") if cuda else 0.0,
        copy_latency=mean("copy_latency"),
        update_latency=worker["update_latency"],
        synchronous=not cuda,
    )


# --- what one process does ------------------------------------------------------------------------


def _enter(index: int, setup: _Setup) -> None:
    """Entry of every spawned process: ranks first, the worker last."""
    die_with_parent()
    ranks = int(setup.planned.config.ranks or 1)
    with _lower_noise():
        found = _worker(setup) if index == ranks else _rank(index, ranks, setup)
    Path(setup.folder, str(index)).write_text(json.dumps(found))


@contextmanager
def _lower_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch 2.13 renames its flat collectives; 2.11 has only the old names.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        yield


def _rank(rank: int, ranks: int, setup: _Setup) -> dict[str, Any]:
    config, sizes = setup.planned.config, setup.sizes
    cuda = config.device == "cuda"
    if not cuda:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    device = Device(str(config.device), rank)
    if device.compute is not None:
        torch.cuda.set_stream(device.compute)
    join_ranks(str(config.device), rank, ranks, f"{setup.folder}/ranks")
    found: dict[str, Any] = {}
    region = Segment.open(setup.memory).tensor(torch.uint8)[2 * rank * sizes.region :]
    source, target = region[: sizes.region], region[sizes.region : 2 * sizes.region]
    device.register(source)
    device.register(target)
    copies = _Copies(device, source, target, sizes.copy)
    for name, alone, up, down, _ in PHASES:
        setup.barrier.wait()
        if (up or down) and (rank == 0 or not alone):
            found[name] = copies.rate(up, down, sizes.seconds)
        setup.barrier.wait()
    found["copy_latency"] = copies.latency()
    if cuda:
        found["gpu_update"] = _gpu_update(device, source, target)
    device.unregister(source)
    device.unregister(target)
    found["collectives"] = []
    if ranks > 1:
        collectives = _collectives(device, ranks, sizes.collective)
        found |= collectives
        found["collectives"] = list(collectives)
    compute = _compute(setup.planned, device)
    found |= compute
    found["compute"] = list(compute)
    setup.barrier.wait()
    dist.destroy_process_group()
    return found


def _seconds(device: Device, work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median time of `work`, after two calls that do not count."""
    times = []
    for _ in range(repeats + 2):
        _synchronize(device)
        begun = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    return sorted(times[2:])[repeats // 2]


def _synchronize(device: Device) -> None:
    if device.is_cuda:
        torch.cuda.synchronize()


class _Copies:
    """Copies between one rank's region of host memory and its device."""

    def __init__(self, device: Device, source: torch.Tensor, target: torch.Tensor, size: int) -> None:
        self._device, self._source, self._target, self._size = device, source, target, size
        self._arriving = device.zeros(size, torch.uint8)
        self._leaving = device.zeros(size, torch.uint8)
        self._turn = 0

    def _once(self, up: bool, down: bool) -> None:
        start = self._turn * self._size % (len(self._source) - self._size + 1)
        self._turn += 1
        if up:
            with on(self._device.to_device):
                self._arriving.copy_(self._source[start : start + self._size], non_blocking=True)
        if down:
            with on(self._device.to_host):
                self._target[start : start + self._size].copy_(self._leaving, non_blocking=True)

    def rate(self, up: bool, down: bool, seconds: float) -> float:
        """Bytes per second each way, over at least `seconds`."""
        moved, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            for _ in range(4):  # enqueued ahead, so that the engines never wait for this thread
                self._once(up, down)
                moved += self._size
            _synchronize(self._device)
        return moved / passed

    def latency(self) -> float:
        """Seconds of a copy of one page."""
        page = self._source[:4096]
        return _seconds(self._device, lambda: self._arriving[:4096].copy_(page, non_blocking=True))


def _gpu_update(device: Device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Parameters per second, where FP32 state streams up in pieces, is updated and goes back."""
    count = min(len(source) // 12, 8 * 2**20) // 64 * 64
    states = [device.zeros(3 * count, torch.float32) for _ in range(2)]
    gradient, copy = device.zeros(count, torch.bfloat16), device.zeros(count, torch.bfloat16)
    up, down = source[: 12 * count], target[: 14 * count]
    arrived, updated, left = ([torch.cuda.Event() for _ in range(2)] for _ in range(3))

    def pieces() -> None:
        for i in range(8):
            state, k = states[i % 2], i % 2
            assert device.to_device and device.to_host and device.compute
            with on(device.to_device):
                device.to_device.wait_event(left[k])
                state.view(torch.uint8).copy_(up, non_blocking=True)
                arrived[k].record()
            device.compute.wait_event(arrived[k])
            master, exp_avg, exp_avg_sq = state.split(count)
            adamw_update(
                master, exp_avg, exp_avg_sq, copy, gradient,
                grad_scale=1.0, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=1,
            )  # fmt: skip
            updated[k].record()
            with on(device.to_host):
                device.to_host.wait_event(updated[k])
                down[: 12 * count].copy_(state.view(torch.uint8), non_blocking=True)
                down[12 * count :].copy_(copy.view(torch.uint8), non_blocking=True)
                left[k].record()

    return 8 * count / _seconds(device, pieces)


def _collectives(device: Device, ranks: int, nbytes: int) -> dict[str, float]:
    """Bytes of the whole buffer per second, and seconds of a tiny collective."""
    count = nbytes // 2 // ranks // 64 * 64
    whole = device.zeros(count * ranks, torch.bfloat16 if device.is_cuda else torch.float32)
    part = whole[:count].clone()

    works: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
    }
    found = {name: whole.nbytes / _seconds(device, work) for name, work in works.items()}
    small = device.zeros(64 * ranks, whole.dtype)
    found["collective_latency"] = _seconds(
        device, lambda: dist.all_gather_into_tensor(small, small[:64].clone())
    )
    return found


def _compute(planned: Plan, device: Device) -> dict[str, float]:
    """Seconds of each piece of compute at the run's shapes."""
    config, units = planned.config, planned.units
    dtype = DTYPES[str(config.compute_dtype)]
    functions = model_functions(config, planned.model, device, dtype)
    batch, length = config.batch_size // int(config.ranks or 1), config.sequence_length
    width = planned.model.hidden_size

    def parameters(unit: Unit) -> Parameters:
        flat = device.empty(unit.numel, dtype).normal_(std=0.02)
        return {p.local: p.view(flat).detach().requires_grad_() for p in unit.views}

    layer, embed, head = parameters(units[1]), parameters(units[0]), parameters(units[-1])
    hidden = torch.randn(batch, length, width, device=device.torch, dtype=dtype)
    gradient = torch.randn_like(hidden) * 1e-3
    ids = torch.randint(0, planned.model.vocab_size, (batch, length), device=device.torch)

    def call(function: Any) -> LayerCall:
        return lambda p, h: function(p, h, *functions.positions)

    def both(mode: Callable[[], Activations], function: Any) -> tuple[float, float]:
        """Seconds of a forward and of a backward."""
        kept = mode()
        forward = _seconds(device, lambda: kept.forward(call(function), layer, hidden))
        pairs = _seconds(
            device,
            lambda: (
                kept.forward(call(function), layer, hidden),
                kept.backward(call(function), layer, gradient),
            ),
        )
        return forward, max(pairs - forward, 1e-9)

    forward, keep = both(Keep, functions.layer)
    _, recompute = both(Recompute, functions.layer)
    found = {"forward": forward, "backward_keep": keep, "backward_recompute": recompute}
    if config.compile:
        found["backward_partial"] = both(Keep, functions.partial(PARTIAL_BUDGET))[1]
    matrix = embed["weight"].detach()
    found["embed_forward"] = _seconds(device, lambda: functional.embedding(ids, matrix))
    found["embed_backward"] = _seconds(
        device,
        lambda: torch.ops.aten.embedding_dense_backward(
            gradient, ids, len(matrix), functions.padding_index, False
        ),
    )
    weight = matrix if is_tied(units) else head["lm_head.weight"].detach()
    found["head"] = _seconds(device, lambda: _head(functions, head, weight, hidden, ids), 3)
    flat = device.zeros(units[1].numel, dtype)
    other = torch.ones_like(flat)
    found["device_copy"] = 2 * flat.nbytes / _seconds(device, lambda: flat.copy_(other))
    return found


def _head(
    functions: ModelFunctions,
    head: Parameters,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    labels: torch.Tensor,
) -> None:
    """The final norm and the loss, forward and backward, as the engine computes them."""
    norm, hidden = head["norm.weight"], hidden.detach().requires_grad_()
    with torch.enable_grad():
        normed = functions.norm(norm, hidden)
    weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
    _, upstream = linear_cross_entropy(
        normed.detach().flatten(0, 1), weight, labels.flatten(), 1e-4, weight_gradient, functions.softmax
    )
    torch.autograd.grad(normed, [hidden, norm], upstream.view_as(normed))


def _worker(setup: _Setup) -> dict[str, float]:
    """The optimizer worker's part: its kernels alone and beside the ranks' copies."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    config, sizes = setup.planned.config, setup.sizes
    kernels.set_threads(worker_threads(int(config.ranks or 1)))
    half = config.compute_dtype == "bfloat16"
    count, bits = sizes.params, np.uint16 if half else np.float32
    master, exp_avg, exp_avg_sq = (np.zeros(count, np.float32) for _ in range(3))
    working = np.zeros(count, np.uint16) if half else None
    landing = np.zeros(count, bits)
    for array in (master, exp_avg, exp_avg_sq, landing):
        kernels.fill(array, 0.0)

    def update(params: int) -> None:
        kernels.adamw_update(
            master[:params], exp_avg[:params], exp_avg_sq[:params],
            None if working is None else working[:params], landing, 0, 0, 1,
            grad_scale=1.0, lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip

    def rate(work: Callable[[], Any], amount: float, seconds: float) -> float:
        done, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            work()
            done += 1
        return done * amount / passed

    update(count)
    found = {}
    for name, _, _, _, updates in PHASES:
        setup.barrier.wait()
        if updates:
            found[name] = rate(lambda: update(count), count, sizes.seconds)
        setup.barrier.wait()
    found["update_latency"] = 1 / rate(lambda: update(64), 1, 0.02)
    half_count = count // 2 // 64 * 64
    out = np.zeros(half_count, bits)

    def add() -> None:
        kernels.sum_lanes(landing, 0, half_count, 2, out)

    add()
    found["sum_lanes"] = rate(add, 3 * out.nbytes, sizes.seconds)
    setup.barrier.wait()
    return found
