"""The folders that checkpoints are in: their names, their indexes, which is the last, which have to go."""

import json
import os
import shutil
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from slidedp.errors import ConfigError

CHECKPOINTS = "checkpoints"
"""Folder of the run folder that holds the checkpoints."""
LATEST = "latest"
INDEX, ASSETS = "index.json", "assets"
FORMAT = 2


class Progress(NamedTuple):
    """Where a run is at a step boundary."""

    step: int = 0
    """Steps done: the next one has this number, and every unit is at this version."""
    updates: int = 0
    """Steps that changed the state (a skipped one did not): AdamW's step count."""


def folder_name(step: int) -> str:
    """The folder of a checkpoint after `step` steps."""
    return f"step-{step:08}"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(_time(path), path) for path in folder.glob("step-*") if (path / INDEX).is_file()]
    return [path for _, path in sorted(found)]


def _time(path: Path) -> int:
    try:
        return int(json.loads((path / INDEX).read_text())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # a damaged one: whoever takes it by name is told so


def find(resume: str | Path, run_folder: str | None) -> Path:
    """The checkpoint that `resume` names: its own folder, a run folder (its last one), or `latest`: the
    last one of `run_folder`, or of all runs in `runs/` where the config names none."""
    if str(resume) == LATEST:
        folders = [Path(run_folder)] if run_folder else sorted(Path("runs").glob("*"))
        found = [path for folder in folders for path in checkpoints(folder / CHECKPOINTS)]
        if not found:
            raise ConfigError(
                f"resume='latest': no checkpoint in {run_folder or 'runs'}: give a checkpoint's folder, or "
                "start without resume"
            )
        return max(found, key=_time).absolute()
    path = Path(resume)
    if (path / INDEX).is_file():
        return path.absolute()
    found = checkpoints(path / CHECKPOINTS)
    if not found:
        raise ConfigError(
            f"resume={str(resume)!r}: no checkpoint there: give a folder step-<n> that holds {INDEX}, a run "
            "folder that holds some, or 'latest'"
        )
    return found[-1].absolute()


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint; refuses one that is not as it was written."""
    try:
        content = json.loads((folder / INDEX).read_text())
        whole = content.pop("crc32") == json_crc(content)
    except OSError as error:
        raise ConfigError(f"{folder / INDEX}: {error.strerror}: give a checkpoint's folder") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise damaged(folder / INDEX, "is not as it was written")
    if content["format"] != FORMAT:
        raise ConfigError(f"{folder}: format {content['format']}, this version reads {FORMAT}")
    return content


def json_crc(content: dict[str, Any]) -> int:
    """CRC-32 of an index without its own."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def damaged(path: Path, what: str) -> ConfigError:
    """The refusal of a file that is not as it was written, and what to take instead."""
    folder = next(parent for parent in path.parents if (parent / INDEX).exists())
    others = [p.name for p in checkpoints(folder.parent) if p.name != folder.name]
    remedy = f"take {others[-1]} beside it" if others else "no other checkpoint is beside it"
    return ConfigError(f"{path}: {what}: the checkpoint is damaged: {remedy}")


# --- what a save does to them ------------------------------------------------------------------------


def publish(partial: Path, path: Path) -> None:
    """Gives a whole checkpoint its name, so that not even a power cut leaves part of one."""
    fsync(partial)
    if path.exists():  # of a run that went on from an earlier step
        os.rename(path, path.with_name(f".{path.name}.old.partial"))
    os.rename(partial, path)
    fsync(path.parent)
    remove_partial(path.parent)


def prune(folder: Path, keep_last: int) -> None:
    """Takes away all checkpoints but the last."""
    for path in checkpoints(folder)[:-keep_last]:
        # Under another name first: what is half deleted is no checkpoint.
        os.rename(path, path.with_name(f".{path.name}.partial"))
    remove_partial(folder)


def set_aside(folder: Path, step: int) -> Path | None:
    """Moves the checkpoints of later steps into a folder of their own, which it returns: a run goes on from
    `step`, and they are not of its past. None where there are none."""
    later = [path for path in checkpoints(folder) if path.name > folder_name(step)]
    if not later:
        return None
    aside = folder / f"aside-{datetime.now():%Y%m%d-%H%M%S-%f}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    return aside


def remove_partial(folder: Path) -> None:
    """Takes away what saves that were killed have left."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def fsync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
