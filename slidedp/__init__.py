"""SlideDP: fine-tune every parameter of a language model that does not fit in GPU memory.

run = launch(Config(model="folder or hub id", data=Data(path="texts/")))
run.wait().export("tuned/")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slidedp.config import Checkpoint, Config, Data, Optimizer, ParameterGroup
    from slidedp.errors import ConfigError
    from slidedp.layout import Layout
    from slidedp.preflight import Plan, plan
    from slidedp.session import CheckpointFailed, Run, RunFailed, launch
    from slidedp.telemetry import open_run
    from slidedp.tensorboard import TensorBoard

__all__ = [
    "Checkpoint",
    "CheckpointFailed",
    "Config",
    "ConfigError",
    "Data",
    "Layout",
    "Optimizer",
    "ParameterGroup",
    "Plan",
    "Run",
    "RunFailed",
    "TensorBoard",
    "launch",
    "open_run",
    "plan",
]

# Imported when asked for: every process of a run imports this package, and a rank or the worker needs
# neither pandas nor what launches runs.
_MODULES = {
    "CheckpointFailed": "session",
    "ConfigError": "errors",
    "Layout": "layout",
    "Plan": "preflight",
    "Run": "session",
    "RunFailed": "session",
    "TensorBoard": "tensorboard",
    "launch": "session",
    "open_run": "telemetry",
    "plan": "preflight",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'config')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
