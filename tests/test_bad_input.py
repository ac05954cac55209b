"""What a user can get wrong: one line that says what, where and the remedy, and nothing is left."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, GPT2Config, Phi3Config, T5Config

from slidedp import ConfigError, Data, Layout, Optimizer, launch
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


def sampled(tmp_path, ids=None, labels=None):
    """A folder of samples that holds these arrays as they are."""
    folder = tmp_path / "samples"
    folder.mkdir()
    for name, array in (("input_ids", ids), ("labels", labels)):
        if array is not None:
            np.save(folder / f"{name}.npy", array)
    return {"data": Data(path=folder)}


def whole(value=1, dtype=np.int32, shape=(64, LENGTH)):
    return np.full(shape, value, dtype)


def cut_short(tmp_path):
    settings = prepared(tmp_path)
    file = tmp_path / "samples" / "labels.npy"
    file.write_bytes(file.read_bytes()[:-8])
    return settings


def documents(tmp_path, inputs, content, name="a.txt", **more):
    """A folder of one text file of these bytes, with a tokenizer and a model that fit together."""
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / name).write_bytes(content)
    model = config_of(inputs, vocab_size=TEXT_VOCABULARY)
    return {
        "data": Data(path=tmp_path / "documents", tokenizer=str(inputs / "tokenizer")),
        "model": model,
        **more,
    }


def indexed(tmp_path, text):
    """A model folder whose weights are said to be where an index says."""

    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(text)

    return changed(tmp_path, change)


def stored(tmp_path, **tensors):
    """A model folder with other tensors: a name's dots are double underscores here."""

    def change(folder):
        own = load_file(folder / "model.safetensors")
        own |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})

    return changed(tmp_path, change)


CODE = "open('ran', 'w')\n"
"""Of a model or tokenizer that brings its own: must never run."""


def coded_model(tmp_path):
    def change(folder):
        (folder / "own.py").write_text(CODE)
        reference = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
        (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": reference}))

    return changed(tmp_path, change)


def coded_tokenizer(tmp_path, inputs):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    reference = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(reference))
    return {"data": Data(path=inputs / "text", tokenizer=str(folder))}


def occupied(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "run.json").write_text("{}")
    return {"run_folder": str(tmp_path / "used")}


def in_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    return tmp_path / "file"


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
    "attention_to_what_follows": (
        lambda t, i: configured(
            t,
            Gemma3TextConfig(
                hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1,
                intermediate_size=16, vocab_size=VOCABULARY, head_dim=8, use_bidirectional_attention=True,
            ),
        ),
        ["bidirectional attention is not supported", "full_attention and sliding_attention"],
    ),
    "balance_without_experts": (
        lambda t, i: {"router_aux_loss_coef": 0.01},
        ["router_aux_loss_coef=0.01", "Qwen3Config has no experts", "leave it out"],
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
    "model_empty_name": (lambda t, i: {"model": ""}, ["model=''", "give"]),
    "model_a_file": (lambda t, i: {"model": in_a_file(t)}, ["model=", "file", "give"]),
    "model_config_a_list": (lambda t, i: written(t, "[]"), ["model=", "give"]),
    "model_config_not_text": (
        lambda t, i: changed(t, lambda m: (m / "config.json").write_bytes(b"\xff\xfe\x00")),
        ["model=", "give"],
    ),
    "model_of_unknown_type": (lambda t, i: written(t, '{"model_type": "own"}'), ["model=", "own", "give"]),
    "model_with_code": (lambda t, i: coded_model(t), ["model=", "give"]),
    "model_no_vocabulary": (
        lambda t, i: resized(t, vocab_size=0),
        ["embed_tokens", "[0, 20]", "config.json"],
    ),
    "model_with_dropout": (
        lambda t, i: resized(t, attention_dropout=0.1),
        ["attention_dropout=0.1", "set it to 0"],
    ),
    "model_with_residual_dropout": (
        lambda t, i: {"model": Phi3Config(resid_pdrop=0.1, pad_token_id=0)},
        ["resid_pdrop=0.1", "set it to 0"],
    ),
    "index_not_json": (lambda t, i: indexed(t, "{"), ["index.json", "not a safetensors index"]),
    "index_a_list": (lambda t, i: indexed(t, "[]"), ["index.json", "not a safetensors index"]),
    "index_elsewhere": (
        lambda t, i: indexed(t, '{"weight_map": {"x": "../../other.safetensors"}}'),
        ["index.json", "../../other.safetensors", "not a file beside it"],
    ),
    "index_of_a_missing_file": (
        lambda t, i: indexed(t, '{"weight_map": {"x": "model-1.safetensors"}}'),
        ["model-1.safetensors", "missing or not whole"],
    ),
    "weights_quantised": (
        lambda t, i: stored(t, model__norm__weight=torch.ones(20, dtype=torch.int8)),
        ["model.norm.weight", "quantised"],
    ),
    "weights_of_more": (
        lambda t, i: stored(t, model__layers__5__x=torch.ones(2)),
        ["model.layers.5.x", "no place in the model"],
    ),
    "weights_untied": (
        lambda t, i: stored(t, lm_head__weight=torch.ones(VOCABULARY, 20)),
        ["lm_head.weight", "tie_word_embeddings"],
    ),
    "samples_without_labels": (lambda t, i: sampled(t, whole()), ["labels.npy", "no such file"]),
    "samples_without_ids": (lambda t, i: sampled(t, None, whole()), ["input_ids.npy", "no such file"]),
    "samples_of_two_shapes": (
        lambda t, i: sampled(t, whole(), whole(shape=(63, LENGTH))),
        ["[64, 16]", "[63, 16]", "the same"],
    ),
    "samples_of_floats": (
        lambda t, i: sampled(t, whole(dtype=np.float32), whole()),
        ["input_ids.npy", "float32", "expected int32"],
    ),
    "samples_flat": (
        lambda t, i: sampled(t, whole(shape=(64,)), whole()),
        ["input_ids.npy", "[64]", "expected int32"],
    ),
    "samples_none": (
        lambda t, i: sampled(t, whole(shape=(0, LENGTH)), whole(shape=(0, LENGTH))),
        ["input_ids.npy", "[0, 16]", "expected int32"],
    ),
    "samples_pickled": (
        lambda t, i: sampled(t, whole().astype(object), whole()),
        ["input_ids.npy", "not a whole .npy", "write it again"],
    ),
    "samples_cut_short": (lambda t, i: cut_short(t), ["labels.npy", "not a whole .npy", "write it again"]),
    "samples_negative": (
        lambda t, i: sampled(t, whole(-1), whole()),
        ["input_ids.npy", "token id -1", "0 to 96"],
    ),
    "labels_of_another_vocabulary": (
        lambda t, i: sampled(t, whole(), whole(97)),
        ["labels.npy", "token id 97", "0 to 96"],
    ),
    "labels_all_ignored": (
        lambda t, i: sampled(t, whole(), whole(-100)),
        ["labels.npy", "nothing to learn", "prepare"],
    ),
    "text_not_utf8": (
        lambda t, i: documents(t, i, b"caf\xe9 " * 200),
        ["a.txt", "not UTF-8", "convert the file"],
    ),
    "text_empty": (lambda t, i: documents(t, i, b""), ["data.path=", "too few for one sequence"]),
    "text_too_short_for_a_sequence": (
        lambda t, i: documents(t, i, b"x = 1"),
        ["data.path=", "too few for one sequence", "sequence_length"],
    ),
    "text_of_another_ending": (
        lambda t, i: documents(t, i, b"text", name="a.rst"),
        ["data.path=", "no file there ends in .txt", "data.suffixes"],
    ),
    "data_empty_name": (lambda t, i: {"data": Data(path="")}, ["data.path=''", "give"]),
    "data_a_word": (lambda t, i: {"data": "texts"}, ["data='texts'", "expected Data"]),
    "data_suffixes": (lambda t, i: {"data": Data(path=t, suffixes=".c")}, ["data.suffixes='.c'", "tuple"]),
    "tokenizer_with_code": (lambda t, i: coded_tokenizer(t, i), ["data.tokenizer=", "give"]),
    "run_folder_used": (lambda t, i: occupied(t), ["run_folder=", "holds a run already", "another folder"]),
    "run_folder_a_file": (
        lambda t, i: {"run_folder": str(in_a_file(t))},
        ["run_folder=", "file", "give another folder"],
    ),
    "run_folder_in_a_file": (
        lambda t, i: {"run_folder": str(in_a_file(t) / "run")},
        ["run_folder=", "file", "give another folder"],
    ),
    "run_folder_read_only": (
        lambda t, i: {"run_folder": "/proc/self/run"},
        ["run_folder='/proc/self/run'", "another folder"],
    ),
    "sequence_length_zero": (lambda t, i: {"sequence_length": 0}, ["sequence_length=0", "at least 1"]),
    "steps_a_word": (lambda t, i: {"steps": "all"}, ["steps='all'", "expected int"]),
    "ranks_none": (lambda t, i: {"ranks": 0}, ["ranks=0", "at least 1"]),
    "device_unknown": (lambda t, i: {"device": "tpu"}, ["device='tpu'", "cuda, cpu"]),
    "dtype_unknown": (lambda t, i: {"compute_dtype": "float16"}, ["compute_dtype=", "float32, bfloat16"]),
    "compile_a_word": (lambda t, i: {"compile": "yes"}, ["compile='yes'", "expected bool"]),
    "budget_a_word": (lambda t, i: {"host_memory_budget": "8"}, ["host_memory_budget='8'", "float"]),
    "seed_too_large": (lambda t, i: {"seed": 2**63}, ["seed=", "below 2**63"]),
    "lr_infinite": (lambda t, i: {"optimizer": Optimizer(lr=math.inf)}, ["optimizer.lr=inf", "finite"]),
    "lr_a_word": (lambda t, i: {"optimizer": Optimizer(lr="low")}, ["optimizer.lr='low'", "float"]),
    "betas_one": (lambda t, i: {"optimizer": Optimizer(betas=(0.9,))}, ["optimizer.betas=", "two numbers"]),
    "clip_norm_a_word": (
        lambda t, i: {"optimizer": Optimizer(clip_norm="off")},
        ["clip_norm='off'", "float"],
    ),
    "delivery_unknown": (
        lambda t, i: {"layout": Layout(delivery="push")},
        ["layout.delivery='push'", "replicated, sharded, broadcast"],
    ),
    "window_none": (lambda t, i: {"layout": Layout(window=0)}, ["layout.window=0", "at least 1"]),
    "chunks_too_small": (
        lambda t, i: {"layout": Layout(chunk_bytes=100)},
        ["layout.chunk_bytes=100", "at least 4096"],
    ),
    "activations_unknown": (
        lambda t, i: {"layout": Layout(activations="forget")},
        ["layout.activations='forget'", "recompute"],
    ),
    "layout_a_word": (lambda t, i: {"layout": "sharded"}, ["layout='sharded'", "expected Layout"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_line_with_nothing_left(inputs, tmp_path, monkeypatch, name):
    if name == "cuda_without_a_gpu" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    settings, words = CASES[name]
    monkeypatch.chdir(tmp_path)  # where runs/ would appear
    files, processes, segments = [], children(), memfds()
    with pytest.raises(ConfigError) as refusal:
        settings = settings(tmp_path, inputs)
        files = sorted(tmp_path.rglob("*"))
        launch(small_config(inputs, **settings))
    message = str(refusal.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert len(message) < 500
    assert sorted(tmp_path.rglob("*")) == files
    assert (children(), memfds()) == (processes, segments)
