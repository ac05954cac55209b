"""Controls that answer while a cell awaits a run."""

from typing import Any

from ipykernel.kernelbase import Kernel
from IPython.core.getipython import get_ipython


def tell_when_done() -> None:
    """Makes this process's kernel, if it is one, say when it has handled a message beside a cell.

    ipykernel 7.4 handles a widget's message while a cell awaits, but tells the browser nothing of it. There
    ipywidgets keeps a model's next change until it hears that the kernel is done with the last, so that
    every control would work once and then not again before the cell ends.
    """
    kernel: Kernel | None = getattr(get_ipython(), "kernel", None)
    if kernel is None or "dispatch_shell" in vars(kernel):
        return
    dispatch = kernel.dispatch_shell

    async def dispatch_and_tell(
        message: Any, /, subshell_id: str | None = None, *, concurrent: bool = False
    ) -> None:
        cell = kernel.get_parent("shell")
        await dispatch(message, subshell_id=subshell_id, concurrent=concurrent)
        if concurrent:
            kernel._publish_status("idle", "shell")  # of the message, which is the parent now
            kernel._publish_status("busy", "shell", cell)

    kernel.dispatch_shell = dispatch_and_tell  # type: ignore[method-assign]
