"""What the source must not do: run what it reads. What a run opens is checked in tests/faults."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for room in ("slidedp", "widgets") for path in (ROOT / room).rglob("*.py"))
CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "joblib.load"}
"""Calls that may run what they are given; so may all of pickle."""
ALLOWED = {
    ("slidedp/processes.py", "pickle.loads"),  # what the launcher has put into its own memory
}


def calls(path):
    """(dotted name, keywords) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path):
    name = str(path.relative_to(ROOT))
    for function, keywords in calls(path):
        if function in CODE or function in ("pickle.load", "pickle.loads", "pickle.Unpickler"):
            assert (name, function) in ALLOWED, function
        assert keywords.get("trust_remote_code", "False") == "False"
        assert keywords.get("shell", "False") == "False"
        assert keywords.get("allow_pickle", "False") == "False"
        if function in ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained"):
            # Else transformers asks whoever sits at the terminal, and waits.
            assert keywords.get("trust_remote_code") == "False", name
        if function == "np.load":
            assert keywords["allow_pickle"] == "False"
