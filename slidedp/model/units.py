"""Units: what streams as a whole. Each unit's parameters are one flat buffer.

The order of units is the order of the forward pass: `embed`, the decoder layers, `head`. With tied
embeddings the matrix belongs to `embed`, and `head` is the final norm alone: one unit used twice and
updated once.
"""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import gcd, prod
from typing import Any

import torch
from torch import nn

ALIGNMENT = 64
"""Elements. Parameters start on multiples of it, so that views suit the matrix kernels (128 bytes in
BF16) and the update kernel never meets a remainder."""


@dataclass(frozen=True)
class Parameter:
    """A tensor inside a unit's flat buffer."""

    name: str
    """Name in the checkpoint, such as model.layers.3.mlp.up_proj.weight."""
    local: str
    """Name inside the unit's template module, such as mlp.up_proj.weight."""
    shape: tuple[int, ...]
    offset: int
    """First element in the unit's buffer."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This parameter inside `buffer`, the unit's flat buffer."""
        return buffer[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Unit:
    """What is delivered, reduced, updated and published as a whole."""

    index: int
    name: str
    """`embed`, `layers.<i>` or `head`."""
    parameters: tuple[Parameter, ...]
    numel: int
    """Elements of the flat buffer, padding included; a multiple of ALIGNMENT."""
    decayed: int
    """Elements [0, decayed) have weight decay (matrices), the rest has none (norms, biases)."""
    views: tuple[Parameter, ...] = ()
    """The same elements as the template computes with them. They are the parameters, but the experts of
    a mixture, which a checkpoint stores one by one, are one tensor of three dimensions."""
    frozen: bool = False
    """Not trained: no gradients, no moments, one version for ever."""

    @property
    def parameter_count(self) -> int:
        """Elements that are parameters, padding left out."""
        return sum(p.numel for p in self.parameters)


def aligned(count: int, alignment: int = ALIGNMENT) -> int:
    """`count` rounded up to a multiple of `alignment`."""
    return -(-count // alignment) * alignment


def _unit(index: int, name: str, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Unit:
    """Lays out `tensors` (local name -> checkpoint name, shape): matrices first, then the rest."""
    ordered = sorted(tensors.items(), key=lambda item: len(item[1][1]) < 2)
    offset, decayed, parameters, views = 0, 0, [], []
    for local, (full, shape) in ordered:
        views.append(Parameter(full, local, shape, offset))
        start, prefix = offset, full.removesuffix(local)
        for stored, part in _stored(full, shape):
            parameters.append(Parameter(stored, stored.removeprefix(prefix), part, start))
            start += prod(part)
        offset = aligned(offset + prod(shape))
        if len(shape) >= 2:
            decayed = offset
    return Unit(index, name, tuple(parameters), offset, decayed, tuple(views))


def _stored(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """What a checkpoint holds in place of a tensor, in the order of its elements."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts"):
        return [(name, shape)]
    experts, rows, columns = shape
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    part = (rows // len(kinds), columns)
    return [(f"{stem}.{expert}.{k}.weight", part) for expert in range(experts) for k in kinds]


def units_of(model: Any, freeze: tuple[str, ...] = ()) -> tuple[Unit, ...]:
    """The units of a causal language model (it may be on the meta device); those whose names match a
    pattern of `freeze` are frozen."""

    def tensors(prefix: str, module: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {n: (f"{prefix}.{n}", tuple(p.shape)) for n, p in module.named_parameters()}

    body = model.model
    units = [_unit(0, "embed", tensors("model.embed_tokens", body.embed_tokens))]
    for i, layer in enumerate(body.layers):
        units.append(_unit(i + 1, f"layers.{i}", tensors(f"model.layers.{i}", layer)))
    norm = {"norm." + n: value for n, value in tensors("model.norm", body.norm).items()}
    tied = model.lm_head.weight is body.embed_tokens.weight
    head = {} if tied else {"lm_head.weight": ("lm_head.weight", tuple(model.lm_head.weight.shape))}
    units.append(_unit(len(units), "head", head | norm))
    return tuple(
        replace(unit, frozen=any(fnmatchcase(unit.name, pattern) for pattern in freeze)) for unit in units
    )


def frozen_units(units: tuple[Unit, ...]) -> frozenset[int]:
    """Indices of the frozen units."""
    return frozenset(unit.index for unit in units if unit.frozen)


def lowest_trained(units: tuple[Unit, ...]) -> int:
    """Index of the first unit that is not frozen, where backward ends."""
    return next(unit.index for unit in units if not unit.frozen)


def chunks(unit: Unit, chunk_bytes: int, itemsize: int, ranks: int, pieces: int = 1) -> list[tuple[int, int]]:
    """Element ranges that a unit is transferred and updated in, none across two of its `pieces`.

    Every chunk but the last is a multiple of ranks × ALIGNMENT elements, so that the shards of a
    chunk are equal; the last one is padded in the GPU buffer's tail (`padded_numel`).
    """
    grain = ranks * ALIGNMENT
    size = max(grain, chunk_bytes // itemsize // grain * grain)
    return [
        (start, min(start + size, stop))
        for first, stop in pieces_of(unit, pieces, ranks)
        for start in range(first, stop, size)
    ]


def vocabulary_matrix(unit: Unit) -> Parameter | None:
    """The unit's matrix of one row per token of the vocabulary, if it has one: it comes first."""
    first = unit.parameters[0]
    return first if first.local in ("weight", "lm_head.weight") else None


def pieces_of(unit: Unit, count: int, ranks: int) -> list[tuple[int, int]]:
    """Element ranges that a unit with a vocabulary matrix is cut in: at most `count`, whole rows, on
    multiples of ranks × ALIGNMENT elements; what follows the matrix belongs to the last one. Other
    units are one piece."""
    matrix = vocabulary_matrix(unit)
    if matrix is None or count == 1:
        return [(0, unit.numel)]
    rows, width = matrix.shape
    grain = ranks * ALIGNMENT
    size = aligned(-(-rows // count), grain // gcd(grain, width)) * width
    starts = range(0, rows * width, size)
    return list(zip(starts, [*starts[1:], unit.numel], strict=True))


def padded_numel(unit: Unit, ranks: int) -> int:
    """Elements of a GPU buffer for the unit: the last chunk's shards are equal in it too."""
    return aligned(unit.numel, ranks * ALIGNMENT)


def shard(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Rank's part of chunk [start, stop): its start, its end in a GPU buffer and on the host.

    GPU shards are equal and may reach past `stop` into padding; host shards end at `stop`.
    """
    size = aligned(stop - start, ranks * ALIGNMENT) // ranks
    first = start + rank * size
    return first, first + size, max(first, min(first + size, stop))
