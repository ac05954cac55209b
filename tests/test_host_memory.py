"""What a run takes of the host is what preflight said, and does not grow with the ranks."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from transformers import Qwen3Config

from slidedp import launch
from slidedp.preflight import Plan, plan
from tests.launching import VOCABULARY, children, nothing_left, small_config, until

pytestmark = pytest.mark.timeout(600)
READINGS = 4
"""Of a run's memory: as many for one rank as for four, whose steps take longer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("memory")


def config(folder, ranks, width, layers):
    """Few tokens and the default layout, in BF16."""
    model = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, tie_word_embeddings=True,
    )  # fmt: skip
    return small_config(
        folder,
        model=model,
        ranks=ranks,
        compute_dtype="bfloat16",
        run_folder=str(folder / f"run-{ranks}-{layers}"),
    )


def own_bytes(pid):
    """A process's proportional share of all memory that it or another has written.

    Left out are pages of files: code, which does not depend on the run, and of which a process's share
    falls with whatever else on the machine maps the same libraries.
    """
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return 1024 * sum(int(size) for name, size, *_ in rows if name in ("Pss_Anon:", "Pss_Shmem:"))


def peak(config) -> list[int]:
    """Bytes of the launcher, each rank and the worker, at the moment when their sum was largest.

    From the first update on: before, pages are still being mapped, and what a second process maps
    between two readings would count for the first one whole.
    """
    best: list[int] = []
    with nothing_left(), launch(config) as run:
        pids = [os.getpid(), *(process.pid for process in run._processes)]
        until(lambda: run.log.events("update") or not run.running, "an update", 300)
        for _ in range(READINGS):
            best = max(best, [own_bytes(pid) for pid in pids], key=sum)
            assert run.running, run.failure
            time.sleep(1)  # a reading visits every page: more of them would mostly measure themselves
    return best


@cache
def held(folder, ranks) -> tuple[int, Plan]:
    """Bytes of all processes less what as many hold idle, where all is imported and connected and the model
    is nothing; and the preflight."""
    settings = config(folder, ranks, width=384, layers=172)
    return sum(peak(settings)) - sum(peak(config(folder, ranks, width=16, layers=2))), plan(settings)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_takes_what_preflight_said(folder, ranks, record_property):
    taken, preflight = held(folder, ranks)
    assert preflight.parameters > 300e6
    record_property("host_bytes", taken)
    record_property("host_bytes_said", preflight.host_bytes)
    print(f"{ranks} rank(s): {taken / 2**30:.3f} GiB taken, {preflight.host_bytes / 2**30:.3f} GiB said")
    assert taken == pytest.approx(preflight.host_bytes, rel=0.10)


def test_the_ranks_share_one_state(folder):
    taken = [held(folder, ranks)[0] for ranks in (1, 2, 4)]
    assert max(taken) < 1.05 * min(taken), taken


@contextmanager
def watched() -> Iterator[list[int]]:
    """Sums over this process and its children, all the time."""
    sums, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            found = 0
            for pid in (os.getpid(), *children()):
                with suppress(OSError):  # it has just ended
                    found += own_bytes(pid)
            sums.append(found)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sums
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_a_resume_takes_no_more_than_the_run(folder, record_property):
    settings = config(folder, ranks=2, width=384, layers=173)
    peaks, resume = [], None
    for _ in range(2):
        with watched() as sums, launch(settings, resume=resume) as run:
            until(lambda: len(run.log.events("update")) > 2 or not run.running, "some updates", 300)
            resume = run.save()
        peaks.append(max(sums))
    record_property("peaks", peaks)
    print(f"peak of the run {peaks[0] / 2**30:.3f} GiB, as it is resumed {peaks[1] / 2**30:.3f} GiB")
    assert peaks[1] < 1.1 * peaks[0]
