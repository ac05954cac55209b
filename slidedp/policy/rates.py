"""What the step-time model is given: a workload and the machine's rates, as plain numbers."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from slidedp.layout import Layout

PEERS = ("fabric", "links", "host")
GROUPS = {
    "compute": (
        "forward", "backward_keep", "backward_recompute", "backward_partial", "head", "embed_forward",
        "embed_backward",
    ),
    "links": ("up", "down", "both", "up_all", "down_all", "both_all", "gpu_update"),
    "collectives": ("all_gather", "reduce_scatter", "broadcast", "reduce"),
    "update": ("update", "update_up", "update_down", "update_both", "sum_lanes"),
    "host_memory": ("host_memory",),
}  # fmt: skip
"""What a machine can be faster in, and the fields of Rates that say so."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of one model, as sizes. Parameters count the padding of their flat buffer."""

    layers: int
    layer_params: int
    """Parameters of one decoder layer."""
    embed_params: int
    head_params: int
    """Of the final norm and the output matrix; with tied embeddings of the norm alone."""
    tied: bool
    ranks: int
    tokens: int
    """Tokens of one rank in one step."""
    itemsize: int
    """Bytes of an element of the compute dtype, in which parameters travel."""
    wide_gradients: bool = False
    """Whether gradients travel in FP32 and not in the compute dtype."""
    input_bytes: int
    """Bytes of one layer's input on one rank: what `recompute` leaves on the GPU and `offload` moves."""
    kept_bytes: int
    """Bytes that `keep` leaves on the GPU for one layer on one rank, besides its input."""
    layer_flops: float
    """Forward FLOPs of one layer on one rank; its backward takes twice as many."""
    mlp_flops: float
    """Those of its MLP among them."""
    head_flops: float
    """Forward and backward FLOPs of the output matrix on one rank."""
    compiled: bool = True
    """Whether a compiler keeps a part of a layer's intermediates, where `partial` and `spill` ask for one."""
    frozen: tuple[int, ...] = ()
    """Indices of the units that are not trained."""

    @property
    def params(self) -> int:
        return self.embed_params + self.layers * self.layer_params + self.head_params

    @property
    def lowest(self) -> int:
        """Index of the first unit that is trained, where backward ends."""
        return next(unit for unit in range(self.layers + 2) if unit not in self.frozen)

    @property
    def first_backward(self) -> int:
        """Index of the first layer that has a backward; layers + 1 if none has."""
        return max(1, self.lowest)

    @property
    def matrix_trained(self) -> bool:
        """Whether the output matrix is; tied, it is the embedding's."""
        return (0 if self.tied else self.layers + 1) not in self.frozen

    def trained(self, kind: int) -> int:
        """Units of a kind that are trained."""
        return (1, self.layers, 1)[kind] - sum(self.kind(unit) == kind for unit in self.frozen)

    @property
    def trained_params(self) -> int:
        """Those of `params` that are trained."""
        return self.params - sum(self.unit_params(unit) for unit in self.frozen)

    def updated_on_gpu(self, layout: Layout) -> frozenset[int]:
        """Indices of the units that GPUs update."""
        return layout.updated_on_gpu(self.layers, frozenset(self.frozen))

    def resident_on_gpu(self, layout: Layout) -> frozenset[int]:
        """Those of them whose state stays there."""
        return layout.resident_on_gpu(self.layers, frozenset(self.frozen))

    def modes(self, layout: Layout) -> tuple[str, ...]:
        """By layer; NOTHING where no backward comes."""
        return layout.activation_modes(self.layers, self.lowest)

    def unit_params(self, unit: int) -> int:
        """Parameters of a unit by index: 0 embed, 1..layers, layers + 1 head."""
        if unit == 0:
            return self.embed_params
        return self.layer_params if unit <= self.layers else self.head_params

    def delivered_params(self, layout: Layout) -> tuple[float, float, float]:
        """Parameters of embed, a layer and head that come to a GPU for a forward and the loss. A vocabulary
        in k pieces comes to the head k - 1 pieces down and k up; a tied one once more for its gradient."""
        pieces = layout.vocabulary_pieces
        head = self.head_params * (2 - 1 / pieces)
        if self.tied:
            head = self.head_params + (self.embed_params * (3 - 1 / pieces) if pieces > 1 else 0.0)
        return self.embed_params, self.layer_params, head

    @property
    def gradient_itemsize(self) -> int:
        """Bytes of an element of a gradient."""
        return 4 if self.wide_gradients else self.itemsize

    def kept_part(self, layout: Layout) -> float:
        """Of a layer's intermediates, under `partial` and `spill`."""
        return layout.partial_budget if self.compiled else 1.0

    def away_bytes(self, layout: Layout) -> list[float]:
        """What each layer moves to the host in forward, and back for its backward."""
        sizes = {
            "offload": float(self.input_bytes),
            "spill": self.input_bytes + self.kept_part(layout) * self.kept_bytes,
        }
        return [sizes.get(mode, 0.0) for mode in self.modes(layout)]

    def kind(self, unit: int) -> int:
        """0 embed, 1 a layer, 2 head."""
        return 0 if unit == 0 else 1 if unit <= self.layers else 2

    def unit_name(self, unit: int) -> str:
        """The engine's name of a unit: embed, layers.<i>, head."""
        if unit == 0:
            return "embed"
        return f"layers.{unit - 1}" if unit <= self.layers else "head"

    def scaled(self, factor: float) -> "Workload":
        """The same model with `factor` times the tokens in a step."""
        return dataclasses.replace(
            self,
            tokens=round(self.tokens * factor),
            input_bytes=round(self.input_bytes * factor),
            kept_bytes=round(self.kept_bytes * factor),
            layer_flops=self.layer_flops * factor,
            mlp_flops=self.mlp_flops * factor,
            head_flops=self.head_flops * factor,
        )


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast one machine does each piece of one workload. Seconds per piece, or units per second.

    Links and the worker share the host's memory, so both have rates alone and together.
    """

    forward: float
    """Seconds of one layer's forward."""
    backward_keep: float
    """Seconds of one layer's backward from kept intermediates."""
    backward_recompute: float
    """Seconds of one layer's backward that runs the forward again first (`recompute`, `offload`)."""
    backward_partial: tuple[tuple[float, float], ...] = ()
    """(kept fraction, seconds) of backwards in between, by rising fraction, as far as measured."""
    head: float
    """Seconds of the loss, forward and backward."""
    embed_forward: float = 0.0
    embed_backward: float = 0.0
    device_copy: float = 2e12
    """Bytes per second, read and written, of a gradient's copy into its flat buffer on the device."""

    up: float
    """Host to GPU, bytes per second, while only one rank copies."""
    down: float
    """GPU to host, the same."""
    both: float
    """Each way, one rank copying both ways."""
    up_all: float
    """Host to GPU, bytes per second of each rank, while all ranks copy up."""
    down_all: float
    both_all: float
    """Each way and rank, while all ranks copy both ways."""
    under_update: float = 1.0
    """Factor on a link's rate while the worker updates."""

    all_gather: float = float("inf")
    """Bytes of the whole gathered buffer per second."""
    reduce_scatter: float = float("inf")
    """Bytes of the whole scattered buffer per second."""
    broadcast: float = float("inf")
    reduce: float = float("inf")
    peers: str = "fabric"
    """What GPUs talk over: `fabric` (wires of their own), `links` (the same PCIe links as the host's
    copies), or `host` (those links and the host's memory)."""

    update: float
    """Parameters per second of the worker, with idle links."""
    update_up: float
    """... while every link copies up at its full rate."""
    update_down: float
    update_both: float
    """... while every link copies both ways."""
    sum_lanes: float
    """Bytes per second, read and written, of the worker's sum of several lanes."""
    host_memory: float
    """Bytes per second of all traffic to host memory together."""
    gpu_update: float = 0.0
    """Parameters per second of each rank, when every rank streams FP32 state up, updates it and writes
    it back; 0 where it is not measured."""

    enqueue_forward: float = 0.0
    """Seconds that a rank's compute thread takes to enqueue a layer's forward; 0 where the GPU never waits
    for it."""
    enqueue_backward: float = 0.0
    """... a backward from kept intermediates; one that runs the forward again takes both."""
    enqueue_operation: float = 0.0
    """... one copy or kernel on a stream, between the events that order it."""
    enqueue_under_update: float = 1.0
    """Factor on these times while the worker updates."""

    copy_latency: float = 5e-6
    """Seconds per chunk besides its bytes, on a link."""
    collective_latency: float = 3e-5
    update_latency: float = 1e-4
    """Seconds of the worker per chunk besides its parameters: messages and the kernel's call."""
    message_latency: float = 2e-4
    """Seconds from a landing to the worker, and from a publication to the ranks."""
    synchronous: bool = False
    """Whether a rank's transfers run one after another on one thread, as on a CPU."""

    def __post_init__(self) -> None:
        assert self.peers in PEERS, self.peers

    def backward(self, mode: str, kept_part: float) -> float:
        """Seconds of one layer's backward; with a part of its intermediates, by straight lines between
        measured points."""
        if mode == "keep":
            return self.backward_keep
        if mode not in ("partial", "spill"):
            return self.backward_recompute
        left = (0.0, self.backward_recompute)
        for point in (*self.backward_partial, (1.0, self.backward_keep)):
            if kept_part <= point[0]:
                share = (kept_part - left[0]) / max(1e-12, point[0] - left[0])
                return left[1] + share * (point[1] - left[1])
            left = point
        return self.backward_keep

    def scaled(self, factor: float) -> "Rates":
        """The same machine with `factor` times the tokens in a step: compute takes `factor` as long."""
        return self.faster("compute", 1 / factor)

    def faster(self, what: str, factor: float) -> "Rates":
        """The same machine with one of GROUPS `factor` times as fast; latencies stay."""
        values: dict[str, Any] = {}
        for name in GROUPS[what]:
            value = getattr(self, name)
            if what != "compute":
                values[name] = value * factor
            elif name == "backward_partial":
                values[name] = tuple((budget, seconds / factor) for budget, seconds in value)
            else:
                values[name] = value / factor
        return dataclasses.replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an unlimited rate is None."""
        values = dataclasses.asdict(self)
        return {name: None if value == float("inf") else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Rates":
        """Rates from `to_dict`."""
        plain: dict[str, Any] = {k: float("inf") if v is None else v for k, v in values.items()}
        plain["backward_partial"] = tuple(tuple(point) for point in plain.get("backward_partial", ()))
        return cls(**plain)
