"""Rates that are kept, and what an interrupted probe leaves."""

import json
import os
import signal
import threading

import pytest

from slidedp import cli
from slidedp.policy.machines import H200
from slidedp.policy.probe import probe, read_rates, write_rates
from slidedp.policy.workload import workload_of
from tests.launching import children, nothing_left, small_config, until
from tests.policy.test_auto import WIDE


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"up": 1.0}'])
def test_rates_that_are_not_whole_are_measured_again(tmp_path, content):
    file, rates = tmp_path / "cache" / "rates.json", H200.rates(workload_of(WIDE))
    write_rates(rates, file)
    assert read_rates(file) == rates
    file.unlink() if content is None else file.write_text(content)
    assert read_rates(file) is None


def test_an_interrupted_probe_leaves_no_process(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, before = small_config(tmp_path), children()

    def interrupt() -> None:
        until(lambda: len(children() - before) == 3, "the measuring processes")
        os.kill(os.getpid(), signal.SIGINT)

    with nothing_left(), pytest.raises(KeyboardInterrupt):
        threading.Thread(target=interrupt).start()
        probe(config)
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_command_line_probes_and_tunes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small_config(tmp_path)  # writes the model and the samples
    file = tmp_path / "config.toml"
    file.write_text(
        f'model = "{tmp_path / "model"}"\nlayout = "auto"\nsequence_length = 16\nbatch_size = 4\n'
        f'ranks = 2\ndevice = "cpu"\n[data]\npath = "{tmp_path / "data"}"\n'
    )
    assert cli.main(["probe", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["synchronous"] is True
    assert cli.main(["tune", str(file)]) == 0
    # Its weights are random: no run may resume from them.
    assert [*tmp_path.glob("runs/*/events.jsonl")] and not [*tmp_path.glob("runs/*/checkpoints/*")]
    out = capsys.readouterr().out
    assert "measure: Which of the best predictions" in out and "[layout]\ndelivery = " in out
