"""The step-time model: against an independent simulator, its own bounds, and statements of the paper."""

import dataclasses
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.config import DELIVERIES, REDUCTIONS, Layout
from slidedp.policy.explain import explain, regime_change
from slidedp.policy.machines import BRIDGED, H200, MACHINES, NVSWITCH, UNBRIDGED, WORKSTATION
from slidedp.policy.rates import GROUPS, Rates, Workload
from slidedp.policy.step_time import predict
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
        head_flops=6.0 * tokens * vocabulary * hidden,
    )


layouts = st.builds(
    lambda pattern, **fields: Layout(
        activations=tuple(pattern[i % len(pattern)] for i in range(LAYERS)), **fields
    ),
    pattern=st.lists(st.sampled_from(("keep", "recompute", "offload", "partial")), min_size=1, max_size=5),
    delivery=st.sampled_from(DELIVERIES),
    reduction=st.sampled_from(REDUCTIONS),
    chunk_bytes=st.sampled_from([2**20 * m for m in (4, 16, 64, 512)]),
    window=st.integers(1, 5),
    gradient_slots=st.integers(1, 3),
    schedule=st.sampled_from(("in_forward", "in_backward")),
    landing=st.sampled_from(("full", "ring")),
)
LAYERS = 7
machines = st.sampled_from(MACHINES)
# Fixed examples in CI, fresh ones elsewhere.
examples = settings(max_examples=150, deadline=None, derandomize="CI" in os.environ)


@examples
@given(layout=layouts, tied=st.booleans(), log=st.tuples(*[st.floats(-1.5, 1.5)] * 5))
def test_agrees_with_a_simulator_that_moves_every_chunk(layout, tied, log):
    """With rates that do not depend on each other, over four orders of magnitude of balance."""
    compute, link, collective, update, batch = (10.0**x for x in log)
    layout = dataclasses.replace(
        layout,
        delivery="replicated" if layout.delivery == "broadcast" else layout.delivery,
        reduction="cpu" if layout.reduction == "gpu_root" else layout.reduction,
    )
    workload = dataclasses.replace(qwen3_8b(2, max(1, round(4 * batch)), LAYERS), tied=tied)
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
    expected = simulate(workload, rates, layout)
    assert predict(workload, rates, layout).step_seconds == pytest.approx(expected, rel=0.04)


@examples
@given(layout=layouts, machine=machines, ranks=st.integers(1, 8), batch=st.integers(1, 64))
def test_never_under_the_capacity_bound(layout, machine, ranks, batch):
    workload = qwen3_8b(ranks, batch, LAYERS)
    p = predict(workload, machine.rates(workload), layout)
    assert p.step_seconds >= p.bound_seconds == max(p.demand.values())
    assert p.step_seconds >= p.compute_seconds + sum(p.exposed.values()) * 0.999 or p.binding == "host_memory"


@examples
@given(
    layout=layouts,
    machine=machines,
    ranks=st.integers(1, 8),
    batch=st.integers(1, 64),
    group=st.sampled_from(sorted(GROUPS)),
    factor=st.floats(1.01, 20.0),
)
def test_more_speed_is_never_predicted_slower(layout, machine, ranks, batch, group, factor):
    workload = qwen3_8b(ranks, batch, LAYERS)
    rates = machine.rates(workload)
    before = predict(workload, rates, layout).step_seconds
    after = predict(workload, rates.faster(group, factor), layout).step_seconds
    assert after <= before * (1 + 1e-3)
