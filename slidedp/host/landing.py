"""Where gradients arrive in host memory.

`cpu` reduction has one lane per rank, so that no two ranks ever write the same addresses; the others
have a single lane. `embed` and `head` have zones of their own; decoder layers have too, or share a ring.
With the `in_forward` schedule gradients wait for the global norm, so every unit has a place: directly
where they land (one lane), or in a store that the worker sums the lanes into. Units that are updated on
the GPUs have no place here: their gradients stay there. Frozen units have none at all.
"""

import numpy as np
import torch

from slidedp.host.memory import PAGE, Handle, Segment
from slidedp.host.state import unit_starts
from slidedp.layout import Layout
from slidedp.model.units import Unit, aligned, frozen_units

RING = 4
"""Layer zones of a lane: one being written, one complete, one being updated, one to spare."""


class LandingPlan:
    """The arithmetic of zones: all offsets are elements of the gradient dtype, on page boundaries."""

    def __init__(self, units: tuple[Unit, ...], ranks: int, layout: Layout, itemsize: int) -> None:
        elsewhere = layout.updated_on_gpu(len(units) - 2) | frozen_units(units)
        here = [unit.index not in elsewhere for unit in units]
        self.units, self.itemsize = units, itemsize
        self.lanes = ranks if layout.reduction == "cpu" else 1
        self._layers = [unit.index for unit in units[1:-1] if here[unit.index]]
        waits = layout.schedule == "in_forward"
        self.whole = self.lanes == 1 if waits else layout.landing == "full"
        """Whether every layer has a zone of its own."""
        self.ring = len(self._layers) if self.whole else min(RING, len(self._layers))
        zone = max((aligned(units[i].numel, PAGE // 2) for i in self._layers), default=0)
        embed, head = (aligned(units[i].numel, PAGE // 2) if here[i] else 0 for i in (0, -1))
        self._zones = [0, *(embed + i * zone for i in range(self.ring)), embed + self.ring * zone]
        self.lane_stride = self._zones[-1] + head
        self.stored = waits and self.lanes > 1
        starts = unit_starts(units)
        self._store = [self.lanes * self.lane_stride + start for start in starts[:-1]]
        self.numel = self.lanes * self.lane_stride + (starts[-1] if self.stored else 0)
        self.nbytes = self.numel * itemsize

    def zone(self, unit: Unit) -> int:
        """First element of the unit's zone in lane 0."""
        if unit.index == 0:
            return 0
        if unit.index == len(self.units) - 1:
            return self._zones[-1]
        return self._zones[1 + self._layers.index(unit.index) % self.ring]

    def store(self, unit: Unit) -> int:
        """First element of the place where the unit's summed gradient waits for the norm."""
        return self._store[unit.index] if self.stored else self.zone(unit)

    def previous(self, unit: Unit, step: int) -> tuple[int, int]:
        """(unit index, step) of the gradient that was in the unit's zone before; layers land last
        to first."""
        if unit.index in (0, len(self.units) - 1):
            return unit.index, step - 1
        place = self._layers.index(unit.index)
        if place + self.ring < len(self._layers):
            return self._layers[place + self.ring], step
        return self._layers[place % self.ring], step - 1

    @property
    def shape(self) -> tuple[int, list[tuple[int, int]]]:
        """Plans of one shape can take turns on one memory."""
        return self.nbytes, self.pieces()

    def pieces(self) -> list[tuple[int, int]]:
        """Ranges to register with CUDA: whole zones of all lanes, and nothing of the store."""
        ends = [*self._zones[1:], self.lane_stride]
        return [
            (lane * self.lane_stride + start, lane * self.lane_stride + end)
            for lane in range(self.lanes)
            for start, end in zip(self._zones, ends, strict=True)
        ]


class Landing:
    """The memory behind a plan. Its owner passes no handle; others open the owner's."""

    def __init__(self, plan: LandingPlan, dtype: torch.dtype, handle: Handle | None = None) -> None:
        self.plan = plan
        """How it is cut. One of the same shape may take its place between two steps."""
        self._segment = Segment.open(handle) if handle else Segment(plan.nbytes, "landing")
        if handle is None:
            self._segment.touch()
        self.tensor = self._segment.tensor(dtype)
        bits = np.float32 if dtype == torch.float32 else np.uint16
        self.array = self._segment.array(bits)

    @property
    def handle(self) -> Handle:
        return self._segment.handle

    def lane(self, unit: Unit, lane: int) -> torch.Tensor:
        """Where `lane` lands the unit's gradient, [unit.numel]."""
        start = lane * self.plan.lane_stride + self.plan.zone(unit)
        return self.tensor[start : start + unit.numel]

    def close(self) -> None:
        del self.tensor, self.array
        self._segment.close()
