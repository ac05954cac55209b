"""The same documents from every kind of source, and what is refused of them."""

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from transformers import PreTrainedTokenizerFast

from slidedp.config import Data
from slidedp.data import encode, sources
from slidedp.data.prepare import prepare
from slidedp.data.samples import POSITION_IDS
from slidedp.data.sources import Chat, Completion, Text, open_source
from slidedp.data.stdlib import stdlib_files, train_tokenizer
from slidedp.errors import ConfigError

TURNS = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
SHAREGPT = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "5"}]
ROWS = {
    "text": [{"id": i, "text": f"line {i}\nÜbung {i}\n" * (i % 4)} for i in range(9)],
    "chat": [{"id": 0, "messages": TURNS}, {"id": 1, "messages": TURNS * 2}],
    "completion": [{"prompt": "2 + 3 =", "completion": " 5", "id": 0}],
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = train_tokenizer(stdlib_files(50_000), 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)
    return path


def saved(path, rows):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def saved_splits(path, rows):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "validation": table.select([0])}).save_to_disk(path)
    return path


def written(tmp_path, kind, rows):
    writers = {"jsonl": jsonl, "parquet": parquet, "saved": saved, "splits": saved_splits}
    name = f"data.{kind}" if kind in ("jsonl", "parquet") else kind
    return writers[kind](tmp_path / name, rows)


def documents(**data):
    return [document[1:] for document, _ in open_source(Data(**data)).documents]


@pytest.mark.parametrize("source", ["jsonl", "parquet", "saved", "splits"])
def test_every_source_gives_the_same_documents(tmp_path, source):
    texts = [Text("", row["text"], True, True)[1:] for row in ROWS["text"] if row["text"]]
    assert documents(path=written(tmp_path / "t", source, ROWS["text"])) == texts
    chats = [Chat("", row["messages"])[1:] for row in ROWS["chat"]]
    assert documents(path=written(tmp_path / "c", source, ROWS["chat"])) == chats
    pairs = [Completion("", "2 + 3 =", " 5")[1:]]
    assert documents(path=written(tmp_path / "p", source, ROWS["completion"])) == pairs
    renamed = [{"body": row["text"], "text": "other"} for row in ROWS["text"]]
    assert documents(path=written(tmp_path / "r", source, renamed), column="body") == texts
    conversations = [{"conversations": SHAREGPT}]
    assert documents(path=written(tmp_path / "s", source, conversations)) == chats[:1]


def test_a_split_is_chosen(tmp_path):
    path = written(tmp_path, "splits", ROWS["chat"])
    assert len(documents(path=path)) == 2
    assert len(documents(path=path, split="validation")) == 1
    with pytest.raises(ConfigError, match=r"no split 'test': .* train, validation"):
        documents(path=path, split="test")


def test_a_folder_may_hold_all_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    jsonl(tmp_path / "b.jsonl", ROWS["text"][1:2])
    parquet(tmp_path / "c" / "d.parquet", ROWS["text"][2:3])
    found = [document[0] for document in documents(path=tmp_path)]
    assert found == ["one", ROWS["text"][1]["text"], ROWS["text"][2]["text"]]


def test_what_windows_writes_is_read(tmp_path):
    """Upper-case endings, byte order marks, CRLF; and a pair of surrogates is one character."""
    mark = b"\xef\xbb\xbf"
    (tmp_path / "A.JSONL").write_bytes(mark + b'{"text": "one \\ud83d\\ude00"}\r\n\r\n')
    (tmp_path / "B.TXT").write_bytes(mark + b"two\r\nlines")
    documents = [document for document, _ in open_source(Data(path=tmp_path)).documents]
    assert [document.text for document in documents] == ["one \U0001f600", "two\nlines"]


def test_progress_adds_up(tmp_path):
    for kind in ("jsonl", "saved"):
        source = open_source(Data(path=written(tmp_path / kind, kind, ROWS["text"][1:4])))
        assert sum(share for _, share in source.documents) == source.total


def test_long_texts_in_rows_are_cut_and_joined_again(tmp_path, tokenizer, monkeypatch):
    long = {"text": "".join(f"line {i}\n" for i in range(300)) + "no end"}
    path = jsonl(tmp_path / "long.jsonl", [long, {"text": "short"}])
    whole = prepare(Data(path=path), tokenizer, 1, tmp_path / "whole")
    monkeypatch.setattr(sources, "PIECE", 50)
    pieces = documents(path=path)
    assert len(pieces) > 30 and "".join(text for text, _, _ in pieces[:-1]) == long["text"]
    cut = prepare(Data(path=path), tokenizer, 1, tmp_path / "cut")
    assert tokenizer.decode(cut.input_ids[:, 0]) == tokenizer.decode(whole.input_ids[:, 0])
    assert (cut.labels == tokenizer.eos_token_id).sum() == 2


def test_packing_follows_from_the_data_or_is_set(tmp_path, tokenizer):
    text, chat = jsonl(tmp_path / "t.jsonl", ROWS["text"]), jsonl(tmp_path / "c.jsonl", ROWS["chat"])

    def positions(path, packing=None):
        folder = tmp_path / f"{path.stem}-{packing}"
        samples = prepare(Data(path=path, packing=packing), tokenizer, 64, folder)
        assert (folder / POSITION_IDS).exists() == (samples.position_ids is not None)
        return samples.position_ids

    assert positions(text) is None
    assert positions(chat) is not None
    assert positions(chat, "padded") is None
    assert positions(text, "bounded") is not None


def test_processes_give_what_this_one_gives(tmp_path, tokenizer, monkeypatch):
    rows = [{"text": f"row {i} " + "word " * (i % 50)} for i in range(400)]
    path = jsonl(tmp_path / "t.jsonl", rows)
    here = prepare(Data(path=path), tokenizer, 16, tmp_path / "here")
    monkeypatch.setattr(encode, "BATCH", 2000)
    monkeypatch.setattr(encode, "ALONE", 1)
    monkeypatch.setattr(encode, "PROCESSES", 2)
    there = prepare(Data(path=path), tokenizer, 16, tmp_path / "there")
    np.testing.assert_array_equal(here.input_ids, there.input_ids)
    np.testing.assert_array_equal(here.labels, there.labels)


class Deadly(PreTrainedTokenizerFast):
    """Ends the process that it is sent to."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_that_ends_is_said(tmp_path, monkeypatch):
    tokenizer = train_tokenizer(stdlib_files(5000), 260)
    tokenizer.__class__ = Deadly
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a" * 100}] * 100)
    monkeypatch.setattr(encode, "BATCH", 1000)
    monkeypatch.setattr(encode, "ALONE", 1)
    with pytest.raises(ConfigError, match="a process that tokenises has ended"):
        prepare(Data(path=path), tokenizer, 16, tmp_path / "out")


PREPARE_WITHIN = """
import resource, sys
from transformers import AutoTokenizer
from slidedp import Data
from slidedp.data import encode, packing
from slidedp.data.prepare import prepare
encode.BATCH, encode.ALONE, packing.BLOCK = 2**16, 2**60, 2**18
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
Encoded = encode.Encoder(tokenizer)([encode.Text("", "warm up " * 50_000, True, True)])
(used,) = (int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData"))
limit = used * 1024 + int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
prepare(Data(path=sys.argv[2], packing=sys.argv[5]), tokenizer, 1024, sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("packing", ["wrapped", "bounded"])
def test_a_file_larger_than_the_memory_that_there_is(tmp_path, tokenizer, packing):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    line = json.dumps({"text": "abcdefghij klmnop\n" * 60}) + "\n"
    (tmp_path / "large.jsonl").write_text(line * 30_000)
    limit = 40 * 2**20
    paths = [str(tmp_path / name) for name in ("tokenizer", "large.jsonl", "out")]
    command = [sys.executable, "-c", PREPARE_WITHIN, *paths, str(limit), packing]
    subprocess.run(command, check=True)
    assert (tmp_path / "out" / "input_ids.npy").stat().st_size > 1.5 * limit


def chats(*messages):
    return [{"messages": list(messages)}]


LONG = [{"prompt": "1", "completion": "and so on " * 50}]
REFUSED = {
    # name: (rows or text of data.jsonl, settings, what the line must hold)
    "not JSON": ('{"text": "a"}\n{"text": \n', {}, ["data.jsonl:2: not JSON", "one object in each line"]),
    "no text": (
        '{"text": "a"}\n{"text": "\\ud83d alone"}\n',
        {},
        ["data.jsonl:2: half of a surrogate pair", "take the row out"],
    ),
    "half a message": (
        '{"messages": [{"role": "user", "content": "\\uDE00"}, {"role": "assistant", "content": "b"}]}\n',
        {},
        ["data.jsonl:1: half of a surrogate pair"],
    ),
    "too deep": ("[" * 100_000 + "\n", {}, ["data.jsonl:1: not JSON", "recursion"]),
    "not UTF-8": (b'{"text": "na\xefve"}\n', {}, ["data.jsonl:1: not JSON"]),
    "not an object": ('{"text": "a"}\n\n[1]\n', {}, ["data.jsonl:3: a JSON list"]),
    "unknown column": ([{"body": "a", "id": 1}], {"column": "txt"}, ["no column 'txt', but body, id: set"]),
    "no such convention": ([{"body": "a", "id": 1}], {}, ["not clear from body, id: set data.column"]),
    "a number": ([{"text": 5}], {}, ["data.jsonl:1: text is int: expected text, or a list of messages"]),
    "null": ([{"text": "a"}, {"text": None}], {}, ["data.jsonl:2: text is null"]),
    "half a pair": ([{"prompt": "a", "completion": ["b"]}], {}, ["completion is list: expected text"]),
    "empty completion": ([{"prompt": "a", "completion": ""}], {}, ["completion is empty: take"]),
    "only empty texts": ([{"text": ""}] * 3, {}, ["0 tokens in 0 document(s)", "give more text"]),
    "no messages": (chats(), {}, ["data.jsonl:1: messages: no message of the assistant", "take the row out"]),
    "no answer": (chats(TURNS[0]), {}, ["no message of the assistant"]),
    "empty answer": (
        chats(TURNS[0], {"role": "assistant", "content": ""}), {"template": "markers"},
        ["the assistant says nothing"],
    ),
    "no role": (chats({"content": "a"}), {}, ['message 1 is {"content": "a"}: expected {role, content}']),
    "content of parts": (chats({"role": "user", "content": ["a"]}), {}, ["message 1 is", "all of them text"]),
    "assistant first": (chats(TURNS[1]), {}, ["the assistant speaks first: begin with the user"]),
    "no chat template": (chats(*TURNS), {"template": None}, ["no chat template: set", "give columns"]),
    "template refuses": (
        chats(*TURNS), {"template": "{{ raise_exception('roles must alternate') }}"},
        ["refuses the conversation (roles must alternate): change"],
    ),
    "template of another prompt": (
        chats(*TURNS), {"template": TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>bot\n")},
        ["an answer (message 2) that does not begin with the prompt", "{% generation %}"],
    ),
    "over-long chat": (chats(*TURNS * 20), {}, ["sequence_length is 64: raise", "data.over_long"]),
    "over-long completion": (LONG, {"packing": "padded"}, ["data.jsonl:1", "sequence_length is 64"]),
    "no EOS": ([{"text": "a" * 99}], {"eos": None}, ["no EOS token", "data.tokenizer", "tokenizer_config"]),
    "no EOS, completion": ([{"prompt": "a", "completion": "b"}], {"eos": None}, ["no EOS token"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(tmp_path, tokenizer, name):
    rows, settings, words = REFUSED[name]
    settings, tokenizer = dict(settings), copy.deepcopy(tokenizer)
    tokenizer.chat_template = settings.pop("template", TEMPLATE)
    if tokenizer.chat_template == "markers":
        tokenizer.chat_template = MARKED
    if "eos" in settings:
        tokenizer.eos_token = settings.pop("eos")
    path = tmp_path / "data.jsonl"
    if isinstance(rows, list):
        jsonl(path, rows)
    else:
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(ConfigError) as refusal:
        prepare(Data(path=path, **settings), tokenizer, 64, tmp_path / "out")
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 500
    assert all(word in message for word in words), message


MARKED = TEMPLATE.replace(
    "{{ m.content }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


def test_over_long_rows_are_cut_or_dropped(tmp_path, tokenizer):
    path = jsonl(tmp_path / "t.jsonl", [{"prompt": "1", "completion": "2"}, *LONG])
    cut = prepare(Data(path=path, over_long="cut", packing="padded"), tokenizer, 64, tmp_path / "cut")
    drop = prepare(Data(path=path, over_long="drop", packing="padded"), tokenizer, 64, tmp_path / "drop")
    assert (cut.count, drop.count) == (2, 1)
    whole = tokenizer(LONG[0]["completion"]).input_ids
    assert cut.labels[1].tolist() == whole[:64]
    assert drop.labels[0].tolist() == [*tokenizer("2").input_ids, tokenizer.eos_token_id, *[-100] * 62]


@pytest.mark.parametrize("name", ["broken.parquet", "broken.jsonl"])
def test_files_that_are_not_whole_are_refused_by_name(tmp_path, tokenizer, name):
    path = written(tmp_path, name.split(".")[1], ROWS["text"])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=f"{path.name}"):
        prepare(Data(path=path), tokenizer, 8, tmp_path / "out")


def test_a_hub_id_without_the_package_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it fails
    with pytest.raises(ConfigError, match="pip install datasets"):
        open_source(Data(path="owner/name"))
    with pytest.raises(ConfigError, match="no such file or folder: give one"):
        open_source(Data(path="owner/name.jsonl"))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install datasets"):
        open_source(Data(path=tmp_path))
