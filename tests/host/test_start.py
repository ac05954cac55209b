"""Processes that are forked from one which has imported everything see what their launcher is now."""

import gc
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process

import pytest
import torch.multiprocessing as mp

from slidedp.host.start import import_ahead, start
from tests.launching import children


def tell(index: int, names: list[str], result: Connection) -> None:
    ignored = [signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)]
    launcher = parent_process()
    result.send((index, [os.environ.get(name) for name in names], ignored, os.getppid(), launcher.pid))


def count(index: int, result: Connection) -> None:
    result.send((len(gc.get_objects()), gc.get_freeze_count()))


def told(names: list[str], processes: int = 1) -> list[tuple]:
    ours, theirs = import_ahead().Pipe(duplex=False)
    before = children()
    started = start(tell, (names, theirs), processes)
    answers = sorted(ours.recv() for _ in range(processes))
    while not started.join():
        pass
    assert children() == before
    return answers


def test_a_later_launch_has_the_environment_of_its_launcher(monkeypatch):
    names = ["SLIDEDP_ONE", "SLIDEDP_TWO"]
    monkeypatch.setenv("SLIDEDP_ONE", "1")
    [(_, first, _, server, _)] = told(names)
    monkeypatch.delenv("SLIDEDP_ONE")
    monkeypatch.setenv("SLIDEDP_TWO", "2")
    [(_, second, _, again, _)] = told(names)
    assert (first, second) == (["1", None], [None, "2"])
    assert server == again != os.getpid()


def test_processes_leave_signals_to_the_launcher():
    answers = told([], processes=3)
    assert [index for index, *_ in answers] == [0, 1, 2]
    assert all(ignored == [True, True] and pid == os.getpid() for *_, ignored, _, pid in answers)


def test_an_interrupt_while_processes_start_is_not_lost_and_leaves_none(monkeypatch):
    _, theirs = import_ahead().Pipe(duplex=False)
    before, begin = children(), mp.start_processes
    started = []

    def interrupted(*arguments, **settings):
        signal.raise_signal(signal.SIGINT)
        started.append(begin(*arguments, **settings))
        return started[0]

    monkeypatch.setattr(mp, "start_processes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(tell, ([], theirs), 2)
    assert len(started[0].processes) == 2 and children() == before


def test_a_collection_does_not_look_at_what_was_imported():
    ours, theirs = import_ahead().Pipe(duplex=False)
    started = start(count, (theirs,), 1)
    looked_at, frozen = ours.recv()
    while not started.join():
        pass
    assert frozen > 200_000 and looked_at < frozen / 10
