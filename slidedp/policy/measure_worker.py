"""The optimizer worker's part of a probe: its kernels alone and beside the ranks' copies."""

import os
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from statistics import median
from typing import Any

import numpy as np

from slidedp.host import kernels
from slidedp.host.memory import Segment
from slidedp.host.messages import Landed
from slidedp.host.worker import worker_threads
from slidedp.policy.phases import PHASES, Setup


def worker_rates(setup: Setup) -> dict[str, float]:
    """Parameters per second of the update by phase, and bytes per second of the sum of lanes."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    config, sizes = setup.planned.config, setup.sizes
    kernels.set_threads(worker_threads(int(config.ranks or 1)))
    half = config.compute_dtype == "bfloat16"
    count, bits = sizes.params, np.uint16 if half else np.float32

    def zeros(dtype: type) -> np.ndarray:
        """Memory as a run's state has it: numpy's own begins in the middle of a cache line."""
        memory = Segment(count * np.dtype(dtype).itemsize, "probe")
        memory.touch()
        array = memory.array(dtype)
        memory.close()
        return array

    master, exp_avg, exp_avg_sq = (zeros(np.float32) for _ in range(3))
    working = zeros(np.uint16) if half else None
    landing = zeros(bits)

    def update(params: int) -> None:
        kernels.adamw_update(
            master[:params], exp_avg[:params], exp_avg_sq[:params],
            None if working is None else working[:params], landing, 0, 0, 1,
            grad_scale=1.0, lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1,
        )  # fmt: skip

    def rate(work: Callable[[], Any], amount: float, seconds: float) -> float:
        """Of the median call in the second half of so many seconds: cores that have slept are slow at first.
        Probes on an H200's host told less of the worker alone than of the worker beside the links."""
        times: list[float] = []
        begun = time.perf_counter()
        while not times or time.perf_counter() - begun < seconds:
            call = time.perf_counter()
            work()
            times.append(time.perf_counter() - call)
        return amount / median(times[len(times) // 2 :])

    update(count)
    setup.barrier.wait()
    if config.device == "cuda":
        setup.update_meanwhile(lambda: update(count))
    found = {}
    for name, _, _, _, updates in PHASES:
        setup.barrier.wait()
        if updates:
            found[name] = rate(lambda: update(count), count, sizes.seconds)
        setup.barrier.wait()
    worker_end, rank_end = Pipe()

    def chunk() -> None:
        """What comes with each chunk of a unit besides its parameters: see `run_worker`."""
        rank_end.send(Landed(0, 0, 0, 0.0))
        for source in wait([worker_end], timeout=0):
            assert isinstance(source, Connection)
            source.recv()
        wait([worker_end], timeout=0)
        update(64)

    found["update_latency"] = 1 / rate(chunk, 1, 0.05)
    half_count = count // 2 // 64 * 64
    out = zeros(bits)[:half_count]

    def add() -> None:
        kernels.sum_lanes(landing, 0, half_count, 2, out)

    add()
    found["sum_lanes"] = rate(add, 3 * out.nbytes, sizes.seconds)
    setup.barrier.wait()
    return found
