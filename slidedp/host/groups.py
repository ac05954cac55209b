"""Parameter groups: which elements of a unit have which learning rate and weight decay."""

from fnmatch import fnmatchcase
from typing import NamedTuple

from slidedp.config import Optimizer
from slidedp.errors import ConfigError
from slidedp.model.units import Parameter, Unit, aligned


class Segment(NamedTuple):
    """Elements [start, stop) of a unit's buffer that are updated alike."""

    start: int
    stop: int
    lr_factor: float
    weight_decay: float

    def within(self, start: int, stop: int) -> "Segment":
        """The part that lies in [start, stop); it may be empty."""
        return self._replace(start=max(self.start, start), stop=min(self.stop, stop))


def segments(unit: Unit, settings: Optimizer) -> list[Segment]:
    """What a unit's buffer consists of, padding included: as few segments as there can be."""
    found: list[Segment] = []
    for parameter in unit.views or unit.parameters:
        factors = _factors(unit, parameter, settings)
        stop = aligned(parameter.offset + parameter.numel)
        if found and found[-1][2:] == factors:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(Segment(parameter.offset, stop, *factors))
    return found


def _factors(unit: Unit, parameter: Parameter, settings: Optimizer) -> tuple[float, float]:
    """(lr_factor, weight_decay) of a parameter."""
    decay = settings.weight_decay if parameter.offset < unit.decayed else 0.0
    for group in settings.groups:
        if fnmatchcase(parameter.name, group.pattern):
            return group.lr_factor, decay if group.weight_decay is None else group.weight_decay
    return 1.0, decay


def check_groups(units: tuple[Unit, ...], settings: Optimizer) -> None:
    """Refuses patterns that match nothing, which would silently train otherwise, and a frozen model."""
    names = [parameter.name for unit in units for parameter in unit.views or unit.parameters]
    for group in settings.groups:
        if not any(fnmatchcase(name, group.pattern) for name in names):
            raise ConfigError(
                f"optimizer.groups: pattern {group.pattern!r} matches no parameter: names are such as "
                f"{names[0]} and {names[1]}"
            )
    for pattern in settings.freeze:
        if not any(fnmatchcase(unit.name, pattern) for unit in units):
            raise ConfigError(
                f"optimizer.freeze: {pattern!r} matches no unit: they are embed, layers.0 to "
                f"{units[-2].name}, head"
            )
    if all(unit.frozen for unit in units):
        raise ConfigError("optimizer.freeze: every unit is frozen, so there is nothing to train")
