"""A run's curves while it goes on, or those of a run folder."""

import asyncio
import contextlib
import html
import math
import statistics
import traceback

import ipywidgets
import numpy as np
import plotly.graph_objects as go
import traitlets
from plotly.subplots import make_subplots

from slidedp.session import Run
from slidedp.telemetry import RunLog, Step, StepReader

REFRESH_SECONDS = 0.2
MAX_POINTS = 2000
"""Points that a curve sends to the browser, however long the run."""
RECENT = 20
"""Steps whose median time the ETA assumes for those that are left."""
GIB = 2**30

BLACK = "#000000"
# Okabe and Ito's colours without their black, which is the mean's; grey makes an eighth.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
LOSS, SPEED, MEMORY, WAITS = (1, 1), (1, 2), (2, 1), (2, 2)
"""Row and column of the panels."""


class Curves:
    """Points of every curve, one per step. Memory on a CPU is known for sampled steps only."""

    def __init__(self, ranks: int) -> None:
        self.steps: list[int] = []
        self.loss: list[float] = []
        self.tokens_per_second: list[float] = []
        self.rank_loss: list[list[float]] = [[] for _ in range(ranks)]
        self.rank_memory: list[list[float]] = [[] for _ in range(ranks)]
        self.waits: dict[str, list[float]] = {}
        """Per cause, the percentage of compute's time, over all ranks."""

    def add(self, step: Step) -> None:
        before = len(self.steps)
        self.steps.append(step.step)
        self.loss.append(step.loss)
        self.tokens_per_second.append(step.tokens_per_second)
        for event in step.events:
            rank, nbytes = event["rank"], event["gpu_peak_bytes"] or event["anonymous_bytes"]
            self.rank_loss[rank].append(event["loss_sum"] / max(1, event["targets"]))
            self.rank_memory[rank].append(nbytes / GIB if nbytes else math.nan)
        for event in step.events:
            for cause in event["wait_seconds"]:
                self.waits.setdefault(cause, [0.0] * before)
        seconds = sum(event["compute_seconds"] for event in step.events)
        for cause, percentages in self.waits.items():
            waited = sum(event["wait_seconds"].get(cause, 0.0) for event in step.events)
            percentages.append(100 * waited / seconds)


class Dashboard(ipywidgets.VBox):
    """Loss, speed, memory and waits of a run, its progress, and a button that stops it.

    `Dashboard(run)` follows the run from the kernel's event loop (`await run` keeps that free);
    `Dashboard(open_run(folder))` shows a run folder. `figure` is a plotly figure.
    """

    step = traitlets.Int(0, help="Steps that every rank has reported.").tag(sync=False)
    status = traitlets.Unicode(help="The run's status; of a run folder, how it ended.").tag(sync=False)
    failure = traitlets.Unicode(help="What ended the run, with its traceback; shown below.").tag(sync=False)

    def __init__(self, source: Run | RunLog) -> None:
        self._run = source if isinstance(source, Run) else None
        self._log = source.log if isinstance(source, Run) else source
        self._ranks = int(self._log.description["ranks"])
        self._steps = int(self._log.description["config"]["steps"])
        self._reader, self._curves = StepReader(self._log), Curves(self._ranks)
        self._step_seconds: list[float] = []
        self.figure = _figure(self._ranks, self._log.description["config"]["device"] == "cuda")
        self._bar = ipywidgets.IntProgress(max=self._steps, layout={"width": "240px"})
        self._text = ipywidgets.HTML()
        self._stop = ipywidgets.Button(
            description="Stop", icon="stop", tooltip="End the run at the next step boundary"
        )
        self._stop.on_click(self._on_stop)
        self._error = ipywidgets.HTML()
        head = ipywidgets.HBox([self._stop, self._bar, self._text], layout={"align_items": "center"})
        super().__init__([head, self.figure, self._error])
        self.update()
        if self._run is not None and self._run.running:
            with contextlib.suppress(RuntimeError):  # no loop: whoever made this calls update()
                self._task = asyncio.get_running_loop().create_task(self._follow())

    def update(self) -> None:
        """Shows what the log has got since the last call. Call it on the kernel's main thread."""
        over = self._run is None or not self._run.running  # read first: nothing comes after it is true
        new = self._reader.new_steps()
        for step in new:
            self._curves.add(step)
        if new:
            seconds = [step.seconds for step in new if math.isfinite(step.seconds)]
            self._step_seconds = [*self._step_seconds, *seconds][-RECENT:]
            self.step = len(self._curves.steps)
            self._draw()
        ends = self._log.events("end") if over else []
        self.status = ends[-1]["status"] if ends else "not ended" if self._run is None else self._run.status
        self.failure = (ends[-1]["failure"] or "") if ends else ""
        self._stop.disabled = over or self._stop.disabled
        self._bar.value = self.step
        self._bar.bar_style = {"failed": "danger", "finished": "success", "stopped": "warning"}.get(
            self.status, ""
        )
        self._text.value = html.escape(self.summary())
        self._error.value = _preformatted(self.failure)

    def summary(self) -> str:
        """Progress, latest figures and ETA in one line."""
        parts = [self.status, f"step {self.step} of {self._steps}"]
        if self.step:
            parts.append(f"loss {self._curves.loss[-1]:.3f}")
        if self._step_seconds:
            parts.append(f"{self._curves.tokens_per_second[-1]:,.0f} tokens/s")
        if self._step_seconds and self.status == "running":
            left = (self._steps - self.step) * statistics.median(self._step_seconds)
            parts.append(f"{_duration(left)} left")
        return " · ".join(parts)

    def _draw(self) -> None:
        curves, figure = self._curves, self.figure
        kept = _kept(len(curves.steps))
        x = np.array(curves.steps)[kept]
        known = {trace.meta for trace in figure.data}
        # Their order is the stacking order, so a new cause goes on top.
        for cause in [cause for cause in curves.waits if f"wait {cause}" not in known]:
            figure.add_trace(_wait_trace(cause, len(known) - 2 * self._ranks - 2), *WAITS)
            known.add(f"wait {cause}")
        values = {"loss": curves.loss, "speed": curves.tokens_per_second}
        for rank in range(self._ranks):
            values[f"loss {rank}"], values[f"memory {rank}"] = (
                curves.rank_loss[rank],
                curves.rank_memory[rank],
            )
        values |= {f"wait {cause}": percentages for cause, percentages in curves.waits.items()}
        with figure.batch_update():
            for trace in figure.data:
                y = np.array(values[trace.meta], np.float32)
                if trace.meta.startswith("memory"):  # sampled: its few points would fall through a stride
                    there = np.flatnonzero(np.isfinite(y))
                    there = there[_kept(len(there))]
                    trace.update(x=np.array(curves.steps)[there], y=y[there])
                else:
                    trace.update(x=x, y=y[kept])

    async def _follow(self) -> None:
        assert self._run is not None
        try:
            running = True
            while running:
                running = self._run.running
                self.update()
                await asyncio.sleep(REFRESH_SECONDS)
        except Exception:  # a task's exception is seen by no one
            self._error.value = _preformatted(traceback.format_exc())

    def _on_stop(self, _: ipywidgets.Button) -> None:
        """May come on another thread than the kernel's main one: `Run.stop` only sends a message."""
        self._stop.disabled = True
        if self._run is not None:
            self._run.stop()


def _figure(ranks: int, cuda: bool) -> go.FigureWidget:
    memory = "GPU memory, peak" if cuda else "host memory of a rank (PSS)"
    titles = ("loss", "speed", memory, "compute waits, by cause")
    figure = make_subplots(2, 2, subplot_titles=titles, vertical_spacing=0.2, horizontal_spacing=0.12)
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
    figure.add_trace(go.Scatter(meta="loss", name="all ranks", line=mean), *LOSS)
    figure.add_trace(go.Scatter(meta="speed", name="all ranks", showlegend=False, line=mean), *SPEED)
    figure.update_traces(mode="lines")
    figure.update_xaxes(title_text="step", title_standoff=4, rangemode="tozero")
    for panel, unit in ((LOSS, "nats per target token"), (SPEED, "target tokens/s"), (MEMORY, "GiB")):
        figure.update_yaxes(title_text=unit, row=panel[0], col=panel[1])
    figure.update_yaxes(title_text="% of compute's time", row=WAITS[0], col=WAITS[1])
    for row, column in (SPEED, MEMORY, WAITS):
        figure.update_yaxes(rangemode="tozero", row=row, col=column)
    beside = {"x": 1.02, "xanchor": "left", "yanchor": "top"}
    figure.update_layout(
        height=560,
        autosize=True,  # as wide as the cell; a FigureWidget is 700 pixels wide otherwise
        template="plotly_white",
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        hovermode="x unified",
        legend={**beside, "y": 1.0, "title_text": ""},
        legend2={**beside, "y": 0.4, "title_text": "waits for", "traceorder": "reversed"},
    )
    return go.FigureWidget(figure)


def _wait_trace(cause: str, index: int) -> go.Scatter:
    return go.Scatter(
        meta=f"wait {cause}",
        name=cause,
        legend="legend2",
        mode="lines",
        line={"width": 0, "color": COLORS[index % len(COLORS)]},
        stackgroup="waits",
    )


def _kept(count: int) -> np.ndarray:
    """Indices of at most MAX_POINTS evenly spaced points of `count`, the last always among them."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_POINTS)).astype(int)) if count else np.arange(0)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""
