"""SlideDP: fine-tune every parameter of a language model that does not fit in GPU memory.

run = launch(Config(model="folder or hub id", data=Data(path="texts/")))
run.wait().export("tuned/")
"""

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
