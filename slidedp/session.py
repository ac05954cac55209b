"""launch(config) -> Run: starts the ranks and the worker, watches them, and gives everything back."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Generator
from datetime import datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pandas as pd
import torch.multiprocessing as mp
from transformers import AutoTokenizer

from slidedp import rank as rank_process
from slidedp.config import DTYPES, Config, Layout
from slidedp.data.samples import Samples
from slidedp.data.text import check_samples, prepare
from slidedp.errors import ConfigError
from slidedp.host import worker as worker_process
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.state import HostState
from slidedp.host.worker import SetLayout, Stop
from slidedp.model.families import flops_per_token, skeleton
from slidedp.model.load import fill_random, load_pretrained
from slidedp.model.save import export
from slidedp.preflight import Plan, plan, with_layout
from slidedp.telemetry import RunLog, describe

GRACE = 5.0
"""Seconds between asking a process to end and killing it."""


class RunFailed(RuntimeError):
    """A process of the run failed; the message holds its name and traceback."""


def launch(config: Config) -> "Run":
    """Starts fine-tuning and returns at once when all processes are on their way.

    Everything that can be refused is refused before memory is allocated (ConfigError). Call it from the
    main thread: the processes end with the thread that started them.
    """
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "launch() was called while a process of a run was importing your script: put the call under "
            'if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch() must be called from the main thread: ranks end with their launcher's")
    preflight = plan(config)
    preflight.check()
    config = preflight.config
    folder = Path(config.run_folder or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f"))
    tokenizer = _tokenizer(config)
    samples = prepare(config.data, tokenizer, config.sequence_length, folder / "samples")
    check_samples(samples, config.batch_size, preflight.model.vocab_size)
    return Run(preflight, folder.absolute(), samples, tokenizer)


def _tokenizer(config: Config) -> Any:
    """The data's tokenizer, else the model folder's own; None where neither has one."""
    name = config.data.tokenizer or (config.model if isinstance(config.model, str) else None)
    if name is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        if config.data.tokenizer is None and (Path(config.data.path) / "input_ids.npy").exists():
            return None  # prepared samples need none
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"data.tokenizer: {reason} Give a folder or hub id that has one") from error


def _spawned(index: int, ranks: int, rank_setup: Any, worker_setup: Any, ends: list[Any]) -> None:
    """Entry of every process of a run: ranks first, the worker last."""
    if index < ranks:
        rank_process.main(index, rank_setup, *ends[index])
    else:
        worker_process.main(*worker_setup, *ends[index])


class Run:
    """A fine-tuning run. Holds the training state until `close()` (or the end of a `with` block)."""

    def __init__(self, preflight: Plan, folder: Path, samples: Samples, tokenizer: Any) -> None:
        self.plan, self.folder, self.tokenizer = preflight, folder, tokenizer
        self.config = config = preflight.config
        self.layout = config.layout
        self.status = "starting"
        """`starting`, `running`, `finished`, `stopped` or `failed`."""
        self.failure: str | None = None
        ranks = int(config.ranks or 1)
        model = skeleton(preflight.model)
        flops = flops_per_token(model, config.sequence_length)
        dtype = "BF16" if config.compute_dtype == "bfloat16" else "FP32"
        self.log = RunLog.create(folder, describe(config, flops, preflight.parameters) | {"dtype": dtype})
        self._mark("launched")
        self._state: HostState | None = _loaded_state(preflight)
        self._mark("state loaded")
        self._landings = [self._landing(config.layout)]
        self._stopping = False
        self._over = threading.Event()

        context = mp.get_context("spawn")
        to_worker = [context.Pipe() for _ in range(ranks)]
        to_us = [context.Pipe() for _ in range(ranks + 1)]
        self._rendezvous = tempfile.TemporaryDirectory(prefix="slidedp-")
        landing = self._landings[0].handle
        rank_setup = rank_process.RankSetup(
            config,
            preflight.model,
            self._state.handle,
            landing,
            str(Path(samples.folder).absolute()),
            f"{self._rendezvous.name}/ranks",
        )
        worker_setup = (config, self._state.handle, landing)
        ends: list[Any] = [(ours, them) for (ours, _), (_, them) in zip(to_worker, to_us, strict=False)]
        ends.append(([theirs for _, theirs in to_worker], to_us[-1][1]))
        started = mp.start_processes(
            _spawned,
            (ranks, rank_setup, worker_setup, ends),
            nprocs=ranks + 1,
            join=False,
            daemon=True,
            start_method="spawn",
        )
        assert started is not None
        self._processes = started.processes
        self._pipes = [ours for ours, _ in to_us]
        # A pipe reports its far end's death only when no one else holds that end open.
        for near, far in [*to_worker, *((None, far) for _, far in to_us)]:
            if near is not None:
                near.close()
            far.close()
        self._watcher = threading.Thread(target=self._watch, name="slidedp-watch", daemon=True)
        self._watcher.start()
        self._finalizer = weakref.finalize(self, _end_processes, self._processes, 0.0)

    def _mark(self, what: str) -> None:
        self.log.add({"kind": "mark", "what": what, "time": time.time()})

    def _landing(self, layout: Layout) -> Landing:
        assert self._state is not None
        dtype = self._state.dtype
        plan = LandingPlan(self._state.units, int(self.config.ranks or 1), layout, dtype.itemsize)
        return Landing(plan, dtype)

    # --- watching -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Drains the pipes until every process has ended; the first failure ends the others."""
        pipes = {pipe: i for i, pipe in enumerate(self._pipes)}
        running = {process.sentinel: i for i, process in enumerate(self._processes)}
        ready, errors = 0, []
        while running:
            for item in wait([*pipes, *running]):
                if isinstance(item, Connection):
                    try:
                        event = item.recv()
                    except (EOFError, OSError):
                        del pipes[item]
                        continue
                    if event["kind"] == "error":
                        errors.append(event)
                        continue
                    if event["kind"] == "ready":
                        ready += 1
                        if ready == len(self._processes):
                            self.status = "running"
                    self._take(event)
                else:
                    index = running.pop(item)
                    self._processes[index].join()  # the sentinel fires a moment before the exit code is there
                    code = self._processes[index].exitcode
                    if code != 0 and self.failure is None:
                        self._fail(index, code, errors, pipes)
        self._conclude()

    def _take(self, event: dict[str, Any]) -> None:
        self.log.add(event)
        if event["kind"] == "layout":
            switched = self.log.events("layout")
            here = [e for e in switched if e["step"] == event["step"]]
            if len(here) == int(self.config.ranks or 1):  # no rank maps the old memory any more
                while len(self._landings) > 1:
                    self._landings.pop(0).close()

    def _fail(
        self, index: int, code: int | None, errors: list[dict[str, Any]], pipes: dict[Connection, int]
    ) -> None:
        """Names the process that failed first. Others often fail in its wake, so theirs come last."""
        for pipe in list(pipes):
            while True:
                try:
                    if not pipe.poll(0.2):
                        break
                    event = pipe.recv()
                except (EOFError, OSError):
                    break
                if event["kind"] == "error":
                    errors.append(event)
        killed = [
            (i, p.exitcode)
            for i, p in enumerate(self._processes)
            if p.exitcode is not None and p.exitcode < 0
        ]
        own = [e for e in errors if e["type"] != "PeerLost"] or errors
        if killed and not self._stopping:
            i, death = killed[0]
            self.failure = f"{self._name(i)} was ended by {signal.Signals(-death).name}"
        elif own:
            self.failure = f"{own[0]['process']} failed:\n{own[0]['text']}"
        else:
            self.failure = f"{self._name(index)} ended with exit code {code}"
        _end_processes(self._processes, GRACE)

    def _name(self, index: int) -> str:
        return f"rank {index}" if index < int(self.config.ranks or 1) else "the optimizer worker"

    def _conclude(self) -> None:
        if self.failure is not None:
            self.status = "failed"
            self._release_state()
        else:
            self.status = "stopped" if self._stopping else "finished"
        self.log.add({"kind": "end", "status": self.status, "failure": self.failure, "time": time.time()})
        self.log.close()
        for landing in self._landings:
            landing.close()
        self._landings.clear()
        self._rendezvous.cleanup()
        self._over.set()

    # --- what a user does -------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> "Run":
        """Blocks until the run is over, or `timeout` seconds. The first interrupt stops the run after
        its step, a second one ends it at once. Raises RunFailed with the failing process's traceback."""
        try:
            self._wait(timeout)
        except KeyboardInterrupt:
            print("stopping after this step; interrupt again to end at once", file=sys.stderr)
            self.stop()
            try:
                self._wait(None)
            except KeyboardInterrupt:
                self.close()
                raise
        return self._checked()

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        # In slices: an interrupt does not reach a thread that waits on a lock for ever.
        while not self._over.wait(0.2):
            if deadline is not None and time.monotonic() > deadline:
                return

    def _checked(self) -> "Run":
        if self.failure is not None and self._over.is_set():
            raise RunFailed(self.failure)
        return self

    def __await__(self) -> Generator[Any, None, "Run"]:
        """`await run` waits without blocking the kernel, so widgets stay live."""
        return self._await().__await__()

    async def _await(self) -> "Run":
        try:
            while not self._over.is_set():
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            self.stop()
            raise
        return self._checked()

    @property
    def running(self) -> bool:
        return not self._over.is_set()

    def stop(self) -> None:
        """Ends the run at the next step boundary, the same for all ranks. Returns at once."""
        self._stopping = True
        self._command(Stop())

    def set_layout(self, layout: Layout) -> None:
        """Switches to another layout at the next step boundary. Training goes on as if it had always
        been so: every layout computes the same step."""
        if not self.running:
            raise ConfigError(f"set_layout: the run is {self.status}; start another with this layout")
        candidate = with_layout(self.plan, layout)
        landing = sum(v for k, v in candidate.host.items() if k == "gradient landing")
        if landing > candidate.host_available:
            raise ConfigError(
                f"set_layout: {landing / 2**30:.1f} GiB of gradient landing do not fit the host"
            )
        self.plan, self.layout = candidate, layout
        self._landings.append(self._landing(layout))
        self._command(SetLayout(layout, self._landings[-1].handle))

    def _command(self, command: SetLayout | Stop) -> None:
        with contextlib.suppress(BrokenPipeError):  # the run has just ended by itself
            if self.running:
                self._pipes[-1].send(command)

    def metrics(self) -> pd.DataFrame:
        """One row per step so far; see RunLog.metrics for the columns and their units."""
        return self.log.metrics()

    def export(self, folder: str | Path, dtype: str = "bfloat16") -> Path:
        """Writes the trained model as a Hugging Face folder. Needs a run that is over."""
        if self.running:
            raise ConfigError("export: the run goes on; wait() for it or stop() it first")
        if self._state is None:
            raise ConfigError(f"export: the run is {self.status} and its state is gone")
        return export(self._state, self.plan.model, Path(folder), dtype=dtype, tokenizer=self.tokenizer)

    def close(self) -> None:
        """Ends what still runs, at once, and gives all memory back."""
        self._stopping = self.running or self._stopping
        _end_processes(self._processes, GRACE)
        self._over.wait(2 * GRACE)
        self._release_state()
        self._finalizer.detach()

    def _release_state(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        done = self.log.steps_done
        text = f"Run({self.status}, step {done} of {self.config.steps}, {self.folder})"
        if done:
            last = self.metrics().iloc[-1]
            text += f"\n  loss {last['loss']:.4f}, {last['tokens_per_second']:,.0f} target tokens/s"
        if self.failure:
            text += f"\n  {self.failure}"
        return text


def _loaded_state(preflight: Plan) -> HostState:
    config = preflight.config
    dtype = DTYPES[str(config.compute_dtype)]
    state = HostState(preflight.units, dtype)
    try:
        if isinstance(config.model, str) and not config.random_weights:
            load_pretrained(state, config.model)
        else:
            fill_random(state, preflight.model, config.seed)
    except BaseException:
        state.close()
        raise
    return state


def _end_processes(processes: list[Any], grace: float) -> None:
    """Ends processes of ours that still run: asks, then kills after `grace` seconds."""
    for process in processes:
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()
