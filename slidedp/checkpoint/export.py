"""The model of a checkpoint as a Hugging Face folder, without the run that wrote it."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from slidedp.checkpoint.folder import ASSETS
from slidedp.checkpoint.resume import verify
from slidedp.checkpoint.shards import shard_name
from slidedp.model.families import load_config, skeleton
from slidedp.model.save import export
from slidedp.model.units import Parameter, Unit, units_of


def export_checkpoint(source: Path, folder: str | Path, dtype: str = "bfloat16") -> Path:
    """Writes the model of a checkpoint as a Hugging Face folder, one group of tensors at a time."""
    verify(source)
    config = load_config(str(source / ASSETS))
    tokenizer = None
    if (source / ASSETS / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(source / ASSETS, trust_remote_code=False)
    weights = CheckpointWeights(source, units_of(skeleton(config)))
    return export(weights, config, folder, dtype=dtype, tokenizer=tokenizer)


class CheckpointWeights:
    """The master weights of a checkpoint, mapped from its shards: what an export needs."""

    def __init__(self, folder: Path, units: tuple[Unit, ...]) -> None:
        self.folder, self.units = folder, units

    def values(self, unit: Unit, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`."""
        with safe_open(self.folder / shard_name(unit), framework="pt") as tensors:
            return tensors.get_tensor(f"master.{parameter.name}").to(dtype)
