"""Encoded documents on disk to samples, a block of rows at a time."""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path

import numpy as np

from slidedp.data.progress import progress
from slidedp.data.samples import Samples, new_samples
from slidedp.model.loss import IGNORED

BLOCK = 2**22
"""Tokens that are written at once."""


def wrapped(ids: np.ndarray, targets: np.ndarray, length: int, folder: Path) -> Samples:
    """One stream, cut every `length` tokens: the label of a token is the one behind it in the stream.

    ids int32 [tokens], targets bool [tokens]; gives (tokens - 1) // length samples.
    """
    count = (len(ids) - 1) // length
    input_ids, labels = new_samples(folder, count, length)
    rows = max(1, BLOCK // length)
    with progress("packing", count, " sequences") as bar:
        for row in range(0, count, rows):
            start, stop = row * length, min(row + rows, count) * length
            following = np.where(targets[start + 1 : stop + 1], ids[start + 1 : stop + 1], IGNORED)
            input_ids[row : row + rows] = ids[start:stop].reshape(-1, length)
            labels[row : row + rows] = following.reshape(-1, length)
            bar.update(stop // length - row)
    return Samples(folder)


def separate(
    ids: np.ndarray,
    targets: np.ndarray,
    ends: np.ndarray,
    length: int,
    folder: Path,
    *,
    shared: bool,
    padding: int,
) -> Samples:
    """Documents that do not see each other: as many as fit share a sample, or each has one of its own.

    `ends` int64 [documents]: the end of each in `ids`. A document of n tokens takes n - 1 positions,
    whose labels are its tokens from the second on; one that takes more than `length` goes on in further
    samples as if it began there. What stays free is filled with `padding`, no target.
    """
    starts, lengths = _parts(ends, length)
    bins = best_fit(lengths, length) if shared else np.arange(len(starts))
    order = np.argsort(bins, kind="stable")
    starts, lengths, bins = starts[order], lengths[order], bins[order]
    count = int(bins[-1]) + 1
    input_ids, labels, *positions = new_samples(folder, count, length, positions=shared)
    rows = max(1, BLOCK // length)
    with progress("packing", count, " sequences") as bar:
        for row in range(0, count, rows):
            number = min(rows, count - row)
            block = np.full((3, number, length), [[[padding]], [[IGNORED]], [[0]]], np.int32)
            free = np.zeros(number, np.int64)
            first, last = np.searchsorted(bins, (row, row + number))
            for start, size, bin in zip(
                starts[first:last], lengths[first:last], bins[first:last], strict=True
            ):
                at = free[bin - row]
                part = block[:, bin - row, at : at + size]
                part[0] = ids[start : start + size]
                behind = slice(start + 1, start + size + 1)
                part[1] = np.where(targets[behind], ids[behind], IGNORED)
                part[2] = np.arange(size)
                free[bin - row] += size
            for i in np.flatnonzero(free < length):  # padding is one more document: nothing of it is seen
                block[2, i, free[i] :] = np.arange(length - free[i])
            input_ids[row : row + number], labels[row : row + number] = block[0], block[1]
            if positions:
                positions[0][row : row + number] = block[2]
            bar.update(number)
    return Samples(folder)


def _parts(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and number of positions of each document, or of each piece of a long one."""
    begins = np.concatenate(([0], ends[:-1]))
    positions = ends - begins - 1
    pieces = -(-positions // length)  # none of a document of a single token
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(begins, pieces) + number * length
    return starts, np.minimum(length, np.repeat(positions, pieces) - number * length)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64 [items]: the longest first, each into the fullest bin with room."""
    bins = np.empty(len(lengths), np.int64)
    by_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # those of by_room that have a bin, sorted
    count = 0
    for item in np.argsort(-lengths, kind="stable"):
        size = int(lengths[item])
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            bins[item] = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        else:
            room, bins[item] = capacity, count
            count += 1
        if room > size:
            if not by_room[room - size]:
                insort(rooms, room - size)
            by_room[room - size].append(int(bins[item]))
    return bins
