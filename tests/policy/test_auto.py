"""AutoPolicy: budgets, the best mix of activation modes, records, overrides."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from slidedp import Config, ConfigError, Data, Layout, Optimizer
from slidedp.bench.shapes import shape
from slidedp.policy.auto import CLOSE, FIELDS, MEASURE, SHORT_LIST, STAGES, AutoPolicy
from slidedp.policy.candidates import GPU_SHARE, Trial, fits
from slidedp.policy.flips import TIE
from slidedp.policy.machines import H200, MACHINES, UNBRIDGED, WORKSTATION, Machine
from slidedp.policy.records import SHOWN, Record, load_records
from slidedp.policy.step_time import predict
from slidedp.policy.words import mostly
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, frugal, plan, under

LAYERS = 5
GIB = 2**30


def planned(batch: int = 16, clip: float | None = None, device: int | None = 80, host: int = 500) -> Plan:
    """A run of a wide and shallow model on two ranks with this much memory, in GiB."""
    model = Qwen3Config(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    config = Config(
        model=model,
        data=Data(path="unused"),
        batch_size=2 * batch,
        ranks=2,
        device="cpu",
        compute_dtype="bfloat16",
        compile=True,
        optimizer=Optimizer(clip_norm=clip),
        host_memory_budget=host,
    )
    return dataclasses.replace(plan(config), device_available=None if device is None else device * GIB)


WIDE = planned()


@settings(max_examples=12, deadline=None, derandomize=True)
@given(machine=st.sampled_from(MACHINES), device=st.floats(1, 60), host=st.floats(15, 60), late=st.booleans())
def test_a_layout_over_budget_is_never_proposed(machine, device, host, late):
    there = dataclasses.replace(WIDE, device_available=int(device * GIB), host_available=int(host * GIB))
    rates = machine.rates(workload_of(there))
    try:
        policy = AutoPolicy(there, rates)
    except ConfigError as error:
        assert "not enough" in str(error)
        return
    policy.decide_all()
    for record in policy.records:
        chosen = under(there, Layout(**record.choice.layout))
        assert chosen.host_bytes <= there.host_available
        assert sum(chosen.device.values()) <= GPU_SHARE * there.device_available
        for candidate in record.candidates:
            same = under(there, Layout(**candidate.layout))
            assert candidate.gpu_bytes == sum(same.device.values())
            assert candidate.host_bytes == same.host_bytes


@pytest.mark.parametrize("device", [9, 12, 16, 24])
@pytest.mark.parametrize("batch", [4, 24])
def test_activation_modes_are_as_good_as_any_mix(device, batch):
    """Against every assignment of modes to layers, for the layout that the stages before led to."""
    there = planned(batch, device=device)
    workload = workload_of(there)
    rates = H200.rates(workload)
    policy = AutoPolicy(there, rates)
    while policy.decide().stage != "activations":
        pass
    chosen = policy.layout
    best = float("inf")
    for counts in itertools.product(range(LAYERS + 1), repeat=3):
        if sum(counts) > LAYERS:
            continue
        modes = [*["offload"] * counts[0], *["recompute"] * counts[1], *["partial"] * counts[2]]
        modes += ["keep"] * (LAYERS - len(modes))
        for budget in (0.2, 0.35, 0.5, 0.75) if counts[2] else (0.5,):
            layout = dataclasses.replace(chosen, activations=tuple(modes), partial_budget=budget)
            memory = sum(under(there, layout).device.values())
            if memory <= GPU_SHARE * there.device_available:
                best = min(best, predict(workload, rates, layout).step_seconds)
    # Two modes at most, and one partial budget: in integers that may miss a fraction of one layer.
    assert predict(workload, rates, chosen).step_seconds <= best * 1.03


def test_spare_memory_is_spent_only_where_it_gains():
    """Host-bound work keeps its FP32 state on the GPUs and few activations; GPU-bound work fills the memory
    with activations."""
    chosen = {}
    for batch in (1, 32):
        there = planned(batch, device=24)
        policy = AutoPolicy(there, H200.rates(workload_of(there)))
        chosen[batch] = policy.decide_all(), policy.records[-1].choice.gpu_bytes / there.device_available
    (small, share), (large, whole) = chosen[1], chosen[32]
    assert small.resident_updates == LAYERS + 2 and "keep" not in small.activation_modes(LAYERS)
    assert large.resident_updates < LAYERS + 2 and "recompute" not in large.activation_modes(LAYERS)
    assert share < 0.5 and whole > 0.7


def test_a_host_without_room_for_gradients_updates_on_the_gpus():
    least = under(WIDE, Layout(activations="recompute", gpu_updates=LAYERS + 2)).host_bytes
    there = dataclasses.replace(WIDE, host_available=int(1.01 * least))
    chosen = AutoPolicy(there, H200.rates(workload_of(there))).decide_all()
    assert under(there, chosen).host_bytes <= there.host_available and chosen.gpu_updates > 0


def test_what_makes_a_layout_small_is_taken_only_as_far_as_it_must():
    """Tiles and a single gradient buffer cost time that the model does not see."""

    def chosen(device: float) -> tuple[Layout, Layout]:
        there = dataclasses.replace(WIDE, device_available=int(device / GPU_SHARE))
        policy = AutoPolicy(there, H200.rates(workload_of(there)))
        return policy.candidates.lightest, policy.decide_all()

    def taken(**fields: Any) -> int:
        return sum(under(WIDE, Layout(activations="recompute", **fields)).device.values())

    small: dict[str, Any] = {"window": 1, "gradient_slots": 1}
    pieces = small | {"vocabulary_pieces": frugal(WIDE.model).vocabulary_pieces}
    tiles = pieces | {"mlp_tile_tokens": frugal(WIDE.model).mlp_tile_tokens}
    assert chosen(1.01 * taken(**pieces))[1].mlp_tile_tokens == 0
    assert chosen((taken(**tiles) + taken(**pieces)) / 2)[1].mlp_tile_tokens > 0
    lightest, layout = chosen((taken() + taken(**small)) / 2)
    assert lightest.gradient_slots == 1 and layout.gradient_slots > 1


def test_without_clipping_little_memory_on_both_sides_is_enough():
    """Layers' gradients land in a ring: the host has no room for all of them, the GPUs none to keep them."""
    small = dataclasses.replace(frugal(WIDE.model), schedule="in_backward", landing="ring")
    least = under(WIDE, dataclasses.replace(small, activations="recompute"))
    device = int(1.02 * sum(least.device.values()) / GPU_SHARE)
    there = dataclasses.replace(WIDE, host_available=int(1.01 * least.host_bytes), device_available=device)
    chosen = AutoPolicy(there, H200.rates(workload_of(there))).decide_all()
    assert fits(under(there, chosen)) and (chosen.schedule, chosen.landing) == ("in_backward", "ring")


def chosen_seconds(there: Plan, machine: Machine, host: float, device: float) -> float:
    """Predicted step of what the stages choose with so many GiB."""
    there = dataclasses.replace(there, host_available=int(host * GIB), device_available=int(device * GIB))
    policy = AutoPolicy(there, machine.rates(workload_of(there)))
    while policy.decide().stage != "activations":
        pass
    return policy.candidates.of(policy.layout).predicted_seconds


SEVERAL_TIES = (1 + TIE) ** 4
"""How much slower a choice may be for each of the stages having taken a tie."""


@pytest.mark.parametrize("machine", (H200, UNBRIDGED, WORKSTATION), ids=lambda machine: machine.name)
def test_more_memory_never_makes_a_slower_choice(machine):
    there = planned(8)
    least, host, device, both = (
        chosen_seconds(there, machine, *memory) for memory in ((24, 9), (60, 9), (24, 24), (60, 24))
    )
    assert max(host, device) <= least * SEVERAL_TIES
    assert both <= min(host, device) * SEVERAL_TIES


def test_more_of_the_host_hides_no_updates_on_the_gpus():
    """With room for all gradients the route to rank 0 is the best one that updates nothing on the GPUs."""
    config = dataclasses.replace(
        WIDE.config, model=shape("8B", 8), sequence_length=1024, batch_size=32, ranks=4, layout=Layout()
    )
    there = dataclasses.replace(plan(config), device_available=22 * GIB)
    little, much = (chosen_seconds(there, WORKSTATION, host, 22) for host in (40, 60))
    assert much <= little * SEVERAL_TIES


def test_gradients_are_predicted_in_their_own_dtype():
    """In FP32 twice the bytes land, and the worker reads 30 and not 28 bytes per parameter."""
    wide = dataclasses.replace(WIDE, config=dataclasses.replace(WIDE.config, reduce_dtype="float32"))
    rates = dataclasses.replace(
        H200.rates(workload_of(WIDE)),
        **dict.fromkeys(("up_all", "down_all", "both_all"), 50e9),  # nothing depends on what else moves
        **dict.fromkeys(("update", "update_up", "update_down", "update_both"), 5e9),
        copy_latency=0.0,
        update_latency=0.0,
    )
    halves, wholes = (predict(workload_of(there), rates, Layout()).demand for there in (WIDE, wide))
    assert wholes["to_host"] == pytest.approx(2 * halves["to_host"])
    assert wholes["update"] == pytest.approx(30 / 28 * halves["update"])
    assert wholes["to_device"] == pytest.approx(halves["to_device"])


def test_what_no_compiler_cuts_is_kept_and_spilled_whole():
    eager = dataclasses.replace(WIDE, config=dataclasses.replace(WIDE.config, compile=False))
    workload = workload_of(eager)
    rates = H200.rates(workload)
    modes = "keep", "partial"
    keep, part = (predict(workload, rates, Layout(activations=mode)).step_seconds for mode in modes)
    assert part == keep
    spilled = under(eager, Layout(activations="spill", partial_budget=0.2)).host
    moved = sum(workload.away_bytes(Layout(activations="spill", partial_budget=0.2)))
    assert 2 * moved == spilled["spilled intermediates (estimate)"]


def test_tiles_leave_less_to_spill():
    """As the preflight counts it, though the run's own layout has none."""
    there = planned(24, device=16)
    policy = AutoPolicy(there, H200.rates(workload_of(there)))
    for tile in (0, 4096):
        layout = Layout(activations="spill", mlp_tile_tokens=tile)
        workload = workload_of(under(there, layout))
        seconds = predict(workload, policy.rates, layout).step_seconds
        assert policy.candidates.of(layout).predicted_seconds == seconds
        spilled = under(there, layout).host["spilled intermediates (estimate)"]
        assert 2 * sum(workload.away_bytes(layout)) == spilled


def test_several_passes_are_beyond_it():
    config = dataclasses.replace(WIDE.config, gradient_accumulation=2, layout=Layout())
    with pytest.raises(ConfigError, match=r"^gradient_accumulation=2: .* of one pass only; give a layout$"):
        AutoPolicy(dataclasses.replace(WIDE, config=config), H200.rates(workload_of(WIDE)))


def test_what_asks_least_of_the_host_is_tried():
    """Though it is predicted a little slower, where it fits."""
    for device, there_is_room in ((16, False), (40, True)):
        there, tried = planned(16, device=device), []

        def trial(layout: Layout, tried: list[Layout] = tried) -> Trial:
            tried.append(layout)
            return Trial(1.0 if layout.resident_updates == LAYERS + 2 else 1.1, 6, 7.0)

        policy = AutoPolicy(there, H200.rates(workload_of(there)), trial)
        chosen = policy.decide_all()
        assert tried[0].resident_updates < LAYERS + 2
        assert (chosen.resident_updates == LAYERS + 2) == there_is_room
        assert there_is_room == (dataclasses.replace(tried[0], gpu_updates=7, resident_updates=7) in tried)


def test_clipping_forbids_updates_in_backward():
    policy = AutoPolicy(planned(clip=1.0), H200.rates(workload_of(WIDE)))
    policy.decide_all()
    layouts = [candidate.layout for record in policy.records for candidate in record.candidates]
    assert {layout["schedule"] for layout in layouts} == {"in_forward"}


def test_records_tell_why_and_survive_json(tmp_path):
    policy = AutoPolicy(WIDE, H200.rates(workload_of(WIDE)))
    policy.decide_all()
    assert [record.stage for record in policy.records] == list(STAGES)
    policy.save(tmp_path / "policy.json")
    assert load_records(tmp_path / "policy.json") == policy.records
    for record in policy.records:
        assert record.choice.note in repr(record) and "<table>" in record._repr_html_()
        assert record.choice.fits and record.why and record.flip
    # Long tables are cut, and every row names the index that `override` takes.
    buffers = policy.records[2]
    rows = repr(buffers).splitlines()[2:-3]
    assert len(rows) == SHOWN and f"and {len(buffers.candidates) - SHOWN} slower" in repr(buffers)
    bold = next(row for row in buffers._repr_html_().split("<tr>") if "bold" in row)
    assert f">→ {buffers.chosen}<" in bold and buffers.choice.note in bold
    for row in rows:
        index = int(row.replace("→", " ").split()[0])
        assert buffers.candidates[index].note in row and ("→" in row) == (index == buffers.chosen)
    stale = policy.records[0].to_dict() | {"schema": 0}
    with pytest.raises(ValueError, match="schema 0"):
        Record.from_dict(stale)


def test_an_override_holds_through_the_stages_after_it():
    policy = AutoPolicy(WIDE, H200.rates(workload_of(WIDE)))
    policy.decide_all()
    before = policy.layout
    route = policy.records[0]
    worst = max(range(9), key=lambda i: route.candidates[i].predicted_seconds)
    record = policy.override("route", worst)
    assert record.overridden and policy.records == [record] and not policy.done
    policy.decide_all()
    for later in policy.records[1:]:
        for candidate in later.candidates:
            if candidate.note != "the config's layout":
                assert all(candidate.layout[f] == record.choice.layout[f] for f in FIELDS["route"])
    assert policy.layout != before

    given_layout = dataclasses.replace(policy.layout, window=5)
    policy.override("buffers", given_layout)
    policy.decide_all()
    assert policy.layout.window == 5
    with pytest.raises(ConfigError, match="candidate 99 of route: expected 0 to 8"):
        policy.override("route", 99)
    with pytest.raises(ConfigError, match="stage 'rout' is not decided"):
        policy.override("rout", 0)


def test_what_was_overruled_holds_for_other_rates_and_its_cost_counts():
    rates = H200.rates(workload_of(WIDE))
    policy = AutoPolicy(WIDE, rates, spent=5.0)
    policy.predict()
    assert [record.stage for record in policy.records] == list(STAGES)[:MEASURE]
    wide = dataclasses.replace(policy.layout, window=5)
    policy.override("buffers", wide)
    cost = sum(record.cost_seconds for record in policy.records)
    for other in (rates.faster("compute", 2.0), rates.faster("links", 0.5)):
        again = policy.again(WIDE, other, None)
        assert again.rates == other and again.spent == pytest.approx(5.0 + cost)
        assert [record.overridden for record in again.records] == [False, False, True]
        again.decide_all()
        assert again.layout.window == 5
    assert not policy.again(WIDE, rates, None).done
    with pytest.raises(ConfigError, match="does not fit"):
        policy.again(dataclasses.replace(WIDE, device_available=20 * GIB), rates, None)


def test_what_was_measured_decides_and_its_cost_is_reported():
    """The model's favourite is slow in fact: another one wins, and the final record does the sums."""
    rates = H200.rates(workload_of(WIDE))
    near = dataclasses.replace(AutoPolicy(WIDE, rates).decide_all(), gradient_slots=5)
    for start, kind in ((WIDE.config.layout, "predicted"), (near, "measured")):
        tried = []

        def trial(layout: Layout, tried: list[Layout] = tried) -> Trial:
            tried.append(layout)
            seconds = 2.0 if len(tried) == 1 else 1.5 if layout == near else 1.0
            return Trial(seconds, 6, 6 * seconds)

        policy = AutoPolicy(under(WIDE, start), rates, trial, spent=4.0)
        policy.decide_all()
        measure, final = policy.records[-2:]
        assert measure.chosen != 0 and measure.choice.seconds == 1.0
        assert policy.layout == tried[measure.chosen]
        beyond = 6 * 1.0 + 6 * 0.5 * (near in tried)  # what the best would have taken is no cost
        assert measure.cost_seconds == pytest.approx(beyond)
        assert final.cost_seconds >= 4.0 + measure.cost_seconds
        assert "s, 4.0 s of it before the run, each step saves" in final.why
        assert f"s ({kind}), break-even after" in final.why
        assert ("saves 0.500 s (measured)" in final.why) == (start == near)


def test_what_is_near_is_tried_again_where_steps_are_short():
    """The first round is disturbed and says the contrary of the other two; what is far behind has had its
    chance, and long trials tell enough."""
    rates = H200.rates(workload_of(WIDE))
    start = dataclasses.replace(AutoPolicy(WIDE, rates).decide_all(), gradient_slots=5)
    for step, rounds in ((0.1, 3), (1.0, 1)):
        tried: dict[Layout, int] = {}

        def trial(layout: Layout, tried: dict[Layout, int] = tried, step: float = step) -> Trial:
            tried[layout] = tried.get(layout, 0) + 1
            first, last = layout == next(iter(tried)), layout == start
            seconds = step * (1.2 if last else 1.03 if first == (tried[layout] == 1) else 1.0)
            return Trial(seconds, 6, 6 * seconds)

        policy = AutoPolicy(under(WIDE, start), rates, trial)
        policy.decide_all()
        favourite, *others = tried
        assert start in others and tried[start] == 1 and len(others) > 1
        assert {tried[layout] for layout in (favourite, *others) if layout != start} == {rounds}
        assert (policy.layout == favourite) == (rounds > 1)
        measure = policy.records[MEASURE]
        count = sum(tried.values())
        wall = sum(policy.candidates.trials[layout].wall for layout in tried)
        assert measure.cost_seconds == pytest.approx(wall - 6 * count * measure.choice.seconds)


@pytest.mark.parametrize(("device", "batch"), [(16, 1), (24, 8), (80, 16), (24, 32)])
def test_only_what_a_trial_can_tell_apart_is_tried(device, batch):
    """And only if the model would have to be off by more than it usually is for it to be the faster one."""
    there, tried = planned(batch, device=device), []

    def trial(layout: Layout) -> Trial:
        tried.append(layout)
        return Trial(1.0, 6, 6.0)

    policy = AutoPolicy(there, H200.rates(workload_of(there)), trial)
    policy.decide_all()

    def traits(layout: Layout) -> list[Any]:
        route = layout.delivery, layout.reduction, layout.transport
        updates = layout.gpu_updates, layout.resident_updates
        return [route, updates, layout.vocabulary_pieces, mostly(layout, LAYERS)]

    first, *others = tried
    seconds = policy.candidates.of(first).predicted_seconds
    assert 1 <= len(others) <= SHORT_LIST and len({*tried}) == len(tried)
    for other in others:
        assert policy.candidates.of(other).predicted_seconds <= CLOSE * seconds
        assert sum(a != b for a, b in zip(traits(first), traits(other), strict=True)) == 1


def test_equal_predictions_go_to_the_layout_with_less_memory():
    policy = AutoPolicy(planned(1), H200.rates(workload_of(planned(1))))
    policy.decide_all()
    record = policy.records[3]
    as_fast = [c for c in record.candidates if c.fits and c.seconds <= record.choice.seconds * (1 - TIE)]
    assert not as_fast


def test_auto_is_a_layout_in_every_kind_of_config():
    values = {"model": "m", "data": {"path": "d"}, "layout": "auto"}
    for config in (Config.from_dict(values), Config(model="m", data=Data(path="d"), layout="auto")):
        assert config.tune and config.layout == Layout()
        assert dataclasses.replace(config, layout=Layout(window=4)).tune
    with pytest.raises(ConfigError, match="layout='fast': expected"):
        Config.from_dict(values | {"layout": "fast"})
