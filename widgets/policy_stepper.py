"""Step through the decisions of AutoPolicy, overrule one, and see what follows."""

import html
from collections.abc import Sequence
from pathlib import Path

import ipywidgets
import plotly.graph_objects as go
import traitlets

from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.memory_plan import GIB
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.records import Candidate, Record, load_records, save_records
from slidedp.policy.words import NAMES
from slidedp.widgets.figure_view import FigureView

SHOWN = 12
"""Candidates of a record that are drawn, the fastest first."""
PAD = " style='text-align:left;padding-right:14px'"
BLUE, ORANGE, GREY, BLACK = "#0072B2", "#E69F00", "#BBBBBB", "#000000"


class PolicyStepper(ipywidgets.VBox):
    """`PolicyStepper(policy)` takes the decisions as one steps forward; `PolicyStepper(records)`, or the
    path of their JSON, shows decisions that were taken before.

    `next()`, `previous()`, `override(candidate)` and `export(path)` do what the buttons do.
    """

    index = traitlets.Int(-1, help="The record on show, from 0; -1 before the first one.").tag(sync=False)

    def __init__(self, source: AutoPolicy | Sequence[Record] | str | Path) -> None:
        self._policy = source if isinstance(source, AutoPolicy) else None
        if isinstance(source, AutoPolicy):
            self._records = source.records
        elif isinstance(source, str | Path):
            self._records = load_records(source)
        else:
            self._records = list(source)
        self._back = _button("Previous", "arrow-left", self.previous)
        self._forward = _button("Next", "arrow-right", self.next)
        self._others = ipywidgets.Dropdown(description="instead:", layout={"width": "430px"})
        self._overrule = _button("Overrule", "hand-o-up", lambda: self.override(self._others.value))
        self._save = _button("Export JSON", "download", self.export)
        self._where, self._text, self._table, self._error = (ipywidgets.HTML() for _ in range(4))
        self.figure, self._view = _figure(), FigureView()
        head = ipywidgets.HBox([self._back, self._forward, self._where], layout={"align_items": "center"})
        tail = ipywidgets.HBox([self._others, self._overrule, self._save])
        super().__init__([head, self._text, self._view, self._table, tail, self._error])
        self.observe(lambda _: self._show(), "index")
        if self._records:
            self.index = 0
        else:
            self.next()

    @property
    def record(self) -> Record:
        """The record on show."""
        return self._records[self.index]

    @property
    def records(self) -> list[Record]:
        """All decisions taken so far."""
        return self._records

    @property
    def choice(self) -> Layout:
        """The layout that the decisions so far lead to."""
        return Layout(**self._records[-1].choice.layout)

    def next(self) -> None:
        """Shows the next record; takes the decision if it is not taken yet."""
        self._error.value = ""
        try:
            if self.index == len(self._records) - 1 and self._policy is not None:
                self._policy.decide()
            self.index = min(self.index + 1, len(self._records) - 1)
            self._show()
        except ConfigError as error:
            self._fail(error)

    def previous(self) -> None:
        """Shows the record before."""
        self._error.value = ""
        self.index = max(0, self.index - 1)

    def override(self, candidate: int) -> None:
        """Takes another candidate of the record on show, by its index. Later decisions are taken back;
        `next` takes them again from here."""
        self._error.value = ""
        try:
            if self._policy is None:
                raise ConfigError("override: these are records of an earlier policy: make one to overrule it")
            self._policy.override(self.record.stage, candidate)
            self._show()
        except ConfigError as error:
            self._fail(error)

    def export(self, path: str | Path = "policy.json") -> Path:
        """Writes the records as JSON and returns where."""
        save_records(self._records, path)
        self._error.value = f"<pre>written: {html.escape(str(Path(path).absolute()))}</pre>"
        return Path(path)

    def _fail(self, error: ConfigError) -> None:
        self._error.value = f"<pre>{html.escape(str(error))}</pre>"

    def _show(self) -> None:
        record = self.record
        more = self._policy is not None and not self._policy.done
        count = f"{self.index + 1} of {len(self._records)}" + (" so far" if more else "")
        self._where.value = f"decision {count}: <b>{html.escape(record.stage)}</b>"
        self._back.disabled = self.index == 0
        self._forward.disabled = self.index == len(self._records) - 1 and not more
        by = " <i>(overruled by you)</i>" if record.overridden else ""
        self._text.value = (
            f"<div style='line-height:1.5'><h4 style='margin:4px 0'>{html.escape(record.question)}{by}</h4>"
            f"<b>{html.escape(record.choice.note or record.stage)}</b><br>why: {html.escape(record.why)}<br>"
            f"what would change it: {html.escape(record.flip)}</div>"
        )
        order = _fastest(record)
        self._draw(record, order)
        self._table.value = _table(record, order)
        self._others.options = [
            (_label(record.candidates[i], i), i) for i in _fastest(record, None) if i != record.chosen
        ]
        if self._others.options:
            self._others.index = 0
        self._overrule.disabled = self._policy is None or not self._others.options

    def _draw(self, record: Record, order: list[int]) -> None:
        rows = [_label(record.candidates[i], i) for i in order][::-1]
        shown = [record.candidates[i] for i in order][::-1]
        colors = [
            BLUE if i == record.chosen else "#9ECAE9" if record.candidates[i].fits else GREY for i in order
        ][::-1]
        measured = [(row, c) for row, c in zip(rows, shown, strict=True) if c.measured_seconds is not None]
        predicted, bound, real = self.figure.data
        predicted.update(x=[c.predicted_seconds for c in shown], y=rows, marker_color=colors)
        bound.update(x=[c.bound_seconds for c in shown], y=rows)
        real.update(x=[c.measured_seconds for _, c in measured], y=[row for row, _ in measured])
        self.figure.update_layout(height=130 + 26 * len(rows), yaxis_categoryarray=rows)
        self._view.show(self.figure)


def _button(text: str, icon: str, action: object) -> ipywidgets.Button:
    button = ipywidgets.Button(description=text, icon=icon, layout={"width": "130px"})
    button.on_click(lambda _: action())  # type: ignore[operator]
    return button


def _figure() -> go.Figure:
    tick = {"symbol": "line-ns-open", "size": 18, "color": BLACK, "line": {"color": BLACK, "width": 2}}
    diamond = {"symbol": "diamond", "size": 11, "color": ORANGE, "line": {"color": BLACK, "width": 1}}
    figure = go.Figure(
        [
            go.Bar(orientation="h", name="predicted (dark: chosen, grey: does not fit)", marker_color=BLUE),
            go.Scatter(mode="markers", name="lower bound", marker=tick),
            go.Scatter(mode="markers", name="measured", marker=diamond),
        ]
    )
    figure.update_layout(
        template="plotly_white",
        margin={"l": 10, "r": 20, "t": 10, "b": 40},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top"},
        legend_traceorder="normal",
    )
    figure.update_xaxes(title="seconds a step", rangemode="tozero")
    figure.update_yaxes(categoryorder="array", automargin=True, ticklabelstandoff=4)
    return figure


def _fastest(record: Record, most: int | None = SHOWN) -> list[int]:
    """Indices of candidates by step time, those that fit first; the chosen one always among them."""
    order = sorted(
        range(len(record.candidates)),
        key=lambda i: (not record.candidates[i].fits, record.candidates[i].seconds),
    )
    shown = order[:most]
    if record.chosen not in shown:
        shown[-1] = record.chosen
    return shown


def _label(candidate: Candidate, index: int) -> str:
    return f"{index}: {candidate.note}" if candidate.note else str(index)


def _table(record: Record, order: list[int]) -> str:
    """The same candidates with their memory, binding resource and waits."""
    heads = ["", "candidate", "predicted s", "measured s", "GPU GiB", "host GiB", "decided by", "waits (s)"]
    rows = []
    for i in order:
        c = record.candidates[i]
        waits = ", ".join(
            f"{cause} {s:.3g}" for cause, s in c.exposed.items() if s >= 0.005 * c.predicted_seconds
        )
        measured = "" if c.measured_seconds is None else f"{c.measured_seconds:.4g}"
        host = f"{c.host_bytes / GIB:.2f}" + ("" if c.fits else " does not fit")
        cells = [
            "→" if i == record.chosen else "",
            _label(c, i),
            f"{c.predicted_seconds:.4g}",
            measured,
            f"{c.gpu_bytes / GIB:.2f}",
            host,
            NAMES[c.binding],
            waits,
        ]
        bold = " style='font-weight:bold'" if i == record.chosen else ""
        rows.append(f"<tr{bold}>" + "".join(f"<td{PAD}>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th{PAD}>{h}</th>" for h in heads)
    left = len(record.candidates) - len(order)
    more = f"<p>and {left} more</p>" if left else ""
    return f"<table style='line-height:1.5'><tr>{head}</tr>{''.join(rows)}</table>{more}"
