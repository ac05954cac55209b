"""How a peer is run: its ranks in processes of their own, their results one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch.multiprocessing as mp


def results_of(rank: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> Iterator[dict[str, Any]]:
    """Calls `rank(index, *arguments, results)` in `ranks` processes and yields what they send to the
    connection `results`. Raises what a rank raises; ends them all if nobody listens any more."""
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    processes = mp.start_processes(rank, (*arguments, sender), ranks, join=False, start_method="spawn")
    assert processes is not None
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
