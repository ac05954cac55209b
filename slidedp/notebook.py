"""Executes a notebook without a browser; what its cells print appears as it comes."""

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

WIDGET = "application/vnd.jupyter.widget-view+json"


class PrintingClient(NotebookClient):
    """Prints text output at once. Figures and widgets, which have no useful text form, are left out."""

    def output(self, outs: list[Any], msg: dict[str, Any], display_id: str | None, cell_index: int) -> Any:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            stream = sys.stderr if content["name"] == "stderr" else sys.stdout
            print(content["text"], end="", file=stream, flush=True)
        elif msg["msg_type"] in ("display_data", "execute_result"):
            data = content["data"]
            if WIDGET not in data and "text/plain" in data:
                print(data["text/plain"], flush=True)
        return super().output(outs, msg, display_id, cell_index)


def run_notebook(path: str | Path) -> None:
    """Executes `path` in its folder and discards the outputs. The first cell that fails ends it with
    nbclient's CellExecutionError, which holds the cell's traceback."""
    path = Path(path)
    notebook = nbformat.read(path, as_version=4)
    client = PrintingClient(
        notebook,
        timeout=None,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # else it warns that local TCP is not encrypted
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        on_cell_execute=_Announcement(len(notebook.cells)),
    )
    try:
        asyncio.run(_execute(client))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _execute(client: NotebookClient) -> None:
    """Cancels itself when interrupted: nbclient's own handler ends the kernel and then trips over its
    absence."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    client.on_notebook_start = lambda notebook: loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await client.async_execute()
    except DeadKernelError:  # which is also what nbclient makes of a cancellation
        if task.cancelling():
            raise asyncio.CancelledError from None
        raise


class _Announcement:
    """Says which cell comes, and when."""

    def __init__(self, count: int) -> None:
        self._count, self._begun = count, time.monotonic()

    def __call__(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            where = f"cell {cell_index + 1} of {self._count}, {time.monotonic() - self._begun:.0f} s"
            print(f"--- {where}: {cell.source.strip().splitlines()[0]}", flush=True)
