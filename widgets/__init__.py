"""The Jupyter views, imported as slidedp.widgets."""

from slidedp.widgets.awaiting import tell_when_done
from slidedp.widgets.dashboard import Dashboard
from slidedp.widgets.layer_strip import LayerStrip
from slidedp.widgets.layout_editor import LayoutEditor
from slidedp.widgets.phases import phases_figure
from slidedp.widgets.policy_stepper import PolicyStepper
from slidedp.widgets.timeline import timeline_figure
from slidedp.widgets.trace_view import TraceView

__all__ = [
    "Dashboard",
    "LayerStrip",
    "LayoutEditor",
    "PolicyStepper",
    "TraceView",
    "phases_figure",
    "timeline_figure",
]

tell_when_done()
