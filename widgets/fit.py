"""Figures as wide as the cell that shows them."""

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
