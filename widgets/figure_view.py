"""Plotly figures in the page, which gets plotly's JavaScript once and of a figure only what it shows."""

import asyncio
import time
from pathlib import Path
from typing import ClassVar, Self

import anywidget
import ipywidgets
import plotly.graph_objects as go
import traitlets
from plotly.offline import get_plotlyjs

POLL_SECONDS = 0.05


class Plotly(anywidget.AnyWidget):
    """plotly's JavaScript, 5 MB, for every figure of the page."""

    _esm = "export default {}"
    source = traitlets.Unicode().tag(sync=True)
    _shared: ClassVar[Self | None] = None

    @classmethod
    def shared(cls) -> Self:
        """The one that this kernel's figures share; a new one if somebody has closed it."""
        if cls._shared is None or cls._shared.comm is None:
            cls._shared = cls(source=get_plotlyjs())
        return cls._shared


class FigureView(anywidget.AnyWidget):
    """Shows a plotly figure as wide as its cell, and what it has become on every further `show`. What the
    user has zoomed to and hidden stays, unless the figure's `layout.uirevision` changes.

    It stands in for plotly's FigureWidget, which carries plotly with every figure (5 MB, through an SSH
    tunnel perhaps), starts without content, and if the browser takes more than two seconds to load it, gets
    none of what is sent afterwards: it stays empty.
    """

    _esm = Path(__file__).with_name("figure_view.js")
    _plotly = traitlets.Instance(Plotly).tag(sync=True, **ipywidgets.widget_serialization)
    _content = traitlets.Dict().tag(sync=True)
    """`json`, the whole figure, so that a page opened later has it too, and `number`, of the `show`."""
    x_range = traitlets.List(traitlets.Float(), help="Range of the x axis after a zoom.").tag(sync=True)
    drawn = 0
    """The last `show` that the browser has drawn."""

    def __init__(self) -> None:
        super().__init__(_plotly=Plotly.shared(), _content={"number": 0, "json": "{}"})
        # A message, not a trait: a model keeps a change back until the kernel is done with the last.
        self.on_msg(self._answered)

    @property
    def shown(self) -> int:
        """How often `show` was called."""
        return self._content["number"]

    def show(self, figure: go.Figure) -> None:
        """Sends the figure as it is now."""
        self._content = {"number": self.shown + 1, "json": figure.to_json(validate=False)}

    async def wait(self, seconds: float) -> None:
        """Returns once the browser has drawn the last `show`, or after `seconds`: perhaps nobody looks, or
        the notebook is open where widgets are not served while a cell awaits.

        A browser that draws slower than the kernel sends falls behind without end: after some minutes its
        buttons react to what was sent minutes ago.
        """
        deadline = time.monotonic() + seconds
        while self.drawn < self.shown and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    def _answered(self, _: ipywidgets.Widget, content: dict[str, int], __: list[bytes]) -> None:
        self.drawn = content["drawn"]
