"""The processes of one run, seen from their launcher: started, followed to their end, and ended.

Ranks come first, the optimizer worker last. Whoever fails first is named, and the others are ended.
"""

import atexit
import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from slidedp import rank as rank_process
from slidedp.checkpoint.save import Saving
from slidedp.config import Config
from slidedp.host import worker as worker_process
from slidedp.host.memory import Handle, Segment
from slidedp.host.messages import Profile, Save, SetLayout, Stop
from slidedp.host.start import import_ahead, start
from slidedp.host.state import StateHandle
from slidedp.shortage import MemoryWatch
from slidedp.stalls import StallWatch


def failure_text(error: dict[str, Any]) -> str:
    """What a process has said of its end, and what to do about it where that is known."""
    known = ""
    if error["type"] == "OutOfMemoryError":  # a GPU's
        known = (
            ", out of GPU memory: use layout.activations='offload', a smaller layout.window or batch_size, "
            "layout.vocabulary_pieces=16, or under layout='auto' a smaller gpu_memory_budget"
        )
    return f"{error['process']} failed{known}:\n{error['text']}"


def _enter(index: int, ranks: int, setup: Handle, ends: list[Any]) -> None:
    """Entry of every process."""
    rank_setup, worker_setup = pickle.loads(Segment.open(setup).array(np.uint8).tobytes())
    code = 0
    try:
        if index < ranks:
            rank_process.main(index, rank_setup, *ends[index])
        else:
            worker_process.main(*worker_setup, *ends[index])
    except SystemExit:  # the launcher has been told why
        code = 1
    # Python would take the process apart first, which on busy cores takes seconds and looks like a stall.
    sys.stdout.flush()
    os._exit(code)


class Processes:
    """The ranks and the worker of one run. `follow` runs on a thread of its own."""

    def __init__(
        self,
        config: Config,
        model: PretrainedConfig,
        state: StateHandle,
        landing: Handle,
        samples: Path,
        saving: Saving,
        traces: Path,
        held_out: Path | None = None,
    ) -> None:
        """Starts them. `samples` and `held_out` are folders of prepared samples, `traces` the one for
        recordings, all as absolute paths."""
        ranks = self.ranks = int(config.ranks or 1)
        self._closing = False
        self._rendezvous = tempfile.TemporaryDirectory(prefix="slidedp-")
        context = import_ahead()
        to_worker = [context.Pipe() for _ in range(ranks)]
        to_us = [context.Pipe() for _ in range(ranks + 1)]
        signs = [context.Pipe(duplex=False) for _ in range(ranks + 1)]
        rank_setup = rank_process.RankSetup(
            config,
            model,
            state,
            landing,
            str(samples),
            f"{self._rendezvous.name}/ranks",
            str(traces),
            None if held_out is None else str(held_out),
            saving.start.step,
        )
        # In shared memory, which no other user can reach: what does not fit the pipe to a new process
        # would make it wait for the imports of the one before.
        content = pickle.dumps((rank_setup, (config, state, landing, saving)))
        self._setup = Segment(len(content), "setup")
        self._setup.array(np.uint8)[:] = np.frombuffer(content, np.uint8)
        ends: list[Any] = [(to_worker[rank][0], to_us[rank][1], signs[rank][1]) for rank in range(ranks)]
        ends.append(([theirs for _, theirs in to_worker], to_us[-1][1], signs[-1][1]))
        try:
            started = start(_enter, (ranks, self._setup.handle, ends), ranks + 1)
        except BaseException:
            self._setup.close()
            self._rendezvous.cleanup()
            raise
        self._all = started.processes
        self._running = dict(enumerate(self._all))
        self._silent = set(self._running)
        self._pipes = [ours for ours, _ in to_us]
        self._signs = [ours for ours, _ in signs]
        # A pipe reports its far end's death only when no one else holds that end open.
        for end in [*(end for pair in to_worker for end in pair), *(far for _, far in [*to_us, *signs])]:
            end.close()
        atexit.register(self.end)  # before multiprocessing's own, which only asks, and waits

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def name(self, index: int) -> str:
        return f"rank {index}" if index < self.ranks else "the optimizer worker"

    def begin(self) -> None:
        """The state is as the run starts with: ranks may read it."""
        for pipe in self._pipes[: self.ranks]:
            with contextlib.suppress(OSError):  # `follow` tells why it has ended
                pipe.send(None)

    def command(self, command: SetLayout | Stop | Save | Profile) -> None:
        """Tells the worker, who tells the ranks. OSError where it has ended."""
        self._pipes[-1].send(command)

    def follow(self, take: Callable[[dict[str, Any]], None]) -> str | None:
        """Gives every event to `take` until all processes have ended. The first failure ends the others;
        returns the name and traceback of the process that failed first, None where none did.

        Only this thread collects exit codes: a process that two threads wait for has none for one.
        """
        pipes = {pipe: i for i, pipe in enumerate(self._pipes)}
        sentinels = {process.sentinel: i for i, process in enumerate(self._all)}
        signs = {pipe: i for i, pipe in enumerate(self._signs)}
        stalls = StallWatch([self.name(i) for i in sentinels.values()], [p.pid for p in self._all])
        errors: list[dict[str, Any]] = []
        memory = MemoryWatch()
        failure, checked = None, time.monotonic()

        def hear(pipe: Connection) -> None:
            """Takes the next event of a process."""
            try:
                event = pipe.recv()
            except (EOFError, OSError):
                del pipes[pipe]
                return
            self._silent.discard(pipes[pipe])
            if event["kind"] == "error":
                errors.append(event)
                return
            if event["kind"] == "step":
                stalls.stepped(time.monotonic())
            elif event["kind"] == "layout":
                stalls.restarted()
            take(event)

        def hear_out(patience: float) -> None:
            """Takes all that is in the pipes: a process may have said much that nobody had time for."""
            for pipe in [*pipes]:
                while pipe in pipes and pipe.poll(patience):
                    hear(pipe)

        while sentinels:
            for item in wait([*pipes, *signs, *sentinels], timeout=1.0):
                if item in signs:
                    try:
                        stalls.alive(signs[item], item.recv(), time.monotonic())
                    except (EOFError, OSError):
                        del signs[item]
                elif isinstance(item, Connection):
                    if item in pipes and item.poll():  # a failure just now may have left nothing
                        hear(item)
                else:
                    index = sentinels.pop(item)
                    stalls.ended(index)
                    process = self._running.pop(index)
                    process.join()  # the sentinel fires a moment before the exit code is there
                    if process.exitcode != 0 and failure is None and not self._closing:
                        hear_out(0.2)  # what others say in the wake of it takes a moment
                        failure = self._failure(index, process.exitcode, errors)
                        self.end()
            if time.monotonic() - checked > 1.0:
                checked = time.monotonic()
                for event in [*stalls.check(checked), *memory.check()]:
                    take(event | {"time": time.time()})
        hear_out(0)
        return failure

    def _failure(self, index: int, code: int | None, errors: list[dict[str, Any]]) -> str:
        """Names the process that failed first. Others often fail in its wake, so theirs come last."""
        killed = [
            (i, p.exitcode) for i, p in enumerate(self._all) if p.exitcode is not None and p.exitcode < 0
        ]
        errors.sort(key=lambda e: e["time"])
        own = [e for e in errors if e["type"] != "PeerLost"] or errors
        if killed:
            i, death = killed[0]
            return f"{self.name(i)} was ended by {signal.Signals(-death).name}"
        if own:
            return failure_text(own[0])
        text = f"{self.name(index)} ended with exit code {code}"
        if index in self._silent:
            text += ' before it could say why; a script must call launch() under if __name__ == "__main__":'
        return text

    def close(self) -> None:
        """Kills what still runs, on purpose: no failure. Returns at once; `follow` returns when all ended."""
        self._closing = True
        for process in list(self._running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills what still runs, and waits for it. For the following thread, or before there is one."""
        for process in self._all:
            if process.exitcode is None:
                process.kill()
        for process in self._all:
            process.join()

    def release(self) -> None:
        """Gives back the pipes and the rendezvous once all have ended."""
        for pipe in [*self._pipes, *self._signs]:
            pipe.close()
        self._setup.close()
        self._rendezvous.cleanup()
        atexit.unregister(self.end)
