"""The same configs from a shell: `slidedp train CONFIG.toml`, `slidedp plan CONFIG.toml`."""

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from slidedp.checkpoint.export import export_checkpoint
from slidedp.checkpoint.folder import find
from slidedp.config import DTYPES, Checkpoint, Config
from slidedp.errors import ConfigError
from slidedp.layout import Layout
from slidedp.policy.explain import explain
from slidedp.policy.probe import probe
from slidedp.preflight import plan
from slidedp.session import Run, RunFailed, launch
from slidedp.steps import StepReader

INTERRUPTED, TERMINATED = 130, 143
"""What a shell expects of a command that Ctrl-C, or SIGTERM, has ended."""
EXAMPLE = """\
CONFIG.toml holds what slidedp.Config takes (python -c "import slidedp; help(slidedp.Config)"):

  model = "folder or hub id"
  sequence_length = 1024
  batch_size = 32
  steps = 1000
  layout = "auto"            # or a table [layout], as `slidedp tune` prints it

  [data]
  path = "texts/"
  eval_path = "held-out.jsonl"

  [optimizer]
  lr = 1e-5
  warmup_steps = 50
  lr_schedule = "cosine"

  [checkpoint]
  every_minutes = 30
"""
REPORT_EVERY = 30.0
"""Seconds between two progress lines where there is no terminal for a bar."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 (failed), 2 (refused), 130 or 143 (ended by Ctrl-C or
    SIGTERM)."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["bench"]:  # all that follows is its own, which a parser of ours would not leave alone
        from slidedp.bench.__main__ import main as bench  # the peers' imports are not for every command

        return bench(given[1:])
    options = _parser().parse_args(given)
    try:
        return options.command(options)
    except ConfigError as error:
        print(f"slidedp: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"slidedp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as ending:
        code = TERMINATED if isinstance(ending, Terminated) else INTERRUPTED
        print(f"slidedp: {_CAUSES[code]}", file=sys.stderr)
        return code


class Terminated(KeyboardInterrupt):
    """SIGTERM, which means what Ctrl-C means: a scheduler sends it a while before it kills."""


_CAUSES = {INTERRUPTED: "interrupted", TERMINATED: "ended by SIGTERM"}


@contextmanager
def _sigterm_interrupts() -> Iterator[list[int]]:
    """SIGTERM raises Terminated inside the block; yields the exit codes of those that came."""
    came: list[int] = []

    def terminate(number: int, frame: FrameType | None) -> None:
        came.append(TERMINATED)
        raise Terminated

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, previous)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slidedp", description="Full-parameter fine-tuning on one machine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="fine-tune; Ctrl-C or SIGTERM stops after the step",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", metavar="CONFIG.toml")
    train.add_argument(
        "--resume", metavar="CHECKPOINT", help="go on from a checkpoint, a run folder's last one, or 'latest'"
    )
    train.add_argument("--export", type=Path, metavar="FOLDER", help="write the trained Hugging Face model")
    train.set_defaults(command=_train)

    export = commands.add_parser("export", help="write a checkpoint's model as a Hugging Face folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT")
    export.add_argument("folder", metavar="FOLDER")
    export.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    export.set_defaults(command=_export)

    show = commands.add_parser("plan", help="print what a run would take, and whether it fits")
    show.add_argument("config", metavar="CONFIG.toml")
    show.set_defaults(command=_plan)

    measure = commands.add_parser("probe", help="measure this machine for a run, and print its rates")
    measure.add_argument("config", metavar="CONFIG.toml")
    measure.add_argument("--fresh", action="store_true", help="measure again what the cache holds")
    measure.set_defaults(command=_probe)

    tune = commands.add_parser("tune", help="find a run's fastest layout on random weights, and print it")
    tune.add_argument("config", metavar="CONFIG.toml")
    tune.set_defaults(command=_tune)

    commands.add_parser("bench", help="measure SlideDP beside its peers")

    notebook = commands.add_parser("notebook", help="execute a notebook and print its output")
    notebook.add_argument("path", type=Path, metavar="NOTEBOOK.ipynb")
    notebook.set_defaults(command=_notebook)
    return parser


def _plan(options: argparse.Namespace) -> int:
    preflight = plan(Config.from_toml(options.config))
    print(preflight)
    preflight.check()
    return 0


def _probe(options: argparse.Namespace) -> int:
    rates = probe(Config.from_toml(options.config), fresh=options.fresh)
    print(json.dumps(rates.to_dict(), indent=1))
    return 0


def _tune(options: argparse.Namespace) -> int:
    config = Config.from_toml(options.config)
    # As many steps as the trials take; nobody needs the weights, and no run may resume from them.
    config = dataclasses.replace(
        config,
        tune=True,
        random_weights=True,
        steps=1_000_000,
        run_folder=None,
        data=dataclasses.replace(config.data, eval_path=None, eval_fraction=0.0),
        checkpoint=Checkpoint(on_stop=False),
    )
    with launch(config) as run:
        print(f"run folder: {run.folder}", flush=True)
        assert run.tuner is not None
        shown, done = 0, False
        while not done:
            run.wait(0.2)
            policy = run.tuner.policy
            done = policy.done or not run.running
            for record in policy.records[shown:]:
                print(f"{record}\n", flush=True)
                shown += 1
        print(explain(policy.workload, policy.rates, policy.layout))
        print(_toml(policy.layout))
        run.stop()
        run.wait()
    return 0


def _toml(layout: Layout) -> str:
    """The layout as the table of a config file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in dataclasses.asdict(layout).items()]
    return "\n".join(["[layout]", *lines])


def _train(options: argparse.Namespace) -> int:
    config = Config.from_toml(options.config)
    if options.export is not None and options.export.exists():  # known now, not after hours of training
        raise ConfigError(f"--export {options.export}: already there: export to another folder")
    with _sigterm_interrupts() as terminated, launch(config, options.resume) as run:
        try:
            print(f"run folder: {run.folder}", flush=True)
            _show_progress(run)
        except KeyboardInterrupt:
            if run.stopping or not run.running:  # the second one, or one that came after the end
                raise
            run.stop()  # it did not meet wait(), which handles its own in this way
            run.wait()
        print(run)
        for event in run.log.events("checkpoint")[-1:]:
            print(f"checkpoint of step {event['step']}: {event['path'] or 'failed: ' + event['error']}")
        if options.export is not None:  # a stopped run too: its state is that of its last step
            print(f"exported: {run.export(options.export)}")
        if run.status != "stopped":
            return 0
        code = TERMINATED if terminated else INTERRUPTED
        print(f"slidedp: {_CAUSES[code]} after {run.log.steps_done} steps", file=sys.stderr)
        return code


def _export(options: argparse.Namespace) -> int:
    source = find(options.checkpoint, None)
    print(f"exported: {export_checkpoint(source, options.folder, options.dtype)}")
    return 0


def _show_progress(run: Run) -> None:
    """Until the run is over: a bar with loss, target tokens/s and ETA, or lines without a terminal."""
    reader, reported, first = StepReader(run.log), time.monotonic(), run.log.steps_done
    with tqdm(total=run.config.steps, initial=first, unit="step", disable=None) as bar:

        def advance() -> None:
            nonlocal reported
            steps = reader.new_steps()
            if not steps:
                return
            if bar.n == first:
                bar.unpause()  # the first step ends the start, which must not count in the ETA
            last = steps[-1]
            numbers = {"loss": f"{last.loss:.3f}", "tokens/s": f"{last.tokens_per_second:,.0f}"}
            if reader.evaluations:
                numbers["eval loss"] = f"{reader.evaluations[-1][1]:.3f}"
            bar.set_postfix(numbers, refresh=False)
            bar.update(last.step + 1 - bar.n)
            if bar.disable and time.monotonic() - reported > REPORT_EVERY:
                reported = time.monotonic()
                text = ", ".join(f"{name} {value}" for name, value in numbers.items())
                print(f"step {last.step + 1} of {run.config.steps}: {text}", flush=True)

        while run.running:
            run.wait(0.2)
            advance()
        advance()


def _notebook(options: argparse.Namespace) -> int:
    # Not at the top: ranks of a run import the modules of their launcher, and need no Jupyter.
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    from slidedp.notebook import run_notebook

    if not options.path.is_file():
        raise ConfigError(f"{options.path}: no such file: give a notebook")
    try:
        run_notebook(options.path)
    except (CellExecutionError, DeadKernelError) as error:
        print(f"slidedp: {options.path}: {error}", file=sys.stderr)
        return 1
    return 0
