"""What `launch` checks and prepares before any process starts: tokenizer, run folder, training state."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from slidedp.checkpoint import resume as resuming
from slidedp.checkpoint.folder import ASSETS, CHECKPOINTS, checkpoints, set_aside
from slidedp.config import Config
from slidedp.data.prepare import check_samples, is_prepared, prepare, prepare_held_out, sources
from slidedp.data.samples import Samples
from slidedp.errors import ConfigError, reason
from slidedp.events import RUN, say
from slidedp.hold import Hold
from slidedp.host.state import HostState
from slidedp.model.load import fill_random, load_pretrained
from slidedp.model.save import write_assets
from slidedp.preflight import Plan
from slidedp.telemetry import RunLog

SAMPLES, HELD_OUT = "samples", "held-out"
"""Folders of the run folder that hold the samples made from `data.path` and `data.eval_path`."""
PREPARING = "preparing"
"""The one that they are made in."""


class Material(NamedTuple):
    """What a run learns from."""

    tokenizer: Any
    samples: Samples
    contents: dict[str, int]
    """What tells the samples from others; see `check_samples`."""
    held_out: Samples | None
    """Of `data.eval_path`."""


def run_folder(config: Config) -> Path:
    """Where the run will write, which may not exist."""
    return Path(config.run_folder or Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")).absolute()


def check_run_folder(folder: Path, config: Config, source: Path | None) -> None:
    """Refuses a folder that holds another run than the one that goes on from its checkpoint `source`."""
    if not (folder / RUN).exists():
        return
    if source is None or source.parent.resolve() != (folder / CHECKPOINTS).resolve():
        remedy = "give another folder"
        if source is None and checkpoints(folder / CHECKPOINTS):
            remedy += ", or resume='latest' to go on with it"
        raise ConfigError(f"run_folder={config.run_folder!r}: holds a run already: {remedy}")
    ranks = RunLog.read(folder).description["ranks"]
    if ranks != config.ranks:
        raise ConfigError(
            f"run_folder={config.run_folder!r}: holds the metrics of {ranks} rank(s), this run has "
            f"{config.ranks}: give another run_folder, or set ranks={ranks}"
        )


def prepare_data(preflight: Plan, source: Path | None, folder: Path, tokenizer: Any) -> Material:
    """Prepares and checks the data. What the run folder has of a run that is resumed from `source` is
    replaced only when none of it can be refused any more."""
    config, vocabulary = preflight.config, preflight.model.vocab_size
    making = folder / PREPARING
    shutil.rmtree(making, ignore_errors=True)  # of a launch that was killed
    samples = prepare(config.data, tokenizer, config.sequence_length, making / SAMPLES)
    contents = check_samples(
        samples,
        config.batch_size,
        vocabulary,
        f"data.path={config.data.path!r}",
        config.data.eval_fraction,
    )
    if source is not None:
        resuming.check_samples(source, contents)
    held_out = prepare_held_out(config, tokenizer, vocabulary, making / HELD_OUT)
    if making.exists():
        for made in making.iterdir():
            shutil.rmtree(folder / made.name, ignore_errors=True)
            made.rename(folder / made.name)
        making.rmdir()
    return Material(
        tokenizer, _in(folder, samples), contents, None if held_out is None else _in(folder, held_out)
    )


def _in(folder: Path, samples: Samples) -> Samples:
    """The samples where they are once they are made."""
    made_here = samples.folder.parent == folder / PREPARING
    return Samples(folder / samples.folder.name) if made_here else samples


def load_tokenizer(config: Config) -> Any:
    """The data's tokenizer, else the model folder's own; None where prepared samples need none."""
    name = config.data.tokenizer or (config.model if isinstance(config.model, str) else None)
    problem = "none is given"
    if name is not None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # a dozen kinds, not all of them ValueErrors
            problem = reason(error)
        else:
            # From a folder without its files, transformers makes one that knows no word.
            ids = tokenizer("text", add_special_tokens=False).input_ids
            if any(i != tokenizer.unk_token_id for i in ids):
                return tokenizer
            problem = "no tokenizer is there"
    if config.data.tokenizer is None and all(is_prepared(data) for data in sources(config.data)):
        return None
    where = f"data.tokenizer={config.data.tokenizer!r}" + (
        f", model={name!r}" if name != config.data.tokenizer else ""
    )
    raise ConfigError(f"{where}: {problem}: give a folder or hub id that has one")


@contextlib.contextmanager
def no_file_for_the_world() -> Iterator[None]:
    """What is made inside is not writable for every user of the machine, whatever the umask."""
    umask = os.umask(0o077)
    os.umask(umask | 0o002)
    try:
        yield
    finally:
        os.umask(umask)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Hold]:
    """Makes the run folder and holds it. A launch that fails removes what it has written there, and the
    folder if new, and lets go of it; else that is for the run to do."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]

    def remove_new() -> None:
        with contextlib.suppress(OSError):  # never made, or another run uses it by now
            for path in new:
                path.rmdir()

    try:
        folder.mkdir(parents=True, exist_ok=True)
        hold = Hold(folder)
    except OSError as error:
        remove_new()
        raise ConfigError(
            f"run_folder={str(folder)!r}: {error.strerror}: give another folder that can be written"
        ) from error
    before = set(folder.iterdir())
    try:
        yield hold
    except BaseException:
        for path in set(folder.iterdir()) - before if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        remove_new()
        hold.close()
        raise


def open_log(folder: Path, description: dict[str, Any], preflight: Plan, tokenizer: Any, step: int) -> RunLog:
    """Writes what a run folder holds besides its checkpoints, and opens its log: a new one, or that of the
    run which is resumed at `step`."""
    try:
        write_assets(preflight.model, "bfloat16", tokenizer, folder / ASSETS)
        if not (folder / RUN).exists():
            return RunLog.create(folder, description)
        log = RunLog.resume(folder, description, step)
        aside = set_aside(folder / CHECKPOINTS, step)
    except OSError as error:
        raise ConfigError(
            f"run_folder={str(folder)!r}: {reason(error)}: make room there, or give another folder"
        ) from error
    if aside is not None:
        say(f"the run goes on from step {step}; its checkpoints of later steps are in {aside} now")
    log.add({"kind": "plan", "memory": preflight.memory()})  # whatever layouts it had before
    return log


def fill_state(state: HostState, preflight: Plan, source: Path | None) -> None:
    """What the run starts with: the checkpoint `source`, or the model's or random weights."""
    config = preflight.config
    state.touch()
    if source is not None:
        resuming.load(source, state)
    elif isinstance(config.model, str) and not config.random_weights:
        load_pretrained(state, config.model)
    else:
        fill_random(state, preflight.model, config.seed)
