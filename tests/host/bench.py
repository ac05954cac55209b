"""An optimizer worker in this process, with its ranks' ends of the pipes and gradients that they land."""

from multiprocessing import Pipe
from pathlib import Path

import torch

from slidedp.checkpoint.folder import Progress
from slidedp.checkpoint.save import Saving
from slidedp.config import Config, Data, Optimizer
from slidedp.host.landing import Landing, LandingPlan
from slidedp.host.messages import Landed, Started
from slidedp.host.state import HostState
from slidedp.host.worker import OptimizerWorker
from slidedp.layout import Layout
from slidedp.model.units import Parameter, Unit, chunks

RANKS = 2
SAVING = Saving(Path("none"), Path("none"), {}, Progress(), 0)
# unit -> (matrix elements, norm elements)
SIZES = [(2000, 0), (1500, 70), (1500, 70), (0, 100)]


def make_units(sizes):
    units = []
    for index, (matrix, norm) in enumerate(sizes):
        first = -(-matrix // 64) * 64
        parameters = []
        if matrix:
            parameters.append(Parameter(f"{index}.w", "w", (matrix, 1), 0))
        if norm:
            parameters.append(Parameter(f"{index}.n", "n", (norm,), first))
        units.append(Unit(index, f"unit{index}", tuple(parameters), first + -(-norm // 64) * 64, first))
    return tuple(units)


class Bench:
    """A worker, the rank ends of its pipes, and the ranks' gradients."""

    def __init__(self, layout, *, dtype="float32", ranks=RANKS, sizes=SIZES, saving=SAVING, **settings):
        self.units = make_units(sizes)
        optimizer = Optimizer(**{"lr": 0.01, "clip_norm": None, **settings})
        self.config = Config(
            model="none",
            data=Data(path="none"),
            optimizer=optimizer,
            layout=layout,
            batch_size=2 * ranks,
            sequence_length=8,
            steps=50,
            ranks=ranks,
            compute_dtype=dtype,
            device="cpu",
        )
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self.state = HostState(self.units, self.dtype)
        self.random = torch.Generator().manual_seed(0)
        for unit in self.units:
            for p in unit.parameters:
                p.view(torch.from_numpy(self.state.unit(unit).master)).normal_(generator=self.random)
        self.state.refresh_working()
        pipes = [Pipe() for _ in range(ranks)]
        self.ranks = [ours for ours, _ in pipes]
        self.landing = self.new_landing(layout)
        self.reports = []
        ends = [theirs for _, theirs in pipes]
        self.worker = OptimizerWorker(
            self.config, self.state, layout, self.landing, ends, self.reports.append, saving
        )

    def new_landing(self, layout):
        plan = LandingPlan(self.units, len(self.ranks), layout, self.dtype.itemsize)
        return Landing(plan, self.dtype)

    def close(self):
        self.worker.landing.close()
        self.state.close()

    def snapshot(self):
        """All state, to the bit."""
        states = [self.state.unit(unit) for unit in self.units]
        return [a.tobytes() for state in states for a in state if a is not None]

    def said(self, rank=0):
        """What the worker has told a rank since the last call."""
        messages = []
        while self.ranks[rank].poll(0):
            messages.append(self.ranks[rank].recv())
        return messages

    def start(self, step, targets=(3, 5)):
        for count in targets[: len(self.ranks)]:
            self.worker.handle(Started(step, count))

    def gradients(self, scale=1.0):
        """One flat gradient per unit and rank; padding is zero."""
        found = []
        for unit in self.units:
            ranks = torch.zeros(len(self.ranks), unit.numel)
            for rank in ranks:
                for p in unit.parameters:
                    p.view(rank).normal_(generator=self.random).mul_(scale)
            found.append(ranks)
        return found

    def parts(self, unit, layout=None):
        wanted = layout or self.worker.layout
        return chunks(unit, wanted.chunk_bytes, self.dtype.itemsize, len(self.ranks))

    def land(self, step, unit, chunk, rank, gradient, *, update=True):
        """What `rank` does for one chunk: `gradient` is [ranks, unit.numel]. With `update`, the worker
        then does all that it can."""
        start, stop = self.parts(unit)[chunk]
        landing = self.worker.landing
        squares = 0.0
        if landing.plan.lanes > 1:
            landing.lane(unit, rank)[start:stop] = gradient[rank, start:stop]
        else:
            total = gradient.sum(0)[start:stop]
            half = (stop - start) // 128 * 64  # rank 0 lands the first part, rank 1 the rest
            cut = (0, half, stop - start) if len(self.ranks) == 2 else (0, stop - start)
            first, last = cut[rank], cut[rank + 1]
            landing.lane(unit, 0)[start + first : start + last] = total[first:last]
            squares = float(total[first:last].double().square().sum())
        self.worker.handle(Landed(step, unit.index, chunk, squares))
        while update and self.worker.waiting:
            self.worker.update_one()

    def land_all(self, step, gradients):
        """All chunks in landing order: head first, embed last."""
        for unit in reversed(self.units):
            for chunk in range(len(self.parts(unit))):
                for rank in range(len(self.ranks)):
                    self.land(step, unit, chunk, rank, gradients[unit.index])

    def masters(self):
        return [torch.from_numpy(self.state.unit(unit).master.copy()) for unit in self.units]


def layout(reduction="gpu", schedule="in_forward", chunk_bytes=4096):
    return Layout(reduction=reduction, schedule=schedule, chunk_bytes=chunk_bytes)
