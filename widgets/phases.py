"""Steps of several layouts side by side: how long compute works, and what it waits for."""

import pandas as pd
import plotly.graph_objects as go

COMPUTE, BETWEEN = "#0072B2", "#BBBBBB"
WAITS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito, by the causes in alphabetical order."""


def phases_figure(table: pd.DataFrame) -> go.Figure:
    """Bars of `compare_layouts`: one row per layout, milliseconds of a step."""
    waits = sorted(column for column in table if column.startswith("wait_"))
    within = table[["compute_seconds", *waits]].sum(axis=1)
    table = table.assign(between=(table["step_seconds"] - within).clip(lower=0.0))
    figure = go.Figure()
    parts = {"compute_seconds": ("compute", COMPUTE)}
    parts |= {
        wait: (f"waits for {wait.removeprefix('wait_').replace('_', ' ')}", color)
        for wait, color in zip(waits, WAITS, strict=False)
    }
    parts["between"] = ("between two steps", BETWEEN)
    for column, (name, color) in parts.items():
        figure.add_bar(
            orientation="h",
            name=name,
            x=1e3 * table[column],
            y=table.index,
            marker={"color": color, "line_width": 0},
            hovertemplate=f"{name}: %{{x:.1f}} ms<extra>%{{y}}</extra>",
        )
    figure.add_scatter(
        mode="markers",
        name="whole step",
        x=1e3 * table["step_seconds"],
        y=table.index,
        marker={"symbol": "line-ns-open", "size": 18, "color": "#000000", "line_width": 2},
        hovertemplate="step: %{x:.1f} ms<extra>%{y}</extra>",
    )
    figure.update_layout(
        barmode="stack",
        template="plotly_white",
        height=130 + 30 * len(table),
        margin={"l": 10, "r": 20, "t": 20, "b": 40},
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"},
    )
    figure.update_xaxes(title="ms per step (median)", rangemode="tozero", automargin=True)
    figure.update_yaxes(autorange="reversed", automargin=True, ticklabelstandoff=4)
    return figure
