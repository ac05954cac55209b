"""A run's steps, each once all ranks have reported it, read from the stream of events as it comes."""

import dataclasses
import math
from typing import Any

import numpy as np

from slidedp.telemetry import ROUTED, RunLog


@dataclasses.dataclass(frozen=True)
class Step:
    """One step over all ranks; `events` are the ranks' own, in rank order."""

    step: int
    events: list[dict[str, Any]]

    @property
    def loss(self) -> float:
        """Mean over all targets."""
        return mean_loss(self.events)

    @property
    def seconds(self) -> float:
        """NaN for the first step, which has no step before it to measure from."""
        return max(e["step_seconds"] or math.nan for e in self.events)

    @property
    def tokens_per_second(self) -> float:
        """Target tokens only."""
        return sum(e["targets"] for e in self.events) / self.seconds


def mean_loss(ranks: list[dict[str, Any]]) -> float:
    """Mean over all targets of what every rank has reported."""
    return float(sum(e["loss_sum"] for e in ranks) / max(1, sum(e["targets"] for e in ranks)))


class Reports:
    """What the ranks report of each step, until all have."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._partial: dict[int, list[dict[str, Any]]] = {}

    def add(self, event: dict[str, Any]) -> list[dict[str, Any]] | None:
        """All ranks' events of a step, in rank order, once this is the last of them."""
        there = self._partial.setdefault(event["step"], [])
        there.append(event)
        if len(there) < self._ranks:
            return None
        return sorted(self._partial.pop(event["step"]), key=lambda e: e["rank"])


class StepReader:
    """Follows a log step by step, at a cost that does not grow with the length of the run."""

    def __init__(self, log: RunLog) -> None:
        self._log, self._index = log, 0
        ranks = int(log.description["ranks"])
        self._steps, self._evaluations = Reports(ranks), Reports(ranks)
        self.evaluations: list[tuple[int, float]] = []
        """(step, mean loss) of every evaluation that all ranks have reported."""
        self.layouts: list[tuple[int, dict[str, Any]]] = []
        """(step, fields) of every layout that the run has switched to."""
        self.memory: dict[str, Any] = log.description["memory"]
        """What the present layout takes: that of `Plan.memory()`."""
        self.checkpoint: dict[str, Any] | None = None
        """The latest `checkpoint` event: its step, path, or what went wrong."""
        self.worker_bytes = 0
        """Host memory of the optimizer worker beside the shared segments, latest."""

    def new_steps(self) -> list[Step]:
        """The steps that every rank has reported since the last call."""
        events = self._log.events_since(self._index)
        self._index += len(events)
        complete = []
        for event in events:
            if event["kind"] == "layout" and event["rank"] == 0:
                self.layouts.append((event["step"], event["layout"]))
            elif event["kind"] == "checkpoint":
                self.checkpoint = event
            elif event["kind"] == "plan":
                self.memory = event["memory"]
            elif event["kind"] == "update":
                self.worker_bytes = event.get("anonymous_bytes", 0)
            elif event["kind"] == "eval" and (ranks := self._evaluations.add(event)):
                self.evaluations.append((event["step"], mean_loss(ranks)))
            elif event["kind"] == "step" and (ranks := self._steps.add(event)):
                complete.append(Step(event["step"], ranks))
        return complete


class RowReader:
    """Makes of events the rows of `metrics` and `evaluations`, each once and in order: plain dicts with
    `step`, as loggers take them."""

    def __init__(self, ranks: int, flops_per_token: float) -> None:
        self._ranks, self._flops = ranks, flops_per_token
        self._events: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self._next: int | None = None

    def add(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows that are complete now."""
        kind = event["kind"]
        if kind not in ("step", "update", "eval"):
            return []
        self._next = event["step"] if self._next is None else self._next
        self._events.setdefault((kind, event["step"]), []).append(event)
        rows = []
        while True:
            step = self._next
            assert step is not None
            # A rank reports an evaluation before the step that starts from the same weights.
            if len(self._events.get(("eval", step), ())) == self._ranks:
                rows.append(self._evaluation(step, self._events.pop(("eval", step))))
            ranks, update = (self._events.get((kind, step), []) for kind in ("step", "update"))
            if len(ranks) < self._ranks or not update:
                return rows
            rows.append(self._step(Step(step, ranks), update[0]))
            del self._events["step", step], self._events["update", step]
            self._next = step + 1

    @staticmethod
    def _evaluation(step: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        loss = mean_loss(ranks)
        return {"step": step, "eval_loss": loss, "perplexity": float(np.exp(loss))}

    def _step(self, step: Step, update: dict[str, Any]) -> dict[str, Any]:
        waited = sum(sum(e["wait_seconds"].values()) for e in step.events)
        return {
            "step": step.step,
            "loss": step.loss,
            "targets": sum(e["targets"] for e in step.events),
            "step_seconds": step.seconds,
            "tokens_per_second": step.tokens_per_second,
            "tflops_per_gpu": step.tokens_per_second / self._ranks * self._flops / 1e12,
            "busy": 1 - waited / sum(e["compute_seconds"] for e in step.events),
            **{name: update[name] for name in ("lr", "gradient_norm", "skipped", "update_seconds")},
            **{name: event[name] for event in step.events for name in ROUTED if name in event},
        }
