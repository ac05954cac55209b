"""What a run will take, in bytes, before anything is allocated."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from slidedp.config import Config
from slidedp.errors import ConfigError
from slidedp.fielddocs import with_field_docs
from slidedp.gpus import free_gpu_bytes, reach_one_another
from slidedp.host.groups import check_groups
from slidedp.host.memory import available_bytes
from slidedp.layout import Layout
from slidedp.memory_plan import GIB, device_bytes, host_bytes
from slidedp.model.experts import experts_of
from slidedp.model.families import has_halves, load_config, skeleton
from slidedp.model.units import Unit, units_of
from slidedp.tables import html_table

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
    return Plan(
        config=config,
        model=model_config,
        units=units,
        host=host_bytes(config, model_config, units),
        device=device_bytes(config, model_config, units),
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
    """The same run under another layout, against the same free memory. Costs microseconds where the layouts
    differ in activations alone, and most of a millisecond else."""
    before, config = existing.config.layout, dataclasses.replace(existing.config, layout=layout)
    alike = dataclasses.replace(layout, activations=before.activations, partial_budget=before.partial_budget)
    on_host, on_device = (existing.host, existing.device) if alike == before else (None, None)
    of = config, existing.model, existing.units
    return dataclasses.replace(
        existing, config=config, host=host_bytes(*of, on_host), device=device_bytes(*of, on_device)
    )


def _host_available(config: Config) -> int:
    if config.host_memory_budget is not None:
        return int(config.host_memory_budget * GIB)
    return available_bytes()


def _device_available(config: Config) -> int | None:
    if config.device != "cuda":
        return None
    return min(free_gpu_bytes(int(config.ranks or 1)))
