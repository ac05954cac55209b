"""Hub ids of models, tokenizers and data sets, from a hub that this test serves itself."""

import json
import os
import subprocess
import sys

import pytest

from slidedp.data.stdlib import stdlib_files, train_tokenizer
from tests.data.hub import serving
from tests.pool import small_model

SCRIPT = """
import json, sys
from slidedp import Config, ConfigError, Data
from slidedp.data.sources import open_source
from slidedp.launching import load_tokenizer
from slidedp.model.load import check_pretrained, load_pretrained
from slidedp.host.state import HostState
from slidedp.preflight import plan

import torch

config = Config(
    model="someone/model", data=Data(path="someone/texts"), sequence_length=16, device="cpu", ranks=1
)
planned = plan(config)
check_pretrained(planned.units, config.model)
state = HostState(planned.units, torch.float32)
load_pretrained(state, config.model)
found = {"norm": state.values(planned.units[-1], planned.units[-1].parameters[-1], torch.float32).tolist()}
state.close()
found["ids"] = load_tokenizer(config).encode("import os")
for split in ("train", "validation"):
    data = Data(path="someone/texts", split=split)
    found[split] = [document.text for document, _ in open_source(data).documents]
found["refused"] = []
for data in (Data(path="someone/texts", split="test"), Data(path="someone/other")):
    try:
        list(open_source(data).documents)
    except ConfigError as error:
        found["refused"].append(str(error))
print(json.dumps(found))
"""


def test_hub_ids_are_fetched_and_streamed(tmp_path):
    pytest.importorskip("datasets")
    model, texts = tmp_path / "model", tmp_path / "texts"
    small_model(model)
    tokenizer = train_tokenizer(stdlib_files(50_000), 300)
    tokenizer.save_pretrained(model)
    texts.mkdir()
    rows = {"train": ["one", "two", "three"], "validation": ["four"]}
    for split, wanted in rows.items():
        (texts / f"{split}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in wanted))
    with serving({"models/someone/model": model, "datasets/someone/texts": texts}) as address:
        environment = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=os.environ | environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["norm"]) == 20 and abs(sum(found["norm"]) / 20 - 1) < 0.1
    assert found["ids"] == tokenizer.encode("import os")
    assert {split: found[split] for split in rows} == rows
    assert "split" in found["refused"][0] and "someone/other" in found["refused"][1]
    assert all("\n" not in line and "give files" in line for line in found["refused"])
