"""Checkpoints: the whole training state on disk, every unit at the version of one step boundary.

A checkpoint is a folder `step-<steps done>` that appears whole or not at all:

    index.json            step, updates, config, and the size and CRC-32 of every other file
    <unit>.safetensors    master.<name>, exp_avg.<name>, exp_avg_sq.<name> in FP32: a shard per unit
    assets/               config.json, generation_config.json and the tokenizer's files

The order of the samples is a function of the seed and the step, so the step is the data position too.
`Snapshot` writes while training goes on: only an update of a unit that is not written yet waits.
"""

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from slidedp.config import Checkpoint, Config
from slidedp.errors import ConfigError
from slidedp.host.state import HostState
from slidedp.model.families import load_config, skeleton
from slidedp.model.save import export
from slidedp.model.units import Parameter, Unit, units_of

CHECKPOINTS = "checkpoints"
"""Folder of the run folder that holds the checkpoints."""
LATEST = "latest"
INDEX, ASSETS = "index.json", "assets"
FORMAT = 1
KINDS = ("master", "exp_avg", "exp_avg_sq")
THREADS = 4
"""Shards that are written or read at once: one thread alone is slower than a disk or a page cache."""
PIECE = 8 * 2**20
"""Bytes that are checked and written at once."""
DATA_SETTINGS = ("seed", "batch_size", "sequence_length", "data.eval_fraction")
"""Settings that a run must share with its checkpoint: they decide which samples come next."""


class Progress(NamedTuple):
    """Where a run is at a step boundary."""

    step: int = 0
    """Steps done: the next one has this number, and every unit is at this version."""
    updates: int = 0
    """Steps that changed the state (a skipped one did not): AdamW's step count."""


class Saving(NamedTuple):
    """What a process needs to write checkpoints of a run."""

    folder: Path
    assets: Path
    """Folder of the files that go into each checkpoint's `assets`."""
    description: dict[str, Any]
    """Plain values for the index: at least `config` and `samples`, the number of samples."""
    start: Progress
    """Where the run began: not at 0 if it was resumed."""


def name(step: int) -> str:
    """The folder of a checkpoint after `step` steps."""
    return f"step-{step:08}"


# --- writing ----------------------------------------------------------------------------------------


class Snapshot:
    """One checkpoint that threads write while the units it has written already train on.

    Make it at a step boundary, when every unit is at version `progress.step`. From then on, call
    `wait(unit)` before the unit changes. `report` gets one event at the end, from a thread of its own.
    """

    def __init__(
        self,
        state: HostState,
        order: Sequence[Unit],
        progress: Progress,
        saving: Saving,
        keep_last: int,
        report: Callable[[dict[str, Any]], None],
        requests: Sequence[int] = (),
    ) -> None:
        """`order`: all units, first the one whose next update comes first."""
        self.progress, self._state, self._saving, self._keep_last = progress, state, saving, keep_last
        self._report, self._requests = report, list(requests)
        self.path = saving.folder / name(progress.step)
        self._partial = saving.folder / f".{self.path.name}.partial"
        self._remaining = list(order)
        self._unwritten = {unit.index for unit in order}
        self._files: dict[str, dict[str, int]] = {}
        self._waited = 0.0
        self.waiting: Unit | None = None
        """The unit whose update waits for its shard."""
        self.error: str | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="slidedp-checkpoint")
        self._thread.start()

    def wait(self, unit: Unit) -> None:
        """Returns once the unit may change: it is written, or the checkpoint has failed."""
        with self._changed:
            if unit.index not in self._unwritten:
                return
            begun, self.waiting = time.monotonic(), unit
            if unit in self._remaining:  # nothing is more urgent
                self._remaining.remove(unit)
                self._remaining.insert(0, unit)
            self._changed.wait_for(lambda: unit.index not in self._unwritten)
            self.waiting = None
            self._waited += time.monotonic() - begun

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
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda _: self._write_shards(), range(THREADS)))
            self._copy_assets()
            self._write_index()
            _publish(self._partial, self.path)
        except Exception as error:  # a full disk, for one: the run goes on without this checkpoint
            what = error.strerror if isinstance(error, OSError) else repr(error)
            self.error = f"{self._saving.folder}: {what}"
            shutil.rmtree(self._partial, ignore_errors=True)
        finally:
            self._release()
        if self.error is None:
            _prune(self._saving.folder, self._keep_last)
        self._report(
            {
                "kind": "checkpoint",
                "step": self.progress.step,
                "path": None if self.error else str(self.path),
                "error": self.error,
                "bytes": sum(file["bytes"] for file in self._files.values()),
                "seconds": time.monotonic() - begun,
                "waited_seconds": self._waited,
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
                    unit = self._remaining.pop(0)
                with open(self._partial / _shard_name(unit), "wb") as file:
                    self._files[_shard_name(unit)] = _write_shard(file, self._state, unit)
                    # From here on its bytes are the page cache's, and it may change.
                    with self._changed:
                        self._unwritten.discard(unit.index)
                        self._changed.notify_all()
                    os.fsync(file.fileno())
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        """Nothing more is read from the state."""
        with self._changed:
            self._remaining.clear()
            self._unwritten.clear()
            self._changed.notify_all()

    def _copy_assets(self) -> None:
        target = self._partial / ASSETS
        target.mkdir()
        for source in sorted(self._saving.assets.iterdir()):
            self._put(f"{ASSETS}/{source.name}", source.read_bytes())
        _fsync(target)

    def _write_index(self) -> None:
        content = {
            "format": FORMAT,
            **self.progress._asdict(),
            "time": time.time_ns(),
            **self._saving.description,
            "files": self._files,
        }
        content = json.loads(json.dumps(content))  # as it will be read: keys are strings
        self._put(INDEX, json.dumps({"crc32": _json_crc(content), **content}, indent=1).encode())

    def _put(self, name: str, content: bytes) -> None:
        with open(self._partial / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._files[name] = {"bytes": len(content), "crc32": zlib.crc32(content)}


class Checkpointer:
    """Decides at each step boundary whether to save; writes one checkpoint at a time.

    A save that falls due while the one before is still being written begins at the first boundary
    after that.
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
        self._requests: list[int] = []
        self._due = self._disabled = False
        self._clock = time.monotonic()

    def disable(self) -> None:
        """Saves nothing any more: the state is spoiled, and may not take the place of a good one."""
        self._disabled = True

    def request(self, number: int) -> None:
        """Saves at the next boundary; the event will hold `number`."""
        self._requests.append(number)

    def boundary(self, progress: Progress, order: Sequence[Unit]) -> None:
        """Call it when all units are at version `progress.step`, in the `order` of their next updates."""
        steps, minutes = self._settings.every_steps, self._settings.every_minutes
        self._due |= steps is not None and progress.step % steps == 0
        self._due |= minutes is not None and time.monotonic() - self._clock >= 60 * minutes
        if self._disabled:
            return
        if (self._due or self._requests) and not (self.snapshot and self.snapshot.running):
            self._begin(progress, order)

    def before_update(self, unit: Unit) -> None:
        """Returns once the unit may change."""
        if self.snapshot is not None:
            self.snapshot.wait(unit)

    def finish(self, progress: Progress, stopped: bool) -> None:
        """No update will follow, since the run is over or was `stopped` early: saves what is due, and
        returns when all is written."""
        if self.snapshot is not None:
            self.snapshot.join()
        if self._disabled:
            return
        saved = self.snapshot is not None and self.snapshot.progress == progress
        if self._requests or ((self._due or (stopped and self._settings.on_stop)) and not saved):
            self._begin(progress, self._state.units).join()

    def _begin(self, progress: Progress, order: Sequence[Unit]) -> Snapshot:
        requests, self._requests = self._requests, []
        self._due, self._clock = False, time.monotonic()
        self.snapshot = Snapshot(
            self._state, order, progress, self._saving, self._settings.keep_last, self._report, requests
        )
        return self.snapshot


def _shard_name(unit: Unit) -> str:
    return f"{unit.name}.safetensors"


def _tensors(unit: Unit, frozen: bool = False) -> Iterator[tuple[str, str, Parameter]]:
    """(name, kind, parameter) of the tensors of a unit's shard, as they lie in the file."""
    for kind in KINDS[:1] if frozen else KINDS:
        for parameter in unit.parameters:
            yield f"{kind}.{parameter.name}", kind, parameter


def _values(state: HostState, unit: Unit, kind: str, parameter: Parameter) -> np.ndarray:
    """Where a tensor of a shard lies in the state, flat."""
    array: np.ndarray = getattr(state.unit(unit), kind)
    return array[parameter.offset : parameter.offset + parameter.numel]


def _write_shard(file: IO[bytes], state: HostState, unit: Unit) -> dict[str, int]:
    """Writes a unit straight from the state, with no copy of it; returns bytes and CRC-32."""
    header, offset = {}, 0
    for name, _, parameter in _tensors(unit, unit.frozen):
        end = offset + 4 * parameter.numel
        header[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    crc = zlib.crc32(head)
    file.write(head)
    for _, kind, parameter in _tensors(unit, unit.frozen):
        for piece in _pieces(_values(state, unit, kind, parameter)):
            crc = zlib.crc32(piece, crc)
            file.write(piece)
    file.flush()
    return {"bytes": len(head) + offset, "crc32": crc}


def _pieces(values: np.ndarray) -> Iterator[memoryview]:
    memory = values.data.cast("B")
    for start in range(0, len(memory), PIECE):
        yield memory[start : start + PIECE]


def _publish(partial: Path, path: Path) -> None:
    """Gives a whole checkpoint its name, so that not even a power cut leaves part of one."""
    _fsync(partial)
    if path.exists():  # of a run that went on from an earlier step
        os.rename(path, path.with_name(f".{path.name}.old.partial"))
    os.rename(partial, path)
    _fsync(path.parent)
    remove_partial(path.parent)


def _prune(folder: Path, keep_last: int) -> None:
    for path in checkpoints(folder)[:-keep_last]:
        # Under another name first: what is half deleted is no checkpoint.
        os.rename(path, path.with_name(f".{path.name}.partial"))
    remove_partial(folder)


def remove_partial(folder: Path) -> None:
    """Takes away what saves that were killed have left."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json_crc(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# --- reading ----------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [(_time(path), path) for path in folder.glob("step-*") if (path / INDEX).is_file()]
    return [path for _, path in sorted(found)]


def _time(path: Path) -> int:
    try:
        return int(json.loads((path / INDEX).read_text())["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # a damaged one: whoever takes it by name is told so


def find(resume: str | Path, run_folder: str | None) -> Path:
    """The checkpoint that `resume` names: its own folder, a run folder (its last one), or `latest`: the
    last one of `run_folder`, or of all runs in `runs/` where the config names none."""
    if str(resume) == LATEST:
        folders = [Path(run_folder)] if run_folder else sorted(Path("runs").glob("*"))
        found = [path for folder in folders for path in checkpoints(folder / CHECKPOINTS)]
        if not found:
            raise ConfigError(
                f"resume='latest': no checkpoint in {run_folder or 'runs'}: give a checkpoint's folder, or "
                "start without resume"
            )
        return max(found, key=_time).absolute()
    path = Path(resume)
    if (path / INDEX).is_file():
        return path.absolute()
    found = checkpoints(path / CHECKPOINTS)
    if not found:
        raise ConfigError(
            f"resume={str(resume)!r}: no checkpoint there: give a folder step-<n> that holds {INDEX}, a run "
            "folder that holds some, or 'latest'"
        )
    return found[-1].absolute()


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a checkpoint; refuses one that is not as it was written."""
    try:
        content = json.loads((folder / INDEX).read_text())
        whole = content.pop("crc32") == _json_crc(content)
    except OSError as error:
        raise ConfigError(f"{folder / INDEX}: {error.strerror}: give a checkpoint's folder") from error
    except (ValueError, KeyError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise _damaged(folder / INDEX, "is not as it was written")
    if content["format"] != FORMAT:
        raise ConfigError(f"{folder}: format {content['format']}, this version reads {FORMAT}")
    return content


def check(folder: Path, units: tuple[Unit, ...], config: Config) -> Progress:
    """Where the checkpoint stands. Refuses, by index, sizes and headers alone, what cannot be resumed."""
    index = read_index(folder)
    names = [_shard_name(unit) for unit in units]
    for name in dict.fromkeys([*names, *(n for n in index["files"] if n.endswith(".safetensors"))]):
        if name not in names or name not in index["files"]:
            whose = "the model" if name in names else "the checkpoint"
            raise ConfigError(f"{folder}: only {whose} has {name}: the checkpoint is of another model")
    for unit in units:
        path = folder / _shard_name(unit)
        _check_size(path, index["files"][path.name]["bytes"])
        with open(path, "rb") as file:
            shapes = _read_shapes(file, path)
        wanted = {name: list(parameter.shape) for name, _, parameter in _tensors(unit)}
        for name in dict.fromkeys([*wanted, *shapes]):
            frozen = name not in shapes and not name.startswith("master")  # when it was saved
            if shapes.get(name) != wanted.get(name) and not frozen:
                problem = f"is {shapes.get(name, 'missing')}, the model needs {wanted.get(name)}"
                if name not in wanted:
                    problem = "has no place in the model"
                raise ConfigError(f"{path}: {name} {problem}: the checkpoint is of another model")
    for name in DATA_SETTINGS:
        saved: Any = index["config"]
        given: Any = config
        for part in name.split("."):
            saved, given = saved[part], getattr(given, part)
        if saved != given:
            raise ConfigError(
                f"{name}={given!r}: the checkpoint was written with {saved!r}, which decides what samples "
                f"come next: set {name}={saved!r}"
            )
    if index["step"] >= config.steps:
        raise ConfigError(
            f"steps={config.steps}: the checkpoint has done {index['step']} already: raise steps to go on"
        )
    return Progress(index["step"], index["updates"])


def check_samples(folder: Path, count: int) -> None:
    """Refuses data that are not those of the checkpoint."""
    saved = read_index(folder)["samples"]
    if saved != count:
        raise ConfigError(
            f"data.path: {count} samples, the checkpoint was written with {saved}: give the data of that run"
        )


def load(folder: Path, state: HostState) -> None:
    """Reads a checked checkpoint straight into the state, and verifies every byte of it.

    Moments of a unit that is frozen now are left out; those of one that was frozen then begin at zero.
    """
    files = read_index(folder)["files"]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda unit: _read_shard(folder, files, unit, state), state.units))
    state.refresh_working()


def verify(folder: Path) -> None:
    """Reads every byte of a checkpoint; refuses one that is not as it was written."""
    files = read_index(folder)["files"]

    def one(name: str) -> None:
        _check_size(folder / name, files[name]["bytes"])
        crc = 0
        with open(folder / name, "rb") as file:
            while piece := file.read(PIECE):
                crc = zlib.crc32(piece, crc)
        _check_crc(folder / name, crc, files[name]["crc32"])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, files))


def _read_shard(folder: Path, files: dict[str, Any], unit: Unit, state: HostState) -> None:
    path = folder / _shard_name(unit)
    with open(path, "rb") as file:
        shapes = _read_shapes(file, path)
        length = file.tell()
        file.seek(0)
        crc = zlib.crc32(file.read(length))
        for name, kind, parameter in _tensors(unit):
            if name not in shapes:
                continue
            for piece in _pieces(_values(state, unit, kind, parameter)):
                if unit.frozen and kind != "master":
                    piece = memoryview(bytearray(len(piece)))
                file.readinto(piece)
                crc = zlib.crc32(piece, crc)
    _check_crc(path, crc, files[path.name]["crc32"])


def _read_shapes(file: IO[bytes], path: Path) -> dict[str, Any]:
    """The shapes in a shard's header; leaves `file` at the first byte behind it."""
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > 2**27:
            raise ValueError("too long")
        return {name: tensor["shape"] for name, tensor in json.loads(file.read(length)).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "has no readable header") from error


def _check_size(path: Path, wanted: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != wanted:
        what = "is missing" if size is None else f"has {size:,} bytes and not {wanted:,}"
        raise _damaged(path, what)


def _check_crc(path: Path, crc: int, wanted: int) -> None:
    if crc != wanted:
        raise _damaged(path, f"has another CRC-32 than {INDEX} says")


def _damaged(path: Path, what: str) -> ConfigError:
    folder = next(parent for parent in path.parents if (parent / INDEX).exists())
    others = [p.name for p in checkpoints(folder.parent) if p.name != folder.name]
    remedy = f"take {others[-1]} beside it" if others else "no other checkpoint is beside it"
    return ConfigError(f"{path}: {what}: the checkpoint is damaged: {remedy}")


def export_checkpoint(source: Path, folder: str | Path, dtype: str = "bfloat16") -> Path:
    """Writes the model of a checkpoint as a Hugging Face folder, one group of tensors at a time."""
    verify(source)
    config = load_config(str(source / ASSETS))
    tokenizer = None
    if (source / ASSETS / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(source / ASSETS, trust_remote_code=False)
    weights = CheckpointWeights(source, units_of(skeleton(config)))
    return export(weights, config, folder, dtype=dtype, tokenizer=tokenizer)


class CheckpointWeights:
    """The master weights of a checkpoint, mapped from its shards: what an export needs."""

    def __init__(self, folder: Path, units: tuple[Unit, ...]) -> None:
        self.folder, self.units = folder, units

    def values(self, unit: Unit, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`."""
        with safe_open(self.folder / _shard_name(unit), framework="pt") as tensors:
            return tensors.get_tensor(f"master.{parameter.name}").to(dtype)
