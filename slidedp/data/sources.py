"""Where documents come from: text files, JSON lines, Parquet, and data sets of Hugging Face `datasets`.

Documents are read one after another. A file is never in memory whole, a row of a table is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from slidedp.config import Data
from slidedp.errors import ConfigError, reason

PIECE = 2**18
"""Characters after which a long text is cut, at the next end of a line, to be tokenised."""
ROWS = 256
"""Rows of a Parquet file that are in memory at once."""
COLUMNS = (("messages",), ("conversations",), ("prompt", "completion"), ("text",))
"""Columns that are taken by their name, the first that are there."""
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Other names of roles, in messages of the form {from, value}."""


class Text(NamedTuple):
    """A document of plain text, or a piece of a long one."""

    where: str
    """What a user knows the document by."""
    text: str
    first: bool
    last: bool


class Chat(NamedTuple):
    """A conversation: messages {role, content}, at least one of them the assistant's."""

    where: str
    messages: list[dict[str, Any]]


class Completion(NamedTuple):
    """A prompt, and the answer that is to be learnt."""

    where: str
    prompt: str
    completion: str


Document = Text | Chat | Completion


class Source(NamedTuple):
    """Documents in a fixed order, each with its share of `total`."""

    documents: Iterator[tuple[Document, int]]
    total: int | None
    unit: str


def open_source(data: Data) -> Source:
    """The documents of `data.path`."""
    path = Path(data.path)
    if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
        return _dataset(data, saved=True)
    if not path.exists() and _may_be_on_the_hub(data):
        return _dataset(data, saved=False)
    files = source_files(data)
    documents = (item for file in files for item in _file(file, data.column))
    return Source(documents, sum(file.stat().st_size for file in files), "B")


def source_files(data: Data) -> list[Path]:
    """The files that `data` names, in a fixed order."""
    path = Path(data.path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ConfigError(f"data.path={data.path!r}: no such file or folder: give one that exists")
    files = sorted(f for f in path.rglob("*") if _ends(f.name, data.suffixes) and f.is_file())
    if not files:
        raise ConfigError(
            f"data.path={data.path!r}: no file there ends in {', '.join(data.suffixes)}: give "
            "another folder, or set data.suffixes"
        )
    return files


def _ends(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.endswith(suffixes) or name.lower().endswith(suffixes)


# --- files ------------------------------------------------------------------------------------------


def _file(file: Path, column: str | None) -> Iterator[tuple[Document, int]]:
    """The file's documents and how many of its bytes each takes, about."""
    try:
        kind = file.suffix.lower()
        if kind in (".jsonl", ".json"):
            yield from _json_lines(file, column)
        elif kind == ".parquet":
            yield from _parquet(file, column)
        else:
            yield from _text(file)
    except OSError as error:
        raise ConfigError(f"{file}: {reason(error)}: make it readable, or take it out") from error


def _text(file: Path) -> Iterator[tuple[Document, int]]:
    """Pieces of about PIECE characters; nothing if the file is empty."""
    try:
        with file.open(encoding="utf-8-sig") as text:  # some editors begin a file with a byte order mark
            first, piece = True, text.read(PIECE) + text.readline()
            while piece:
                following = text.read(PIECE) + text.readline()
                yield Text(str(file), piece, first, not following), len(piece)
                first, piece = False, following
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: convert the file, or take it out of data.path") from error


def _json_lines(file: Path, column: str | None) -> Iterator[tuple[Document, int]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{where}: not JSON ({reason(error)}): write one object in each line, in UTF-8"
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: a JSON {type(row).__name__}: write one object in each line")
            if b"\\u" in line and not _is_text(row):
                raise ConfigError(
                    f"{where}: half of a surrogate pair, which is no text: take the row out, or mend it"
                )
            yield from _row(row, _names(row, column, where), where, len(line))


def _is_text(row: dict[str, Any]) -> bool:
    """Whether all strings of a row can be written in UTF-8; JSON's escapes allow some that cannot."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _parquet(file: Path, column: str | None) -> Iterator[tuple[Document, int]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            names = _names(table.schema_arrow.names, column, str(file))
            share = file.stat().st_size // max(1, table.metadata.num_rows)
            number = 0
            for batch in table.iter_batches(ROWS, columns=list(names)):
                for row in batch.to_pylist():
                    number += 1
                    yield from _row(row, names, f"{file}: row {number}", share)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: not a whole Parquet file ({reason(error)}): write it again") from error


# --- datasets ---------------------------------------------------------------------------------------


def _may_be_on_the_hub(data: Data) -> bool:
    """Whether `data.path`, which is no path here, looks like owner/name."""
    return (
        data.path.count("/") == 1
        and not data.path.startswith(("/", ".", "~"))
        and not data.path.endswith(("/", *data.suffixes))
    )


def _dataset(data: Data, saved: bool) -> Source:
    where = f"data.path={data.path!r}"
    try:
        import datasets  # not at the top: SlideDP does without it
    except ImportError as error:
        what = "a folder that `datasets` saved" if saved else "no such file or folder, and a hub id"
        raise ConfigError(f"{where}: {what} needs that package: pip install datasets") from error
    try:
        if saved:
            found = datasets.load_from_disk(data.path)
            table = found
            if isinstance(found, dict):
                if data.split not in found:
                    raise ConfigError(
                        f"{where}: no split {data.split!r}: set data.split (data.eval_split for held-out "
                        f"data) to one of {', '.join(found)}"
                    )
                table = found[data.split]
        else:
            table = datasets.load_dataset(data.path, data.subset, split=data.split, streaming=True)
    except ConfigError:
        raise
    except Exception as error:  # the hub's, the network's, Arrow's and the library's own
        raise ConfigError(
            f"{where}: {reason(error)}: give files, a folder that `datasets` saved, or a hub id that this "
            "machine can reach, with data.subset and data.split that it has"
        ) from error
    return Source(_dataset_rows(table, data.column, where), len(table) if saved else None, "rows")


def _dataset_rows(
    table: Iterable[dict[str, Any]], column: str | None, where: str
) -> Iterator[tuple[Document, int]]:
    rows, number = iter(table), 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # a lost connection, for one
            raise ConfigError(f"{where}: row {number + 1}: {reason(error)}: try again") from error
        if row is None:
            return
        number += 1
        at = f"{where}: row {number}"
        yield from _row(row, _names(row, column, at), at, 1)


# --- rows -------------------------------------------------------------------------------------------


def _names(columns: Iterable[str], column: str | None, where: str) -> tuple[str, ...]:
    """The columns to read: the one that is asked for, or those of the first convention that is met."""
    columns = list(columns)
    there = ", ".join(columns) or "no columns"
    if column is not None:
        if column not in columns:
            raise ConfigError(f"{where}: no column {column!r}, but {there}: set data.column to one of them")
        return (column,)
    for names in COLUMNS:
        if set(names) <= set(columns):
            return names
    raise ConfigError(
        f"{where}: which column to learn is not clear from {there}: set data.column to one of them"
    )


def _row(row: dict[str, Any], names: Sequence[str], where: str, share: int) -> Iterator[tuple[Document, int]]:
    """The row's document; nothing if its text is empty."""
    values = [row[name] for name in names]
    if len(values) == 2:
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, str):
                raise ConfigError(
                    f"{where}: {name} is {_kind(value)}: expected text, or one column of messages"
                )
        if not values[1]:
            raise ConfigError(f"{where}: completion is empty: take the row out, or complete it")
        yield Completion(where, *values), share
    elif isinstance(values[0], str):
        yield from ((piece, share if piece.last else 0) for piece in _pieces(where, values[0]))
    elif isinstance(values[0], list):
        yield Chat(where, _messages(values[0], f"{where}: {names[0]}")), share
    else:
        raise ConfigError(f"{where}: {names[0]} is {_kind(values[0])}: expected text, or a list of messages")


def _pieces(where: str, text: str) -> Iterator[Text]:
    """Pieces of about PIECE characters."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE) + 1 or len(text)
        yield Text(where, text[start:stop], start == 0, stop == len(text))
        start = stop


def _messages(values: list[Any], where: str) -> list[dict[str, Any]]:
    """Messages as a chat template takes them."""
    messages = []
    for number, value in enumerate(values, 1):
        if isinstance(value, dict) and "from" in value and "value" in value:
            value = {"role": SHAREGPT.get(value["from"], value["from"]), "content": value["value"]}
        if (
            not isinstance(value, dict)
            or not isinstance(value.get("role"), str)
            or not (isinstance(value.get("content"), str) or value.get("tool_calls"))
        ):
            raise ConfigError(
                f"{where}: message {number} is {json.dumps(value, default=str)[:80]}: expected "
                "{role, content} or {from, value}, all of them text"
            )
        messages.append(value)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(
            f"{where}: no message of the assistant, so there is nothing to learn: take the row out"
        )
    return messages


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
