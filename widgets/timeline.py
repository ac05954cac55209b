"""The measured timeline of a step: who computed, copied, reduced or updated, and who waited."""

import pandas as pd
import plotly.graph_objects as go

# Okabe and Ito; waits are grey, so that what is coloured is work.
COLORS = {
    "forward": "#56B4E9",
    "head": "#CC79A7",
    "backward": "#0072B2",
    "deliver": "#009E73",
    "reduce": "#E69F00",
    "update": "#D55E00",
}
WAIT = "#BBBBBB"
TRACKS = {"compute": "compute", "deliver": "host to GPU", "reduce": "GPU to host", "update": "CPU AdamW"}


def timeline_figure(spans: pd.DataFrame, title: str = "") -> go.Figure:
    """Bars of `RunLog.timeline(step)`; one row per rank and track, the worker's below."""
    spans = spans.assign(
        row=[
            TRACKS[track] if rank < 0 else f"rank {rank} {TRACKS[track]}"
            for rank, track in zip(spans["rank"], spans["track"], strict=True)
        ]
    )
    order = spans.sort_values(["rank", "track"])
    rows = [*order[order["rank"] >= 0]["row"].unique(), *order[order["rank"] < 0]["row"].unique()]
    figure = go.Figure()
    for phase, part in spans.groupby("phase", sort=False):
        name = str(phase)
        figure.add_bar(
            base=part["start"],
            x=part["end"] - part["start"],
            y=part["row"],
            orientation="h",
            name=name,
            marker={"color": COLORS.get(name, WAIT), "line_width": 0},
            customdata=part[["unit"]],
            hovertemplate="%{customdata[0]} " + name + "<br>%{base:.1f} ms + %{x:.1f} ms<extra></extra>",
        )
    figure.update_layout(
        barmode="overlay",
        title=title,
        template="plotly_white",
        height=140 + 36 * len(rows),
        margin={"l": 10, "r": 10, "t": 50 if title else 20, "b": 40},
        legend={"orientation": "h", "y": -0.25},
    )
    figure.update_xaxes(title="ms since the step began")
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], automargin=True)
    return figure
