"""The capacity bound: busy seconds of each resource in a step, whatever the schedule."""

from slidedp.layout import Layout
from slidedp.policy.demands import Demands, lanes, resident_there, state_bytes, updated_there
from slidedp.policy.rates import Rates, Workload
from slidedp.policy.traffic import traffic

COMPUTE = "compute"
RESOURCES = (COMPUTE, "threads", "update", "to_device", "to_host", "collective", "host_memory")


def busy_seconds(w: Workload, r: Rates, layout: Layout, d: Demands) -> dict[str, float]:
    """By resource. The recurrence serves exactly these, besides the host's memory."""
    window = min(layout.window, w.layers)
    there, stays = w.updated_on_gpu(layout), w.resident_on_gpu(layout)
    own, count = layout.own_slots(w.layers), (1, w.layers, 1)  # units of each kind
    streamed = max(0, w.layers - window + 1 - w.first_backward)

    compute = d.embed_forward + d.embed_backward + d.head + w.layers * d.forward + sum(d.backward)
    worker = up = down = collective = 0.0
    for k, number in enumerate(count):
        trained = w.trained(k)
        compute += trained * d.submit[k]
        worker += trained * (d.update[k] + d.lane_sum[k])
        up += number * d.deliver[k].number * d.deliver[k].link
        down += trained * d.reduce[k].number * d.reduce[k].link
        collective += number * d.deliver[k].number * d.deliver[k].collective
        collective += trained * d.reduce[k].number * d.reduce[k].collective
    up += streamed * d.deliver_again.number * d.deliver_again.link
    up += sum(d.fetch)
    down += sum(d.stash)
    collective += streamed * d.deliver_again.number * d.deliver_again.collective

    for unit in there:
        k = w.kind(unit)
        worker -= d.update[k]
        number, bring, _, write = d.resident[k] if unit in stays else d.on_gpu[k]
        up += number * bring
        down += number * write - d.reduce[k].number * d.reduce[k].link
        if unit in own:  # in its slot already: its delivery is an all-gather
            up -= d.deliver[k].number * d.deliver[k].link
            collective += d.deliver[k].number * (d.gather_fresh[k] - d.deliver[k].collective)

    if r.synchronous:  # one thread does it all
        up, down, collective = up + down + collective, 0.0, 0.0
    return {
        COMPUTE: compute,
        "threads": w.layers * d.enqueue_forward + sum(d.enqueue_backward),
        "update": worker,
        "to_device": up,
        "to_host": down,
        "collective": collective,
        "host_memory": _host_bytes(w, r, layout) / r.host_memory,
    }


def _host_bytes(w: Workload, r: Rates, layout: Layout) -> float:
    """Bytes read from and written to the host's memory in a step."""
    t = traffic(w, "fabric" if r.peers == "links" else r.peers, layout)
    moved = w.layers * t.movers_up * (t.forward_up + t.backward_up)
    moved += w.layers * t.movers_down * (t.forward_down + t.backward_down)
    # Every rank offloads and spills, those too that copy no parameters.
    moved += sum(w.away_bytes(layout)) * (2 * w.ranks - t.movers_up - t.movers_down)
    embed, _, head = w.delivered_params(layout)
    moved += (embed + head) * w.itemsize * t.share_up * t.movers_up
    ends = w.trained(0) * w.embed_params + w.trained(2) * w.head_params
    moved += ends * w.gradient_itemsize * t.share_down * t.movers_down
    there, number = updated_there(w, layout), lanes(w, layout)
    moved += (w.trained_params - there) * (state_bytes(w) + number * w.gradient_itemsize)
    moved -= there * w.gradient_itemsize
    stays = resident_there(w, layout)
    moved += 26 * (there - stays) + w.itemsize * stays
    if layout.schedule == "in_forward" and number > 1:
        moved += w.trained_params * w.gradient_itemsize * 2  # the sum of the lanes, written and read
    return moved
