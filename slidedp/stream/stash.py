"""Host memory for offloaded layer inputs, and the small GPU rings that they pass through.

An input leaves through a ring of its own and returns through another. A ring buffer is reused only
behind the signal that its content has gone on, and nothing is read back before `stashed` has fired.
"""

import torch

from slidedp.config import Config
from slidedp.host.memory import PAGE, Segment
from slidedp.model.units import Unit, aligned
from slidedp.stream.device import Device, Signal, on
from slidedp.stream.program import FETCH_AHEAD
from slidedp.stream.signals import Step

OUTGOING = 2
"""Inputs on their way to the host: one being copied out, one being written."""


class _Ring:
    def __init__(self, device: Device, count: int, numel: int, dtype: torch.dtype) -> None:
        self.memory = [device.empty(numel, dtype) for _ in range(count)]
        self.free: list[Signal | None] = [None] * count
        self._next = 0

    def take(self) -> int:
        """The next buffer in turn."""
        index = self._next
        self._next = (index + 1) % len(self.memory)
        return index


def stash_numel(config: Config, width: int) -> int:
    """Elements of one layer's input on one rank, rounded up to pages."""
    tokens = config.micro_batch_size // int(config.ranks or 1) * config.sequence_length
    return aligned(tokens * width, PAGE // 2)


class ActivationStash:
    """Inputs of the layers whose mode is `offload`: one place on the host for each."""

    def __init__(
        self, device: Device, config: Config, width: int, modes: tuple[str, ...], dtype: torch.dtype
    ) -> None:
        self._device = device
        per_rank = config.micro_batch_size // int(config.ranks or 1)
        self._shape = (per_rank, config.sequence_length, width)
        layers = [i + 1 for i, mode in enumerate(modes) if mode == "offload"]
        self._host: dict[int, torch.Tensor] = {}
        if not layers:
            return
        numel = stash_numel(config, width)
        self._segment = Segment(len(layers) * numel * dtype.itemsize, "activations")
        self._segment.touch()
        memory = self._segment.tensor(dtype)
        for i, unit in enumerate(layers):
            self._host[unit] = memory[i * numel : (i + 1) * numel]
            device.register(self._host[unit])
        self._out = _Ring(device, OUTGOING, numel, dtype)
        self._in = _Ring(device, FETCH_AHEAD, numel, dtype)

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        batch, length, width = self._shape
        return memory[: batch * length * width].view(self._shape)

    def hold(self, step: Step, unit: Unit, hidden: torch.Tensor) -> None:
        """Compute thread: takes a layer's input over, so that its own memory can be reused."""
        index = self._out.take()
        free = self._out.free[index]
        if free is not None:
            free.wait(self._device.compute)
        self._out.free[index] = step.signal("stashed", unit.index)
        self._view(self._out.memory[index]).copy_(hidden)
        step.held[unit.index] = self._out.memory[index]
        step.signal("held", unit.index).fire(self._device.compute)

    def to_host(self, step: Step, unit: Unit) -> None:
        """Transfer thread: copies the held input out."""
        stream = self._device.to_host
        step.signal("held", unit.index).wait(stream)
        with on(stream):
            self._host[unit.index].copy_(step.held.pop(unit.index), non_blocking=True)
        step.signal("stashed", unit.index).fire(stream)

    def to_device(self, step: Step, unit: Unit, release: Signal) -> None:
        """Transfer thread: brings an input back; `release` frees its ring buffer."""
        stream = self._device.to_device
        index = self._in.take()
        free = self._in.free[index]
        if free is not None:
            free.wait(stream)
        self._in.free[index] = release
        step.signal("stashed", unit.index).wait(stream)
        with on(stream):
            self._in.memory[index].copy_(self._host[unit.index], non_blocking=True)
        step.held[unit.index] = self._in.memory[index]
        step.signal("fetched", unit.index).fire(stream)

    def returned(self, step: Step, unit: Unit) -> torch.Tensor:
        """Compute thread: the input, [batch, sequence, width], once it is back."""
        step.signal("fetched", unit.index).wait(self._device.compute)
        return self._view(step.held.pop(unit.index))

    def close(self) -> None:
        """Gives the host memory back."""
        for memory in self._host.values():
            self._device.unregister(memory)
        if self._host:
            self._host.clear()
            self._segment.close()
