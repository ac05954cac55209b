"""What a rank tells the launcher of every step, once the GPU has run it."""

from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from slidedp.config import EXPERTS_EVERY
from slidedp.host.memory import anonymous_bytes
from slidedp.model.experts import Experts, balance_loss
from slidedp.stream.device import Device
from slidedp.stream.functions import Passed
from slidedp.stream.timeline import TRACKS, Timeline


class MetricsQueue:
    """Sends each step's metrics once its compute has run, without ever waiting for the GPU.

    A step may have several `passes`: sums are over all of them, the timeline is that of the last.
    """

    def __init__(
        self, rank: int, device: Device, launcher: Connection, passes: int, experts: Experts | None
    ) -> None:
        self._rank, self._device, self._launcher, self._passes = rank, device, launcher, passes
        self._experts = experts
        self._partial: dict[str, Any] | None = None
        self._pending: deque[tuple[int, int, Passed]] = deque()
        self._previous: Timeline | None = None

    def add(self, number: int, targets: int, passed: Passed) -> None:
        """What pass `number` of the run computes, and this rank's targets in it."""
        self._pending.append((number, targets, passed))
        self.look()

    def look(self) -> None:
        """Sends what the GPU has run by now. A step enqueues until most of it has run, so between steps
        alone, one would be reported when the next has almost run too."""
        while self._pending and self._complete():
            self._send()

    def _complete(self) -> bool:
        _, _, (loss, timeline, _) = self._pending[0]
        return timeline.done() and loss.done() and (timeline.all_done() or not timeline.detailed)

    def flush(self) -> None:
        """Sends what there is. The next step is not timed: it does not follow at once."""
        while self._pending:
            self._send()
        self._previous = None

    def _send(self) -> None:
        number, targets, (loss, timeline, routing) = self._pending.popleft()
        step = number // self._passes
        spans = timeline.resolve(("compute",))
        waits: dict[str, float] = {}
        for span in spans:
            if span.phase.startswith("wait "):
                cause = span.phase.removeprefix("wait ")
                waits[cause] = waits.get(cause, 0.0) + (span.end - span.start) / 1e3
        seconds = timeline.total_ms() / 1e3
        peak, retries = self._device.memory()
        event: dict[str, Any] = {
            "kind": "step",
            "rank": self._rank,
            "step": step,
            "loss_sum": float(loss.value()),
            "targets": targets,
            "compute_seconds": seconds,
            "step_seconds": timeline.seconds_since(self._previous) if self._previous else None,
            "wait_seconds": waits,
            "gpu_peak_bytes": peak,
            "allocator_retries": retries,
            "anonymous_bytes": anonymous_bytes(),
            "began": timeline.began(),
        }
        if timeline.detailed:
            event["timeline"] = [tuple(span) for span in timeline.resolve(TRACKS)]
        if self._experts is not None and routing is not None and self._rank == 0:
            sums = routing.value()
            event["router_loss"] = balance_loss(sums, self._experts.per_token) / self._passes
            event["expert_tokens"] = sums[:-1].long()
        self._previous = timeline
        if self._partial is not None:
            _add_to(event, self._partial)
        last = number % self._passes == self._passes - 1
        self._partial = None if last else event
        if last and "expert_tokens" in event:
            tokens = event.pop("expert_tokens")
            event["expert_load"] = float((tokens.amax(1) / tokens.float().mean(1).clamp(min=1)).max())
            if step % EXPERTS_EVERY == 1:
                event["expert_tokens"] = tokens.tolist()
        if last:
            self._launcher.send(event)


def _add_to(event: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Makes a pass's event that of itself and the passes before it."""
    for name in ("loss_sum", "targets", "compute_seconds", "router_loss", "expert_tokens"):
        if name in event:
            event[name] += earlier[name]
    if event["step_seconds"] is not None:
        before = earlier["step_seconds"]
        event["step_seconds"] = None if before is None else event["step_seconds"] + before
    waits = (event["wait_seconds"], earlier["wait_seconds"])
    event["wait_seconds"] = {c: sum(w.get(c, 0.0) for w in waits) for c in {**waits[0], **waits[1]}}
