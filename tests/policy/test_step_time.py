"""The step-time model: against an independent simulator, its own bounds, and statements of the paper."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.layout import ACTIVATIONS, DELIVERIES, REDUCTIONS, Layout
from slidedp.policy.capacity import busy_seconds
from slidedp.policy.demands import demands
from slidedp.policy.explain import explain
from slidedp.policy.flips import regime_change
from slidedp.policy.machines import BRIDGED, H200, MACHINES, NVSWITCH, UNBRIDGED, WORKSTATION
from slidedp.policy.rates import GROUPS, Rates, Workload
from slidedp.policy.recurrence import steady_step
from slidedp.policy.step_time import Prediction, predict
from tests.policy.simulator import simulate


def qwen3_8b(ranks: int, batch: int, layers: int = 36) -> Workload:
    """Sizes of Qwen3-8B with `batch` sequences of 1,024 tokens per rank."""
    hidden, vocabulary, tokens, layer = 4096, 151936, batch * 1024, 192_946_432
    return Workload(
        layers=layers,
        layer_params=layer,
        embed_params=vocabulary * hidden,
        head_params=vocabulary * hidden + hidden,
        tied=False,
        ranks=ranks,
        tokens=tokens,
        itemsize=2,
        input_bytes=tokens * hidden * 2,
        kept_bytes=tokens * 126 * 1024,
        layer_flops=tokens * (2.0 * layer + 2.0 * hidden * 1024),
        mlp_flops=tokens * 6.0 * hidden * 12288,
        head_flops=6.0 * tokens * vocabulary * hidden,
    )


layouts = st.builds(
    lambda pattern, reduction, gpu_updates, resident, **fields: Layout(
        activations=tuple(pattern[i % len(pattern)] for i in range(LAYERS)),
        reduction=reduction,
        gpu_updates=gpu_updates if reduction == "gpu" else 0,
        resident_updates=min(resident, gpu_updates) if reduction == "gpu" else 0,
        **fields,
    ),
    pattern=st.lists(st.sampled_from(ACTIVATIONS), min_size=1, max_size=5),
    delivery=st.sampled_from(DELIVERIES),
    reduction=st.sampled_from(REDUCTIONS),
    chunk_bytes=st.sampled_from([2**20 * m for m in (16, 64)]),
    window=st.integers(1, 5),
    gradient_slots=st.integers(1, 3),
    schedule=st.sampled_from(("in_forward", "in_backward")),
    landing=st.sampled_from(("full", "ring")),
    gpu_updates=st.integers(0, 9),
    resident=st.integers(0, 9),
    update_slots=st.integers(2, 8),
)
long = st.builds(
    lambda layout, pieces, tile: dataclasses.replace(layout, vocabulary_pieces=pieces, mlp_tile_tokens=tile),
    layouts,
    st.sampled_from((1, 4)),
    st.sampled_from((0, 4096)),
)
"""Layouts that the simulator does not know."""
LAYERS = 7
frozen = st.sampled_from(
    [
        (),
        (),
        (0,),
        (3,),
        (0, 1, 2, 3, 4),
        (0, 1, 2, 5, LAYERS + 1),
        tuple(range(LAYERS)),
        tuple(range(LAYERS + 1)),
    ]
)
"""Units that are not trained: often none."""
machines = st.sampled_from(MACHINES)
examples = settings(max_examples=150, deadline=None, derandomize=True)


@examples
@given(
    layout=layouts,
    frozen=frozen,
    tied=st.booleans(),
    wide=st.booleans(),
    compiled=st.booleans(),
    log=st.tuples(*[st.floats(-1.5, 1.5)] * 5),
)
def test_agrees_with_a_simulator_that_moves_every_chunk(layout, frozen, tied, wide, compiled, log):
    """With rates that do not depend on each other, over three orders of magnitude of balance."""
    compute, link, collective, update, batch = (10.0**x for x in log)
    layout = dataclasses.replace(
        layout,
        delivery="replicated" if layout.delivery == "broadcast" else layout.delivery,
        reduction="cpu" if layout.reduction == "gpu_root" else layout.reduction,
    )
    workload = dataclasses.replace(qwen3_8b(2, max(1, round(4 * batch)), LAYERS), tied=tied)
    workload = dataclasses.replace(workload, wide_gradients=wide, compiled=compiled, frozen=frozen)
    if tied:
        workload = dataclasses.replace(workload, head_params=4096)
    rates = dataclasses.replace(
        H200.rates(workload).faster("compute", compute).faster("collectives", collective),
        **{name: 50e9 * link for name in GROUPS["links"]},
        **{name: 5e9 * update for name in GROUPS["update"] if name != "sum_lanes"},
        sum_lanes=50e9 * update,
        under_update=1.0,
        host_memory=1e15,
    )
    p = predict(workload, rates, layout)
    expected = simulate(workload, rates, layout).step
    # One in some hundred random layouts is 6.2% off: GPU updates through a ring of two buffers.
    assert p.step_seconds == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    "what, batch, links, update, fields",
    [
        ("landing is slow", 4, 6e9, 40e9, {"reduction": "cpu", "gradient_slots": 1}),
        (
            "a gradient waits until the one before has left its buffer",
            16,
            12e9,
            40e9,
            {"schedule": "in_backward", "activations": "keep", "gradient_slots": 1},
        ),
        (
            "the worker is slow, and a gradient lands once it has consumed the one before in its zone",
            4,
            50e9,
            1e9,
            {"schedule": "in_backward", "landing": "ring", "gradient_slots": 1},
        ),
        (
            "the worker is slow, and takes first what the next forward needs first",
            4,
            50e9,
            1e9,
            {"schedule": "in_backward"},
        ),
        ("a gate holds back what follows it", 84, 43e9, 7e9, {"activations": "offload", "window": 7}),
        ("inputs leave slowly", 16, 8e9, 40e9, {"activations": "offload", "schedule": "in_backward"}),
    ],
)
def test_agrees_closely_where_one_part_is_slow(what, batch, links, update, fields):
    workload = qwen3_8b(2, batch, LAYERS)
    rates = dataclasses.replace(
        H200.rates(workload).faster("compute", 1.0 if batch == 16 else 4.0),
        **dict.fromkeys(GROUPS["links"], links),
        **dict.fromkeys(GROUPS["update"], update),
        under_update=1.0,
        host_memory=1e15,
    )
    layout = Layout(**{"chunk_bytes": 16 * 2**20} | fields)
    p, simulated = predict(workload, rates, layout), simulate(workload, rates, layout)
    near = 0.01 * simulated.step
    assert p.step_seconds == pytest.approx(simulated.step, abs=near), what
    assert p.drain_seconds == pytest.approx(simulated.drain, abs=near), what


@examples
@given(
    layout=layouts | long, machine=machines, ranks=st.integers(1, 8), batch=st.integers(1, 64), frozen=frozen
)
def test_never_under_the_capacity_bound(layout, machine, ranks, batch, frozen):
    workload = dataclasses.replace(qwen3_8b(ranks, batch, LAYERS), frozen=frozen)
    p = predict(workload, machine.rates(workload), layout)
    assert p.step_seconds >= p.bound_seconds == max(p.demand.values())
    assert p.step_seconds >= 0.999 * (p.compute_seconds + sum(p.exposed.values()))


@examples
@given(
    layout=layouts | long, machine=machines, ranks=st.integers(1, 8), batch=st.integers(1, 64), frozen=frozen
)
def test_the_schedule_alone_gives_no_server_more_work_than_time(layout, machine, ranks, batch, frozen):
    """Capacity and completion times are computed apart. Without updates on the GPUs, whose state has a
    stream of its own on the link."""
    layout, workload = (
        dataclasses.replace(layout, gpu_updates=0, resident_updates=0),
        dataclasses.replace(qwen3_8b(ranks, batch, LAYERS), frozen=frozen),
    )
    rates = machine.rates(workload)
    tasks = demands(workload, rates, layout)
    busy = busy_seconds(workload, rates, layout, tasks)
    longest = max(seconds for server, seconds in busy.items() if server != "host_memory")
    assert steady_step(workload, rates, layout, tasks).step >= 0.999 * longest


@examples
@given(
    layout=layouts | long,
    machine=machines,
    ranks=st.integers(1, 8),
    batch=st.integers(1, 64),
    group=st.sampled_from(sorted(GROUPS)),
    factor=st.floats(1.01, 20.0),
    frozen=frozen,
)
def test_more_speed_is_never_predicted_slower(layout, machine, ranks, batch, group, factor, frozen):
    workload = dataclasses.replace(qwen3_8b(ranks, batch, LAYERS), frozen=frozen)
    rates = machine.rates(workload)
    before = predict(workload, rates, layout).step_seconds
    after = predict(workload, rates.faster(group, factor), layout).step_seconds
    assert after <= before * (1 + 1e-3)


# --- what the paper says of its machines --------------------------------------------------------


def best(machine, workload, names=DELIVERIES, **fields) -> tuple[str, Prediction]:
    """The delivery with the shortest predicted step, and its prediction."""
    rates = machine.rates(workload)
    found = {d: predict(workload, rates, Layout(delivery=d, **fields)) for d in names}
    name = min(found, key=lambda d: found[d].step_seconds)
    return name, found[name]


@pytest.mark.parametrize("schedule", ["in_forward", "in_backward"])
def test_removing_the_bridge_reverses_the_delivery_of_host_bound_work_only(schedule):
    pair = ("replicated", "sharded")
    small, large = qwen3_8b(2, 1), qwen3_8b(2, 64)

    def spread(machine, workload):
        steps = [best(machine, workload, (d,), schedule=schedule)[1].step_seconds for d in pair]
        return max(steps) / min(steps) - 1

    with_bridge, without = (best(m, small, pair, schedule=schedule) for m in (BRIDGED, UNBRIDGED))
    assert with_bridge[1].host_bound and without[1].host_bound
    assert (with_bridge[0], without[0]) == ("sharded", "replicated")
    assert min(spread(BRIDGED, small), spread(UNBRIDGED, small)) > 0.05
    assert not best(UNBRIDGED, large, schedule=schedule)[1].host_bound
    assert max(spread(BRIDGED, large), spread(UNBRIDGED, large)) < 0.02


def test_a_workstation_without_peer_links_replicates_and_a_switched_server_shards():
    assert best(WORKSTATION, qwen3_8b(4, 4))[0] == "replicated"
    assert best(NVSWITCH, qwen3_8b(4, 4))[0] == "sharded"


def test_fewer_bytes_do_not_shorten_a_step_that_is_bound_elsewhere():
    """Sharding quarters what the links deliver; where compute binds, nothing comes of it."""
    for batch, gains in ((1, True), (64, False)):
        workload = qwen3_8b(4, batch)
        rates = NVSWITCH.rates(workload)
        more, fewer = (predict(workload, rates, Layout(delivery=d)) for d in ("replicated", "sharded"))
        assert fewer.demand["to_device"] < 0.3 * more.demand["to_device"]
        assert (fewer.step_seconds < 0.95 * more.step_seconds) == gains
        assert fewer.step_seconds > 0.995 * more.step_seconds or gains


def test_strong_scaling_exposes_host_work():
    """The same global batch on more ranks: compute shrinks with the ranks, the host's work does not."""
    shares = []
    for ranks in (1, 2, 4, 8):
        workload = qwen3_8b(ranks, 64 // ranks)
        p = predict(workload, NVSWITCH.rates(workload), Layout())
        shares.append(sum(p.exposed.values()) / p.step_seconds)
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] > 0.5


def test_weak_scaling_on_a_switched_server_stays_above_nine_tenths():
    steps = []
    for ranks in (2, 8):
        workload = qwen3_8b(ranks, 64)
        steps.append(predict(workload, NVSWITCH.rates(workload), Layout()).step_seconds)
    assert steps[0] / steps[1] > 0.9


def test_threads_that_enqueue_bind_small_layers_in_small_chunks():
    """Four sequences, all state on the GPUs: a chunk takes a thread as long, whatever its size."""
    workload = qwen3_8b(2, 4)
    idle = H200.rates(workload)
    rates = dataclasses.replace(idle, enqueue_forward=5e-4, enqueue_backward=1e-3, enqueue_operation=7e-5)
    layout = Layout(
        schedule="in_backward",
        transport="copy",
        activations="keep",
        gpu_updates=38,
        resident_updates=38,
        window=36,
    )
    small, large = (
        predict(workload, rates, dataclasses.replace(layout, chunk_bytes=mib * 2**20)) for mib in (16, 512)
    )
    assert small.binding == "threads" and small.host_bound
    assert small.demand["threads"] > 10 * large.demand["threads"]
    assert large.binding == "compute"
    # Nothing else has changed: where threads are quick, the chunk hardly matters.
    assert large.step_seconds == pytest.approx(predict(workload, idle, layout).step_seconds, rel=0.02)
    assert small.step_seconds >= small.demand["threads"] > 1.5 * large.step_seconds
    assert "the threads that enqueue work decide it" in explain(
        workload, rates, dataclasses.replace(layout, chunk_bytes=16 * 2**20)
    )


def test_threads_beside_a_busy_worker_take_longer():
    """... for the part of the step in which it updates; with all updates on the GPUs not at all."""
    workload = qwen3_8b(2, 4)
    rates = dataclasses.replace(H200.rates(workload), enqueue_forward=4e-3, enqueue_backward=9e-3)
    slowed = dataclasses.replace(rates, enqueue_under_update=1.5)
    base = Layout(schedule="in_backward", activations="keep", gpu_updates=38, resident_updates=38)

    def ratio(count: int) -> float:
        layout = dataclasses.replace(base, gpu_updates=count, resident_updates=count)
        pair = [predict(workload, r, layout) for r in (rates, slowed)]
        assert count < 37 or pair[0].binding == "threads"  # though some deliveries are waited for
        return pair[1].demand["threads"] / pair[0].demand["threads"]

    assert ratio(38) == 1
    assert 1 < ratio(37) < ratio(36) <= 1.5 + 1e-9


# --- what else it returns -----------------------------------------------------------------------


def test_timeline_is_one_steady_step_in_the_engines_own_terms():
    workload = qwen3_8b(2, 16)
    rates = H200.rates(workload)
    p = predict(workload, rates, Layout(schedule="in_backward"), timeline=True)
    compute = [s for s in p.timeline if s.track == "compute"]
    assert [s.phase for s in compute if s.unit == "head" and s.phase != "wait delivery"] == ["head"]
    assert sum(s.phase == "backward" for s in compute) == workload.layers
    assert all(a.end <= b.start + 1e-6 for a, b in itertools.pairwise(compute))
    assert compute[0].start >= 0 and compute[-1].end <= p.step_seconds * 1e3 + 1e-6
    waits = sum(s.end - s.start for s in compute if s.phase.startswith("wait")) / 1e3
    assert waits == pytest.approx(sum(p.exposed.values()), rel=1e-6)
    updates = sum(s.end - s.start for s in p.timeline if s.track == "update") / 1e3
    assert updates == pytest.approx(p.demand["update"], rel=0.02)
    assert predict(workload, rates, Layout(schedule="in_backward")).timeline == ()


def test_explanation_names_what_binds_and_the_batch_at_which_that_changes():
    workload = qwen3_8b(2, 8)
    rates = H200.rates(workload)
    factor = regime_change(workload, rates, Layout())
    assert factor is not None and factor > 1
    for times, bound in ((factor * 0.95, True), (factor * 1.05, False)):
        assert predict(workload.scaled(times), rates.scaled(times), Layout()).host_bound == bound
    text = explain(workload, rates, Layout())
    assert "the optimizer worker decides it" in text and f"{round(8192 * factor):,} tokens" in text
    assert "turns host-bound" in explain(workload.scaled(8), rates.scaled(8), Layout())


def test_rates_survive_json():
    rates = dataclasses.replace(WORKSTATION.rates(qwen3_8b(4, 4)), all_gather=float("inf"))
    assert Rates.from_dict(rates.to_dict()) == rates


def test_what_is_frozen_is_not_updated_and_what_lies_below_has_no_backward():
    """Embedding and half of the layers, and the same half with the embedding trained."""
    w, layout = qwen3_8b(2, 16), Layout(schedule="in_backward", activations="offload")
    rates, lower = H200.rates(w), tuple(range(1, 19))
    whole, above, below = (
        predict(dataclasses.replace(w, frozen=frozen), rates, layout) for frozen in ((), lower, (0, *lower))
    )
    assert above.compute_seconds == pytest.approx(whole.compute_seconds, rel=0.01)
    less = 18 * rates.backward_recompute
    assert below.compute_seconds == pytest.approx(whole.compute_seconds - less, rel=0.01)
    for p, params in ((above, 18 * w.layer_params), (below, 18 * w.layer_params + w.embed_params)):
        assert p.demand["to_host"] < 0.8 * whole.demand["to_host"]
        share = whole.demand["update"] * (w.params - params) / w.params
        assert share < p.demand["update"] < 1.12 * share  # beside links that are as busy as before
    half = dataclasses.replace(w, frozen=(0, *lower))
    after = {"backward", "reduce", "update", "stash", "fetch"}
    names = {s.unit for s in predict(half, rates, layout, timeline=True).timeline if s.phase in after}
    assert names == {w.unit_name(unit) for unit in range(19, 38)}


def test_tiles_run_the_mlp_once_more_where_the_layer_does_not_run_again():
    w = qwen3_8b(1, 16)
    r = H200.rates(w)

    def compute(mode: str, tile: int) -> float:
        return predict(w, r, Layout(activations=mode, mlp_tile_tokens=tile)).compute_seconds

    mlp = w.layers * r.forward * w.mlp_flops / w.layer_flops
    for mode in ACTIVATIONS:
        more = 0.0 if mode in ("recompute", "offload") else mlp
        assert compute(mode, 4096) - compute(mode, 0) == pytest.approx(more, abs=1e-9)


@pytest.mark.parametrize(("tied", "times"), [(False, 2 - 1 / 4), (True, 4 - 1 / 4)])
def test_a_vocabulary_in_pieces_comes_again(tied, times):
    """docs/memory.md: untied 2k - 1 deliveries of 1/k instead of one, tied 4k - 1 instead of k."""
    w = qwen3_8b(1, 16)
    if tied:
        w = dataclasses.replace(w, tied=True, head_params=4096)
    r = dataclasses.replace(H200.rates(w), copy_latency=0.0)
    whole, pieces = (predict(w, r, Layout(vocabulary_pieces=k)).demand for k in (1, 4))
    matrix = w.embed_params * w.itemsize / r.up / r.under_update
    assert pieces["to_device"] - whole["to_device"] == pytest.approx((times - 1) * matrix, rel=1e-3)
    logits = (10 if tied else 8) / 6 - 1
    assert pieces["compute"] - whole["compute"] == pytest.approx(logits * r.head)
