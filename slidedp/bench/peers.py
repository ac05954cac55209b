"""How a peer is run: its ranks in processes of their own, their results one by one."""

from collections.abc import Callable, Iterator
from typing import Any

from slidedp.host.start import import_ahead, start


def results_of(rank: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> Iterator[dict[str, Any]]:
    """Calls `rank(index, *arguments, results)` in `ranks` processes and yields what they send to the
    connection `results`. Raises what a rank raises; ends them all if nobody listens any more."""
    receiver, sender = import_ahead().Pipe(duplex=False)
    processes = start(rank, (*arguments, sender), ranks)
    sender.close()
    try:
        while True:
            try:
                yield receiver.recv()
            except EOFError:
                break
        while not processes.join():
            pass
    finally:
        for process in processes.processes:
            if process.exitcode is None:
                process.kill()
