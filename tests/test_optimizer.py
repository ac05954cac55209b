"""Parameter groups, schedules and frozen units, against torch.optim.AdamW in a plain loop."""

import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from slidedp import Checkpoint, ConfigError, Layout, Optimizer, ParameterGroup, plan
from slidedp.checkpoint.resume import check, load
from slidedp.config import Config
from slidedp.host.groups import check_groups, segments
from slidedp.host.state import HostState
from slidedp.model.families import load_config, skeleton
from slidedp.model.load import load_pretrained
from slidedp.model.units import units_of
from tests.pool import pool
from tests.stream.cases import config as case
from tests.stream.cases import model
from tests.stream.test_parity import assert_parity

GROUPS = (
    ParameterGroup(pattern="*.layers.2.*", lr_factor=0.5),
    ParameterGroup(pattern="*norm.weight", lr_factor=2.0, weight_decay=0.3),
    ParameterGroup(pattern="*.mlp.*", weight_decay=0.0),
)
LAYOUTS = [
    # (frozen, layout): a ring of four zones for five layers; units that the GPUs would update
    (("layers.1", "layers.4"), Layout(schedule="in_backward", landing="ring", chunk_bytes=4096)),
    (("embed", "layers.0"), Layout(reduction="cpu", activations="keep", vocabulary_pieces=3, window=9)),
    (("layers.0", "head"), Layout(gpu_updates=4, window=2, activations="offload", vocabulary_pieces=4)),
    ((), Layout(schedule="in_backward", gpu_updates=5, chunk_bytes=4096)),
]


def settings(freeze, layout, **more):
    clip = None if layout.schedule == "in_backward" else 0.7
    made = case(layout, clip_norm=clip, steps=12, **more)
    optimizer = replace(
        made.optimizer, groups=GROUPS, freeze=freeze, lr_schedule="wsd", decay_steps=4, weight_decay=0.2
    )
    return replace(made, optimizer=optimizer)


@pytest.mark.parametrize(("freeze", "layout"), LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_groups_and_frozen_units_train_as_torch_trains_them(freeze, layout, tied):
    run = settings(freeze, layout, tied=tied)
    outcome = pool(2).run(run)
    assert_parity(outcome, run)
    start = HostState(outcome.units, torch.float32)
    try:
        load_pretrained(start, run.model)
        same = {
            unit.name
            for unit, master in zip(outcome.units, outcome.masters, strict=True)
            if np.array_equal(start.unit(unit).master, master.numpy())
        }
    finally:
        start.close()
    assert same == set(freeze)


@pytest.mark.parametrize(
    ("ranks", "passes", "layout"),
    [
        (1, 6, Layout(schedule="in_forward", chunk_bytes=4096)),
        (2, 3, Layout(schedule="in_forward", reduction="cpu", delivery="replicated")),
        (3, 2, Layout(schedule="in_backward", landing="ring", chunk_bytes=6000)),
    ],
    ids=["1 rank", "2 ranks", "3 ranks"],
)
def test_passes_add_up_to_the_step_of_one(ranks, passes, layout):
    """The ranks' targets differ in number, and so do the passes'. The norm is that of the sum."""
    run = settings(("layers.2",), layout, gradient_accumulation=passes)
    outcome = pool(ranks).run(run)
    assert_parity(outcome, run)
    assert [e["step"] for e in outcome.updates] == list(range(12))


def test_passes_are_resumed_and_stop_and_switch_between_steps(tmp_path):
    run = settings((), Layout(), gradient_accumulation=3, checkpoint=Checkpoint(every_steps=5))
    layouts = {2: Layout(reduction="cpu", delivery="broadcast"), 6: Layout(window=2)}
    whole = pool(2).run(run, folder=tmp_path, layouts=layouts)
    assert_parity(whole, run)
    assert len(whole.layouts) == 3
    resumed = pool(2).run(run, resume=tmp_path / "step-00000005")
    np.testing.assert_allclose(resumed.losses(), whole.losses()[5:], rtol=2e-6)


def test_fp32_reduction_has_no_rounding_between_ranks():
    """Two routes add up three BF16 gradients in different orders: in FP32 that is no difference, in BF16
    a thousand times one. Switched live, and with gradients that wait on the device."""
    routes = [
        Layout(delivery="replicated", reduction="cpu", chunk_bytes=6000),
        Layout(gpu_updates=3, chunk_bytes=4096),
    ]

    def distance(dtype):
        run = case(routes[0], steps=5, compute_dtype="bfloat16", reduce_dtype=dtype)
        first = pool(3).run(run)
        other = pool(3).run(replace(run, layout=routes[1]), layouts={1: Layout(reduction="gpu_root")})
        return (torch.cat(first.masters) - torch.cat(other.masters)).square().mean().sqrt()

    assert distance("float32") < distance("bfloat16") / 50


def test_passes_are_planned_and_checked():
    run = replace(case(Layout(), gradient_accumulation=3), ranks=2, device="cpu")
    one, three = plan(replace(run, gradient_accumulation=1)), plan(run)
    assert three.host["accumulated gradients"] == one.host["FP32 master weights"]
    assert one.device["kept layer inputs"] == 3 * three.device["kept layer inputs"]
    with pytest.raises(ConfigError, match="cannot be split over 2 ranks and 2 passes: use a multiple of 4"):
        plan(replace(run, gradient_accumulation=2))
    with pytest.raises(ConfigError, match="gpu_updates=2 with gradient_accumulation=3"):
        replace(run, layout=Layout(gpu_updates=2))


def test_a_frozen_unit_has_no_moments_in_memory_or_on_disk(tmp_path):
    run = settings(("layers.*",), Layout(), checkpoint=Checkpoint(every_steps=12))
    said, all_trained = (plan(replace(c, ranks=2, device="cpu")) for c in (run, case(Layout())))
    gone = sum(unit.numel for unit in said.units if unit.frozen)
    assert gone > 0
    before, now = (p.host["exp_avg and exp_avg_sq"] for p in (all_trained, said))
    assert before - now >= 8 * gone
    pool(2).run(run, folder=tmp_path)
    folder = tmp_path / "step-00000012"
    with open(folder / "layers.0.safetensors", "rb") as shard:
        names = json.loads(shard.read(int.from_bytes(shard.read(8), "little")))
    assert names and all(name.startswith("master.") for name in names)
    # It can be resumed with other units frozen: their moments begin at zero, or stay where they are.
    for freeze in (("layers.*",), (), ("embed",)):
        units = units_of(skeleton(load_config(run.model)), freeze)
        state = HostState(units, torch.float32)
        check(folder, units, replace(run, steps=99))
        load(folder, state)
        for unit in units:
            if not unit.frozen:
                assert state.unit(unit).exp_avg.any() == (not unit.name.startswith("layers"))
            assert state.unit(unit).master.any()
        state.close()


def test_moments_of_frozen_units_take_no_pages():
    units = units_of(skeleton(load_config(model())), ("layers.*",))
    pages = {}
    for name, some in (("all", units_of(skeleton(load_config(model())))), ("some", units)):
        state = HostState(some, torch.float32)
        state.touch()
        pages[name] = [os.fstat(segment._fd).st_blocks for segment in state._segments.values()]
        state.close()
    master, exp_avg, exp_avg_sq = zip(pages["all"], pages["some"], strict=True)
    assert master[0] == master[1] and exp_avg[0] > 2 * exp_avg[1] and exp_avg_sq[0] > 2 * exp_avg_sq[1]


def test_segments_tile_a_unit():
    units = units_of(skeleton(load_config(model())))
    for unit in units:
        for optimizer in (Optimizer(), Optimizer(groups=GROUPS)):
            parts = segments(unit, optimizer)
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == unit.numel
        assert len(segments(unit, Optimizer())) <= 2


def test_wsd_is_stable_then_decays():
    rates = [
        Optimizer(lr=1.0, warmup_steps=2, lr_schedule="wsd", decay_steps=4).lr_at(s, 10) for s in range(10)
    ]
    assert rates == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [Optimizer(lr=1.0, lr_schedule="wsd").lr_at(s, 20) for s in (17, 18, 19)] == [1, 1, 0.5]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer(groups=(ParameterGroup(pattern="*.mpl.*"),)), "pattern '*.mpl.*' matches no parameter"),
        (
            Optimizer(freeze=("layer.0",)),
            "'layer.0' matches no unit: they are embed, layers.0 to layers.4, head",
        ),
        (Optimizer(freeze=("*",)), "every unit is frozen"),
    ],
)
def test_patterns_that_do_nothing_are_refused(optimizer, message):
    units = units_of(skeleton(load_config(model())), optimizer.freeze)
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_groups(units, optimizer)


def test_groups_from_a_file():
    values = {"model": "m", "data": {"path": "p"}}
    group = {"pattern": "*.mlp.*", "lr_factor": 2}
    optimizer = {"groups": [group], "freeze": ["embed"]}
    found = Config.from_dict({**values, "optimizer": optimizer}).optimizer
    assert found.groups == (ParameterGroup(pattern="*.mlp.*", lr_factor=2.0),) and found.freeze == ("embed",)
    with pytest.raises(ConfigError, match=re.escape("optimizer.groups[0].factor: unknown setting")):
        Config.from_dict({**values, "optimizer": {"groups": [{"pattern": "*", "factor": 2}]}})
