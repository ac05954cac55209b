"""What one rank process does, top to bottom."""

import gc
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from slidedp.config import TIMELINE_EVERY, Config
from slidedp.data.order import Order, split
from slidedp.data.samples import Samples
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.memory import Handle
from slidedp.host.messages import Finished, Started
from slidedp.host.process import (
    bound_freed_memory,
    doing,
    reporting,
    share_cores,
    show_signs_of_life,
)
from slidedp.host.state import HostState, StateHandle
from slidedp.layout import Layout
from slidedp.metrics import MetricsQueue
from slidedp.model.experts import tokens_that_count
from slidedp.model.loss import IGNORED
from slidedp.model.units import frozen_units
from slidedp.stream.compiled import model_functions
from slidedp.stream.context import Context
from slidedp.stream.device import Abort, Aborted, Device
from slidedp.stream.functions import Batch, ModelFunctions
from slidedp.stream.gates import Gates
from slidedp.stream.group import join_ranks
from slidedp.stream.recorder import Recorder
from slidedp.stream.rehearsal import rehearse
from slidedp.stream.step import Engine


class RankSetup(NamedTuple):
    """What the launcher gives every rank."""

    config: Config
    model: PretrainedConfig
    state: StateHandle
    landing: Handle
    samples: str
    rendezvous: str
    """File through which ranks find each other."""
    traces: str
    """Folder that recordings of torch.profiler go to."""
    evaluation: str | None = None
    """Folder of held-out samples, if they are not a part of `samples`."""
    start: int = 0
    """First step; not 0 in a resumed run."""


def run_rank(rank: int, setup: RankSetup, worker: Connection, launcher: Connection) -> None:
    """Trains until the last step or a stop. Needs an initialised process group. The state is read once
    `launcher` says so: see Processes.begin."""
    config = setup.config
    ranks = int(config.ranks or 1)
    abort = Abort()
    device = Device(str(config.device), rank)
    if device.compute is not None:
        torch.cuda.set_stream(device.compute)
    if config.gpu_memory_budget is not None:
        device.limit(int(config.gpu_memory_budget * 2**30))
    samples = Samples(setup.samples)
    learnt, held_out = split(samples.count, config.data.eval_fraction, config.seed)
    evaluated = samples
    if setup.evaluation is not None:
        evaluated = Samples(setup.evaluation)
        held_out = np.arange(evaluated.count)
    bounded = any(part.position_ids is not None for part in (samples, evaluated))
    functions = model_functions(config, setup.model, device, setup.state.dtype, bounded)
    order = Order(len(learnt), config.batch_size, config.seed)
    per_rank = config.micro_batch_size // ranks
    if config.compile:
        doing["compute"] = (setup.start, "", "compile")
        batch = on_device(samples, learnt[:per_rank], per_rank, functions, device)
        units, dtype = setup.state.units, setup.state.dtype
        rehearse(config.layout, units, functions, batch, device, dtype, evaluates=len(held_out) > 0)
        launcher.send({"kind": "mark", "what": f"rank {rank} compiled", "time": time.time()})
        gc.collect()
        gc.freeze()  # the compiler's objects stay
        if device.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    doing["compute"] = (setup.start, "", "wait for the state")
    launcher.recv()
    state = HostState.open(setup.state)
    device.register_all(map(state.delivered, state.units))
    passes = config.gradient_accumulation
    frozen = frozen_units(state.units)
    gates = Gates(worker, len(state.units), abort, setup.start * passes, frozen)
    metrics = MetricsQueue(rank, device, launcher, passes, functions.experts)
    context = Context(config, device, rank, state, gates, functions, abort, metrics.look)

    registered: set[int] = set()  # units whose FP32 state this GPU reaches

    def landing_plan(layout: Layout) -> LandingPlan:
        return LandingPlan(state.units, ranks, layout, config.gradient_dtype.itemsize)

    def open_landing(layout: Layout, handle: Handle) -> Landing:
        landing = Landing(landing_plan(layout), config.gradient_dtype, handle)
        device.register_all(landing.tensor[start:stop] for start, stop in landing.plan.pieces())
        return landing

    def close_landing(landing: Landing) -> None:
        for start, stop in landing.plan.pieces():
            device.unregister(landing.tensor[start:stop])
        landing.close()

    def build(layout: Layout, landing: Landing) -> Engine:
        new = layout.updated_on_gpu(len(state.units) - 2, frozen) - registered
        arrays = [state.tensors(state.units[index]) for index in new]
        # Once for the whole run: seconds for a large model. FP32 ranks compute with the master: done above.
        first = 0 if state.dtype == torch.bfloat16 else 1
        device.register_all(array for unit in arrays for array in unit[first:])
        registered.update(new)
        return Engine(context, layout, landing)

    def evaluate(step: int) -> None:
        """Reports the held-out loss with the weights that `step` starts from."""
        begun, targets = time.time(), 0
        loss = torch.zeros((), dtype=torch.float64, device=device.torch)
        for start in range(rank * per_rank, rank * per_rank + len(held_out), config.micro_batch_size):
            rows = held_out[start : start + per_rank]
            batch = on_device(evaluated, rows, per_rank, functions, device)
            loss += engine.evaluate(step * passes, batch)
            targets += batch.targets
        event = {"kind": "eval", "rank": rank, "step": step, "loss_sum": float(loss), "targets": targets}
        metrics.flush()  # the steps before, which are all enqueued by now
        launcher.send(event | {"seconds": time.time() - begun})

    landing = open_landing(config.layout, setup.landing)
    engine = build(config.layout, landing)
    launcher.send({"kind": "ready", "rank": rank, "time": time.time()})
    recorder: Recorder | None = None
    try:
        for number in range(setup.start * passes, config.steps * passes):
            step, part = divmod(number, passes)
            doing["compute"] = (step, "", "step boundary")
            if number > setup.start * passes:
                begin = gates.wait_begin(number)
                if begin.stop:
                    break
                if begin.layout is not None and begin.landing is not None:
                    engine.close()
                    if begin.landing == landing.handle:
                        landing.plan = landing_plan(begin.layout)
                    else:
                        close_landing(landing)
                        landing = open_landing(begin.layout, begin.landing)
                    del engine
                    gc.collect()  # an engine's parts refer to one another
                    if device.is_cuda:
                        torch.cuda.empty_cache()
                        torch.cuda.reset_peak_memory_stats()
                    engine = build(begin.layout, landing)
                    launcher.send(
                        {"kind": "layout", "rank": rank, "step": step, "layout": asdict(begin.layout)}
                    )
                if begin.profile:
                    recorder = Recorder(device, rank, setup.traces, step, begin.profile * passes)
            due = step % config.eval_every == 0 or step == setup.start  # what was said of it is in no log
            if len(held_out) and part == 0 and due:
                evaluate(step)
            share = rank * passes + part
            rows = learnt[order.step(step)]
            batch = on_device(
                samples, rows[share * per_rank : (share + 1) * per_rank], per_rank, functions, device
            )
            if functions.experts is not None and functions.experts.weight:
                batch = batch._replace(step_targets=samples.targets(rows))
            gates.send(Started(number, batch.targets))
            with recorder.step(step) if recorder is not None else nullcontext():
                profiled = recorder is not None
                detailed = profiled or step % TIMELINE_EVERY == 1
                passed = engine.step(number, batch, detailed, profiled)
            metrics.add(number, batch.targets, passed)
            if recorder is not None:
                recorder.add(step, passed.timeline)
                if recorder.complete:
                    launcher.send(recorder.write(abort))
                    recorder = None
        else:
            if len(held_out):
                evaluate(config.steps)
        if recorder is not None:  # the run ends within the recording
            launcher.send(recorder.write(abort))
        engine.close()
        close_landing(landing)
        metrics.flush()
        gates.send(Finished())
    except Aborted:
        assert abort.cause is not None
        raise abort.cause from None
    except BaseException as error:
        abort.fail(error)
        raise


def on_device(
    samples: Samples, rows: np.ndarray, size: int, functions: ModelFunctions, device: Device
) -> Batch:
    """The samples at `rows`, on their way to the device; up to `size` rows without targets behind them."""
    padded = np.concatenate([rows, np.zeros(size - len(rows), np.int64)])
    input_ids, labels = samples.rows(padded)
    labels[len(rows) :] = IGNORED
    position_ids = samples.positions(padded)
    mixture = functions.experts is not None
    return Batch(
        device.bring(input_ids),
        device.bring(labels),
        functions.positions if position_ids is None else functions.within_documents(position_ids),
        int((labels != IGNORED).sum()),
        device.bring(tokens_that_count(labels, position_ids)) if mixture else None,
    )


def main(rank: int, setup: RankSetup, worker: Connection, launcher: Connection, signs: Connection) -> None:
    """Entry of a rank's process."""
    show_signs_of_life(signs)
    # Threads hand the GIL over often: the transfer thread must not wait 5 ms behind compute's Python.
    sys.setswitchinterval(0.0005)
    # torch 2.13 renames its flat collectives; 2.11 has only the old names.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    ranks = int(setup.config.ranks or 1)
    with reporting(f"rank {rank}", launcher):
        share_cores(ranks)  # also on GPUs: a compiled function is bound to the number of threads
        if setup.config.device == "cpu":
            bound_freed_memory()
        join_ranks(str(setup.config.device), rank, ranks, setup.rendezvous)
        launcher.send({"kind": "mark", "what": f"rank {rank} imported and connected", "time": time.time()})
        run_rank(rank, setup, worker, launcher)
        dist.destroy_process_group()
