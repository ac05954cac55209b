"""SIGKILL of any process of a run, at any moment: the dead one is named, and nothing stays."""

import os
import random
import signal
import subprocess
import time

import pytest

from slidedp import ConfigError, RunFailed, launch, open_run
from tests.faults.trials import trials
from tests.launching import DEADLINE, alive, nothing_left, script, small_config, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kills")


def moment(seed, processes, folder):
    """Waits for a random moment: while the processes start, or within a second of a random step."""
    chosen = random.Random(seed)
    step = chosen.choice([0, 0, 1, 2, 10, 50])
    events = folder / "events.jsonl"

    def reached():
        return events.exists() and events.read_text().count('"kind": "step"') >= 2 * step

    until(lambda: reached() or not all(map(alive, processes)), f"step {step}")
    time.sleep(chosen.random() * (8.0 if step == 0 else 1.0))
    assert all(map(alive, processes))
    return step


def memfds_of(pids):
    found = []
    for pid in pids:
        try:
            found += [fd for fd in os.scandir(f"/proc/{pid}/fd") if "memfd:slidedp" in os.readlink(fd)]
        except OSError:
            continue
    return found


@pytest.mark.parametrize("seed", trials(ci=1, soak=30))
@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_killed_process_is_named_and_nothing_stays(folder, tmp_path, victim, seed, record_property):
    with nothing_left():
        run = launch(small_config(folder, run_folder=str(tmp_path / "run")))
        pids = [process.pid for process in run._processes]
        index = random.Random(seed).randrange(2) if victim == "rank" else 2
        name = f"rank {index}" if victim == "rank" else "the optimizer worker"
        step = moment(seed, pids, run.folder)
        os.kill(pids[index], signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(RunFailed, match=f"^{name} was ended by SIGKILL$"):
            run.wait(DEADLINE)
        seconds = time.monotonic() - killed
        record_property("seconds", seconds)
        print(f"{name} killed around step {step}: told and all ended after {seconds:.2f} s")
        assert run.status == "failed"
        assert not any(map(alive, pids))
        assert run._state is None
    assert open_run(run.folder).events("end")[0]["failure"] == run.failure
    with pytest.raises(ConfigError, match="its state was given back"):
        run.export(tmp_path / "out")
    run.close()


@pytest.mark.parametrize("seed", trials(ci=1, soak=30))
def test_processes_end_with_their_launcher(folder, tmp_path, seed, record_property):
    config = small_config(folder, run_folder=str(tmp_path / "run"))
    with subprocess.Popen(script(config, tmp_path), stdout=subprocess.PIPE, text=True) as launcher:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 3
        step = moment(seed, pids, tmp_path / "run")
        assert memfds_of([launcher.pid])
        launcher.kill()
        killed = time.monotonic()
        until(lambda: not any(map(alive, pids)), "all processes ended")
    seconds = time.monotonic() - killed
    record_property("seconds", seconds)
    print(f"launcher killed around step {step}: all ended after {seconds:.2f} s")
    assert not memfds_of([launcher.pid, *pids])
    assert open_run(tmp_path / "run").events("end") == []  # what is there can be read
