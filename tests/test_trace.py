"""Recordings of real runs, and what trace.py reads out of them."""

import gzip
import json
import re

import pandas as pd
import pytest
from torch_tb_profiler.consts import NODE_PROCESS_PATTERN, WORKER_PATTERN
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator

from slidedp import ConfigError, launch, open_run, trace
from tests.launching import DEADLINE, nothing_left, small_config, until

RANKS, LAYERS = 2, 5
UNITS = {"embed", "head", *(f"layers.{i}" for i in range(LAYERS))}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run over, whose ranks recorded two of its steps, and which was asked for more than it could do."""
    folder = tmp_path_factory.mktemp("trace")
    with nothing_left(), launch(small_config(folder, run_folder=str(folder / "run"))) as run:
        with pytest.raises(ConfigError, match="at least 1"):
            run.profile(0)
        with pytest.raises(ConfigError, match="start=-1: expected a step from 0 to"):
            run.profile(2, start=-1)
        run.profile(2, start=5)
        with pytest.raises(ConfigError, match="under way"):
            run.profile()
        until(lambda: len(run.log.events("trace")) == RANKS or not run.running, "a recording")
        run.profile(1_000_000)  # the run is stopped within it
        done = run.log.steps_done
        until(lambda: run.log.steps_done > done + 6 or not run.running, "steps")
        run.stop()
        run.wait(DEADLINE)
        with pytest.raises(ConfigError, match="the run is stopped"):
            run.profile()
    return run


@pytest.fixture
def recording(recorded):
    return trace.load(recorded.log, trace.recordings(recorded.log)[0])


def test_all_ranks_record_the_same_steps(recorded, recording):
    first = recording.first
    assert recording.steps == [first, first + 1] == [5, 6]
    assert [set(t.phases["step"]) for t in recording.ranks] == [{first, first + 1}] * RANKS
    assert {first, first + 1} <= set(recorded.log.sampled_steps())
    # The second one ends with the run, on every rank.
    last = trace.load(recorded.folder)
    assert last.steps[-1] == recorded.log.steps_done - 1 and len(last.steps) > 2
    with pytest.raises(ConfigError, match="recordings that begin with"):
        trace.load(recorded.folder, 10**6)


def test_other_readers_find_what_they_look_for(recording):
    """TensorBoard's plugin takes worker, rank and span from the name, and steps from ranges."""
    for rank in recording.ranks:
        worker, span = WORKER_PATTERN.match(rank.path.name).groups()
        assert NODE_PROCESS_PATTERN.match(worker)[2] == str(rank.rank) and span == f".{recording.first}"
        names = {e["name"] for e in json.loads(gzip.decompress(rank.path.read_bytes()))["traceEvents"]}
        assert {f"ProfilerStep#{step}" for step in recording.steps} <= names
        assert {"forward layers.0", "backward layers.4", "head head", "deliver embed"} <= names


def test_tensorboards_plugin_makes_its_pages_of_them(recording, tmp_path):
    """What it does with each file of a folder, but for the processes that it starts for that."""
    for rank in recording.ranks:
        worker, _ = WORKER_PATTERN.match(rank.path.name).groups()
        data = RunProfileData.parse(worker, 1, str(rank.path), str(tmp_path))
        profile = RunGenerator(worker, 1, data).generate_run_profile()
        assert {view.name for view in profile.views} >= {"overall", "operator", "trace", "memory"}
        assert [row[0] for row in profile.overview["steps"]["rows"]] == [
            str(step) for step in recording.steps
        ]
        assert "aten::mm" in {row["name"] for row in profile.operation_table_by_name["data"]}


def no_constant(name):
    raise AssertionError(f"{name} is not JSON")


def test_every_event_is_one_that_perfetto_reads(recording):
    """The Trace Event Format: each kind of event with the fields that it must have, no NaN or Infinity."""
    for rank in recording.ranks:
        content = json.loads(gzip.decompress(rank.path.read_bytes()), parse_constant=no_constant)
        assert content["displayTimeUnit"] in ("ms", "ns")
        opened, closed = {}, {}
        for event in content["traceEvents"]:
            assert event["ph"] in "XibefsM" and event["name"], event
            for place in ("pid", "tid"):  # a track may have a name
                assert isinstance(event[place], int | str) and not isinstance(event[place], bool), event
            if event["ph"] == "M":
                assert event["args"], event
                continue
            assert isinstance(event["ts"], int | float) and event["ts"] >= 0, event
            if event["ph"] == "X":
                assert isinstance(event["dur"], int | float) and event["dur"] >= 0, event
            elif event["ph"] in "be":
                key = (event["pid"], event["cat"], event["id"])
                ends = opened if event["ph"] == "b" else closed
                assert key not in ends
                ends[key] = event
        assert opened and opened.keys() == closed.keys()
        for key, begin in opened.items():
            end = closed[key]
            assert begin["ts"] <= end["ts"] and (begin["name"], begin["tid"]) == (end["name"], end["tid"])
        # Ours lie among torch's: one clock, one process.
        named = [e for e in content["traceEvents"] if e["ph"] == "X" and e["name"].startswith("ProfilerStep")]
        first, last = min(e["ts"] for e in named), max(e["ts"] + e["dur"] for e in named)
        inside = [b for b in opened.values() if first <= b["ts"] <= last]
        assert len(inside) > 0.9 * len(opened) and {b["pid"] for b in inside} == {e["pid"] for e in named}


def test_the_timeline_is_the_run_logs_on_one_clock(recorded, recording):
    step = recording.steps[1]
    spans = trace.timeline(recording, step)
    for _, own in spans[spans["rank"] >= 0].groupby("rank"):
        for track, phase in (("compute", "backward"), ("deliver", "deliver"), ("reduce", "reduce")):
            found = set(own[(own["track"] == track) & (own["phase"] == phase)]["unit"])
            assert found == UNITS - ({"embed", "head"} if phase == "backward" else set())
    # The same durations as the log, and no unit is updated before every rank has begun to reduce it. (A
    # span's end is marked after the worker was told, so a busy machine may see it later.)
    logged = recorded.log.timeline(step)
    key = ["rank", "track", "unit", "phase", "start"]
    left, right = (t[t["rank"] >= 0].sort_values(key, ignore_index=True) for t in (spans, logged))
    pd.testing.assert_series_equal(left["end"] - left["start"], right["end"] - right["start"], atol=0.01)
    updates = spans[spans["track"] == "update"].groupby("unit")["start"].min()
    reduced = spans[spans["track"] == "reduce"].groupby("unit")["start"].max()
    assert set(updates.index) == UNITS
    assert (updates > reduced - 1).all()  # 1 ms: the clocks of three processes
    assert spans["start"].min() == pytest.approx(0, abs=0.01)


def test_operators_lie_in_their_phases(recording):
    """torch's clock and ours agree: a phase is where the profiler saw its named range."""
    for rank in recording.ranks:
        named = rank.events[rank.events["category"] == "user_annotation"].groupby("name")["ts"].min()
        own = rank.phases[rank.phases["track"] == "compute"]
        first = own.assign(name=own["phase"] + " " + own["unit"]).groupby("name")["ts"].min()
        both = pd.concat([named, first], axis=1, join="inner", keys=["torch", "ours"])
        assert len(both) > 2 * LAYERS
        # Microseconds; a thread may lose its core between the two marks, but not at most of them.
        assert (both["torch"] - both["ours"]).abs().median() < 2000


def test_events_are_the_outermost_operators_of_the_step(recording):
    table = trace.events(recording, 1, recording.steps[0])
    assert list(table) == trace.EVENTS and len(table) > 100
    table = table.sort_values("start")
    assert (table["start"].to_numpy()[1:] >= table["end"].to_numpy()[:-1] - 1e-3).all()
    names = set(trace.events(recording, 1)["name"])
    assert "aten::mm" in names or "aten::matmul" in names or "aten::linear" in names


def test_operator_table_against_the_raw_events(recording):
    raw = recording.trace(0).events
    raw = raw[raw["category"] == "cpu_op"].groupby("name")["dur"].agg(["count", "sum"])
    table = trace.operators(recording, 0).set_index("operator")
    for name in ("aten::mm", "aten::embedding", "aten::view"):
        assert table.loc[name, "calls"] == raw.loc[name, "count"]
        assert table.loc[name, "total_cpu_ms"] == pytest.approx(raw.loc[name, "sum"] / 1e3, rel=1e-3)
    assert trace.kernels(recording, 0).empty


def test_memory_rises_in_forward_and_is_given_back(recording):
    table = trace.memory(recording, 0)
    assert set(table["device"]) == {"cpu"} and table["start"].is_monotonic_increasing
    assert table["allocated"].max() > 2 * table["allocated"].iloc[[0, -1]].min()


def test_a_folder_without_a_recording_says_how_to_make_one(recorded, tmp_path):
    (tmp_path / "run.json").write_text((recorded.folder / "run.json").read_text())
    (tmp_path / "events.jsonl").write_text("")
    assert trace.recordings(tmp_path) == []
    with pytest.raises(ConfigError, match=re.escape("run.profile(steps=2)")):
        trace.load(open_run(tmp_path))


def gpu_trace(path):
    """The trace of one step on one GPU as Kineto writes it: three streams, one kernel per phase."""
    common = {"ph": "X", "pid": 0}

    def phase(i, name, ts, end):
        args = {"step": 3, "track": "compute", "unit": "layers.0", "phase": name}
        event = {"cat": "slidedp", "id": i, "pid": 1, "tid": "compute", "name": name}
        return [event | {"ph": "b", "ts": ts, "args": args}, event | {"ph": "e", "ts": end}]

    def kernel(name, stream, ts, dur, cat="kernel", correlation=0):
        args = {"stream": stream, "device": 0, "correlation": correlation, "blocks per SM": 4.0}
        args |= {"est. achieved occupancy %": 50, "External id": correlation}
        return common | {"cat": cat, "name": name, "tid": stream, "ts": ts, "dur": dur, "args": args}

    def operator(name, ts, dur, i):
        args = {"External id": i}
        return {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "cat": "cpu_op",
            "name": name,
            "ts": ts,
            "dur": dur,
            "args": args,
        }

    step = {"ph": "X", "pid": 1, "tid": 1, "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 0.0}
    launch = {"ph": "X", "pid": 1, "tid": 1, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 2.0}
    allocated = {"Device Type": 1, "Device Id": 0, "Total Allocated": 5, "Total Reserved": 8, "Bytes": 5}
    events = [
        *phase(0, "forward", 10.0, 60.0),
        *phase(1, "backward", 60.0, 140.0),
        step | {"dur": 150.0, "args": {}},
        operator("aten::mm", 5.0, 8.0, 7),
        launch | {"ts": 6.0, "args": {"correlation": 7, "External id": 7}},
        kernel("gemm", 7, 10.0, 50.0, correlation=7),
        kernel("ncclDevKernel_AllGather", 20, 20.0, 30.0),
        kernel("Memcpy HtoD (Pinned -> Device)", 24, 15.0, 40.0, "gpu_memcpy"),
        kernel("Memcpy DtoH (Device -> Pinned)", 28, 100.0, 20.0, "gpu_memcpy"),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 30.0,
         "args": allocated},
    ]  # fmt: skip
    properties = [{"id": 0, "numSms": 132, "computeMajor": 9, "computeMinor": 0}]
    lines = ",\n".join(json.dumps(event) for event in events)
    head = f'"baseTimeNanoseconds": 0,\n"deviceProperties": {json.dumps(properties)},\n"traceEvents": [\n'
    path.write_text("{\n" + head + lines + "\n]}")


def test_a_gpus_streams_are_named_by_what_they_do(tmp_path, recorded):
    description = json.loads((recorded.folder / "run.json").read_text()) | {"ranks": 1}
    (tmp_path / "run.json").write_text(json.dumps(description))
    (tmp_path / "events.jsonl").write_text("")
    (tmp_path / "traces").mkdir()
    gpu_trace(tmp_path / "traces" / "host.name_0.3.pt.trace.json")
    recording = trace.load(tmp_path)
    rows = trace.events(recording).set_index("row")
    assert set(rows.index) == {
        "compute (stream 7)", "collectives (stream 20)", "host to GPU (stream 24)", "GPU to host (stream 28)",
        "CPU thread 1",
    }  # fmt: skip
    gemm = rows.loc["compute (stream 7)"]
    assert (gemm["start"], gemm["end"]) == (0.0, 0.05)  # ms since the first phase began
    assert trace.memory(recording)[["allocated", "reserved", "device"]].values.tolist() == [[5, 8, "cuda:0"]]
    table = trace.kernels(recording).set_index("kernel")
    assert table.loc["gemm", ["calls", "total_ms"]].tolist() == [1, 0.05]
    operators = trace.operators(recording).set_index("operator")
    assert operators.loc["aten::mm", "self_gpu_ms"] == pytest.approx(0.05)
