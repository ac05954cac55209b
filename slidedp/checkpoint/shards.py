"""A unit of the state as a safetensors file: written and read in pieces."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from slidedp.checkpoint.folder import INDEX, damaged
from slidedp.checkpoint.source import KINDS, Source
from slidedp.errors import ConfigError
from slidedp.host.state import HostState
from slidedp.model.units import Parameter, Unit

THREADS = 4
"""Shards that are written or read at once: one thread alone is slower than a disk or a page cache."""
PIECE = 2**20
"""Elements that are read, checked and written at once."""


def shard_name(unit: Unit) -> str:
    """The unit's file."""
    return f"{unit.name}.safetensors"


def shard_tensors(unit: Unit, frozen: bool = False) -> Iterator[tuple[str, str, Parameter]]:
    """(name, kind, parameter) of the tensors of a unit's shard, as they lie in the file."""
    for kind in KINDS[:1] if frozen else KINDS:
        for parameter in unit.parameters:
            yield f"{kind}.{parameter.name}", kind, parameter


def write_shard(file: IO[bytes], unit: Unit, source: Source) -> dict[str, int]:
    """Writes a unit piece by piece; returns bytes and CRC-32. ConfigError for a value that is not finite: the
    state is spoiled, and no checkpoint of it may take the place of a good one."""
    header, offset = {}, 0
    for name, _, parameter in shard_tensors(unit, unit.frozen):
        end = offset + 4 * parameter.numel
        header[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(head)
    file.write(head)
    buffer = np.empty(PIECE, np.float32)
    for _, kind, parameter in shard_tensors(unit, unit.frozen):
        for start, stop in _pieces(parameter):
            piece = source.read(kind, start, stop, buffer)
            if not np.isfinite(piece).all():
                raise ConfigError(f"{kind} of {parameter.name} is not finite: resume from one before")
            crc = zlib.crc32(piece.data, crc)
            file.write(piece.data)
    file.flush()
    return {"bytes": len(head) + offset, "crc32": crc}


def read_shard(folder: Path, files: dict[str, Any], unit: Unit, state: HostState) -> None:
    """Reads a unit straight into the state; `files` are those of the index. Moments of a unit that is frozen
    now are left out."""
    path = folder / shard_name(unit)
    with open(path, "rb") as file:
        shapes = read_shapes(file, path)
        length = file.tell()
        file.seek(0)
        crc = zlib.crc32(file.read(length))
        tensors = {name: (kind, parameter) for name, kind, parameter in shard_tensors(unit)}
        for name in shapes:  # in the order of the file, which need not be that of the model today
            kind, parameter = tensors[name]
            array: np.ndarray = getattr(state.unit(unit), kind)
            for start, stop in _pieces(parameter):
                piece = array[start:stop].data.cast("B")
                if unit.frozen and kind != "master":
                    piece = memoryview(bytearray(len(piece)))
                file.readinto(piece)
                crc = zlib.crc32(piece, crc)
    check_crc(path, crc, files[path.name]["crc32"])


def read_shapes(file: IO[bytes], path: Path) -> dict[str, Any]:
    """The shapes in a shard's header; leaves `file` at the first byte behind it."""
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > 2**27:
            raise ValueError("too long")
        return {name: tensor["shape"] for name, tensor in json.loads(file.read(length)).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, "has no readable header") from error


def _pieces(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of its elements, counted from the beginning of the unit."""
    end = parameter.offset + parameter.numel
    for start in range(parameter.offset, end, PIECE):
        yield start, min(start + PIECE, end)


def check_size(path: Path, wanted: int) -> None:
    """Refuses a file that is missing or has another size."""
    size = path.stat().st_size if path.is_file() else None
    if size != wanted:
        what = "is missing" if size is None else f"has {size:,} bytes and not {wanted:,}"
        raise damaged(path, what)


def check_crc(path: Path, crc: int, wanted: int) -> None:
    """Refuses a file whose CRC-32 is another."""
    if crc != wanted:
        raise damaged(path, f"has another CRC-32 than {INDEX} says")
