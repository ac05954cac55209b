"""launch(config) -> Run: what a user holds while a run trains, and after."""

import asyncio
import contextlib
import html
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from slidedp.checkpoint import resume as resuming
from slidedp.checkpoint.folder import ASSETS, CHECKPOINTS, Progress, find, folder_name, remove_partial
from slidedp.checkpoint.save import Saving, Snapshot
from slidedp.config import DTYPES, Config
from slidedp.errors import ConfigError
from slidedp.events import say
from slidedp.hold import Hold
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.messages import Profile, Save, SetLayout, Stop
from slidedp.host.start import import_ahead
from slidedp.host.state import HostState
from slidedp.launching import (
    Material,
    check_run_folder,
    fill_state,
    held,
    load_tokenizer,
    no_file_for_the_world,
    open_log,
    prepare_data,
    run_folder,
)
from slidedp.layout import Layout
from slidedp.listener import Listener
from slidedp.losses import LossWatch
from slidedp.model.families import flops_per_token, skeleton
from slidedp.model.load import check_pretrained
from slidedp.model.save import export
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.probe import probe
from slidedp.policy.tune import Tuner
from slidedp.preflight import Plan, plan, size_text, under, with_layout
from slidedp.processes import Processes
from slidedp.steps import RowReader
from slidedp.tables import html_table
from slidedp.telemetry import TRACES, RunLog, describe

GONE = "and its state was given back (by close(), or as it failed): a checkpoint has it if one was saved"


class RunFailed(RuntimeError):
    """A process of the run failed; the message holds its name and traceback."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the run goes on, and the last one is as it was."""


def launch(
    config: Config,
    resume: str | Path | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> "Run":
    """Starts fine-tuning and returns at once when all processes are on their way.

    `resume` goes on from a checkpoint: its folder, a run folder (its last checkpoint), or "latest" (the
    last one of `config.run_folder`, or of all runs in `runs/`). The run folder may be the one that the
    checkpoint is in: its metrics then go on from there. On a CPU the result is that of a run which never
    stopped, to the bit, at the same number of ranks.

    `on_step` is called with a plain dict after each step and each evaluation, in order, on a thread of
    its own: `step` and the columns of `Run.metrics`, or `step`, `eval_loss` and `perplexity`. It may save or
    stop the run; one that is slow holds up nothing but the end of `wait()`.

    Everything that can be refused is refused before memory is allocated (ConfigError). Call it from the
    main thread: only there can the processes be started deaf to a signal that means a stop.
    """
    # What multiprocessing itself goes by, but only after we would have allocated everything.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "launch() was called while a process of a run was importing your script: put the call under "
            'if __name__ == "__main__":'
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch() must be called from the main thread, which alone can handle signals")
    preflight = plan(config)
    config = preflight.config
    if not config.tune:  # else the policy starts from a layout that fits
        preflight.check()
    source, start = None, Progress()
    if resume is not None:
        source = find(resume, config.run_folder)
        start = resuming.check(source, preflight.units, config)
    folder = run_folder(config)
    with no_file_for_the_world(), held(folder) as hold:
        check_run_folder(folder, config, source)
        import_ahead()  # while the data is prepared
        tokenizer = load_tokenizer(config)
        if source is None and isinstance(config.model, str) and not config.random_weights:
            check_pretrained(preflight.units, config.model)
        material = prepare_data(preflight, source, folder, tokenizer)
        if not config.tune:
            return Run(preflight, folder, hold, material, source, start, on_step)
        begun = time.monotonic()
        rates = probe(preflight)
        policy = AutoPolicy(preflight, rates, spent=time.monotonic() - begun)
        run = Run(under(preflight, policy.predict()), folder, hold, material, source, start, on_step)
        run.tune(policy)
        return run


class Run:
    """A fine-tuning run. Holds the training state until `close()` (or the end of a `with` block)."""

    _state: HostState | None = None

    def __init__(
        self,
        preflight: Plan,
        folder: Path,
        hold: Hold,
        material: Material,
        source: Path | None,
        start: Progress,
        on_step: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """`hold`: on `folder`, closed at the end; `source`: the checkpoint to start from, at `start`."""
        self.plan, self.folder, self.tokenizer = preflight, folder, material.tokenizer
        self._hold = hold
        self._device_limit = preflight.device_limit  # before the run took its own memory
        self._most_on_device = sum(preflight.device.values())
        self.config = config = preflight.config
        self.layout = config.layout
        self.status = "starting"
        """`starting`, `running`, `finished`, `stopped` or `failed`."""
        self.failure: str | None = None
        self._troubles: dict[str, str] = {}
        """By process, or "memory" or "checkpoint": what is wrong with it while the run goes on."""
        model = skeleton(preflight.model)
        flops = flops_per_token(model, material.samples.attended_length(), config.optimizer.freeze)
        self._landings: list[Landing] = []
        self.stopping = False
        """Whether a stop has been asked for."""
        self._closing = False
        self._ready = 0
        self._losses = LossWatch(int(config.ranks or 1))
        self._diverged: str | None = None
        self._concluded = threading.Event()
        """No process lives any more, and no command is taken; `on_step` may still be at work."""
        self._over = threading.Event()
        self._rows = RowReader(int(config.ranks or 1), flops)
        self._listener: Listener | None = None
        description = self._description(flops, start.step)
        self._saving = Saving(
            folder / CHECKPOINTS,
            folder / ASSETS,
            {**description, "samples": material.contents},
            start,
            spare_bytes=max(0, preflight.host_available - preflight.host_bytes),
        )
        self._progress = start
        """As far as the worker has reported its updates."""
        # In memory only: a checkpoint that turns out to be damaged must leave the folder's log as it is.
        self.log = starting = RunLog(folder, description)
        try:
            self._mark("launched")
            self._state = HostState(preflight.units, DTYPES[str(config.compute_dtype)])
            self._landings.append(Landing(self._landing_plan(config.layout), config.gradient_dtype))
            # They import and find one another, tens of seconds on some machines, while the state fills.
            self._processes = Processes(
                config,
                preflight.model,
                self._state.handle,
                self._landings[0].handle,
                material.samples.folder.absolute(),
                self._saving,
                folder / TRACES,
                None if material.held_out is None else material.held_out.folder.absolute(),
            )
            try:
                fill_state(self._state, preflight, source)
                self._mark("state loaded")
                self.log = open_log(folder, description, preflight, self.tokenizer, start.step)
                for event in starting.events("mark"):
                    self.log.add(event)
                self._recordings = len(self.log.events("trace")) // int(config.ranks or 1)
                self._processes.begin()
            except BaseException:
                self._processes.end()
                self._processes.release()
                raise
        except BaseException:
            self._release()
            self._release_state()
            raise
        self.tuner: Tuner | None = None
        """What chooses the layout, if the config says `tune`; its `policy` has the records so far."""
        if on_step is not None:
            self._listener = Listener(on_step)
        threading.Thread(target=self._watch, name="slidedp-watch", daemon=True).start()

    def _description(self, flops: float, first_step: int) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name(0) if self.config.device == "cuda" else None
        return describe(self.config, flops, self.plan.parameters, gpu, self.plan.memory(), first_step)

    def _mark(self, what: str) -> None:
        self.log.add({"kind": "mark", "what": what, "time": time.time()})

    def _landing_plan(self, layout: Layout) -> LandingPlan:
        itemsize = self.config.gradient_dtype.itemsize
        return LandingPlan(self.plan.units, int(self.config.ranks or 1), layout, itemsize)

    # --- watching -------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The watcher thread: follows the run to its end, and concludes it whatever happens."""
        try:
            self.failure = self._processes.follow(self._take) or self._diverged
        except Exception:
            self.failure = f"the launcher failed:\n{traceback.format_exc()}"
            self._processes.end()
        finally:
            self._conclude()
            self._concluded.set()
            self._processes.release()
            if self._listener is not None:
                self._listener.finish()
            self._over.set()

    def _take(self, event: dict[str, Any]) -> None:
        self.log.add(event)
        for row in self._rows.add(event):
            if self._listener is not None:
                self._listener.tell(row)
        if event["kind"] == "step":
            found = self._losses.add(event)
            if found is not None:
                self._take(found)
        elif event["kind"] == "update":
            self._progress = Progress(event["step"] + 1, self._progress.updates + (not event["skipped"]))
        elif event["kind"] == "ready":
            self._ready += 1
            if self._ready == len(self._processes):
                self.status = "running"
        elif event["kind"] == "layout":
            switched = self.log.events("layout")
            here = [e for e in switched if e["step"] == event["step"]]
            if len(here) == self._processes.ranks:  # no rank maps the old memory any more
                while len(self._landings) > 1:
                    self._landings.pop(0).close()
        elif event["kind"] in ("stall", "memory_low"):
            self._troubles[event.get("process", "memory")] = event["text"]
            say(event["text"])
        elif event["kind"] in ("stall_over", "memory_enough"):
            self._troubles.pop(event.get("process", "memory"), None)
            say(event["text"])
        elif event["kind"] == "checkpoint":
            self._troubles.pop("checkpoint", None)
            if event["error"] is not None:
                self._troubles["checkpoint"] = _failed(event)
                say(_failed(event))
        elif event["kind"] == "diverged":
            self._diverged = event["text"]
        elif event["kind"] == "loss_not_finite" and self.layout.schedule == "in_backward":
            self._diverged = self._diverged or (
                f"{event['text']}, and layout.schedule='in_backward' has applied its gradients: the state "
                "is spoiled; start again with layout.schedule='in_forward', which skips such steps, or a "
                "lower optimizer.lr"
            )
            self.stopping = True
            self._command(Stop(save=False))

    def _conclude(self) -> None:
        if self.failure is not None:
            self.status = "failed"
            # Where steps that were not finite have been skipped, the state is that of the last good one.
            if self.failure != self._diverged or self.layout.schedule == "in_backward":
                self._release_state()
        elif self._closing or (self.stopping and self.log.steps_done < self.config.steps):
            self.status = "stopped"
        else:
            self.status = "finished"
        self.log.add({"kind": "end", "status": self.status, "failure": self.failure, "time": time.time()})
        self._release()

    def _release(self) -> None:
        """Gives back what only a run that goes on needs."""
        with contextlib.suppress(OSError):
            self.log.close()
        for landing in self._landings:
            landing.close()
        self._landings.clear()
        remove_partial(self._saving.folder)  # of a worker that was killed
        self._hold.close()

    # --- what a user does -------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> "Run":
        """Blocks until the run is over, or `timeout` seconds. An interrupt stops the run after its step,
        and one that meets a run which is stopping already ends it at once. Raises RunFailed with the
        failing process's traceback."""
        while True:
            try:
                self._wait(timeout)
                return self._checked()
            except KeyboardInterrupt:
                if self.stopping:
                    self.close()
                    raise
                try:
                    self.stop()
                    print("stopping after this step; interrupt again to end at once", file=sys.stderr)
                except KeyboardInterrupt:
                    self.close()
                    raise
                timeout = None

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
    def trouble(self) -> str | None:
        """What is wrong while the run goes on: a process that is stalled, and where; too little memory; a
        checkpoint that could not be written."""
        return "; ".join(self._troubles.copy().values()) or None

    @property
    def running(self) -> bool:
        """Whether it goes on: not finished, stopped or failed."""
        return not self._over.is_set()

    def stop(self) -> None:
        """Ends the run at the next step boundary, the same for all ranks. Returns at once."""
        self.stopping = True
        self._command(Stop())

    def set_layout(self, layout: Layout) -> None:
        """Switches to another layout at the next step boundary. Training goes on as if it had always
        been so: every layout computes the same step."""
        if not self.running:
            raise ConfigError(f"set_layout: the run is {self.status}; start another with this layout")
        if self.stopping:
            raise ConfigError("set_layout: the run stops after this step; start another with this layout")
        if not isinstance(layout, Layout):
            raise ConfigError(f"set_layout: {layout!r}: expected a slidedp.Layout")
        candidate = with_layout(self.plan, layout)
        candidate.check_layout()
        lands = self._landing_plan(layout)
        landing = next((there for there in self._landings[-1:] if there.plan.shape == lands.shape), None)
        self._check_memory(candidate, lands_alike=landing is not None)
        if landing is None:
            landing = Landing(lands, self.config.gradient_dtype)  # or it is refused: then all is as it was
            self._landings.append(landing)
        self.plan, self.layout = candidate, layout
        self._most_on_device = max(self._most_on_device, sum(candidate.device.values()))
        self.log.add({"kind": "plan", "memory": candidate.memory()})
        self._command(SetLayout(layout, landing.handle))

    def _check_memory(self, candidate: Plan, lands_alike: bool) -> None:
        """Refuses a plan that the memory which is free now has no room for, beside what the run holds."""
        limit, free = self._device_limit, candidate.device_available
        if limit is not None and free is not None:  # another program may have taken some since the launch
            limit = min(limit, self._most_on_device + free)
        candidate.check_device(limit)
        # A new landing is there before the old one goes; everything else takes the place of the old.
        before, after = (there.host.get("gradient landing", 0) for there in (self.plan, candidate))
        growth = (candidate.host_bytes - after) - (self.plan.host_bytes - before)
        more = max(0, growth) + (0 if lands_alike else after)
        # The system's free bytes do without what the run holds; a budget is for all of it.
        held = 0 if self.config.host_memory_budget is None else self.plan.host_bytes
        if held + more > candidate.host_available:
            raise ConfigError(
                f"set_layout: this layout takes {size_text(more)} more of host memory, and "
                f"{size_text(max(0, candidate.host_available - held))} are free; offload or spill fewer "
                "layers, or choose landing='ring'"
            )

    def tune(self, policy: AutoPolicy) -> None:
        """Starts to look for the best layout on the steps to come, in the background. When steps drift later
        on from what they took then, a better layout is proposed: the event `drift` of the log, and a line;
        with `config.retune` it is taken.

        `policy` was made before the run took its memory. What it has decided, and what was overruled in it,
        stands; its last two decisions are taken on real steps.
        """
        if self.tuner is not None:
            raise ConfigError("tune: the run is tuned already")
        if not isinstance(policy, AutoPolicy):
            raise ConfigError(f"tune: {policy!r}: expected a slidedp.policy.auto.AutoPolicy")
        self.tuner = Tuner(self, policy)
        threading.Thread(target=self.tuner.follow, name="slidedp-tune", daemon=True).start()

    def profile(self, steps: int = 2, start: int = 0) -> None:
        """Records `steps` steps of every rank with torch.profiler, from step `start` on or as soon as
        possible after it. Returns at once; each rank writes
        `traces/<host>_<rank>.<first step>.pt.trace.json.gz` into the run folder when they are done.

        `slidedp.trace` and `slidedp.widgets.TraceView` show them; TensorBoard's profiler plugin and
        Perfetto open them too. Recorded steps are slower, and every rank pauses to write its trace.
        """
        if not self.running:
            raise ConfigError(f"profile: the run is {self.status}; record steps of a run that goes on")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"profile: steps={steps!r}: expected an integer of at least 1")
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < self.config.steps:
            raise ConfigError(f"profile: start={start!r}: expected a step from 0 to {self.config.steps - 1}")
        written = len(self.log.events("trace"))
        if written < self._recordings * int(self.config.ranks or 1):
            raise ConfigError("profile: a recording is under way; wait until its traces are written")
        self._recordings += 1
        self._command(Profile(steps, start))

    def _command(self, command: SetLayout | Stop | Save | Profile) -> None:
        with contextlib.suppress(OSError):  # the run has just ended by itself
            if self.running:
                self._processes.command(command)

    def save(self, wait: bool = True) -> Path | None:
        """Writes a checkpoint while training goes on, or of the last step if the run is over;
        `launch(config, resume=...)` takes it. It is of the first step boundary at which there is memory for
        copies of what changes while it is written.

        Returns its folder once it is durable, or raises CheckpointFailed. Without `wait`, returns None at
        once; the event `checkpoint` of the log tells the outcome.
        """
        number = time.time_ns()  # unlike any other, those in the log of a resumed run too
        self._command(Save(number))
        while not self._concluded.is_set():
            if not wait:
                return None
            if (event := self._saved(lambda e: number in e["requests"])) is not None:
                return _path_of(event)
            self._concluded.wait(0.05)
        if (event := self._saved(lambda e: number in e["requests"])) is not None:
            return _path_of(event)
        if self._state is None:
            raise ConfigError(f"save: the run is {self.status}, {GONE}")
        here = str(self._saving.folder / folder_name(self._progress.step))
        if (event := self._saved(lambda e: e["path"] == here)) is not None:
            return _path_of(event)
        events: list[dict[str, Any]] = []
        keep = self.config.checkpoint.keep_last
        Snapshot(self._state, self._state.units, self._progress, self._saving, keep, events.append).join()
        return _path_of(events[0])

    def _saved(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any] | None:
        return next((event for event in self.log.events("checkpoint") if wanted(event)), None)

    def metrics(self) -> pd.DataFrame:
        """One row per step so far; see RunLog.metrics for the columns and their units."""
        return self.log.metrics()

    def evaluations(self) -> pd.DataFrame:
        """One row per evaluation on held-out data so far; see RunLog.evaluations."""
        return self.log.evaluations()

    def experts(self) -> pd.DataFrame:
        """Tokens of every expert of a mixture, in the sampled steps so far; see RunLog.experts."""
        return self.log.experts()

    def export(self, folder: str | Path, dtype: str = "bfloat16") -> Path:
        """Writes the trained model as a Hugging Face folder. Needs a run that is over."""
        if self.running:
            raise ConfigError("export: the run goes on; wait() for it or stop() it first")
        if self._state is None:
            raise ConfigError(f"export: the run is {self.status}, {GONE}")
        return export(self._state, self.plan.model, Path(folder), dtype=dtype, tokenizer=self.tokenizer)

    def close(self) -> None:
        """Ends what still runs, at once, and gives all memory back."""
        self._closing = True
        if self._listener is not None:
            self._listener.dismiss()
        self._processes.close()
        self._over.wait()
        self._release_state()

    def _release_state(self) -> None:
        if self._state is not None:
            self._state.close()
            self._state = None

    def __del__(self) -> None:
        self._release_state()  # the watcher thread holds a run that goes on

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
        for step, row in self.evaluations()[-1:].iterrows():
            text += (
                f"\n  held-out loss {row.eval_loss:.4f}, perplexity {row.perplexity:,.2f} after {step} steps"
            )
        if self.trouble and self.running:
            text += f"\n  {self.trouble}"
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
        for step, row in self.evaluations()[-1:].iterrows():
            text = f"{row.eval_loss:.4f} nats, perplexity {row.perplexity:,.2f} after {step} steps"
            rows.append(("held-out loss", text))
        rows += [("layout", repr(self.layout)), ("folder", str(self.folder))]
        failure = f"<pre>{html.escape(self.failure)}</pre>" if self.failure else ""
        return html_table(f"Run, {self.status}", rows) + failure


def _path_of(event: dict[str, Any]) -> Path:
    if event["error"] is not None:
        raise CheckpointFailed(_failed(event))
    return Path(event["path"])


def _failed(event: dict[str, Any]) -> str:
    return f"the checkpoint of step {event['step']} failed: {event['error']}"
