"""Every notebook is stored without outputs, runs top to bottom, and does what it says.

`make test` runs the quickstart, the step-time model, the policy, the profiler and the peers; those that
train for longest to show one thing are marked slow, as is the real pretrained model.
"""

import json
import math
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slidedp import open_run
from slidedp.data.stdlib import stdlib_files
from slidedp.notebook import run_notebook
from slidedp.policy.records import load_records
from tests import smollm2
from tests.bench.test_results import FILE

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and not any(cell.outputs or cell.execution_count for cell in code)
    assert "widgets" not in notebook.metadata


@pytest.mark.timeout(600)  # a minute and a half on two idle cores
def test_quickstart(tmp_path, capfd):
    (path,) = (p for p in NOTEBOOKS if p.name == "quickstart.ipynb")
    shutil.copy(path, tmp_path)
    run_notebook(tmp_path / path.name)
    out = capfd.readouterr().out
    folder = Path(re.search(r"run folder: (.+)", out)[1])
    assert folder.is_relative_to(tmp_path)
    assert re.search(r"loss \d+\.\d\d → \d+\.\d\d, [\d,]+ tokens/s", out)

    log = open_run(folder)
    metrics, length = log.metrics(), log.description["config"]["sequence_length"]
    vocabulary = AutoTokenizer.from_pretrained(folder / "model").vocab_size
    assert metrics.loss.iloc[0] == pytest.approx(math.log(vocabulary), rel=0.05)
    assert metrics.loss.iloc[-1] < metrics.loss.iloc[0] - 1.5
    # The exported model is the trained one: transformers finds about the loss of the last steps.
    assert _loss(folder / "model", length) == pytest.approx(metrics.loss.iloc[-10:].mean(), abs=0.5)


@pytest.mark.timeout(600)
def test_step_time_model(capfd):
    (path,) = (p for p in NOTEBOOKS if p.name == "step_time_model.ipynb")
    run_notebook(path)
    out = capfd.readouterr().out
    assert "the optimizer worker decides it" in out
    assert re.search(r"final: .*\n.*\n→ 0  chosen", out)
    assert re.search(r"median_error\s+worst_error", out)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """All notebooks in a folder of their own, so that they share its text and tokenizer."""
    folder = tmp_path_factory.mktemp("copies") / "notebooks"
    shutil.copytree(NOTEBOOKS[0].parent, folder, ignore=shutil.ignore_patterns("runs", ".*"))
    return folder


@pytest.mark.timeout(600)
def test_autopolicy(copies, capfd):
    run_notebook(copies / "autopolicy.ipynb")
    out = capfd.readouterr().out
    assert "(overridden by the user)" in out
    records = load_records(copies / "policy.json")
    assert records[-1].stage == "final" and [r.overridden for r in records].count(True) == 1
    assert records[-1].choice.layout["gpu_updates"] == 0
    own, overruled = map(float, re.search(r"seconds per step +([\d.]+) +([\d.]+)", out).groups())
    assert own <= overruled == pytest.approx(records[-1].choice.predicted_seconds, abs=1e-5)


@pytest.mark.timeout(600)
def test_peers(copies, capfd):
    """With results; without any, the table is empty and the first cell says so (see tests/bench)."""
    (copies.parent / "docs" / "results").mkdir(parents=True)
    (copies.parent / "docs" / "results" / "8b.json").write_text(json.dumps(FILE))
    run_notebook(copies / "peers.ipynb")
    out = capfd.readouterr().out
    assert "3 measurements from 1 file(s), on NVIDIA H200" in out
    assert "Qwen3-8B" in out and "out of memory" in out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peers_without_results(tmp_path, capfd):
    shutil.copy(NOTEBOOKS[0].parent / "peers.ipynb", tmp_path)
    run_notebook(tmp_path / "peers.ipynb")
    assert "No results: " in capfd.readouterr().out


@pytest.mark.timeout(600)
def test_profiling(copies, capfd):
    run_notebook(copies / "profiling.ipynb")
    out = capfd.readouterr().out
    assert re.search(r"deliver +deliver", out) and "aten::mm" in out
    files = re.findall(r"rank \d: [\d.]+ MiB, (.+)", out)
    assert len(files) == int(open_run(Path(files[0]).parents[1]).description["ranks"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_routes_and_chunks(copies, capfd):
    run_notebook(copies / "routes_and_chunks.ipynb")
    out = capfd.readouterr().out
    run = open_run(re.search(r"Run\(.*, (/.+)\)", out)[1])
    switches = [e["layout"] for e in run.events("layout") if e["rank"] == 0]
    routes = {(layout["delivery"], layout["reduction"]) for layout in switches}
    assert len(routes) == 5 and len({layout["chunk_bytes"] for layout in switches}) == 4
    assert run.metrics()["loss"].iloc[-5:].mean() < run.metrics()["loss"].iloc[0] - 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_elastic_checkpointing(copies, capfd):
    run_notebook(copies / "elastic_checkpointing.ipynb")
    out = capfd.readouterr().out
    rows = re.findall(r"^(keep all|recompute all|offload all) +[\d.]+ +[\d.]+ +([\d.]+)", out, re.MULTILINE)
    planned = {name: float(gib) for name, gib in rows}
    assert (
        planned["keep all"] > planned["recompute all"] >= planned["offload all"] or torch.cuda.is_available()
    )
    assert "budget, GiB" in out


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["stand-in", pytest.param("smollm2", marks=pytest.mark.pretrained)])
def test_pretrained(copies, capfd, model):
    path = copies / "pretrained.ipynb"
    if model == "smollm2":
        path = copies / "smollm2.ipynb"
        text = (copies / "pretrained.ipynb").read_text()
        assert text.count('"model = None"') == 1
        path.write_text(text.replace('"model = None"', json.dumps(f"model = {str(smollm2.folder())!r}")))
    run_notebook(path)
    out = capfd.readouterr().out
    before, after = map(float, re.search(r"held-out perplexity ([\d.]+) → ([\d.]+);", out).groups())
    assert after < before and (before < 100) == (model == "smollm2")
    assert "model.safetensors" in out and "tokenizer.json" in out


def _loss(folder: Path, length: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "".join(file.read_text(encoding="utf-8") for file in stdlib_files(200_000))
    ids = torch.tensor(tokenizer(text).input_ids[: 32 * length]).reshape(32, length)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)
