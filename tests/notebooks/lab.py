"""A real JupyterLab in a real browser."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")
SIZE = {"width": 1500, "height": 1400}


@contextmanager
def lab(folder: Path) -> Iterator[str]:
    """JupyterLab over `folder`; gives the address to open. Ends the server, and with it its kernels."""
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={_free_port()}",
        "--IdentityProvider.token=test", "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.root_dir={folder}",
    ]  # fmt: skip
    _quiet_settings(folder / ".settings")
    log = folder / ".lab.log"
    with open(log, "w") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(folder / ".settings")},
        )
        try:
            found = until(
                lambda: re.search(r"(http://localhost:\d+/lab)\?token", log.read_text()), "a server"
            )
            yield found[1] + "?token=test"
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _quiet_settings(folder: Path) -> None:
    """No question about news, which would lie over the page."""
    path = folder / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))


def until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


class Notebook:
    """A notebook that is open in the browser."""

    def __init__(self, page: Page, address: str, name: str) -> None:
        self.page = page
        self.received: list[int] = []
        """Bytes of every message from the server."""
        page.on(
            "websocket", lambda socket: socket.on("framereceived", lambda m: self.received.append(len(m)))
        )
        base, query = address.split("?")
        page.goto(f"{base}/workspaces/{Path(name).stem}/tree/{name}?{query}")  # with no other tab
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status == 'idle'",
            timeout=90_000,
        )
        page.locator(".jp-Notebook .jp-Cell").first.wait_for()  # until then it is not laid out

    def run(self, cell: int, wait: bool = True) -> None:
        """Runs a cell; `wait` until it is done, and fails with what it raised."""
        self.page.evaluate(
            """([cell, wait]) => {
                const content = window.jupyterapp.shell.currentWidget.content;
                content.activeCellIndex = cell;
                content.deselectAll();
                const done = window.jupyterapp.commands.execute('notebook:run-cell');
                return wait ? done.then(() => null) : null;
            }""",
            [cell, wait],
        )
        if wait:
            assert self.error(cell) is None, self.error(cell)

    def error(self, cell: int) -> str | None:
        """The traceback of a cell that failed."""
        outputs = self._outputs(cell)
        failed = [o for o in outputs if o["output_type"] == "error"]
        return "\n".join(failed[0]["traceback"]) if failed else None

    def _outputs(self, cell: int) -> list[dict[str, Any]]:
        return self.page.evaluate(
            """cell => window.jupyterapp.shell.currentWidget.content.widgets[cell].model.outputs.toJSON()""",
            cell,
        )

    def text(self, cell: int) -> str:
        """What a cell printed."""
        return "".join("".join(o["text"]) for o in self._outputs(cell) if o["output_type"] == "stream")

    def cell(self, cell: int) -> Any:
        """A cell's element, in view."""
        element = self.page.locator(".jp-Notebook .jp-Cell").nth(cell)
        element.scroll_into_view_if_needed()
        return element

    def code_cells(self) -> list[int]:
        """Indices of the cells with code."""
        return self.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .map((cell, i) => cell.model.type === 'code' ? i : -1).filter(i => i >= 0)"""
        )

    def has_output(self, cell: int) -> bool:
        return bool(self._outputs(cell))

    def ask(self, expression: str) -> str:
        """The repr of an expression in the kernel, once it has run what it was told before."""
        answer = self.page.evaluate(
            """expression => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const request = { code: "", user_expressions: { it: expression }, store_history: false };
                return kernel.requestExecute(request).done.then(reply => reply.content.user_expressions.it);
            }""",
            expression,
        )
        assert answer["status"] == "ok", answer
        return answer["data"]["text/plain"]

    def command(self, name: str) -> None:
        """One of JupyterLab's own commands."""
        self.page.evaluate("name => window.jupyterapp.commands.execute(name).then(() => null)", name)

    def restart(self) -> None:
        """Restarts the kernel without the question whether to."""
        self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )

    def close_and_shut_down(self) -> None:
        """Closes the tab as its menu's *Close and Shut Down Notebook* does."""
        self.page.evaluate(
            """() => {
                const panel = window.jupyterapp.shell.currentWidget;
                return panel.sessionContext.shutdown().then(() => { panel.dispose(); });
            }"""
        )


@contextmanager
def browser(address: str, name: str) -> Iterator[Notebook]:
    """A notebook of JupyterLab in Chromium."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        try:
            page = chromium.new_page(viewport=SIZE)
            page.set_default_timeout(90_000)
            yield Notebook(page, address, name)
        finally:
            chromium.close()


def write_notebook(path: Path, cells: list[str]) -> None:
    """A notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
