"""Prepared samples on disk."""

import numpy as np
import pytest
import torch

from slidedp.data import samples as samples_on_disk
from slidedp.data.prepare import check_samples
from slidedp.data.samples import INPUT_IDS, LABELS, POSITION_IDS, Samples, new_samples, write_samples
from slidedp.errors import ConfigError


def arrays(count=5, length=4):
    ids = np.arange(count * length, dtype=np.int32).reshape(count, length)
    return ids, ids + 1


def test_what_is_written_is_read_by_row(tmp_path):
    input_ids, labels = arrays()
    labels[2, 1] = -100
    samples = write_samples(tmp_path / "new" / "folder", input_ids, labels)
    assert (samples.count, samples.length) == (5, 4)
    assert isinstance(samples.input_ids, np.memmap)
    rows = samples.rows(np.array([2, 0]))
    assert all(part.dtype == torch.int64 for part in rows)
    assert rows[0].tolist() == input_ids[[2, 0]].tolist()
    assert rows[1].tolist() == labels[[2, 0]].tolist()


def test_attended_length_is_the_mean_over_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_on_disk, "SCAN", 1)
    assert write_samples(tmp_path / "whole", *arrays()).attended_length() == 4
    *_, position_ids = new_samples(tmp_path / "bounded", 3, 4, positions=True)
    position_ids[:] = [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 0, 1]]
    lengths = [4] * 4 + [1] + [3] * 3 + [2] * 4
    assert Samples(tmp_path / "bounded").attended_length() == sum(lengths) / 12


@pytest.mark.parametrize("positions", [[1, 2, 3, 4], [0, 2, 3, 4], [0, 1, 1, 2]])
def test_positions_that_do_not_count_are_refused(tmp_path, positions):
    *_, position_ids = new_samples(tmp_path, 2, 4, positions=True)
    position_ids[:] = [[0, 1, 0, 1], positions]
    with pytest.raises(ConfigError, match=r"position_ids\.npy: expected positions that count up from 0"):
        check_samples(Samples(tmp_path), 1, 97)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        (INPUT_IDS, None, "no such file"),
        (LABELS, None, "no such file"),
        (LABELS, np.zeros((5, 4), np.int64), "int64 [5, 4]: expected int32"),
        (INPUT_IDS, np.zeros(20, np.int32), "[20]"),
        (INPUT_IDS, np.zeros((0, 4), np.int32), "input_ids.npy"),
        (LABELS, np.zeros((5, 3), np.int32), "labels.npy is [5, 3]"),
        (POSITION_IDS, np.zeros((5, 3), np.int32), "position_ids.npy is [5, 3]"),
        (LABELS, np.array([{}]), "not a whole .npy file"),
    ],
)
def test_folders_that_are_not_samples_are_refused(tmp_path, name, array, words):
    write_samples(tmp_path, *arrays())
    (tmp_path / name).unlink(missing_ok=True)
    if array is not None:
        np.save(tmp_path / name, array)
    with pytest.raises(ConfigError) as refusal:
        Samples(tmp_path)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_cut_off_file_is_refused(tmp_path):
    write_samples(tmp_path, *arrays())
    whole = (tmp_path / LABELS).read_bytes()
    for size in (len(whole) - 4, 5, 0):
        (tmp_path / LABELS).write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"labels\.npy: not a whole"):
            Samples(tmp_path)


def test_only_fitting_arrays_are_written(tmp_path):
    input_ids, labels = arrays()
    for first, second in ((input_ids, labels[:3]), (input_ids.astype(np.int64), labels)):
        with pytest.raises(ConfigError):
            write_samples(tmp_path / "none", first, second)
    assert not (tmp_path / "none").exists()
