"""Which process of a run is stalled, and where: from their signs of life and the steps they finish."""

from pathlib import Path
from typing import Any

SILENT = 10.0
"""Seconds without a sign of life, of which there is one a second, after which a process is stalled."""
BEHIND = 60.0
"""Seconds in which no step ends and no process moves on, at least and in multiples of the longest recent
step (below), after which the run is stalled although every process lives."""
LONGEST = 10


class StallWatch:
    """Told what is heard from each process, and asked now and then; `now` is a monotonic clock's seconds.

    An event `stall` names a process, how long it has been silent and where it was seen last; the run goes
    on by itself when the process does, and `stall_over` says so.
    """

    def __init__(self, names: list[str], pids: list[int]) -> None:
        self._names, self._pids = names, pids
        self._heard: dict[int, float] = {}
        self._doing: dict[int, dict[str, tuple]] = {}
        self._stalled: dict[int | None, float] = {}
        """When each process (None: the run as a whole) that counts as stalled was heard last."""
        self._stepped: list[float] = []
        self._moved = 0.0
        """When a process was last seen to be about something else than before: a step may be long, and an
        evaluation ends none."""
        self._asked: float | None = None
        self._ended = False
        """Whether a process has ended: it has done its steps, and the others may still save for minutes."""

    def alive(self, index: int, doing: dict[str, tuple], now: float) -> None:
        """A sign of life: thread -> (step, unit, what it does)."""
        self._heard[index] = now
        if self._doing.get(index) != doing:
            self._moved = now
        self._doing[index] = doing

    def ended(self, index: int) -> None:
        self._ended = True
        self._heard.pop(index, None)
        self._stalled.pop(index, None)

    def stepped(self, now: float) -> None:
        """A rank has finished a step."""
        self._stepped = [*self._stepped[-20:], now]

    def restarted(self) -> None:
        """A new layout: its first steps may compile, and say nothing about the later ones."""
        self._stepped = []

    def check(self, now: float) -> list[dict[str, Any]]:
        """The stalls that have begun or ended since the last call."""
        if self._asked is not None and now - self._asked > SILENT / 2:
            # We were held up ourselves, and have not read what they said meanwhile.
            self._heard = dict.fromkeys(self._heard, now)
            self._stepped = []
        self._asked = now
        events = []
        for index, heard in self._heard.items():
            if now - heard > SILENT:
                if index not in self._stalled:
                    self._stalled[index] = heard
                    events.append(self._stall(index, now - heard))
            elif index in self._stalled:
                events.append(self._over(index, heard))
        silent = any(index is not None for index in self._stalled)
        behind = not silent and self._behind(now)
        if behind and None not in self._stalled:
            self._stalled[None] = self._stepped[-1]
            events.append(self._stall(None, now - self._stepped[-1]))
        elif not behind and None in self._stalled and not silent:
            events.append(self._over(None, now))
        return events

    def _behind(self, now: float) -> bool:
        if len(self._stepped) < 3 or self._ended:
            return False
        longest = max(b - a for a, b in zip(self._stepped, self._stepped[1:], strict=False))
        return now - max(self._stepped[-1], self._moved) > max(BEHIND, LONGEST * longest)

    def _stall(self, index: int | None, seconds: float) -> dict[str, Any]:
        if index is None:
            name = "the run"
            places = "; ".join(f"{self._names[i]}: {self._place(i)}" for i in self._heard)
            text = f"no step has ended for {seconds:.0f} s; {places}"
        else:
            name = self._names[index]
            text = (
                f"{name} is stalled: no sign of life for {seconds:.0f} s ({_state(self._pids[index])}); "
                f"last seen: {self._place(index)}"
            )
        return {"kind": "stall", "process": name, "seconds": seconds, "text": text}

    def _place(self, index: int) -> str:
        doing = self._doing.get(index)
        if not doing:
            return "starting"
        return ", ".join(
            f"{thread} in step {step}, {what}{' ' + unit if unit else ''}"
            for thread, (step, unit, what) in doing.items()
        )

    def _over(self, index: int | None, now: float) -> dict[str, Any]:
        seconds = now - self._stalled.pop(index)
        name = "the run" if index is None else self._names[index]
        text = f"{name} goes on after {seconds:.0f} s"
        return {"kind": "stall_over", "process": name, "seconds": seconds, "text": text}


def _state(pid: int) -> str:
    """What the kernel says about a process."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "it is gone"
    states = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waits for a device or the disk"}
    return states.get(letter, "its process lives")
