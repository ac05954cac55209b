"""What preflight says, against what is really allocated, on any device."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from slidedp import Config, ConfigError, Data, Layout, plan
from slidedp import config as settings
from slidedp.bench.shapes import qwen3
from slidedp.config import DTYPES
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.state import HostState
from slidedp.memory_plan import GIB
from slidedp.model.families import skeleton
from slidedp.preflight import FRUGAL, under
from slidedp.stream.buffers import Buffers
from slidedp.stream.context import Context
from slidedp.stream.device import Abort, Device
from slidedp.stream.stash import ActivationStash
from slidedp.stream.update import ShardUpdate
from tests.launching import memfds, small_config

LAYOUTS = {
    "default": {},
    "cpu": {"reduction": "cpu"},
    "in_backward": {"schedule": "in_backward"},
    "offload": {"activations": "offload"},
    "pieces": {"vocabulary_pieces": 4},
    "wide": {
        "window": 5,
        "gradient_slots": 3,
        "activations": ("keep", "offload", "recompute", "keep", "keep"),
    },
}


def config(layout=None, tied=True, **more):
    model = Qwen3Config(
        vocab_size=97, hidden_size=20, intermediate_size=28, num_hidden_layers=5, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    layout = Layout(**layout or {})
    optimizer = settings.Optimizer(clip_norm=None)
    values = {"sequence_length": 16, "batch_size": 6, "ranks": 2, "device": "cpu"} | more
    return Config(model=model, data=Data(path="unused"), optimizer=optimizer, layout=layout, **values)


@pytest.fixture
def gpus(monkeypatch):
    """Pretends that there are two GPUs, with 40 and 30 GiB free."""
    free = [40 * GIB, 30 * GIB]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr("slidedp.preflight.free_gpu_bytes", lambda count: free[:count])


@pytest.mark.parametrize(
    ("dtype", "reduced"), [("float32", None), ("bfloat16", None), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_exactly_as_said(layout, tied, dtype, reduced):
    said = plan(config(LAYOUTS[layout], tied, compute_dtype=dtype, reduce_dtype=reduced))
    kind, gradient = DTYPES[dtype], DTYPES[reduced or dtype]
    state = HostState(said.units, kind)
    landing = Landing(LandingPlan(said.units, 2, said.config.layout, gradient.itemsize), gradient)
    device = Device("cpu", 0)
    buffers = Buffers(device, said.units, said.config.layout, 2, kind, gradient)
    stash = ActivationStash(device, said.config, 20, said.config.layout.activation_modes(5), kind)
    try:
        names = ("FP32 master weights", "exp_avg and exp_avg_sq", "BF16 working copy")
        assert sum(said.host.get(name, 0) for name in names) == state.nbytes
        assert said.host["gradient landing"] == landing.tensor.nbytes
        slots = [*map(buffers.slot, said.units), *buffers.piece_slots]
        weights = {id(slot): slot.memory.nbytes for slot in slots}
        assert sum(said.device[n] for n in ("window", "embedding and head, weights")) == sum(weights.values())
        places = [*map(buffers.gradient, said.units), *buffers.piece_gradients]
        gradients = {id(buffer): buffer.memory.nbytes for buffer in places}
        names = ("gradient buffers", "embedding and head, gradients")
        assert sum(said.device[name] for name in names) == sum(gradients.values())
        offloads = said.config.layout.activation_modes(5).count("offload")
        tokens, width = 3 * 16, 20
        held = (5 - offloads) * tokens * width * kind.itemsize
        assert said.device.get("kept layer inputs", 0) == held
        assert ("offloaded layer inputs" in said.host) == ("offload rings" in said.device) == (offloads > 0)
    finally:
        stash.close()
        landing.close()
        state.close()


@pytest.mark.parametrize("resident", [0, 2, 4, 7])
def test_update_buffers_are_exactly_as_said(resident, monkeypatch):
    """Of rank 1 of two, all that updates on the GPUs allocate."""
    layout = {"gpu_updates": max(4, resident), "resident_updates": resident, "chunk_bytes": 4096}
    said = plan(config(layout, compute_dtype="bfloat16", reduce_dtype="float32"))
    taken, device, state = [], Device("cpu", 0), HostState(said.units, torch.bfloat16)

    def zeros(numel, dtype):
        taken.append(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    monkeypatch.setattr(device, "zeros", zeros)
    context = Context(said.config, device, 1, state, None, None, Abort(), lambda: None)
    assert context.ranks == 2
    ShardUpdate(context, said.config.layout, None, None)
    state.close()
    names = ("update buffers", "resident FP32 state", "gradients that wait for their update")
    assert sum(said.device.get(name, 0) for name in names) == sum(taken) > 0


def test_gpus_that_cannot_read_one_another_take_collectives(gpus, monkeypatch):
    said = plan(config({"transport": "copy"}, device="cuda"))
    for reachable in (True, False):
        monkeypatch.setattr(
            "slidedp.preflight.reach_one_another", lambda count, reachable=reachable: reachable
        )
        context = nullcontext() if reachable else pytest.raises(ConfigError, match="use 'collective'")
        with context:
            said.check()
    replace(said, config=replace(said.config, layout=Layout())).check()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "modes",
    [
        {"activations": "keep"},
        {"activations": ("spill", "spill", "partial", "offload", "keep"), "partial_budget": 0.2},
    ],
    ids=["one mode", "several"],
)
def test_a_plan_made_from_one_with_other_activations_is_the_same(gpus, modes, device):
    """The policy counts the buffers once for all the mixes of modes that it looks at."""
    there = plan(config(device=device))
    buffers = {"gpu_updates": 2, "vocabulary_pieces": 2}
    other = under(there, Layout(activations="offload", **buffers))
    layout = Layout(**buffers, **modes)
    assert under(other, layout).memory() == under(there, layout).memory() != other.memory()


def test_parameters_and_totals():
    said = plan(config())
    assert said.parameters == sum(p.numel() for p in skeleton(said.model).parameters())
    assert said.host_bytes == sum(said.host.values()) + 2 * sum(said.device.values())
    text = repr(said)
    assert text.startswith("0.0 M parameters on 2 cpu rank(s)")
    assert all(name in text for name in (*said.host, *said.device))
    assert len(text.splitlines()) == 1 + len(said.host) + len(said.device)
    # State and landing do not depend on the ranks; only the ranks' own buffers do.
    assert plan(config(ranks=1, batch_size=6)).host == plan(config(ranks=3, batch_size=6)).host == said.host


def test_nothing_but_the_config_is_read_and_nothing_allocated(tmp_path):
    good = small_config(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    before = memfds()
    said = plan(replace(good, data=Data(path="no/such/folder")))
    assert said.parameters > 0
    assert memfds() == before


def test_a_gpu_run_counts_device_memory_apart(gpus):
    said = plan(config(device=None, ranks=None))
    assert (said.config.device, said.config.ranks) == ("cuda", 2)
    assert (said.config.compute_dtype, said.config.compile) == ("bfloat16", True)
    assert said.host_bytes == sum(said.host.values())
    assert said.device_available == 30 * GIB  # the fuller one
    assert "each GPU" in repr(said)
    said.check()
    with pytest.raises(ConfigError, match=r"^not enough GPU memory: .* may take 0\.0 MiB; use a smaller"):
        replace(said, device_available=1000).check()


def test_a_gpu_budget_is_refused_with_the_least_that_would_do(gpus):
    settings = config(device=None, ranks=None)
    said = plan(settings)
    wide, least = sum(said.device.values()), sum(under(said, FRUGAL).device.values())
    assert least < wide
    plan(replace(settings, gpu_memory_budget=1.01 * wide / GIB)).check()
    between = replace(settings, gpu_memory_budget=(wide + least) / 2 / GIB)
    with pytest.raises(ConfigError, match=r"^gpu_memory_budget=.*; use layout\.activations='offload'"):
        plan(between).check()
    plan(replace(between, layout=FRUGAL)).check()
    with pytest.raises(ConfigError, match=r"^gpu_memory_budget=.*; use a smaller batch_size or"):
        plan(replace(settings, gpu_memory_budget=0.9 * least / GIB)).check()


def test_gpu_memory_is_not_sized_by_the_vocabulary(gpus):
    """Ten times the vocabulary in ten times the pieces takes what it took before."""

    def device(rows, pieces, tied):
        model = Qwen3Config(
            vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied,
        )  # fmt: skip
        said = plan(replace(config({"vocabulary_pieces": pieces}, device=None, ranks=None), model=model))
        return sum(said.device.values())

    for tied in (True, False):
        assert device(1_024_000, 40, tied) == device(102_400, 4, tied) < device(102_400, 1, tied)


def test_what_a_plan_says_is_what_runs_took():
    """GPU memory in GiB of the README's rows, 1,024 tokens a sequence, to 5% and the half of a GiB that a
    whole number stands for. They ran when the head's weight gradient had a product to add, as it has on a
    CPU still."""
    rows = [
        ("1.7B", 16, "recompute", 9),
        ("1.7B", 16, "keep", 38),
        ("4B", 16, "recompute", 12),
        ("4B", 16, "keep", 69),
        ("8B", 16, "recompute", 17),
        ("8B", 16, "partial", 51),
        ("8B", 40, "partial", 110),
    ]
    for size, batch, mode, taken in rows:
        layout = Layout(activations=mode)
        run = config(sequence_length=1024, batch_size=2 * batch, compile=True, compute_dtype="bfloat16")
        said = plan(replace(run, model=qwen3(size), layout=layout))
        assert sum(said.device.values()) / GIB == pytest.approx(taken, rel=0.05, abs=0.5), (size, mode)


def test_what_a_plan_for_gpus_says_is_what_later_runs_took(gpus, monkeypatch):
    """Since the head's weight gradient adds up in place: GiB at most, all kept, 1,024 tokens a sequence."""
    monkeypatch.setattr("slidedp.preflight.reach_one_another", lambda count: True)
    rows = [
        ("8B", 2, 16, {"gpu_updates": 24, "resident_updates": 24, "update_slots": 20}, 119.5),
        ("8B", 2, 16, {"window": 36, "gpu_updates": 18, "resident_updates": 18, "update_slots": 20}, 123.8),
        ("8B", 2, 4, {"window": 36, "gpu_updates": 38, "resident_updates": 38, "update_slots": 20}, 93.5),
        ("8B", 2, 4, {"window": 36, "gpu_updates": 18, "update_slots": 60}, 56.3),
        ("4B", 1, 24, {"gpu_updates": 10, "resident_updates": 10, "update_slots": 20}, 116.3),
        ("4B", 1, 24, {"gpu_updates": 6, "resident_updates": 6, "update_slots": 20}, 111.0),
    ]
    for size, ranks, batch, fields, taken in rows:
        layout = Layout(activations="keep", transport="copy", schedule="in_backward", **fields)
        run = config(sequence_length=1024, batch_size=ranks * batch, ranks=ranks, device="cuda")
        said = plan(replace(run, model=qwen3(size), layout=layout))
        assert sum(said.device.values()) / GIB == pytest.approx(taken, rel=0.03), (size, batch, fields)
    long = config({"activations": "offload"}, sequence_length=65536, batch_size=1, ranks=1, device="cuda")
    said = plan(replace(long, model=qwen3("8B"), max_position_embeddings=65536))
    assert sum(said.device.values()) / GIB == pytest.approx(17.06, rel=0.03)
    tiled = Layout(schedule="in_backward", mlp_tile_tokens=16384)
    longer = replace(
        long, model=qwen3("4B"), layout=tiled, sequence_length=2**18, max_position_embeddings=2**18
    )
    assert sum(plan(longer).device.values()) / GIB == pytest.approx(74.77, rel=0.03)
    for fields, taken in (
        ({"chunk_bytes": 2**25}, 5.32),
        ({"chunk_bytes": 2**24, "gpu_updates": 4, "activations": "offload"}, 7.44),
        ({"chunk_bytes": 2**24, "gpu_updates": 10}, 10.59),
    ):
        layout = Layout(schedule="in_backward", landing="ring", vocabulary_pieces=4, **fields)
        run = config(sequence_length=1024, batch_size=4, ranks=1, device="cuda")
        said = plan(replace(run, model=qwen3("8B"), layout=layout))
        assert sum(said.device.values()) / GIB == pytest.approx(taken, rel=0.03), fields


def test_a_plan_for_gpus_counts_processes_and_page_tables(gpus):
    said = plan(config(device="cuda", ranks=2))
    assert said.host["processes and page tables (estimate)"] == pytest.approx(4.5 * GIB, rel=0.01)
    # 122 GiB of state and landing on one GPU: the kernel ended such a run of 121 where 124.8 were free.
    large = plan(replace(config(device="cuda", ranks=1), model=qwen3("8B")))
    assert large.host_bytes / GIB == pytest.approx(125.5, abs=0.1)


def test_gradients_that_do_not_land_are_the_remedy_for_too_little_host_memory(gpus):
    said = plan(replace(config({"activations": "offload"}, device="cuda", ranks=1), model=qwen3("0.6B")))
    units = len(said.units)
    for free, remedy in (
        (0.97, f"use layout.gpu_updates={units} with"),
        (0.5, "use a smaller model or batch"),
    ):
        there = replace(said, host_available=int(free * said.host_bytes))
        with pytest.raises(ConfigError, match=rf"^not enough host memory: .*; {remedy}"):
            there.check()
    fields = {"gpu_updates": units, "reduction": "gpu", "activations": "recompute"}
    under(said, replace(said.config.layout, **fields)).check()


def test_partial_keeps_all_where_nothing_is_compiled():
    def kept(mode: str, compiled: bool) -> int:
        run = config({"activations": mode}, sequence_length=64, compile=compiled)
        return plan(run).device["kept intermediates (estimate)"]

    assert kept("partial", False) == kept("keep", False)
    assert kept("partial", True) == pytest.approx(0.5 * kept("keep", True), abs=1)


@pytest.mark.parametrize(("size", "matrix"), [("0.6B", "embed"), ("8B", "head")])
def test_a_matrix_that_is_not_trained_has_no_gradient(gpus, size, matrix):
    run = replace(config(device="cuda", ranks=1), model=qwen3(size))
    workspaces = [
        plan(replace(run, optimizer=replace(run.optimizer, freeze=freeze))).device["workspace (estimate)"]
        for freeze in ((), (matrix,))
    ]
    assert workspaces[0] - workspaces[1] > 3 * run.model.vocab_size * run.model.hidden_size


def test_a_budget_limits_what_would_be_on_a_gpu_on_a_cpu_too():
    said = plan(config())
    assert said.device_limit is None
    with pytest.raises(ConfigError, match=r"^gpu_memory_budget=1e-06: a rank needs about"):
        plan(config(gpu_memory_budget=1e-6)).check()


def test_positions_beyond_the_models_own_are_asked_for():
    settings = config(sequence_length=65)
    with pytest.raises(ConfigError, match=r"end at 64; use at most that, or set max_position_embeddings=65"):
        plan(settings)
    said = plan(replace(settings, max_position_embeddings=65))
    assert said.model.max_position_embeddings == 65  # what is exported
    assert settings.model.max_position_embeddings == 64


def test_more_ranks_than_gpus_are_refused(gpus):
    with pytest.raises(ConfigError, match=r"^ranks=3: 2 GPU\(s\) are visible; set ranks to at most 2$"):
        plan(config(device="cuda", ranks=3))


def test_host_memory_is_the_smaller_of_machine_and_budget(monkeypatch):
    monkeypatch.setattr("slidedp.preflight.available_bytes", lambda: 7 * GIB)
    assert plan(config()).host_available == 7 * GIB
    assert plan(config(host_memory_budget=0.5)).host_available == GIB // 2
    monkeypatch.setattr("slidedp.preflight.available_bytes", lambda: 1000)  # a cgroup's limit, for one
    with pytest.raises(ConfigError, match=r"^not enough host memory: .* and 0\.0 MiB are free within"):
        plan(config()).check()
