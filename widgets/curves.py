"""Curves over any number of steps in a bounded number of points."""

import math

import numpy as np

from slidedp.steps import Step

MAX_POINTS = 2000
"""Points that a curve sends to the browser, however long the run."""
GIB = 2**30


class Curves:
    """Every curve in at most MAX_POINTS points, each the mean over `stride` steps."""

    def __init__(self) -> None:
        self.stride = 1
        self.steps: list[int] = []
        """The last step of each point."""
        self._points: dict[str, list[float]] = {}
        self._open: list[tuple[int, dict[str, float]]] = []

    def add(self, step: int, values: dict[str, float]) -> None:
        self._open.append((step, values))
        if len(self._open) == self.stride:
            self._close()
            if len(self.steps) == MAX_POINTS:
                self._halve()

    def _close(self) -> None:
        names = dict.fromkeys(name for _, values in self._open for name in values)
        for name in names:
            there = [v[name] for _, v in self._open if name in v and math.isfinite(v[name])]
            before = self._points.setdefault(name, [])
            before += [math.nan] * (len(self.steps) - len(before))  # it was not there yet
            before.append(sum(there) / len(there) if there else math.nan)
        self.steps.append(self._open[-1][0])
        self._open.clear()

    def _halve(self) -> None:
        self.stride *= 2
        for name, points in self._points.items():
            points += [math.nan] * (len(self.steps) - len(points))
            pairs = zip(points[::2], points[1::2], strict=True)
            self._points[name] = [
                a if math.isnan(b) else b if math.isnan(a) else (a + b) / 2 for a, b in pairs
            ]
        self.steps = self.steps[1::2]

    @property
    def names(self) -> list[str]:
        return [*self._points]

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one curve, where it has values at all."""
        points = np.array(self._points.get(name, []), np.float32)
        steps = np.array(self.steps[: len(points)])
        if name.startswith("wait "):  # a cause that did not occur took no time
            points = np.concatenate([np.nan_to_num(points), np.zeros(len(self.steps) - len(points))])
            return np.array(self.steps), points
        there = np.isfinite(points) if name.startswith("memory") else np.full(len(points), True)
        return steps[there], points[there]


def values_of(step: Step) -> dict[str, float]:
    """What one step adds to the curves. Waits are percentages of compute's time."""
    values = {"loss": step.loss, "speed": step.tokens_per_second, "seconds": step.seconds}
    seconds = sum(event["compute_seconds"] for event in step.events)
    for event in step.events:
        rank, nbytes = event["rank"], event["gpu_peak_bytes"] or event["anonymous_bytes"]
        values[f"loss {rank}"] = event["loss_sum"] / max(1, event["targets"])
        values[f"memory {rank}"] = nbytes / GIB if nbytes else math.nan
        for cause, waited in event["wait_seconds"].items():
            values[f"wait {rank} {cause}"] = 100 * waited / event["compute_seconds"]
            values[f"wait all {cause}"] = values.get(f"wait all {cause}", 0.0) + 100 * waited / seconds
    return values
