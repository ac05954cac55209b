"""Seconds of every task of a step: what each server needs for each piece that it is given."""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from slidedp.layout import NOTHING, Layout
from slidedp.policy.contention import LinkRates, seconds_per_byte, update_seconds
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.traffic import Traffic, route, traffic


class Chunks(NamedTuple):
    """A unit on its way through the link and the collective, chunk by chunk."""

    number: int
    link: float
    """Seconds of one chunk on the link."""
    collective: float
    """Seconds of one chunk between the GPUs."""


class GpuUpdate(NamedTuple):
    """A unit's update on the GPUs, chunk by chunk: seconds of one rank's share of a chunk."""

    number: int
    bring: float
    """To bring its state up."""
    update: float
    write: float
    """To write it back."""


@dataclass(frozen=True)
class Demands:
    """Seconds of every task. Lists of three are by kind of unit: embed, layer, head (Workload.kind)."""

    deliver: list[Chunks]
    """In the forward pass."""
    deliver_again: Chunks
    """Of a layer in the backward pass."""
    gather_fresh: list[float]
    """A chunk's all-gather where the ranks' shares are in the slot already."""
    reduce: list[Chunks]
    keep: list[Chunks]
    """As `reduce`, for units that are updated on the GPUs: their gradient does not leave them."""
    update: list[float]
    """Of the worker."""
    lane_sum: list[float]
    """Of the worker, to sum a unit's lanes before the norm is known; 0 with one lane."""
    on_gpu: list[GpuUpdate]
    resident: list[GpuUpdate]
    """As `on_gpu`, for units whose state stays there."""
    stash: list[float]
    """By layer, of what it offloads or spills; 0 where that is nothing."""
    fetch: list[float]
    forward: float
    """Of the GPU, with what updates there take of it, as `backward`."""
    backward: list[float]
    """By layer, the first one first."""
    enqueue_forward: float
    """A rank's threads share one interpreter: what they take to enqueue a layer's forward and all that moves
    meanwhile. The GPU cannot be faster."""
    enqueue_backward: list[float]
    submit: list[float]
    """The copy of a gradient into its buffer."""
    head: float
    embed_forward: float
    embed_backward: float

    def with_visits(self, factor: float) -> "Demands":
        """The same with `factor` times the compute and what it takes to enqueue it."""
        return replace(
            self,
            enqueue_forward=self.enqueue_forward * factor,
            enqueue_backward=[seconds * factor for seconds in self.enqueue_backward],
            forward=self.forward * factor,
            head=self.head * factor,
            backward=[seconds * factor for seconds in self.backward],
            submit=[seconds * factor for seconds in self.submit],
            embed_forward=self.embed_forward * factor,
            embed_backward=self.embed_backward * factor,
        )


def demands(w: Workload, r: Rates, layout: Layout) -> Demands:
    """Every task's seconds under a layout, with what shares the host's memory slowed down."""
    moved = traffic(w, r.peers, layout)
    links = moved.links(r)
    in_forward = layout.schedule == "in_forward"
    sizes = (w.embed_params, w.layer_params, w.head_params)
    updates = _worker(sizes, w, r, layout, moved, links.times(r.under_update))
    share = _worker_share(updates, w, r, layout)
    under = 1 - (1 - r.under_update) * share
    # Beside the worker. Only `in_forward` lets it rest: in backward, unless it sums lanes there.
    busy = links.times(under)
    in_backward = links if in_forward and lanes(w, layout) == 1 else busy
    up_first, down_first = seconds_per_byte(moved.forward_up, moved.forward_down, busy)
    up_again, down_last = seconds_per_byte(moved.backward_up, moved.backward_down, in_backward)

    delivers = [_deliver(p, w, r, layout, moved, up_first) for p in w.delivered_params(layout)]
    reduces = [_reduce(p, w, r, layout, moved, down_last) for p in sizes]
    slower = 1 + (r.enqueue_under_update - 1) * share
    enqueue_forward, enqueue_backward = (slower * seconds for seconds in _enqueueing(w, r, layout))
    away = w.away_bytes(layout)
    on_gpu = _gpu_updates(sizes, w, r, layout, busy, under, 12, 14)
    backwards = w.layers + 1 - w.first_backward
    beside = _beside_compute(w, layout, on_gpu) / (w.layers if in_forward else max(1, backwards))
    modes = w.modes(layout)
    seconds_of_mode = {
        mode: r.backward(mode, w.kept_part(layout))
        + _tiles_again(mode, w, r, layout)
        + (0.0 if in_forward else beside)
        for mode in {*modes} - {NOTHING}
    }
    return Demands(
        deliver=delivers,
        deliver_again=_deliver(w.layer_params, w, r, layout, moved, up_again),
        gather_fresh=[
            p * w.itemsize / c.number / r.all_gather + r.collective_latency if w.ranks > 1 else 0.0
            for p, c in zip(sizes, delivers, strict=True)
        ],
        reduce=reduces,
        keep=[
            c._replace(link=2 * p * w.gradient_itemsize / w.ranks / c.number / r.device_copy)
            for p, c in zip(sizes, reduces, strict=True)
        ],
        update=updates,
        lane_sum=_lane_sums(sizes, w, r, layout),
        on_gpu=on_gpu,
        resident=_gpu_updates(sizes, w, r, layout, busy, under, 0, w.itemsize),
        stash=[size * down_first for size in away],
        fetch=[size * up_again for size in away],
        forward=r.forward + (beside if in_forward else 0.0),
        backward=[seconds_of_mode.get(mode, 0.0) for mode in modes],
        enqueue_forward=enqueue_forward,
        enqueue_backward=[
            0.0
            if mode == NOTHING
            else enqueue_backward
            + (0.0 if mode in ("keep", "partial", "spill") else slower * r.enqueue_forward)
            for mode in modes
        ],
        submit=[p * (w.itemsize + w.gradient_itemsize) / r.device_copy for p in sizes],
        head=r.head * _logits_again(w, layout),
        embed_forward=r.embed_forward,
        embed_backward=r.embed_backward if w.lowest == 0 else 0.0,
    )


def _tiles_again(mode: str, w: Workload, r: Rates, layout: Layout) -> float:
    """Seconds of a layer's MLP, which runs once more in a backward over tiles; what runs the layer again
    leaves the tiles out of that."""
    if not layout.mlp_tile_tokens or mode in ("recompute", "offload"):
        return 0.0
    return r.forward * w.mlp_flops / w.layer_flops


def _logits_again(w: Workload, layout: Layout) -> float:
    """How much longer the loss takes where the logits of a vocabulary in pieces are computed two or, with
    tied embeddings that are trained, three times: 8 or 10 FLOPs per weight and token instead of 6; 6 instead
    of 4 where the matrix is not trained."""
    if layout.vocabulary_pieces == 1:
        return 1.0
    if not w.matrix_trained:
        return 6 / 4
    return 10 / 6 if w.tied else 8 / 6


def _chunks(params: float, w: Workload, layout: Layout) -> tuple[int, float]:
    """How many chunks a unit has, and their bytes."""
    count = max(1, ceil(params * w.itemsize / layout.chunk_bytes))
    return count, params * w.itemsize / count


def _deliver(params: float, w: Workload, r: Rates, layout: Layout, moved: Traffic, per_byte: float) -> Chunks:
    count, size = _chunks(params, w, layout)
    delivery, _ = route(w, layout)
    gather = {"replicated": 0.0, "sharded": 1 / r.all_gather, "broadcast": 1 / r.broadcast}[delivery]
    collective = size * gather + r.collective_latency if delivery != "replicated" else 0.0
    return Chunks(count, size * moved.share_up * per_byte + r.copy_latency, collective)


def _reduce(params: int, w: Workload, r: Rates, layout: Layout, moved: Traffic, per_byte: float) -> Chunks:
    count, _ = _chunks(params, w, layout)
    size = params * w.gradient_itemsize / count
    _, reduction = route(w, layout)
    scatter = {"cpu": 0.0, "gpu": 1 / r.reduce_scatter, "gpu_root": 1 / r.reduce}[reduction]
    between = reduction != "cpu" and w.ranks > 1
    collective = size * scatter + r.collective_latency if between else 0.0
    return Chunks(count, size * moved.share_down * per_byte + r.copy_latency, collective)


VISIT = 4
"""Operations besides a layer's own kernels: its events, and the copy of its gradients."""
LAND, NORM, COLLECTIVE, PULL = 2, 3, 2, 6
"""Operations for each chunk: to land it, to sum its squares, to gather or sum it by a collective or by
copies from one other rank."""
UPDATE, LOAD = 4, 5
"""... to update it on the GPU, and to bring its state up and back."""


def _enqueueing(w: Workload, r: Rates, layout: Layout) -> tuple[float, float]:
    """Seconds to enqueue a layer's forward and its backward from kept intermediates, and what moves beside
    each: deliveries, reductions and, on average over the layers, updates on the GPU."""
    count, _ = _chunks(w.layer_params, w, layout)
    delivery, reduction = route(w, layout)
    in_forward = layout.schedule == "in_forward"
    between = 0 if w.ranks == 1 else COLLECTIVE if layout.transport == "collective" else PULL * (w.ranks - 1)
    deliver = 1 + (between if delivery != "replicated" else 0)
    reduce = LAND + (between if reduction != "cpu" else 0) + (NORM if in_forward else 0)
    layers = range(1, w.layers + 1)
    there, stays = (
        sum(unit in units for unit in layers) / w.layers
        for units in (w.updated_on_gpu(layout), w.resident_on_gpu(layout))
    )
    update = there * UPDATE + (there - stays) * LOAD
    again = max(0, w.layers - layout.window) / w.layers
    forward = VISIT + count * (deliver + (update if in_forward else 0))
    backward = VISIT + count * (again * deliver + reduce + (0 if in_forward else update))
    return (
        r.enqueue_forward + forward * r.enqueue_operation,
        r.enqueue_backward + backward * r.enqueue_operation,
    )


def _worker_share(updates: list[float], w: Workload, r: Rates, layout: Layout) -> float:
    """The part of a step in which the worker updates, beside which links are slower and enqueueing takes
    longer."""
    elsewhere = w.updated_on_gpu(layout) | {*w.frozen}
    worker = sum(updates[w.kind(unit)] for unit in range(w.layers + 2) if unit not in elsewhere)
    compute = w.layers * r.forward + (w.layers + 1 - w.first_backward) * r.backward_keep + r.head
    return min(1.0, worker / compute)


# --- updates ------------------------------------------------------------------------------------


def state_bytes(w: Workload) -> int:
    """What an update moves per parameter besides the gradient: master and moments read and written, and
    the working copy written where it is not the master itself."""
    return 26 if w.itemsize == 2 else 24


def lanes(w: Workload, layout: Layout) -> int:
    """Gradients of one unit that land."""
    return w.ranks if route(w, layout)[1] == "cpu" else 1


def updated_there(w: Workload, layout: Layout) -> int:
    """Parameters that are updated on the GPUs."""
    return sum(w.unit_params(unit) for unit in w.updated_on_gpu(layout))


def resident_there(w: Workload, layout: Layout) -> int:
    """Those of them whose state stays there."""
    return sum(w.unit_params(unit) for unit in w.resident_on_gpu(layout))


def _worker(
    sizes: tuple[int, ...], w: Workload, r: Rates, layout: Layout, moved: Traffic, busy: LinkRates
) -> list[float]:
    """Each unit on the worker: beside the forward's traffic, or beside that of both passes."""
    in_forward = layout.schedule == "in_forward"
    there, stays = updated_there(w, layout), resident_there(w, layout)
    left = max(1, w.trained_params - there)
    units = w.params / w.layer_params / left
    up = moved.forward_up + (0.0 if in_forward else moved.backward_up)
    down = moved.forward_down + (0.0 if in_forward else moved.backward_down)
    # State that the GPUs update streams both ways meanwhile, and its gradients do not land; what is in its
    # slot already is not delivered.
    own = layout.own_slots(w.layers)
    here = sum(w.unit_params(unit) for unit in w.updated_on_gpu(layout) if unit in own)
    delivered = here * w.itemsize * moved.share_up * moved.movers_up
    written = 14 * (there - stays) + w.itemsize * stays - (0.0 if in_forward else w.gradient_itemsize) * there
    per_param = update_seconds(
        r,
        up * moved.movers_up * units + (12 * (there - stays) - delivered) / left,
        down * moved.movers_down * units + written / left,
        busy.times(moved.movers_up, moved.movers_down, max(moved.movers_up, moved.movers_down)),
    )
    # Measured with one gradient in the compute dtype. In backward it sums the lanes in the same pass.
    state, read = state_bytes(w), (1 if in_forward else lanes(w, layout)) * w.gradient_itemsize
    per_param *= (state + read) / (state + w.itemsize)
    return [p * per_param + _chunks(p, w, layout)[0] * r.update_latency for p in sizes]


def _lane_sums(sizes: tuple[int, ...], w: Workload, r: Rates, layout: Layout) -> list[float]:
    number = lanes(w, layout)
    if layout.schedule == "in_backward" or number == 1:
        return [0.0 for _ in sizes]
    return [p * w.gradient_itemsize * (number + 1) / r.sum_lanes + r.update_latency for p in sizes]


def _gpu_updates(
    sizes: tuple[int, ...],
    w: Workload,
    r: Rates,
    layout: Layout,
    busy: LinkRates,
    under: float,
    up: int,
    down: int,
) -> list[GpuUpdate]:
    """`up` and `down`: bytes per parameter. Where the rate of 12 up and 14 down is measured as a whole, the
    way down is the longer one. `under` is what the worker leaves of it."""
    found = []
    for params in sizes:
        count, _ = _chunks(params, w, layout)
        share = params / w.ranks / count
        per_byte = 1 / (14 * under * r.gpu_update) if r.gpu_update else 1 / busy.both
        times = share * up * per_byte, share * 28 / r.device_copy, share * down * per_byte
        found.append(GpuUpdate(count, *times))
    return found


def _beside_compute(w: Workload, layout: Layout, on_gpu: list[GpuUpdate]) -> float:
    """Seconds of a step that updates on the GPU keep its memory busy, at the cost of the layers that run
    beside them. With all of Qwen3-1.7B updated there, compute was busy 0.177 s instead of 0.161 (H200)."""
    there = w.updated_on_gpu(layout)
    return sum(on_gpu[w.kind(unit)].number * on_gpu[w.kind(unit)].update for unit in there)
