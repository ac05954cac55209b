"""Every notebook is stored without outputs; the quickstart does what it says."""

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
    assert re.search(r"final: .*\n.*\n→  chosen", out)
    assert re.search(r"median_error\s+worst_error", out)


def _loss(folder: Path, length: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "".join(file.read_text(encoding="utf-8") for file in stdlib_files(200_000))
    ids = torch.tensor(tokenizer(text).input_ids[: 32 * length]).reshape(32, length)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)
