"""A strip of layers to paint activation modes on."""

from pathlib import Path

import anywidget
import traitlets

from slidedp.layout import ACTIVATIONS

COLORS = {
    "keep": "#0072B2",
    "partial": "#56B4E9",
    "recompute": "#E69F00",
    "offload": "#009E73",
    "spill": "#CC79A7",
}
"""Okabe and Ito. Modes differ in their letter too."""


class LayerStrip(anywidget.AnyWidget):
    """One cell per decoder layer, the first one left. Click or drag paints the brush; so does Enter."""

    _esm = Path(__file__).with_name("layer_strip.js")
    modes = traitlets.List(traitlets.Enum(ACTIVATIONS), help="Mode of each layer.").tag(sync=True)
    brush = traitlets.Enum(ACTIVATIONS, "keep", help="Mode that a click paints.").tag(sync=True)
    _colors = traitlets.Dict(COLORS).tag(sync=True)

    def paint(self, mode: str, start: int = 0, stop: int | None = None) -> None:
        """Gives layers [start, stop) a mode."""
        stop = len(self.modes) if stop is None else stop
        self.modes = [mode if start <= i < stop else m for i, m in enumerate(self.modes)]
