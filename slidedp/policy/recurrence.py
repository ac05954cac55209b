"""Completion times: the step's operations one after another, step after step, until the period is steady.

    start = max(server free, inputs ready, buffer free, version published),  end = start + demand

Servers are compute, the two directions of the link, the collectives (`between`) and the worker. Inside a
unit, chunks flow through two servers one behind the other: n chunks of a and b seconds end after n·a + b,
or a + n·b, whichever is later.
"""

from typing import NamedTuple

from slidedp.host.landing import RING
from slidedp.layout import Layout
from slidedp.policy.demands import Demands
from slidedp.policy.operations import (
    BACKWARD,
    DELIVER,
    DELIVER_AGAIN,
    EMBED,
    FETCH,
    FORWARD,
    HEAD,
    LOAD,
    REDUCE,
    STASH,
    UPDATE,
    operations,
)
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.updates import Loads, newest_first
from slidedp.stream.program import head_in_visits
from slidedp.stream.stash import OUTGOING
from slidedp.stream.timeline import Span

STEADY = 1e-4
"""Relative change of the period below which it counts as steady."""
MOST_STEPS = 8


class Steady(NamedTuple):
    """The last of the steps, in seconds."""

    step: float
    """From the last step's end of compute to this one's."""
    drain: float
    """From its last backward to its last publication."""
    exposed: dict[str, float]
    """What compute waited, by cause; see Prediction.exposed."""
    spans: list[Span]
    """If they were asked for."""


def steady_step(w: Workload, r: Rates, layout: Layout, d: Demands, record: bool = False) -> Steady:
    """Evaluates steps until their period no longer changes. All state is in local variables: this is what
    bounds how many layouts a second the policy can look at."""
    layers, units = w.layers, w.layers + 2
    window, slots = min(layout.window, layers), min(layout.gradient_slots, layers)
    own = layout.own_slots(layers)
    away = frozenset(i + 1 for i, size in enumerate(w.away_bytes(layout)) if size)
    there, stays, frozen = w.updated_on_gpu(layout), w.resident_on_gpu(layout), frozenset(w.frozen)
    in_forward = layout.schedule == "in_forward"
    sums_lanes = in_forward and d.lane_sum[1] > 0
    ring = sums_lanes or (not in_forward and layout.landing == "ring")
    in_turn = sums_lanes or (not in_forward and ring)  # the worker takes what lands in the order of landing
    zones = RING if ring else 0
    program = operations(layers, window, away, w.tied, slots, there, layout.schedule, zones, frozen, w.lowest)
    kind = [w.kind(unit) for unit in range(units)]
    deliver = [d.deliver[k] for k in kind]
    reduce = [d.keep[k] if unit in there else d.reduce[k] for unit, k in enumerate(kind)]
    update, lane_sum = [d.update[k] for k in kind], [d.lane_sum[k] for k in kind]
    forward = max(d.forward, d.enqueue_forward)
    backward = [max(gpu, thread) for gpu, thread in zip(d.backward, d.enqueue_backward, strict=True)]
    message, synchronous = r.message_latency, r.synchronous
    gathers = d.deliver_again.collective > 0

    # When each thing was last the case, by unit; `visited` by number of the visit.
    published, consumed = [0.0] * units, [0.0] * units
    gated, delivered = [0.0] * units, [0.0] * units
    gradient, reduced, landed_first = [0.0] * units, [0.0] * units, [0.0] * units
    stashed, fetched = [0.0] * units, [0.0] * units
    visited = [0.0] * (2 * layers + 3)
    stash_buffers, stash_next = [0.0] * OUTGOING, 0
    fresh: dict[int, tuple[float, float]] = {}  # (first, last chunk updated) of slots that stay
    streamed = sorted(there - stays, reverse=not in_forward)
    chunks = [d.on_gpu[kind[unit]] for unit in streamed]
    matrix = w.embed_params if w.tied else w.head_params
    head_visits = head_in_visits(matrix, w.layer_params, layout.vocabulary_pieces)
    loads = Loads(
        layout.update_slots,
        [bring for number, bring, *_ in chunks for _ in range(number)],
        max(1, layers + 1 - w.first_backward) + head_visits,
    )
    # `down` orders what leaves one behind the other; `leaving` is the link's, which writes of state share.
    now = thread = up = down = leaving = between = worker = norm_known = 0.0
    waits: dict[str, float] = {}
    spans: list[tuple[str, int, str, float, float]] = []

    def wait_for_delivery(unit: int) -> None:
        """Splits a wait: no landing yet, no version yet, then the way to the GPU."""
        nonlocal now
        end = delivered[unit]
        gate = min(end, max(now, gated[unit]))
        known = min(gate, max(now, norm_known))
        waits["reduction"] += known - now
        waits["update"] += gate - known
        waits["delivery"] += end - gate
        if record:
            spans.append(("compute", unit, "wait delivery", now, end))
        now = end

    def wait_for_buffer(unit: int, end: float) -> None:
        """The gradient before has not left the buffer."""
        nonlocal now
        waits["reduction"] += end - now
        if record:
            spans.append(("compute", unit, "wait gradient buffer", now, end))
        now = end

    def wait_for_input(end: float) -> None:
        """What a layer offloads or spills is on its way to the host, or back."""
        nonlocal now
        waits["offload"] += end - now
        now = end

    def compute(unit: int, phase: str, seconds: float, visit: int) -> None:
        nonlocal now
        if record:
            spans.append(("compute", unit, phase, now, now + seconds))
        now += seconds
        visited[visit] = now

    def gather_fresh(unit: int) -> None:
        """The slot holds this rank's share already: an all-gather makes it whole."""
        nonlocal thread, between
        (first, last), count, gather = fresh[unit], deliver[unit].number, d.gather_fresh[kind[unit]]
        start = end = max(thread, first)
        if w.ranks == 1:
            end = last
        elif synchronous:
            thread = end = start + count * gather
        else:
            start = max(start, between)
            between = end = max(last + gather, start + count * gather)
        gated[unit], delivered[unit] = last, end
        if record:
            spans.append(("deliver", unit, "gather", start, end))

    def update_there(unit: int, ready: float) -> None:
        nonlocal up, leaving
        if unit in stays:
            first, last, leaving = loads.update_resident(d.resident[kind[unit]], ready, thread, leaving)
        else:
            first, last, up, leaving = loads.update(d.on_gpu[kind[unit]], ready, thread, up, leaving)
        published[unit] = loads.out + 2 * message
        if unit in own:
            fresh[unit] = first, last
        if record:
            spans.append(("update", unit, "update", first, last))

    def worker_takes(unit: int, first: float, last: float) -> None:
        """It may begin with the first chunk that has landed, and not end before the last one has."""
        nonlocal worker
        begin = max(worker, first + message)
        worker = max(begin + (lane_sum[unit] if sums_lanes else update[unit]), last + message)
        consumed[unit] = worker + message
        if not in_forward:
            published[unit] = worker + message
            if record:
                spans.append(("update", unit, "update", begin, worker))

    last_end = step_seconds = period = drain = begun = 0.0
    for step in range(MOST_STEPS):
        waits = dict.fromkeys(("delivery", "update", "reduction", "offload"), 0.0)
        begun = now
        spans.clear()
        for what, unit, visit, before in program:
            if what == FORWARD:
                if delivered[unit] > now:
                    wait_for_delivery(unit)
                if unit in away and stash_buffers[stash_next] > now:
                    wait_for_input(stash_buffers[stash_next])
                compute(unit, "forward", forward, visit)
            elif what == BACKWARD:
                if unit <= layers - window and delivered[unit] > now:
                    wait_for_delivery(unit)
                if unit in away and fetched[unit] > now:
                    wait_for_input(fetched[unit])
                compute(unit, "backward", backward[unit - 1], visit)
                if unit in frozen:
                    continue
                if reduced[before] > now:
                    wait_for_buffer(unit, reduced[before])
                now += d.submit[1]
                gradient[unit] = now
            elif what == EMBED:
                if delivered[0] > now:
                    wait_for_delivery(0)
                compute(0, "forward", d.embed_forward, visit)
            elif what == HEAD:
                if delivered[unit] > now:
                    wait_for_delivery(unit)
                compute(unit, "head", d.head, visit)
                now += 0.0 if unit in frozen else d.submit[2]
                gradient[unit] = now
            elif what in (DELIVER, DELIVER_AGAIN):
                if what == DELIVER and unit in fresh:
                    gather_fresh(unit)
                    continue
                count, copy, gather = deliver[unit] if what == DELIVER else d.deliver_again
                # In backward too: what the forward took from a fresh slot may not be published yet.
                if published[unit] > thread:
                    thread = published[unit]
                gated[unit] = thread
                if synchronous:
                    start = max(thread, visited[visit])
                    end = thread = start + count * (copy + gather)
                else:
                    start = max(thread, up, visited[visit])
                    up = end = start + count * copy
                    if gathers:
                        between = end = max(up + gather, max(between, start + copy) + count * gather)
                delivered[unit] = end
                if record:
                    spans.append(("deliver", unit, "deliver", start, end))
                if what == DELIVER_AGAIN:
                    up = loads.share(1, thread, up)
            elif what == REDUCE:
                count, copy, scatter = reduce[unit]
                if before >= 0 and consumed[before] > thread:
                    thread = consumed[before]  # its zone of the ring is another layer's still
                start = max(thread, gradient[unit])
                lands = unit not in there
                free = max(down, leaving) if lands else down
                if synchronous:
                    end = thread = start + count * (scatter + copy)
                    first = start + scatter + copy
                elif scatter:
                    start = max(start, between)
                    between = start + count * scatter
                    first = max(free, start + scatter) + copy
                    down = end = max(between + copy, first + (count - 1) * copy)
                else:
                    start = max(start, free)
                    first = start + copy
                    down = end = start + count * copy
                if lands:
                    leaving = max(leaving, thread) + count * copy
                reduced[unit], landed_first[unit] = end, first
                if record:
                    spans.append(("reduce", unit, "reduce", start, end))
                if in_turn and unit not in there:
                    worker_takes(unit, first, end)
            elif what == LOAD:
                up = loads.begin(window + 1 + head_visits, thread, up)
            elif what == UPDATE:
                if not in_forward:  # else once the norm is known
                    update_there(unit, reduced[unit])
                    if synchronous:
                        thread = max(thread, loads.out)
            elif what == STASH:
                start = max(visited[unit], down, leaving, thread)
                leaving = max(leaving, thread) + d.stash[unit - 1]
                down = stashed[unit] = stash_buffers[stash_next] = start + d.stash[unit - 1]
                stash_next = (stash_next + 1) % OUTGOING
                if synchronous:
                    thread = down
                if record:
                    spans.append(("reduce", unit, "stash", start, down))
            elif what == FETCH:
                start = max(up, stashed[unit], visited[visit] if visit >= 0 else 0.0, thread)
                up = fetched[unit] = start + d.fetch[unit - 1]
                if synchronous:
                    thread = up
                if record:
                    spans.append(("deliver", unit, "fetch", start, up))
            else:  # EMBED_BACKWARD
                now += d.embed_backward
                if not w.tied and reduced[units - 1] > now:  # one buffer for both
                    wait_for_buffer(0, reduced[units - 1])
                now += d.submit[0]
                gradient[0] = visited[visit] = now

        # What follows once all gradients have landed.
        here = [unit for unit in range(units) if unit not in there and unit not in frozen]
        if in_forward:
            norm_known = worker = max(worker, max(reduced) + message)
            for unit in sorted(there):
                update_there(unit, norm_known + message)
            if there:
                thread = max(thread, loads.out if synchronous else norm_known + message)
            for unit in here:
                begin, worker = worker, worker + update[unit]
                published[unit] = worker + message
                if record:
                    spans.append(("update", unit, "update", begin, worker))
        elif not ring:
            served = newest_first(here[::-1], worker, landed_first, reduced, update, message, published)
            worker = served[-1][2] if served else worker
            if record:
                spans += [("update", unit, "update", begin, end) for unit, begin, end in served]
        drain = max(published) - now
        period, last_end = now - last_end, now
        if step >= 2 and abs(period - step_seconds) <= STEADY * period:
            break
        step_seconds = period
    named = [
        Span(track, w.unit_name(unit), phase, (start - begun) * 1e3, (end - begun) * 1e3)
        for track, unit, phase, start, end in spans
    ]
    return Steady(period, drain, waits, named)
