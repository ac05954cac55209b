"""Text to samples: documents are tokenised, joined into one stream and cut into sequences.

Neither the text nor its tokens are ever in memory whole: pieces of files are tokenised in batches,
their tokens go to a temporary file, and the samples are two shifted views of it.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from transformers import PreTrainedTokenizerBase

from slidedp.config import Data
from slidedp.data.samples import INPUT_IDS, LABELS, Samples, write_samples
from slidedp.errors import ConfigError
from slidedp.model.loss import IGNORED

PIECE = 2**18
"""Characters after which a long document is cut, at the next end of a line, to be tokenised."""
BATCH = 2**22
"""Characters that are tokenised at once, over all cores."""
SCAN = 2**22
"""Tokens that are checked at once."""


def prepare(
    data: Data, tokenizer: PreTrainedTokenizerBase, sequence_length: int, folder: str | Path
) -> Samples:
    """The samples of `data.path`: prepared ones as they are, text packed and written to `folder`.

    Each document is one file: the tokenizer's BOS if it uses one, the text, EOS if there is one. A
    stream of n tokens gives (n - 1) // sequence_length samples; every position has a target, the
    next token of the stream. Empty files are left out.
    """
    if is_prepared(data):
        samples = Samples(data.path)
        if samples.length != sequence_length:
            raise ConfigError(
                f"data.path={data.path!r}: the prepared samples have {samples.length} tokens: set "
                f"sequence_length={samples.length} (it is {sequence_length}), or prepare them again"
            )
        return samples
    files = text_files(data)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as stream:
        tokens = _write_tokens(files, tokenizer, stream)
        count = (tokens - 1) // sequence_length
        if count < 1:
            raise ConfigError(
                f"data.path={data.path!r}: {tokens} tokens in {len(files)} file(s), too few for one "
                f"sequence: give more text, or lower sequence_length ({sequence_length})"
            )
        ids = np.memmap(stream, np.int32, "r")
        shape, used = (count, sequence_length), count * sequence_length
        return write_samples(folder, ids[:used].reshape(shape), ids[1 : used + 1].reshape(shape))


def is_prepared(data: Data) -> bool:
    """Whether `data` names a folder of prepared samples."""
    return (Path(data.path) / INPUT_IDS).exists() or (Path(data.path) / LABELS).exists()


def text_files(data: Data) -> list[Path]:
    """The files that `data` names, in a fixed order."""
    path = Path(data.path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.path={data.path!r}: no such file or folder: give one that exists")
    files = sorted(f for f in path.rglob("*") if f.name.endswith(data.suffixes) and f.is_file())
    if not files:
        raise ConfigError(
            f"data.path={data.path!r}: no file there ends in {', '.join(data.suffixes)}: give "
            "another folder, or set data.suffixes"
        )
    return files


def _write_tokens(files: list[Path], tokenizer: PreTrainedTokenizerBase, stream: IO[bytes]) -> int:
    """Appends the int32 tokens of all documents to `stream`; returns how many there are."""
    bos = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    total = 0
    for batch in _batches(files):
        texts = [text for text, _, _ in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids, (_, first, last) in zip(encoded.input_ids, batch, strict=True):
            document = np.array((bos if first else []) + ids + (eos if last else []), np.int32)
            stream.write(document.tobytes())
            total += document.size
    stream.flush()
    return total


def _batches(files: list[Path]) -> Iterator[list[tuple[str, bool, bool]]]:
    """Lists of (piece, is its document's first, is its last), each of about BATCH characters."""
    batch, size = [], 0
    for file in files:
        for piece in _pieces(file):
            batch.append(piece)
            size += len(piece[0])
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(file: Path) -> Iterator[tuple[str, bool, bool]]:
    """(text, is the first, is the last) of about PIECE characters each; nothing if empty."""
    try:
        with file.open(encoding="utf-8") as text:
            first, piece = True, text.read(PIECE) + text.readline()
            while piece:
                following = text.read(PIECE) + text.readline()
                yield piece, first, not following
                first, piece = False, following
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}: make it readable, or take it out") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: convert the file, or take it out of data.path") from error


def check_samples(samples: Samples, batch_size: int, vocab_size: int, source: str | None = None) -> None:
    """Refuses samples that cannot fill one batch, or that a model of `vocab_size` cannot read.

    `source` is what the user knows them by; None takes their folder.
    """
    source = source or str(samples.folder)
    if samples.count < batch_size:
        raise ConfigError(
            f"{source}: dataset too short for one batch: {samples.count} sequences of "
            f"{samples.length} tokens, batch_size is {batch_size}: give more text, or lower "
            "batch_size or sequence_length"
        )
    rows, has_target = max(1, SCAN // samples.length), False
    for start in range(0, samples.count, rows):
        input_ids, labels = (a[start : start + rows] for a in (samples.input_ids, samples.labels))
        targets = labels[labels != IGNORED]
        has_target |= targets.size > 0
        _check_ids(f"{source}: {INPUT_IDS}", input_ids, vocab_size)
        _check_ids(f"{source}: {LABELS}", targets, vocab_size)
    if not has_target:
        raise ConfigError(
            f"{source}: {LABELS}: every label is {IGNORED}, so there is nothing to learn: "
            "prepare the samples with targets"
        )


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
