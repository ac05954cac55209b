"""A run's events: one stream, on disk as JSON lines, in memory as plain dicts.

The same class writes those of a live run and reads those of a finished one.
"""

import contextlib
import json
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from slidedp.errors import ConfigError

EVENTS = "events.jsonl"
RUN = "run.json"
DETAILS = ("timeline", "spans")
"""What is long in an event: the rank's spans of a sampled step, and the worker's."""
DETAILED = 64
"""Events whose details stay in memory, the latest; those of others are read from the file."""


def say(text: str) -> None:
    """A line on standard error; if that is a file on a full disk, the run goes on without it."""
    with contextlib.suppress(OSError):
        print(f"slidedp: {text}", file=sys.stderr, flush=True)


class EventLog:
    """Events of one run, and what its folder says about it. Thread-safe.

    A run of days has hundreds of thousands of events. In memory they are about 1 KiB each.
    """

    def __init__(self, folder: Path, description: dict[str, Any]) -> None:
        self.folder, self.description = folder, description
        self._events: list[dict[str, Any]] = []
        self._of_kind: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self._detailed: deque[tuple[dict[str, Any], range]] = deque()
        """Events with details, and their places in the file."""
        self._lock = threading.Lock()
        self._file: Any = None
        self._written, self._unwritten = 0, bytearray()
        """Bytes of the file, and what the disk has not taken yet."""
        self.trouble: str | None = None
        """Why events wait in memory."""

    @classmethod
    def create(cls, folder: Path, description: dict[str, Any]) -> Self:
        """Starts a run folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN).write_text(json.dumps(description, indent=1))
        log = cls(folder, description)
        log._open()
        return log

    @classmethod
    def resume(cls, folder: Path, description: dict[str, Any], step: int) -> Self:
        """Goes on with a run folder from `step`: what it holds of later steps was lost with its run."""
        first = cls.read(folder).description.get("first_step", 0)
        (folder / RUN).write_text(json.dumps(description | {"first_step": first}, indent=1))
        partial = folder / f".{EVENTS}.partial"
        with open(partial, "wb") as file:
            for line in _lines(folder / EVENTS):
                event = json.loads(line)
                if event["kind"] != "end" and event.get("step", -1) < step + _done(event):
                    file.write(line)
        partial.replace(folder / EVENTS)
        log = cls.read(folder)
        log._open()
        return log

    @classmethod
    def read(cls, folder: Path) -> Self:
        """A run folder of this or an earlier process."""
        try:
            log = cls(folder, json.loads((folder / RUN).read_text()))
            for line in _lines(folder / EVENTS):
                start, log._written = log._written, log._written + len(line)
                log._keep(json.loads(line), range(start, log._written))
            return log
        except OSError as error:
            raise ConfigError(f"{folder}: not a run folder ({error.strerror}: {error.filename})") from error
        except ValueError as error:
            raise ConfigError(f"{folder}: {RUN} or {EVENTS} is not as a run wrote it ({error})") from error

    def _open(self) -> None:
        """From here on, events go to the file."""
        self._file = open(self.folder / EVENTS, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)

    def add(self, event: dict[str, Any]) -> None:
        """Appends an event, to the file too while the run goes on. What a full disk does not take waits in
        memory until it does."""
        with self._lock:
            start = stop = self._written + len(self._unwritten)
            if self._file is not None:
                self._unwritten += (json.dumps(event) + "\n").encode()
                stop = self._written + len(self._unwritten)
                self._write()
            self._keep(event, range(start, stop))

    def _keep(self, event: dict[str, Any], place: range) -> None:
        """Keeps an event that is at `place` in the file, and lets go of the details of one before."""
        event = {sys.intern(name): value for name, value in event.items()}
        self._events.append(event)
        self._of_kind[event["kind"]].append(event)
        if any(name in event for name in DETAILS):
            self._detailed.append((event, place))
        while len(self._detailed) > DETAILED and 0 < self._detailed[0][1].stop <= self._written:
            old, place = self._detailed.popleft()
            for name in DETAILS:
                if name in old:
                    old[name] = place.start

    def _details(self, event: dict[str, Any], name: str) -> list[Any]:
        """The event's details `name`, from the file where memory has only its place there."""
        found = event.get(name, [])
        if not isinstance(found, int):
            return found
        with open(self.folder / EVENTS, "rb") as file:
            file.seek(found)
            return json.loads(file.readline())[name]

    def _write(self) -> None:
        before, self.trouble = self.trouble, None
        try:
            while self._unwritten:
                taken = self._file.write(self._unwritten)
                del self._unwritten[:taken]
                self._written += taken
        except OSError as error:
            self.trouble = f"{self.folder / EVENTS}: {error.strerror}: events wait in memory, make room"
            if before is None:
                say(self.trouble)

    def close(self) -> None:
        """Ends the writing."""
        with self._lock:
            if self._file is not None:
                self._write()
                self._file.close()
                self._file = None

    def events(self, kind: str) -> list[dict[str, Any]]:
        """All events of one kind, in the order in which they came. Of most sampled steps they hold, for the
        spans, a place in the file: `timeline` and `worker_spans` read it."""
        with self._lock:
            return list(self._of_kind[kind])

    def events_since(self, index: int) -> list[dict[str, Any]]:
        """All events from the `index`-th on, so that a reader which counts them reads each once."""
        with self._lock:
            return self._events[index:]


def _lines(file: Path) -> Iterator[bytes]:
    """The file's lines. The last one of a run that goes on, or that was killed, may not be whole yet."""
    with open(file, "rb") as events:
        yield from (line for line in events if line.endswith(b"\n"))


def _done(event: dict[str, Any]) -> int:
    """1 if the event's `step` counts the steps done, as a checkpoint's; 0 if it is the step's own number."""
    return int(event["kind"] == "checkpoint")
