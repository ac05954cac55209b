"""The Jupyter views, imported as slidedp.widgets."""
