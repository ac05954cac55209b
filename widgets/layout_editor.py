"""Choose a layout by hand: what it would take and cost follows every change."""

import dataclasses
import html
from typing import Any

import ipywidgets
import pandas as pd
import traitlets

from slidedp.config import Config
from slidedp.errors import ConfigError
from slidedp.layout import DELIVERIES, LANDINGS, REDUCTIONS, SCHEDULES, TRANSPORTS, Layout
from slidedp.policy.rates import Rates
from slidedp.policy.step_time import Prediction, predict
from slidedp.policy.words import NAMES, WAITS
from slidedp.policy.workload import workload_of
from slidedp.preflight import Plan, plan, under
from slidedp.session import Run
from slidedp.widgets.figure_view import FigureView
from slidedp.widgets.layer_strip import LayerStrip
from slidedp.widgets.memory import memory_bars
from slidedp.widgets.timeline import timeline_figure

CHUNKS_MIB = (0.0625, 0.25, 1, 4, 8, 16, 32, 64, 128, 256, 512)


class LayoutEditor(traitlets.HasTraits):
    """`LayoutEditor(config, rates)` before a run, `LayoutEditor(run, rates)` beside one that goes on.

    Setting `layout` does what the controls do, and `modes` is painted on the strip of layers. Predicted
    step time, timeline and memory against the budgets follow; a layout that does not fit is shown as such.
    It is not a widget itself, whose `layout` would be its CSS: `widget` is.
    """

    layout = traitlets.Instance(Layout, help="The layout that the controls describe.")
    prediction = traitlets.Instance(Prediction, allow_none=True, help="Of that layout.")
    plan = traitlets.Instance(Plan, help="Bytes that it takes, against what is free.")

    def __init__(self, source: Config | Plan | Run, rates: Rates) -> None:
        self._run = source if isinstance(source, Run) else None
        self._base = source if isinstance(source, Plan) else _plan(source)
        self._rates, self._workload = rates, workload_of(self._base)
        start = source.layout if isinstance(source, Run) else self._base.config.layout
        layers = self._workload.layers
        self._setting = False
        self._controls = _controls(layers)
        self.strip = LayerStrip(modes=[*start.activation_modes(layers)])
        for control in (*self._controls.values(), self.strip):
            control.observe(self._edited, "modes" if control is self.strip else "value")
        self._button = ipywidgets.Button(
            description="Apply to the run",
            icon="bolt",
            tooltip="Switch the run to this layout at its next step boundary",
            disabled=self._run is None,
        )
        self._button.on_click(lambda _: self.apply())
        self._text, self._memory, self._error = (ipywidgets.HTML() for _ in range(3))
        self._view = FigureView()
        left = ipywidgets.VBox([*self._controls.values(), self._button], layout={"min_width": "360px"})
        right = ipywidgets.VBox([self._text, self._memory])
        top = ipywidgets.HBox([left, right])
        self.widget = ipywidgets.VBox([top, self.strip, self._view, self._error])
        super().__init__()
        self.observe(self._show, "layout")
        self.layout = start

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def apply(self, run: Run | None = None) -> None:
        """Switches a run to this layout at its next step boundary; by default the run it was made for."""
        self._error.value = ""
        try:
            target = run or self._run
            if target is None:
                raise ConfigError("apply: this editor was made from a config: give a run")
            target.set_layout(self.layout)
        except ConfigError as error:
            self._error.value = f"<pre>{html.escape(str(error))}</pre>"

    def config(self) -> Config:
        """The config with this layout, for `launch`."""
        return self.plan.config

    def seconds(self, layout: Layout) -> float:
        """Predicted seconds of a step under any layout; `Dashboard(run, editor.seconds)` draws them."""
        return predict(self._workload, self._rates, layout).step_seconds

    def _edited(self, _: object) -> None:
        """A control has moved."""
        if self._setting:
            return
        modes = tuple(self.strip.modes)
        values = {name: control.value for name, control in self._controls.items()}
        values["chunk_bytes"] = int(values.pop("chunk_mib") * 2**20)
        self._error.value = ""
        try:
            same = len(set(modes)) == 1
            self.layout = dataclasses.replace(self.layout, activations=modes[0] if same else modes, **values)
        except ConfigError as error:
            self._error.value = f"<pre>{html.escape(str(error))}</pre>"

    def _show(self, _: object) -> None:
        """Controls, figures and text of the present layout."""
        layout = self.layout
        self._setting = True
        try:
            for name, control in self._controls.items():
                value = layout.chunk_bytes / 2**20 if name == "chunk_mib" else getattr(layout, name)
                if name == "chunk_mib" and value not in control.options:
                    control.options = sorted({*control.options, value})
                control.value = value
            self.strip.modes = [*layout.activation_modes(self._workload.layers)]
        finally:
            self._setting = False
        self.plan = under(self._base, layout)
        self.prediction = predict(self._workload, self._rates, layout, timeline=True)
        self._text.value = self._words()
        self._memory.value = memory_bars(self.plan.memory(), self._workload.ranks)
        self._draw(self.prediction)
        clips = self._base.config.optimizer.clip_norm is not None
        problem = clips and layout.schedule == "in_backward"
        self._error.value = (
            "<pre>in_backward cannot clip: this layout needs optimizer.clip_norm=None</pre>"
            if problem
            else ""
        )

    def _words(self) -> str:
        p = self.prediction
        assert p is not None
        tokens = self._workload.tokens * self._workload.ranks / p.step_seconds
        waits = sorted(p.exposed.items(), key=lambda item: -item[1])
        lines = [
            f"<b>{_seconds(p.step_seconds)} a step</b>, {tokens:,.0f} tokens/s (predicted)",
            f"decided by {NAMES[p.binding]}; no schedule is faster than {_seconds(p.bound_seconds)}",
            f"compute busy {p.compute_seconds / p.step_seconds:.0%}"
            + "".join(
                f", waits {_seconds(s)} for {WAITS[c]}" for c, s in waits if s > 0.005 * p.step_seconds
            ),
        ]
        return f"<div style='line-height:1.5'>{'<br>'.join(lines)}</div>"

    def _draw(self, prediction: Prediction) -> None:
        spans = pd.DataFrame(prediction.timeline, columns=["track", "unit", "phase", "start", "end"])
        spans = spans.assign(rank=-1)  # rows without a rank's name: all ranks are alike
        self.figure = timeline_figure(spans, title="Predicted step")
        self._view.show(self.figure)


def _plan(source: Config | Run) -> Plan:
    return source.plan if isinstance(source, Run) else plan(source)


def _controls(layers: int) -> dict[str, ipywidgets.Widget]:
    style = {"style": {"description_width": "120px"}, "layout": {"width": "350px"}}
    slow = style | {"continuous_update": True}
    return {
        "delivery": ipywidgets.Dropdown(options=DELIVERIES, description="delivery", **style),
        "reduction": ipywidgets.Dropdown(options=REDUCTIONS, description="reduction", **style),
        "transport": ipywidgets.Dropdown(options=TRANSPORTS, description="transport", **style),
        "schedule": ipywidgets.Dropdown(options=SCHEDULES, description="schedule", **style),
        "landing": ipywidgets.Dropdown(options=LANDINGS, description="landing", **style),
        "chunk_mib": ipywidgets.SelectionSlider(options=CHUNKS_MIB, description="chunk (MiB)", **slow),
        "window": ipywidgets.IntSlider(min=1, max=layers, description="window (layers)", **slow),
        "gradient_slots": ipywidgets.IntSlider(min=1, max=layers, description="gradient slots", **slow),
        "gpu_updates": ipywidgets.IntSlider(min=0, max=layers + 2, description="GPU updates", **slow),
        "resident_updates": ipywidgets.IntSlider(min=0, max=layers + 2, description="resident", **slow),
        "partial_budget": ipywidgets.FloatSlider(
            min=0.05, max=1.0, step=0.05, description="partial keeps", readout_format=".2f", **slow
        ),
    }


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.2f} ms"
