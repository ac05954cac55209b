"""Damaged files, other models and other data are refused; the last that was written is found."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from slidedp import Config, ConfigError, Data, plan
from slidedp.checkpoint.folder import ASSETS, INDEX, find
from slidedp.checkpoint.resume import check, check_samples, load, verify
from slidedp.data.samples import Samples, write_samples
from slidedp.data.stdlib import stdlib_files, train_tokenizer
from slidedp.host.state import HostState, state_bytes
from slidedp.launching import check_run_folder, held, prepare_data, run_folder
from slidedp.model.units import Parameter, Unit
from tests.checkpoint.contents import CONFIG, SIZES, loaded
from tests.host.bench import make_units
from tests.killing import CONTENTS, filled, save
from tests.launching import nothing_left


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    state = filled(make_units(SIZES), 1)
    save(state, 1, folder)
    state.close()
    return folder / "step-00000001"


def test_any_flipped_bit_is_found(good, tmp_path):
    """By checks that allocate nothing, or while it is read."""
    draw = random.Random(0)
    for path in sorted(p for p in good.rglob("*") if p.is_file()):
        for _ in range(6):
            at, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
            folder = tmp_path / "copy"
            shutil.copytree(good, folder)
            content = bytearray(path.read_bytes())
            content[at] ^= bit
            (folder / path.relative_to(good)).write_bytes(content)
            with pytest.raises(ConfigError) as refusal:
                verify(folder)
            assert "\n" not in str(refusal.value)
            if ASSETS not in path.parts:
                with pytest.raises(ConfigError):
                    loaded(folder, make_units(SIZES))
            shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["unit1.safetensors", INDEX])
def test_a_truncated_or_missing_file_is_named_before_anything_is_allocated(good, tmp_path, name):
    shutil.copytree(good, tmp_path / "step-00000002")
    shutil.copytree(good, tmp_path / "step-00000001")
    path = tmp_path / "step-00000002" / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=f"{name}: .* damaged: take step-00000001 beside it"):
        check(path.parent, make_units(SIZES), CONFIG)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}: "):
        check(path.parent, make_units(SIZES), CONFIG)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (SIZES[:3], "only the checkpoint has unit3.safetensors"),
        ([*SIZES, (0, 100)], "only the model has unit4.safetensors"),
        ([SIZES[0], (1500, 71), *SIZES[2:]], r"master.1.n is \[70\], the model needs \[71\]"),
        ([SIZES[0], (1500, 0), *SIZES[2:]], "master.1.n has no place in the model"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused(good, sizes, message):
    with pytest.raises(ConfigError, match=f"{message}.*: the checkpoint is of another model"):
        check(good, make_units(sizes), CONFIG)


def test_settings_that_decide_the_data_must_be_the_same(good):
    for name, value in (("seed", 3), ("batch_size", 4), ("sequence_length", 8)):
        with pytest.raises(ConfigError, match=f"{name}={value}: .* set {name}="):
            check(good, make_units(SIZES), replace(CONFIG, **{name: value}))
    with pytest.raises(ConfigError, match="steps=1: the checkpoint has done 1 already"):
        check(good, make_units(SIZES), replace(CONFIG, steps=1))
    check_samples(good, CONTENTS)
    with pytest.raises(ConfigError, match="8 samples, the checkpoint was written with 9"):
        check_samples(good, CONTENTS | {"count": 8})
    for other in (CONTENTS | {"labels.npy": 8}, CONTENTS | {"position_ids.npy": 7}):
        with pytest.raises(ConfigError, match="other tokens, targets or documents, the checkpoint was"):
            check_samples(good, other)


def test_refused_data_leave_those_of_the_run(tmp_path, good):
    """Text is made into samples before it can be compared with what the checkpoint was written with."""
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("some other text " * 50)
    samples = np.arange(60, dtype=np.int32).reshape(10, 6)
    write_samples(run / "samples", samples, samples)
    small = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 300}
    config = Config(
        model=Qwen3Config(**small, num_attention_heads=2, num_key_value_heads=1, head_dim=4),
        data=Data(path=corpus),
        sequence_length=8,
        batch_size=2,
        device="cpu",
    )
    tokenizer = train_tokenizer(stdlib_files(50_000), 300)
    with pytest.raises(ConfigError, match="the checkpoint was written with 9"), held(run):
        prepare_data(plan(config), good, run, tokenizer)
    assert list(run.iterdir()) == [run / "samples"]
    assert (Samples(run / "samples").input_ids == samples).all()
    material = prepare_data(plan(config), None, run, tokenizer)
    assert material.samples.folder == run / "samples" and list(run.iterdir()) == [run / "samples"]
    assert material.samples.count == material.contents["count"] and material.samples.length == 8


def test_a_run_folder_may_be_reached_by_a_link(tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    (run / "run.json").write_text('{"ranks": 2}')
    (run / "events.jsonl").touch()
    source = run / "checkpoints" / "step-00000004"
    config = replace(CONFIG, run_folder=str(link), ranks=2)
    check_run_folder(run_folder(config), config, source)
    with pytest.raises(ConfigError, match="link': holds a run already"):
        check_run_folder(run_folder(config), config, tmp_path / "other" / "checkpoints" / "step-00000004")


def test_what_holds_no_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for resume in ("none", tmp_path):
        with pytest.raises(ConfigError, match="no checkpoint there"):
            find(resume, None)
    for given in (None, "run"):
        with pytest.raises(ConfigError, match=f"no checkpoint in {given or 'runs'}"):
            find("latest", given)


def test_latest_is_the_last_written_of_all_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = filled(make_units(SIZES), 1)
    for run, step in (("a", 4), ("b", 9), ("a", 6)):
        folder = tmp_path / "runs" / run / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        save(state, step, folder)
    state.close()
    a, b = (tmp_path / "runs" / run / "checkpoints" for run in "ab")
    assert find("latest", None) == find("runs/a", None) == a / "step-00000006"
    assert find("latest", "runs/b") == find("runs/b/checkpoints/step-00000009", None) == b / "step-00000009"


def test_loading_takes_no_memory_beside_the_state(tmp_path):
    """So that a machine which could train can resume."""
    unit = Unit(0, "large", (Parameter("w", "w", (5000, 1000), 0),), 5_000_000, 5_000_000)
    with nothing_left():
        state = filled((unit,), 1)
        save(state, 1, tmp_path)
        state.close()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        before = _high_water()
        state = HostState((unit,), torch.float32)
        load(tmp_path / "step-00000001", state)
        assert _high_water() - before < 1.1 * state_bytes((unit,), torch.float32)
        state.close()


def _high_water():
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")))
