"""Updates on the GPU: each rank updates its share of some units where the summed gradient is.

Per chunk: the FP32 state of the rank's share comes up into a ring of buffers, ahead of time; AdamW runs
when the gradient is reduced (`in_forward`: when the norm is known); the working copy and the state go
back to the host, which stays the authority. No gradient of these units ever crosses the link.

Units at the turn from backward to forward (`embed` and the first layers) are updated last and needed
first. Their slots are theirs in between, so what ranks compute with goes there at once, and the next
step's delivery is one all-gather between GPUs.
"""

from collections import deque

import torch

from slidedp.config import Config, Layout
from slidedp.host.groups import segments
from slidedp.host.messages import Coefficients
from slidedp.host.state import HostState
from slidedp.model.units import Unit, chunks, frozen_units, padded_numel, shard
from slidedp.stream.adamw import adamw_update
from slidedp.stream.buffers import Buffers
from slidedp.stream.device import Abort, Device, Signal, on
from slidedp.stream.gates import Gates
from slidedp.stream.timeline import Timeline
from slidedp.stream.transport import UPDATE, Offer, Transport


class _Entry:
    """A ring buffer: the share of one chunk's master, exp_avg and exp_avg_sq, and the new master in the
    compute dtype."""

    def __init__(self, device: Device, numel: int, dtype: torch.dtype) -> None:
        self.state = [device.zeros(numel, torch.float32) for _ in range(3)]
        self.out = device.zeros(numel, dtype)
        self.loaded: Signal | None = None
        self.free: Signal | None = None


def update_numels(units: tuple[Unit, ...], layout: Layout, ranks: int, itemsize: int) -> tuple[int, int]:
    """(elements of all ring buffers, elements of the waiting gradients) on one rank."""
    here = [units[i] for i in layout.updated_on_gpu(len(units) - 2, frozen_units(units))]
    cut = layout.chunk_bytes, itemsize, ranks, layout.vocabulary_pieces
    pieces = [stop - start for u in here for start, stop in chunks(u, *cut)]
    share = max((shard(0, piece, 0, ranks)[1] for piece in pieces), default=0)
    return min(layout.update_slots, len(pieces)) * share, sum(padded_numel(u, ranks) // ranks for u in here)


class ShardUpdate:
    """A rank's share of the units that a layout updates on the GPUs. All methods but the constructor
    belong to the transfer thread."""

    def __init__(
        self,
        device: Device,
        config: Config,
        layout: Layout,
        buffers: Buffers,
        transport: Transport,
        state: HostState,
        gates: Gates,
        rank: int,
        ranks: int,
        abort: Abort,
    ) -> None:
        self._device, self._optimizer, self._buffers = device, config.optimizer, buffers
        self._transport = transport
        self._state, self._gates, self._abort = state, gates, abort
        self._rank, self._ranks = rank, ranks
        self.indices = layout.updated_on_gpu(len(state.units) - 2, frozen_units(state.units))
        # An embedding in pieces has no slot of its own.
        self._in_slot = range(int(layout.vocabulary_pieces > 1), min(layout.window, len(state.units) - 2) + 1)
        order = sorted(self.indices, reverse=layout.schedule == "in_backward")
        itemsize = state.dtype.itemsize
        cut = layout.chunk_bytes, itemsize, ranks, layout.vocabulary_pieces
        self._chunks = {i: chunks(state.units[i], *cut) for i in order}
        self._gradients = {
            i: device.zeros(padded_numel(state.units[i], ranks) // ranks, config.gradient_dtype)
            for i in order
        }
        self._segments = {i: segments(state.units[i], config.optimizer) for i in order}
        self._sequence = [(state.units[i], *chunk) for i in order for chunk in self._chunks[i]]
        entries = min(layout.update_slots, len(self._sequence))
        numel = update_numels(state.units, layout, ranks, itemsize)[0] // max(1, entries)
        self._ring = [_Entry(device, numel, state.dtype) for _ in range(entries)]
        self._position = 0
        self._loaded: deque[_Entry] = deque()
        self._written: dict[tuple[int, int], Signal] = {}
        self._landed: dict[tuple[int, int], Signal] = {}
        self._fresh: dict[int, list[Offer]] = {}

    # --- gradients ------------------------------------------------------------------------------

    def gradient(self, unit: Unit, start: int, stop: int) -> torch.Tensor:
        """Where the rank's share of the unit's elements [start, stop), a chunk, waits for its update."""
        first, _, last = shard(start, stop, self._rank, self._ranks)
        place = start // self._ranks
        return self._gradients[unit.index][place : place + last - first]

    def landed(self, unit: Unit, start: int, done: Signal) -> None:
        """The gradient of the chunk at `start` is summed, and in its place, when `done` fires."""
        self._landed[unit.index, start] = done

    # --- state ----------------------------------------------------------------------------------

    def begin(self, timeline: Timeline) -> None:
        """Starts to bring up the state that the step's updates begin with."""
        self._position, self._timeline = 0, timeline
        if self._device.state_in is not None and self._device.to_device is not None:
            # The head's delivery is on its way, and needed at once.
            self._device.state_in.wait_stream(self._device.to_device)
        for _ in self._ring:
            self._load_next()

    def _load_next(self) -> None:
        if self._position == len(self._sequence):
            return
        unit, start, stop = self._sequence[self._position]
        self._position += 1
        entry = self._ring.pop(0)
        self._ring.append(entry)
        stream = self._device.state_in
        for earlier in (entry.free, self._written.get((unit.index, start))):
            if earlier is not None:
                earlier.wait(stream)
        first, _, last = shard(start, stop, self._rank, self._ranks)
        with self._timeline.span("load", unit.name, "load", stream, stream), on(stream):
            for target, source in zip(entry.state, self._state.tensors(unit), strict=True):
                target[: last - first].copy_(source[first:last], non_blocking=True)
        entry.loaded = self._fired(stream)
        self._loaded.append(entry)

    def _fired(self, stream: torch.cuda.Stream | None) -> Signal:
        signal = Signal(self._abort)
        signal.fire(stream)
        return signal

    def update(self, unit: Unit, step: int) -> Signal:
        """Enqueues the unit's update of `step`; the signal fires when all of it is on the host."""
        device, coefficients = self._device, self._gates.wait_coefficients(step)
        slot = self._buffers.slot(unit) if unit.index in self._in_slot else None
        if slot is not None:
            slot.wait_free(device.update)
        offers = []
        for start, stop in self._chunks[unit.index]:
            first, _, last = shard(start, stop, self._rank, self._ranks)
            entry = self._loaded.popleft()
            assert entry.loaded is not None
            entry.loaded.wait(device.update)
            self._landed[unit.index, start].wait(device.update)
            state = [tensor[: last - first] for tensor in entry.state]
            out = entry.out[: last - first]
            grad_scale = coefficients.grad_scale
            if grad_scale is None:
                entry.free = self._fired(device.update)
                self._load_next()
                continue
            with on(device.update):
                gradient = self.gradient(unit, start, stop)
                self._adamw(unit, first, last, [*state, out, gradient], grad_scale, coefficients)
                if slot is not None:  # a copy: the slot may be another unit's before `out` is on the host
                    slot.memory[first:last].copy_(out)
            if slot is not None:
                offers.append(self._transport.offer(UPDATE, device.update))
            self._fired(device.update).wait(device.state_out)
            stream = device.state_out
            with self._timeline.span("write", unit.name, "write", stream, stream), on(stream):
                if self._state.unit(unit).working is not None:  # what others wait for goes first
                    self._state.delivered(unit)[first:last].copy_(out, non_blocking=True)
                for target, source in zip(self._state.tensors(unit), state, strict=True):
                    target[first:last].copy_(source, non_blocking=True)
            entry.free = self._written[unit.index, start] = self._fired(device.state_out)
            self._load_next()
        # A step that is skipped leaves the slot as it is: embed's holds the head by then.
        if slot is not None and coefficients.grad_scale is not None:
            self._fresh[unit.index] = offers
        return self._fired(device.state_out)

    def _adamw(
        self,
        unit: Unit,
        first: int,
        last: int,
        tensors: list[torch.Tensor],
        grad_scale: float,
        coefficients: Coefficients,
    ) -> None:
        """AdamW on elements [first, last) of the unit: master, exp_avg, exp_avg_sq, out, gradient."""
        settings = self._optimizer
        for segment in self._segments[unit.index]:
            start, stop, lr_factor, weight_decay = segment.within(first, last)
            if start < stop:
                adamw_update(
                    *(tensor[start - first : stop - first] for tensor in tensors),
                    grad_scale=grad_scale,
                    lr=coefficients.lr * lr_factor,
                    betas=settings.betas,
                    eps=settings.eps,
                    weight_decay=weight_decay,
                    step=coefficients.update,
                )

    # --- delivery -------------------------------------------------------------------------------

    def is_fresh(self, unit: Unit) -> bool:
        """Whether the unit's slot holds this rank's share of the version that comes next."""
        return unit.index in self._fresh

    def gather(self, unit: Unit) -> None:
        """Enqueues what makes a fresh slot whole."""
        slot, offers = self._buffers.slot(unit).memory, self._fresh.pop(unit.index)
        for (start, stop), offer in zip(self._chunks[unit.index], offers, strict=True):
            first, last, _ = shard(start, stop, self._rank, self._ranks)
            self._transport.all_gather(slot[start : start + (last - first) * self._ranks], offer)
