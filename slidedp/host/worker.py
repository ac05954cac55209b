"""The optimizer worker: one process that updates the authoritative state once per step.

It counts landed chunks, sums lanes, computes the global norm, runs AdamW and publishes versions. Units
that the ranks update on their GPUs it publishes when every rank has written its share. It also decides
how each step begins, so that all ranks agree on a stop or a new layout without a collective: the answer
for step t+1 goes out when the first rank starts step t, a whole step early.
"""

import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from slidedp.checkpoint.folder import Progress
from slidedp.checkpoint.save import Checkpointer, Saving
from slidedp.config import TIMELINE_EVERY, Config
from slidedp.host import kernels
from slidedp.host.groups import segments
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.memory import Handle, anonymous_bytes
from slidedp.host.messages import (
    Begin,
    Coefficients,
    Consumed,
    Finished,
    Landed,
    Profile,
    Published,
    Save,
    SetLayout,
    Started,
    Stop,
    Written,
)
from slidedp.host.process import doing, reporting, show_signs_of_life
from slidedp.host.state import HostState, StateHandle, unit_starts
from slidedp.layout import Layout
from slidedp.model.units import Unit, chunks, frozen_units

MAX_SKIPPED = 10
"""Steps in a row whose gradients were not finite, after which the run stops."""


def worker_threads(ranks: int) -> int:
    """Threads of the update. Each rank has two more that must not wait for a core, since the GPU waits for
    them: one enqueues compute, one transfers. One core is left to the launcher and the system.

    The slowest thread ends a kernel, so one core too few costs the worker itself. With 15, 13 and 10 threads
    on 16 cores, a step of Qwen3-0.6B took 0.238, 0.211 and 0.246 s with all updates here, and 0.184, 0.158
    and 0.153 s with those of 18 of the 30 units (H200, one rank).
    """
    return max(1, len(os.sched_getaffinity(0)) - 2 * ranks - 1)


class OptimizerWorker:
    """Consumes gradients of step t and publishes version t + 1 of every unit."""

    def __init__(
        self,
        config: Config,
        state: HostState,
        layout: Layout,
        landing: Landing,
        ranks: list[Connection],
        report: Callable[[dict[str, Any]], None],
        saving: Saving,
    ) -> None:
        self.config, self.state, self.ranks, self.report = config, state, ranks, report
        self.checkpoints = Checkpointer(config.checkpoint, state, saving, report)
        self.passes = config.gradient_accumulation
        self.number = saving.start.step * self.passes
        """The pass whose gradients are being collected; `passes` of them make a step. Messages to and from
        ranks count passes: a version is published for each, and it is new after the last of a step."""
        self.updates = saving.start.updates
        """Steps that changed the state (skipped ones did not): AdamW's step count."""
        self.finished = 0
        self._skipped_in_a_row = 0
        self._answered = 0  # the last step whose Begin has been sent
        self._command: SetLayout | Stop | None = None
        self._profile: Profile | None = None  # asked for, and not yet begun
        self._profiled = range(0)
        self._started: dict[int, list[int]] = {}
        self._early: list[Landed | Written] = []  # of the next step
        self._stored = False
        """Whether this step leaves all of the state on the host, what stays on GPUs too."""
        self._stops_at: int | None = None
        """The step that, as ranks have been told, does not come any more."""
        self._frozen = frozen_units(state.units)
        self._segments = [segments(unit, config.optimizer) for unit in state.units]
        self._starts = unit_starts(state.units)
        self._total = np.empty(self._starts[-1] if self.passes > 1 else 0, np.float32)
        """Gradients summed over passes."""
        kernels.set_threads(worker_threads(len(ranks)))
        self._use(layout, landing)
        self._begin_pass()

    def _use(self, layout: Layout, landing: Landing) -> None:
        self.layout, self.landing = layout, landing
        cut = layout.chunk_bytes, self.state.dtype.itemsize, len(self.ranks), layout.vocabulary_pieces
        self._chunks = [chunks(unit, *cut) for unit in self.state.units]
        self._on_gpu = layout.updated_on_gpu(len(self.state.units) - 2, self._frozen)
        self._resident = layout.resident_on_gpu(len(self.state.units) - 2, self._frozen)
        self.checkpoints.will_change(self._changing())

    def _begin_pass(self) -> None:
        in_forward = self.layout.schedule == "in_forward"
        counts = [0 if i in self._frozen else len(parts) for i, parts in enumerate(self._chunks)]
        self._arrivals: dict[tuple[int, int], list[float]] = {}
        self._to_land = [n if in_forward or i not in self._on_gpu else 0 for i, n in enumerate(counts)]
        self._to_update = [n if i not in self._on_gpu else len(self.ranks) for i, n in enumerate(counts)]
        self._sums: dict[tuple[int, int], float] = {}
        self._waiting: list[tuple[int, int, int]] = []
        if self.number % self.passes == 0:
            self._spans: list[tuple[str, float, float]] = []
        self._norm, self._skipped, self._clip = math.nan, False, 1.0
        self._told = False  # of this pass's coefficients
        self._send_coefficients_in_backward()
        early, self._early = self._early, []
        for message in early:
            self.handle(message)

    # --- what arrives ---------------------------------------------------------------------------

    def command(self, command: SetLayout | Stop | Save | Profile) -> None:
        """A wish of the launcher, answered at the next step boundary. A stop is never overruled."""
        if isinstance(command, Save):
            self.checkpoints.request(command.number)
            return
        if isinstance(command, Profile):
            self._profile = command
            return
        if isinstance(command, Stop) and not command.save:
            self.checkpoints.disable()
        if not isinstance(self._command, Stop):
            self._command = command

    def handle(self, message: Started | Landed | Written | Finished) -> None:
        if isinstance(message, Started):
            self._start(message)
        elif isinstance(message, Finished):
            self.finished += 1
        elif message.step == self.number + 1:
            # A rank may be a step ahead while another still writes back what its GPU has updated.
            self._early.append(message)
        elif isinstance(message, Landed):
            self._landed(message)
        else:
            self._count_update(message.unit)

    def _start(self, message: Started) -> None:
        counts = self._started.setdefault(message.step, [])
        counts.append(message.targets)
        between = (message.step + 1) % self.passes == 0  # a command waits for the end of the step
        if len(counts) == 1 and not (between and isinstance(self._command, SetLayout)):
            self._send_begin(message.step + 1)
            self._answered = message.step + 1
        elif len(counts) == 1:
            self._answered = message.step
        self._send_coefficients_in_backward()

    def _send_coefficients_in_backward(self) -> None:
        """Without a norm to wait for, all that GPU updates need is how many targets the ranks have."""
        complete = len(self._started.get(self.number, ())) == len(self.ranks)
        if complete and not self._told and self.layout.schedule == "in_backward":
            self._send_coefficients()

    def _landed(self, message: Landed) -> None:
        self._expect(message)
        key = (message.unit, message.chunk)
        sums = self._arrivals.setdefault(key, [])
        sums.append(message.sum_of_squares)
        if len(sums) < len(self.ranks):
            return
        unit = self.state.units[message.unit]
        start, stop = self._chunks[message.unit][message.chunk]
        plan = self.landing.plan
        self._to_land[unit.index] -= 1
        if self.passes > 1:
            total = self._starts[unit.index]
            with self._working_on(unit):
                self._sums[key] = kernels.accumulate(
                    self.landing.array,
                    plan.zone(unit) + start,
                    plan.lane_stride,
                    plan.lanes,
                    self._total[total + start : total + stop],
                    first=self.number % self.passes == 0,
                )
            if not self._last_pass:
                self._count_update(unit.index)
                return
        if self.layout.schedule == "in_backward":
            # With room for all gradients, first what the next forward needs first: then the worker is
            # busy in both passes and the forward waits least. In a ring, first come first served.
            turn = unit.index if plan.whole else -unit.index
            heapq.heappush(self._waiting, (turn, message.chunk, unit.index))
            return
        if plan.stored and self.passes == 1:
            store = plan.store(unit)
            with self._working_on(unit):
                self._sums[key] = kernels.sum_lanes(
                    self.landing.array,
                    plan.zone(unit) + start,
                    plan.lane_stride,
                    plan.lanes,
                    self.landing.array[store + start : store + stop],
                )
        elif self.passes == 1:
            self._sums[key] = math.fsum(sums)
        if self._to_land[unit.index] == 0 and plan.stored:
            self._send(Consumed(unit.index, self.number))
        if not any(self._to_land):
            self._clip_and_update()

    def _clip_and_update(self) -> None:
        """All gradients of the step are here, and with them the norm: `in_forward` updates begin."""
        self._norm = math.sqrt(math.fsum(self._sums.values())) * self._denominator_scale()
        self._skipped = not math.isfinite(self._norm)
        limit = self.config.optimizer.clip_norm
        # torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
        self._clip = min(1.0, limit / (self._norm + 1e-6)) if limit is not None else 1.0
        self._send_coefficients()
        for unit in self.state.units:
            if unit.index in self._on_gpu or unit.frozen:
                continue
            if self._skipped:
                self._to_update[unit.index] = 1
                self._count_update(unit.index)
            else:
                self._waiting += [(unit.index, i, unit.index) for i in range(self._to_update[unit.index])]

    def _send_coefficients(self) -> None:
        self._told = True
        if self._on_gpu:
            self._stored = bool(self._resident) and self.checkpoints.begins(self.step + 1)
            # Ranks may hear of a stop before the checkpoint begins whose state this step changes.
            if self._stored or self.step + 1 in (self.config.steps, self._stops_at):
                self._before_write_back()
            for index in sorted(self._on_gpu):  # the ranks write these from now on
                unit = self.state.units[index]
                if not self._stays(unit):
                    self.checkpoints.before_update(unit)
            scale = None if self._skipped else self._denominator_scale() * self._clip
            self._send(Coefficients(self.step, scale, self._lr(), self.updates + 1, self._stored))

    def _before_write_back(self) -> None:
        """What ranks are told next lets them write resident state to the host, where a checkpoint of an
        earlier step may still be reading it."""
        for index in sorted(self._resident):
            self.checkpoints.before_update(self.state.units[index])

    def _expect(self, message: Landed) -> None:
        """Counting a chunk of another step, or one too many, would end in a wait without end."""
        arrived = len(self._arrivals.get((message.unit, message.chunk), ()))
        if message.step != self.number or arrived >= len(self.ranks):
            raise RuntimeError(
                f"{message} arrived while the gradients of step {self.step} are collected, of which "
                f"{arrived} of {len(self.ranks)} ranks have landed this chunk: a gate is broken"
            )

    @property
    def waiting(self) -> bool:
        """Whether a chunk can be updated now."""
        return bool(self._waiting)

    def update_one(self) -> None:
        """Updates the waiting chunk that is needed first; publishes its unit with its last chunk."""
        _, chunk, index = heapq.heappop(self._waiting)
        unit, plan = self.state.units[index], self.landing.plan
        start, stop = self._chunks[index][chunk]
        zone, lanes = (plan.store(unit), 1) if plan.stored else (plan.zone(unit), plan.lanes)
        gradients = self.landing.array
        if self.passes > 1:
            zone, lanes, gradients = self._starts[index], 1, self._total
        with self._working_on(unit):
            self._update(unit, start, stop, gradients, zone, lanes, self._clip)
        self._count_update(index)

    # --- what follows ---------------------------------------------------------------------------

    def _count_update(self, index: int) -> None:
        """One more part of the unit is updated, by the worker or on a GPU."""
        if self._to_update[index] == 0:
            raise RuntimeError(f"{self.state.units[index].name} is updated twice in step {self.step}")
        self._to_update[index] -= 1
        if self._to_update[index] == 0:
            self._send(Published(index, self.number + 1))
            if not any(self._to_update):
                whole = not self._resident or self._stored  # the host has all of the state, at one version
                if self._last_pass:
                    self._complete_step()
                self.number += 1
                if self.number % self.passes == 0 and whole:
                    # Before anything of the next step: GPU updates `in_backward` may begin with it.
                    self.checkpoints.boundary(self.progress)
                self._begin_pass()

    @property
    def step(self) -> int:
        return self.number // self.passes

    @property
    def _last_pass(self) -> bool:
        """Whether the step's update follows from this pass."""
        return self.number % self.passes == self.passes - 1

    def _complete_step(self) -> None:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self._skipped else 0
        event = {
            "kind": "update",
            "step": self.step,
            "lr": self._lr(),
            "gradient_norm": self._norm,
            "skipped": self._skipped,
            "update_seconds": sum(end - begun for _, begun, end in self._spans),
            "anonymous_bytes": anonymous_bytes(),
        }
        if self.step % TIMELINE_EVERY == 1 or self.step in self._profiled:
            event["spans"] = self._spans
        if self._skipped:
            event["not_finite"] = self._first_not_finite()
        self.report(event)
        if self._skipped_in_a_row == MAX_SKIPPED:
            self._give_up(self._first_not_finite())
        self.updates += not self._skipped
        self._started = {number: t for number, t in self._started.items() if number > self.number}
        if self._answered == self.number and self.step + 1 < self.config.steps:
            self._switch_layout()

    def _changing(self) -> list[Unit]:
        """The units whose state on the host a step changes, in its order. That of others stays on GPUs, or
        frozen."""
        sign = 1 if self.layout.schedule == "in_forward" else -1
        units = [unit for unit in self.state.units if not unit.frozen and not self._stays(unit)]
        return sorted(units, key=lambda unit: (unit.index not in self._on_gpu, sign * unit.index))

    def _stays(self, unit: Unit) -> bool:
        """Whether ranks keep the unit's state and write it to the host only when they are told to."""
        # Ranks that compute in FP32 deliver the master, and so write it in every step.
        return unit.index in self._resident and self.state.unit(unit).working is not None

    @property
    def progress(self) -> Progress:
        """Where the run stands; between two steps every unit is at this version."""
        return Progress(self.step, self.updates)

    def _first_not_finite(self) -> str:
        """The unit whose gradient was not finite first: backward goes from the last to the first, and
        whatever is not finite makes all that follows so."""
        last = max(unit for (unit, _), total in self._sums.items() if not math.isfinite(total))
        return self.state.units[last].name

    def _give_up(self, unit: str) -> None:
        """Nothing has been changed by these steps: the state is that of the last good one."""
        self._command = Stop()
        text = (
            f"the gradients of {MAX_SKIPPED} steps in a row, up to step {self.step}, were not finite, first "
            f"in {unit}; none of them was applied: lower optimizer.lr, warm up longer, or check the data"
        )
        self.report({"kind": "diverged", "step": self.step, "unit": unit, "text": text})

    def _switch_layout(self) -> None:
        """All updates are published, so nothing reads the old landing memory any more."""
        command = self._command
        if isinstance(command, SetLayout):
            self._command = None
            self._before_write_back()
            landing, dtype = self.landing, self.config.gradient_dtype
            plan = LandingPlan(self.state.units, len(self.ranks), command.layout, dtype.itemsize)
            if landing.handle == command.landing:
                landing.plan = plan
            else:
                landing.close()
                landing = Landing(plan, dtype, command.landing)
            self._use(command.layout, landing)
            self._send_begin(self.number + 1, command)
        else:
            self._send_begin(self.number + 1)

    def _send_begin(self, number: int, switch: SetLayout | None = None) -> None:
        if number % self.passes:  # within a step
            self._send(Begin(number))
            return
        layout, landing = switch or (None, None)
        record, step = 0, number // self.passes
        if self._profile is not None and step >= self._profile.start:
            record, self._profile = self._profile.steps, None
            self._profiled = range(step, step + record)
        stops = isinstance(self._command, Stop)
        if stops:
            self._stops_at = step
            self._before_write_back()
        self._send(Begin(number, stops, layout, landing, record))

    def _denominator_scale(self) -> float:
        """Ranks differentiate the summed loss divided by their own token count (a constant);
        this turns it into the mean over the targets of all ranks."""
        nominal = self.config.micro_batch_size // len(self.ranks) * self.config.sequence_length
        return nominal / max(1, sum(sum(t) for n, t in self._started.items() if n <= self.number))

    def _lr(self) -> float:
        return self.config.optimizer.lr_at(self.step, self.config.steps)

    def _update(
        self,
        unit: Unit,
        start: int,
        stop: int,
        gradients: np.ndarray,
        zone: int,
        lanes: int,
        coefficient: float,
    ) -> None:
        """AdamW on elements [start, stop) of a unit, whose gradient's lane 0 starts at `zone`."""
        self.checkpoints.before_update(unit)
        settings = self.config.optimizer
        state = self.state.unit(unit)
        for segment in self._segments[unit.index]:
            first, last, lr_factor, weight_decay = segment.within(start, stop)
            if first >= last:
                continue

            def part(array: np.ndarray, span: slice = slice(first, last)) -> np.ndarray:
                return array[span]

            kernels.adamw_update(
                part(state.master),
                part(state.exp_avg),
                part(state.exp_avg_sq),
                None if state.working is None else part(state.working),
                gradients,
                zone + first,
                self.landing.plan.lane_stride,
                lanes,
                grad_scale=self._denominator_scale() * coefficient,
                lr=self._lr() * lr_factor,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                eps=settings.eps,
                weight_decay=weight_decay,
                step=self.updates + 1,
            )

    @contextmanager
    def _working_on(self, unit: Unit) -> Iterator[None]:
        begun = time.time()
        doing["update"] = (self.step, unit.name, "update")
        yield
        doing["update"] = (self.step, unit.name, "wait for gradients after")
        self._spans.append((unit.name, begun, time.time()))

    def _send(self, message: Begin | Coefficients | Published | Consumed) -> None:
        for connection in self.ranks:
            connection.send(message)


def serve(worker: OptimizerWorker, ranks: list[Connection], launcher: Connection) -> None:
    """Takes what comes in and updates what waits, until all ranks have finished and nothing is left."""
    sources = [*ranks, launcher]
    while worker.finished < len(ranks) or worker.waiting:
        # All news first: what has just landed may be needed before what waits already.
        busy = worker.waiting or worker.checkpoints.ahead
        ready = wait(sources, timeout=0 if busy else None)
        for source in ready:
            assert isinstance(source, Connection)
            try:
                message = source.recv()
            except (EOFError, ConnectionResetError):
                # The launcher sees every death, tells the user about it and ends the others.
                sources.remove(source)
                continue
            if source is launcher:
                worker.command(message)
            else:
                worker.handle(message)
        if worker.waiting and not ready:
            worker.update_one()
        elif not ready:
            worker.checkpoints.copy_ahead()


def run_worker(
    config: Config,
    state: StateHandle,
    landing: Handle,
    saving: Saving,
    ranks: list[Connection],
    launcher: Connection,
) -> None:
    """Serves the ranks until each has finished; returns when the last update is published."""
    host = HostState.open(state)
    dtype = config.gradient_dtype
    plan = LandingPlan(host.units, len(ranks), config.layout, dtype.itemsize)
    sending = threading.Lock()  # a checkpoint's thread reports too

    def report(event: dict[str, Any]) -> None:
        with sending:
            launcher.send(event)

    landed = Landing(plan, dtype, landing)
    worker = OptimizerWorker(config, host, config.layout, landed, ranks, report, saving)
    launcher.send({"kind": "ready"})
    serve(worker, ranks, launcher)
    worker.checkpoints.finish(worker.progress, stopped=worker.step < config.steps)


def main(
    config: Config,
    state: StateHandle,
    landing: Handle,
    saving: Saving,
    ranks: list[Connection],
    launcher: Connection,
    signs: Connection,
) -> None:
    """Entry of the worker's process."""
    show_signs_of_life(signs)
    # Read when Numba loads its OpenMP: threads that wait for the next chunk must not spin on cores
    # that the ranks need.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with reporting("the optimizer worker", launcher):
        run_worker(config, state, landing, saving, ranks, launcher)
