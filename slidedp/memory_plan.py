"""What a run takes of the host's memory and of each GPU's, in bytes by purpose: see docs/memory.md."""

import math
from typing import Any

import torch

from slidedp.config import DTYPES, Config
from slidedp.host.landing import LandingPlan
from slidedp.host.memory import PAGE
from slidedp.host.state import aligned_numel, unit_starts
from slidedp.layout import NOTHING
from slidedp.model.footprint import kept_per_token
from slidedp.model.units import Unit, lowest_trained, pieces_of
from slidedp.stream.buffers import buffer_numels, is_tied, output_matrix
from slidedp.stream.program import FETCH_AHEAD
from slidedp.stream.stash import OUTGOING, stash_numel
from slidedp.stream.transport import staging_shape
from slidedp.stream.update import update_numels
from slidedp.stream.vocabulary import LOGITS

GIB = 2**30
BACKWARD = 1.35
"""Most that a compiled layer's backward holds, of what the layer keeps: Qwen3-8B's held 1.34 times that at
65,536 tokens on an H200."""
ATTENTION_BACKWARD = 2.55
"""Most that it holds, of what the layer keeps besides its MLP, when the MLP's tensors are gone: Qwen3-4B's
held 2.54 times that at 262,144 tokens, with the MLP in tiles. Among it are gradients in FP32."""
PROCESSES = "processes and page tables (estimate)"
PROCESS_BYTES, RANK_BYTES = GIB // 2, 2 * GIB
"""Host memory beside the data of a run on GPUs: of launcher and worker together, and of each rank. Measured:
2.4 GiB with one H200, 4.2 with two."""
PER_PAGE = 8, 16
"""Bytes for each 4 KiB page: of the tables of every process that maps it, and, estimated, of the driver of
every GPU that it is registered with."""
Bytes = dict[str, int]
"""By purpose."""
OFFLOADED, SPILLED = "offloaded layer inputs", "spilled intermediates (estimate)"
INPUTS, KEPT = "kept layer inputs", "kept intermediates (estimate)"
RINGS, MOVING = "offload rings", "spilled layers on their way (estimate)"


def host_bytes(config: Config, model: Any, units: tuple[Unit, ...], alike: Bytes | None = None) -> Bytes:
    """Of the whole machine. `alike`: that of a run whose layout differs in activations alone."""
    dtype = DTYPES[str(config.compute_dtype)]
    sizes = _buffers_on_host(config, units, dtype) if alike is None else dict(alike)
    ranks, modes = int(config.ranks or 1), _modes(config, units)
    width = units[-1].parameters[-1].numel
    sizes[OFFLOADED] = ranks * modes.count("offload") * stash_numel(config, width) * dtype.itemsize
    sizes[SPILLED] = 0
    if "spill" in modes:
        kept = width * dtype.itemsize + _kept_part(config) * intermediates_per_token(config, model)
        sizes[SPILLED] = int(ranks * modes.count("spill") * _tokens(config) * kept)
    sizes.pop(PROCESSES, 0)
    if config.device == "cuda":
        shared, (table, driver) = sum(sizes.values()), PER_PAGE
        pages = shared // PAGE * (table * (ranks + 1) + driver * ranks)
        sizes[PROCESSES] = PROCESS_BYTES + ranks * RANK_BYTES + pages
    return {name: size for name, size in sizes.items() if size}


def device_bytes(config: Config, model: Any, units: tuple[Unit, ...], alike: Bytes | None = None) -> Bytes:
    """Of one rank. Buffers exactly; activations and workspace by formula (estimates, named as such).
    `alike`: that of a run whose layout differs in activations alone."""
    dtype = DTYPES[str(config.compute_dtype)]
    sizes = _buffers_on_device(config, model, units, dtype) if alike is None else dict(alike)
    tokens, modes, part = _tokens(config), _modes(config, units), _kept_part(config)
    width = units[-1].parameters[-1].numel
    intermediates = tokens * intermediates_per_token(config, model)
    on_gpu = len(modes) - sum(modes.count(mode) for mode in ("offload", "spill", NOTHING))
    kept = modes.count("keep") + modes.count("partial") * part
    rings = (OUTGOING + FETCH_AHEAD) * stash_numel(config, width) if "offload" in modes else 0
    moving = min(modes.count("spill"), OUTGOING + FETCH_AHEAD)
    sizes |= {
        INPUTS: on_gpu * tokens * width * dtype.itemsize,
        KEPT: int(kept * intermediates),
        RINGS: rings * dtype.itemsize,
        MOVING: int(moving * (part * intermediates + tokens * width * dtype.itemsize)),
    }
    return {name: size for name, size in sizes.items() if size}


def intermediates_per_token(config: Config, model: Any) -> int:
    """Bytes per token that a layer keeps besides its input, under this config's `keep`."""
    dtype = DTYPES[str(config.compute_dtype)]
    kept = kept_per_token(model, dtype, bool(config.compile), config.layout.mlp_tile_tokens > 0)
    return kept - model.hidden_size * dtype.itemsize


def _buffers_on_host(config: Config, units: tuple[Unit, ...], dtype: torch.dtype) -> Bytes:
    total, ranks = unit_starts(units)[-1], int(config.ranks or 1)
    return {
        "FP32 master weights": 4 * total,
        "exp_avg and exp_avg_sq": 8 * sum(aligned_numel(unit) for unit in units if not unit.frozen),
        "BF16 working copy": 2 * total if dtype == torch.bfloat16 else 0,
        "gradient landing": LandingPlan(units, ranks, config.layout, config.gradient_dtype.itemsize).nbytes,
        "accumulated gradients": 4 * total if config.gradient_accumulation > 1 else 0,
    }


def _buffers_on_device(config: Config, model: Any, units: tuple[Unit, ...], dtype: torch.dtype) -> Bytes:
    ranks, size, gradient = int(config.ranks or 1), dtype.itemsize, config.gradient_dtype.itemsize
    layout = config.layout
    shapes = buffer_numels(units, layout, ranks)
    edge = shapes["edge"][0] + shapes.get("tied_head", [0])[0] + sum(shapes["pieces"])
    updates = update_numels(units, layout, ranks, size)
    copies = layout.transport == "copy" and ranks > 1
    staging = math.prod(staging_shape(units, layout, ranks, size)) if copies else 0
    return {
        "window": sum(shapes["slots"]) * size,
        "gradient buffers": sum(shapes["gradients"]) * gradient,
        "embedding and head, weights": edge * size,
        "embedding and head, gradients": edge * gradient,
        "reduction staging": staging * gradient,
        "update buffers": 12 * updates.ring + size * updates.out,
        "resident FP32 state": 12 * updates.resident,
        "gradients that wait for their update": updates.gradients * gradient,
        "workspace (estimate)": max(_workspaces(config, model, units, dtype)),
    }


def _modes(config: Config, units: tuple[Unit, ...]) -> tuple[str, ...]:
    """By layer."""
    return config.layout.activation_modes(len(units) - 2, lowest_trained(units))


def _kept_part(config: Config) -> float:
    """Of a layer's intermediates, under `partial` and `spill`: what is not compiled keeps all."""
    return config.layout.partial_budget if config.compile else 1.0


def _tokens(config: Config) -> int:
    """Of one pass on one rank."""
    return config.micro_batch_size // int(config.ranks or 1) * config.sequence_length


def _workspaces(config: Config, model: Any, units: tuple[Unit, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that come and go: in a layer's backward, and in the loss. Fitted to peaks of runs."""
    layout, tokens, size = config.layout, _tokens(config), dtype.itemsize
    compiled, tile = bool(config.compile), layout.mlp_tile_tokens
    width, slot = model.hidden_size, max(unit.numel for unit in units[1:-1])
    # What the layer keeps, computed again, with its gradients; its weights' gradients.
    times, later = (BACKWARD, ATTENTION_BACKWARD) if compiled else (2.0, 2.0)
    whole, half = (kept_per_token(model, dtype, compiled, tiled) - width * size for tiled in (False, True))
    at_once = min(tile or tokens, tokens)  # of the MLP
    mlp = sum(p.numel for p in units[1].parameters if p.local.startswith("mlp."))
    layer = slot * size + 4 * mlp * (tile > 0)
    layer += int(max(times * (tokens * half + at_once * (whole - half)), later * tokens * half))
    pieces = pieces_of(units[0], layout.vocabulary_pieces, int(config.ranks or 1))
    logits = 6 if compiled else 24  # bytes each: with those in FP32 that eager mode makes on the way
    tied = is_tied(units)
    trained = not output_matrix(units).frozen
    # Of its gradient: BF16 products on a GPU add to the sum themselves.
    per_weight = 0 if not trained else 4 if config.device == "cuda" and size == 2 else 8
    if len(pieces) == 1:
        matrix = units[0].parameters[0].numel
        layer += 4 * matrix * (tied and trained)  # the matrix's gradient waits through backward
        return layer, per_weight * matrix + min(tokens, 4096) * model.vocab_size * logits
    matrix = pieces[0][1]
    at_a_time = min(tokens * matrix // width, LOGITS[str(config.device)])
    held = tokens * (width * size + 12) * (tied and trained)  # what the gradient is computed from at the end
    return layer + held, per_weight * matrix + at_a_time * logits + tokens * width * (4 + 3 * size)
