"""The authoritative training state: one FP32 master and its Adam moments per machine.

Units lie one behind another, each on a page boundary, so that a unit can be registered with CUDA
and copied as a whole: a DMA may not cross two registrations.
"""

from typing import NamedTuple

import numpy as np
import torch

from slidedp.host import kernels
from slidedp.host.memory import PAGE, Handle, Segment
from slidedp.model.units import Parameter, Unit, aligned


class StateHandle(NamedTuple):
    """What another process needs to open the state."""

    units: tuple[Unit, ...]
    dtype: torch.dtype
    segments: dict[str, Handle]


class UnitState(NamedTuple):
    """One unit's slices, each [unit.numel]."""

    master: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    working: np.ndarray | None
    """BF16 bits that ranks read; None with FP32 compute, where ranks read `master` itself."""


def aligned_numel(unit: Unit) -> int:
    """Elements of the unit in each array: pages of BF16, so pages of FP32 too."""
    return aligned(unit.numel, PAGE // 2)


def unit_starts(units: tuple[Unit, ...]) -> list[int]:
    """First element of each unit, and the total."""
    starts = [0]
    for unit in units:
        starts.append(starts[-1] + aligned_numel(unit))
    return starts


def state_bytes(units: tuple[Unit, ...], dtype: torch.dtype) -> int:
    """Host bytes: 12 per parameter, and 2 for the working copy with BF16 compute."""
    return unit_starts(units)[-1] * (12 if dtype == torch.float32 else 14)


class HostState:
    """Master weights, exp_avg, exp_avg_sq (FP32) and, with BF16 compute, the BF16 working copy.

    The moments of frozen units have addresses and no memory: nobody may read them.
    """

    def __init__(self, units: tuple[Unit, ...], dtype: torch.dtype) -> None:
        total = unit_starts(units)[-1]
        sizes = {"master": 4 * total, "exp_avg": 4 * total, "exp_avg_sq": 4 * total}
        if dtype == torch.bfloat16:
            sizes["working"] = 2 * total
        self._adopt(units, dtype, {name: Segment(size, name) for name, size in sizes.items()})

    @classmethod
    def open(cls, handle: StateHandle) -> "HostState":
        """Maps the state of another process."""
        state = cls.__new__(cls)
        opened = {name: Segment.open(segment) for name, segment in handle.segments.items()}
        state._adopt(handle.units, handle.dtype, opened)
        return state

    def _adopt(self, units: tuple[Unit, ...], dtype: torch.dtype, segments: dict[str, Segment]) -> None:
        self.units, self.dtype, self._segments = units, dtype, segments
        self._starts = unit_starts(units)
        self._arrays = {
            name: segment.array(np.uint16 if name == "working" else np.float32)
            for name, segment in segments.items()
        }

    def touch(self) -> None:
        """Zeros all of it with all threads: the first touch of a large state takes one thread minutes."""
        for name, array in self._arrays.items():
            for unit, start, stop in zip(self.units, self._starts, self._starts[1:], strict=False):
                if not (unit.frozen and name.startswith("exp_avg")):
                    kernels.fill(array[start:stop], 0.0)

    @property
    def handle(self) -> StateHandle:
        handles = {name: segment.handle for name, segment in self._segments.items()}
        return StateHandle(self.units, self.dtype, handles)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments.values())

    def unit(self, unit: Unit) -> UnitState:
        """The unit's slices of every array."""
        start = self._starts[unit.index]
        span = slice(start, start + unit.numel)
        arrays = {name: array[span] for name, array in self._arrays.items()}
        return UnitState(arrays["master"], arrays["exp_avg"], arrays["exp_avg_sq"], arrays.get("working"))

    def delivered(self, unit: Unit) -> torch.Tensor:
        """What ranks copy to the GPU: the unit's working copy, [unit.numel] of the compute dtype."""
        state = self.unit(unit)
        if state.working is None:
            return torch.from_numpy(state.master)
        return torch.from_numpy(state.working).view(torch.bfloat16)

    def tensors(self, unit: Unit) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The unit's master, exp_avg and exp_avg_sq, each FP32 [unit.numel]."""
        state = self.unit(unit)
        master, exp_avg, exp_avg_sq = map(torch.from_numpy, (state.master, state.exp_avg, state.exp_avg_sq))
        return master, exp_avg, exp_avg_sq

    def values(self, unit: Unit, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`; no copy where the state has it (a working copy is the rounded master)."""
        buffer = self.delivered(unit) if dtype == self.dtype else torch.from_numpy(self.unit(unit).master)
        return parameter.view(buffer).to(dtype)

    def refresh_working(self) -> None:
        """Makes the working copy from the master, after loading."""
        if "working" in self._arrays:
            kernels.to_bf16(self._arrays["master"], self._arrays["working"])

    def close(self) -> None:
        """Gives the memory back once no other process maps it."""
        self._arrays.clear()
        for segment in self._segments.values():
            segment.close()
