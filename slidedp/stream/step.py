"""One step of one rank: a compute thread that visits units, a transfer thread that moves them.

The compute thread (`Engine.step`) and the transfer thread meet only through signals: `delivered`,
`visited`, `gradient`, `reduced`, and for offloaded layer inputs `stashed` and `fetched`. Both enqueue
and run ahead; on CUDA the waiting itself happens on the GPU, by events.
"""

import math
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from slidedp.config import Config, Layout
from slidedp.host.landing import Landing
from slidedp.host.messages import Landed, Written
from slidedp.host.process import doing
from slidedp.host.state import HostState
from slidedp.model.documents import PositionsByKind
from slidedp.model.experts import Experts, Routing
from slidedp.model.families import LayerFunction
from slidedp.model.loss import SoftmaxGradient, linear_cross_entropy, summed_cross_entropy
from slidedp.model.units import Unit, chunks
from slidedp.stream.activations import Activations, Keep, LayerCall, Offload, Parameters, Recompute
from slidedp.stream.buffers import Buffers, is_tied
from slidedp.stream.delivery import Delivery, make_delivery
from slidedp.stream.device import Abort, Device, HostCopy, on
from slidedp.stream.gates import Gates
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
from slidedp.stream.signals import Step
from slidedp.stream.stash import ActivationStash
from slidedp.stream.timeline import Timeline
from slidedp.stream.transport import Collectives, Copies, Transport, staging_shape
from slidedp.stream.update import ShardUpdate


class ModelFunctions(NamedTuple):
    """The compute of every kind of unit, compiled or not, shared by all layouts."""

    layer: LayerFunction
    partial: Callable[[float], LayerFunction]
    """The layer, compiled so that it keeps this fraction of its intermediates."""
    norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    softmax: SoftmaxGradient
    kinds: tuple[str, ...]
    """The kind of each layer, by which `positions` differ."""
    positions: PositionsByKind
    """Those of sequences that are one document each."""
    within_documents: Callable[[torch.Tensor], PositionsByKind]
    """Those of sequences with these position ids, int64 [batch, length] on the CPU."""
    padding_index: int
    """Row of the embedding that gets no gradient; -1 for none."""
    embedding_scale: float
    """What the embedding's rows are multiplied by."""
    logit_cap: float | None
    """What logits are bent below, as `softmax` does it; None for no limit."""
    experts: Experts | None
    """Those of each layer; None if the model is dense."""


class Batch(NamedTuple):
    """What one rank takes in a pass."""

    input_ids: torch.Tensor
    """int64 [batch, length] on the device, as `labels`."""
    labels: torch.Tensor
    positions: PositionsByKind
    targets: int
    """Labels that are not IGNORED."""
    counted: torch.Tensor | None = None
    """Of a mixture, bool [batch, length] on the device: tokens whose experts count."""
    step_targets: int = 0
    """Targets of all ranks and passes of the step; not used where no balance is learnt."""


class Passed(NamedTuple):
    """What a pass has computed."""

    loss: HostCopy
    """Summed over this rank's targets, FP32 scalar."""
    timeline: Timeline
    routing: HostCopy | None
    """`Routing.sums` over all ranks, if the model is a mixture."""


class Engine:
    """Runs steps under one layout. A new layout is a new engine over the same state."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        device: Device,
        rank: int,
        state: HostState,
        landing: Landing,
        gates: Gates,
        functions: ModelFunctions,
        abort: Abort,
    ) -> None:
        self.config, self.layout, self.device, self.rank = config, layout, device, rank
        self.state, self.landing, self.gates = state, landing, gates
        self.functions, self.abort = functions, abort
        self.units, self.dtype = state.units, state.dtype
        self.ranks = int(config.ranks or 1)
        self.tied = is_tied(self.units)
        layers = len(self.units) - 2
        self.visits = Visits(layers)
        self.modes = layout.activation_modes(layers)
        self.buffers = Buffers(device, self.units, layout, self.ranks, self.dtype, config.gradient_dtype)
        self.transport = self._make_transport()
        self.updates = ShardUpdate(
            device, config, layout, self.buffers, self.transport, state, gates, rank, self.ranks, abort
        )
        self.stash = ActivationStash(
            device, config, self.units[-1].parameters[-1].numel, self.modes, self.dtype
        )
        # A token's share of the mean: constant, so that no rank waits for the others' counts. The
        # worker rescales by the true global count of targets.
        tokens = config.micro_batch_size // self.ranks * config.sequence_length
        self._scale = 1.0 / tokens
        partial = functions.partial(layout.partial_budget)
        self._calls = {
            unit + 1: self._call(unit, partial if mode == "partial" else functions.layer)
            for unit, mode in enumerate(self.modes)
        }
        self.positions = functions.positions
        """Those of the batch that compute is at."""
        self.routing: Routing | None = None
        """That of the pass that compute is at."""
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._landings: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None] = queue.SimpleQueue()
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

    def close(self) -> None:
        """Waits until every transfer has landed, then ends the threads and frees the buffers."""
        self._steps.put(None)
        for thread in self._threads:
            while thread.is_alive():
                thread.join(0.5)
                self.abort.check()
        self.transport.close()
        self.stash.close()

    def _make_transport(self) -> Transport:
        device, rank, ranks = self.device, self.rank, self.ranks
        if self.layout.transport == "collective" or ranks == 1:
            return Collectives(device, rank, ranks, self.abort)
        shape = staging_shape(self.units, self.layout, ranks, self.dtype.itemsize)
        staging = device.zeros(math.prod(shape), self.config.gradient_dtype).view(shape)
        return Copies(device, self.buffers.arena, rank, ranks, staging, self.abort)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            if self.device.is_cuda:
                torch.cuda.set_device(self.device.torch)
            work()
        except BaseException as error:
            self.abort.fail(error)

    # --- compute --------------------------------------------------------------------------------

    def step(self, number: int, batch: Batch, profiled: bool = False) -> Passed:
        """Enqueues one step. All its transfers follow from the transfer thread. `profiled`: torch.profiler
        records the step."""
        input_ids, labels, self.positions = batch.input_ids, batch.labels, batch.positions
        timeline = Timeline(self.device, profiled)
        step = Step(number, self.abort, timeline)
        if self.functions.experts is not None:
            step.routing = self._routing(self.functions.experts, batch)
        self.routing = step.routing
        self._steps.put(step)
        layers = self.units[1:-1]
        activations = [self._activations(step, unit) for unit in layers]

        embed, head = self.units[0], self.units[-1]
        with _Visit(self, step, embed, self.visits.forward(0), "forward"):
            matrix = self.buffers.parameters(embed)["weight"]
            hidden = self._embedded(input_ids, matrix.detach())
        for unit, activation in zip(layers, activations, strict=True):
            with _Visit(self, step, unit, self.visits.forward(unit.index), "forward"):
                hidden = activation.forward(self._calls[unit.index], self.buffers.parameters(unit), hidden)
        if self.routing is not None:
            step.signal("routed", 0).fire(self.device.compute)
        loss, gradient, tied_gradient = self._head(step, head, hidden, labels)
        del hidden
        if self.routing is not None:
            with timeline.span("compute", head.name, "wait balance"):
                step.signal("balanced", 0).wait(self.device.compute)
            self.routing.close()
        for unit, activation in zip(layers[::-1], activations[::-1], strict=True):
            parameters = self.buffers.parameters(unit)
            with _Visit(self, step, unit, self.visits.backward(unit.index), "backward"):
                gradient, *rest = activation.backward(self._calls[unit.index], parameters, gradient)
            if not unit.frozen:
                self._submit(step, unit, dict(zip(parameters, rest, strict=True)))
        self._embed_backward(step, embed, input_ids, gradient, tied_gradient)
        timeline.close()
        routing = None if self.routing is None else self.device.take(self.routing.sums)
        return Passed(self.device.take(loss), timeline, routing)

    def _routing(self, experts: Experts, batch: Batch) -> Routing:
        assert batch.counted is not None
        # As the loss's gradient: the worker will divide by the targets, where this is a mean already.
        scale = self._scale * batch.step_targets / self.config.gradient_accumulation
        return Routing(experts, batch.counted, scale)

    @torch.no_grad()
    def evaluate(self, number: int, batch: Batch) -> torch.Tensor:
        """Enqueues a forward pass with the weights that step `number` will start from. Returns the loss
        summed over targets (FP32 device scalar)."""
        step = Step(number, self.abort, Timeline(self.device), learns=False)
        self._steps.put(step)
        embed, *layers, head = self.units
        with _Visit(self, step, embed, self.visits.forward(0), "forward"):
            hidden = self._embedded(batch.input_ids, self.buffers.parameters(embed)["weight"])
        for unit, kind in zip(layers, self.functions.kinds, strict=True):
            with _Visit(self, step, unit, self.visits.forward(unit.index), "forward"):
                parameters = self.buffers.parameters(unit)
                hidden, _ = self.functions.layer(parameters, hidden, *batch.positions[kind])
        with _Visit(self, step, head, self.visits.head, "head"):
            parameters = self.buffers.parameters(head)
            weight = self.buffers.parameters(embed)["weight"] if self.tied else parameters["lm_head.weight"]
            normed = self.functions.norm(parameters["norm.weight"], hidden)
            cap = self.functions.logit_cap
            return summed_cross_entropy(normed.flatten(0, 1), weight, batch.labels.flatten(), cap)

    def _embedded(self, input_ids: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        hidden, scale = functional.embedding(input_ids, matrix), self.functions.embedding_scale
        return hidden if scale == 1 else hidden * scale

    def _call(self, index: int, layer: LayerFunction) -> LayerCall:
        kind = self.functions.kinds[index]

        def call(parameters: Parameters, hidden: torch.Tensor) -> torch.Tensor:
            hidden, logits = layer(parameters, hidden, *self.positions[kind])
            if self.routing is not None and logits is not None:
                hidden = self.routing.through(index, hidden, logits)
            return hidden

        return call

    def _activations(self, step: Step, unit: Unit) -> Activations:
        mode = self.modes[unit.index - 1]
        if mode in ("keep", "partial"):
            return Keep()
        if mode == "recompute":
            return Recompute()
        return Offload(
            lambda hidden: self.stash.hold(step, unit, hidden), lambda: self.stash.returned(step, unit)
        )

    def _head(
        self, step: Step, head: Unit, hidden: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Forward and backward of the final norm and the loss. Returns the summed loss, the gradient
        of `hidden`, and the tied matrix's FP32 gradient, which waits for the embedding's part."""
        with _Visit(self, step, head, self.visits.head, "head"):
            parameters = self.buffers.parameters(head)
            matrix = self.buffers.parameters(self.units[0])["weight"] if self.tied else None
            weight = (parameters["lm_head.weight"] if matrix is None else matrix).detach()
            norm = parameters["norm.weight"].detach().requires_grad_()  # if it is frozen too
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad():
                normed = self.functions.norm(norm, hidden)
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
            loss, upstream = linear_cross_entropy(
                normed.detach().flatten(0, 1),
                weight,
                labels.flatten(),
                self._scale,
                weight_gradient,
                self.functions.softmax,
            )
            gradient, norm_gradient = torch.autograd.grad(normed, [hidden, norm], upstream.view_as(normed))
        gradients = {"norm.weight": norm_gradient}
        if not self.tied:
            gradients["lm_head.weight"] = weight_gradient
        if not head.frozen:
            self._submit(step, head, gradients)
        return loss, gradient, weight_gradient if self.tied else None

    def _embed_backward(
        self,
        step: Step,
        embed: Unit,
        input_ids: torch.Tensor,
        gradient: torch.Tensor,
        tied_gradient: torch.Tensor | None,
    ) -> None:
        if embed.frozen:
            return
        rows = embed.parameters[0].shape[0]
        if self.functions.embedding_scale != 1:
            gradient = gradient * self.functions.embedding_scale
        # The sorting kernel behind this is deterministic, unlike an atomic index_add.
        total = torch.ops.aten.embedding_dense_backward(
            gradient, input_ids, rows, self.functions.padding_index, False
        )
        if tied_gradient is not None:
            total = tied_gradient.add_(total)
        self._submit(step, embed, {"weight": total})

    def _submit(self, step: Step, unit: Unit, gradients: dict[str, torch.Tensor]) -> None:
        """Copies gradients into the unit's flat buffer and hands it to the transfer thread."""
        buffer = self.buffers.gradient(unit)
        if buffer.free is not None:
            with step.timeline.span("compute", unit.name, "wait gradient buffer"):
                buffer.wait_free(self.device.compute)
        buffer.free = step.signal("reduced", unit.index)
        targets = [view.view(buffer.memory) for view in unit.views]
        torch._foreach_copy_(targets, [gradients[view.local] for view in unit.views])
        step.signal("gradient", unit.index).fire(self.device.compute)

    # --- transfers ------------------------------------------------------------------------------

    def _transfer(self) -> None:
        device, transport, rank, ranks = self.device, self.transport, self.rank, self.ranks
        delivery = make_delivery(self.layout.delivery, device, transport, rank, ranks)
        reduction = make_reduction(self.layout, device, transport, self.landing, rank, ranks, self.abort)
        norm = self.layout.schedule == "in_forward"
        kept = Scattered(device, transport, self.updates.gradient, rank, ranks, self.abort, norm)
        program = transfers(
            len(self.units) - 2,
            min(self.layout.window, len(self.units) - 2),
            self.modes,
            self.tied,
            self.updates.indices,
            self.layout.schedule,
            routed=self.functions.experts is not None,
        )
        forward = evaluation(len(self.units) - 2, self.tied)
        while (step := self._steps.get()) is not None:
            for transfer in program if step.learns else forward:
                if isinstance(transfer, Reduce) and self.units[transfer.unit].frozen:
                    continue
                if isinstance(transfer, Load):
                    self.updates.begin(step.timeline)
                    continue
                unit = self.units[transfer.unit]
                doing["transfer"] = (step.number, unit.name, type(transfer).__name__.lower())
                if isinstance(transfer, Deliver):
                    self._deliver(step, unit, transfer, delivery)
                elif isinstance(transfer, Reduce):
                    self._reduce(step, unit, kept if unit.index in self.updates.indices else reduction)
                elif isinstance(transfer, Update):
                    self._update(step, unit)
                elif isinstance(transfer, Balance):
                    self._balance(step)
                elif isinstance(transfer, Stash):
                    self.stash.to_host(step, unit)
                elif isinstance(transfer, Fetch):
                    self.stash.to_device(step, unit, step.signal("visited", self.visits.backward(unit.index)))
            step.timeline.transferred = True
        self._landings.put(None)
        self._writes.put(None)

    def _chunks(self, unit: Unit) -> list[tuple[int, int]]:
        return chunks(unit, self.layout.chunk_bytes, self.dtype.itemsize, self.ranks)

    def _deliver(self, step: Step, unit: Unit, transfer: Deliver, delivery: Delivery) -> None:
        slot, forward = self.buffers.slot(unit), transfer.visit <= self.visits.head
        if forward and self.updates.is_fresh(unit):
            slot.free = step.signal("visited", transfer.release)
            gathers = self.transport.gathers
            with step.timeline.span("deliver", unit.name, "gather", gathers, gathers):
                self.updates.gather(unit)
            slot.read = self.transport.gathered()
            step.signal("delivered", transfer.visit).fire(gathers)
            return
        # Publish, then deliver: in backward too, where the forward took a fresh slot and the version that
        # it computed with may still be on its way to the host.
        self.gates.wait_published(unit.index, step.number)
        slot.wait_free(self.device.to_device)
        slot.wait_free(delivery.stream)
        slot.free = step.signal("visited", transfer.release)
        source = self.state.delivered(unit)
        with step.timeline.span("deliver", unit.name, "deliver", self.device.to_device, delivery.stream):
            for start, stop in self._chunks(unit):
                delivery.chunk(source, slot.memory, start, stop)
        slot.read = self.transport.gathered()
        step.signal("delivered", transfer.visit).fire(delivery.stream)

    def _reduce(self, step: Step, unit: Unit, reduction: Reduction) -> None:
        buffer, reduces = self.buffers.gradient(unit), self.transport.reduces
        complete = step.signal("gradient", unit.index)
        complete.wait(reduces)
        complete.wait(self.device.to_host)
        stays = unit.index in self.updates.indices
        if not stays:
            self.gates.wait_consumed(*self.landing.plan.previous(unit, step.number))
        with step.timeline.span("reduce", unit.name, "reduce", reduces, self.device.to_host):
            for i, (start, stop) in enumerate(self._chunks(unit)):
                arrival = reduction.chunk(unit, buffer.memory, start, stop)
                if stays:
                    self.updates.landed(unit, start, arrival.done)
                if not stays or self.layout.schedule == "in_forward":
                    self._landings.put((Landed(step.number, unit.index, i, 0.0), arrival))
        # The buffer is free when both the reductions and the copies that read it have run.
        if self.device.to_host is not None and reduces is not None:
            self.device.to_host.wait_stream(reduces)
        buffer.read = self.transport.reduced()
        step.signal("reduced", unit.index).fire(self.device.to_host)

    def _balance(self, step: Step) -> None:
        assert step.routing is not None
        step.signal("routed", 0).wait(self.device.collective)
        if self.ranks > 1:
            with on(self.device.collective):
                dist.all_reduce(step.routing.sums)
        step.signal("balanced", 0).fire(self.device.collective)

    def _update(self, step: Step, unit: Unit) -> None:
        with step.timeline.span("update", unit.name, "update", self.device.update, self.device.update):
            written = self.updates.update(unit, step.number)
        self._writes.put((Written(step.number, unit.index), Arrival(written, None)))

    def _report(self, arrivals: queue.SimpleQueue[tuple[Landed | Written, Arrival] | None]) -> None:
        """Tells the worker about arrivals in order, each when it is really in host memory."""
        while (item := arrivals.get()) is not None:
            message, arrival = item
            arrival.done.synchronize()
            if isinstance(message, Landed) and arrival.sum_of_squares is not None:
                message = message._replace(sum_of_squares=float(arrival.sum_of_squares))
            self.gates.send(message)


class _Visit:
    """Compute on one unit: waits for its delivery, and fires `visited` when its slot may go."""

    def __init__(self, engine: Engine, step: Step, unit: Unit, visit: int, phase: str) -> None:
        self._engine, self._step, self._unit = engine, step, unit
        self._visit, self._phase = visit, phase

    def __enter__(self) -> None:
        engine, step = self._engine, self._step
        stayed = (
            self._visit > engine.visits.head
            and self._unit.index > engine.visits.layers - engine.layout.window
        )
        if not stayed:
            doing["compute"] = (step.number, self._unit.name, "wait delivery")
            with step.timeline.span("compute", self._unit.name, "wait delivery"):
                step.signal("delivered", self._visit).wait(engine.device.compute)
        doing["compute"] = (step.number, self._unit.name, self._phase)
        self._span = step.timeline.span("compute", self._unit.name, self._phase)
        self._span.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._span.__exit__(*failure)
        if failure[0] is None:
            self._step.signal("visited", self._visit).fire(self._engine.device.compute)
