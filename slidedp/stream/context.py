"""What a rank has for the whole run, whatever its layout."""

from collections.abc import Callable
from typing import NamedTuple

from slidedp.config import Config
from slidedp.host.state import HostState
from slidedp.stream.device import Abort, Device
from slidedp.stream.functions import ModelFunctions
from slidedp.stream.gates import Gates


class Context(NamedTuple):
    """Shared by its engines, one after another, and by their threads."""

    config: Config
    device: Device
    rank: int
    state: HostState
    gates: Gates
    functions: ModelFunctions
    abort: Abort
    at_visit: Callable[[], None]
    """Called by the compute thread at every visit: a step can take minutes, and news must not wait for it."""

    @property
    def ranks(self) -> int:
        """Of the run."""
        return int(self.config.ranks or 1)
