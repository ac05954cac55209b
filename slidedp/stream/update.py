"""Updates on the GPU: each rank updates its share of some units where the summed gradient is.

Per chunk: the FP32 state of the rank's share comes up into a ring of buffers, ahead of time; AdamW runs
when the gradient is reduced (`in_forward`: when the norm is known); the working copy and the state go
back to the host, which stays the authority. No gradient of these units ever crosses the link.

The state of *resident* units stays on the GPU instead, where there is room: 2 bytes per parameter cross the
link and not 26. The host gets the state for a checkpoint, and when these updates end.

Units at the turn from backward to forward (`embed` and the first layers) are updated last and needed
first. Their slots are theirs in between, so what ranks compute with goes there at once, and the next
step's delivery is one all-gather between GPUs.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from slidedp.host.groups import Segment, segments
from slidedp.host.messages import Coefficients
from slidedp.layout import Layout
from slidedp.model.units import Unit, aligned, chunks, frozen_units, lowest_trained, padded_numel, shard
from slidedp.stream.adamw import adamw_update
from slidedp.stream.buffers import Buffers, output_matrix
from slidedp.stream.context import Context
from slidedp.stream.device import Device, Signal, on
from slidedp.stream.program import head_in_visits
from slidedp.stream.timeline import Timeline
from slidedp.stream.transport import UPDATE, Offer, Transport


class _State:
    """The share of one chunk's master, exp_avg and exp_avg_sq, in a buffer of the ring or resident."""

    def __init__(self, device: Device, numel: int) -> None:
        self.tensors = [device.zeros(numel, torch.float32) for _ in range(3)]
        self.loaded: Signal | None = None
        self.free: Signal | None = None
        """Fired when nothing reads it any more."""


class _Out:
    """A buffer for the new master in the compute dtype, on its way to the host."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self.memory = device.zeros(numel, dtype)
        self.free: Signal | None = None


class _Part(NamedTuple):
    """A rank's share of one chunk of a unit, in all the places that it has. Cut once, not in every step: the
    transfer thread shares its interpreter with compute."""

    unit: Unit
    start: int
    """Of the chunk, in elements of the unit."""
    stop: int
    first: int
    """Of the share."""
    numel: int
    gradient: torch.Tensor
    """Where the summed gradient waits."""
    state: tuple[torch.Tensor, ...]
    """master, exp_avg and exp_avg_sq on the host."""
    working: torch.Tensor | None
    """What ranks are delivered, on the host; None where that is the master."""
    segments: tuple[Segment, ...]
    """What is updated alike, counted from `first`."""

    @property
    def key(self) -> tuple[int, int]:
        return self.unit.index, self.start


class _Slice(NamedTuple):
    """Elements [first, last) of a part's state, which come up with one share."""

    part: _Part
    first: int
    last: int
    share: int


def _shared_out(parts: list[_Part], shares: int) -> list[_Slice]:
    """The state of `parts`, cut into equal shares."""
    size = aligned(-(-sum(part.numel for part in parts) // shares)) or 1
    slices, before = [], 0
    for part in parts:
        first, last = 0, -1
        while last < part.numel:
            share = (before + first) // size
            last = min(part.numel, (share + 1) * size - before)
            slices.append(_Slice(part, first, last, share))
            first = last
        before += part.numel
    return slices


class UpdateNumels(NamedTuple):
    """Elements on one rank."""

    ring: int
    """FP32 state on its way, three tensors of it."""
    resident: int
    """FP32 state that stays, three tensors of it."""
    out: int
    """In the compute dtype."""
    gradients: int
    """That wait for their update."""


def update_numels(units: tuple[Unit, ...], layout: Layout, ranks: int, itemsize: int) -> UpdateNumels:
    layers, frozen = len(units) - 2, frozen_units(units)
    here, stay = layout.updated_on_gpu(layers, frozen), layout.resident_on_gpu(layers, frozen)
    cut = layout.chunk_bytes, itemsize, ranks, layout.vocabulary_pieces

    known: dict[int, list[int]] = {}

    def shares(index: int) -> list[int]:
        kind = units[index].numel if 0 < index <= layers else -index  # layers of one size are cut alike
        if kind not in known:
            parts = chunks(units[index], *cut)
            known[kind] = [shard(*part, 0, ranks)[1] - part[0] for part in parts]
        return known[kind]

    def of(indices: frozenset[int]) -> list[int]:
        return [n for index in indices for n in shares(index)]

    moving, every = of(here - stay), of(here)
    return UpdateNumels(
        ring=min(layout.update_slots, len(moving)) * max(moving, default=0),
        resident=sum(of(stay)),
        out=min(layout.update_slots, len(every)) * max(every, default=0),
        gradients=sum(padded_numel(units[i], ranks) // ranks for i in here),
    )


class ShardUpdate:
    """A rank's share of the units that a layout updates on the GPUs. All methods but the constructor and
    `close` belong to the transfer thread."""

    def __init__(self, context: Context, layout: Layout, buffers: Buffers, transport: Transport) -> None:
        config, device, state, ranks = context.config, context.device, context.state, context.ranks
        self._device, self._optimizer, self._buffers = device, config.optimizer, buffers
        self._transport = transport
        self._state, self._gates, self._abort = state, context.gates, context.abort
        self._rank, self._ranks = context.rank, ranks
        layers, frozen = len(state.units) - 2, frozen_units(state.units)
        self.indices = layout.updated_on_gpu(layers, frozen)
        self._in_slot = layout.own_slots(layers)
        order = sorted(self.indices, reverse=layout.schedule == "in_backward")
        cut = layout.chunk_bytes, state.dtype.itemsize, ranks, layout.vocabulary_pieces
        self._parts = {
            i: self._cut(state.units[i], chunks(state.units[i], *cut), config.gradient_dtype) for i in order
        }
        self._gradients = {part.key: part.gradient for parts in self._parts.values() for part in parts}
        resident = layout.resident_on_gpu(layers, frozen)
        streamed = [part for i in order if i not in resident for part in self._parts[i]]
        matrix, layer = output_matrix(state.units), state.units[1]
        head = head_in_visits(matrix.numel, layer.numel, layout.vocabulary_pieces)
        visits = max(1, layers + 1 - lowest_trained(state.units))  # of backward
        self._slices = _shared_out(streamed, visits + head)
        numels = update_numels(state.units, layout, ranks, state.dtype.itemsize)
        entries = min(layout.update_slots, len(streamed))
        self._ring = deque(_State(device, numels.ring // entries) for _ in range(entries))
        count = min(layout.update_slots, len(self._gradients))
        self._outs = deque(_Out(device, numels.out // count, state.dtype) for _ in range(count))
        self._ahead = min(layout.window, layers) + 1 + head
        self._position = self._begun = self._taken = self._due = 0
        self._loaded: deque[_State] = deque()
        self._written: dict[tuple[int, int], Signal] = {}
        self._landed: dict[tuple[int, int], Signal] = {}
        self._fresh: dict[int, list[Offer]] = {}
        self._resident = self._bring([part for i in sorted(resident) for part in self._parts[i]])

    def _cut(self, unit: Unit, spans: list[tuple[int, int]], dtype: torch.dtype) -> list[_Part]:
        """The unit's parts, and memory for its gradient."""
        gradient = self._device.zeros(padded_numel(unit, self._ranks) // self._ranks, dtype)
        state, working = self._state.tensors(unit), None
        if self._state.unit(unit).working is not None:
            working = self._state.delivered(unit)
        alike = segments(unit, self._optimizer)
        parts = []
        for start, stop in spans:
            first, _, last = shard(start, stop, self._rank, self._ranks)
            place = start // self._ranks
            inside = [segment.within(first, last) for segment in alike]
            parts.append(
                _Part(
                    unit,
                    start,
                    stop,
                    first,
                    last - first,
                    gradient[place : place + last - first],
                    tuple(array[first:last] for array in state),
                    None if working is None else working[first:last],
                    tuple(
                        s._replace(start=s.start - first, stop=s.stop - first)
                        for s in inside
                        if s.start < s.stop
                    ),
                )
            )
        return parts

    # --- gradients ------------------------------------------------------------------------------

    def gradient(self, unit: Unit, start: int, stop: int) -> torch.Tensor:
        """Where the rank's share of the unit's elements [start, stop), a chunk, waits for its update."""
        return self._gradients[unit.index, start]

    def landed(self, unit: Unit, start: int, done: Signal) -> None:
        """The gradient of the chunk at `start` is summed, and in its place, when `done` fires."""
        self._landed[unit.index, start] = done

    # --- state ----------------------------------------------------------------------------------

    def begin(self, timeline: Timeline) -> None:
        """Starts to bring up the state of a step's updates, behind the deliveries of its forward."""
        self._position = self._begun = self._taken = self._due = 0
        self._timeline = timeline
        self.load_share(self._ahead)

    def load_share(self, visits: int = 1) -> None:
        """Lets the shares of the state come up that fall to so many of backward's visits, behind what is
        being delivered.

        A copy engine takes copies in the order in which nothing holds them back any more, whatever their
        streams and priorities: on an H200 33 MB stood behind all of 4.8 GB, for 79 to 97 ms. State that came
        up at once would hold up the deliveries that compute waits for.
        """
        if self._position == len(self._slices):
            return
        self._due += visits
        if self._device.state_in is not None and self._device.to_device is not None:
            self._device.state_in.wait_stream(self._device.to_device)
        self._load_due()

    def _load_due(self) -> None:
        """Loads what is due, as far as there are buffers."""
        while self._position < len(self._slices):
            due = self._slices[self._position]
            full = due.first == 0 and self._begun == self._taken + len(self._ring)
            if full or due.share >= self._due:
                return
            self._load_next()

    def _load_next(self) -> None:
        part, first, last, _ = self._slices[self._position]
        self._position += 1
        stream = self._device.state_in
        if first == 0:
            self._begun += 1
            self._ring.rotate(-1)
            for earlier in (self._ring[-1].free, self._written.get(part.key)):
                if earlier is not None:
                    earlier.wait(stream)
        entry = self._ring[-1]
        with self._timeline.span("load", part.unit.name, "load", stream, stream):
            self._load(entry, part, first, last)
        if last == part.numel:
            self._loaded.append(entry)

    def _load(self, entry: _State, part: _Part, first: int, last: int) -> None:
        with on(self._device.state_in):
            for target, source in zip(entry.tensors, part.state, strict=True):
                target[first:last].copy_(source[first:last], non_blocking=True)
        entry.loaded = self._fired(self._device.state_in)

    def _bring(self, stay: list[_Part]) -> dict[tuple[int, int], _State]:
        """The state that stays, by unit and start of the chunk."""
        ranks = self._ranks
        padded = {part.key: shard(part.start, part.stop, 0, ranks)[1] - part.start for part in stay}
        brought = {part.key: _State(self._device, padded[part.key]) for part in stay}
        if self._device.state_in is not None:  # it is zeroed there
            self._device.state_in.wait_stream(torch.cuda.current_stream())
        for part in stay:
            self._load(brought[part.key], part, 0, part.numel)
        return brought

    def close(self) -> None:
        """Writes to the host what has stayed, on every rank: all of it is there on return."""
        if not self._resident:
            return
        for parts in self._parts.values():
            for part in parts:
                if (entry := self._resident.get(part.key)) is not None:
                    assert entry.loaded is not None
                    entry.loaded.wait(self._device.state_out)  # where no step has run, no update has
                    with on(self._device.state_out):
                        self._write(entry, part, count=3)
        self._fired(self._device.state_out).synchronize()
        if self._ranks > 1:
            dist.barrier()  # whoever reads next may read another rank's share

    @staticmethod
    def _write(entry: _State, part: _Part, count: int) -> None:
        """Enqueues the way to the host of the first `count` of master, exp_avg and exp_avg_sq."""
        for target, source in zip(part.state[:count], entry.tensors, strict=False):
            target.copy_(source[: part.numel], non_blocking=True)

    def _fired(self, stream: torch.cuda.Stream | None) -> Signal:
        signal = Signal(self._abort)
        signal.fire(stream)
        return signal

    def update(self, unit: Unit, step: int) -> Signal:
        """Enqueues the unit's update of `step`; the signal fires when the host has what is to go there."""
        device, coefficients = self._device, self._gates.wait_coefficients(step)
        skipped, stream = coefficients.grad_scale is None, device.state_out
        slot = self._buffers.slot(unit) if unit.index in self._in_slot else None
        if slot is not None:
            slot.wait_free(device.update)
        offers = []
        for part in self._parts[unit.index]:
            resident = self._resident.get(part.key)
            while resident is None and not self._loaded:
                self._load_next()  # sooner than its share
            entry, out = resident or self._loaded.popleft(), self._outs[0]
            for earlier in (entry.loaded, entry.free, self._landed[part.key]):
                if earlier is not None:
                    earlier.wait(device.update)
            if not skipped:
                if out.free is not None:
                    out.free.wait(device.update)
                new = out.memory[: part.numel]
                with on(device.update):
                    self._adamw(part, entry, new, coefficients)
                    if slot is not None:
                        slot.memory[part.first : part.first + part.numel].copy_(new)
                if slot is not None:
                    offers.append(self._transport.offer(UPDATE, device.update))
            self._fired(device.update).wait(stream)
            with self._timeline.span("write", unit.name, "write", stream, stream), on(stream):
                if part.working is not None and not skipped:  # what others wait for goes first
                    part.working.copy_(new, non_blocking=True)
                self._write(entry, part, self._leaving(part, resident is not None, coefficients))
            entry.free = out.free = self._fired(stream)
            self._outs.rotate(-1)
            if resident is None:
                self._written[part.key] = entry.free
                self._taken += 1
                self._load_due()
        # A step that is skipped leaves the slot as it is: embed's holds the head by then.
        if slot is not None and not skipped:
            self._fresh[unit.index] = offers
        return self._fired(stream)

    @staticmethod
    def _leaving(part: _Part, stays: bool, coefficients: Coefficients) -> int:
        """How many tensors of a part's state go to the host."""
        if coefficients.store and stays:
            return 3
        if coefficients.grad_scale is None:  # the host has them
            return 0
        if not stays:
            return 3
        return 0 if part.working is not None else 1  # FP32 ranks are delivered the master itself

    def _adamw(self, part: _Part, entry: _State, out: torch.Tensor, coefficients: Coefficients) -> None:
        """AdamW on the part; `out` receives its new master in the compute dtype."""
        settings = self._optimizer
        assert coefficients.grad_scale is not None
        tensors = [*(tensor[: part.numel] for tensor in entry.tensors), out, part.gradient]
        for segment in part.segments:
            whole = segment.stop - segment.start == part.numel
            adamw_update(
                *(tensors if whole else [tensor[segment.start : segment.stop] for tensor in tensors]),
                grad_scale=coefficients.grad_scale,
                lr=coefficients.lr * segment.lr_factor,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=segment.weight_decay,
                step=coefficients.update,
            )

    # --- delivery -------------------------------------------------------------------------------

    def is_fresh(self, unit: Unit) -> bool:
        """Whether the unit's slot holds this rank's share of the version that comes next."""
        return unit.index in self._fresh

    def gather(self, unit: Unit) -> None:
        """Enqueues what makes a fresh slot whole."""
        slot, offers = self._buffers.slot(unit).memory, self._fresh.pop(unit.index)
        for part, offer in zip(self._parts[unit.index], offers, strict=True):
            first, last, _ = shard(part.start, part.stop, self._rank, self._ranks)
            self._transport.all_gather(slot[part.start : part.start + (last - first) * self._ranks], offer)
