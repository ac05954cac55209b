"""Settings against their declarations: what a value may be, in one line where it is not."""

import dataclasses
import difflib
import functools
import math
import os
import types
import typing
from typing import Any

from slidedp.errors import ConfigError

AUTO = "auto"
"""Where a table is expected: the program chooses."""


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    """Refuses a value that is not one of `accepted`; `name` is the setting's full name."""
    if value not in accepted:
        raise ConfigError(f"{name}={value!r}: expected one of {', '.join(accepted)}")


def at_least(name: str, value: Any, minimum: float, kind: Any = int) -> None:
    """Refuses a number below `minimum`, and one that is not finite."""
    if not minimum <= value < math.inf:
        noun = "an integer" if kind is int else "a finite number"
        raise ConfigError(f"{name}={value!r}: expected {noun} of at least {minimum}")


def from_dict(cls: Any, values: Any, where: str) -> Any:
    """A dataclass, and those in it, from a table; `where` is the full name of the setting that it is."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where or 'config'}={values!r}: expected a table of settings")
    hints = _hints(cls)
    taken = {}
    for name, value in values.items():
        full = f"{where}.{name}" if where else name
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{full}: unknown setting; {hint}accepted: {', '.join(hints)}")
        nested = dataclasses.is_dataclass(hints[name]) and value != AUTO
        taken[name] = from_dict(hints[name], value, full) if nested else value
    missing = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in taken
    ]
    if missing:
        raise ConfigError(f"{where + '.' if where else ''}{missing[0]}: missing, and has no default")
    return cls(**taken)


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


@functools.cache
def _plain_types(cls: Any) -> dict[str, set[Any]]:
    """By field, the types whose values need no further look: a policy makes thousands of layouts."""
    plain = {str, int, float, bool, type(None)}
    return {name: plain.intersection(_kinds(hint)) for name, hint in _hints(cls).items()}


def check_types(settings: Any, where: str) -> None:
    """Turns a value into its field's type where nothing is lost (a path, a list, a whole number), as a
    TOML file or a notebook gives it; refuses every other."""
    cls: Any = type(settings)
    plain = _plain_types(cls)
    for name, hint in _hints(cls).items():
        value = getattr(settings, name)
        if type(value) in plain[name]:
            continue
        taken = _coerce(hint, value, where + name)
        if taken is not value:
            object.__setattr__(settings, name, taken)


def _coerce(hint: Any, value: Any, full: str) -> Any:
    kinds = _kinds(hint)
    plain = tuple(typing.get_origin(kind) or kind for kind in kinds)
    if tuple in plain and isinstance(value, list | tuple):
        element: Any = typing.get_args(kinds[plain.index(tuple)])[0]
        if not dataclasses.is_dataclass(element):
            return value if isinstance(value, tuple) else tuple(value)
        return tuple(
            item if type(item) is element else from_dict(element, item, f"{full}[{i}]")
            for i, item in enumerate(value)
        )
    if str in plain and isinstance(value, os.PathLike):
        return os.fspath(value)
    if float in plain and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and bool not in plain) or not isinstance(value, plain):
        names = ", ".join(kind.__name__ for kind in plain if kind is not type(None))
        raise ConfigError(f"{full}={value!r}: expected {names}")
    return value
