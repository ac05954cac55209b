"""What a run holds does not grow with its steps, and what it opens is for its own processes alone."""

import gc
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slidedp import launch, shortage
from slidedp.checkpoint.folder import checkpoints
from slidedp.host.start import import_ahead
from slidedp.shortage import ENOUGH, LOW, MemoryWatch
from tests.faults.trials import trials
from tests.launching import DEADLINE, children, nothing_left, script, small_config, until


def own_kib(pid):
    """Anonymous and shared memory that a process has written, as its proportional share."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(size) for name, size, *_ in rows if name in ("Pss_Anon:", "Pss_Shmem:"))


def held(pids):
    """(descriptors, threads, KiB) of each process."""
    return [
        (len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")), own_kib(pid))
        for pid in pids
    ]


def descriptors(pid):
    """What each descriptor of a process leads to."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue  # closed meanwhile
    return found


def listening(pid):
    """Local addresses, in the kernel's hexadecimal, of the TCP sockets that a process listens on."""
    sockets = {link[8:-1] for link in descriptors(pid) if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if inode in sockets and state == "0A":
                found.append(local.split(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def world_writable(folder):
    paths = [folder, *folder.rglob("*")]
    return [path for path in paths if path.stat().st_mode & stat.S_IWOTH and not path.is_symlink()]


def check_privacy(run, pids, secret):
    """Of a run that was launched under umask 0, while the launcher held `secret` open."""
    assert world_writable(run.folder) == []
    rendezvous = Path(run._processes._rendezvous.name)
    assert stat.S_IMODE(rendezvous.stat().st_mode) == 0o700
    assert {path.name for path in rendezvous.iterdir()} <= {"ranks"}  # no pickle among them
    for pid in pids:
        links = descriptors(pid)
        assert not [link for link in links if "memfd:" in link or secret in link or "events.jsonl" in link]
    addresses = {address for pid in pids for address in listening(pid)}
    assert addresses and addresses <= LOOPBACK


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", trials(ci=1, soak=2))
def test_a_run_keeps_to_itself_and_does_not_grow(tmp_path, monkeypatch, seed, record_property):
    steps = 500 if seed == 0 else 10_000
    secret = tmp_path / "secret"
    before = os.umask(0)
    try:
        with nothing_left(), open(secret, "w") as file:
            os.set_inheritable(file.fileno(), True)
            import_ahead()  # what ranks are forked from has this umask
            with launch(small_config(tmp_path, run_folder=str(tmp_path / "runs" / "run"))) as run:
                pids = [process.pid for process in run._processes]
                until(lambda: run.log.steps_done >= steps // 4 or not run.running, "a quarter", 900)
                check_privacy(run, pids, str(secret))
                gc.collect()
                quarter = held([os.getpid(), *pids])
                # Meanwhile, another program seems to take all memory.
                monkeypatch.setattr(shortage, "available_bytes", lambda: int(0.4 * 2**30))
                until(lambda: run.log.events("memory_low") or not run.running, "low memory")
                assert "0.4 GiB of host memory are free: soon the kernel" in run.trouble
                monkeypatch.undo()
                until(lambda: run.trouble is None or not run.running, "enough memory")
                until(lambda: run.log.steps_done >= steps or not run.running, "all steps", 3000)
                gc.collect()
                done, end = run.log.steps_done, held([os.getpid(), *pids])
                run.profile(steps=1)
                until(lambda: len(run.log.events("trace")) == 2 or not run.running, "traces")
                run.stop()
                run.wait(DEADLINE)
                # What ranks and worker have written too.
                assert checkpoints(run.folder / "checkpoints") and [*(run.folder / "traces").iterdir()]
                assert world_writable(run.folder) == []
    finally:
        os.umask(before)
    for early, late in zip(quarter, end, strict=True):
        assert late[0] <= early[0] + 1 and late[1] <= early[1], (quarter, end)
    growth = [late[2] - early[2] for early, late in zip(quarter, end, strict=True)]
    record_property("growth_kib", growth)
    print(f"{done} steps: KiB more than after a quarter of them, launcher, ranks, worker: {growth}")
    # An allocator's own slack, whatever the number of steps.
    assert max(growth[1:]) < 4096, growth


def test_low_memory_is_said_once_until_there_is_enough(monkeypatch):
    watch, said = MemoryWatch(), []
    for gib in (9.0, LOW - 0.1, LOW - 0.2, ENOUGH - 0.1, LOW - 0.1, ENOUGH + 0.1, ENOUGH - 0.1):
        monkeypatch.setattr(shortage, "available_bytes", lambda gib=gib: int(gib * 2**30))
        said.append([event["kind"] for event in watch.check()])
    assert said == [[], ["memory_low"], [], [], [], ["memory_enough"], []]


def allowed(*command):
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not allowed("unshare", "-m", "true"), reason="needs the right to mount")
def test_shared_memory_of_64_mib_is_enough(tmp_path):
    """Containers often have no more in /dev/shm than that; here the state alone is larger."""
    from transformers import Qwen3Config

    model = Qwen3Config(
        vocab_size=97, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    config = small_config(tmp_path, model=model, steps=3, run_folder=str(tmp_path / "run"))
    shell = "mount -t tmpfs -o size=64m tmpfs /dev/shm && " + '"$@" && df --output=used /dev/shm'
    command = ["unshare", "-m", "sh", "-c", shell, "sh", *script(config, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1024  # KiB
    from slidedp import open_run

    log = open_run(tmp_path / "run")
    assert log.steps_done == 3
    assert 12 * log.description["parameters"] > 64 * 2**20


# --- limits of a process --------------------------------------------------------------------------

LIMITED = """
import pathlib, pickle, resource, sys
import slidedp
from slidedp.host import kernels
resource.setrlimit(getattr(resource, {limit!r}), ({value}, {value}))
try:
    slidedp.launch(pickle.loads(pathlib.Path({config!r}).read_bytes()))
except slidedp.ConfigError as error:
    print(error)
    sys.exit(2)
"""


def refused(config, tmp_path, text):
    """What a Python process prints that is refused; nothing of it is left."""
    script(config, tmp_path)
    (tmp_path / "limited.py").write_text(text.replace("{config!r}", repr(str(tmp_path / "config.pickle"))))
    processes = children()
    done = subprocess.run([sys.executable, str(tmp_path / "limited.py")], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-2000:]
    assert children() <= processes and not (tmp_path / "run").exists()
    assert done.stdout.count("\n") == 1
    return done.stdout


def test_a_limit_on_file_sizes_is_named(tmp_path):
    config = small_config(tmp_path, run_folder=str(tmp_path / "run"))
    text = LIMITED.replace("{limit!r}", "'RLIMIT_FSIZE'").replace("{value}", "60_000")
    line = refused(config, tmp_path, text)
    assert "shared memory for master" in line and "ulimit" in line


@pytest.mark.skipif(not allowed("unshare", "-m", "true"), reason="needs the right to mount")
def test_a_run_folder_without_room_is_named(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    python = script(small_config(tmp_path, run_folder=str(folder)), tmp_path)
    shell = 'mount -t tmpfs -o size=4k tmpfs "$1" && { "$2" "$3"; ls -A "$1"; }'
    command = ["unshare", "-m", "sh", "-c", shell, "sh", folder, *python]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout == "", "something is left"
    line = done.stderr.splitlines()[-1]
    assert "ConfigError: run_folder='" in line and "No space left" in line and "make room" in line, line


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def cgroup():
    """A memory cgroup of 700 MiB, where this process may make one."""
    folder = CGROUP / f"slidedp-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(700 * 2**20))
    except OSError:
        pytest.skip("needs the right to make a memory cgroup (v1)")
    yield folder
    folder.rmdir()


def test_a_container_of_too_little_memory_is_refused_before_anything_is_taken(tmp_path, cgroup):
    from transformers import Qwen3Config

    model = Qwen3Config(vocab_size=97, hidden_size=1024, num_hidden_layers=8, tie_word_embeddings=True)
    config = small_config(tmp_path, model=model, run_folder=str(tmp_path / "run"))
    text = LIMITED.replace(
        "resource.setrlimit(getattr(resource, {limit!r}), ({value}, {value}))",
        f"pathlib.Path({str(cgroup / 'cgroup.procs')!r}).write_text('0')",
    )
    line = refused(config, tmp_path, text)
    assert "not enough host memory" in line
