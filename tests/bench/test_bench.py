"""The bench measures what it says, and FSDP2, the peer, trains as the plain loop and SlideDP do."""

import json
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoConfig

import slidedp.bench.__main__ as main
from slidedp.bench.fsdp2 import Case, run_fsdp2
from slidedp.bench.parity import losses, summary
from slidedp.bench.presets import PRESETS
from slidedp.bench.saves import save_costs
from slidedp.bench.shapes import SIZES, shape, title
from slidedp.bench.slide import random_samples, run_chosen, run_layouts
from slidedp.bench.table import row
from slidedp.config import Config, Data, Optimizer
from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.preflight import plan
from tests import reference
from tests.pool import small_model

STEPS, LENGTH, BATCH = 4, 16, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("bench"), tied=False)


def test_fsdp2_trains_as_the_plain_loop(model, tmp_path):
    optimizer = Optimizer(lr=1e-3, eps=1e-6, clip_norm=None)
    random_samples(tmp_path, 4 * BATCH, LENGTH, 97)
    found = list(
        run_fsdp2(
            AutoConfig.from_pretrained(model),
            str(tmp_path),
            [Case(BATCH, "none"), Case(BATCH, "full")],
            steps=STEPS,
            ranks=2,
            weights=model,
            device="cpu",
            dtype="float32",
            compiled=False,
            optimizer=optimizer,
        )
    )
    expected = reference.train(
        Config(
            model=model,
            data=Data(path=str(tmp_path)),
            sequence_length=LENGTH,
            batch_size=2 * BATCH,
            steps=STEPS,
            optimizer=optimizer,
        )
    )
    assert [measured["activations"] for measured in found] == ["none", "full"]
    for measured in found:
        np.testing.assert_allclose(measured["losses"], expected.losses, atol=1e-5)
        assert measured["tokens_per_second"] == pytest.approx(2 * BATCH * LENGTH / measured["step_seconds"])


def test_losses_of_slidedp_and_fsdp2_stay_together(model, tmp_path):
    random_samples(tmp_path / "samples", 4 * BATCH, LENGTH, 97)
    curves = losses(
        Config(
            model=model,
            data=Data(path=str(tmp_path / "samples")),
            sequence_length=LENGTH,
            batch_size=2 * BATCH,
            steps=STEPS,
            ranks=2,
            compute_dtype="float32",
            optimizer=Optimizer(lr=1e-2, eps=1e-6, clip_norm=None),
            run_folder=str(tmp_path / "run"),
        )
    )
    found = summary(curves)
    assert found["steps"] == STEPS and found["last"]["SlideDP"] < found["first"]["SlideDP"] - 0.1
    assert found["largest_difference"] < 1e-5


def test_every_layout_is_measured_over_its_own_steps(model):
    layouts = [Layout(activations=mode, gpu_updates=n) for mode, n in (("keep", 0), ("recompute", 3))]
    found = list(
        run_layouts(AutoConfig.from_pretrained(model), BATCH, layouts, length=LENGTH, steps=8, ranks=2)
    )
    assert [measured["layout"]["activations"] for measured in found] == ["keep", "recompute"]
    for measured in found:
        assert measured["steps"] == 4 and measured["host_gib"] > 0
        assert "2 x batch 2" in row("tiny", 2, measured)
        json.dumps(measured)
    # One run: the second layout goes on where the first has stopped.
    assert found[1]["losses"][-1] < found[0]["losses"][0]


def test_the_chosen_layout_is_measured_with_what_choosing_cost(model):
    config = AutoConfig.from_pretrained(model)
    measured = run_chosen(config, BATCH, length=LENGTH, steps=8, ranks=2)
    assert measured["steps"] == 4 and measured["tuning_seconds"] > 0
    assert "chosen in" in row("tiny", 2, measured)
    json.dumps(measured)


def test_one_step_of_more_tokens_than_the_model_has_positions(model):
    """As of a sequence whose step takes minutes."""
    config = AutoConfig.from_pretrained(model)
    length = config.max_position_embeddings + 16
    (measured,) = run_layouts(config, 1, [Layout(activations="recompute")], length=length, steps=1)
    tokens = measured["tokens_per_second"] * measured["step_seconds"]
    assert measured["steps"] == 1 and tokens == pytest.approx(length)


def test_steps_during_a_save_are_told_apart(model):
    layouts = [Layout(), Layout(schedule="in_backward")]
    config = AutoConfig.from_pretrained(model)
    found = list(save_costs(config, BATCH, layouts, length=LENGTH, ranks=2))
    assert [told["layout"] for told in found] == layouts
    for told in found:
        assert told["steps"] >= 1 and told["bytes"] > told["copied_bytes"] >= 0
        assert 0 < told["during_seconds"] <= told["longest_seconds"] and told["usual_seconds"] > 0


@pytest.mark.parametrize("size", SIZES)
def test_every_shape_can_be_planned_with_fewer_layers(size):
    run = Config(model=shape(size, 2), data=Data(path="none"), ranks=1, device="cpu", sequence_length=64)
    assert len(plan(run).units) == 4
    assert title(size, 2).endswith("B, 2 layers")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_planned(name):
    wanted = PRESETS[name]
    run = Config(
        model=shape(wanted.size),
        data=Data(path="none"),
        ranks=wanted.ranks,
        device="cpu",  # nothing is run or allocated
        compute_dtype="bfloat16",
        compile=True,
        optimizer=Optimizer(clip_norm=None),
    )
    for batch, layouts in wanted.slidedp.items():
        for layout in layouts:
            plan(replace(run, batch_size=batch * wanted.ranks, layout=layout)).check_layout()


OF_NO_PRESET = (
    "--size 4B", "--ranks 1", "--batch 2", '--layout {"window":4}', "--fsdp2 4,none", "--zero2 4",
)  # fmt: skip


@pytest.mark.parametrize("option", OF_NO_PRESET)
def test_a_preset_leaves_nothing_else_to_say(option, capsys):
    with pytest.raises(SystemExit):
        main.main(["--preset", "8b-batch-4", *option.split()])
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--preset 8b-batch-4" in said and f"leave out {option.split()[0]}" in said


@pytest.mark.parametrize("arguments", ["--auto", "--auto --batch 3", "--preset 8b-batch-4 --auto"])
def test_each_batch_is_measured_under_the_layout_that_its_run_chooses(arguments, monkeypatch):
    asked, given = [], []
    measured = {"system": "SlideDP", "steps": 1}
    monkeypatch.setattr(main, "row", lambda *_: "")
    monkeypatch.setattr(main, "run_fsdp2", lambda *_, **__: [])
    monkeypatch.setattr(main, "run_zero2", lambda *_, **__: [])
    monkeypatch.setattr(main, "random_samples", lambda *_: None)
    monkeypatch.setattr(main, "run_chosen", lambda _, batch, **__: asked.append(batch) or measured)
    monkeypatch.setattr(main, "run_layouts", lambda _, batch, *__, **___: given.append(batch) or [measured])
    assert main.main(arguments.split()) == 0
    if "--preset" in arguments:
        assert asked == given == [*PRESETS["8b-batch-4"].slidedp]
    else:
        assert asked == [3 if "3" in arguments else 16] and not given


def test_deepspeed_is_asked_for_by_name(model, tmp_path):
    from importlib.util import find_spec

    from slidedp.bench.zero import run_zero2

    if find_spec("deepspeed") is not None:
        pytest.skip("DeepSpeed is installed")
    with pytest.raises(ConfigError, match="DeepSpeed is not installed"):
        list(run_zero2(AutoConfig.from_pretrained(model), str(tmp_path), [1], steps=1, ranks=1))
