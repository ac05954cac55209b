"""A run's metrics as TensorBoard event files: `launch(config, on_step=TensorBoard(folder))`."""

import math
import os
from typing import Any

from slidedp.errors import ConfigError


class TensorBoard:
    """Writes each row that a run gives to `on_step`, one scalar for each number."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            # Not at the top: TensorBoard is not needed for anything else, and slow to import.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard needs the package tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(os.fspath(folder))

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()
