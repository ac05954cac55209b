"""The Jupyter views, imported as slidedp.widgets."""

from slidedp.widgets.dashboard import Dashboard
from slidedp.widgets.timeline import timeline_figure

__all__ = ["Dashboard", "timeline_figure"]
