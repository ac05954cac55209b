"""How a step is carried out: nothing here changes what it computes."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from slidedp.checks import at_least, check_types, choice
from slidedp.errors import ConfigError
from slidedp.fielddocs import with_field_docs
from slidedp.tables import html_table

DELIVERIES = ("replicated", "sharded", "broadcast")
REDUCTIONS = ("cpu", "gpu", "gpu_root")
ACTIVATIONS = ("keep", "partial", "recompute", "offload", "spill")
NOTHING = "nothing"
"""What a layer leaves that backward does not reach: the mode of those below the first trained unit."""
TRANSPORTS = ("collective", "copy")
SCHEDULES = ("in_forward", "in_backward")
LANDINGS = ("full", "ring")
TURN = 3
"""Layers whose update the next forward would wait for: see `Layout.updated_on_gpu`."""


@with_field_docs
@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one step is carried out. Every layout computes the same step; only its cost differs."""

    delivery: str = "sharded"
    """Host to GPU: `replicated` (every rank copies the whole unit), `sharded` (each rank copies 1/N,
    then an all-gather between GPUs) or `broadcast` (rank 0 copies, then broadcasts)."""
    reduction: str = "gpu"
    """GPU to host: `cpu` (every rank lands its gradient, the worker sums), `gpu` (reduce-scatter,
    each rank lands 1/N) or `gpu_root` (reduce to rank 0, which lands all)."""
    transport: str = "collective"
    """Between GPUs: `collective` (NCCL's kernels; gloo on a CPU) or `copy` (each rank pulls from the others'
    memory with copy engines, which leaves all SMs to compute; the GPUs must reach one another's memory)."""
    chunk_bytes: int = 64 * 2**20
    """Grain of transfer, reduction and update, in bytes. Rounded to whole alignment blocks."""
    window: int = 3
    """GPU slots that hold decoder layers."""
    gradient_slots: int = 2
    """GPU buffers that hold one decoder layer's gradients each."""
    activations: str | tuple[str, ...] = "recompute"
    """What a layer leaves for its backward: `keep` (all intermediates stay on the GPU), `partial` (the
    compiler keeps `partial_budget` of them and recomputes the cheap rest), `recompute` (only the input
    stays), `offload` (the input goes to host memory) or `spill` (what `partial` would keep goes to host
    memory). One mode for all decoder layers, or one each."""
    partial_budget: float = 0.5
    """Fraction of the intermediates' bytes that `partial` keeps and `spill` moves. Without compilation it is
    all of them."""
    mlp_tile_tokens: int = 0
    """Tokens that a layer's MLP (and the norm before it) takes at a time, for long sequences: its memory
    grows with the tile, and every mode computes the MLP again in backward. 0 takes all at once. A tile that
    divides a rank's tokens is compiled once; 4096 and more fill a GPU."""
    vocabulary_pieces: int = 1
    """Pieces that the embedding and the head are on the GPU in, one or two at a time: their weights and
    gradients there then take about two such pieces and not a whole vocabulary each. The head comes twice
    (tied embeddings four times in all) and its logits are computed twice or three times."""
    schedule: str = "in_forward"
    """`in_forward`: units update in the next step's forward order, once the global norm is known.
    `in_backward`: units update from the moment their gradient has landed; clipping is impossible."""
    landing: str = "full"
    """Host memory for gradients that `in_backward` has not applied yet. `full`: room for every layer, so
    backward never waits and the worker takes first what the next forward needs first. `ring`: room for
    a few layers, 2 bytes per parameter less; layers update in the order of backward."""

    gpu_updates: int = 0
    """Units that are updated on the GPUs and not by the worker: each rank streams its share of the FP32
    state up, updates it where the summed gradient is, and writes it back. First come those that are
    updated last and needed first, where the worker would keep the GPUs waiting (`updated_on_gpu`)."""
    update_slots: int = 8
    """GPU buffers that each hold a rank's share of one chunk's FP32 state, for `gpu_updates`."""
    resident_updates: int = 0
    """How many of the units in `gpu_updates` leave their FP32 state on the GPUs between steps, 12 bytes per
    parameter over all ranks: only their working copy crosses the link. The host's copy of that state is
    brought up to date for every checkpoint, when the layout changes, and at the run's end."""

    def __post_init__(self) -> None:
        check_types(self, "layout.")
        choice("layout.delivery", self.delivery, DELIVERIES)
        choice("layout.reduction", self.reduction, REDUCTIONS)
        choice("layout.transport", self.transport, TRANSPORTS)
        choice("layout.schedule", self.schedule, SCHEDULES)
        choice("layout.landing", self.landing, LANDINGS)
        at_least("layout.chunk_bytes", self.chunk_bytes, 4096)
        at_least("layout.window", self.window, 1)
        at_least("layout.gradient_slots", self.gradient_slots, 1)
        at_least("layout.mlp_tile_tokens", self.mlp_tile_tokens, 0)
        at_least("layout.vocabulary_pieces", self.vocabulary_pieces, 1)
        at_least("layout.gpu_updates", self.gpu_updates, 0)
        at_least("layout.update_slots", self.update_slots, 1)
        if self.gpu_updates and self.reduction != "gpu":
            raise ConfigError(
                f"layout.gpu_updates={self.gpu_updates} with layout.reduction={self.reduction!r}: ranks hold "
                "their shares of the summed gradient only with layout.reduction='gpu'; set that, or 0 updates"
            )
        if not 0 <= self.resident_updates <= self.gpu_updates:
            raise ConfigError(
                f"layout.resident_updates={self.resident_updates} with gpu_updates={self.gpu_updates}: state "
                "stays only where it is updated; expected 0 to gpu_updates"
            )
        if not 0 < self.partial_budget <= 1:
            raise ConfigError(f"layout.partial_budget={self.partial_budget!r}: expected a number in (0, 1]")
        modes = (self.activations,) if isinstance(self.activations, str) else self.activations
        if not modes:
            raise ConfigError("layout.activations=(): expected one mode, or at least one in a tuple")
        for mode in modes:
            choice("layout.activations", mode, ACTIVATIONS)

    def __repr__(self) -> str:
        """What differs from the defaults, as Python; a mode per layer is told by its stretches."""
        parts = []
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if value == setting.default:
                continue
            text = repr(value)
            if isinstance(value, tuple):
                text = " + ".join(f"({mode!r},) * {len([*run])}" for mode, run in groupby(value))
            elif setting.name == "chunk_bytes" and value % 2**20 == 0:
                text = f"{value // 2**20} * 2**20"
            parts.append(f"{setting.name}={text}")
        return f"Layout({', '.join(parts)})"

    def _repr_html_(self) -> str:
        rows = []
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, tuple):
                text = ", ".join(f"{len([*run])} {mode}" for mode, run in groupby(value))
            elif setting.name == "chunk_bytes":
                text = f"{value / 2**20:g} MiB"
            else:
                text = str(value)
            rows.append((setting.name, text, "default" if value == setting.default else ""))
        return html_table("Layout", rows)

    def activation_modes(self, layers: int, lowest: int = 0) -> tuple[str, ...]:
        """One mode per decoder layer; NOTHING for those below the unit `lowest`, where backward ends."""
        if isinstance(self.activations, str):
            modes = (self.activations,) * layers
        elif len(self.activations) == layers:
            modes = self.activations
        else:
            raise ConfigError(
                f"layout.activations names {len(self.activations)} layers, the model has {layers}: "
                "give one mode, or one per layer"
            )
        return modes if lowest <= 1 else (NOTHING,) * (lowest - 1) + modes[lowest - 1 :]

    def updated_on_gpu(self, layers: int, frozen: frozenset[int] = frozenset()) -> frozenset[int]:
        """Indices of the units that `gpu_updates` means: `embed` (0) and the first layers, up to TURN of
        those whose slots are theirs from backward to the next forward; then other layers, evenly spread, so
        that the GPUs and the worker both keep up with backward; the head (layers + 1) last. The indices in
        `frozen` are left out."""
        return _updated_on_gpu(self.gpu_updates, self.window, layers) - frozen

    def own_slots(self, layers: int) -> range:
        """Indices of the units whose slot is theirs from backward to the next forward: what GPUs update of
        them goes there at once. An embedding in pieces has no such slot."""
        return range(int(self.vocabulary_pieces > 1), min(self.window, layers) + 1)

    def resident_on_gpu(self, layers: int, frozen: frozenset[int] = frozenset()) -> frozenset[int]:
        """Indices of the units that `resident_updates` means: the first of `updated_on_gpu`."""
        return frozenset(sorted(self.updated_on_gpu(layers, frozen))[: self.resident_updates])


@cache  # a prediction asks a dozen times
def _updated_on_gpu(count: int, window: int, layers: int) -> frozenset[int]:
    near = 1 + min(window, layers, TURN)
    count = min(count, layers + 2)
    rest = layers + 1 - near
    spread = min(max(0, count - near), rest)
    chosen = {*range(min(count, near)), *(near + i * rest // spread for i in range(spread))}
    return frozenset(chosen | ({layers + 1} if count == layers + 2 else set()))
