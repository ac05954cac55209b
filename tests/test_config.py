"""Settings: what is refused, in which words, and what a TOML file becomes."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from slidedp.config import Checkpoint, Config, Data, Optimizer, ParameterGroup
from slidedp.errors import ConfigError
from slidedp.layout import ACTIVATIONS, LANDINGS, Layout

GOOD = {"model": "folder", "data": {"path": "texts"}}

# (settings on top of GOOD, the field that the message must name, accepted values it must name)
BAD = [
    ({"layout": {"delivery": "push"}}, "layout.delivery", "replicated, sharded, broadcast"),
    ({"layout": {"reduction": "GPU"}}, "layout.reduction", "cpu, gpu, gpu_root"),
    ({"layout": {"schedule": "later"}}, "layout.schedule", "in_forward, in_backward"),
    ({"layout": {"schedule": "in_backward"}}, "layout.schedule", "optimizer.clip_norm=None"),
    ({"layout": {"activations": "spil"}}, "layout.activations", ", ".join(ACTIVATIONS)),
    ({"layout": {"activations": ["keep", "none"]}}, "layout.activations", ", ".join(ACTIVATIONS)),
    ({"layout": {"activations": ["keep", 3]}}, "layout.activations", ", ".join(ACTIVATIONS)),
    ({"layout": {"activations": 1}}, "layout.activations", "str"),
    ({"layout": {"chunk_bytes": 4095}}, "layout.chunk_bytes", "at least 4096"),
    ({"layout": {"chunk_bytes": 1e6}}, "layout.chunk_bytes", "int"),
    ({"layout": {"landing": "half"}}, "layout.landing", ", ".join(LANDINGS)),
    ({"layout": {"partial_budget": 0.0}}, "layout.partial_budget", "(0, 1]"),
    ({"layout": {"window": 0}}, "layout.window", "at least 1"),
    ({"layout": {"window": True}}, "layout.window", "int"),
    ({"layout": {"gradient_slots": -1}}, "layout.gradient_slots", "at least 1"),
    ({"layout": {"gradient_slots": "2"}}, "layout.gradient_slots", "int"),
    ({"layout": {"slots": 2}}, "layout.slots", "gradient_slots"),
    ({"layout": "sharded"}, "layout", "table"),
    ({"optimizer": {"lr": -1e-5}}, "optimizer.lr", "at least 0"),
    ({"optimizer": {"lr": math.nan}}, "optimizer.lr", "at least 0"),
    ({"optimizer": {"lr": "1e-5"}}, "optimizer.lr", "float"),
    ({"optimizer": {"eps": -1.0}}, "optimizer.eps", "at least 0"),
    ({"optimizer": {"weight_decay": -0.1}}, "optimizer.weight_decay", "at least 0"),
    ({"optimizer": {"warmup_steps": -1}}, "optimizer.warmup_steps", "at least 0"),
    ({"optimizer": {"warmup_steps": 1.5}}, "optimizer.warmup_steps", "int"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "two numbers in [0, 1)"),
    ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas", "two numbers in [0, 1)"),
    ({"optimizer": {"betas": [-0.1, 0.9]}}, "optimizer.betas", "two numbers in [0, 1)"),
    ({"optimizer": {"betas": 0.9}}, "optimizer.betas", "tuple"),
    ({"optimizer": {"betas": ["0.9", "0.95"]}}, "optimizer.betas", "two numbers in [0, 1)"),
    ({"optimizer": {"clip_norm": 0.0}}, "optimizer.clip_norm", "above 0, or None"),
    ({"optimizer": {"clip_norm": -1}}, "optimizer.clip_norm", "above 0, or None"),
    ({"optimizer": {"clip_norm": "off"}}, "optimizer.clip_norm", "float"),
    ({"optimizer": {"lr_schedule": "step"}}, "optimizer.lr_schedule", "constant, linear, cosine"),
    ({"optimizer": {"momentum": 0.9}}, "optimizer.momentum", "betas"),
    ({"optimizer": {"decay_steps": 5}}, "optimizer.decay_steps", "lr_schedule='wsd'"),
    ({"optimizer": {"freeze": "embed"}}, "optimizer.freeze", "tuple"),
    ({"optimizer": {"freeze": [0]}}, "optimizer.freeze", "patterns"),
    ({"optimizer": {"groups": ["norm"]}}, "optimizer.groups[0]", "table"),
    ({"optimizer": {"groups": [{"lr_factor": 2}]}}, "optimizer.groups[0].pattern", "missing"),
    ({"optimizer": {"groups": [{"pattern": 5}]}}, "optimizer.groups.pattern", "str"),
    ({"optimizer": {"groups": [{"pattern": "*", "lr_factor": "2"}]}}, "optimizer.groups.lr_factor", "float"),
    ({"checkpoint": {"every_steps": "10"}}, "checkpoint.every_steps", "int"),
    ({"checkpoint": {"every_steps": 2.5}}, "checkpoint.every_steps", "int"),
    ({"checkpoint": {"every_minutes": "10"}}, "checkpoint.every_minutes", "float"),
    ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last", "at least 1"),
    ({"checkpoint": {"on_stop": "no"}}, "checkpoint.on_stop", "bool"),
    ({"layout": {"activations": []}}, "layout.activations", "at least one"),
    ({"sequence_length": 0}, "sequence_length", "at least 1"),
    ({"sequence_length": 1024.0}, "sequence_length", "int"),
    ({"batch_size": 0}, "batch_size", "at least 1"),
    ({"steps": 0}, "steps", "at least 1"),
    ({"steps": "all"}, "steps", "int"),
    ({"ranks": 0}, "ranks", "at least 1"),
    ({"device": "gpu"}, "device", "cuda, cpu"),
    ({"compute_dtype": "float16"}, "compute_dtype", "float32, bfloat16"),
    ({"compile": "yes"}, "compile", "bool"),
    ({"random_weights": 1}, "random_weights", "bool"),
    ({"seed": "x"}, "seed", "int"),
    ({"host_memory_budget": -1.0}, "host_memory_budget", "at least 0"),
    ({"data": {"path": 3}}, "data.path", "str"),
    ({"data": {}}, "data.path", "missing"),
    ({"data": {"path": "x", "sufixes": [".c"]}}, "data.sufixes", "did you mean suffixes?"),
    ({"data": {"path": "x", "suffixes": ".c"}}, "data.suffixes", "tuple"),
    ({"data": {"path": "x", "suffixes": []}}, "data.suffixes", "file endings"),
    ({"data": {"path": "x", "suffixes": ["c"]}}, "data.suffixes", "file endings"),
    ({"data": "x"}, "data", "table"),
    ({"optimizer": {"lr": math.inf}}, "optimizer.lr", "finite"),
    ({"optimizer": {"weight_decay": math.inf}}, "optimizer.weight_decay", "finite"),
    ({"optimizer": {"clip_norm": True}}, "optimizer.clip_norm", "float"),
    ({"optimizer": {"clip_norm": math.nan}}, "optimizer.clip_norm", "above 0, or None"),
    ({"seed": 2**63}, "seed", "below 2**63"),
    ({"host_memory_budget": math.inf}, "host_memory_budget", "finite"),
    ({"run_folder": 3}, "run_folder", "str"),
    ({"model": 3}, "model", "str"),
    ({"batchsize": 4}, "batchsize", "did you mean batch_size?"),
    ({"layout": {"gpu_updates": 2, "resident_updates": 3}}, "layout.resident_updates", "0 to gpu_updates"),
    ({"layout": {"resident_updates": -1}}, "layout.resident_updates", "0 to gpu_updates"),
    ({"layuot": {}}, "layuot", "did you mean layout?"),
]


@pytest.mark.parametrize(
    ("settings", "field", "accepted"), BAD, ids=[f"{i}-{b[1]}" for i, b in enumerate(BAD)]
)
def test_bad_settings_are_refused_in_one_line(settings, field, accepted):
    with pytest.raises(ConfigError) as refusal:
        Config.from_dict(GOOD | settings)
    message = str(refusal.value)
    assert message.startswith(field), message
    assert accepted in message, message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("cls", "settings", "field"),
    [
        (Layout, {"window": True}, "layout.window"),
        (Layout, {"chunk_bytes": 1e6}, "layout.chunk_bytes"),
        (Layout, {"gradient_slots": None}, "layout.gradient_slots"),
        (Optimizer, {"lr": True}, "optimizer.lr"),
        (Optimizer, {"lr": "1"}, "optimizer.lr"),
        (Optimizer, {"warmup_steps": 1.0}, "optimizer.warmup_steps"),
        (Optimizer, {"betas": ("0.9", "0.95")}, "optimizer.betas"),
        (Optimizer, {"betas": 0.9}, "optimizer.betas"),
        (Optimizer, {"clip_norm": "off"}, "optimizer.clip_norm"),
        (Layout, {"activations": 3}, "layout.activations"),
        (Layout, {"partial_budget": "x"}, "layout.partial_budget"),
        (Data, {"path": 3}, "data.path"),
        (Config, {"model": 3, "data": Data(path="x")}, "model"),
        (Config, {"model": "x", "data": "x"}, "data"),
        (Config, {"model": "x", "data": Data(path="x"), "layout": "sharded"}, "layout"),
        (Config, {"model": "x", "data": Data(path="x"), "compile": "yes"}, "compile"),
    ],
)
def test_python_is_checked_like_toml(cls, settings, field):
    with pytest.raises(ConfigError, match=f"^{field}=[^\\n]*$"):
        cls(**settings)


TEXT = st.text("abx.-/1\né", max_size=4)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.binary(max_size=4),
    st.sampled_from([*ACTIVATIONS, *LANDINGS, "cpu", "cuda", "gpu", "linear", "in_backward", "float32"]),
    st.lists(st.one_of(st.sampled_from(ACTIVATIONS), st.floats(0, 1), TEXT), max_size=3),
    st.dictionaries(TEXT, st.integers(), max_size=2),
)  # fmt: skip


@st.composite
def tables(draw):
    """A good table in which some fields, of any of the five classes, hold anything at all."""
    table = {"model": "folder", "data": {"path": "texts"}, "layout": {}, "optimizer": {}, "checkpoint": {}}
    classes = {"layout": Layout, "optimizer": Optimizer, "checkpoint": Checkpoint, "data": Data, None: Config}
    for where, cls in classes.items():
        names = [f.name for f in dataclasses.fields(cls) if where or f.name not in table or f.name == "data"]
        chosen = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=2))
        (table[where] if where and isinstance(table[where], dict) else table).update(chosen)
    return table


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(tables())
def test_any_table_is_a_config_or_is_refused_in_one_line(table):
    try:
        config = Config.from_dict(table)
    except ConfigError as refusal:
        assert "\n" not in str(refusal)
        return
    again = Config.from_dict(dataclasses.asdict(config))
    assert again == config
    json.dumps(dataclasses.asdict(config), allow_nan=False)  # a run folder can hold it


@pytest.mark.parametrize("missing", ["model", "data"])
def test_what_has_no_default_must_be_given(missing):
    with pytest.raises(ConfigError, match=f"^{missing}: missing"):
        Config.from_dict({name: value for name, value in GOOD.items() if name != missing})


@pytest.mark.parametrize("values", [None, [], "model"])
def test_a_config_is_a_table(values):
    with pytest.raises(ConfigError, match="expected a table"):
        Config.from_dict(values)


def test_good_table_is_the_minimum():
    config = Config.from_dict(GOOD)
    assert config == Config(model="folder", data=Data(path="texts"))


def toml(values: dict, prefix: str = "") -> str:
    """A nested dict of plain values as TOML."""
    lines, tables = [], []
    for name, value in values.items():
        if isinstance(value, dict):
            tables += [f"[{prefix}{name}]", toml(value, f"{prefix}{name}.")]
        elif isinstance(value, tuple | list):
            lines.append(f"{name} = [{', '.join(map(repr, value))}]")
        elif value is not None:  # TOML has no null: a field that is left out keeps its default
            lines.append(f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    return "\n".join(lines + tables)


@pytest.mark.parametrize("content", [b"steps = ", b"model = '\xff\xfe'"])
def test_what_is_not_toml_is_named(tmp_path, content):
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml: not TOML: "):
        Config.from_toml(tmp_path / "run.toml")


def test_toml_round_trip(tmp_path):
    config = Config(
        model="some/model",
        data=Data(path="texts", tokenizer="other", suffixes=(".c", ".h")),
        sequence_length=77,
        batch_size=6,
        steps=12,
        optimizer=Optimizer(lr=3e-4, betas=(0.8, 0.99), clip_norm=0.25, warmup_steps=2, lr_schedule="cosine"),
        layout=Layout(
            delivery="broadcast",
            reduction="cpu",
            chunk_bytes=8192,
            activations=("keep", "offload", "recompute"),
        ),
        ranks=3,
        device="cpu",
        compute_dtype="bfloat16",
        compile=False,
        random_weights=True,
        seed=5,
        run_folder="runs/x",
        host_memory_budget=12.5,
    )
    (tmp_path / "run.toml").write_text(toml(dataclasses.asdict(config)))
    assert Config.from_toml(tmp_path / "run.toml") == config


def test_whole_numbers_are_good_floats():
    config = Config.from_dict(GOOD | {"optimizer": {"clip_norm": 2, "lr": 0}, "host_memory_budget": 3})
    assert (config.optimizer.clip_norm, config.host_memory_budget) == (2.0, 3.0)
    assert isinstance(config.optimizer.clip_norm, float)


def test_toml_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file") as refusal:
        Config.from_toml(tmp_path / "none.toml")
    assert "\n" not in str(refusal.value)
    (tmp_path / "bad.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"bad\.toml: not TOML") as refusal:
        Config.from_toml(tmp_path / "bad.toml")
    assert "\n" not in str(refusal.value)


def test_paths_may_be_path_objects():
    config = Config(model=Path("folder"), data=Data(path=Path("texts")))
    assert (config.model, config.data.path) == ("folder", "texts")
    assert isinstance(Config(model=Qwen3Config(), data=Data(path="texts")).model, Qwen3Config)


def test_one_activation_mode_or_one_per_layer():
    assert Layout(activations="keep").activation_modes(3) == ("keep",) * 3
    assert Layout(activations=("keep", "offload")).activation_modes(2) == ("keep", "offload")
    with pytest.raises(ConfigError, match=r"layout\.activations names 2 layers, the model has 3"):
        Layout(activations=("keep", "offload")).activation_modes(3)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(window=5, schedule="in_backward", partial_budget=0.25),
        Layout(chunk_bytes=8 * 2**20, activations=("offload",) * 2 + ("keep",) * 30 + ("offload",)),
        Layout(chunk_bytes=5000, activations="keep"),
    ],
)
def test_a_layout_is_shown_as_the_python_that_makes_it(layout):
    assert eval(repr(layout)) == layout
    assert len(repr(layout)) < 120


def test_positional_settings_are_refused():
    with pytest.raises(TypeError):
        Layout("sharded")


# --- what the machine chooses ---------------------------------------------------------------------


def test_a_machine_without_gpu_trains_in_fp32_on_two_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = Config.from_dict(GOOD).resolved()
    assert (config.device, config.ranks, config.compute_dtype, config.compile) == ("cpu", 2, "float32", False)
    with pytest.raises(ConfigError, match=r"^device='cuda': no GPU is visible; set device='cpu'$"):
        Config.from_dict(GOOD | {"device": "cuda"}).resolved()


def test_a_machine_with_gpus_takes_them_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = Config.from_dict(GOOD).resolved()
    assert (config.device, config.ranks, config.compute_dtype, config.compile) == (
        "cuda",
        4,
        "bfloat16",
        True,
    )
    config = Config.from_dict(GOOD | {"device": "cpu", "compile": True}).resolved()
    assert (config.ranks, config.compute_dtype, config.compile) == (2, "float32", True)
    with pytest.raises(ConfigError, match=r"^ranks=8: 4 GPU\(s\) are visible; set ranks to at most 4$"):
        Config.from_dict(GOOD | {"ranks": 8}).resolved()


def test_the_batch_must_split_over_the_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"^batch_size=8 cannot be split over 3 ranks: use a multiple of 3$"
    ):
        Config.from_dict(GOOD | {"ranks": 3}).resolved()


def test_what_is_set_stays(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen = {"device": "cuda", "ranks": 2, "compute_dtype": "float32", "compile": False}
    config = Config.from_dict(GOOD | chosen).resolved()
    assert {name: getattr(config, name) for name in chosen} == chosen
    assert config.resolved() == config


# --- learning rate --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_rates_are_those_of_torch(schedule, warmup):
    steps, settings = 20, Optimizer(lr=0.5, warmup_steps=warmup, lr_schedule=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    rest = steps - warmup
    main = {
        "constant": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "linear": torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, rest),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rest),
    }[schedule]
    rates = []
    for _ in range(rest):
        rates.append(main.get_last_lr()[0])
        optimizer.step()
        main.step()
    rising = [0.5 * (i + 1) / warmup for i in range(warmup)]
    found = [settings.lr_at(step, steps) for step in range(steps)]
    assert found == pytest.approx(rising + rates, abs=1e-12)


def test_groups_may_be_tables_or_objects_in_a_list_or_tuple():
    group = ParameterGroup(pattern="*.norm.*", lr_factor=2.0)
    for given_groups in ([group], (group,), [{"pattern": "*.norm.*", "lr_factor": 2}]):
        assert Optimizer(groups=given_groups).groups == (group,)


def test_settings_show_what_was_set():
    optimizer = Optimizer(lr=1e-4, groups=(ParameterGroup(pattern="*.norm.*", lr_factor=2.0),))
    config = Config(model="folder", data=Data(path="texts"), steps=7, optimizer=optimizer)
    assert repr(config) == (
        "Config(model='folder', data=Data(path='texts'), steps=7, optimizer=Optimizer(lr=0.0001, "
        "groups=(ParameterGroup(pattern='*.norm.*', lr_factor=2.0),)))"
    )
    names = {"Config": Config, "Data": Data, "Optimizer": Optimizer, "ParameterGroup": ParameterGroup}
    assert eval(repr(config), names) == config
    assert "weight_decay" not in config._repr_html_() and "lr_factor=2.0" in config._repr_html_()
    assert "model=<a new qwen3>" in repr(dataclasses.replace(config, model=Qwen3Config()))
