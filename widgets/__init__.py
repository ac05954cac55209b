"""The Jupyter views, imported as slidedp.widgets."""

from slidedp.widgets.dashboard import Dashboard
from slidedp.widgets.timeline import timeline_figure
from slidedp.widgets.trace_view import TraceView

__all__ = ["Dashboard", "TraceView", "timeline_figure"]
