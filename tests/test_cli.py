"""The command line: exit codes, what it prints, and that Ctrl-C leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from slidedp import RunFailed, cli
from slidedp.data.samples import write_samples

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
    def launch(_):
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


@pytest.mark.parametrize("when", ["starting", "training"])
def test_ctrl_c_stops_after_the_step_and_leaves_no_process(config, tmp_path, when):
    """A terminal sends SIGINT to the whole process group."""
    process = subprocess.Popen(
        [*SLIDEDP, "train", str(config(10**6))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("run folder: ")
        events = tmp_path / "run" / "events.jsonl"
        while when == "training" and '"kind": "step"' not in events.read_text():
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == cli.INTERRUPTED, err
        assert "Run(stopped" in out
        assert json.loads(events.read_text().splitlines()[-1])["status"] == "stopped"
        deadline = time.monotonic() + 10
        while _group_exists(process.pid):
            assert time.monotonic() < deadline, "processes of the run are still there"
            time.sleep(0.1)
    finally:
        if _group_exists(process.pid):
            os.killpg(process.pid, signal.SIGKILL)


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
    assert out.startswith("--- cell 1 of 4: print('first')\nfirst\n2\n--- cell 2")
    assert "ZeroDivisionError" in err and "1 / 0" in err
    assert "print('no')" not in out
    assert (tmp_path / "here").exists(), "runs in the notebook's folder"
    assert path.read_bytes() == before


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
