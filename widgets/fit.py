"""Figures that fit the cell that shows them, and change without losing anything."""

from typing import Any

import anywidget
import plotly.graph_objects as go


class FitWidth(anywidget.AnyWidget):
    """An empty widget that lets the figures beside it follow the width of the cell.

    plotly draws a figure before it is in the page, 700 pixels wide, and asks for the real width only when
    the window is resized: this tells it so once the cell has a width, and when that changes.
    """

    _esm = """
    function render({ el }) {
      const observer = new ResizeObserver(() => window.dispatchEvent(new Event("resize")));
      observer.observe(el);
      return () => observer.disconnect();
    }
    export default { render };
    """


def full_width(figure: go.Figure) -> go.FigureWidget:
    """The figure as a widget that `FitWidth` can fit."""
    figure.update_layout(autosize=True)
    widget = go.FigureWidget(figure)
    widget._config = widget._config | {"responsive": True}
    return widget


def update_traces(figure: go.FigureWidget, values: dict[int, dict[str, Any]]) -> None:
    """Gives traces, by their index, new values of the same properties in one message.

    `batch_update` would leave out those values that have not changed, and the browser's copy of the
    figure would lose them: whoever opens the widget after that misses them.
    """
    names = next(iter(values.values()), {})
    restyle = {name: [value[name] for value in values.values()] for name in names}
    figure.plotly_update(restyle, {}, [*values])
