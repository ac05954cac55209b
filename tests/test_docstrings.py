"""What `?` says in a notebook: every public name, its methods, its settings and their units."""

import ast
import dataclasses
import inspect
import re
from itertools import pairwise

import pytest
from traitlets import HasTraits

import slidedp
import slidedp.widgets
from slidedp import Config, Data, Layout, open_run
from slidedp.policy.records import Candidate, Record
from slidedp.telemetry import RunLog

PUBLIC = {name: getattr(module, name) for module in (slidedp, slidedp.widgets) for name in module.__all__} | {
    "RunLog": RunLog,
    "Candidate": Candidate,
    "Record": Record,
}
SETTINGS = [
    c
    for c in PUBLIC.values()
    if dataclasses.is_dataclass(c) and c.__module__ in ("slidedp.config", "slidedp.layout")
]
UNIT = re.compile(
    r"bytes|GiB|steps?\b|sequences?|tokens?|minutes|passes|layers?\b|units?\b|buffers?|slots|factor|fraction"
    r"|part of|seed|decay|processes|checkpoints|norm|times",
    re.IGNORECASE,
)


def members(cls):
    """Public functions, properties and class methods that a class itself defines."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name):
    found = PUBLIC[name]
    text = inspect.getdoc(found) or ""
    assert len(text) > 20 and not text.startswith(f"{name}("), "dataclasses make such a text themselves"
    if inspect.isclass(found):
        assert [member for member, function in members(found) if not function.__doc__] == []
    if inspect.isclass(found) and issubclass(found, HasTraits):
        own = {n: t for n, t in found.class_own_traits().items() if not n.startswith("_")}
        assert [n for n, trait in own.items() if not trait.help] == []


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_every_setting_is_explained_with_its_unit(cls):
    """Read from the source, and found again in what `?` shows."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    texts = {
        node.target.id: following.value.value
        for node, following in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(following, ast.Expr)
    }
    for field in dataclasses.fields(cls):
        text = texts.get(field.name)
        assert text, f"{cls.__name__}.{field.name} has no text"
        assert inspect.cleandoc(text).splitlines()[0] in cls.__doc__
        if re.search(r"\b(int|float)\b", str(field.type)):
            assert UNIT.search(text), f"{cls.__name__}.{field.name}: which unit? {text}"


def test_layouts_and_configs_show_themselves():
    layout = Layout(chunk_bytes=2**20, activations=("keep", "keep", "offload"))
    shown = layout._repr_html_()
    assert "1 MiB" in shown and "2 keep, 1 offload" in shown and "default" in shown
    config = Config(model="a/<model>", data=Data(path="texts"), steps=7)
    shown = config._repr_html_()
    assert "a/&lt;model&gt;" in shown and "texts" in shown and "sequence_length" not in shown
    assert "default layout" not in shown and "ParameterGroup" not in shown


def test_a_run_folder_shows_itself(tmp_path):
    description = {
        "ranks": 1, "config": {"steps": 9}, "flops_per_token": 1.0, "parameters": 5_000_000, "gpu": None,
    }  # fmt: skip
    log = RunLog.create(tmp_path / "<run>", description)
    assert "step 0 of 9" in repr(log)
    step = {"kind": "step", "rank": 0, "loss_sum": 6.0, "targets": 2, "compute_seconds": 0.5}
    step |= {
        "wait_seconds": {},
        "gpu_peak_bytes": 0,
        "anonymous_bytes": 0,
        "began": 0.0,
        "allocator_retries": 0,
    }
    for number in range(3):
        log.add(step | {"step": number, "step_seconds": 0.5 if number else None})
    log.add({"kind": "end", "status": "stopped", "failure": None, "time": 0.0})
    log.close()
    text = repr(open_run(log.folder))
    assert "status stopped, step 3 of 9, loss 3.0000 nats per target token, speed 4 target tokens/s" in text
    assert "5.0 M parameters" in text and "&lt;run&gt;" in log._repr_html_()
