"""A bar for each part of a preparation that takes more than seconds."""

from typing import Any

from tqdm.auto import tqdm


def progress(what: str, total: int | None, unit: str) -> Any:
    """A tqdm bar that shows after two seconds, and goes when it is closed. `total` None: not known."""
    return tqdm(total=total, unit=unit, unit_scale=True, delay=2, mininterval=1, leave=False, desc=what)
