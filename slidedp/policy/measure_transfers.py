"""One rank's transfers: copies between host and device, updates on the GPU, and between ranks."""

import time
from collections.abc import Callable

import torch

from slidedp.policy.phases import enqueue_seconds, seconds, synchronize
from slidedp.stream.adamw import adamw_update
from slidedp.stream.arena import Arena, block_bytes
from slidedp.stream.device import Abort, Device, Signal, on
from slidedp.stream.transport import DELIVERY, Collectives, Copies, Transport

PIECES, BUFFERS = 24, 8
"""Pieces of state that are streamed, and those on their way at once: as many as `Layout.update_slots`. With
two, Qwen3-1.7B's streamed updates were predicted a quarter too slow."""


class HostCopies:
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

    def rate(self, up: bool, down: bool, least: float) -> float:
        """Bytes per second each way, over at least `least` seconds."""
        moved, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < least:
            for _ in range(4):  # enqueued ahead, so that the engines never wait for this thread
                self._once(up, down)
                moved += self._size
            synchronize(self._device)
        return moved / passed

    def latency(self) -> float:
        """Seconds of a copy of one page."""
        page = self._source[:4096]
        return seconds(self._device, lambda: self._arriving[:4096].copy_(page, non_blocking=True))

    def operation(self) -> float:
        """Seconds to enqueue a copy, a signal behind it and a wait before it."""
        stream, page, count, abort = self._device.to_device, self._source[:4096], 64, Abort()

        def some() -> None:
            for _ in range(count):
                signal = Signal(abort)
                signal.fire(stream)
                signal.wait(stream)
                with on(stream):
                    self._arriving[:4096].copy_(page, non_blocking=True)

        return enqueue_seconds(self._device, some) / count


def gpu_update(device: Device, source: torch.Tensor, target: torch.Tensor) -> float:
    """Parameters per second, where FP32 state streams up in pieces, is updated and goes back."""
    count = min(len(source) // 12, 8 * 2**20) // 64 * 64
    states = [device.zeros(3 * count, torch.float32) for _ in range(BUFFERS)]
    gradient, copy = device.zeros(count, torch.bfloat16), device.zeros(count, torch.bfloat16)
    up, down = source[: 12 * count], target[: 14 * count]
    arrived, updated, left = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(3))

    def pieces() -> None:
        for i in range(PIECES):
            k = i % BUFFERS
            state = states[k]
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

    return PIECES * count / seconds(device, pieces)


def between_ranks(device: Device, rank: int, ranks: int, nbytes: int, transport: str) -> dict[str, float]:
    """Bytes of the whole buffer per second, and seconds of a tiny gather, by a transport of Layout."""
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    count = nbytes // dtype.itemsize // ranks // 64 * 64 * ranks
    arena = Arena(device, block_bytes([count * dtype.itemsize]), transport == "copy")
    whole = arena.take(count, dtype)
    way: Transport
    if transport == "copy":
        staging = device.zeros(ranks * count, dtype).view(ranks, count)
        way = Copies(device, arena, rank, ranks, staging, Abort())
    else:
        way = Collectives(device, rank, ranks, Abort())

    def gather(buffer: torch.Tensor) -> None:
        way.all_gather(buffer, way.offer(DELIVERY, device.to_device))

    works: dict[str, Callable[[], None]] = {
        "all_gather": lambda: gather(whole),
        "reduce_scatter": lambda: way.reduce_scatter(whole),
        "broadcast": lambda: way.broadcast(whole, way.offer(DELIVERY, device.to_device)),
        "reduce": lambda: way.reduce(whole),
    }
    found = {name: whole.nbytes / seconds(device, work) for name, work in works.items()}
    found["collective_latency"] = seconds(device, lambda: gather(whole[: 64 * ranks]))
    way.close()
    return found
