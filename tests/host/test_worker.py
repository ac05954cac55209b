"""The optimizer worker as a process: its end, its threads."""

import threading
from multiprocessing import Pipe

from slidedp.host import worker as worker_module
from slidedp.host.messages import (
    Begin,
    Finished,
    Started,
    Stop,
)
from slidedp.host.worker import run_worker
from tests.host.bench import RANKS, SAVING, layout


def test_run_worker_ends_when_every_rank_has_finished(bench):
    """Also when one rank's pipe breaks first: the launcher reports that, the worker stays calm."""
    made = bench(layout())
    pipes = [Pipe() for _ in range(RANKS)]
    launcher, theirs = Pipe()
    thread = threading.Thread(
        target=run_worker,
        args=(made.config, made.state.handle, made.landing.handle, SAVING, [t for _, t in pipes], theirs),
        daemon=True,
    )
    thread.start()
    assert launcher.poll(30) and launcher.recv() == {"kind": "ready"}
    for ours, _ in pipes:
        ours.send(Started(0, 1))
    assert pipes[0][0].poll(30) and pipes[0][0].recv() == Begin(1)
    launcher.send(Stop())
    pipes[0][0].send(Finished())
    pipes[0][0].close()
    thread.join(0.3)
    assert thread.is_alive()
    pipes[1][0].send(Finished())
    thread.join(30)
    assert not thread.is_alive()


def test_threads_leave_a_core_to_each_rank(monkeypatch):
    monkeypatch.setattr(worker_module.os, "sched_getaffinity", lambda _: set(range(16)))
    assert [worker_module.worker_threads(ranks) for ranks in (1, 2, 7, 8, 40)] == [13, 11, 1, 1, 1]
