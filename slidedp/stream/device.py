"""One rank's device: its streams, and the signal that hands work from one thread and stream to another.

A machine without a GPU runs the same code: its device memory is ordinary memory, a copy is done when
the call returns, and a signal is only the flag between threads.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

REGISTERING = 8
"""Threads that register host memory."""


class Aborted(Exception):
    """Raised in a thread that waits while another thread of the rank has failed."""


class Abort:
    """The first failure of any thread of a rank; every wait of the others ends with it."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self._lock = threading.Lock()

    def fail(self, cause: BaseException) -> None:
        with self._lock:
            self.cause = self.cause or cause

    def check(self) -> None:
        if self.cause is not None:
            raise Aborted from self.cause


class Device:
    """Where a rank computes. On a CPU every stream is None."""

    def __init__(self, kind: str, rank: int) -> None:
        self.is_cuda = kind == "cuda"
        self.torch = torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")
        self.compute: torch.cuda.Stream | None = None
        self.to_device: torch.cuda.Stream | None = None
        self.to_host: torch.cuda.Stream | None = None
        self.collective: torch.cuda.Stream | None = None
        self.gather: torch.cuda.Stream | None = None  # copies from other GPUs
        # Of a step's tokens and its loss. A copy engine takes one copy after another, whatever their size:
        # compute would wait behind the gigabytes of state that updates put in the queue.
        self.tokens_in: torch.cuda.Stream | None = None
        self.loss_out: torch.cuda.Stream | None = None
        # Of updates on the GPU: state in, kernels, state and working copy out.
        self.state_in: torch.cuda.Stream | None = None
        self.update: torch.cuda.Stream | None = None
        self.state_out: torch.cuda.Stream | None = None
        if self.is_cuda:
            torch.cuda.set_device(self.torch)
            self.compute = torch.cuda.Stream()
            # Collectives go ahead of compute: their kernels are short and other GPUs wait for them.
            self.collective = torch.cuda.Stream(priority=-1)
            self.to_device, self.to_host = torch.cuda.Stream(), torch.cuda.Stream()
            self.gather, self.tokens_in, self.loss_out = (torch.cuda.Stream() for _ in range(3))
            self.state_in, self.state_out = torch.cuda.Stream(), torch.cuda.Stream()
            self.update = torch.cuda.Stream(priority=-1)
            # An event and the clock at one moment: they place what GPUs and other processes do on one axis.
            self.epoch = torch.cuda.Event(enable_timing=True)
            self.epoch.record(self.compute)
            self.epoch.synchronize()
            self.epoch_time = time.time()

    def limit(self, nbytes: int) -> None:
        """Lets the allocator take no more of the GPU than this."""
        if self.is_cuda:
            total = torch.cuda.get_device_properties(self.torch).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.torch)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.torch)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a small host tensor on the device, for the current stream. It does not wait for the
        stream's earlier work, as it would from pageable memory."""
        if self.tokens_in is None:
            return tensor
        with on(self.tokens_in):
            moved = tensor.pin_memory().to(self.torch, non_blocking=True)
        current = torch.cuda.current_stream()
        current.wait_stream(self.tokens_in)
        moved.record_stream(current)
        return moved

    def take(self, value: torch.Tensor) -> "HostCopy":
        """The little that the current stream's work so far computes, on its way to the host."""
        if self.loss_out is None:
            return HostCopy(value, None)
        self.loss_out.wait_stream(torch.cuda.current_stream())
        with on(self.loss_out):
            on_host, copied = self.copied(value), torch.cuda.Event()
            copied.record()
        return HostCopy(on_host, copied)

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        """A device scalar on the host, valid once the current stream's work so far has run."""
        if not self.is_cuda:
            return value
        value.record_stream(torch.cuda.current_stream())
        on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        return on_host.copy_(value, non_blocking=True)

    def register(self, memory: torch.Tensor) -> None:
        """Lets this GPU's copy engines reach host memory directly."""
        if self.is_cuda and memory.numel():
            portable = 1
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, portable)
            if int(error):
                raise RuntimeError(
                    f"{memory.nbytes} bytes of host memory cannot be registered with the GPU ({error}): "
                    "raise the limit on locked memory (`ulimit -l`), or end other programs that lock memory"
                )

    def register_all(self, memories: Iterable[torch.Tensor]) -> None:
        """The same for many, on several threads: 0.05 instead of 0.09 s per GiB on an H200's host."""
        if self.is_cuda:
            with ThreadPoolExecutor(
                REGISTERING, initializer=torch.cuda.set_device, initargs=(self.torch,)
            ) as pool:
                list(pool.map(self.register, memories))

    def unregister(self, memory: torch.Tensor) -> None:
        if self.is_cuda and memory.numel():
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def memory(self) -> tuple[int, int]:
        """Most bytes of GPU memory allocated so far, and how often the allocator has had to return cached
        memory to the driver to go on: each time the GPU stands still, so a layout that does this takes too
        much memory. Zeros on a CPU."""
        if not self.is_cuda:
            return 0, 0
        stats = torch.cuda.memory_stats_as_nested_dict()  # flattening it takes a millisecond
        return stats["allocated_bytes"]["all"]["peak"], stats["num_alloc_retries"]


class HostCopy:
    """A small tensor that a device computes, on its way to the host."""

    def __init__(self, value: torch.Tensor, copied: torch.cuda.Event | None) -> None:
        self._value, self._copied = value, copied

    def done(self) -> bool:
        """Whether it is here."""
        return self._copied is None or self._copied.query()

    def value(self) -> torch.Tensor:
        """The tensor; waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Enqueues on `stream` inside the block."""
    if stream is None:
        yield
    else:
        with torch.cuda.stream(stream):
            yield


class Signal:
    """Fired once, by the thread that has enqueued some work; others wait for that work.

    On CUDA a waiter blocks only until the work is *enqueued*, then lets its stream wait for the event,
    so the host runs ahead of the GPU and a buffer is still never touched early.
    """

    def __init__(self, abort: Abort) -> None:
        self._abort = abort
        self._fired = False
        # Held until then. A step makes hundreds of signals, and threading.Event takes ten times as long.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._event: torch.cuda.Event | None = None

    def fire(self, stream: torch.cuda.Stream | None) -> None:
        """Marks everything enqueued on `stream` so far."""
        if stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(stream)
        self._fired = True
        self._gate.release()

    def _wait_fired(self) -> None:
        while not self._fired:
            if self._gate.acquire(timeout=0.5):
                self._gate.release()  # to whoever waits too
            else:
                self._abort.check()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Makes what is enqueued on `stream` next run after the marked work."""
        self._wait_fired()
        if stream is not None and self._event is not None:
            stream.wait_event(self._event)

    def synchronize(self) -> None:
        """Blocks the calling thread until the marked work is done."""
        self._wait_fired()
        if self._event is not None:
            self._event.synchronize()
