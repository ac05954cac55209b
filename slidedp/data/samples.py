"""Prepared samples on disk: int32 arrays [samples, length] that are mapped, never read whole.

`labels[s, i]` is the target of position i, the token after `input_ids[s, i]` (already shifted);
slidedp.model.loss.IGNORED (-100) leaves a position out of the loss. `position_ids`, which there need
not be, count from 0 in each document of a sample: documents then do not see each other.
"""

import os
from pathlib import Path

import numpy as np
import torch

from slidedp.errors import ConfigError
from slidedp.model.loss import IGNORED

INPUT_IDS, LABELS, POSITION_IDS = "input_ids.npy", "labels.npy", "position_ids.npy"
SCAN = 2**22
"""Tokens that are looked at at once."""


class Samples:
    """A folder of prepared samples, opened memory-mapped and read-only."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.input_ids = _open(self.folder / INPUT_IDS)
        self.labels = _open(self.folder / LABELS)
        there = (self.folder / POSITION_IDS).exists()
        self.position_ids = _open(self.folder / POSITION_IDS) if there else None
        for name, array in ((LABELS, self.labels), (POSITION_IDS, self.position_ids)):
            if array is not None and self.input_ids.shape != array.shape:
                raise ConfigError(
                    f"{self.folder}: {INPUT_IDS} is {list(self.input_ids.shape)}, {name} is "
                    f"{list(array.shape)}: prepare both with the same [samples, length]"
                )

    @property
    def count(self) -> int:
        """Samples."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.input_ids.shape[1]

    def rows(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids and labels of the samples at `indices` [n], each int64 [n, length]."""
        input_ids = self.input_ids[indices].astype(np.int64)
        labels = self.labels[indices].astype(np.int64)
        return torch.from_numpy(input_ids), torch.from_numpy(labels)

    def targets(self, indices: np.ndarray) -> int:
        """Labels of the samples at `indices` that are not IGNORED."""
        return int((self.labels[indices] != IGNORED).sum())

    def positions(self, indices: np.ndarray) -> torch.Tensor | None:
        """position_ids of the samples at `indices` [n], int64 [n, length]; None if samples are whole."""
        if self.position_ids is None:
            return None
        return torch.from_numpy(self.position_ids[indices].astype(np.int64))

    def attended_length(self) -> float:
        """Tokens of the document that a token is in, in the mean."""
        if self.position_ids is None:
            return self.length
        squares, rows = 0, max(1, SCAN // self.length)
        for start in range(0, self.count, rows):
            following = self.position_ids[start : start + rows]
            ends = np.ones(following.shape, bool)
            ends[:, :-1] = following[:, 1:] == 0
            squares += int(((following[ends].astype(np.int64) + 1) ** 2).sum())
        return squares / (self.count * self.length)


def new_samples(folder: Path, count: int, length: int, positions: bool = False) -> list[np.ndarray]:
    """Empty arrays on disk to be filled, int32 [count, length]: input_ids, labels, and position_ids if
    asked for. OSError if the disk has no room for them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (INPUT_IDS, LABELS, POSITION_IDS) if positions else (INPUT_IDS, LABELS)
    arrays: list[np.ndarray] = [
        np.lib.format.open_memmap(folder / n, "w+", np.int32, (count, length)) for n in names
    ]
    for name in names:  # a write to mapped memory that the disk has no room for ends the process
        with open(folder / name, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return arrays


def write_samples(folder: str | Path, input_ids: np.ndarray, labels: np.ndarray) -> Samples:
    """Writes int32 [samples, length] arrays, which may themselves be mapped from disk."""
    folder = Path(folder)
    for name, array in ((INPUT_IDS, input_ids), (LABELS, labels)):
        _check(folder / name, array)
    if input_ids.shape != labels.shape:
        raise ConfigError(
            f"{folder}: input_ids {list(input_ids.shape)} and labels {list(labels.shape)} disagree: "
            "give both the same shape"
        )
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / INPUT_IDS, input_ids)
    np.save(folder / LABELS, labels)
    return Samples(folder)


def _open(path: Path) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file: a folder of prepared samples holds {INPUT_IDS} and {LABELS}"
        ) from error
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not a whole .npy file ({reason}): write it again") from error
    _check(path, array)
    return array


def _check(path: Path, array: np.ndarray) -> None:
    if array.dtype != np.int32 or array.ndim != 2 or 0 in array.shape:
        raise ConfigError(f"{path}: {array.dtype} {list(array.shape)}: expected int32 [samples, length]")
