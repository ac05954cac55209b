"""The Jupyter views, imported as slidedp.widgets."""

from slidedp.widgets.dashboard import Dashboard

__all__ = ["Dashboard"]
