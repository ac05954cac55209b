"""A state of small units, and what a checkpoint of one holds."""

import torch

from slidedp import Config, Data
from slidedp.checkpoint.resume import check, load
from slidedp.host.state import HostState

SIZES = [(2000, 0), (1500, 70), (1500, 70), (0, 100)]
CONFIG = Config(model="none", data=Data(path="none"))


def arrays(state):
    """All state, to the bit."""
    return [a.tobytes() for unit in state.units for a in state.unit(unit) if a is not None]


def loaded(folder, units, dtype=torch.float32):
    """(progress, all state) of a checkpoint."""
    state = HostState(units, dtype)
    try:
        progress = check(folder, units, CONFIG)
        load(folder, state)
        return progress, arrays(state)
    finally:
        state.close()
