"""One step of one rank: compute visits units, and a transfer thread moves them.

The compute thread (`Engine.step`) and the transfer thread (`Transfers`) meet only through signals:
`delivered`, `visited`, `gradient`, `reduced`, and for offloaded layer inputs `stashed` and `fetched`. Both
enqueue and run ahead; on CUDA the waiting itself happens on the GPU, by events.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from slidedp.host.landing import Landing
from slidedp.host.process import doing
from slidedp.layout import NOTHING, Layout
from slidedp.model.experts import Experts, Routing
from slidedp.model.families import LayerFunction
from slidedp.model.loss import linear_cross_entropy, summed_cross_entropy
from slidedp.model.units import Unit, lowest_trained
from slidedp.stream.activations import (
    Activations,
    Keep,
    LayerCall,
    Nothing,
    Offload,
    Parameters,
    Recompute,
    Spill,
)
from slidedp.stream.buffers import Buffers, is_tied, output_matrix
from slidedp.stream.context import Context
from slidedp.stream.functions import Batch, Passed
from slidedp.stream.program import Visits
from slidedp.stream.signals import Step
from slidedp.stream.timeline import Timeline
from slidedp.stream.transfers import Transfers
from slidedp.stream.vocabulary import Vocabulary


class Engine:
    """Runs steps under one layout. A new layout is a new engine over the same state."""

    def __init__(self, context: Context, layout: Layout, landing: Landing) -> None:
        config, device, functions = context.config, context.device, context.functions
        self.config, self.layout, self.device = config, layout, device
        self.functions, self.abort, self.ranks = functions, context.abort, context.ranks
        self.at_visit = context.at_visit
        self.units, self.dtype = context.state.units, context.state.dtype
        self.tied = is_tied(self.units)
        layers = len(self.units) - 2
        self.visits = Visits(layers)
        self.lowest = lowest_trained(self.units)
        self.modes = layout.activation_modes(layers, self.lowest)
        self.buffers = Buffers(device, self.units, layout, self.ranks, self.dtype, config.gradient_dtype)
        self.vocabulary: Vocabulary | None = None
        if self.buffers.piece_slots:
            cut = self.units, layout, self.ranks, self.dtype
            visit = functools.partial(_Visit, self)
            self.vocabulary = Vocabulary(device, *cut, self.buffers, visit, functions.pieces)
        self.transfers = Transfers(context, layout, landing, self.buffers, self.vocabulary)
        # A token's share of the mean: constant, so that no rank waits for the others' counts. The
        # worker rescales by the true global count of targets.
        tokens = config.micro_batch_size // self.ranks * config.sequence_length
        self._scale = 1.0 / tokens
        self._layer = functions.of_mode("evaluation", layout)[0]
        calls = {mode: functions.of_mode(mode, layout) for mode in set(self.modes)}
        self._calls = {
            i + 1: tuple(self._call(i, layer) for layer in calls[mode]) for i, mode in enumerate(self.modes)
        }
        """(forward's, backward's) call of each layer's function."""
        self.positions = functions.positions
        """Those of the batch that compute is at."""
        self.routing: Routing | None = None
        """That of the pass that compute is at."""

    def close(self) -> None:
        """Waits until every transfer has landed, then frees the buffers."""
        self.transfers.close()

    def run_step(self, step: Step) -> int:
        """The step of the run that a pass belongs to."""
        return step.number // self.config.gradient_accumulation

    # --- compute --------------------------------------------------------------------------------

    def step(self, number: int, batch: Batch, detailed: bool, profiled: bool) -> Passed:
        """Enqueues one step. All its transfers follow from the transfer thread. `detailed`: its timeline has
        every track; `profiled`: torch.profiler records it."""
        input_ids, labels, self.positions = batch.input_ids, batch.labels, batch.positions
        timeline = Timeline(self.device, detailed, profiled)
        step = Step(number, self.abort, timeline)
        if self.functions.experts is not None:
            step.routing = self._routing(self.functions.experts, batch)
        self.routing = step.routing
        self.transfers.begin(step)
        layers = self.units[1:-1]
        activations = [self._activations(step, unit) for unit in layers]

        embed, head = self.units[0], self.units[-1]
        hidden = self._embed(step, embed, input_ids)
        for unit, activation in zip(layers, activations, strict=True):
            with _Visit(self, step, unit, self.visits.forward(unit.index), "forward"):
                call, _ = self._calls[unit.index]
                hidden = activation.forward(call, self.buffers.parameters(unit), hidden)
        if self.routing is not None:
            step.signal("routed", 0).fire(self.device.compute)
        loss, gradient, tied_gradient = self._head(step, head, hidden, labels)
        del hidden
        if self.routing is not None:
            with timeline.span("compute", head.name, "wait balance"):
                step.signal("balanced", 0).wait(self.device.compute)
            self.routing.close()
        for unit, activation in zip(layers[::-1], activations[::-1], strict=True):
            if unit.index < self.lowest:
                break
            parameters = self.buffers.parameters(unit)
            with _Visit(self, step, unit, self.visits.backward(unit.index), "backward"):
                _, call = self._calls[unit.index]
                gradient, *rest = activation.backward(call, parameters, gradient)
            if not unit.frozen:
                self._submit(step, unit, dict(zip(parameters, rest, strict=True)))
            del rest  # or a second layer's weight gradients stay through the next backward
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
        self.transfers.begin(step)
        embed, *layers, head = self.units
        hidden = self._embed(step, embed, batch.input_ids)
        for unit, kind in zip(layers, self.functions.kinds, strict=True):
            with _Visit(self, step, unit, self.visits.forward(unit.index), "forward"):
                hidden, _ = self._layer(self.buffers.parameters(unit), hidden, *batch.positions[kind])
        if self.vocabulary is not None:
            norm = _Normed(self.functions.norm, hidden, self._tied_norm(step, head))
            return self.vocabulary.loss(step, norm, batch.labels)
        with _Visit(self, step, head, self.visits.head, "head"):
            parameters = self.buffers.parameters(head)
            weight = self.buffers.parameters(embed)["weight"] if self.tied else parameters["lm_head.weight"]
            normed = self.functions.norm(parameters["norm.weight"], hidden)
            cap = self.functions.logit_cap
            return summed_cross_entropy(normed.flatten(0, 1), weight, batch.labels.flatten(), cap)

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
        if mode == NOTHING:
            return Nothing()
        if mode in ("keep", "partial"):
            return Keep()
        if mode == "recompute":
            return Recompute()
        if mode == "spill":
            spill, tables = self.transfers.spill, self.positions[self.functions.kinds[unit.index - 1]]
            return Spill(
                spill.room,
                lambda storages: spill.hold(step, unit, storages),
                lambda: spill.returned(step, unit),
                [table for table in tables if table is not None],
            )
        stash = self.transfers.stash
        return Offload(lambda hidden: stash.hold(step, unit, hidden), lambda: stash.returned(step, unit))

    def _embed(self, step: Step, embed: Unit, input_ids: torch.Tensor) -> torch.Tensor:
        scale = self.functions.embedding_scale
        if self.vocabulary is not None:
            hidden = self.vocabulary.embed(step, input_ids)
            return hidden if scale == 1 else hidden * scale
        with _Visit(self, step, embed, self.visits.forward(0), "forward"):
            hidden = functional.embedding(input_ids, self.buffers.parameters(embed)["weight"].detach())
            return hidden if scale == 1 else hidden * scale

    def _tied_norm(self, step: Step, head: Unit) -> torch.Tensor | None:
        """A copy of the final norm's weight, where it is the whole head; else the last piece brings it."""
        if not self.tied:
            return None
        with _Visit(self, step, head, self.visits.head, "head"):
            return self.buffers.parameters(head)["norm.weight"].detach().clone()

    def _head_in_pieces(
        self, vocabulary: Vocabulary, step: Step, head: Unit, hidden: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        norm = _Normed(self.functions.norm, hidden, self._tied_norm(step, head))
        loss, gradient, of_norm = vocabulary.head(step, norm, norm.gradients, labels, self._scale)
        if self.tied and not head.frozen:
            self._submit(step, head, {"norm.weight": of_norm})
        return loss, gradient, None

    def _head(
        self, step: Step, head: Unit, hidden: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Forward and backward of the final norm and the loss. Returns the summed loss, the gradient
        of `hidden`, and the tied matrix's FP32 gradient, which waits for the embedding's part."""
        if self.vocabulary is not None:
            return self._head_in_pieces(self.vocabulary, step, head, hidden, labels)
        with _Visit(self, step, head, self.visits.head, "head"):
            parameters = self.buffers.parameters(head)
            matrix = self.buffers.parameters(self.units[0])["weight"] if self.tied else None
            weight = (parameters["lm_head.weight"] if matrix is None else matrix).detach()
            norm = parameters["norm.weight"].detach().requires_grad_()  # if it is frozen too
            hidden = hidden.detach().requires_grad_()
            with torch.enable_grad():
                normed = self.functions.norm(norm, hidden)
            trained = not output_matrix(self.units).frozen
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trained else None
            loss, upstream = linear_cross_entropy(
                normed.detach().flatten(0, 1),
                weight,
                labels.flatten(),
                self._scale,
                weight_gradient,
                self.functions.softmax,
            )
            gradient, norm_gradient = torch.autograd.grad(normed, [hidden, norm], upstream.view_as(normed))
        if not head.frozen:
            gradients = {"norm.weight": norm_gradient}
            if weight_gradient is not None and not self.tied:
                gradients["lm_head.weight"] = weight_gradient
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
        if self.functions.embedding_scale != 1:
            gradient = gradient * self.functions.embedding_scale
        if self.vocabulary is not None:
            self.vocabulary.embed_backward(step, input_ids, gradient, self.functions.padding_index)
            return
        rows = embed.parameters[0].shape[0]
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


class _Normed:
    """The final norm of `hidden`, whose weight may come later; and its gradients."""

    def __init__(
        self,
        norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> None:
        self._norm, self._hidden, self._weight = norm, hidden.detach().requires_grad_(), weight

    def __call__(self, weight: torch.Tensor | None) -> torch.Tensor:
        given = self._weight if weight is None else weight
        assert given is not None
        self._weight = given.requires_grad_()
        with torch.enable_grad():
            self._output = self._norm(self._weight, self._hidden)
        return self._output.detach()

    def gradients(self, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of hidden and weight."""
        assert self._weight is not None
        entries = [self._hidden, self._weight]
        of_hidden, of_weight = torch.autograd.grad(self._output, entries, upstream.view_as(self._output))
        return of_hidden, of_weight


class _Visit:
    """Compute on one unit: waits for its delivery, and fires `visited` when its slot may go."""

    def __init__(self, engine: Engine, step: Step, unit: Unit, visit: float, phase: str) -> None:
        self._engine, self._step, self._unit = engine, step, unit
        self._visit, self._phase = visit, phase

    def __enter__(self) -> None:
        engine, step = self._engine, self._step
        engine.at_visit()
        resident = max(0, engine.visits.layers - engine.layout.window)  # layers above this stay
        stayed = self._visit > engine.visits.head and self._unit.index > resident
        if not stayed:
            doing["compute"] = (engine.run_step(step), self._unit.name, "wait delivery")
            with step.timeline.span("compute", self._unit.name, "wait delivery"):
                step.signal("delivered", self._visit).wait(engine.device.compute)
        doing["compute"] = (engine.run_step(step), self._unit.name, self._phase)
        self._span = step.timeline.span("compute", self._unit.name, self._phase)
        self._span.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._span.__exit__(*failure)
        if failure[0] is None:
            self._step.signal("visited", self._visit).fire(self._engine.device.compute)
