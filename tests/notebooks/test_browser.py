"""What a user does in JupyterLab, in a real browser: screenshots lie in $SLIDEDP_SCREENSHOTS if set.

A small model stands for the quickstart's, so that the whole visit takes about a minute; the quickstart
itself is marked slow.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the playwright package")
from tests.launching import alive, children, small_config, until
from tests.notebooks.lab import CHROMIUM, Notebook, browser, lab, write_notebook

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (Debian: apt install chromium)"),
    pytest.mark.timeout(600),
]
QUICKSTART = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"
CELLS = [
    """
import slidedp
from slidedp.policy.auto import AutoPolicy
from slidedp.policy.machines import H200
from slidedp.policy.workload import workload_of
from slidedp.widgets import Dashboard, LayoutEditor, PolicyStepper, TraceView
config = slidedp.Config.from_toml("config.toml")
rates = H200.rates(workload_of(slidedp.plan(config)))
""",
    "policy = AutoPolicy(config, rates)\nstepper = PolicyStepper(policy)\nstepper",
    "editor = LayoutEditor(config, rates)\neditor",
    "run = slidedp.launch(editor.config())\ndashboard = Dashboard(run)\ndashboard",
    "await run",
    "live = LayoutEditor(run, rates)\nlive",
    "view = TraceView(run, live.prediction.timeline)\nview",
]
SETUP, STEPPER, EDITOR, DASHBOARD, AWAIT, LIVE, TRACE = range(len(CELLS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a notebook, and a config of two CPU ranks that would train for hours."""
    folder = tmp_path_factory.mktemp("lab")
    config = small_config(folder)
    (folder / "config.toml").write_text(
        f"""
model = "{config.model}"
ranks = 2
device = "cpu"
steps = {config.steps}
batch_size = {config.batch_size}
sequence_length = {config.sequence_length}
[data]
path = "{config.data.path}"
"""
    )
    write_notebook(folder / "visit.ipynb", CELLS)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with lab(folder) as address:
        yield address


@pytest.fixture
def notebook(address):
    with browser(address, "visit.ipynb") as notebook:
        yield notebook
        notebook.command("kernelmenu:shutdown")


def shoot(notebook: Notebook, cell: int, name: str) -> None:
    """Saves a picture of a cell's output, where someone wants to see it."""
    target = os.environ.get("SLIDEDP_SCREENSHOTS")
    if target:
        Path(target).mkdir(parents=True, exist_ok=True)
        notebook.cell(cell).locator(".jp-Cell-outputWrapper").screenshot(path=f"{target}/{name}.png")


def pids(notebook: Notebook) -> list[int]:
    """The processes of the run."""
    return [int(pid) for pid in notebook.ask("[p.pid for p in run._processes]").strip("[]").split(",")]


def steps(notebook: Notebook) -> int:
    """The number of steps on the dashboard."""
    text = notebook.cell(DASHBOARD).locator(".widget-html-content").first.inner_text()
    return int(text.split("step ")[1].split(" ")[0]) if "step " in text else 0


def test_a_visit(notebook):
    page = notebook.page
    notebook.run(SETUP)

    # Step through the policy: forward, back, overrule, forward again.
    notebook.run(STEPPER)
    cell = notebook.cell(STEPPER)
    cell.get_by_text("decision 1 of 1 so far").wait_for()
    shoot(notebook, STEPPER, "stepper")
    cell.get_by_role("button", name="Next").click()
    cell.get_by_text("decision 2 of 2 so far").wait_for()
    cell.get_by_role("button", name="Previous").click()
    cell.get_by_text("decision 1 of 2 so far").wait_for()
    cell.get_by_role("button", name="Overrule").click()
    cell.get_by_text("overruled by you").wait_for()
    assert notebook.ask("policy.records[0].overridden") == "True"

    # Choose a layout by hand: a dropdown, and layers painted on the strip.
    notebook.run(EDITOR)
    cell = notebook.cell(EDITOR)
    cell.get_by_text("Predicted step").wait_for()
    cell.locator("select").first.select_option("replicated")
    cell.locator(".brush-offload").click()
    first, third = (cell.locator(f"[data-layer='{i}']").bounding_box() for i in (0, 2))
    page.mouse.move(first["x"] + 5, first["y"] + 5)
    page.mouse.down()
    page.mouse.move(third["x"] + 5, third["y"] + 5, steps=8)
    page.mouse.up()
    expected = "('replicated', ('offload', 'offload', 'offload', 'recompute', 'recompute'))"
    until(lambda: notebook.ask("(editor.layout.delivery, editor.layout.activations)") == expected, expected)
    shoot(notebook, EDITOR, "editor")

    # Train: the dashboard moves by itself.
    notebook.run(DASHBOARD)
    until(lambda: steps(notebook) > 5, "steps on the dashboard")
    seen = steps(notebook)
    until(lambda: steps(notebook) > seen, "more steps on the dashboard")
    until(lambda: int(notebook.ask("dashboard._view.drawn")) > 2, "answers of the browser")
    processes = pids(notebook)
    assert len(processes) == 3 and all(alive(pid) for pid in processes)

    # Switch the live run from a widget, and see it marked.
    notebook.run(LIVE)
    live = notebook.cell(LIVE)
    live.locator("select").first.select_option("broadcast")
    live.get_by_role("button", name="Apply to the run").click()
    notebook.cell(DASHBOARD).get_by_text("delivery broadcast").wait_for()

    # Record two steps, and open the trace.
    notebook.run(TRACE)
    trace = notebook.cell(TRACE)
    trace.get_by_role("button", name="Record 2 steps").click()
    until(lambda: int(notebook.ask("len(run.log.events('trace'))")) == 2, "two traces")
    trace.get_by_role("button", name="Refresh").click()
    trace.get_by_text("rank 1 compute").wait_for()
    shoot(notebook, TRACE, "trace")
    trace.get_by_role("button", name="operators").click()
    trace.get_by_text("aten::mm").first.wait_for()
    shoot(notebook, DASHBOARD, "dashboard")

    # Stop, and nothing is left.
    notebook.cell(DASHBOARD).get_by_role("button", name="Stop").click()
    notebook.cell(DASHBOARD).get_by_text("stopped ·").wait_for()
    until(lambda: not any(alive(pid) for pid in processes), "the end of every process")
    assert [notebook.text(cell) for cell in notebook.code_cells()] == [""] * len(CELLS)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["restart", "close the tab and shut down"])
def test_nothing_is_left_of_a_run_whose_kernel_ends(notebook, ending):
    notebook.run(SETUP)
    notebook.run(EDITOR)
    notebook.run(DASHBOARD)
    processes = pids(notebook)
    assert all(alive(pid) for pid in processes)
    if ending == "restart":
        notebook.restart()
    else:
        notebook.close_and_shut_down()
    until(lambda: not any(alive(pid) for pid in processes), "the end of every process")


@pytest.mark.slow
def test_controls_answer_while_a_cell_awaits_the_run(notebook):
    notebook.run(SETUP)
    notebook.run(EDITOR)
    notebook.run(DASHBOARD)
    notebook.run(LIVE)
    notebook.run(AWAIT, wait=False)
    seen = steps(notebook)
    until(lambda: steps(notebook) > seen, "steps on the dashboard")
    live, dashboard = notebook.cell(LIVE), notebook.cell(DASHBOARD)
    for delivery in ("broadcast", "replicated"):
        live.locator("select").first.select_option(delivery)
        live.get_by_role("button", name="Apply to the run").click()
        dashboard.get_by_text(f"delivery {delivery}").wait_for()
    dashboard.get_by_role("button", name="Stop").click()
    assert notebook.ask("run.status") == "'stopped'"


@pytest.mark.slow
def test_interrupting_a_cell_stops_the_run(notebook):
    notebook.run(SETUP)
    notebook.run(EDITOR)
    notebook.run(DASHBOARD)
    processes = pids(notebook)
    notebook.run(AWAIT, wait=False)
    until(lambda: steps(notebook) > 2, "steps on the dashboard")
    notebook.command("notebook:interrupt-kernel")
    until(lambda: not any(alive(pid) for pid in processes), "the end of every process")
    until(lambda: notebook.error(AWAIT), "the cell's end")
    until(lambda: notebook.ask("run.status") == "'stopped'", "a stopped run")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart(tmp_path):
    shutil.copy(QUICKSTART, tmp_path)
    before = children()
    with lab(tmp_path) as address, browser(address, QUICKSTART.name) as notebook:
        for cell in notebook.code_cells():
            notebook.run(cell)
            name = f"quickstart-{cell:02}"
            if notebook.has_output(cell):
                shoot(notebook, cell, name)
        assert "run folder:" in notebook.text(cell)
    until(lambda: children() <= before, "the end of the server")


FIGURE = [
    """
import plotly.graph_objects as go
from slidedp.widgets.figure_view import FigureView
figure = go.Figure(go.Bar(x=[8], y=["first row"], orientation="h"), {"height": 300})
view = FigureView()
view.show(figure)
view
""",
    "view",
    "figure.add_bar(x=[4], y=['second row'], orientation='h')\nview.show(figure)",
]


SLOW_MODULES = """() => {
    const pause = "await new Promise(done => setTimeout(done, 4000));";
    window.Blob = class extends window.Blob {
        constructor(parts, options) {
            super(parts?.[0]?.length > 1e6 ? [pause, ...parts] : parts, options);
        }
    };
}"""
"""Makes large modules take 4 s to load: anywidget gives up on a widget after 2."""


@pytest.fixture
def figures(folder, address):
    write_notebook(folder / "figures.ipynb", FIGURE)
    with browser(address, "figures.ipynb") as notebook:
        yield notebook
        notebook.command("kernelmenu:shutdown")


def test_figures_in_a_browser_that_takes_seconds_to_load_plotly(figures):
    figures.page.evaluate(SLOW_MODULES)
    first, second, change = figures.code_cells()
    figures.run(first)
    plot = figures.cell(first).locator(".js-plotly-plot")
    plot.get_by_text("first row").wait_for()
    figures.run(second)  # the same view again
    figures.cell(second).get_by_text("first row").wait_for()

    # A zoom reaches the kernel, and stays when the figure changes.
    plot.scroll_into_view_if_needed()
    area = plot.locator(".nsewdrag").bounding_box()
    middle = area["y"] + area["height"] / 2
    figures.page.mouse.move(area["x"] + 10, middle)
    figures.page.mouse.down()
    figures.page.mouse.move(area["x"] + area["width"] / 2, middle, steps=4)
    figures.page.mouse.up()
    until(lambda: figures.ask("bool(view.x_range)") == "True", "the zoom")
    zoomed = figures.ask("view.x_range")
    figures.run(change)
    for cell in (first, second):
        figures.cell(cell).get_by_text("second row").wait_for()
    assert plot.evaluate("figure => figure.layout.xaxis.range") == pytest.approx(json.loads(zoomed))
    assert sum(size > 1e6 for size in figures.received) == 1  # plotly, once
