"""Saves: `Snapshot` writes a checkpoint while training goes on, `Checkpointer` decides when.

An update of a unit that is not written yet copies it first, where there is memory for that, and else waits.
With memory for all copies, they are made while there is nothing to update.
"""

import contextlib
import json
import os
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from slidedp.checkpoint.folder import (
    ASSETS,
    FORMAT,
    INDEX,
    Progress,
    folder_name,
    fsync,
    json_crc,
    prune,
    publish,
    remove_partial,
)
from slidedp.checkpoint.room import Room
from slidedp.checkpoint.shards import THREADS, shard_name, write_shard
from slidedp.checkpoint.source import Source
from slidedp.config import Checkpoint
from slidedp.errors import ConfigError
from slidedp.host import kernels
from slidedp.host.memory import available_bytes
from slidedp.host.process import yield_cores
from slidedp.host.state import HostState
from slidedp.model.units import Unit, aligned

AHEAD = 32
"""Steps before a save at a certain step at which memory for it is taken."""


class Saving(NamedTuple):
    """What a process needs to write checkpoints of a run."""

    folder: Path
    assets: Path
    """Folder of the files that go into each checkpoint's `assets`."""
    description: dict[str, Any]
    """Plain values for the index: at least `config` and `samples`, what `check_samples` returns."""
    start: Progress
    """Where the run began: not at 0 if it was resumed."""
    spare_bytes: int
    """Host memory that copies of units may take during a save."""


class Snapshot:
    """One checkpoint that threads write while the units already train on.

    Make it at a step boundary, when every unit is at version `progress.step`. From then on, call
    `wait(unit)` before the unit changes. `report` gets one event at the end, from a thread of its own.
    """

    def __init__(
        self,
        state: HostState,
        changing: Sequence[Unit],
        progress: Progress,
        saving: Saving,
        keep_last: int,
        report: Callable[[dict[str, Any]], None],
        requests: Sequence[int] = (),
        room: Room | None = None,
    ) -> None:
        """`changing`: the units that the next step changes, in its order. `room` is for copies, and closed at
        the end."""
        self.progress, self._saving, self._keep_last = progress, saving, keep_last
        self._report, self._requests = report, list(requests)
        self.path = saving.folder / folder_name(progress.step)
        self._partial = saving.folder / f".{self.path.name}.partial"
        self._sources = {unit.index: Source(state, unit) for unit in state.units}
        self._room = room or Room(0)
        copied = sum(self._sources[unit.index].nbytes for unit in changing) <= self._room.nbytes
        self._ahead = deque(changing if copied else ())
        # Written from the end. Of what will be copied, the last to change first; else the first.
        still = [unit for unit in state.units if unit not in changing]
        self._remaining = [*still, *(changing if copied else reversed(changing))]
        self._unchanged = set(self._sources)
        """Units that may not change yet."""
        self._files: dict[str, dict[str, int]] = {}
        self._copied: set[int] = set()
        self._waited = 0.0
        self.waiting: Unit | None = None
        """The unit whose update waits for its shard."""
        self.error: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="slidedp-checkpoint")
        self._thread.start()

    def wait(self, unit: Unit) -> None:
        """Returns once the unit may change: it is written or copied, or the checkpoint has failed."""
        begun = time.monotonic()
        if not self._copy(unit):
            with self._changed:
                self.waiting = unit
                if unit in self._remaining:  # nothing is more urgent
                    self._remaining.remove(unit)
                    self._remaining.append(unit)
                self._changed.wait_for(lambda: unit.index not in self._unchanged)
                self.waiting = None
        self._waited += time.monotonic() - begun

    @property
    def ahead(self) -> bool:
        """Whether units are left to copy before they have to change."""
        return bool(self._ahead)

    def copy_ahead(self) -> None:
        """Copies the next unit that will change, if it is not written yet."""
        self._copy(self._ahead.popleft())

    def _copy(self, unit: Unit) -> bool:
        """Whether the unit may change: it is not needed any more, or there is memory for a copy of it."""
        with self._changed:
            if unit.index not in self._unchanged:
                return True
        if not self._sources[unit.index].copy(self._room):
            return False
        with self._changed:
            self._copied.add(unit.index)
            self._unchanged.discard(unit.index)
        return True

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Returns once the checkpoint is durable, or has failed and left nothing."""
        self._thread.join()

    def _write(self) -> None:
        begun = time.monotonic()
        try:
            self._saving.folder.mkdir(parents=True, exist_ok=True)
            remove_partial(self._saving.folder)  # of a process that was killed
            self._partial.mkdir()
            with ThreadPoolExecutor(THREADS, initializer=yield_cores) as pool:
                list(pool.map(lambda _: self._write_shards(), range(THREADS)))
            self._copy_assets()
            self._write_index()
            publish(self._partial, self.path)
        except Exception as error:  # a full disk, for one: the run goes on without this checkpoint
            self.error = f"{self._saving.folder}: {_what(error)}"
            shutil.rmtree(self._partial, ignore_errors=True)
        finally:
            self._release()
            for source in self._sources.values():
                source.close()
            self._room.close()
        if self.error is None:
            with contextlib.suppress(OSError):  # this one is durable, and the next one tries again
                prune(self._saving.folder, self._keep_last)
        self._report(
            {
                "kind": "checkpoint",
                "step": self.progress.step,
                "path": None if self.error else str(self.path),
                "error": self.error,
                "bytes": sum(file["bytes"] for file in self._files.values()),
                "seconds": time.monotonic() - begun,
                "waited_seconds": self._waited,
                "copied_bytes": sum(self._sources[index].nbytes for index in self._copied),
                "requests": self._requests,
                "time": time.time(),
            }
        )

    def _write_shards(self) -> None:
        try:
            while True:
                with self._changed:
                    if not self._remaining:
                        return
                    unit = self._remaining.pop()
                with open(self._partial / shard_name(unit), "wb") as file:
                    source = self._sources[unit.index]
                    self._files[shard_name(unit)] = write_shard(file, unit, source)
                    # From here on its bytes are the page cache's, and it may change.
                    source.close()
                    with self._changed:
                        self._unchanged.discard(unit.index)
                        self._changed.notify_all()
                    os.fsync(file.fileno())
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Nothing more is read from the state."""
        with self._changed:
            self._remaining.clear()
            self._unchanged.clear()
            self._changed.notify_all()

    def _copy_assets(self) -> None:
        folders = [self._partial / ASSETS]
        folders[0].mkdir()
        for source in sorted(self._saving.assets.rglob("*")):  # several chat templates have a folder
            name = Path(ASSETS) / source.relative_to(self._saving.assets)
            if source.is_dir():
                folders.append(self._partial / name)
                folders[-1].mkdir()
            else:
                self._put(str(name), source.read_bytes())
        for folder in folders:
            fsync(folder)

    def _write_index(self) -> None:
        content = {
            "format": FORMAT,
            **self.progress._asdict(),
            "time": time.time_ns(),
            **self._saving.description,
            "files": self._files,
        }
        content = json.loads(json.dumps(content))  # as it will be read: keys are strings
        self._put(INDEX, json.dumps({"crc32": json_crc(content), **content}, indent=1).encode())

    def _put(self, name: str, content: bytes) -> None:
        with open(self._partial / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}


def _what(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error.strerror)
    return str(error) if isinstance(error, ConfigError) else repr(error)


class Checkpointer:
    """Decides at each step boundary whether to save; writes one checkpoint at a time.

    A save that falls due while the one before is still being written, or before there is memory for its
    copies, begins at the first boundary after that.
    """

    def __init__(
        self,
        settings: Checkpoint,
        state: HostState,
        saving: Saving,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._settings, self._state, self._saving, self._report = settings, state, saving, report
        self.snapshot: Snapshot | None = None
        self._changing: Sequence[Unit] = state.units
        self._requests: list[int] = []
        self._room: Room | None = None
        self._due = self._disabled = False
        self._clock = time.monotonic()
        kernels.compile_copy()

    def will_change(self, units: Sequence[Unit]) -> None:
        """The units that a step changes on the host from now on, in its order."""
        if self._room is not None and units != self._changing:
            self._room.close()  # it was to hold others
            self._room = None
        self._changing = units

    def disable(self) -> None:
        """Saves nothing any more: the state is spoiled, and may not take the place of a good one."""
        self._disabled = True

    def request(self, number: int) -> None:
        """Saves as soon as one can begin; the event will hold `number`."""
        self._requests.append(number)

    def begins(self, step: int) -> bool:
        """Whether a checkpoint would begin at the boundary before `step` if it were here now. Takes memory
        for its copies as soon as it is wanted, and AHEAD of one at a certain step."""
        steps, minutes = self._settings.every_steps, self._settings.every_minutes
        self._due |= steps is not None and step % steps == 0
        self._due |= minutes is not None and time.monotonic() - self._clock >= 60 * minutes
        wanted = bool(self._due or self._requests)
        busy = self.snapshot is not None and self.snapshot.running
        soon = wanted or (steps is not None and -step % steps <= AHEAD)
        if busy or self._disabled or not soon:
            return False
        if self._room is None:
            self._room = Room(self._room_bytes())
        return wanted and self._room.ready

    def _room_bytes(self) -> int:
        """For all that changes, if a part of what is free stays free for whoever else wants some."""
        wanted = sum(aligned(Source(self._state, unit).nbytes, kernels.LINE) for unit in self._changing)
        return min(wanted, self._saving.spare_bytes, available_bytes() * 3 // 4)

    def boundary(self, progress: Progress) -> None:
        """Call it when all units are at version `progress.step`, on the host too."""
        if self.begins(progress.step):
            self._begin(progress)

    @property
    def ahead(self) -> bool:
        """Whether `copy_ahead` has something to do."""
        return self.snapshot is not None and self.snapshot.ahead

    def copy_ahead(self) -> None:
        """For when there is nothing to update: one copy that an update would have to wait for."""
        assert self.snapshot is not None
        self.snapshot.copy_ahead()

    def before_update(self, unit: Unit) -> None:
        """Returns once the unit may change."""
        if self.snapshot is not None:
            self.snapshot.wait(unit)

    def finish(self, progress: Progress, stopped: bool) -> None:
        """No update will follow, since the run is over or was `stopped` early: saves what is due, and
        returns when all is written."""
        if self.snapshot is not None:
            self.snapshot.join()
        if self._room is not None:
            self._room.close()  # nothing changes any more
            self._room = None
        if self._disabled:
            return
        last = self.snapshot
        saved = last is not None and last.progress == progress and last.error is None
        if self._requests or ((self._due or (stopped and self._settings.on_stop)) and not saved):
            self._begin(progress).join()

    def _begin(self, progress: Progress) -> Snapshot:
        requests, self._requests = self._requests, []
        room, self._room = self._room, None
        self._due, self._clock = False, time.monotonic()
        last = self._settings.keep_last
        self.snapshot = Snapshot(
            self._state, self._changing, progress, self._saving, last, self._report, requests, room
        )
        return self.snapshot
