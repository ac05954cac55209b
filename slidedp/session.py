"""launch(config) -> Run: starts the ranks and the worker, watches them, and gives everything back."""

import asyncio
import contextlib
import html
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Generator, Iterator
from datetime import datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.multiprocessing as mp
from transformers import AutoTokenizer

from slidedp import rank as rank_process
from slidedp.config import DTYPES, Config, Layout
from slidedp.data.samples import Samples
from slidedp.data.text import check_samples, is_prepared, prepare
from slidedp.errors import ConfigError, reason
from slidedp.host import worker as worker_process
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.memory import Handle
from slidedp.host.state import HostState, StateHandle
from slidedp.host.worker import Profile, SetLayout, Stop
from slidedp.model.families import flops_per_token, skeleton
from slidedp.model.load import check_pretrained, fill_random, load_pretrained
from slidedp.model.save import export
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.probe import probe
from slidedp.policy.rates import Rates
from slidedp.policy.tune import Tuner
from slidedp.preflight import Plan, plan, under, with_layout
from slidedp.tables import html_table
from slidedp.telemetry import RUN, TRACES, RunLog, describe

SAMPLES = "samples"
"""Folder of the run folder that holds the samples made from text."""
GRACE = 5.0
"""Seconds between asking a process to end and killing it."""


class RunFailed(RuntimeError):
    """A process of the run failed; the message holds its name and traceback."""


def launch(config: Config) -> "Run":
    """Starts fine-tuning and returns at once when all processes are on their way.

    Everything that can be refused is refused before memory is allocated (ConfigError). Call it from the
    main thread: the processes end with the thread that started them.
    """
    # What multiprocessing itself goes by, but only after we would have allocated everything.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "launch() was called while a process of a run was importing your script: put the call under "
            'if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch() must be called from the main thread: ranks end with their launcher's")
    preflight = plan(config)
    config = preflight.config
    if not config.tune:  # else the policy starts from a layout that fits
        preflight.check()
    folder = Path(config.run_folder or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")).absolute()
    if (folder / RUN).exists():
        raise ConfigError(f"run_folder={config.run_folder!r}: holds a run already: give another folder")
    tokenizer = _tokenizer(config)
    if isinstance(config.model, str) and not config.random_weights:
        check_pretrained(preflight.units, config.model)
    with _nothing_left_on_failure(folder):
        samples = prepare(config.data, tokenizer, config.sequence_length, folder / SAMPLES)
        check_samples(
            samples, config.batch_size, preflight.model.vocab_size, f"data.path={config.data.path!r}"
        )
        if not config.tune:
            return Run(preflight, folder, samples, tokenizer)
        begun = time.monotonic()
        rates = probe(preflight)
        predicted = AutoPolicy(preflight, rates).decide_all()
        spent = time.monotonic() - begun
        run = Run(under(preflight, predicted), folder, samples, tokenizer)
        run.tune(rates, preflight, spent)
        return run


def _tokenizer(config: Config) -> Any:
    """The data's tokenizer, else the model folder's own; None where prepared samples need none."""
    name = config.data.tokenizer or (config.model if isinstance(config.model, str) else None)
    problem = "none is given"
    if name is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # a dozen kinds, not all of them ValueErrors
            problem = reason(error)
        else:
            # From a folder without its files, transformers makes one that knows no word.
            ids = tokenizer("text", add_special_tokens=False).input_ids
            if any(i != tokenizer.unk_token_id for i in ids):
                return tokenizer
            problem = "no tokenizer is there"
    if config.data.tokenizer is None and is_prepared(config.data):
        return None
    where = f"data.tokenizer={config.data.tokenizer!r}" + (
        f", model={name!r}" if name != config.data.tokenizer else ""
    )
    raise ConfigError(f"{where}: {problem}: give a folder or hub id that has one")


@contextlib.contextmanager
def _nothing_left_on_failure(folder: Path) -> Iterator[None]:
    """Removes what a launch that fails has written to its run folder, and the folder if it is new."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    before = set() if new else set(folder.iterdir())
    try:
        yield
    except BaseException:
        for path in set(folder.iterdir()) - before if folder.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with contextlib.suppress(OSError):  # a parent that another run uses by now
            for path in new:
                path.rmdir()
        raise


def _spawned(index: int, ranks: int, setup: str, ends: list[Any]) -> None:
    """Entry of every process of a run: ranks first, the worker last."""
    rank_setup, worker_setup = pickle.loads(Path(setup).read_bytes())
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
        model = skeleton(preflight.model)
        flops = flops_per_token(model, config.sequence_length)
        self._state: HostState | None = None
        self._landings: list[Landing] = []
        self._processes: list[Any] = []
        self._running: dict[int, Any] = {}
        self._pipes: list[Connection] = []
        self._stopping = self._closing = False
        self._recordings = 0
        self._over = threading.Event()
        self._rendezvous = tempfile.TemporaryDirectory(prefix="slidedp-")
        self.log = RunLog.create(folder, self._description(flops))
        try:
            self._mark("launched")
            self._state = _loaded_state(preflight)
            self._mark("state loaded")
            self._landings.append(self._landing(config.layout))
            self._start(samples, self._state.handle, self._landings[0].handle)
        except BaseException:
            self._release()
            self._release_state()
            raise
        self._watcher = threading.Thread(target=self._watch, name="slidedp-watch", daemon=True)
        self._watcher.start()
        self._finalizer = weakref.finalize(self, _end_processes, self._processes, 0.0)
        self.tuner: Tuner | None = None
        """What chooses the layout, if the config says `tune`; its `policy` has the records so far."""

    def _start(self, samples: Samples, state: StateHandle, landing: Handle) -> None:
        config, ranks = self.config, int(self.config.ranks or 1)
        context = mp.get_context("spawn")
        to_worker = [context.Pipe() for _ in range(ranks)]
        to_us = [context.Pipe() for _ in range(ranks + 1)]
        rank_setup = rank_process.RankSetup(
            config,
            self.plan.model,
            state,
            landing,
            str(Path(samples.folder).absolute()),
            f"{self._rendezvous.name}/ranks",
            str(self.folder / TRACES),
        )
        # By file: what does not fit a pipe would make each process wait for the imports of the last.
        setup = Path(self._rendezvous.name, "setup")
        setup.write_bytes(pickle.dumps((rank_setup, (config, state, landing))))
        ends: list[Any] = [(ours, them) for (ours, _), (_, them) in zip(to_worker, to_us, strict=False)]
        ends.append(([theirs for _, theirs in to_worker], to_us[-1][1]))
        # Inherited by the processes: an interrupt that meets one while it still imports must not end it.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            started = mp.start_processes(
                _spawned,
                (ranks, str(setup), ends),
                nprocs=ranks + 1,
                join=False,
                daemon=True,
                start_method="spawn",
            )
        finally:
            signal.signal(signal.SIGINT, previous)
        assert started is not None
        self._processes = started.processes
        self._running = dict(enumerate(self._processes))
        self._pipes = [ours for ours, _ in to_us]
        # A pipe reports its far end's death only when no one else holds that end open.
        for near, far in [*to_worker, *((None, far) for _, far in to_us)]:
            if near is not None:
                near.close()
            far.close()

    def _description(self, flops: float) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name(0) if self.config.device == "cuda" else None
        return describe(self.config, flops, self.plan.parameters, gpu, self.plan.memory())

    def _mark(self, what: str) -> None:
        self.log.add({"kind": "mark", "what": what, "time": time.time()})

    def _landing(self, layout: Layout) -> Landing:
        assert self._state is not None
        dtype = self._state.dtype
        plan = LandingPlan(self._state.units, int(self.config.ranks or 1), layout, dtype.itemsize)
        return Landing(plan, dtype)

    # --- watching -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The watcher thread: follows the run to its end, and concludes it whatever happens."""
        try:
            self._follow()
        except Exception:  # a full disk, for one
            self.failure = self.failure or f"the launcher failed:\n{traceback.format_exc()}"
            _end_processes(self._processes, GRACE)
        finally:
            self._conclude()

    def _follow(self) -> None:
        """Drains the pipes until every process has ended; the first failure ends the others.

        Only this thread collects exit codes: a process that two threads wait for has none for one.
        """
        pipes = {pipe: i for i, pipe in enumerate(self._pipes)}
        sentinels = {process.sentinel: i for i, process in enumerate(self._processes)}
        ready, errors = 0, []
        self._silent = set(self._running)
        while sentinels:
            for item in wait([*pipes, *sentinels]):
                if isinstance(item, Connection):
                    try:
                        event = item.recv()
                    except (EOFError, OSError):
                        del pipes[item]
                        continue
                    self._silent.discard(pipes[item])
                    if event["kind"] == "error":
                        errors.append(event)
                        continue
                    if event["kind"] == "ready":
                        ready += 1
                        if ready == len(self._processes):
                            self.status = "running"
                    self._take(event)
                else:
                    index = sentinels.pop(item)
                    process = self._running.pop(index)
                    process.join()  # the sentinel fires a moment before the exit code is there
                    if process.exitcode != 0 and self.failure is None and not self._closing:
                        self._fail(index, process.exitcode, errors, pipes)

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
                self._silent.discard(pipes[pipe])
                if event["kind"] == "error":
                    errors.append(event)
        killed = [
            (i, p.exitcode)
            for i, p in enumerate(self._processes)
            if p.exitcode is not None and p.exitcode < 0
        ]
        errors.sort(key=lambda e: e["time"])
        own = [e for e in errors if e["type"] != "PeerLost"] or errors
        if killed:
            i, death = killed[0]
            self.failure = f"{self._name(i)} was ended by {signal.Signals(-death).name}"
        elif own:
            self.failure = f"{own[0]['process']} failed:\n{own[0]['text']}"
        else:
            self.failure = f"{self._name(index)} ended with exit code {code}"
            if index in self._silent:
                self.failure += (
                    ' before it could say why; a script must call launch() under if __name__ == "__main__":'
                )
        _end_processes(self._processes, GRACE)

    def _name(self, index: int) -> str:
        return f"rank {index}" if index < int(self.config.ranks or 1) else "the optimizer worker"

    def _conclude(self) -> None:
        if self.failure is not None:
            self.status = "failed"
            self._release_state()
        elif self._closing or (self._stopping and self.log.steps_done < self.config.steps):
            self.status = "stopped"
        else:
            self.status = "finished"
        with contextlib.suppress(OSError):  # a full disk is the failure already
            self.log.add({"kind": "end", "status": self.status, "failure": self.failure, "time": time.time()})
        self._release()
        self._over.set()

    def _release(self) -> None:
        """Gives back what only a run that goes on needs."""
        with contextlib.suppress(OSError):
            self.log.close()
        for landing in self._landings:
            landing.close()
        self._landings.clear()
        for pipe in self._pipes:
            pipe.close()
        self._rendezvous.cleanup()

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
        await asyncio.sleep(0.3)  # a dashboard shows the end before the next cell blocks the loop
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
        landing = candidate.host["gradient landing"]
        # The system's free bytes do without what the run holds; a budget is for all of it.
        held = 0 if self.config.host_memory_budget is None else self.plan.host_bytes
        if held + landing > candidate.host_available:
            raise ConfigError(
                f"set_layout: {landing / 2**30:.1f} GiB of gradient landing do not fit the host"
            )
        self.plan, self.layout = candidate, layout
        self.log.add({"kind": "plan", "memory": candidate.memory()})
        self._landings.append(self._landing(layout))
        self._command(SetLayout(layout, self._landings[-1].handle))

    def tune(self, rates: Rates, planned: Plan | None = None, spent: float = 0.0) -> None:
        """Starts to look for the best layout on the steps to come, in the background.

        `planned` is the preflight with the memory that was free before the run took its own, `spent`
        what `rates` have cost in seconds.
        """
        if self.tuner is not None:
            raise ConfigError("tune: the run is tuned already")
        self.tuner = Tuner(self, planned or self.plan, rates, spent)
        threading.Thread(target=self.tuner.tune, name="slidedp-tune", daemon=True).start()

    def profile(self, steps: int = 2) -> None:
        """Records the next `steps` steps of every rank with torch.profiler. Returns at once; each rank
        writes `traces/<host>_<rank>.<first step>.pt.trace.json.gz` into the run folder when they are done.

        `slidedp.trace` and `slidedp.widgets.TraceView` show them; TensorBoard's profiler plugin and
        Perfetto open them too. Recorded steps are slower, and every rank pauses to write its trace.
        """
        if not self.running:
            raise ConfigError(f"profile: the run is {self.status}; record steps of a run that goes on")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"profile: steps={steps!r}: expected an integer of at least 1")
        written = len(self.log.events("trace"))
        if written < self._recordings * int(self.config.ranks or 1):
            raise ConfigError("profile: a recording is under way; wait until its traces are written")
        self._recordings += 1
        self._command(Profile(steps))

    def _command(self, command: SetLayout | Stop | Profile) -> None:
        with contextlib.suppress(OSError):  # the run has just ended by itself
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
        self._closing = True
        for ending in (signal.SIGTERM, signal.SIGKILL):
            for process in list(self._running.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, ending)
            if self._over.wait(GRACE):
                break
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

    def _repr_html_(self) -> str:
        done = self.log.steps_done
        rows = [("step", f"{done} of {self.config.steps}")]
        if done:
            last = self.metrics().iloc[-1]
            rows.append(("loss", f"{last['loss']:.4f} nats per target token"))
            rows.append(("speed", f"{last['tokens_per_second']:,.0f} target tokens/s"))
        rows += [("layout", repr(self.layout)), ("folder", str(self.folder))]
        failure = f"<pre>{html.escape(self.failure)}</pre>" if self.failure else ""
        return html_table(f"Run, {self.status}", rows) + failure


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
