"""Recordings of `Run.profile`, inline: the timeline of a step over all ranks, tables, memory."""

import html
import traceback
from pathlib import Path

import ipywidgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import traitlets

from slidedp import trace
from slidedp.errors import ConfigError
from slidedp.session import Run
from slidedp.telemetry import RunLog, open_run
from slidedp.widgets.figure_view import FigureView
from slidedp.widgets.timeline import timeline_figure

VIEWS = ("timeline", "operators", "kernels", "memory")
PIXELS = 1200
"""About the width of a figure: shorter events than a pixel are left out until one zooms in."""
TABLE_ROWS = 30
KINDS = {
    "cpu_op": ("operators", "#666666"),
    "kernel": ("kernels", "#0072B2"),
    "gpu_memcpy": ("copies", "#009E73"),
    "gpu_memset": ("memset", "#CC79A7"),
}


class TraceView(ipywidgets.VBox):
    """`TraceView(run)`, or of a run folder: `TraceView(open_run(folder))`. With a run that goes on,
    *Record* calls `run.profile`.

    Setting `first`, `step`, `rank` or `view` does what the controls do. `predicted` takes the timeline of
    slidedp.policy.step_time.predict(..., timeline=True), which is drawn under the measured one.
    """

    first = traitlets.Int(-1, help="First step of the recording on show; -1 for none.").tag(sync=False)
    step = traitlets.Int(-1, help="Step on show.").tag(sync=False)
    rank = traitlets.Int(0, help="Rank whose streams, tables and memory are shown.").tag(sync=False)
    view = traitlets.Enum(VIEWS, "timeline", help="What is on show.").tag(sync=False)

    def __init__(
        self,
        source: Run | RunLog | str | Path,
        predicted: tuple[tuple[str, str, str, float, float], ...] | None = None,
    ) -> None:
        self._run = source if isinstance(source, Run) else None
        self._log = (
            source.log
            if isinstance(source, Run)
            else source
            if isinstance(source, RunLog)
            else open_run(source)
        )
        columns = ["track", "unit", "phase", "start", "end"]
        self._predicted = None if predicted is None else pd.DataFrame(predicted, columns=columns)
        self.recording: trace.Recording | None = None
        self._updating = False
        self.figure: go.Figure | None = None
        """The plotly figure on show; None with a table."""
        self._plot = FigureView()
        self._plot.observe(lambda _: self._zoomed(), "x_range")
        button = ipywidgets.Button(description="Record 2 steps", icon="circle", layout={"width": "140px"})
        button.on_click(lambda _: self.record())
        again = ipywidgets.Button(description="Refresh", icon="refresh", layout={"width": "100px"})
        again.on_click(lambda _: self.refresh())
        self._record_button = button
        narrow = {"layout": {"width": "160px"}, "style": {"description_width": "70px"}}
        self._first = ipywidgets.Dropdown(description="recording", **narrow)
        self._step = ipywidgets.Dropdown(description="step", **narrow)
        self._rank = ipywidgets.Dropdown(description="rank", **narrow)
        self._view = ipywidgets.ToggleButtons(options=VIEWS, style={"button_width": "90px"})
        self._body = ipywidgets.VBox()
        self._error = ipywidgets.HTML()
        choices = ipywidgets.HBox([button, again, self._first, self._step, self._rank])
        super().__init__([choices, self._view, self._body, self._error])
        for control, name in (
            (self._first, "first"), (self._step, "step"), (self._rank, "rank"), (self._view, "view"),
        ):  # fmt: skip
            control.observe(lambda change, name=name: self._chosen(name, change["new"]), "value")
        self.observe(self._draw, ["first", "step", "rank", "view"])
        self.refresh()

    def refresh(self) -> None:
        """Looks for recordings that have been written since, and shows the latest."""
        self._record_button.disabled = self._run is None or not self._run.running
        found = trace.recordings(self._log)
        if not found:
            self._body.children = [ipywidgets.HTML("No recording yet: <code>run.profile(steps=2)</code>")]
            return
        if found[-1] != self.first:
            self.first = found[-1]

    def record(self, steps: int = 2) -> None:
        """Asks the run to record its next steps; `refresh` shows them once they are written."""
        self._error.value = ""
        try:
            if self._run is None:
                raise ConfigError("record: this is a run folder; record steps of a run that goes on")
            self._run.profile(steps)
        except ConfigError as error:
            self._error.value = f"<pre>{html.escape(str(error))}</pre>"

    def _chosen(self, name: str, value: object) -> None:
        if value is not None and not self._updating:
            setattr(self, name, value)

    def _draw(self, change: dict[str, object]) -> None:
        """Shows what the traits say; what goes wrong is shown under the widget."""
        if self._updating:
            return
        self._updating, self._error.value = True, ""
        try:
            if change["name"] == "first":
                self._open()
            self._first.value, self._step.value = self.first, self.step
            self._rank.value, self._view.value = self.rank, self.view
            self._body.children = [self._content()]
        except (ConfigError, traitlets.TraitError) as error:
            self._error.value = f"<pre>{html.escape(str(error))}</pre>"
        except Exception:  # in a callback, nobody else would see it
            self._error.value = f"<pre>{html.escape(traceback.format_exc())}</pre>"
        finally:
            self._updating = False

    def _open(self) -> None:
        self.recording = trace.load(self._log, self.first)
        self._first.options = trace.recordings(self._log)
        self._step.options = self.recording.steps
        self._rank.options = [t.rank for t in self.recording.ranks]
        self.step = self.recording.steps[-1]

    def _content(self) -> ipywidgets.Widget:
        assert self.recording is not None
        self.figure = None
        if self.view == "operators":
            return _table(trace.operators(self.recording, self.rank), f"rank {self.rank}, all recorded steps")
        if self.view == "kernels":
            return _table(trace.kernels(self.recording, self.rank), f"rank {self.rank}, all recorded steps")
        if self.view == "memory":
            self.figure = _memory_figure(trace.memory(self.recording, self.rank, self.step))
        else:
            self.figure = self._timeline()
        # Of other events, what one has zoomed to says nothing.
        self.figure.layout.uirevision = f"{self.view} {self.first} {self.step} {self.rank}"
        self._plot.x_range = []  # so that the next zoom is a change, wherever to
        self._plot.show(self.figure)
        return self._plot

    def _timeline(self) -> go.Figure:
        """Phases of all ranks, and below them the streams and threads of the chosen one."""
        assert self.recording is not None
        spans = trace.timeline(self.recording, self.step)
        self._events = trace.events(self.recording, self.rank, self.step)
        figure = timeline_figure(spans, predicted=self._predicted)
        self._events = self._events.assign(row="rank " + str(self.rank) + " " + self._events["row"])
        rows = [*self._events["row"].unique()]
        for category in self._events["category"].unique():
            name, color = KINDS[category]
            figure.add_bar(
                orientation="h",
                name=name,
                meta=category,
                marker={"color": color, "line_width": 0},
                width=0.8,
                offset=-0.4,
                hovertemplate="%{customdata}<br>%{base:.3f} ms + %{x:.3f} ms<extra></extra>",
            )
        axis = figure.layout.yaxis
        axis.categoryarray = [*rows[::-1], *axis.categoryarray]
        axis.range = [-0.6, len(axis.categoryarray) - 0.4]
        figure.layout.height += 26 * len(rows)
        end = float(max(spans["end"].max(), 1e-3))
        figure.layout.xaxis.range = [-0.01 * end, 1.01 * end]
        self._show_events(figure, *figure.layout.xaxis.range)
        return figure

    def _zoomed(self) -> None:
        if self.view == "timeline" and self.figure is not None and self._plot.x_range:
            self._show_events(self.figure, *self._plot.x_range)
            self._plot.show(self.figure)

    def _show_events(self, figure: go.Figure, left: float, right: float) -> None:
        """Draws the events between two times that are at least a pixel wide."""
        table = self._events
        table = table[(table["end"] >= left) & (table["start"] <= right)]
        table = table[table["end"] - table["start"] >= (right - left) / PIXELS]
        for bars in figure.data:
            if bars.meta in KINDS:
                part = table[table["category"] == bars.meta]
                bars.base, bars.x = part["start"].to_numpy(), (part["end"] - part["start"]).to_numpy()
                bars.y, bars.customdata = part["row"].to_list(), part["name"].to_list()


def _table(table: pd.DataFrame, what: str) -> ipywidgets.HTML:
    if table.empty:
        return ipywidgets.HTML("None were recorded: this run had no GPU.")
    more = f", the first {TABLE_ROWS} of {len(table)}" if len(table) > TABLE_ROWS else ""
    body = table.head(TABLE_ROWS).to_html(index=False, float_format="%.3f", border=0, justify="right")
    return ipywidgets.HTML(f"<p>{html.escape(what)}{more}</p>{body}")


def _memory_figure(table: pd.DataFrame) -> go.Figure:
    figure = go.Figure()
    for device, part in table.groupby("device"):
        kept = np.unique(np.linspace(0, len(part) - 1, min(len(part), 5000)).astype(int))
        for column, color in (("allocated", "#0072B2"), ("reserved", "#E69F00")):
            if part[column].any():
                figure.add_scatter(
                    x=part["start"].to_numpy()[kept],
                    y=part[column].to_numpy()[kept] / 2**20,
                    name=f"{device} {column}",
                    line={"shape": "hv", "color": color},
                )
    figure.update_layout(template="plotly_white", height=360, margin={"t": 20, "b": 40}, showlegend=True)
    figure.update_xaxes(title="ms since the step began")
    figure.update_yaxes(title="MiB in tensors", rangemode="tozero")
    return figure
