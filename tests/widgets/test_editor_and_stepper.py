"""Choosing a layout by hand and stepping through the policy, without a browser."""

import dataclasses
import html
import json

import pytest

from slidedp import Config, ConfigError, Data, Layout, Optimizer, Run
from slidedp.bench.shapes import qwen3
from slidedp.memory_plan import GIB
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.machines import H200
from slidedp.policy.records import load_records
from slidedp.policy.step_time import predict
from slidedp.policy.workload import workload_of
from slidedp.preflight import plan, under
from slidedp.widgets import LayerStrip, LayoutEditor, PolicyStepper
from slidedp.widgets.figure_view import FigureView


@pytest.fixture(scope="module")
def planned():
    """Qwen3-0.6B as two GPUs of 20 GiB would see it; nothing is allocated."""
    config = Config(
        model=qwen3("0.6B"),
        data=Data(path="unused"),
        ranks=2,
        device="cpu",
        batch_size=32,
        compute_dtype="bfloat16",
        compile=True,
        optimizer=Optimizer(clip_norm=None),
    )
    return dataclasses.replace(plan(config), host_available=64 * GIB, device_available=20 * GIB)


@pytest.fixture
def rates(planned):
    return H200.rates(workload_of(planned))


@pytest.fixture
def editor(planned, rates):
    return LayoutEditor(planned, rates)


class FakeRun(Run):
    def __init__(self, plan, refuse=None):
        self.plan, self.layout, self.refuse, self.asked = plan, plan.config.layout, refuse, []

    def set_layout(self, layout):
        if self.refuse:
            raise ConfigError(self.refuse)
        self.asked.append(layout)


def test_controls_make_the_layout_and_its_prediction(editor, planned, rates):
    editor._controls["delivery"].value = "replicated"
    editor._controls["window"].value = 5
    editor._controls["chunk_mib"].value = 8
    editor.strip.paint("keep", 20, 28)
    editor._controls["schedule"].value = "in_backward"
    modes = ("recompute",) * 20 + ("keep",) * 8
    expected = Layout(
        delivery="replicated", window=5, chunk_bytes=8 * 2**20, activations=modes, schedule="in_backward"
    )
    assert editor.layout == expected
    assert editor.config().layout == expected
    assert editor.prediction == predict(workload_of(planned), rates, expected, timeline=True)
    assert editor.plan == under(planned, expected)
    drawn = sum(len(bars.x) for bars in editor.figure.data)
    assert drawn == len(editor.prediction.timeline)
    assert f"{editor.prediction.step_seconds * 1e3:.2f} ms a step" in editor._text.value or (
        f"{editor.prediction.step_seconds:.3f} s a step" in editor._text.value
    )


def test_the_browser_is_sent_the_figure_and_not_plotly_with_it(editor):
    before = editor._view.shown
    editor.strip.paint("keep", 20, 28)
    content = editor._view._content
    assert content["number"] == editor._view.shown > before
    assert json.loads(content["json"]) == json.loads(editor.figure.to_json())
    assert len(json.dumps({name: str(value) for name, value in editor._view.get_state().items()})) < 1e5


def test_figures_share_plotly_even_if_somebody_has_closed_it(editor):
    first = FigureView()
    assert first._plotly is editor._view._plotly and "Plotly" in first._plotly.source
    first._plotly.close()
    second = FigureView()
    assert second._plotly is not first._plotly and second._plotly.comm is not None
    assert FigureView()._plotly is second._plotly


def test_a_layout_sets_the_controls(editor):
    editor.layout = Layout(reduction="cpu", chunk_bytes=3 * 2**20, activations="offload", gradient_slots=4)
    values = {name: control.value for name, control in editor._controls.items()}
    assert (values["reduction"], values["chunk_mib"], values["gradient_slots"]) == ("cpu", 3, 4)
    assert set(editor.strip.modes) == {"offload"}
    editor.strip.paint("offload")  # all alike: one mode, not one each
    assert editor.layout.activations == "offload"


def test_what_does_not_fit_is_shown_not_hidden(editor):
    editor.strip.paint("keep")
    assert sum(editor.plan.device.values()) > editor.plan.device_available
    assert "does not fit" in editor._memory.value
    assert editor.prediction.step_seconds > 0
    editor.strip.paint("recompute")
    assert "does not fit" not in editor._memory.value


def test_a_contradiction_is_shown_and_changes_nothing(editor):
    editor._controls["reduction"].value = "cpu"
    before = editor.layout
    editor._controls["gpu_updates"].value = 3
    assert "layout.gpu_updates=3" in editor._error.value and editor.layout == before
    editor._controls["reduction"].value = "gpu"
    assert editor.layout.gpu_updates == 3 and not editor._error.value


def test_clipping_and_in_backward_are_named(planned, rates):
    config = dataclasses.replace(planned.config, optimizer=Optimizer(clip_norm=1.0))
    editor = LayoutEditor(dataclasses.replace(planned, config=config), rates)
    editor._controls["schedule"].value = "in_backward"
    assert "clip_norm=None" in editor._error.value


def test_apply_switches_the_run_it_was_made_for(planned, rates):
    run = FakeRun(planned)
    editor = LayoutEditor(run, rates)
    editor._controls["window"].value = 6
    assert run.asked == []
    editor._button.click()
    assert run.asked == [Layout(window=6)]
    run.refuse = "set_layout: <no>"
    editor.apply()
    assert "set_layout: &lt;no&gt;" in editor._error.value


def test_an_editor_of_a_config_has_no_run_to_switch(editor):
    assert editor._button.disabled
    editor.apply()
    assert "give a run" in editor._error.value
    bundle = editor._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in (bundle[0] if isinstance(bundle, tuple) else bundle)


def test_the_strip_refuses_unknown_modes():
    strip = LayerStrip(modes=["keep"] * 4)
    strip.paint("offload", 1, 3)
    assert strip.modes == ["keep", "offload", "offload", "keep"]
    with pytest.raises(Exception, match="forget"):
        strip.paint("forget")


def test_stepping_takes_decisions_once_and_walks_back(planned, rates):
    policy, alone = AutoPolicy(planned, rates), AutoPolicy(planned, rates)
    alone.decide_all()
    stepper = PolicyStepper(policy)
    assert (stepper.index, len(policy.records)) == (0, 1) and stepper._back.disabled
    while not stepper._forward.disabled:
        stepper._forward.click()
    assert [r.stage for r in policy.records] == [r.stage for r in alone.records]
    assert stepper.choice == alone.layout
    for index in range(len(policy.records) - 2, -1, -1):
        stepper._back.click()
        assert stepper.index == index and stepper.record is policy.records[index]
    stepper.next()
    assert len(policy.records) == len(alone.records)


def test_overruling_takes_later_decisions_back_and_replays(planned, rates):
    policy = AutoPolicy(planned, rates)
    policy.decide_all()
    stepper = PolicyStepper(policy)
    record = stepper.record
    others = [i for i, c in enumerate(record.candidates) if c.fits and i != record.chosen]
    other = next(i for i in others if record.candidates[i].layout["reduction"] == "gpu")
    stepper._others.value = other
    stepper._overrule.click()
    assert stepper.record.overridden and stepper.record.chosen == other
    assert len(policy.records) == 1 and "overruled by you" in stepper._text.value
    while not stepper._forward.disabled:
        stepper.next()
        assert not stepper._error.value
    route = record.candidates[other].layout
    assert (stepper.choice.delivery, stepper.choice.reduction) == (route["delivery"], route["reduction"])
    stepper.previous()
    stepper.override(10**6)
    assert "candidate 1000000" in stepper._error.value


def test_each_record_is_drawn_with_its_candidates(planned, rates):
    policy = AutoPolicy(planned, rates)
    policy.decide_all()
    record = policy.records[0]
    measured = dataclasses.replace(record.candidates[1], measured_seconds=0.75)
    candidates = (record.candidates[0], measured, *record.candidates[2:])
    stepper = PolicyStepper([dataclasses.replace(record, candidates=candidates), *policy.records[1:]])
    predicted, bound, real = stepper.figure.data
    by_label = dict(zip(predicted.y, predicted.x, strict=True))
    assert len(by_label) == len(candidates)
    for i, candidate in enumerate(candidates):
        assert by_label[f"{i}: {candidate.note}"] == candidate.predicted_seconds
    assert list(real.x) == [0.75] and real.y[0].startswith("1: ")
    assert len(bound.x) == len(candidates)
    for text in (record.question, record.why, record.flip):
        assert html.escape(text) in stepper._text.value
    for index in range(len(policy.records)):
        stepper.index = index
        assert html.escape(stepper.record.choice.note) in stepper._table.value
    assert stepper._forward.disabled  # records alone: nothing to decide
    stepper.override(0)
    assert "records of an earlier policy" in stepper._error.value


def test_export_and_reopen(planned, rates, tmp_path):
    policy = AutoPolicy(planned, rates)
    policy.decide_all()
    path = PolicyStepper(policy).export(tmp_path / "policy.json")
    assert [r["stage"] for r in json.loads(path.read_text())] == [r.stage for r in policy.records]
    again = PolicyStepper(path)
    assert again.choice == policy.layout
    assert again.records == load_records(path)
