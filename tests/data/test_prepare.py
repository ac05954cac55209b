"""Packing of text, against a plain loop, and what is refused."""

import resource

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from slidedp.config import Data
from slidedp.data import encode, sources
from slidedp.data import prepare as preparation
from slidedp.data.prepare import check_samples, prepare
from slidedp.data.samples import INPUT_IDS, LABELS, new_samples, write_samples
from slidedp.data.stdlib import stdlib_files, train_tokenizer, write_corpus
from slidedp.errors import ConfigError

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(stdlib_files(100_000), VOCAB)


@pytest.fixture
def folder(tmp_path):
    """Documents of which one is empty, one in a folder below, one of another kind."""
    documents = {
        "b.txt": "to be or not to be\n" * 7,
        "a.md": "# Übung\n",
        "c.txt": "",
        "x.rst": "no",
    }
    documents["deep/d.py"] = "import os\nprint(os.name)\n" * 5
    for name, content in documents.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return tmp_path / "corpus"


def plain_samples(files, tokenizer, length, bos=()):
    stream = []
    for file in files:
        content = file.read_text(encoding="utf-8")
        if content:
            stream += [*bos, *tokenizer(content, add_special_tokens=False).input_ids]
            stream.append(tokenizer.eos_token_id)
    starts = range(0, len(stream) - length, length)
    return (
        [stream[s : s + length] for s in starts],
        [stream[s + 1 : s + length + 1] for s in starts],
    )


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("batch", [1, 10**6])
def test_packing_is_that_of_a_plain_loop(folder, tmp_path, tokenizer, monkeypatch, length, batch):
    monkeypatch.setattr(encode, "BATCH", batch)
    samples = prepare(Data(path=folder), tokenizer, length, tmp_path / "out")
    files = [folder / name for name in ("a.md", "b.txt", "c.txt", "deep/d.py")]
    input_ids, labels = plain_samples(files, tokenizer, length)
    assert samples.input_ids.tolist() == input_ids
    assert samples.labels.tolist() == labels
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [INPUT_IDS, LABELS]


def test_a_tokenizer_that_starts_documents_with_bos_does_so_once_a_document(folder, tmp_path, monkeypatch):
    tokenizer = train_tokenizer(stdlib_files(20_000), 300)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    monkeypatch.setattr(sources, "PIECE", 20)  # so documents are cut
    samples = prepare(Data(path=folder / "b.txt"), tokenizer, 8, tmp_path / "out")
    bos = [tokenizer.bos_token_id]
    assert samples.input_ids.tolist() == plain_samples([folder / "b.txt"], tokenizer, 8, bos)[0]


def test_long_documents_are_cut_at_line_ends_and_lose_nothing(tmp_path, tokenizer, monkeypatch):
    lines = [f"line {i} " + "word " * (i % 13) + "\n" for i in range(200)]
    file = tmp_path / "long.txt"
    file.write_text("".join(lines))
    monkeypatch.setattr(sources, "PIECE", 100)
    pieces = list(sources._text(file))
    assert len(pieces) > 20
    assert all(piece.text.endswith("\n") for piece, _ in pieces)
    samples = prepare(Data(path=file), tokenizer, 1, tmp_path / "out")
    assert tokenizer.decode(samples.input_ids[:, 0]) == "".join(lines)
    assert (samples.labels == tokenizer.eos_token_id).sum() == 1


def test_prepared_samples_are_opened_as_they_are(tmp_path, tokenizer):
    ids = np.ones((3, 8), np.int32)
    write_samples(tmp_path / "in", ids, ids)
    samples = prepare(Data(path=tmp_path / "in"), tokenizer, 8, tmp_path / "out")
    assert samples.folder == tmp_path / "in"
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="set sequence_length=8"):
        prepare(Data(path=tmp_path / "in"), tokenizer, 4, tmp_path / "out")


def test_text_that_cannot_be_used_is_refused(folder, tmp_path, tokenizer):
    def refused(path, words, length=16, **data):
        with pytest.raises(ConfigError) as refusal:
            prepare(Data(path=path, **data), tokenizer, length, tmp_path / "out")
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)

    refused(tmp_path / "nothing", "no such file or folder")
    refused(folder, "no file there ends in .c, .h", suffixes=(".c", ".h"))
    refused(folder, "too few for one sequence", length=10_000)
    refused(folder / "c.txt", "0 tokens in 0 document(s)")
    (folder / "deep" / "latin.txt").write_bytes("naïve".encode("latin-1"))
    refused(folder, "latin.txt: not UTF-8")


def test_a_full_disk_is_said(folder, tmp_path, tokenizer):
    """Room for samples is taken before they are written: a mapped page without room would end the process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"out: .*File too large: .*another disk") as said:
            prepare(Data(path=folder), tokenizer, 16, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(said.value)
    new_samples(tmp_path / "new", 1000, 64)
    for name in (INPUT_IDS, LABELS):
        file = (tmp_path / "new" / name).stat()
        assert file.st_blocks * 512 >= file.st_size


def test_samples_that_do_not_suit_the_run_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "SCAN", 8)  # several scans
    ids = np.arange(40, dtype=np.int32).reshape(10, 4)

    def refused(words, input_ids=ids, labels=ids, batch_size=10, vocab_size=40):
        with pytest.raises(ConfigError) as refusal:
            check_samples(write_samples(tmp_path, input_ids, labels), batch_size, vocab_size)
        assert words in str(refusal.value)
        assert "\n" not in str(refusal.value)

    some = np.where(ids % 3, ids, np.int32(-100))
    check_samples(write_samples(tmp_path, ids, some), 10, 40)
    refused("10 sequences of 4 tokens, batch_size is 11", batch_size=11)
    refused("input_ids.npy: token id 39, the model's vocabulary is 0 to 38", vocab_size=39)
    refused("labels.npy: token id 41", labels=ids + np.int32(10))
    refused("input_ids.npy: token id -100", input_ids=some)
    refused("every label is -100", labels=np.full_like(ids, -100))


def test_standard_library_is_text_and_trains_a_tokenizer(tmp_path, tokenizer):
    corpus = write_corpus(tmp_path / "corpus", megabytes=0.3)
    files = sources.source_files(Data(path=corpus))
    assert 200_000 < sum(f.stat().st_size for f in files) <= 300_000
    assert sorted(f.name for f in files) == sorted(f.name for f in stdlib_files(300_000))
    content = files[0].read_text(encoding="utf-8") + " Ω\t"
    ids = tokenizer(content).input_ids
    assert tokenizer.decode(ids) == content
    assert max(ids) < VOCAB == len(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|endoftext|>")
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(files, 256)


def test_every_standard_library_file_is_utf8():
    files = stdlib_files()
    assert sum(f.stat().st_size for f in files) > 5e6
    for file in files:
        file.read_text(encoding="utf-8")


def test_a_bar_ends_full(folder, tmp_path, tokenizer, monkeypatch):
    """A notebook shows one that ends short of its total in red: as a failure."""
    bars, progress = [], preparation.progress

    def recorded(*arguments):
        bars.append(progress(*arguments))
        return bars[-1]

    monkeypatch.setattr(preparation, "progress", recorded)
    prepare(Data(path=folder), tokenizer, 5, tmp_path / "out")
    assert [(bar.n, bar.total) for bar in bars] == [
        (sum(f.stat().st_size for f in sources.source_files(Data(path=folder))),) * 2
    ]
