"""Whole runs: real processes, real gloo, real shared memory."""

import asyncio
import gc
import json
import resource
import subprocess
import threading
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from slidedp import ConfigError, Layout, Optimizer, RunFailed, launch, open_run
from slidedp.checkpoint.folder import checkpoints, find
from slidedp.checkpoint.resume import verify
from slidedp.hold import Hold
from slidedp.host.memory import pss_bytes
from slidedp.host.process import reporting
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.machines import H200
from slidedp.policy.tune import Tuner
from slidedp.policy.workload import workload_of
from slidedp.preflight import plan, under
from slidedp.processes import Processes, failure_text
from tests.launching import DEADLINE, LENGTH, VOCABULARY, alive, nothing_left, script, small_config, until

STEPS = 45
SAMPLED = [1, 11, 21, 31, 41]
"""Steps of such a run that have a timeline."""
COLUMNS = {
    "loss", "targets", "step_seconds", "tokens_per_second", "tflops_per_gpu", "busy", "lr",
    "gradient_norm", "mfu", "skipped", "update_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="module")
def finished(folder):
    """A run that has done all its steps, and still holds its state."""
    with launch(small_config(folder, steps=STEPS, run_folder=str(folder / "finished"))) as run:
        run.wait(DEADLINE)
        yield run


def running(run, steps=3):
    """The run, once it has done a few steps."""
    until(lambda: run.log.steps_done >= steps or not run.running, f"{steps} steps")
    assert run.running, run.failure
    assert run.status == "running"
    return run


def test_a_run_learns_and_reports_every_step(finished):
    assert (finished.status, finished.failure, finished.running) == ("finished", None, False)
    metrics = finished.metrics()
    assert list(metrics.index) == list(range(STEPS))
    assert set(metrics.columns) == COLUMNS
    assert metrics["loss"].iloc[-5:].mean() < metrics["loss"].iloc[:5].mean() - 1
    assert (metrics["targets"] == 4 * LENGTH).all()
    assert (metrics["lr"] == 1e-2).all() and not metrics["skipped"].any()
    # The first step has none before it to measure from.
    timed = ["step_seconds", "tokens_per_second", "tflops_per_gpu"]
    assert metrics.loc[0, timed].isna().all()
    assert (metrics.loc[1:, timed] > 0).all(axis=None)
    assert metrics.drop(columns=[*timed, "mfu"]).notna().all(axis=None)  # a CPU has no known peak
    assert metrics["busy"].between(0, 1).all()
    ranks = finished.log.ranks()
    assert list(zip(ranks["step"], ranks["rank"], strict=True)) == [
        (step, rank) for step in range(STEPS) for rank in (0, 1)
    ]
    assert str(STEPS) in repr(finished) and "finished" in repr(finished)
    page = finished._repr_html_()
    assert f"{STEPS} of {STEPS}" in page and "finished" in page and "Layout(" in page


def test_the_run_folder_tells_the_same(finished, tmp_path):
    log = open_run(finished.folder)
    pd.testing.assert_frame_equal(log.metrics(), finished.metrics(), check_exact=True)
    pd.testing.assert_frame_equal(log.ranks(), finished.log.ranks(), check_exact=True)
    assert log.events("end")[0]["status"] == "finished"
    assert log.description["config"]["steps"] == STEPS
    for step in SAMPLED:
        pd.testing.assert_frame_equal(log.timeline(step), finished.log.timeline(step))
    # A run that goes on, or was killed, may have written half of a line.
    (tmp_path / "run.json").write_text((finished.folder / "run.json").read_text())
    lines = (finished.folder / "events.jsonl").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "step")
    (tmp_path / "events.jsonl").write_text("\n".join(lines[: first + 2]))
    assert len(open_run(tmp_path).events("step")) == 1
    # One rank has not reported the first step yet, then both have, and nothing can be timed.
    assert len(open_run(tmp_path).metrics()) == 0
    steps = [line for line in lines if json.loads(line)["kind"] == "step"][:2]
    (tmp_path / "events.jsonl").write_text("\n".join([*steps, ""]))
    assert open_run(tmp_path).metrics()["tokens_per_second"].isna().all()
    with pytest.raises(ConfigError, match="not a run folder"):
        open_run(tmp_path / "nothing")
    assert "status broken off" in repr(open_run(tmp_path))
    for name in ("events.jsonl", "run.json"):
        (tmp_path / name).write_text("{half\n")
        with pytest.raises(ConfigError, match="is not as a run wrote it"):
            open_run(tmp_path)


def test_a_sampled_step_has_every_rank_and_track(finished):
    assert finished.log.sampled_steps() == SAMPLED
    spans = finished.log.timeline(21)
    units = {"embed", "head", *(f"layers.{i}" for i in range(5))}
    for rank in (0, 1):
        own = spans[spans["rank"] == rank]
        assert set(own["track"]) == {"compute", "deliver", "reduce"}
        for track, phase in (("compute", "forward"), ("deliver", "deliver"), ("reduce", "reduce")):
            seen = set(own[(own["track"] == track) & (own["phase"] == phase)]["unit"])
            assert seen == units - ({"head"} if phase == "forward" else set()), (track, seen)
    assert (spans["end"] >= spans["start"]).all()
    assert len(finished.log.timeline(2)) == 0


def test_an_exported_model_gives_the_logits_of_the_state(finished, tmp_path):
    exported = AutoModelForCausalLM.from_pretrained(finished.export(tmp_path / "out", dtype="float32"))
    own = AutoModelForCausalLM.from_config(finished.plan.model)
    state = finished._state
    parameters = {
        p.name: p.view(torch.from_numpy(state.unit(unit).master))
        for unit in state.units
        for p in unit.parameters
    }
    start = AutoModelForCausalLM.from_pretrained(finished.config.model)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, VOCABULARY, (2, LENGTH)))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(parameters[name])
        logits = exported.eval()(ids).logits
        assert torch.equal(logits, own.eval()(ids).logits)
        assert not torch.allclose(logits, start.eval()(ids).logits, atol=0.1)


def test_a_run_folder_is_never_written_twice(finished):
    before = (finished.folder / "events.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="holds a run already"):
        launch(finished.config)
    assert (finished.folder / "events.jsonl").read_bytes() == before


def test_a_run_that_ends_while_it_is_tuned_is_no_error(finished):
    tuner = Tuner(finished, AutoPolicy(finished.plan, H200.rates(workload_of(finished.plan))))
    assert not tuner.tune().done
    assert finished.layout == finished.config.layout


def test_layouts_switch_live_and_the_losses_stay(folder, finished):
    layouts = [
        Layout(delivery="replicated", reduction="cpu", activations="keep", chunk_bytes=4096),
        Layout(delivery="broadcast", reduction="gpu_root", activations="offload", window=1),
    ]
    with (
        nothing_left(),
        launch(small_config(folder, steps=STEPS, run_folder=str(folder / "switched"))) as run,
    ):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            with pytest.raises(ConfigError, match="of shared memory for landing"):
                run.set_layout(Layout(reduction="cpu"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert run.layout == run.plan.config.layout == Layout()
        for i, layout in enumerate(layouts):
            run.set_layout(layout)
            until(lambda n=2 * (i + 1): len(run.log.events("layout")) == n or not run.running, "a switch")
        with pytest.raises(ConfigError, match="names 2 layers, the model has 5"):
            run.set_layout(Layout(activations=("keep", "keep")))
        run.wait(DEADLINE)
        assert run.layout == layouts[-1]
        switches = [e["step"] for e in run.log.events("layout")]
        assert switches[0] == switches[1] < switches[2] == switches[3], switches
        with pytest.raises(ConfigError, match="the run is finished"):
            run.set_layout(layouts[0])
        np.testing.assert_allclose(run.metrics()["loss"], finished.metrics()["loss"], rtol=2e-5)


def landing_memory(run):
    """By process, which files of gradients it maps."""
    found = []
    for process in run._processes:
        rows = [line.split() for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
        found.append({row[4] for row in rows if "slidedp-landing" in row[-2]})
    return found


def test_a_layout_that_lands_alike_keeps_the_memory(folder, tmp_path):
    optimizer = Optimizer(lr=1e-2, eps=1e-6, clip_norm=None)
    config = small_config(folder, optimizer=optimizer, run_folder=str(tmp_path / "run"))
    alike = Layout(schedule="in_backward", activations="keep", window=1, chunk_bytes=4096)
    with launch(config) as run:
        first, looks = run._landings[0].plan.shape, []
        for layout in (None, alike, replace(alike, landing="ring")):
            switches = len(run.log.events("layout"))
            if layout is not None:
                run.set_layout(layout)
                until(lambda n=switches: len(run.log.events("layout")) == n + 2, "a switch")
            done = run.log.steps_done
            until(lambda n=done: run.log.steps_done > n + 3, "some steps")
            looks.append(landing_memory(run))
        assert run._landings[-1].plan.shape != first
        run.stop()
        with pytest.raises(ConfigError, match=r"the run stops after this step|the run is stopped"):
            run.set_layout(alike)
        assert run.layout == replace(alike, landing="ring")
    assert all(len(files) == 1 for look in looks for files in look)
    assert looks[0] == looks[1] and looks[1] != looks[2]


def test_a_layout_that_the_host_has_no_room_for_is_refused(folder, tmp_path):
    config = small_config(folder, ranks=1, run_folder=str(tmp_path / "run"))
    fits = Layout(activations="spill")
    most = under(plan(config), fits).host_bytes
    with launch(replace(config, host_memory_budget=1.01 * most / 2**30)) as run:
        until(lambda: run.log.steps_done > 1, "a step")
        with pytest.raises(ConfigError, match=r"^set_layout: this layout takes .* more of host memory, and "):
            run.set_layout(replace(fits, window=5))
        run.set_layout(fits)
        done = run.log.steps_done
        until(lambda: run.log.steps_done > done + 2, "more steps")
        run.stop()


def test_awaiting_a_run_keeps_the_loop_live_and_stop_ends_it_evenly(folder, tmp_path):
    async def work():
        config = small_config(folder, run_folder=str(tmp_path / "run"))
        budget = 1.01 * plan(config).host_bytes / 2**30
        device = 1.01 * sum(plan(config).device.values()) / 2**30
        run = launch(replace(config, host_memory_budget=budget, gpu_memory_budget=device))
        with pytest.raises(ConfigError, match="the run goes on"):
            run.export(tmp_path / "early")
        with pytest.raises(ConfigError, match="more of host memory"):
            run.set_layout(Layout(reduction="cpu"))
        with pytest.raises(ConfigError, match=r"gpu_memory_budget=.*layout\.window"):
            run.set_layout(Layout(activations="keep"))
        with pytest.raises(ConfigError, match="'auto': expected a slidedp"):
            run.set_layout("auto")

        async def stop_after_some_steps():
            while run.log.steps_done < 3 and run.running:
                await asyncio.sleep(0.01)
            run.stop()

        stopper = asyncio.create_task(stop_after_some_steps())
        assert await asyncio.wait_for(run, DEADLINE) is run
        await stopper
        return run

    with nothing_left(), asyncio.run(work()) as run:
        assert run.status == "stopped"
        counts = run.log.ranks().groupby("rank")["step"].count()
        assert counts[0] == counts[1] == len(run.metrics()) == len(run.log.events("update")) >= 3
        run.export(tmp_path / "out")  # whole: no update is half done
        (saved,) = run.log.events("checkpoint")
        assert saved["step"] == counts[0] and run.save() == Path(saved["path"])
        run.stop()  # of a run that is over: nothing happens
        assert run.status == "stopped"


def test_an_exception_in_a_rank_is_shown_with_its_traceback(tmp_path):
    with nothing_left():
        run = launch(small_config(tmp_path, run_folder=str(tmp_path / "run")))
        (run.folder / "traces").write_text("where ranks want a folder")
        run.profile(steps=1)
        with pytest.raises(RunFailed) as failure:
            run.wait(DEADLINE)
        message = str(failure.value)
        assert message.startswith("rank ")
        assert "Traceback" in message and "in run_rank" in message
        assert "FileExistsError" in message and "traces" in message
    run.close()


def test_close_ends_a_run_at_once_and_frees_its_memory(folder, tmp_path):
    model = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    config = small_config(folder, model=model, run_folder=str(tmp_path / "run"))
    held = sum(plan(config).host.values())
    with nothing_left():
        before = pss_bytes()
        run = launch(config)
        assert pss_bytes() - before > 0.9 * held
        pids = [process.pid for process in run._processes]
        run.close()
        assert pss_bytes() - before < 0.1 * held
        assert not any(alive(pid) for pid in pids)
    assert (run.status, run.failure) == ("stopped", None)
    run.close()  # twice does no harm


def test_a_script_without_the_main_guard_is_told_so(folder, tmp_path):
    command = script(small_config(folder, run_folder=str(tmp_path / "run")), tmp_path, guard=False)
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert result.returncode != 0
    last = result.stderr.splitlines()[-1]
    assert "RunFailed" in last and 'if __name__ == "__main__":' in last
    assert "ConfigError: launch() was called while a process of a run was importing" in result.stderr


def test_ranks_touch_nothing_before_the_state_is_loaded(tmp_path, monkeypatch):
    begin = Processes.begin

    def late(processes: Processes) -> None:
        pipes = processes._pipes[: processes.ranks]
        for pipe in pipes:
            assert pipe.poll(DEADLINE) and pipe.recv()["kind"] == "mark"  # imported and connected
        assert not any(pipe.poll(1.0) for pipe in pipes)  # one that goes on is ready in a moment
        begin(processes)

    monkeypatch.setattr(Processes, "begin", late)
    with nothing_left(), launch(small_config(tmp_path, steps=2)) as run:
        run.wait(DEADLINE)
        assert run.status == "finished"


def test_an_interrupt_while_the_state_loads_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slidedp.session.fill_state", interrupted)
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        launch(small_config(tmp_path))


def test_what_processes_said_before_they_ended_is_heard_by_a_busy_launcher(folder, tmp_path):
    rows = []
    config = small_config(folder, steps=20, run_folder=str(tmp_path / "run"))
    with nothing_left():
        run = launch(config, on_step=lambda row: rows.append(row["step"]))
        add, ends = run.log.add, [process.sentinel for process in run._processes]

        def late(event):
            until(lambda: len(wait(ends, timeout=1)) == len(ends), "the end of all processes")
            add(event)

        run.log.add = late
        run.wait(DEADLINE)
        assert rows == run.metrics().index.tolist() == list(range(20))
        assert run.save().name == "step-00000020"  # not the last step that was heard in time
        # A notebook's next launch may drop the run that is over, without close().
        del run
        gc.collect()


def test_a_listener_may_save_and_one_that_hangs_does_not_keep_a_run_from_closing(folder, tmp_path):
    held, saved, hangs, released = [], [], threading.Event(), threading.Event()

    def on_step(row):
        until(lambda: held, "the run")
        saved.append(held[0].save())
        hangs.set()
        released.wait(DEADLINE)

    with nothing_left():
        run = launch(small_config(folder, run_folder=str(tmp_path / "run")), on_step=on_step)
        held.append(run)
        assert hangs.wait(DEADLINE), run
        assert (saved[0] / "index.json").exists() and run.running
        assert "status running" in repr(open_run(run.folder))
        with pytest.raises(ConfigError, match="a run writes there now: stop it first"):
            launch(replace(run.config, steps=100), resume=saved[0])
        run.close()
        assert (run.status, run.failure) == ("stopped", None)
        assert "status stopped" in repr(open_run(run.folder))
    released.set()


def test_a_listener_may_save_when_every_process_has_ended(folder, tmp_path):
    held, saved = [], []

    def on_step(row):
        if row["step"] == 2:
            until(lambda: held and held[0]._concluded.is_set(), "the end of all processes")
            saved.append(held[0].save())

    with nothing_left():
        run = launch(small_config(folder, steps=3, run_folder=str(tmp_path / "run")), on_step=on_step)
        held.append(run)
        run.wait(DEADLINE)
        assert [path.name for path in saved] == ["step-00000003"] and (saved[0] / "index.json").exists()
        run.close()


def test_of_two_launches_into_one_folder_one_is_refused_and_changes_nothing(folder, tmp_path):
    """One launch holds the folder, as while it prepares its data, when the other begins."""
    there = tmp_path / "run"
    config = small_config(folder, steps=2, run_folder=str(there))

    def content():
        return {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}

    def refused(**resume):
        hold, before = Hold(there), content()
        with pytest.raises(ConfigError, match="a run writes there now: stop it first"):
            launch(replace(config, steps=4), **resume)
        assert content() == before
        hold.close()

    there.mkdir()
    refused()
    with nothing_left(), launch(config) as run:
        assert run.wait(DEADLINE).save().exists()
    refused(resume="latest")
    with nothing_left(), launch(replace(config, steps=4), resume="latest") as run:
        assert run.wait(DEADLINE).metrics().index.tolist() == [0, 1, 2, 3]


def test_going_back_to_an_earlier_checkpoint_leaves_the_later_ones_aside(folder, tmp_path, capfd):
    data = replace(small_config(folder).data, eval_fraction=0.2)
    there = tmp_path / "run"
    config = small_config(folder, data=data, eval_every=4, run_folder=str(there))

    def run(steps, resume=None):
        with nothing_left(), launch(replace(config, steps=steps), resume=resume) as run:
            # Nothing is saved before somebody can ask for the latest.
            assert resume is None or find("latest", str(there)) == resume
            saved = run.wait(DEADLINE).save()
            return saved, run.evaluations().index.tolist()

    first, _ = run(2)
    last, evaluated = run(7, first)
    assert evaluated == [0, 2, 4, 7] and not [*(there / "checkpoints").glob("aside-*")]
    _, evaluated = run(3, first)
    assert evaluated == [0, 2, 3]
    (aside,) = (there / "checkpoints").glob("aside-*")
    assert [path.name for path in checkpoints(aside)] == [last.name]
    assert f"checkpoints of later steps are in {aside} now" in capfd.readouterr().err
    assert [path for path in checkpoints(aside) if verify(path)] == []


def test_what_a_launch_that_was_killed_left_is_not_taken_for_samples(folder, tmp_path):
    run_folder = tmp_path / "run"
    (run_folder / "preparing" / "samples").mkdir(parents=True)
    with nothing_left(), launch(small_config(folder, steps=1, run_folder=str(run_folder))) as run:
        run.wait(DEADLINE)
    assert not (run_folder / "preparing").exists() and not (run_folder / "samples").exists()


def test_what_a_process_dies_of_comes_with_a_remedy():
    def said(error: Exception) -> str:
        launcher, process = Pipe()
        with pytest.raises(SystemExit), reporting("rank 1", process):
            raise error
        return failure_text(launcher.recv())

    remedy, *trace = said(torch.OutOfMemoryError("CUDA out of memory. Tried")).splitlines()
    assert remedy.startswith("rank 1 failed, out of GPU memory: use layout.activations='offload'")
    assert trace[0].startswith("Traceback") and trace[-1].endswith("CUDA out of memory. Tried")
    assert said(ValueError("x")).startswith("rank 1 failed:\nTraceback")
