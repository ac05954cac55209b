"""Real text and a tokenizer without a download: the source code of Python's standard library."""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slidedp.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
_LEFT_OUT = {"site-packages", "dist-packages"}  # not the standard library
_LEFT_OUT |= {"test", "tests", "idlelib", "lib2to3"}  # odd encodings and repetition
_LEFT_OUT |= {"encodings", "pydoc_data"}  # tables


def stdlib_files(limit_bytes: int | None = None) -> list[Path]:
    """Source files of this Python's standard library in a fixed order, at most `limit_bytes`
    together (a file too large for what is left is passed over)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    left = float("inf") if limit_bytes is None else limit_bytes
    for file in sorted(root.rglob("*.py")):
        if _LEFT_OUT.intersection(file.relative_to(root).parts):
            continue
        if (size := file.stat().st_size) <= left:
            files.append(file)
            left -= size
    return files


def write_corpus(folder: str | Path, megabytes: float | None = None) -> Path:
    """Copies at most `megabytes` (all: about 10 MB) of the standard library's source to `folder`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    limit = None if megabytes is None else int(megabytes * 1e6)
    for file in stdlib_files(limit):
        copy = Path(folder) / file.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return Path(folder)


def train_tokenizer(files: Sequence[str | Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most `vocab_size` tokens; END_OF_TEXT is its EOS and padding token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError(
            f"vocab_size={vocab_size}: every byte and {END_OF_TEXT} need a token: use at least "
            f"{len(alphabet) + 1}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
