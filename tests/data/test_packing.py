"""Documents in sequences: nothing is lost, nothing is mixed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.data import packing
from slidedp.data.packing import best_fit, separate, wrapped

PADDING = 7


def documents(lengths):
    """ids that are all different, targets of two thirds of them, ends."""
    total = sum(lengths)
    ids = np.arange(100, 100 + total, dtype=np.int32)
    return ids, np.arange(total) % 3 != 1, np.cumsum(lengths)


@pytest.mark.parametrize("shared", [True, False])
@given(st.lists(st.integers(1, 30), min_size=1, max_size=25), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_every_token_is_predicted_once_from_its_own_document(tmp_path_factory, shared, lengths, length):
    lengths = [*lengths, 2]  # at least one position
    ids, targets, ends = documents(lengths)
    folder = tmp_path_factory.mktemp("packed")
    samples = separate(ids, targets, ends, length, folder, shared=shared, padding=PADDING)
    wanted = []  # (input ids, labels) of every document or piece of one
    for start, end in zip(ends - lengths, ends, strict=True):
        for at in range(start, end - 1, length):
            piece = range(at, min(at + length, end - 1))
            label = [int(ids[i + 1]) if targets[i + 1] else -100 for i in piece]
            wanted.append(([int(ids[i]) for i in piece], label))
    found = []
    for row in range(samples.count):
        inputs, labels = samples.input_ids[row], samples.labels[row]
        if shared:
            starts = np.flatnonzero(samples.position_ids[row] == 0)
            assert starts[0] == 0
            parts = np.split(samples.position_ids[row], starts[1:])
            assert all(part.tolist() == list(range(len(part))) for part in parts)
        else:
            assert samples.position_ids is None
            starts = np.array([0, *np.flatnonzero(inputs == PADDING)[:1]])
            starts = starts[starts < length]
        pieces = zip(np.split(inputs, starts[1:]), np.split(labels, starts[1:]), strict=True)
        for part, label in pieces:
            if part[0] == PADDING:
                assert (part == PADDING).all() and (label == -100).all()
            else:
                found.append((part.tolist(), label.tolist()))
    assert sorted(found) == sorted(wanted)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_bins_hold_what_fits_and_are_few(sizes):
    sizes = np.array(sizes)
    bins = best_fit(sizes, 10)
    loads = np.bincount(bins, sizes)
    assert loads.max() <= 10 and loads.min() > 0
    # Best fit decreasing is never above 11/9 of the optimum and 4 bins; sum / 10 bounds the optimum.
    halves = (sizes > 5).sum()
    assert len(loads) <= 11 / 9 * max(np.ceil(sizes.sum() / 10), halves, 1) + 4 + (sizes == 5).sum()


def test_blocks_do_not_show(tmp_path, monkeypatch):
    ids, targets, ends = documents([5, 1, 17, 3, 9, 2, 30])
    arrays = {}
    for block in (1, 2**22):
        monkeypatch.setattr(packing, "BLOCK", block)
        folder = tmp_path / str(block)
        stream = wrapped(ids, targets, 4, folder / "wrapped")
        bounded = separate(ids, targets, ends, 8, folder / "bounded", shared=True, padding=PADDING)
        arrays[block] = [
            *(a.tolist() for a in (stream.input_ids, stream.labels, bounded.input_ids, bounded.labels)),
            bounded.position_ids.tolist(),
        ]
    assert arrays[1] == arrays[2**22]


def test_a_stream_predicts_targets_only(tmp_path):
    ids, targets, _ = documents([23])
    samples = wrapped(ids, targets, 4, tmp_path)
    assert samples.input_ids.flatten().tolist() == ids[:20].tolist()
    assert samples.labels.flatten().tolist() == np.where(targets, ids, -100)[1:21].tolist()
    assert samples.position_ids is None
