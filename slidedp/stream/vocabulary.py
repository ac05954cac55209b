"""embed and head in pieces: GPU memory that is not sized by the vocabulary (docs/memory.md).

The compute thread calls `embed`, `head`, `loss` and `embed_backward`; the transfer thread asks where a piece
is delivered to and reduced from. Both find a piece's slot and gradient buffer by its place in the step.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch.nn import functional

from slidedp.layout import Layout
from slidedp.model.loss import IGNORED, add_product
from slidedp.model.units import Unit, chunks, pieces_of, vocabulary_matrix
from slidedp.stream.buffers import Buffer, Buffers, Elements, Slot, is_tied
from slidedp.stream.device import Device
from slidedp.stream.program import PIECE_SLOTS, PieceVisit, piece_visits
from slidedp.stream.signals import Step

LOGITS = {"cuda": 2**26, "cpu": 2**22}
"""Logits of a piece that exist at a time: 128 MiB of BF16 fill a GPU's matrix units."""

Statistics = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Gradient = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
Visit = Callable[[Step, Unit, float, str], AbstractContextManager[None]]


class PieceFunctions(NamedTuple):
    """Compiled or not."""

    statistics: Statistics
    """`slidedp.model.loss.piece_statistics`"""
    gradient: Gradient
    """`slidedp.model.loss.piece_gradient`"""


class Piece(NamedTuple):
    """Elements [start, stop) of a unit, and rows [first, last) of its vocabulary matrix."""

    start: int
    stop: int
    first: int
    last: int


class _Shifted:
    """A buffer of a unit's elements from `origin` on, cut by the unit's own numbers."""

    def __init__(self, memory: torch.Tensor, origin: int) -> None:
        self._memory, self._origin = memory, origin

    def __getitem__(self, span: slice) -> torch.Tensor:
        return self._memory[span.start - self._origin : span.stop - self._origin]


class _Tokens(NamedTuple):
    """What the head knows of a batch's tokens when it has met every piece once."""

    normed: torch.Tensor
    """[tokens, width]"""
    labels: torch.Tensor
    """int64 [tokens]"""
    normalizer: torch.Tensor
    """logsumexp of all logits, FP32 [tokens]"""
    chosen: torch.Tensor
    """The target's logit, FP32 [tokens]"""

    @property
    def loss(self) -> torch.Tensor:
        """Summed over targets, FP32."""
        return torch.where(self.labels != IGNORED, self.normalizer - self.chosen, 0.0).sum()


class Vocabulary:
    """The pieces of one layout, and which buffer each is in."""

    def __init__(
        self,
        device: Device,
        units: tuple[Unit, ...],
        layout: Layout,
        ranks: int,
        dtype: torch.dtype,
        buffers: Buffers,
        visit: Visit,
        functions: PieceFunctions,
    ) -> None:
        self._device, self._visit, self._functions = device, visit, functions
        self._embed, self._head, self._tied = units[0], units[-1], is_tied(units)
        self._slots, self._gradients = buffers.piece_slots, buffers.piece_gradients
        self._pieces = {u.index: _pieces(u, layout, ranks) for u in (self._embed, self._head)}
        self.count = len(self._pieces[0])
        cut = layout.chunk_bytes, dtype.itemsize, ranks, layout.vocabulary_pieces
        self._chunks = {index: chunks(units[index], *cut) for index in self._pieces}
        self._visits = piece_visits(len(units) - 2, self.count, self._tied)
        order = [visit.visit for some in self._visits for visit in some]
        self._turn = {visit: i % PIECE_SLOTS for i, visit in enumerate(order)}
        self._held: tuple[_Tokens, float] | None = None
        """Tokens and scale that a tied matrix's gradient waits for in backward."""

    # --- where pieces are -----------------------------------------------------------------------

    def slot(self, visit: float) -> Slot:
        return self._slots[self._turn[visit]]

    def slot_memory(self, unit: Unit, piece: int, visit: float) -> Elements:
        """The slot of a visit, cut by the unit's elements."""
        return _Shifted(self.slot(visit).memory, self._pieces[unit.index][piece].start)

    def gradient(self, unit: Unit, piece: int) -> Buffer:
        before = self.count if unit.index == 0 and not self._tied else 0  # pieces of the head
        return self._gradients[(before + piece) % PIECE_SLOTS]

    def gradient_memory(self, unit: Unit, piece: int) -> Elements:
        """The piece's gradient buffer, cut by the unit's elements."""
        return _Shifted(self.gradient(unit, piece).memory, self._pieces[unit.index][piece].start)

    def chunks(self, unit: Unit, piece: int) -> list[tuple[int, tuple[int, int]]]:
        """The piece's chunks, each with its number in the unit."""
        start, stop, *_ = self._pieces[unit.index][piece]
        return [(i, c) for i, c in enumerate(self._chunks[unit.index]) if start <= c[0] < stop]

    # --- compute --------------------------------------------------------------------------------

    def _matrix(self, at: PieceVisit) -> tuple[Piece, torch.Tensor]:
        piece, memory = self._pieces[at.unit][at.piece], self.slot(at.visit).memory
        rows = piece.last - piece.first
        return piece, memory[: rows * self._width].view(rows, self._width)

    @property
    def _width(self) -> int:
        return self._embed.parameters[0].shape[1]

    def embed(self, step: Step, input_ids: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] of input_ids [batch, length]."""
        hidden = None
        for at in self._visits[0]:
            with self._visit(step, self._embed, at.visit, "forward"):
                piece, matrix = self._matrix(at)
                inside = (input_ids >= piece.first) & (input_ids < piece.last)
                part = functional.embedding(torch.where(inside, input_ids - piece.first, 0), matrix)
                if hidden is None:
                    hidden = torch.zeros_like(part)
                hidden = torch.where(inside[..., None], part, hidden)
        assert hidden is not None
        return hidden

    def _parts(self, matrix: torch.Tensor, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Tensors of all tokens, as many tokens at a time as there may be logits."""
        tokens = max(1, LOGITS[matrix.device.type] // matrix.shape[0])
        return list(zip(*(tensor.split(tokens) for tensor in tensors), strict=True))

    def _meet(self, piece: Piece, matrix: torch.Tensor, tokens: _Tokens) -> None:
        """Adds the piece to the tokens' normalizers and target logits."""
        local = _local(tokens.labels, piece)
        for normed, target, normalizer, chosen in self._parts(
            matrix, tokens.normed, local, tokens.normalizer, tokens.chosen
        ):
            total, logit = self._functions.statistics(normed @ matrix.t(), target)
            torch.logaddexp(normalizer, total, out=normalizer)
            chosen += logit

    def _differentiate(
        self,
        piece: Piece,
        matrix: torch.Tensor,
        tokens: _Tokens,
        scale: float,
        of_hidden: torch.Tensor | None,
        of_matrix: torch.Tensor | None,
    ) -> None:
        """Adds the piece's gradients to FP32 [tokens, width] and [rows, width], where they are asked for."""
        local, start = _local(tokens.labels, piece), 0
        for normed, label, target, normalizer in self._parts(
            matrix, tokens.normed, tokens.labels, local, tokens.normalizer
        ):
            logits = normed @ matrix.t()
            signal = self._functions.gradient(logits, target, normalizer, label != IGNORED, scale)
            if of_hidden is not None:
                add_product(of_hidden[start : start + len(normed)], signal, matrix)
            if of_matrix is not None:
                add_product(of_matrix, signal.t(), normed)
            start += len(normed)

    def _tokens(self, normed: torch.Tensor, labels: torch.Tensor) -> _Tokens:
        zeros = torch.zeros(labels.numel(), dtype=torch.float32, device=labels.device)
        return _Tokens(normed.flatten(0, 1), labels.flatten(), zeros - torch.inf, zeros)

    def loss(
        self, step: Step, norm: Callable[[torch.Tensor | None], torch.Tensor], labels: torch.Tensor
    ) -> torch.Tensor:
        """The summed loss alone; `norm` as for `head`."""
        tokens = None
        for at in self._visits[1][: self.count]:
            with self._visit(step, self._head, at.visit, "head"):
                if tokens is None:
                    tokens = self._tokens(norm(self._norm_weight(at)), labels)
                self._meet(*self._matrix(at), tokens)
        assert tokens is not None
        return tokens.loss

    def _norm_weight(self, at: PieceVisit) -> torch.Tensor | None:
        """A copy of the final norm's weight, of the head's last piece; None where it is a unit of its own."""
        if self._tied:
            return None
        weight, piece = self._head.parameters[-1], self._pieces[at.unit][at.piece]
        memory = self.slot(at.visit).memory
        return memory[weight.offset - piece.start :][: weight.numel].clone()

    def head(
        self,
        step: Step,
        norm: Callable[[torch.Tensor | None], torch.Tensor],
        norm_gradients: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        labels: torch.Tensor,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward and backward of the head. `norm` gives the normed hidden states, [batch, length, width],
        for the norm's weight (None: it is known); `norm_gradients` those of hidden and weight for theirs.

        Returns the summed loss and the gradients of hidden and the norm's weight. A tied matrix's gradient
        follows in `embed_backward`.
        """
        tokens, of_hidden, loss, found = None, None, None, None
        for i, at in enumerate(self._visits[1]):
            of_matrix = None
            with self._visit(step, self._head, at.visit, "head"):
                piece, matrix = self._matrix(at)
                if tokens is None:
                    tokens = self._tokens(norm(self._norm_weight(at)), labels)
                if i < self.count:
                    self._meet(piece, matrix, tokens)
                if i >= self.count - 1:
                    if of_hidden is None:
                        of_hidden = torch.zeros_like(tokens.normed, dtype=torch.float32)
                    if not (self._tied or self._head.frozen):
                        of_matrix = torch.zeros_like(matrix, dtype=torch.float32)
                    self._differentiate(piece, matrix, tokens, scale, of_hidden, of_matrix)
                if i == self.count - 1:
                    loss = tokens.loss
                if i == len(self._visits[1]) - 1:
                    assert of_hidden is not None
                    found = norm_gradients(of_hidden.to(tokens.normed.dtype))
                    of_hidden = None
            if of_matrix is not None:
                self._submit(step, self._head, at.piece, of_matrix, found[1] if found else None)
        assert tokens is not None and loss is not None and found is not None
        self._held = (tokens, scale) if self._tied and not self._embed.frozen else None
        return loss, *found

    def embed_backward(
        self, step: Step, input_ids: torch.Tensor, gradient: torch.Tensor, padding_index: int
    ) -> None:
        """Gradients of the matrix, with the head's part where it is tied, from that of the hidden states."""
        for at in self._visits[2]:
            piece = self._pieces[0][at.piece]
            if self._held is None:
                total = self._of_rows(piece, input_ids, gradient, padding_index)
            else:
                with self._visit(step, self._embed, at.visit, "backward"):
                    _, matrix = self._matrix(at)
                    total = torch.zeros_like(matrix, dtype=torch.float32)
                    self._differentiate(piece, matrix, *self._held, None, total)
                    total += self._of_rows(piece, input_ids, gradient, padding_index)
            self._submit(step, self._embed, at.piece, total, None)
        self._held = None

    @staticmethod
    def _of_rows(
        piece: Piece, input_ids: torch.Tensor, gradient: torch.Tensor, padding_index: int
    ) -> torch.Tensor:
        rows = piece.last - piece.first
        inside = (input_ids >= piece.first) & (input_ids < piece.last) & (input_ids != padding_index)
        # Other pieces' tokens count as padding, in a row that is cut off again.
        local = torch.where(inside, input_ids - piece.first, rows)
        return torch.ops.aten.embedding_dense_backward(gradient, local, rows + 1, rows, False)[:rows]

    def _submit(
        self, step: Step, unit: Unit, piece: int, of_matrix: torch.Tensor, of_norm: torch.Tensor | None
    ) -> None:
        """As `Engine._submit`, for one piece."""
        buffer, compute = self.gradient(unit, piece), self._device.compute
        if buffer.free is not None:
            with step.timeline.span("compute", unit.name, "wait gradient buffer"):
                buffer.wait_free(compute)
        buffer.free = step.signal("reduced", (unit.index, piece))
        buffer.memory[: of_matrix.numel()].view_as(of_matrix).copy_(of_matrix)
        buffer.memory[of_matrix.numel() :].zero_()  # of another piece
        if of_norm is not None:
            place = unit.parameters[-1].offset - self._pieces[unit.index][piece].start
            buffer.memory[place : place + of_norm.numel()].copy_(of_norm)
        step.signal("gradient", (unit.index, piece)).fire(compute)


def _pieces(unit: Unit, layout: Layout, ranks: int) -> list[Piece]:
    matrix = vocabulary_matrix(unit)
    if matrix is None:
        return []
    rows, width = matrix.shape
    return [
        Piece(start, stop, start // width, min(stop // width, rows))
        for start, stop in pieces_of(unit, layout.vocabulary_pieces, ranks)
    ]


def _local(labels: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Row in the piece of each target, -1 where it is in another piece or there is none."""
    inside = (labels >= piece.first) & (labels < piece.last)
    return torch.where(inside, labels - piece.first, -1)
