"""What a user can get wrong: one line that says what, where and the remedy, and nothing is left."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, MistralConfig, T5Config

from slidedp import ConfigError, Data, Layout, launch
from slidedp.data.samples import write_samples
from slidedp.data.stdlib import stdlib_files, train_tokenizer
from slidedp.model.families import load_config
from tests.launching import LENGTH, VOCABULARY, children, memfds, small_config
from tests.pool import small_model

TEXT_VOCABULARY = 300


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with good inputs: `model` and `data`, `text`, and a `tokenizer` with larger ids."""
    folder = tmp_path_factory.mktemp("inputs")
    small_config(folder)
    (folder / "text").mkdir()
    (folder / "text" / "a.py").write_text(stdlib_files(20_000)[0].read_text())
    train_tokenizer(stdlib_files(50_000), TEXT_VOCABULARY).save_pretrained(folder / "tokenizer")
    return folder


def changed(tmp_path, change):
    """A copy of the good model folder after `change(folder)`."""
    small_model(tmp_path / "model")
    change(tmp_path / "model")
    return {"model": str(tmp_path / "model")}


def configured(tmp_path, config):
    """A model folder that has only a config."""
    config.save_pretrained(tmp_path / "model")
    return {"model": str(tmp_path / "model")}


def written(tmp_path, text):
    """A model folder whose config.json is `text`."""
    return changed(tmp_path, lambda folder: (folder / "config.json").write_text(text))


def resized(tmp_path, **sizes):
    """A model folder whose config.json claims other sizes."""

    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | sizes))

    return changed(tmp_path, change)


def config_of(inputs, **changes):
    """The good model's config, as an object: random weights."""
    config = load_config(str(inputs / "model"))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def truncated(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_a_layer(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.4.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def text(inputs, tokenizer="tokenizer", folder="text", **more):
    return {
        "data": Data(path=inputs / folder, tokenizer=str(inputs / tokenizer) if tokenizer else None),
        **more,
    }


def prepared(tmp_path, count=64, length=LENGTH, token=1):
    ids = np.full((count, length), token, np.int32)
    write_samples(tmp_path / "samples", ids, ids)
    return {"data": Data(path=tmp_path / "samples")}


def broken_tokenizer(tmp_path, inputs):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"model": ')
    return {"data": Data(path=inputs / "text", tokenizer=str(tmp_path / "tokenizer"))}


def no_text(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


CASES = {
    # name: (settings from (tmp_path, inputs), what the line must hold)
    "model_missing": (lambda t, i: {"model": t / "none"}, ["model=", "none", "no such folder", "give"]),
    "model_folder_empty": (lambda t, i: {"model": no_text(t)}, ["model=", "empty", "config.json"]),
    "model_not_json": (lambda t, i: written(t, "{not json"), ["config.json", "not a valid JSON", "give"]),
    "model_nameless": (lambda t, i: written(t, "{}"), ["model=", "model_type", "give"]),
    "model_not_numbers": (lambda t, i: resized(t, hidden_size="big"), ["hidden_size", "expected int"]),
    "model_negative": (lambda t, i: resized(t, hidden_size=-4), ["model: Qwen3Config", "-4", "give"]),
    "model_no_layers": (
        lambda t, i: resized(t, num_hidden_layers=0, layer_types=[]),
        ["num_hidden_layers is 0", "give"],
    ),
    "gpt2": (lambda t, i: configured(t, GPT2Config()), ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
    "t5": (lambda t, i: configured(t, T5Config()), ["T5Config", "Qwen3ForCausalLM"]),
    "weights_missing": (
        lambda t, i: changed(t, lambda m: (m / "model.safetensors").unlink()),
        ["model: no model.safetensors", "save_pretrained"],
    ),
    "weights_pickled": (lambda t, i: changed(t, pickled), ["only pickled weights", "save_pretrained"]),
    "weights_truncated": (lambda t, i: changed(t, truncated), ["model.safetensors", "download it again"]),
    "weights_incomplete": (
        lambda t, i: changed(t, without_a_layer),
        ["no tensor model.layers.4.mlp.up_proj.weight"],
    ),
    "weights_of_another_size": (
        lambda t, i: resized(t, intermediate_size=32),
        ["mlp", "[28, 20]", "[32, 20]", "config.json"],
    ),
    "sequence_too_long": (
        lambda t, i: {"sequence_length": 65},
        ["sequence_length=65", "positions end at 64", "use at most"],
    ),
    "sliding_window": (
        lambda t, i: configured(
            t,
            MistralConfig(
                hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
                intermediate_size=16, vocab_size=VOCABULARY, sliding_window=8,
            ),
        ),
        ["sequence_length=16", "sliding window of 8"],
    ),
    "data_missing": (lambda t, i: text(i, folder="none"), ["data.path=", "no such file or folder"]),
    "data_no_files": (
        lambda t, i: {"data": Data(path=no_text(t), tokenizer=str(i / "tokenizer"))},
        ["data.path=", "data.suffixes"],
    ),
    "data_too_short_for_a_batch": (
        lambda t, i: prepared(t, count=3),
        ["data.path=", "too short for one batch", "3 sequences", "batch_size is 4"],
    ),
    "text_too_short_for_a_batch": (
        lambda t, i: text(i, batch_size=2000, model=config_of(i, vocab_size=TEXT_VOCABULARY)),
        ["data.path=", "too short for one batch", "batch_size is 2000"],
    ),
    "samples_of_another_length": (
        lambda t, i: prepared(t, length=8),
        ["prepared samples have 8 tokens", "set sequence_length=8"],
    ),
    "samples_of_another_vocabulary": (
        lambda t, i: prepared(t, token=VOCABULARY),
        ["data.path=", "input_ids.npy", "token id 97", "0 to 96"],
    ),
    "tokenizer_of_another_vocabulary": (
        lambda t, i: text(i),
        ["data.path=", "the model's vocabulary is 0 to 96", "data.tokenizer"],
    ),
    "tokenizer_not_in_the_model": (
        lambda t, i: text(i, tokenizer=None),
        ["data.tokenizer=None", "no tokenizer is there", "give a folder or hub id"],
    ),
    "tokenizer_not_given": (
        lambda t, i: text(i, tokenizer=None, model=config_of(i)),
        ["data.tokenizer=None", "none is given", "give a folder or hub id"],
    ),
    "tokenizer_missing": (lambda t, i: text(i, tokenizer="none"), ["data.tokenizer=", "none'", "give"]),
    "tokenizer_broken": (lambda t, i: broken_tokenizer(t, i), ["data.tokenizer=", "give"]),
    "cuda_without_a_gpu": (lambda t, i: {"device": "cuda"}, ["device='cuda'", "no GPU", "set device='cpu'"]),
    "batch_not_split": (lambda t, i: {"batch_size": 5}, ["batch_size=5", "2 ranks", "multiple of 2"]),
    "host_memory": (
        lambda t, i: {"host_memory_budget": 0.0005},
        ["not enough host memory", "0.5 MiB are free", "use a smaller model"],
    ),
    "host_memory_none": (
        lambda t, i: {"host_memory_budget": 0},
        ["not enough host memory", "0.0 MiB are free"],
    ),
    "activations": (
        lambda t, i: {"layout": Layout(activations=("keep", "recompute"))},
        ["layout.activations names 2 layers, the model has 5"],
    ),
    "seed": (lambda t, i: {"seed": -1}, ["seed=-1", "at least 0"]),
    "steps": (lambda t, i: {"steps": 0}, ["steps=0", "at least 1"]),
    "clipping_in_backward": (
        lambda t, i: {"layout": Layout(schedule="in_backward")},
        ["layout.schedule='in_backward'", "optimizer.clip_norm=None"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line_with_nothing_left(inputs, tmp_path, monkeypatch, name):
    if name == "cuda_without_a_gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    settings, words = CASES[name]
    settings = settings(tmp_path, inputs)
    monkeypatch.chdir(tmp_path)  # where runs/ would appear
    files, processes, segments = sorted(tmp_path.rglob("*")), children(), memfds()
    with pytest.raises(ConfigError) as refusal:
        launch(small_config(inputs, **settings))
    message = str(refusal.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert len(message) < 500
    assert sorted(tmp_path.rglob("*")) == files
    assert (children(), memfds()) == (processes, segments)
