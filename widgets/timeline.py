"""The timeline of a step: who computed, copied, reduced or updated, and who waited."""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

# Okabe and Ito, and an indigo of Tol; waits are grey, so that what is coloured is work.
COLORS = {
    "forward": "#56B4E9",
    "head": "#CC79A7",
    "backward": "#0072B2",
    "deliver": "#009E73",
    "gather": "#80CEB9",
    "fetch": "#F0E442",
    "reduce": "#E69F00",
    "stash": "#332288",
    "update": "#D55E00",
    "load": "#882255",
    "write": "#AA4499",
}
WAIT = "#BBBBBB"
WHOLE_ROW = {"width": 0.8, "offset": -0.4}
MEASURED, PREDICTED = {"width": 0.5, "offset": -0.15}, {"width": 0.2, "offset": -0.4}
"""Parts of a row that measured and predicted bars share."""
TRACKS = {
    "compute": "compute",
    "deliver": "host to GPU",
    "reduce": "GPU to host",
    "update": "AdamW",
    "load": "state to GPU",
    "write": "state to host",
}


def timeline_figure(spans: pd.DataFrame, title: str = "", predicted: pd.DataFrame | None = None) -> go.Figure:
    """Bars of `RunLog.timeline(step)` or `trace.timeline(...)`; one row per rank and track, the worker's
    below.

    `predicted` has the same columns without `rank` (the step-time model's timeline, milliseconds): it is
    drawn as a thin strip under the bars of every rank.
    """
    figure = go.Figure()
    rows = row_order(spans)
    if predicted is None:
        figure.add_traces([*_bars(spans.assign(row=_row_names(spans)), WHOLE_ROW, True)])
    else:
        below = _for_every_row(predicted, spans)
        figure.add_traces([*_bars(spans.assign(row=_row_names(spans)), MEASURED, True)])
        figure.add_traces([*_bars(below, PREDICTED, False)])
    figure.update_layout(
        barmode="overlay",
        title=title,
        template="plotly_white",
        height=170 + (34 if predicted is not None else 26) * len(rows),
        margin={"l": 10, "r": 10, "t": 50 if title else 20, "b": 40},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(title="ms since the step began", automargin=True)
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], automargin=True)
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4])
    return figure


def row_order(spans: pd.DataFrame) -> list[str]:
    """Names of the rows of a timeline from top to bottom."""
    order = spans.assign(row=_row_names(spans), turn=spans["track"].map([*TRACKS].index))
    order = order.sort_values(["rank", "turn"])
    return [*order[order["rank"] >= 0]["row"].unique(), *order[order["rank"] < 0]["row"].unique()]


def _row_names(spans: pd.DataFrame) -> list[str]:
    return [
        TRACKS[track] if rank < 0 else f"rank {rank} {TRACKS[track]}"
        for rank, track in zip(spans["rank"], spans["track"], strict=True)
    ]


def _for_every_row(predicted: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """The one predicted rank, on the rows of all measured ones."""
    tracks = measured[["rank", "track"]].drop_duplicates()
    spans = predicted.merge(tracks, on="track")
    return spans.assign(row=_row_names(spans))


def _bars(spans: pd.DataFrame, place: dict[str, float], measured: bool) -> Iterator[go.Bar]:
    """One trace per phase. All waits share a name: what was waited for is in the hover text."""
    kinds = ["wait" if phase.startswith("wait") else phase for phase in spans["phase"]]
    order = {kind: i for i, kind in enumerate([*COLORS, "wait"])}
    groups = spans.groupby(pd.Series(kinds, spans.index))
    for kind, part in sorted(groups, key=lambda group: order.get(group[0], len(order))):
        what = "" if measured else "predicted: "
        yield go.Bar(
            base=part["start"],
            x=part["end"] - part["start"],
            y=part["row"],
            orientation="h",
            name=kind if measured else f"{kind}, predicted",
            legendgroup=kind,
            showlegend=measured,
            marker={"color": COLORS.get(kind, WAIT), "line_width": 0, "opacity": 1.0 if measured else 0.6},
            customdata=part[["unit", "phase"]],
            hovertemplate=what + "%{customdata[1]} %{customdata[0]}<br>%{base:.2f} ms + %{x:.2f} ms"
            "<extra></extra>",
            **place,
        )
