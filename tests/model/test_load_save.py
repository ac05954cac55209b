"""Loading and exporting against transformers itself."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from slidedp.data.stdlib import stdlib_files, train_tokenizer
from slidedp.errors import ConfigError
from slidedp.host.state import HostState
from slidedp.model import save
from slidedp.model.families import load_config, skeleton
from slidedp.model.load import INDEX, WEIGHTS, fill_random, load_pretrained
from slidedp.model.save import export
from slidedp.model.units import units_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "llama": (LlamaConfig, {}),
    "llama_bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),  # has biases on q, k and v
    "mistral": (MistralConfig, {"head_dim": 8}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def make_config(family="llama", tied=False, **more):
    kind, own = FAMILIES[family]
    return kind(**{**SIZES, **own, **more}, tie_word_embeddings=tied)


def make_model(config):
    """A model with no constant tensor, so that a swapped norm or bias is noticed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_state(config, dtype=torch.float32):
    return HostState(units_of(skeleton(config)), dtype)


def parameters_of(state):
    """Checkpoint name -> FP32 view of the master."""
    return {
        p.name: p.view(torch.from_numpy(state.unit(unit).master))
        for unit in state.units
        for p in unit.parameters
    }


def assert_padding_is_zero(state):
    for unit in state.units:
        padding = np.ones(unit.numel, bool)
        for p in unit.parameters:
            padding[p.offset : p.offset + p.numel] = False
        assert not state.unit(unit).master[padding].any()


def saved_llama(folder, tied=False, shard=None):
    model = make_model(make_config(tied=tied))
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    return model


def rewrite(folder, change):
    """Applies `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def assert_refused(folder, *words, config=None):
    """One line that holds `words`; nothing was written to the state."""
    state = make_state(config or load_config(str(folder)))
    with pytest.raises(ConfigError) as refusal:
        load_pretrained(state, str(folder))
    message = str(refusal.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert not any(tensor.any() for tensor in parameters_of(state).values())


@every_family
@tied_or_not
@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one_file", "sharded"])
def test_load_then_export_is_the_same_model(tmp_path, family, tied, shard):
    model = make_model(make_config(family, tied))
    model.save_pretrained(tmp_path / "in", **({"max_shard_size": shard} if shard else {}))
    assert (tmp_path / "in" / INDEX).exists() == bool(shard)

    config = load_config(str(tmp_path / "in"))
    state = make_state(config)
    load_pretrained(state, str(tmp_path / "in"))
    loaded, expected = parameters_of(state), dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert_padding_is_zero(state)

    export(state, config, tmp_path / "out", dtype="float32")
    again, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(notes.values())
    assert again.dtype == torch.float32
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_becomes_fp32(tmp_path, dtype):
    model = make_model(make_config()).to(dtype)
    model.save_pretrained(tmp_path)
    state = make_state(model.config, torch.bfloat16)
    load_pretrained(state, str(tmp_path))
    loaded = parameters_of(state)
    assert all(torch.equal(loaded[name], p.float()) for name, p in model.named_parameters())
    for unit in state.units:
        master = torch.from_numpy(state.unit(unit).master)
        assert torch.equal(state.delivered(unit), master.bfloat16())


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=["working", "master"])
def test_bf16_export_is_the_rounded_master_in_small_shards(tmp_path, monkeypatch, compute):
    monkeypatch.setattr(save, "SHARD_BYTES", 10_000)
    config = make_config("qwen3", tied=True)
    state = make_state(config, compute)
    fill_random(state, config, seed=1)
    export(state, config, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in load_file(f).values())
    assert all(sum(t.nbytes for t in load_file(f).values()) <= 10_000 for f in files)
    assert "lm_head.weight" not in index["weight_map"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    expected = parameters_of(state)
    assert all(torch.equal(p, expected[n].bfloat16()) for n, p in again.named_parameters())


def test_export_writes_whole_folders_only(tmp_path, monkeypatch):
    config = make_config()
    state = make_state(config)
    out = tmp_path / "out"
    out.mkdir()
    export(state, config, out, dtype="float32")  # an empty folder is taken
    saved = json.loads((out / "config.json").read_text())
    assert (saved["architectures"], saved["dtype"]) == (["LlamaForCausalLM"], "float32")
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    assert config.architectures is None  # the caller's config is left alone
    with pytest.raises(ConfigError, match="not an empty folder"):
        export(state, config, out)
    with pytest.raises(ConfigError, match="float16"):
        export(state, config, tmp_path / "other", dtype="float16")

    def fail(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(save, "write_assets", fail)
    with pytest.raises(OSError, match="No space"):
        export(state, config, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_export_keeps_the_generation_config_and_tokenizer(tmp_path):
    saved_llama(tmp_path / "in")
    settings = {"eos_token_id": [2, 3], "temperature": 0.6, "do_sample": False}  # contradictory
    (tmp_path / "in" / "generation_config.json").write_text(json.dumps(settings))
    config = load_config(str(tmp_path / "in"))
    tokenizer = train_tokenizer(stdlib_files(20_000), 300)
    export(make_state(config), config, tmp_path / "out", tokenizer=tokenizer)
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept["eos_token_id"] == [2, 3]
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("import os").input_ids == tokenizer("import os").input_ids
    assert again.eos_token == "<|endoftext|>"


def test_random_weights_are_as_transformers_draws_them_and_stable_under_layer_count():
    config = make_config("qwen2", hidden_size=128)
    state = make_state(config, torch.bfloat16)
    fill_random(state, config, seed=3)
    values = parameters_of(state)
    for name, tensor in values.items():
        if tensor.ndim == 2:
            assert tensor.std().item() == pytest.approx(config.initializer_range, rel=0.05)
            assert abs(tensor.mean().item()) < 5 * config.initializer_range / tensor.numel() ** 0.5
        else:
            assert torch.all(tensor == (1.0 if "norm" in name else 0.0)), name
    assert_padding_is_zero(state)
    matrices = [t.flatten()[:1000] for t in values.values() if t.ndim == 2]
    assert len({t.numpy().tobytes() for t in matrices}) == len(matrices)
    unit = state.units[1]
    assert torch.equal(state.delivered(unit), torch.from_numpy(state.unit(unit).master).bfloat16())

    deeper_config = make_config("qwen2", hidden_size=128, num_hidden_layers=4)
    deeper = make_state(deeper_config)
    fill_random(deeper, deeper_config, seed=3)
    deeper_values = parameters_of(deeper)
    assert all(torch.equal(deeper_values[name], tensor) for name, tensor in values.items())
    fill_random(deeper, deeper_config, seed=4)
    assert not torch.equal(deeper_values["lm_head.weight"], values["lm_head.weight"])


def test_known_extra_tensors_are_ignored(tmp_path):
    model = saved_llama(tmp_path, tied=True)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path, add)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not read")
    state = make_state(model.config)
    load_pretrained(state, str(tmp_path))
    assert parameters_of(state).keys() == dict(model.named_parameters()).keys()


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    saved_llama(tmp_path)
    original = load_file(tmp_path / WEIGHTS)

    def refused(change, *words):
        save_file(original, tmp_path / WEIGHTS, metadata={"format": "pt"})
        rewrite(tmp_path, change)
        assert_refused(tmp_path, *words)

    refused(lambda t: t.pop(name), f"no tensor {name}")
    refused(lambda t: t.update({name: t[name].T.contiguous()}), name, "[32, 40]", "[40, 32]")
    refused(lambda t: t.update({name: t[name].to(torch.int8)}), name, "I8", "quantised")
    refused(lambda t: t.update({"model.extra": torch.ones(1)}), "model.extra has no place")


def test_tied_config_with_two_different_matrices_is_refused(tmp_path):
    saved_llama(tmp_path)
    assert_refused(tmp_path, "lm_head.weight differs", "tie_word", config=make_config(tied=True))


def test_broken_folders_are_refused(tmp_path, monkeypatch):
    saved_llama(tmp_path, shard="20KB")
    config = load_config(str(tmp_path))
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    assert_refused(tmp_path, shards[1].name, "download it again")
    shards[1].unlink()
    assert_refused(tmp_path, shards[1].name, "download it again")
    (tmp_path / INDEX).write_text("{}")
    assert_refused(tmp_path, INDEX, "not a safetensors index")
    (tmp_path / INDEX).unlink()
    assert_refused(tmp_path, "no model.safetensors")
    (tmp_path / "pytorch_model.bin").touch()
    assert_refused(tmp_path, "only pickled weights", "save_pretrained")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused("nobody/nothing", "nobody/nothing", "give a local folder", config=config)
    assert_refused("/no/such/folder", "no such folder", config=config)
