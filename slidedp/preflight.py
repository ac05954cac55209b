"""What a run will take, in bytes, before anything is allocated."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from slidedp.config import DTYPES, Config
from slidedp.errors import ConfigError
from slidedp.fielddocs import with_field_docs
from slidedp.gpus import free_gpu_bytes, reach_one_another
from slidedp.host.groups import check_groups
from slidedp.host.landing import LandingPlan
from slidedp.host.memory import PAGE, available_bytes
from slidedp.host.state import aligned_numel, unit_starts
from slidedp.layout import NOTHING, Layout
from slidedp.model.experts import experts_of
from slidedp.model.families import has_halves, load_config, skeleton
from slidedp.model.footprint import kept_per_token
from slidedp.model.units import Unit, lowest_trained, pieces_of, units_of
from slidedp.stream.buffers import buffer_numels, is_tied
from slidedp.stream.program import FETCH_AHEAD
from slidedp.stream.stash import OUTGOING, stash_numel
from slidedp.stream.transport import staging_shape
from slidedp.stream.update import update_numels
from slidedp.stream.vocabulary import LOGITS
from slidedp.tables import html_table

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
FRUGAL = Layout(window=1, gradient_slots=1, activations="offload", mlp_tile_tokens=2048, vocabulary_pieces=16)
"""About the least GPU memory that a layout takes."""


def frugal(model: PretrainedConfig) -> Layout:
    """FRUGAL, as far as the model allows it."""
    return FRUGAL if has_halves(model) else dataclasses.replace(FRUGAL, mlp_tile_tokens=0)


@with_field_docs
@dataclass(frozen=True)
class Plan:
    """Bytes by purpose. `host` is for the whole machine, `device` for one rank."""

    config: Config
    """With every choice of the machine filled in."""
    model: PretrainedConfig
    """The model's configuration, whose weights are not read."""
    units: tuple[Unit, ...]
    """Embedding, decoder layers, head: what is streamed as a whole."""
    host: dict[str, int]
    """Bytes of host memory by purpose."""
    device: dict[str, int]
    """Bytes of one rank's device by purpose; on a CPU they are host memory."""
    host_available: int
    """Free bytes of host memory within the limits of this process."""
    device_available: int | None
    """Free bytes of the fullest GPU; None on a CPU, where device memory is host memory."""

    @property
    def parameters(self) -> int:
        """Parameters of the model; tied ones count once."""
        return sum(unit.parameter_count for unit in self.units)

    @property
    def host_bytes(self) -> int:
        """Everything that host memory must hold; on a CPU the ranks' device memory too."""
        total = sum(self.host.values())
        if self.device_available is None:
            total += int(self.config.ranks or 1) * sum(self.device.values())
        return total

    def memory(self) -> dict[str, Any]:
        """Bytes by purpose and what is free, as plain JSON."""
        names = ("host", "device", "host_available", "device_available")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Refuses a run that this machine cannot carry out, in one line."""
        self.check_layout()
        if self.host_bytes > self.host_available:
            raise ConfigError(
                f"not enough host memory: the run needs {size_text(self.host_bytes)} and "
                f"{size_text(self.host_available)} are free within the limits of this process; "
                f"{self._less_of_the_host()}; close() a run of this kernel that is over, or end other "
                "programs"
            )
        self.check_device(self.device_limit)

    def _less_of_the_host(self) -> str:
        """What to do about too little host memory."""
        count = len(self.units)
        if self.config.device == "cuda" and self.config.gradient_accumulation == 1:
            fields: dict[str, Any] = {"gpu_updates": count, "reduction": "gpu", "activations": "recompute"}
            least = under(self, dataclasses.replace(self.config.layout, **fields)).host_bytes
            if least <= self.host_available:  # gradients that the GPUs use do not land
                return (
                    f"use layout.gpu_updates={count} with reduction='gpu' and activations='recompute', which "
                    f"needs {size_text(least)}"
                )
        return "use a smaller model or batch, layout.activations='recompute', or fewer ranks"

    def check_device(self, limit: int | None) -> None:
        """Refuses what takes more than `limit` bytes of a rank's device; None limits nothing."""
        device = sum(self.device.values())
        if limit is not None and device > limit:
            there = frugal(self.model)
            least = sum(under(self, there).device.values())
            remedy = (
                "use layout.activations='offload', a smaller layout.window or batch_size"
                + (
                    f", layout.vocabulary_pieces={there.vocabulary_pieces}"
                    if there.vocabulary_pieces > 1
                    else ""
                )
                + (f", or layout.mlp_tile_tokens={there.mlp_tile_tokens}" if there.mlp_tile_tokens else "")
                if least <= limit
                else "use a smaller batch_size or sequence_length"
            )
            given = self.config.gpu_memory_budget
            what = "not enough GPU memory" if given is None else f"gpu_memory_budget={given:g}"
            raise ConfigError(
                f"{what}: a rank needs about {size_text(device)} under this layout, at least "
                f"{size_text(least)} under any, and may take {size_text(limit)}; {remedy}"
            )

    def check_layout(self) -> None:
        """Refuses what this machine or this model cannot do."""
        layout, ranks = self.config.layout, int(self.config.ranks or 1)
        copies = layout.transport == "copy" and self.config.device == "cuda"
        if copies and not reach_one_another(ranks):
            raise ConfigError(
                "layout.transport='copy': these GPUs cannot read one another's memory; use 'collective'"
            )
        if layout.mlp_tile_tokens and not has_halves(self.model):
            raise ConfigError(
                f"layout.mlp_tile_tokens={layout.mlp_tile_tokens}: the layers of {type(self.model).__name__} "
                "are more than attention and MLP; use 0"
            )

    @property
    def transport(self) -> str:
        """What suits this machine between ranks: `copy` where GPUs read one another's memory, which leaves
        their SMs to compute; else `collective`."""
        ranks = int(self.config.ranks or 1)
        copies = self.config.device == "cuda" and ranks > 1 and reach_one_another(ranks)
        return "copy" if copies else "collective"

    @property
    def device_limit(self) -> int | None:
        """Bytes that a rank may allocate on its device: what is free, or less by `gpu_memory_budget`; None
        where nothing limits it but host memory."""
        budget = self.config.gpu_memory_budget
        limits = [self.device_available, None if budget is None else int(budget * GIB)]
        return min((limit for limit in limits if limit is not None), default=None)

    def _rows(self) -> list[tuple[str, str, str]]:
        ranks = self.config.ranks
        rows = [("host", name, size_text(size)) for name, size in self.host.items()]
        where = "each GPU" if self.device_available is not None else f"host, {ranks} ranks, each"
        rows += [(where, name, size_text(size)) for name, size in self.device.items()]
        return rows

    def _summary(self) -> str:
        return (
            f"{self.parameters / 1e6:.1f} M parameters on {self.config.ranks} {self.config.device} "
            f"rank(s): {size_text(self.host_bytes)} of host memory, {size_text(self.host_available)} free"
        )

    def __repr__(self) -> str:
        body = "\n".join(f"  {where:<22}{name:<38}{size:>13}" for where, name, size in self._rows())
        return f"{self._summary()}\n{body}"

    def _repr_html_(self) -> str:
        return html_table(self._summary(), self._rows())


def size_text(nbytes: int) -> str:
    """In GiB, or in MiB what is small."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"


def plan(config: Config) -> Plan:
    """The preflight of `config`. Reads configs only; raises ConfigError for what cannot run."""
    config = config.resolved()
    model_config = load_config(config.model, config.max_position_embeddings)
    model = skeleton(model_config, config.sequence_length)
    units = units_of(model, config.optimizer.freeze)
    check_groups(units, config.optimizer)
    experts_of(model_config, config.router_aux_loss_coef)  # refuses a dense model's
    dtype = DTYPES[str(config.compute_dtype)]
    return Plan(
        config=config,
        model=model_config,
        units=units,
        host=_host_bytes(config, model_config, units, dtype),
        device=_device_bytes(config, model_config, units, dtype),
        host_available=_host_available(config),
        device_available=_device_available(config),
    )


def with_layout(existing: Plan, layout: Layout) -> Plan:
    """The same run under another layout, and what is free now."""
    return dataclasses.replace(
        under(existing, layout),
        host_available=_host_available(existing.config),
        device_available=_device_available(existing.config),
    )


def under(existing: Plan, layout: Layout) -> Plan:
    """The same run under another layout, against the same free memory; costs microseconds."""
    config = dataclasses.replace(existing.config, layout=layout)
    dtype = DTYPES[str(config.compute_dtype)]
    return dataclasses.replace(
        existing,
        config=config,
        host=_host_bytes(config, existing.model, existing.units, dtype),
        device=_device_bytes(config, existing.model, existing.units, dtype),
    )


def _host_available(config: Config) -> int:
    if config.host_memory_budget is not None:
        return int(config.host_memory_budget * GIB)
    return available_bytes()


def _device_available(config: Config) -> int | None:
    if config.device != "cuda":
        return None
    return min(free_gpu_bytes(int(config.ranks or 1)))


def _host_bytes(config: Config, model: Any, units: tuple[Unit, ...], dtype: torch.dtype) -> dict[str, int]:
    total, ranks = unit_starts(units)[-1], int(config.ranks or 1)
    modes = config.layout.activation_modes(len(units) - 2, lowest_trained(units))
    width = units[-1].parameters[-1].numel
    kept = width * dtype.itemsize + _kept_part(config) * intermediates_per_token(config, model)
    sizes = {
        "FP32 master weights": 4 * total,
        "exp_avg and exp_avg_sq": 8 * sum(aligned_numel(unit) for unit in units if not unit.frozen),
        "BF16 working copy": 2 * total if dtype == torch.bfloat16 else 0,
        "gradient landing": LandingPlan(units, ranks, config.layout, config.gradient_dtype.itemsize).nbytes,
        "accumulated gradients": 4 * total if config.gradient_accumulation > 1 else 0,
        "offloaded layer inputs": (
            ranks * modes.count("offload") * stash_numel(config, width) * dtype.itemsize
        ),
        "spilled intermediates (estimate)": int(ranks * modes.count("spill") * _tokens(config) * kept),
    }
    if config.device == "cuda":
        shared, (table, driver) = sum(sizes.values()), PER_PAGE
        pages = shared // PAGE * (table * (ranks + 1) + driver * ranks)
        sizes[PROCESSES] = PROCESS_BYTES + ranks * RANK_BYTES + pages
    return {name: size for name, size in sizes.items() if size}


def _device_bytes(config: Config, model: Any, units: tuple[Unit, ...], dtype: torch.dtype) -> dict[str, int]:
    """Buffers exactly; activations and workspace by formula (estimates, named as such)."""
    ranks, size, gradient = int(config.ranks or 1), dtype.itemsize, config.gradient_dtype.itemsize
    layout, tokens = config.layout, _tokens(config)
    shapes = buffer_numels(units, layout, ranks)
    width = units[-1].parameters[-1].numel
    modes = layout.activation_modes(len(units) - 2, lowest_trained(units))
    edge = shapes["edge"][0] + shapes.get("tied_head", [0])[0] + sum(shapes["pieces"])
    part = _kept_part(config)
    kept = modes.count("keep") + modes.count("partial") * part
    updates = update_numels(units, layout, ranks, size)
    copies = layout.transport == "copy" and ranks > 1
    staging = math.prod(staging_shape(units, layout, ranks, size)) if copies else 0
    rings = (OUTGOING + FETCH_AHEAD) * stash_numel(config, width) if "offload" in modes else 0
    layer, head = _workspaces(config, model, units, dtype)
    intermediates = tokens * intermediates_per_token(config, model)
    moving = min(modes.count("spill"), OUTGOING + FETCH_AHEAD) * (
        part * intermediates + tokens * width * size
    )
    on_gpu = len(modes) - sum(modes.count(mode) for mode in ("offload", "spill", NOTHING))
    sizes = {
        "window": sum(shapes["slots"]) * size,
        "gradient buffers": sum(shapes["gradients"]) * gradient,
        "embedding and head, weights": edge * size,
        "embedding and head, gradients": edge * gradient,
        "reduction staging": staging * gradient,
        "update buffers": 12 * updates.ring + size * updates.out,
        "resident FP32 state": 12 * updates.resident,
        "gradients that wait for their update": updates.gradients * gradient,
        "kept layer inputs": on_gpu * tokens * width * size,
        "kept intermediates (estimate)": int(kept * intermediates),
        "offload rings": rings * size,
        "spilled layers on their way (estimate)": int(moving),
        "workspace (estimate)": max(layer, head),
    }
    return {name: value for name, value in sizes.items() if value}


def _kept_part(config: Config) -> float:
    """Of a layer's intermediates, under `partial` and `spill`: what is not compiled keeps all."""
    return config.layout.partial_budget if config.compile else 1.0


def _tokens(config: Config) -> int:
    """Of one pass on one rank."""
    return config.micro_batch_size // int(config.ranks or 1) * config.sequence_length


def intermediates_per_token(config: Config, model: Any) -> int:
    """Bytes per token that a layer keeps besides its input, under this config's `keep`."""
    dtype = DTYPES[str(config.compute_dtype)]
    kept = kept_per_token(model, dtype, bool(config.compile), config.layout.mlp_tile_tokens > 0)
    return kept - model.hidden_size * dtype.itemsize


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
    # Of a weight gradient: BF16 products on a GPU add to the sum themselves.
    per_weight = 4 if config.device == "cuda" and size == 2 else 8
    if len(pieces) == 1:
        matrix = units[0].parameters[0].numel
        layer += 4 * matrix * is_tied(units)  # the matrix's gradient waits through backward
        return layer, per_weight * matrix + min(tokens, 4096) * model.vocab_size * logits
    matrix = pieces[0][1]
    at_a_time = min(tokens * matrix // width, LOGITS[str(config.device)])
    tied = tokens * (width * size + 12) * is_tied(units)  # what its gradient is computed from at the end
    return layer + tied, per_weight * matrix + at_a_time * logits + tokens * width * (4 + 3 * size)
