"""The data of a config to samples: read, encode, pack, check.

Neither text nor tokens are ever in memory whole: tokens go to temporary files beside the samples, and
from there to the samples a block at a time.
"""

import dataclasses
import tempfile
import warnings
import zlib
from array import array
from pathlib import Path
from typing import IO

import numpy as np
from transformers import PreTrainedTokenizerBase

from slidedp.config import Config, Data
from slidedp.data import packing
from slidedp.data.encode import Encoded, encode
from slidedp.data.order import split
from slidedp.data.progress import progress
from slidedp.data.samples import INPUT_IDS, LABELS, POSITION_IDS, SCAN, Samples
from slidedp.data.sources import open_source
from slidedp.errors import ConfigError, reason
from slidedp.model.loss import IGNORED


def prepare(
    data: Data, tokenizer: PreTrainedTokenizerBase, sequence_length: int, folder: str | Path
) -> Samples:
    """The samples of `data.path`: prepared ones as they are, others packed and written to `folder`.

    A file of text is one document, as is a row of a table. Empty texts are left out. A preparation of
    more than seconds shows its progress.
    """
    if is_prepared(data):
        samples = Samples(data.path)
        if samples.length != sequence_length:
            raise ConfigError(
                f"data.path={data.path!r}: the prepared samples have {samples.length} tokens: set "
                f"sequence_length={samples.length} (it is {sequence_length}), or prepare them again"
            )
        return samples
    try:
        return _prepare(data, tokenizer, sequence_length, Path(folder))
    except OSError as error:  # of writing: what cannot be read is refused as it is read
        raise ConfigError(
            f"{folder}: {reason(error)}: the samples of data.path={data.path!r} are written there, 8 to 12 "
            "bytes a token: make room, or set run_folder to another disk"
        ) from error


def _prepare(data: Data, tokenizer: PreTrainedTokenizerBase, sequence_length: int, folder: Path) -> Samples:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryFile(dir=folder) as ids_file,
        tempfile.TemporaryFile(dir=folder) as targets_file,
    ):
        ends, all_text = _write_tokens(data, tokenizer, sequence_length, ids_file, targets_file)
        kind = data.packing or ("wrapped" if all_text else "bounded")
        tokens = int(ends[-1]) if len(ends) else 0
        if tokens < 2 or (kind == "wrapped" and tokens <= sequence_length):
            raise ConfigError(
                f"data.path={data.path!r}: {tokens} tokens in {len(ends)} document(s), too few for one "
                f"sequence: give more text, or lower sequence_length ({sequence_length})"
            )
        ids, targets = np.memmap(ids_file, np.int32, "r"), np.memmap(targets_file, np.bool_, "r")
        if kind == "wrapped":
            return packing.wrapped(ids, targets, sequence_length, folder)
        return packing.separate(
            ids,
            targets,
            ends,
            sequence_length,
            folder,
            shared=kind == "bounded",
            padding=tokenizer.eos_token_id or 0,
        )


def sources(data: Data) -> list[Data]:
    """`data`, and the held-out data of `data.eval_path` if there is some, to be read in the same way."""
    if data.eval_path is None:
        return [data]
    return [data, dataclasses.replace(data, path=data.eval_path, split=data.eval_split, eval_path=None)]


def prepare_held_out(
    config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: str | Path
) -> Samples | None:
    """The checked samples of `data.eval_path`, if it is set."""
    for data in sources(config.data)[1:]:
        try:
            samples = prepare(data, tokenizer, config.sequence_length, folder)
            check_samples(samples, 1, vocab_size, f"data.path={data.path!r}")
        except ConfigError as error:
            raise ConfigError(f"data.eval_path: {error}") from error
        return samples
    return None


def is_prepared(data: Data) -> bool:
    """Whether `data` names a folder of prepared samples."""
    return (Path(data.path) / INPUT_IDS).exists() or (Path(data.path) / LABELS).exists()


def _write_tokens(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    ids_file: IO[bytes],
    targets_file: IO[bytes],
) -> tuple[np.ndarray, bool]:
    """Appends all documents to the files; returns the end of each, and whether all are text."""
    ends, total, all_text, before, repeated = array("q"), 0, True, "", 0
    source = open_source(data)
    with progress("tokenising", source.total, source.unit) as bar:
        for batch, share in encode(source.documents, tokenizer):
            for document in batch:
                all_text &= not document.whole
                repeated += document.whole and document.where == before
                before = document.where
                fitting = _fitting(data, document, sequence_length)
                if fitting is None:
                    continue
                ids_file.write(fitting.ids.tobytes())
                targets_file.write(fitting.targets.tobytes())
                total += len(fitting.ids)
                if document.last:
                    ends.append(total)
            bar.update(share)
        bar.update((source.total or bar.n) - bar.n)  # shares are rounded
    if repeated:
        warnings.warn(
            f"data.path={data.path!r}: the chat template writes an answer differently once others follow, so "
            f"conversations with several answers are learnt one answer at a time: {repeated} documents more",
            stacklevel=1,
        )
    ids_file.flush()
    targets_file.flush()
    return np.array(ends, np.int64), all_text


def _fitting(data: Data, document: Encoded, sequence_length: int) -> Encoded | None:
    """The document as it goes into a sequence; None if it is left out."""
    tokens = len(document.ids)
    if not document.whole or data.packing == "wrapped" or tokens <= sequence_length + 1:
        return document
    if data.over_long == "refuse":
        raise ConfigError(
            f"{document.where}: {tokens - 1} tokens to predict, sequence_length is {sequence_length}: raise "
            "it, take the row out, or set data.over_long to 'cut' or 'drop'"
        )
    kept = slice(sequence_length + 1)
    if data.over_long == "drop" or not document.targets[kept].any():
        return None
    return document._replace(ids=document.ids[kept], targets=document.targets[kept])


def check_samples(
    samples: Samples, batch_size: int, vocab_size: int, source: str | None = None, held_out: float = 0.0
) -> dict[str, int]:
    """Refuses samples that cannot fill one batch, or that a model of `vocab_size` cannot read.

    `source` is what the user knows them by; None takes their folder. The fraction `held_out` of them
    fills no batch. Returns what tells them from others: their `count`, and the CRC-32 of each array by the
    name of its file.
    """
    source = source or str(samples.folder)
    count = len(split(samples.count, held_out, seed=0)[0])
    if count < batch_size:
        raise ConfigError(
            f"{source}: dataset too short for one batch: {count} sequences of "
            f"{samples.length} tokens, batch_size is {batch_size}: give more text, or lower "
            "batch_size or sequence_length"
        )
    arrays = {INPUT_IDS: samples.input_ids, LABELS: samples.labels}
    if samples.position_ids is not None:
        arrays[POSITION_IDS] = samples.position_ids
    sums = dict.fromkeys(arrays, 0)
    rows, has_target = max(1, SCAN // samples.length), False
    with progress("checking", samples.count, " sequences") as bar:
        for start in range(0, samples.count, rows):
            block = {name: array[start : start + rows] for name, array in arrays.items()}
            targets = block[LABELS][block[LABELS] != IGNORED]
            has_target |= targets.size > 0
            _check_ids(f"{source}: {INPUT_IDS}", block[INPUT_IDS], vocab_size)
            _check_ids(f"{source}: {LABELS}", targets, vocab_size)
            if POSITION_IDS in block:
                _check_positions(f"{source}: {POSITION_IDS}", block[POSITION_IDS])
            for name, part in block.items():
                sums[name] = zlib.crc32(np.ascontiguousarray(part).data, sums[name])
            bar.update(len(block[INPUT_IDS]))
    if not has_target:
        raise ConfigError(
            f"{source}: {LABELS}: every label is {IGNORED}, so there is nothing to learn: "
            "prepare the samples with targets"
        )
    return {"count": samples.count, **sums}


def _check_ids(where: str, ids: np.ndarray, vocab_size: int) -> None:
    if ids.size == 0:
        return
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise ConfigError(
            f"{where}: token id {lowest if lowest < 0 else highest}, the model's vocabulary is 0 to "
            f"{vocab_size - 1}: use the model's own tokenizer (data.tokenizer), or prepare the "
            "samples with it"
        )


def _check_positions(where: str, positions: np.ndarray) -> None:
    follows = (positions[:, 1:] == positions[:, :-1] + 1) | (positions[:, 1:] == 0)
    if (positions[:, 0] != 0).any() or not follows.all():
        raise ConfigError(
            f"{where}: expected positions that count up from 0, and from 0 again where a document starts"
        )
