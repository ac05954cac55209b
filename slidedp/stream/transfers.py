"""The transfer thread of one rank: it moves units in the order that `slidedp.stream.program` lists.

It meets compute only through signals. Two more threads tell the optimizer worker what has arrived in host
memory, each when it is really there.
"""

import math
import queue
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from slidedp.host.landing import Landing
from slidedp.host.messages import Landed, Written
from slidedp.host.process import doing
from slidedp.layout import Layout
from slidedp.model.units import Unit, chunks, lowest_trained
from slidedp.stream.buffers import Buffers, Elements, is_tied
from slidedp.stream.context import Context
from slidedp.stream.delivery import Delivery, make_delivery
from slidedp.stream.device import on
from slidedp.stream.program import (
    Balance,
    Deliver,
    Fetch,
    Load,
    Reduce,
    Stash,
    Update,
    Visits,
    evaluation,
    transfers,
)
from slidedp.stream.reduction import Arrival, Reduction, Scattered, make_reduction
from slidedp.stream.signals import Index, Step
from slidedp.stream.spill import SpillStore
from slidedp.stream.stash import ActivationStash
from slidedp.stream.transport import Collectives, Copies, Transport, staging_shape
from slidedp.stream.update import ShardUpdate
from slidedp.stream.vocabulary import Vocabulary


class Transfers:
    """All that moves under one layout."""

    def __init__(
        self,
        context: Context,
        layout: Layout,
        landing: Landing,
        buffers: Buffers,
        vocabulary: Vocabulary | None,
    ) -> None:
        config, device, state = context.config, context.device, context.state
        self._layout, self._device, self._rank = layout, device, context.rank
        self._ranks, self._passes = context.ranks, config.gradient_accumulation
        self._state, self._landing, self._gates, self._abort = state, landing, context.gates, context.abort
        self.buffers, self.vocabulary = buffers, vocabulary
        self._units, self._tied = state.units, is_tied(state.units)
        self._routed = context.functions.experts is not None
        layers = len(self._units) - 2
        self._lowest = lowest_trained(self._units)
        self._visits, self._modes = Visits(layers), layout.activation_modes(layers, self._lowest)
        self._transport = self._make_transport(config.gradient_dtype)
        self._updates = ShardUpdate(context, layout, buffers, self._transport)
        width = self._units[-1].parameters[-1].numel
        self.stash = ActivationStash(device, config, width, self._modes, state.dtype)
        self.spill = SpillStore(device)
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._due: deque[tuple[Step, Unit]] = deque()
        """Updates that follow their step: `in_forward` updates a unit before its next delivery."""
        self._landings: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None] = queue.SimpleQueue()
        if device.is_cuda:
            torch.cuda.synchronize()  # buffers are zeroed on one stream, and used on others
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (
                ("slidedp-transfer", self._transfer),
                ("slidedp-landing", lambda: self._report(self._landings)),
                ("slidedp-writing", lambda: self._report(self._writes)),
            )
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, step: Step) -> None:
        """Starts a step's transfers, behind those of the steps before."""
        self._steps.put(step)

    def close(self) -> None:
        """Waits until every transfer has landed, then ends the threads and frees the buffers."""
        self._steps.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.5)
                self._abort.check()
        self._updates.close()
        self._transport.close()
        self.stash.close()
        self.spill.close()

    def _make_transport(self, dtype: torch.dtype) -> Transport:
        if self._layout.transport == "collective" or self._ranks == 1:
            return Collectives(self._device, self._rank, self._ranks, self._abort)
        shape = staging_shape(self._units, self._layout, self._ranks, self._state.dtype.itemsize)
        staging = self._device.zeros(math.prod(shape), dtype).view(shape)
        return Copies(self._device, self.buffers.arena, self._rank, self._ranks, staging, self._abort)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            if self._device.is_cuda:
                torch.cuda.set_device(self._device.torch)
            work()
        except BaseException as error:
            self._abort.fail(error)

    def _transfer(self) -> None:
        device, transport, rank, ranks = self._device, self._transport, self._rank, self._ranks
        delivery = make_delivery(self._layout.delivery, device, transport, rank, ranks)
        reduction = make_reduction(self._layout, device, transport, self._landing, rank, ranks, self._abort)
        norm = self._layout.schedule == "in_forward"
        kept = Scattered(device, transport, self._updates.gradient, rank, ranks, self._abort, norm)
        pieces = self.vocabulary.count if self.vocabulary is not None else 1
        program = transfers(
            len(self._units) - 2,
            min(self._layout.window, len(self._units) - 2),
            self._modes,
            self._tied,
            self._updates.indices,
            self._layout.schedule,
            pieces,
            self._lowest,
            routed=self._routed,
        )
        forward = evaluation(len(self._units) - 2, self._tied, pieces)
        in_forward = self._layout.schedule == "in_forward"
        while (step := self._next_step()) is not None:
            for transfer in program if step.learns else forward:
                if isinstance(transfer, Reduce) and self._units[transfer.unit].frozen:
                    continue
                if isinstance(transfer, Load):
                    self._settle()
                    self._updates.begin(step.timeline)
                    continue
                unit = self._units[transfer.unit]
                doing["transfer"] = (step.number // self._passes, unit.name, type(transfer).__name__.lower())
                if isinstance(transfer, Deliver):
                    self._deliver(step, unit, transfer, delivery)
                    if transfer.visit > self._visits.head:
                        self._updates.load_share()
                elif isinstance(transfer, Reduce):
                    kind = kept if unit.index in self._updates.indices else reduction
                    self._reduce(step, unit, kind, transfer.piece)
                elif isinstance(transfer, Update) and in_forward:
                    self._due.append((step, unit))
                elif isinstance(transfer, Update):
                    self._update(step, unit)
                elif isinstance(transfer, Balance):
                    self._balance(step)
                elif isinstance(transfer, Stash | Fetch):
                    spilled = self._modes[unit.index - 1] == "spill"
                    store: ActivationStash | SpillStore = self.spill if spilled else self.stash
                    if isinstance(transfer, Stash):
                        store.to_host(step, unit)
                    else:
                        store.to_device(step, unit, step.signal("visited", self._visits.backward(unit.index)))
            step.timeline.transferred = not self._due
        self._settle()
        self._landings.put(None)
        self._writes.put(None)

    def _next_step(self) -> Step | None:
        """The next one to move, None after the last. It may wait for the updates of the one before, so
        these go on meanwhile."""
        while self._due:
            try:
                return self._steps.get_nowait()
            except queue.Empty:
                self._update_next()
        return self._steps.get()

    def _update_next(self) -> None:
        step, unit = self._due.popleft()
        self._update(step, unit)
        step.timeline.transferred = not self._due

    def _settle(self) -> None:
        while self._due:
            self._update_next()

    def _chunks(self, unit: Unit) -> list[tuple[int, int]]:
        cut = self._state.dtype.itemsize, self._ranks, self._layout.vocabulary_pieces
        return chunks(unit, self._layout.chunk_bytes, *cut)

    def _deliver(self, step: Step, unit: Unit, transfer: Deliver, delivery: Delivery) -> None:
        slot, forward = self.buffers.slot(unit), transfer.visit <= self._visits.head
        memory: Elements = slot.memory
        parts = self._chunks(unit)
        if self.vocabulary is not None and transfer.piece is not None:
            slot = self.vocabulary.slot(transfer.visit)
            memory = self.vocabulary.slot_memory(unit, transfer.piece, transfer.visit)
            parts = [part for _, part in self.vocabulary.chunks(unit, transfer.piece)]
        while self._due and self._due[0][1].index <= unit.index:
            self._update_next()
        if forward and self._updates.is_fresh(unit):
            slot.free = step.signal("visited", transfer.release)
            gathers = self._transport.gathers
            with step.timeline.span("deliver", unit.name, "gather", gathers, gathers):
                self._updates.gather(unit)
            slot.read = self._transport.gathered()
            step.signal("delivered", transfer.visit).fire(gathers)
            return
        # Publish, then deliver: in backward too, where the forward took a fresh slot and the version that
        # it computed with may still be on its way to the host.
        while self._due and not self._gates.is_published(unit.index, step.number):
            self._update_next()
        self._gates.wait_published(unit.index, step.number)
        slot.wait_free(self._device.to_device)
        slot.wait_free(delivery.stream)
        slot.free = step.signal("visited", transfer.release)
        source = self._state.delivered(unit)
        with step.timeline.span("deliver", unit.name, "deliver", self._device.to_device, delivery.stream):
            for start, stop in parts:
                delivery.chunk(source, memory, start, stop)
        slot.read = self._transport.gathered()
        step.signal("delivered", transfer.visit).fire(delivery.stream)

    def _reduce(self, step: Step, unit: Unit, reduction: Reduction, piece: int | None) -> None:
        index: Index = unit.index
        buffer, parts = self.buffers.gradient(unit), list(enumerate(self._chunks(unit)))
        gradient: Elements = buffer.memory
        reduces = self._transport.reduces
        if self.vocabulary is not None and piece is not None:
            index, buffer = (unit.index, piece), self.vocabulary.gradient(unit, piece)
            gradient = self.vocabulary.gradient_memory(unit, piece)
            parts = self.vocabulary.chunks(unit, piece)
        complete = step.signal("gradient", index)
        complete.wait(reduces)
        complete.wait(self._device.to_host)
        stays = unit.index in self._updates.indices
        if not stays:
            self._gates.wait_consumed(*self._landing.plan.previous(unit, step.number))
        with step.timeline.span("reduce", unit.name, "reduce", reduces, self._device.to_host):
            for i, (start, stop) in parts:
                arrival = reduction.chunk(unit, gradient, start, stop)
                if stays:
                    self._updates.landed(unit, start, arrival.done)
                if not stays or self._layout.schedule == "in_forward":
                    self._landings.put((Landed(step.number, unit.index, i, 0.0), arrival))
        # The buffer is free when both the reductions and the copies that read it have run.
        if self._device.to_host is not None and reduces is not None:
            self._device.to_host.wait_stream(reduces)
        buffer.read = self._transport.reduced()
        step.signal("reduced", index).fire(self._device.to_host)

    def _balance(self, step: Step) -> None:
        assert step.routing is not None
        step.signal("routed", 0).wait(self._device.collective)
        if self._ranks > 1:
            with on(self._device.collective):
                dist.all_reduce(step.routing.sums)
        step.signal("balanced", 0).fire(self._device.collective)

    def _update(self, step: Step, unit: Unit) -> None:
        with step.timeline.span("update", unit.name, "update", self._device.update, self._device.update):
            written = self._updates.update(unit, step.number)
        self._writes.put((Written(step.number, unit.index), Arrival(written, None)))

    def _report(self, arrivals: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None]) -> None:
        """Tells the worker about arrivals in order, each when it is really in host memory."""
        while (item := arrivals.get()) is not None:
            message, arrival = item
            arrival.done.synchronize()
            if isinstance(message, Landed) and arrival.sum_of_squares is not None:
                message = message._replace(sum_of_squares=float(arrival.sum_of_squares))
            self._gates.send(message)
