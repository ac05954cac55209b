"""Resuming: a checkpoint is checked before anything is allocated, and verified as it is read."""

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slidedp.checkpoint.folder import Progress, read_index
from slidedp.checkpoint.shards import (
    PIECE,
    THREADS,
    check_crc,
    check_size,
    read_shapes,
    read_shard,
    shard_name,
    shard_tensors,
)
from slidedp.config import Config
from slidedp.errors import ConfigError
from slidedp.host.state import HostState
from slidedp.model.units import Unit

DATA_SETTINGS = ("seed", "batch_size", "sequence_length", "data.eval_fraction")
"""Settings that a run must share with its checkpoint: they decide which samples come next."""


def check(folder: Path, units: tuple[Unit, ...], config: Config) -> Progress:
    """Where the checkpoint stands. Refuses, by index, sizes and headers alone, what cannot be resumed."""
    index = read_index(folder)
    names = [shard_name(unit) for unit in units]
    for name in dict.fromkeys([*names, *(n for n in index["files"] if n.endswith(".safetensors"))]):
        if name not in names or name not in index["files"]:
            whose = "the model" if name in names else "the checkpoint"
            raise ConfigError(f"{folder}: only {whose} has {name}: the checkpoint is of another model")
    for unit in units:
        path = folder / shard_name(unit)
        check_size(path, index["files"][path.name]["bytes"])
        with open(path, "rb") as file:
            shapes = read_shapes(file, path)
        wanted = {name: list(parameter.shape) for name, _, parameter in shard_tensors(unit)}
        for name in dict.fromkeys([*wanted, *shapes]):
            frozen = name not in shapes and not name.startswith("master")  # when it was saved
            if shapes.get(name) != wanted.get(name) and not frozen:
                problem = f"is {shapes.get(name, 'missing')}, the model needs {wanted.get(name)}"
                if name not in wanted:
                    problem = "has no place in the model"
                raise ConfigError(f"{path}: {name} {problem}: the checkpoint is of another model")
    for name in DATA_SETTINGS:
        saved: Any = index["config"]
        given: Any = config
        for part in name.split("."):
            saved, given = saved[part], getattr(given, part)
        if saved != given:
            raise ConfigError(
                f"{name}={given!r}: the checkpoint was written with {saved!r}, which decides what samples "
                f"come next: set {name}={saved!r}"
            )
    if index["step"] >= config.steps:
        raise ConfigError(
            f"steps={config.steps}: the checkpoint has done {index['step']} already: raise steps to go on"
        )
    return Progress(index["step"], index["updates"])


def check_samples(folder: Path, found: dict[str, int]) -> None:
    """Refuses data that are not those of the checkpoint; see `slidedp.data.prepare.check_samples`."""
    saved = read_index(folder)["samples"]
    if saved == found:
        return
    given, written = f"{found['count']} samples", f"{saved['count']}"
    if found["count"] == saved["count"]:
        given, written = "other tokens, targets or documents", "as many samples"
    raise ConfigError(
        f"data.path: {given}, the checkpoint was written with {written}: give the data, the tokenizer and "
        "the packing of that run"
    )


def load(folder: Path, state: HostState) -> None:
    """Reads a checked checkpoint straight into the state, and verifies every byte of it.

    Moments of a unit that is frozen now are left out; those of one that was frozen then begin at zero.
    """
    files = read_index(folder)["files"]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda unit: read_shard(folder, files, unit, state), state.units))
    state.refresh_working()


def verify(folder: Path) -> None:
    """Reads every byte of a checkpoint; refuses one that is not as it was written."""
    files = read_index(folder)["files"]

    def one(name: str) -> None:
        check_size(folder / name, files[name]["bytes"])
        crc = 0
        with open(folder / name, "rb") as file:
            while piece := file.read(PIECE):
                crc = zlib.crc32(piece, crc)
        check_crc(folder / name, crc, files[name]["crc32"])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, files))
