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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numba
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm.auto import tqdm

from slidedp.config import Config
from slidedp.errors import ConfigError
from slidedp.host.memory import Segment
from slidedp.host.process import bound_freed_memory, share_cores
from slidedp.host.start import import_ahead, start
from slidedp.policy.measure_compute import PARTIAL_BUDGET, compute_rates
from slidedp.policy.measure_transfers import HostCopies, between_ranks, gpu_update
from slidedp.policy.measure_worker import worker_rates
from slidedp.policy.phases import ON_CPU, ON_CUDA, PHASES, Setup
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, plan
from slidedp.stream.device import Device
from slidedp.stream.group import join_ranks

CACHE_VERSION = 9


def probe(run: Plan | Config, *, fresh: bool = False) -> Rates:
    """The rates of this machine for a run. Measured once per hardware, versions, model and workload, and
    then read from the cache; `fresh` measures again. Call it while nothing else uses the machine."""
    planned = run if isinstance(run, Plan) else plan(run)
    file = cache_folder() / f"rates-{fingerprint(planned)}.json"
    kept = None if fresh else read_rates(file)
    if kept is not None:
        return kept
    rates = _measure(planned)
    with suppress(OSError):  # a home that cannot be written, for one: the next run measures again
        write_rates(rates, file)
    return rates


def read_rates(file: Path) -> Rates | None:
    """What `write_rates` wrote; None where nothing is, or nothing whole."""
    try:
        return Rates.from_dict(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_rates(rates: Rates, file: Path) -> None:
    """Keeps the rates for other runs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(rates.to_dict(), indent=1))
    partial.replace(file)  # two runs that start together must not read half a file


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


def _measure(planned: Plan) -> Rates:
    ranks = int(planned.config.ranks or 1)
    sizes = ON_CUDA if planned.config.device == "cuda" else ON_CPU
    processes = import_ahead()  # while the memory is populated
    memory = Segment(2 * ranks * sizes.region, "probe")
    memory.touch()
    barrier = processes.Barrier(ranks + 1)
    try:
        with tempfile.TemporaryDirectory(prefix="slidedp-probe-") as folder:
            setup = Setup(planned, memory.handle, folder, barrier, sizes)
            _run(setup, ranks + 1)
            found = [json.loads(Path(folder, str(i)).read_text()) for i in range(ranks + 1)]
    finally:
        memory.close()
    return _rates(planned, workload_of(planned), found[:-1], found[-1])


def _run(setup: Setup, processes: int) -> None:
    """Runs the measuring processes to their end; an interrupt ends them too."""
    started = start(_enter, (setup,), processes)
    try:
        # Only where somebody looks: None leaves it out of files.
        what = {"desc": "measuring this machine", "bar_format": "{desc}: {elapsed}"}
        with tqdm(**what, leave=False, disable=None) as clock:
            while not started.join(timeout=1.0):
                clock.refresh()
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise ConfigError(f"probe: a measuring process failed: {error}") from error
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def _rates(planned: Plan, w: Workload, ranks: list[dict[str, Any]], worker: dict[str, Any]) -> Rates:
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
        enqueue_operation=mean("enqueue_operation") if cuda else 0.0,
        copy_latency=mean("copy_latency"),
        update_latency=worker["update_latency"],
        synchronous=not cuda,
    )


# --- what one process does ------------------------------------------------------------------------


def _enter(index: int, setup: Setup) -> None:
    """Entry of every process: ranks first, the worker last."""
    ranks = int(setup.planned.config.ranks or 1)
    with _lower_noise():
        found = worker_rates(setup) if index == ranks else _rank(index, ranks, setup)
    Path(setup.folder, str(index)).write_text(json.dumps(found))


@contextmanager
def _lower_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch 2.13 renames its flat collectives; 2.11 has only the old names.
        warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
        yield


def _rank(rank: int, ranks: int, setup: Setup) -> dict[str, Any]:
    config, sizes = setup.planned.config, setup.sizes
    cuda = config.device == "cuda"
    if not cuda:
        share_cores(ranks)
        bound_freed_memory()
    device = Device(str(config.device), rank)
    if device.compute is not None:
        torch.cuda.set_stream(device.compute)
    join_ranks(str(config.device), rank, ranks, f"{setup.folder}/ranks")
    found: dict[str, Any] = compute_rates(setup, device)
    found["compute"] = list(found)
    region = Segment.open(setup.memory).tensor(torch.uint8)[2 * rank * sizes.region :]
    source, target = region[: sizes.region], region[sizes.region : 2 * sizes.region]
    device.register(source)
    device.register(target)
    copies = HostCopies(device, source, target, sizes.copy)
    for name, alone, up, down, _ in PHASES:
        setup.barrier.wait()
        if (up or down) and (rank == 0 or not alone):
            found[name] = copies.rate(up, down, sizes.seconds)
        setup.barrier.wait()
    found["copy_latency"] = copies.latency()
    if cuda:
        found["gpu_update"] = gpu_update(device, source, target)
        found["enqueue_operation"] = copies.operation()
    device.unregister(source)
    device.unregister(target)
    found["collectives"] = []
    if ranks > 1:
        between = between_ranks(device, rank, ranks, sizes.collective, setup.planned.transport)
        found |= between
        found["collectives"] = list(between)
    setup.barrier.wait()
    dist.destroy_process_group()
    return found
