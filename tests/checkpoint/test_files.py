"""What is written is read, to the bit, and nothing half done ever counts."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slidedp.checkpoint.folder import Progress, checkpoints
from slidedp.checkpoint.resume import check, load, verify
from slidedp.host.start import import_ahead
from slidedp.host.state import HostState
from slidedp.model.units import Parameter, Unit
from tests.checkpoint.contents import CONFIG, SIZES, arrays, loaded
from tests.host.bench import make_units
from tests.killing import filled, save, save_and_die, saving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 200)), min_size=3, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_bits_come_back(tmp_path_factory, dtype, sizes, seed):
    """Denormals, negative zero and the largest values among them."""
    folder, units = tmp_path_factory.mktemp("any"), make_units(sizes)
    state = HostState(units, dtype)
    bits = np.random.default_rng(seed)
    for unit in units:
        for array in state.unit(unit)[:3]:
            for p in unit.parameters:
                values = bits.integers(0, 2**32, p.numel, np.uint32).view(np.float32)
                values[~np.isfinite(values)] = np.finfo(np.float32).max
                array[p.offset : p.offset + p.numel] = values
    state.refresh_working()
    event = save(state, 7, folder)
    assert event["error"] is None and event["path"] == str(folder / "step-00000007")
    assert loaded(folder / "step-00000007", units, dtype) == (Progress(7, 6), arrays(state))
    verify(folder / "step-00000007")
    state.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_spoiled_state_takes_no_good_checkpoints_place(tmp_path, kind, value):
    state = filled(make_units(SIZES), 1)
    assert save(state, 1, tmp_path)["error"] is None
    unit = state.units[2]
    state.unit(unit)[kind][unit.parameters[-1].offset + 3] = value
    event = save(state, 2, tmp_path)  # it would prune the one before
    name = unit.parameters[-1].name
    assert f" of {name} is not finite: resume from one before" in event["error"]
    assert [path.name for path in tmp_path.glob("*step*")] == ["step-00000001"]
    verify(tmp_path / "step-00000001")
    state.close()


def test_assets_may_have_folders(tmp_path):
    """Those of a tokenizer with several chat templates do."""
    state = filled(make_units(SIZES), 1)
    made = saving(tmp_path)
    (made.assets / "templates" / "more").mkdir(parents=True)
    for name in ("tokenizer.json", "templates/chat.jinja", "templates/more/tools.jinja"):
        (made.assets / name).write_text(name)
    assert save(state, 1, tmp_path)["error"] is None
    there = tmp_path / "step-00000001" / "assets"
    assert (there / "templates" / "more" / "tools.jinja").read_text() == "templates/more/tools.jinja"
    verify(tmp_path / "step-00000001")
    state.close()


def test_tensors_are_known_by_their_names(tmp_path):
    """Another version of transformers may declare a layer's parameters in another order."""
    two = [Parameter(f"{name}.weight", name, (600, 1), 0) for name in ("q", "o")]
    orders = []
    for names in (two, two[::-1]):
        parameters = tuple(replace(p, offset=i * 640) for i, p in enumerate(names))
        orders.append((Unit(0, "layers.0", parameters, 1280, 1280),))
    first, second = filled(orders[0], 1), HostState(orders[1], torch.float32)
    first.unit(orders[0][0]).master[:600] *= -1
    assert save(first, 1, tmp_path)["error"] is None
    check(tmp_path / "step-00000001", orders[1], CONFIG)
    load(tmp_path / "step-00000001", second)
    for (unit,), state in zip(orders, (first, second), strict=True):
        for p in unit.parameters:
            signs = {"q": -1, "o": 1}
            assert np.sign(state.unit(unit).master[p.offset + 1]) == signs[p.local], p
    first.close()
    second.close()


def test_a_killed_save_leaves_the_last_good_checkpoint(tmp_path):
    """Killed at every call by which it touches the disk."""
    units = make_units(SIZES)
    old, new = filled(units, 1), filled(units, 2)
    wanted = {1: (Progress(1, 0), arrays(old)), 2: (Progress(2, 1), arrays(new))}
    context = import_ahead()
    ours, theirs = context.Pipe()
    process = context.Process(target=save_and_die, args=(units, tmp_path, theirs))
    process.start()
    theirs.close()
    through, status = ours.recv()
    process.join()
    assert status == 0 and through > 40
    found = []
    for fatal in range(1, through + 1):
        folder = tmp_path / str(fatal)
        last = checkpoints(folder)[-1]
        version = check(last, units, CONFIG).step
        assert loaded(last, units) == wanted[version]
        found.append(version)
        save(new, 3, folder)  # takes away whatever was left
        assert sorted(p.name for p in folder.iterdir()) == ["assets", "step-00000003"]
    # First the old one, from some point on the new one.
    assert found == sorted(found) and found.count(1) > 30 and found.count(2) > 2
    old.close()
    new.close()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """The order that a power cut needs: every file and the folder, then the name, then the parent."""
    synced, units = [], make_units(SIZES)
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (synced.append(("rename", str(b))), rename(a, b)))
    state = filled(units, 1)
    path = Path(save(state, 1, tmp_path)["path"])
    state.close()
    at = synced.index(("rename", str(path)))
    partial = tmp_path / f".{path.name}.partial"
    files = {str(partial / p.relative_to(path)) for p in path.rglob("*")} | {str(partial)}
    assert set(synced[:at]) == files and synced[at - 1] == str(partial)
    assert synced[at + 1] == str(tmp_path)


def test_the_last_ones_are_kept(tmp_path):
    state = filled(make_units(SIZES), 1)
    for step in (3, 5, 9, 7):  # the last one went on from an earlier step
        save(state, step, tmp_path, keep_last=3)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-00000009", "step-00000007"]
    assert len(list(tmp_path.iterdir())) == 4
    save(state, 9, tmp_path, keep_last=3)  # again: takes the place of the old one
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000005", "step-00000007", "step-00000009"]
    state.close()
