"""The step-time model: how long a step takes under a layout, what binds it, and where time is lost.

Numbers in, numbers out. Tasks (deliver, forward, backward, reduce, land, update, stash, fetch) run on
servers (compute, the two directions of the link, the GPUs' collectives, the optimizer worker), each in
order. A task starts when its server, its inputs, its buffer and its version gate allow:

    start = max(server free, inputs ready, buffer free, version published),  end = start + demand.

The order is the engine's own (`stream.program.transfers`), so buffers, windows and gates constrain the
model as they do the engine. Inside a unit, chunks flow through two servers one behind the other: n
chunks of a and b seconds end after n·a + b, or a + n·b, whichever is later. Steps follow each other
until their period no longer changes.

Servers that share the host's memory slow each other down. What a phase moves each way is known from
the layout alone, and decides the demand per byte before the recurrence runs:
- a link that moves u bytes up and d < u down has both directions busy for d bytes, one for u - d;
- the worker runs at its rate alone, beside one busy direction, or both, by how long they are busy;
  beside the worker that is longer.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from slidedp.host.landing import RING
from slidedp.policy.rates import Rates, Workload
from slidedp.stream.program import (
    FETCH_AHEAD,
    Deliver,
    Fetch,
    Load,
    Reduce,
    Stash,
    Update,
    Visits,
    transfers,
)
from slidedp.stream.stash import OUTGOING
from slidedp.stream.timeline import Span

if TYPE_CHECKING:
    from slidedp.config import Layout

STEADY = 1e-4
"""Relative change of the period below which it counts as steady."""
MOST_STEPS = 8
COMPUTE = "compute"
RESOURCES = (COMPUTE, "update", "to_device", "to_host", "collective", "host_memory")


@dataclass(frozen=True)
class Prediction:
    """What the model says about one layout."""

    step_seconds: float
    """From one step's end of compute to the next one's, once steady."""
    drain_seconds: float
    """From the last backward to the last published update."""
    bound_seconds: float
    """The longest demand on any one resource: no schedule of the same work is faster."""
    compute_seconds: float
    """Demand on a GPU's compute alone."""
    binding: str
    """The resource that decides the step: one of RESOURCES."""
    demand: dict[str, float]
    """Busy seconds of each resource in a step."""
    exposed: dict[str, float]
    """Seconds that compute waits in a step, by cause: `delivery` (parameters on their way), `update`
    (their version is not published), `reduction` (gradients have not landed), `offload` (layer inputs)."""
    timeline: tuple[Span, ...]
    """The spans of a steady step if they were asked for, else empty."""

    @property
    def host_bound(self) -> bool:
        """Whether something other than the GPU's compute decides the step."""
        return self.binding != COMPUTE


def predict(workload: Workload, rates: Rates, layout: "Layout", *, timeline: bool = False) -> Prediction:
    """The steady step under `layout`. Costs about half a millisecond; `timeline` a little more."""
    demands = _demands(workload, rates, layout)
    steady = _recurrence(workload, rates, layout, demands, record=timeline)
    longest = max(demands.total, key=lambda name: demands.total[name])
    step = max(steady.step, demands.total[longest])
    waits = sum(steady.exposed.values())
    if demands.total[longest] > steady.step * (1 + STEADY):
        binding = longest
    elif waits < 0.02 * step:
        binding = COMPUTE
    else:
        # What would a slightly faster GPU gain? At least half of it: the GPU decides the step.
        faster = _recurrence(workload, rates, layout, demands.with_compute(0.98))
        gained = (steady.step - faster.step) / (0.02 * steady.step)
        binding = COMPUTE if gained >= 0.5 else _resource_of(steady.exposed, demands)
    return Prediction(
        step_seconds=step,
        drain_seconds=steady.drain,
        bound_seconds=demands.total[longest],
        compute_seconds=demands.total[COMPUTE],
        binding=binding,
        demand=demands.total,
        exposed={cause: seconds for cause, seconds in steady.exposed.items() if seconds > 1e-9},
        timeline=tuple(steady.spans),
    )


def _resource_of(exposed: dict[str, float], demands: "_Demands") -> str:
    cause = max(exposed, key=lambda name: exposed[name])
    if cause == "update":
        return "update"
    if cause == "delivery":
        deliver = demands.deliver[1]
        return "collective" if deliver[2] > deliver[1] else "to_device"
    reduce = demands.reduce[1]
    return "collective" if cause == "reduction" and reduce[1] > reduce[2] else "to_host"


# --- demands ------------------------------------------------------------------------------------


@dataclass
class _Demands:
    """Seconds of every task. Units by kind: embed, layer, head."""

    deliver: list[tuple[int, float, float]]
    """(chunks, seconds of a chunk on the link, and in the collective) in the forward phase."""
    deliver_again: tuple[int, float, float]
    """A layer's second delivery, in the backward phase."""
    gather_fresh: list[float]
    """Seconds of a chunk's all-gather where the ranks' shares are in the slot already."""
    reduce: list[tuple[int, float, float]]
    """(chunks, seconds of a chunk in the collective, and on the link)."""
    update: list[float]
    """Seconds of the worker."""
    keep: list[tuple[int, float, float]]
    """As `reduce`, for units that are updated on the GPU: their gradient does not leave it."""
    on_gpu: list[tuple[int, float, float, float]]
    """(chunks, seconds of a chunk's share to bring its state up, to update it, to write it back)."""
    lane_sum: list[float]
    """Seconds of the worker to sum a unit's lanes before the norm is known; 0 with one lane."""
    stash: float
    fetch: float
    forward: float
    backward: list[float]
    """By layer, the first one first."""
    submit: list[float]
    head: float
    embed_forward: float
    embed_backward: float
    total: dict[str, float]

    def with_compute(self, factor: float) -> "_Demands":
        scaled = _Demands(**self.__dict__)
        scaled.forward, scaled.head = self.forward * factor, self.head * factor
        scaled.backward = [seconds * factor for seconds in self.backward]
        scaled.submit = [seconds * factor for seconds in self.submit]
        scaled.embed_forward = self.embed_forward * factor
        scaled.embed_backward = self.embed_backward * factor
        return scaled


def _slowdown(up: float, down: float, rate_up: float, rate_down: float, both: float) -> tuple[float, float]:
    """Seconds per byte up and down, where `up` and `down` bytes move in the same time."""
    shared = min(up, down)
    per_up = (shared / both + (up - shared) / rate_up) / up if up else 1 / rate_up
    per_down = (shared / both + (down - shared) / rate_down) / down if down else 1 / rate_down
    return per_up, per_down


def _update_seconds(
    r: Rates, up: float, down: float, all_up: float, all_down: float, all_both: float
) -> float:
    """Seconds of the worker per parameter while the links move `up` and `down` bytes per parameter."""
    shared, more_up = min(up, down), max(0.0, up - down)
    more_down = max(0.0, down - up)
    beside_both = min(1.0, shared * r.update_both / all_both)
    beside_up = min(1.0 - beside_both, more_up * r.update_up / all_up)
    beside_down = min(1.0 - beside_both, more_down * r.update_down / all_down)
    alone = 1.0 - beside_both - beside_up - beside_down
    return (
        alone / r.update + beside_both / r.update_both + beside_up / r.update_up + beside_down / r.update_down
    )


def _demands(w: Workload, r: Rates, layout: "Layout") -> _Demands:
    n, size, layers = w.ranks, w.itemsize, w.layers
    delivery = layout.delivery if n > 1 else "replicated"
    reduction = layout.reduction if n > 1 else "gpu"
    modes = layout.activation_modes(layers)
    window = min(layout.window, layers)
    params = (w.embed_params, w.layer_params, w.head_params)
    in_forward = layout.schedule == "in_forward"
    there = layout.updated_on_gpu(layers)
    over_links = n > 1 and r.peers != "fabric"

    # Bytes that one rank's link moves for one layer: deliveries and landings, traffic between GPUs
    # where it goes the same way, and offloaded inputs.
    layer = w.layer_params * size
    share_up = 1 / n if delivery == "sharded" else 1.0
    share_down = 1 / n if reduction == "gpu" else 1.0
    peer = (n - 1) / n if over_links else 0.0
    gathered = peer if delivery == "sharded" else (1.0 if over_links and delivery == "broadcast" else 0.0)
    scattered = peer if reduction == "gpu" else (1.0 if over_links and reduction == "gpu_root" else 0.0)
    offloaded = modes.count("offload") / layers
    again = (layers - window) / layers
    moved_up = layer * share_up
    forward_up = moved_up + layer * gathered
    forward_down = offloaded * w.input_bytes + layer * gathered
    backward_up = again * forward_up + offloaded * w.input_bytes + layer * scattered
    backward_down = layer * (share_down + scattered + again * gathered)

    alone_up, alone_down = delivery == "broadcast", reduction == "gpu_root"
    rate_up = r.up if alone_up else r.up_all
    rate_down = r.down if alone_down else r.down_all
    rate_both = r.both if alone_up and alone_down else r.both_all
    if n == 1:
        rate_up, rate_down, rate_both = r.up, r.down, r.both
    busy = r.under_update
    at_rest = 1.0 if in_forward and reduction != "cpu" else busy
    up_first, down_first = _slowdown(
        forward_up, forward_down, rate_up * busy, rate_down * busy, rate_both * busy
    )
    up_again, down_last = _slowdown(
        backward_up, backward_down, rate_up * at_rest, rate_down * at_rest, rate_both * at_rest
    )

    gather = {"replicated": 0.0, "sharded": 1 / r.all_gather, "broadcast": 1 / r.broadcast}[delivery]
    scatter = {"cpu": 0.0, "gpu": 1 / r.reduce_scatter if n > 1 else 0.0, "gpu_root": 1 / r.reduce}[reduction]

    def deliver(count: int, per_byte: float) -> tuple[int, float, float]:
        chunks = max(1, ceil(count * size / layout.chunk_bytes))
        chunk = count * size / chunks
        collective = chunk * gather + r.collective_latency if delivery != "replicated" else 0.0
        return chunks, chunk * share_up * per_byte + r.copy_latency, collective

    def reduce(count: int) -> tuple[int, float, float]:
        chunks = max(1, ceil(count * size / layout.chunk_bytes))
        chunk = count * size / chunks
        collective = chunk * scatter + r.collective_latency if reduction != "cpu" and n > 1 else 0.0
        return chunks, collective, chunk * share_down * down_last + r.copy_latency

    reduces = [reduce(p) for p in params]

    # The worker: beside the forward's traffic, or beside all of it. Links of all ranks count.
    movers_up, movers_down = 1 if alone_up else n, 1 if alone_down else n
    kinds = [0] + [1] * layers + [2]
    moved = [kinds[unit] for unit in there]
    updated_there = sum(params[k] for k in moved)
    left = max(1, w.params - updated_there)
    whole = w.params / w.layer_params / left
    per_param_up = (forward_up + (0.0 if in_forward else backward_up)) * movers_up * whole
    per_param_down = (forward_down + (0.0 if in_forward else backward_down)) * movers_down * whole
    # State that the GPUs update streams both ways meanwhile, and the gradients of it do not land; what is
    # in its slot already is not delivered.
    in_slots = sum(params[kinds[unit]] for unit in there if unit <= window)
    per_param_up += (12 * updated_there - in_slots * size * share_up * movers_up) / left
    per_param_down += (14 - (0.0 if in_forward else size)) * updated_there / left
    per_param = _update_seconds(
        r,
        per_param_up,
        per_param_down,
        rate_up * movers_up * busy,
        rate_down * movers_down * busy,
        rate_both * max(movers_up, movers_down) * busy,
    )
    lanes = n if reduction == "cpu" else 1
    on_gpu: list[tuple[int, float, float, float]] = []
    for (number, _, _), held in zip(reduces, params, strict=True):
        share = held / n / number
        # 12 bytes up and 14 down; where it is measured as a whole, the way down is the longer one.
        out = share / r.gpu_update if r.gpu_update else share * 14 / rate_both
        out /= busy if updated_there < w.params else 1.0
        on_gpu.append((number, out * 12 / 14, share * 28 / r.device_copy, out))
    keep = [
        (c, g, 2 * p * size / n / c / r.device_copy) for (c, g, _), p in zip(reduces, params, strict=True)
    ]
    state = 26 if size == 2 else 24  # master and moments read and written, the working copy written
    if not in_forward:
        per_param *= (state + lanes * size) / (state + size)
    calls = [max(1, ceil(p * size / layout.chunk_bytes)) for p in params]
    update = [p * per_param + k * r.update_latency for p, k in zip(params, calls, strict=True)]
    lane_sum = [0.0] * 3
    if in_forward and lanes > 1:
        lane_sum = [p * size * (lanes + 1) / r.sum_lanes + r.update_latency for p in params]

    delivers = [deliver(p, up_first) for p in params]
    deliver_again = deliver(w.layer_params, up_again)
    by_mode = {mode: r.backward(mode, layout.partial_budget) for mode in set(modes)}
    backward = [by_mode[mode] for mode in modes]
    submit = [2 * p * size / r.device_copy for p in params]
    count = (1, layers, 1)
    streamed = layers - window
    stash, fetch = w.input_bytes * down_first, w.input_bytes * up_again
    n_offloaded = modes.count("offload")

    # Demand of each server in one step; the recurrence serves exactly these.
    link_up = sum(k * c * a for k, (c, a, _) in zip(count, delivers, strict=True))
    link_up += streamed * deliver_again[0] * deliver_again[1] + n_offloaded * fetch
    link_down = sum(k * c * b for k, (c, _, b) in zip(count, reduces, strict=True)) + n_offloaded * stash
    collective = sum(k * c * g for k, (c, _, g) in zip(count, delivers, strict=True))
    collective += streamed * deliver_again[0] * deliver_again[2]
    collective += sum(k * c * g for k, (c, g, _) in zip(count, reduces, strict=True))
    worker = sum(k * (u + s) for k, u, s in zip(count, update, lane_sum, strict=True))
    worker -= sum(update[k] for k in moved)
    link_up += sum(on_gpu[k][0] * on_gpu[k][1] for k in moved)
    # Those at the turn are in their slots already: their delivery is an all-gather.
    gathered_there = [
        p * size / c / r.all_gather + r.collective_latency if n > 1 else 0.0
        for p, (c, _, _) in zip(params, delivers, strict=True)
    ]
    for k in (kinds[unit] for unit in there if unit <= window):
        link_up -= delivers[k][0] * delivers[k][1]
        collective += delivers[k][0] * (gathered_there[k] - delivers[k][2])
    link_down += sum(on_gpu[k][0] * on_gpu[k][3] - reduces[k][0] * reduces[k][2] for k in moved)
    links_host = movers_up * (forward_up + backward_up) + movers_down * (forward_down + backward_down)
    memory = layers * links_host if r.peers != "links" else 0.0
    if r.peers == "links":
        memory = layers * layer * ((1 + again) * share_up * movers_up + share_down * movers_down)
        memory += 2 * n * n_offloaded * w.input_bytes
    edges = (w.embed_params + w.head_params) * size
    memory += edges * (share_up * movers_up + share_down * movers_down)
    memory += (w.params - updated_there) * (state + lanes * size) + updated_there * (26 - size)
    if in_forward and lanes > 1:
        memory += w.params * size * 2
    if r.synchronous:
        link_up = link_up + link_down + collective
        link_down = collective = 0.0
    total = {
        COMPUTE: (
            r.embed_forward + r.embed_backward + r.head + layers * r.forward + sum(backward)
            + sum(k * s for k, s in zip(count, submit, strict=True))
        ),
        "update": worker,
        "to_device": link_up,
        "to_host": link_down,
        "collective": collective,
        "host_memory": memory / r.host_memory,
    }  # fmt: skip
    return _Demands(
        deliver=delivers,
        deliver_again=deliver_again,
        gather_fresh=gathered_there,
        reduce=reduces,
        update=update,
        keep=keep,
        on_gpu=on_gpu,
        lane_sum=lane_sum,
        stash=stash,
        fetch=fetch,
        forward=r.forward,
        backward=backward,
        submit=submit,
        head=r.head,
        embed_forward=r.embed_forward,
        embed_backward=r.embed_backward,
        total=total,
    )


# --- the recurrence -----------------------------------------------------------------------------

# Operations of a step in the order in which they can be evaluated.
_FORWARD, _BACKWARD, _EMBED, _HEAD, _EMBED_BACKWARD = range(5)
_DELIVER, _DELIVER_AGAIN, _REDUCE, _STASH, _FETCH, _LOAD, _UPDATE = range(5, 12)


@lru_cache(maxsize=4096)
def _operations(
    layers: int,
    window: int,
    offloaded: frozenset[int],
    tied: bool,
    slots: int,
    on_gpu: frozenset[int],
    schedule: str,
    ring: int,
) -> tuple[tuple[int, int, int, int], ...]:
    """The step as (operation, unit, visit that must have ended or -1, visit or unit before in a ring).

    A transfer is listed once the visits that it waits for are; `visited` of an earlier step is meant
    where the visit has not come yet in this one.
    """
    modes = tuple("offload" if unit in offloaded else "recompute" for unit in range(1, layers + 1))
    visits = Visits(layers)
    order: list[tuple[int, int, int, int]] = []
    done = -1
    waiting_fetches: list[int] = []
    # The visit that frees each slot: of the last step's final occupant at first.
    edge = 0 if tied else 1  # one slot for embed and head, unless tied
    free: dict[tuple[str, int], int] = {("head", 0): visits.head, ("edge", 0): visits.head}
    for unit in range(1, layers + 1):
        slot = ("layer", unit % window)
        if slot not in free:  # the lowest unit of each slot is its last occupant in backward
            free[slot] = visits.backward(unit)

    def slot_of(unit: int) -> tuple[str, int]:
        if 0 < unit <= layers:
            return "layer", unit % window
        return ("edge", 0) if unit == 0 or edge else ("head", 0)

    def visit_until(visit: int) -> None:
        nonlocal done
        while done < visit:
            done += 1
            if done == 0:
                order.append((_EMBED, 0, 0, -1))
            elif done <= layers:
                order.append((_FORWARD, done, done, -1))
            elif done == visits.head:
                order.append((_HEAD, done, done, -1))
            elif done < visits.embed_backward:
                unit = visits.embed_backward - done
                earlier = unit + slots  # whose gradient was in the same buffer
                if earlier > layers:
                    earlier = (unit - 1) % slots + 1
                order.append((_BACKWARD, unit, done, earlier))
            else:
                order.append((_EMBED_BACKWARD, 0, done, -1))

    # Layers that land, the last one first: a ring's zone is free when the one RING before it is consumed.
    landing = [unit for unit in range(layers, 0, -1) if unit not in on_gpu]
    before = dict(zip(landing[ring:], landing, strict=False)) if ring else {}

    for transfer in transfers(layers, window, modes, tied, on_gpu, schedule):
        if isinstance(transfer, Load):
            order.append((_LOAD, -1, -1, -1))
            continue
        unit = transfer.unit
        if isinstance(transfer, Deliver):
            slot = slot_of(unit)
            freed = free[slot]
            if order and freed < transfer.visit:
                visit_until(freed)
            free[slot] = transfer.release
            again = transfer.visit > visits.head
            order.append((_DELIVER_AGAIN if again else _DELIVER, unit, freed, -1))
        elif isinstance(transfer, Reduce):
            last = visits.embed_backward if unit == 0 else visits.backward(unit)
            visit_until(visits.head if unit == visits.head else last)
            order.append((_REDUCE, unit, -1, before.get(unit, -1)))
        elif isinstance(transfer, Update):
            order.append((_UPDATE, unit, -1, -1))
        elif isinstance(transfer, Stash):
            visit_until(visits.forward(unit))
            order.append((_STASH, unit, -1, -1))
        elif isinstance(transfer, Fetch):
            freed = -1
            if len(waiting_fetches) >= FETCH_AHEAD:
                freed = visits.backward(waiting_fetches[-FETCH_AHEAD])
                visit_until(freed)
            waiting_fetches.append(unit)
            order.append((_FETCH, unit, freed, -1))
    visit_until(visits.embed_backward)
    return tuple(order)


class _Steady(NamedTuple):
    step: float
    drain: float
    exposed: dict[str, float]
    spans: list[Span]


def _recurrence(w: Workload, r: Rates, layout: "Layout", d: _Demands, record: bool = False) -> _Steady:
    layers = w.layers
    head_unit = layers + 1
    window = min(layout.window, layers)
    slots = min(layout.gradient_slots, layers)
    modes = layout.activation_modes(layers)
    offloaded = frozenset(i + 1 for i, mode in enumerate(modes) if mode == "offload")
    in_forward = layout.schedule == "in_forward"
    lanes = w.ranks if layout.reduction == "cpu" else 1
    waits_for_sum = in_forward and lanes > 1
    ring = waits_for_sum or (not in_forward and layout.landing == "ring")
    newest_first = not in_forward and not ring
    there = layout.updated_on_gpu(layers)
    operations = _operations(
        layers, window, offloaded, w.tied, slots, there, layout.schedule, RING if ring else 0
    )
    kind = [0] + [1] * layers + [2]
    deliver = [d.deliver[k] for k in kind]
    reduce = [d.keep[k] if unit in there else d.reduce[k] for unit, k in enumerate(kind)]
    update, lane_sum = [d.update[k] for k in kind], [d.lane_sum[k] for k in kind]
    submit, forward, message = d.submit[1], d.forward, r.message_latency
    synchronous, again = r.synchronous, d.deliver_again
    gather_stage = again[2] > 0

    units = layers + 2
    published = [0.0] * units
    consumed = [0.0] * units
    delivered, started, gated = [0.0] * units, [0.0] * units, [0.0] * units
    visited = [0.0] * (2 * layers + 3)
    gradient, reduced, landed_first = [0.0] * units, [0.0] * units, [0.0] * units
    stashed, fetched = [0.0] * units, [0.0] * units
    out_ring = [0.0] * OUTGOING
    out_next = 0
    fresh: dict[int, tuple[float, float]] = {}  # (first, last chunk updated) of slots that stay
    loads = _Loads(layout.update_slots)
    now = thread = up = down = between = worker = norm_known = last_end = 0.0
    step_seconds = drain = 0.0
    spans: list[tuple[str, int, str, float, float]] = []
    by_delivery = by_update = by_reduction = by_offload = 0.0

    def wait_for_delivery(unit: int, begun: float, end: float) -> None:
        """Splits a wait: no landing yet, no version yet, then the way to the GPU."""
        nonlocal by_delivery, by_update, by_reduction
        gate = min(end, max(begun, gated[unit]))
        known = min(gate, max(begun, norm_known))
        by_reduction += known - begun
        by_update += gate - known
        by_delivery += end - gate

    for step in range(MOST_STEPS):
        by_delivery = by_update = by_reduction = by_offload = 0.0
        begun = now
        if record:
            spans.clear()
        for operation, unit, visit, other in operations:
            if operation == _FORWARD:
                end = delivered[unit]
                if end > now:
                    wait_for_delivery(unit, now, end)
                    if record:
                        spans.append(("compute", unit, "wait delivery", now, end))
                    now = end
                if unit in offloaded and out_ring[out_next] > now:
                    by_offload += out_ring[out_next] - now
                    now = out_ring[out_next]
                if record:
                    spans.append(("compute", unit, "forward", now, now + forward))
                now += forward
                visited[visit] = now
            elif operation == _BACKWARD:
                if unit <= layers - window and delivered[unit] > now:
                    wait_for_delivery(unit, now, delivered[unit])
                    if record:
                        spans.append(("compute", unit, "wait delivery", now, delivered[unit]))
                    now = delivered[unit]
                if unit in offloaded and fetched[unit] > now:
                    by_offload += fetched[unit] - now
                    now = fetched[unit]
                end = now + d.backward[unit - 1]
                if record:
                    spans.append(("compute", unit, "backward", now, end))
                now = end
                visited[visit] = now
                if reduced[other] > now:
                    by_reduction += reduced[other] - now
                    if record:
                        spans.append(("compute", unit, "wait gradient buffer", now, reduced[other]))
                    now = reduced[other]
                now += submit
                gradient[unit] = now
            elif operation in (_DELIVER, _DELIVER_AGAIN):
                if operation == _DELIVER:
                    if unit in fresh:
                        # The slot holds this rank's share already: an all-gather makes it whole.
                        first, end = fresh[unit]
                        count = deliver[unit][0]
                        start = max(thread, first)
                        if w.ranks > 1:
                            gather = d.gather_fresh[kind[unit]]
                            if synchronous:
                                thread = end = start + count * gather
                            else:
                                start = max(start, between)
                                between = end = max(end + gather, start + count * gather)
                        gated[unit], started[unit], delivered[unit] = fresh[unit][1], start, end
                        if record:
                            spans.append(("deliver", unit, "gather", start, end))
                        continue
                    count, copy, gather = deliver[unit]
                else:
                    count, copy, gather = again
                # In backward too: what the forward took from a fresh slot may not be published yet.
                if published[unit] > thread:
                    thread = published[unit]
                gated[unit] = thread
                start = thread if thread > up else up
                if visited[visit] > start:
                    start = visited[visit]
                if synchronous:
                    end = thread = max(thread, visited[visit]) + count * (copy + gather)
                    start = end - count * (copy + gather)
                elif gather_stage:
                    up = start + count * copy
                    first = start + copy
                    end = max(up + gather, (between if between > first else first) + count * gather)
                    between = end
                else:
                    end = up = start + count * copy
                started[unit], delivered[unit] = start, end
                if record:
                    spans.append(("deliver", unit, "deliver", start, end))
            elif operation == _REDUCE:
                count, collective, copy = reduce[unit]
                if ring and other >= 0 and consumed[other] > thread:
                    thread = consumed[other]
                start = gradient[unit]
                if thread > start:
                    start = thread
                if synchronous:
                    end = thread = start + count * (collective + copy)
                    first = start + collective + copy
                elif collective:
                    if between > start:
                        start = between
                    between = start + count * collective
                    first = start + collective
                    first = (down if down > first else first) + copy
                    end = max(between + copy, first + (count - 1) * copy)
                    down = end
                else:
                    if down > start:
                        start = down
                    first = start + copy
                    end = down = start + count * copy
                reduced[unit], landed_first[unit] = end, first
                if record:
                    spans.append(("reduce", unit, "reduce", start, end))
                if newest_first or unit in there:
                    continue
                # The worker takes what lands in the order of landing; it may begin with the first chunk.
                if waits_for_sum or not in_forward:
                    work = lane_sum[unit] if waits_for_sum else update[unit]
                    begin = max(worker, first + message)
                    worker = max(begin + work, end + message)
                    consumed[unit] = worker + message
                    if not in_forward:
                        published[unit] = worker + message
                        if record:
                            spans.append(("update", unit, "update", begin, worker))
            elif operation == _LOAD:
                loads.begin(thread)
            elif operation == _UPDATE:
                if in_forward:
                    continue  # once the norm is known
                first, last, written = loads.update(d.on_gpu[kind[unit]], reduced[unit])
                published[unit] = written + 2 * message
                if unit <= window:
                    fresh[unit] = first, last
                if synchronous:
                    thread = max(thread, written)
                if record:
                    spans.append(("update", unit, "update", first, last))
            elif operation == _STASH:
                start = max(visited[unit], down, thread)
                down = stashed[unit] = start + d.stash
                if synchronous:
                    thread = down
                out_ring[out_next] = down
                out_next = (out_next + 1) % OUTGOING
                if record:
                    spans.append(("reduce", unit, "stash", start, down))
            elif operation == _FETCH:
                freed = visited[visit] if visit >= 0 else 0.0
                start = max(up, stashed[unit], freed, thread)
                up = fetched[unit] = start + d.fetch
                if synchronous:
                    thread = up
                if record:
                    spans.append(("deliver", unit, "fetch", start, up))
            elif operation == _EMBED:
                if delivered[0] > now:
                    wait_for_delivery(0, now, delivered[0])
                    if record:
                        spans.append(("compute", 0, "wait delivery", now, delivered[0]))
                    now = delivered[0]
                if record:
                    spans.append(("compute", 0, "forward", now, now + d.embed_forward))
                now += d.embed_forward
                visited[0] = now
            elif operation == _HEAD:
                if delivered[unit] > now:
                    wait_for_delivery(unit, now, delivered[unit])
                    if record:
                        spans.append(("compute", unit, "wait delivery", now, delivered[unit]))
                    now = delivered[unit]
                if record:
                    spans.append(("compute", unit, "head", now, now + d.head))
                now += d.head
                visited[visit] = now
                now += d.submit[2]
                gradient[unit] = now
            else:
                now += d.embed_backward
                if not w.tied and reduced[head_unit] > now:
                    by_reduction += reduced[head_unit] - now
                    if record:
                        spans.append(("compute", 0, "wait gradient buffer", now, reduced[head_unit]))
                    now = reduced[head_unit]
                now += d.submit[0]
                gradient[0] = now
                visited[visit] = now

        # What follows once gradients have landed.
        if in_forward:
            norm_known = worker = max(worker, max(reduced) + message)
            for unit in sorted(there):
                first, last, written = loads.update(d.on_gpu[kind[unit]], norm_known + message)
                published[unit] = written + 2 * message
                if unit <= window:
                    fresh[unit] = first, last
                if record:
                    spans.append(("update", unit, "update", first, last))
            if there:
                thread = max(thread, norm_known + message)
                if synchronous:
                    thread = max(thread, loads.out)
            for unit in range(units):
                if unit in there:
                    continue
                if record:
                    spans.append(("update", unit, "update", worker, worker + update[unit]))
                worker += update[unit]
                published[unit] = worker + message
        elif newest_first:
            worker = _newest_first(
                [unit for unit in range(units - 1, -1, -1) if unit not in there],
                worker, landed_first, reduced, update, message, published, spans if record else None,
            )  # fmt: skip
        drain = max(published) - now
        period = now - last_end
        last_end = now
        if step >= 2 and abs(period - step_seconds) <= STEADY * period:
            break
        step_seconds = period
    exposed = {"delivery": by_delivery, "update": by_update, "reduction": by_reduction, "offload": by_offload}
    named = [
        Span(track, w.unit_name(unit), phase, (start - begun) * 1e3, (end - begun) * 1e3)
        for track, unit, phase, start, end in spans
    ]
    return _Steady(period, drain, exposed, named)


class _Loads:
    """State on its way through the ring of GPU buffers, in the order in which units are updated."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._written: list[float] = []
        self._begun = self._up = self._busy = 0.0
        self.out = 0.0
        """When the last piece so far is on the host again."""

    def begin(self, time: float) -> None:
        """The step's first pieces start to come up, behind what the last step wrote."""
        self._begun = max(time, self.out)
        self._written.clear()

    def update(self, chunks: tuple[int, float, float, float], ready: float) -> tuple[float, float, float]:
        """One unit, whose gradients are there at `ready`: when its first and its last chunk are updated,
        and when all of it is written."""
        count, bring, work, write = chunks
        first = 0.0
        for i in range(count):
            place = len(self._written) - self._slots
            free = self._begun if place < 0 else self._written[place]
            self._up = max(self._up, free) + bring
            self._busy = max(self._busy, self._up, ready) + work
            self.out = max(self.out, self._busy) + write
            self._written.append(self.out)
            if i == 0:
                first = self._busy
        return first, self._busy, self.out


def _newest_first(
    landing: list[int],
    worker: float,
    landed_first: list[float],
    landed: list[float],
    update: list[float],
    message: float,
    published: list[float],
    spans: list[tuple[str, int, str, float, float]] | None,
) -> float:
    """The worker with room for all gradients: what landed last is needed first, and interrupts the rest.

    Fills `published`; returns when the worker is idle.
    """
    waiting: list[tuple[int, float]] = []  # (unit, seconds left), the most urgent one last
    arrivals = [(landed_first[unit] + message, unit) for unit in landing]
    for arrival, unit in [*arrivals, (float("inf"), -1)]:
        while waiting and worker < arrival:
            top, left = waiting.pop()
            begin = worker
            if worker + left > arrival:
                waiting.append((top, left - (arrival - worker)))
                worker = arrival
            else:
                worker = max(worker + left, landed[top] + message)
                published[top] = worker + message
            if spans is not None:
                spans.append(("update", top, "update", begin, worker))
        if worker < arrival and unit >= 0:
            worker = arrival
        waiting.append((unit, update[unit]))
    return worker
