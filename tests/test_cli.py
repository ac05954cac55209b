"""The command line: exit codes, what it prints, and that Ctrl-C leaves nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from slidedp import Config, RunFailed, cli
from slidedp.data.samples import write_samples
from tests.launching import children

SLIDEDP = (sys.executable, "-m", "slidedp")
VOCABULARY = 128


@pytest.fixture
def config(tmp_path):
    """Writes a TOML file of a tiny run of `steps` steps, with more settings if given."""

    def write(steps: int, more: str = "") -> Path:
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
        ).save_pretrained(tmp_path / "model")
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (16, 17), np.int32)
        write_samples(tmp_path / "data", tokens[:, :-1], tokens[:, 1:])
        file = tmp_path / "config.toml"
        file.write_text(
            f"""
            model = "{tmp_path / "model"}"
            random_weights = true
            sequence_length = 16
            batch_size = 4
            steps = {steps}
            device = "cpu"
            run_folder = "{tmp_path / "run"}"
            {more}
            [data]
            path = "{tmp_path / "data"}"
            """
        )
        return file

    return write


def test_plan_prints_the_preflight(config, capsys):
    assert cli.main(["plan", str(config(2))]) == 0
    assert "FP32 master weights" in capsys.readouterr().out


def test_plan_refuses_what_does_not_fit(config, capsys):
    assert cli.main(["plan", str(config(2, "host_memory_budget = 1e-6"))]) == 2
    assert "not enough host memory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_bad_config_is_one_line(config, command):
    file = config(2, "batch_sise = 4")
    done = subprocess.run([*SLIDEDP, command, str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and "did you mean batch_size?" in done.stderr


def test_an_export_folder_in_use_is_refused_before_training(config, tmp_path, capsys):
    assert cli.main(["train", str(config(2)), "--export", str(tmp_path)]) == 2
    assert "already there" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_failed_run_is_exit_code_1(config, monkeypatch, capsys):
    def launch(*_):
        raise RunFailed("rank 1 failed:\nTraceback")

    monkeypatch.setattr(cli, "launch", launch)
    assert cli.main(["train", str(config(2))]) == 1
    assert "rank 1 failed:\nTraceback" in capsys.readouterr().err


def test_train_and_export(config, tmp_path):
    command = [*SLIDEDP, "train", str(config(3)), "--export", str(tmp_path / "tuned")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert f"run folder: {tmp_path / 'run'}" in done.stdout
    assert "step 3 of 3" in done.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")


def start(file: Path) -> subprocess.Popen:
    """`slidedp train` as the head of its own process group, as a terminal or a scheduler starts it."""
    process = subprocess.Popen(
        [*SLIDEDP, "train", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("run folder: ")
    return process


def steps_done(folder: Path) -> int:
    return (folder / "events.jsonl").read_text().count('"kind": "step"') // 2


def nothing_in(group: int) -> None:
    deadline = time.monotonic() + 10
    while _group_exists(group):
        assert time.monotonic() < deadline, "processes of the run are still there"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("when", "ending", "code"),
    [
        ("starting", signal.SIGINT, cli.INTERRUPTED),
        ("training", signal.SIGINT, cli.INTERRUPTED),
        ("training", signal.SIGTERM, cli.TERMINATED),
    ],
)
def test_a_signal_stops_after_the_step_and_leaves_no_process(config, tmp_path, when, ending, code):
    """A terminal sends SIGINT to the whole process group, and many schedulers SIGTERM."""
    process = start(config(10**6))
    try:
        while when == "training" and not steps_done(tmp_path / "run"):
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, ending)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert "Run(stopped" in out
        assert "checkpoint of step" in out and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
        assert err.splitlines()[-1].startswith(
            "slidedp: interrupted after" if ending == signal.SIGINT else "slidedp: ended by SIGTERM after"
        )
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        assert events[-1]["status"] == "stopped"
        steps = [e["step"] for e in events if e["kind"] == "step"]
        assert steps.count(max(steps)) == 2  # the step was finished on both ranks
        nothing_in(process.pid)
    finally:
        if _group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_second_signal_ends_at_once(config, tmp_path):
    """One rank is held, so that no step can end and the first signal alone would wait for ever."""
    process = start(config(10**6))
    try:
        while not steps_done(tmp_path / "run"):
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(min(children(process.pid)), signal.SIGSTOP)
        os.kill(process.pid, signal.SIGTERM)
        assert process.stderr is not None
        assert any("interrupt again to end at once" in line for line in process.stderr)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == cli.TERMINATED
        assert process.stderr.read().splitlines()[-1] == "slidedp: ended by SIGTERM"
        nothing_in(process.pid)
    finally:
        if _group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_notebook_prints_as_it_goes_and_fails_with_the_traceback(tmp_path, capfd):
    notebook = nbformat.v4.new_notebook()
    sources = [
        "print('first')\n1 + 1",
        "from pathlib import Path\nPath('here').touch()",
        "1 / 0",
        "print('no')",
    ]
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    path = tmp_path / "n.ipynb"
    nbformat.write(notebook, path)
    before = path.read_bytes()
    assert cli.main(["notebook", str(path)]) == 1
    out, err = capfd.readouterr()
    assert re.match(r"--- cell 1 of 4, \d+ s: print\('first'\)\nfirst\n2\n--- cell 2", out)
    assert "ZeroDivisionError" in err and "1 / 0" in err
    assert "print('no')" not in out
    assert (tmp_path / "here").exists(), "runs in the notebook's folder"
    assert path.read_bytes() == before


def test_the_example_of_the_help_is_a_config(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    lines = capsys.readouterr().out.split("CONFIG.toml holds")[1].splitlines()[1:]
    (tmp_path / "config.toml").write_text("\n".join(lines))
    config = Config.from_toml(tmp_path / "config.toml")
    assert config.tune and config.optimizer.warmup_steps == 50 and config.data.path == "texts/"


def test_bench_gets_all_that_follows_it(capsys):
    for arguments, code, words in (
        (["--help"], 0, "--preset"),
        (["--preset", "none"], 2, "argument --preset: invalid choice"),
    ):
        with pytest.raises(SystemExit) as ending:
            cli.main(["bench", *arguments])
        printed = capsys.readouterr()
        assert ending.value.code == code and words in printed.out + printed.err


def test_a_missing_notebook_is_refused(tmp_path, capsys):
    assert cli.main(["notebook", str(tmp_path / "none.ipynb")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_ctrl_c_ends_a_notebook_and_its_kernel(tmp_path):
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell("import os, time\nprint(os.getpid())\ntime.sleep(300)")]
    nbformat.write(notebook, tmp_path / "n.ipynb")
    process = subprocess.Popen(
        [*SLIDEDP, "notebook", str(tmp_path / "n.ipynb")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("--- cell 1 of 1")
        kernel = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == cli.INTERRUPTED
        assert not Path(f"/proc/{kernel}").exists()
    finally:
        process.kill()
        process.communicate()
