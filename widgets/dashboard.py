"""A run's curves while it goes on, or those of a run folder."""

import asyncio
import contextlib
import html
import math
import statistics
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.subplots import make_subplots

from slidedp.layout import Layout
from slidedp.session import Run
from slidedp.steps import Step, StepReader
from slidedp.telemetry import RunLog
from slidedp.widgets.curves import Curves, values_of
from slidedp.widgets.figure_view import FigureView
from slidedp.widgets.memory import memory_bars, size

REFRESH_SECONDS = 0.2
IDLE = 10.0
"""A refresh that takes long is followed by a pause of so many times as long."""
UNSEEN_SECONDS = 1.0
"""Seconds that a refresh waits for a browser that does not answer."""
RECENT = 20
"""Steps whose median time the ETA assumes for those that are left, and that the waits by rank sum up."""

BLACK = "#000000"
# Okabe and Ito's colours without their black, which is the mean's; grey makes an eighth.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LOSS, SPEED, SECONDS, MEMORY, WAITS, BY_RANK = (1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3)
"""Row and column of the panels."""


class Dashboard(ipywidgets.VBox):
    """Loss, speed, memory and waits of a run, its progress, and a button that stops it.

    `Dashboard(run)` follows the run from the kernel's event loop (`await run` keeps that free);
    `Dashboard(open_run(folder))` shows a run folder. `figure` is a plotly figure.

    `predicted` is drawn beside the measured steps: a function from a layout to seconds a step, such as
    `LayoutEditor.seconds`, which follows every switch of the layout; or the seconds of the first layout.
    """

    step = traitlets.Int(0, help="Steps done, those before a resume included.").tag(sync=False)
    status = traitlets.Unicode(help="The run's status; of a run folder, how it ended.").tag(sync=False)
    failure = traitlets.Unicode(help="What ended the run, with its traceback; shown below.").tag(sync=False)
    rank = traitlets.Int(-1, help="The rank whose loss and waits are shown; -1 for all.").tag(sync=False)
    predicted = traitlets.Float(
        math.nan, help="Predicted seconds of a step under the present layout; NaN for none."
    ).tag(sync=False)

    def __init__(self, source: Run | RunLog, predicted: float | Callable[[Layout], float] = math.nan) -> None:
        self._run = source if isinstance(source, Run) else None
        self._log = source.log if isinstance(source, Run) else source
        description = self._log.description
        self._ranks = int(description["ranks"])
        self._steps = int(description["config"]["steps"])
        self._reader, self._curves = StepReader(self._log), Curves()
        self._last: Step | None = None
        self._recent: deque[Step] = deque(maxlen=RECENT)
        self._switches: list[str] = []
        self._predict = None if isinstance(predicted, int | float) else predicted
        first = (
            predicted
            if isinstance(predicted, int | float)
            else predicted(Layout(**description["config"]["layout"]))
        )
        self._first_step = int(description.get("first_step", 0))
        self._predictions = [(self._first_step, first)]
        """(first step, predicted seconds) of each layout so far."""
        self._evaluations = 0  # those that are drawn
        cuda = description["config"]["device"] == "cuda"
        self.figure = _figure(self._ranks, cuda, self._first_step)
        self._view = FigureView()
        self._bar = ipywidgets.IntProgress(max=self._steps, layout={"width": "240px"})
        self._text = ipywidgets.HTML()
        self._stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the run at the next step boundary"
        )
        self._stop.on_click(self._on_stop)
        self._save = ipywidgets.Button(
            description="Save", icon="save", tooltip="Write a checkpoint while training goes on"
        )
        self._save.on_click(self._on_save)
        choices = [("all ranks", -1), *((f"rank {rank}", rank) for rank in range(self._ranks))]
        self._choice = ipywidgets.Dropdown(options=choices, layout={"width": "110px"})
        self._saved, self._memory, self._layouts, self._error = (ipywidgets.HTML() for _ in range(4))
        head = [self._stop, self._save, self._choice, self._bar, self._text]
        super().__init__(
            [
                ipywidgets.HBox(head, layout={"align_items": "center"}),
                self._view,
                self._saved,
                self._layouts,
                self._memory,
                self._error,
            ]
        )
        traitlets.link((self._choice, "value"), (self, "rank"))
        self.observe(lambda _: self._draw(), "rank")
        self.step, self.predicted = self._first_step, first
        self.observe(lambda _: self._show_predicted(), "predicted")
        self._show_predicted()
        self.update()
        if self._run is not None and self._run.running:
            with contextlib.suppress(RuntimeError):  # no loop: whoever made this calls update()
                self._task = asyncio.get_running_loop().create_task(self._follow())

    def update(self) -> None:
        """Shows what the log has got since the last call. Call it on the kernel's main thread."""
        over = self._run is None or not self._run.running  # read first: nothing comes after it is true
        new = self._reader.new_steps()
        for step in new:
            self._curves.add(step.step, values_of(step))
        if new:
            self._recent.extend(new)
            self._last = new[-1]
            self.step = new[-1].step + 1
        switched = self._show_switches()
        if new or switched or len(self._reader.evaluations) > self._evaluations:
            self._draw()
        self._show_checkpoint()
        ends = self._log.events("end") if over else []
        self.status = ends[-1]["status"] if ends else (self._run or self._log).status
        self.failure = (ends[-1]["failure"] or "") if ends else ""
        self._stop.disabled = over or self._stop.disabled
        self._save.disabled = over
        self._bar.value = self.step
        self._bar.bar_style = {"failed": "danger", "finished": "success", "stopped": "warning"}.get(
            self.status, ""
        )
        self._text.value = html.escape(self.summary())
        self._memory.value = self._memory_bars()
        self._error.value = _preformatted(self.failure)

    def summary(self) -> str:
        """Progress, latest figures and ETA in one line."""
        parts = [self.status, f"step {self.step} of {self._steps}"]
        seconds = [step.seconds for step in self._recent if math.isfinite(step.seconds)]
        if self._last is not None:
            parts.append(f"loss {self._last.loss:.3f}")
        if self._reader.evaluations:
            parts.append(f"held-out perplexity {math.exp(min(700.0, self._reader.evaluations[-1][1])):,.2f}")
        if self._last is not None and seconds:
            parts.append(f"{self._last.tokens_per_second:,.0f} tokens/s")
            parts.append(self._utilization(statistics.median(seconds)))
        if seconds and self.status == "running":
            left = (self._steps - self.step) * statistics.median(seconds)
            parts.append(f"{_duration(left)} left")
        return " · ".join(part for part in parts if part)

    def _utilization(self, seconds: float) -> str:
        """MFU where the GPU's peak is known, else model TFLOPS; nothing on a CPU."""
        if self._log.description["config"]["device"] != "cuda":
            return ""
        targets = statistics.mean(sum(e["targets"] for e in step.events) for step in self._recent)
        flops = targets / seconds / self._ranks * float(self._log.description["flops_per_token"])
        peak = self._log.peak_tflops
        text = f"{flops / 1e12:,.0f} TFLOPS/GPU"
        return text if peak is None else f"{text}, MFU {flops / 1e12 / peak:.0%}"

    def _memory_bars(self) -> str:
        """The plan's parts against what is free and what the processes have."""
        if self._last is None:
            return ""
        memory, events = self._reader.memory, self._last.events
        shared = sum(memory["host"].values())
        own = sum(event["anonymous_bytes"] for event in events) + self._reader.worker_bytes
        measured = {"host": shared + own, "device": max(event["gpu_peak_bytes"] for event in events)}
        return memory_bars(memory, self._ranks, measured)

    def _show_checkpoint(self) -> None:
        if (event := self._reader.checkpoint) is not None:
            outcome = event["path"] or f"failed: {event['error']}"
            self._saved.value = _preformatted(f"checkpoint of step {event['step']}: {outcome}")

    def _show_switches(self) -> bool:
        """A dotted line, and a line of text, for every layout that the run has switched to; whether there
        are new ones."""
        new = self._reader.layouts[len(self._switches) :]
        for step, layout in new:
            before = self._reader.layouts[len(self._switches) - 1][1] if self._switches else None
            before = before or self._log.description["config"]["layout"]
            changed = ", ".join(
                f"{name} {_plain(name, value)}"
                for name, value in layout.items()
                if _differ(value, before.get(name))
            )
            self._switches.append(f"step {step}: {changed or 'the same layout again'}")
            for panel in (LOSS, SPEED, SECONDS, WAITS):
                line = {"dash": "dot", "color": "#777777", "width": 1}
                self.figure.add_vline(x=step - 0.5, line=line, row=panel[0], col=panel[1])
            if changed:
                seconds = math.nan if self._predict is None else self._predict(Layout(**layout))
                self._predictions.append((step, seconds))
                self.predicted = seconds
        if new:
            self._layouts.value = _preformatted("switched at " + "\n            ".join(self._switches))
        return bool(new)

    def _draw(self) -> None:
        curves, figure = self._curves, self.figure
        causes = sorted({name.split(" ", 2)[2] for name in curves.names if name.startswith("wait ")})
        known = {trace.meta for trace in figure.data}
        # Their order is the stacking order, so a new cause goes on top.
        for cause in [cause for cause in causes if f"wait {cause}" not in known]:
            index = sum(str(name).startswith("wait ") for name in known)
            figure.add_trace(_wait_trace(cause, index), *WAITS)
            figure.add_trace(_rank_waits(cause, index), *BY_RANK)
            known.add(f"wait {cause}")
        self._evaluations = len(self._reader.evaluations)
        if self._evaluations and "held-out" not in known:
            figure.add_trace(_held_out(), *LOSS)
        who = "all" if self.rank < 0 else str(self.rank)
        for trace in figure.data:
            kind, _, rest = trace.meta.partition(" ")
            if kind == "recent":
                trace.x, trace.y = self._recent_waits(rest)
            elif kind == "held-out":
                trace.x, trace.y = np.array(self._reader.evaluations).T
            elif kind == "predicted":
                trace.x, trace.y = self._predicted_curve()
                trace.showlegend = any(math.isfinite(seconds) for _, seconds in self._predictions)
            else:
                trace.x, trace.y = curves.curve(f"wait {who} {rest}" if kind == "wait" else trace.meta)
            if kind == "loss" and rest:
                trace.opacity = 0.8 if self.rank in (-1, int(rest)) else 0.15
        self._view.show(figure)

    def _show_predicted(self) -> None:
        begin, _ = self._predictions[-1]
        self._predictions[-1] = (begin, self.predicted)
        self._draw()

    def _predicted_curve(self) -> tuple[np.ndarray, np.ndarray]:
        """A level for each layout, between the lines that mark the switches."""
        steps = self._curves.steps
        if not steps:
            return np.empty(0), np.empty(0)
        x: list[float] = []
        y: list[float] = []
        for (begin, seconds), (end, _) in pairwise([*self._predictions, (steps[-1] + 0.5, math.nan)]):
            if begin <= steps[-1]:
                x += [max(steps[0], begin - 0.5), min(steps[-1], end - 0.5)]
                y += [seconds, seconds]
        return np.array(x), np.array(y)

    def _recent_waits(self, cause: str) -> tuple[list[float], list[str]]:
        """Percentage of compute's time that each rank has waited in the recent steps."""
        percentages = []
        for rank in range(self._ranks):
            events: list[dict[str, Any]] = [step.events[rank] for step in self._recent]
            waited = sum(event["wait_seconds"].get(cause, 0.0) for event in events)
            percentages.append(100 * waited / max(1e-9, sum(event["compute_seconds"] for event in events)))
        return percentages, [f"rank {rank}" for rank in range(self._ranks)]

    async def _follow(self) -> None:
        assert self._run is not None
        try:
            running = True
            while running:
                running = self._run.running
                begun = time.monotonic()
                self.update()
                pause = max(REFRESH_SECONDS, IDLE * (time.monotonic() - begun))
                if running:
                    await self._view.wait(UNSEEN_SECONDS)
                    await asyncio.sleep(pause)
        except Exception:  # a task's exception is seen by no one
            self._error.value = _preformatted(traceback.format_exc())

    def _on_save(self, _: ipywidgets.Button) -> None:
        """May come on another thread, as `_on_stop` may: `Run.save` only sends a message."""
        if self._run is not None:
            self._run.save(wait=False)

    def _on_stop(self, _: ipywidgets.Button) -> None:
        """May come on another thread than the kernel's main one: `Run.stop` only sends a message."""
        self._stop.disabled = True
        if self._run is not None:
            self._run.stop()


def _figure(ranks: int, cuda: bool, first_step: int) -> go.Figure:
    memory = "GPU memory, peak" if cuda else "memory of a rank alone"
    titles = (
        "loss",
        "speed",
        "step time",
        memory,
        "compute waits, by cause",
        f"waits in the last {RECENT} steps",
    )
    figure = make_subplots(2, 3, subplot_titles=titles, vertical_spacing=0.2, horizontal_spacing=0.08)
    for rank in range(ranks):
        line = {"color": COLORS[rank % len(COLORS)], "width": 1}
        name = f"rank {rank}"
        loss = go.Scatter(meta=f"loss {rank}", name=name, legendgroup=name, line=line, opacity=0.8)
        memory_trace = go.Scatter(
            meta=f"memory {rank}", name=name, legendgroup=name, showlegend=False, line=line
        )
        figure.add_trace(loss, *LOSS)
        figure.add_trace(memory_trace, *MEMORY)
    mean = {"color": BLACK, "width": 2}
    dashed = {"color": COLORS[5], "width": 2, "dash": "dash"}
    figure.add_trace(go.Scatter(meta="loss", name="all ranks", line=mean), *LOSS)
    figure.add_trace(go.Scatter(meta="speed", name="all ranks", showlegend=False, line=mean), *SPEED)
    figure.add_trace(go.Scatter(meta="seconds", name="measured", showlegend=False, line=mean), *SECONDS)
    figure.add_trace(go.Scatter(meta="predicted", name="predicted", showlegend=False, line=dashed), *SECONDS)
    figure.update_traces(mode="lines")
    for row, column in (LOSS, SPEED, SECONDS, MEMORY, WAITS):
        axis = {"title_text": "step", "title_standoff": 4, "rangemode": "normal" if first_step else "tozero"}
        figure.update_xaxes(axis, row=row, col=column)
    units = {
        LOSS: "nats per target token",
        SPEED: "target tokens/s",
        SECONDS: "s",
        MEMORY: "GiB",
        WAITS: "% of compute's time",
    }
    for (row, column), unit in units.items():
        figure.update_yaxes(title_text=unit, title_standoff=4, row=row, col=column)
    for row, column in (SPEED, SECONDS, MEMORY, WAITS):
        figure.update_yaxes(rangemode="tozero", row=row, col=column)
    figure.update_xaxes(
        title_text="% of compute's time", title_standoff=4, rangemode="tozero", row=BY_RANK[0], col=BY_RANK[1]
    )
    figure.update_yaxes(autorange="reversed", type="category", row=BY_RANK[0], col=BY_RANK[1])
    beside = {"x": 1.02, "xanchor": "left", "yanchor": "top"}
    figure.update_layout(
        height=560,
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        barmode="stack",
        hovermode="x unified",
        legend={**beside, "y": 1.0, "tracegroupgap": 2},
        legend2={**beside, "y": 0.4, "title_text": "waits for", "traceorder": "reversed"},
    )
    return figure


def _held_out() -> go.Scatter:
    look = {"color": COLORS[5], "width": 2}
    return go.Scatter(meta="held-out", name="held out", mode="lines+markers", line=look)


def _wait_trace(cause: str, index: int) -> go.Scatter:
    return go.Scatter(
        meta=f"wait {cause}",
        name=cause,
        legend="legend2",
        mode="lines",
        line={"width": 0, "color": COLORS[index % len(COLORS)]},
        stackgroup="waits",
    )


def _rank_waits(cause: str, index: int) -> go.Bar:
    color = COLORS[index % len(COLORS)]
    return go.Bar(
        meta=f"recent {cause}",
        name=cause,
        orientation="h",
        marker={"color": color, "opacity": 0.5},
        showlegend=False,
    )


def _differ(one: Any, other: Any) -> bool:
    """Tuples of a layout are lists once they have been JSON."""
    return (list(one) if isinstance(one, tuple) else one) != (
        list(other) if isinstance(other, tuple) else other
    )


def _plain(name: str, value: Any) -> str:
    if name == "chunk_bytes":
        return size(value)
    if isinstance(value, list | tuple):  # activation modes, one a layer
        return ", ".join(f"{list(value).count(mode)} {mode}" for mode in dict.fromkeys(value))
    return str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""
