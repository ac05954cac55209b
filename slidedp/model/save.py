"""The model as a Hugging Face folder, written from the host state or a checkpoint without a copy of it."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slidedp.config import DTYPES
from slidedp.errors import ConfigError
from slidedp.model.load import INDEX, WEIGHTS
from slidedp.model.units import Parameter, Unit

SHARD_BYTES = 2 * 2**30
"""Tensors of one file; what is converted at once, so the memory an export takes. A larger tensor
has a file of its own."""


class Weights(Protocol):
    """What can be exported: the host state, or the weights of a checkpoint."""

    units: tuple[Unit, ...]

    def values(self, unit: Unit, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`."""


def export(
    weights: Weights,
    config: PretrainedConfig,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Writes weights in `dtype`, config, generation config and the tokenizer's files to `folder`.

    The folder appears whole or not at all: it is written beside its place and renamed. Tied models
    store no lm_head.weight, as transformers has it. No update may run meanwhile.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: already there, and not an empty folder: export to another")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    partial.mkdir(parents=True)
    try:
        _write_weights(weights, DTYPES[dtype], partial)
        write_assets(config, dtype, tokenizer, partial)
        for file in partial.glob("*.safetensors"):  # which are written readable by their owner alone
            shutil.copymode(partial / "config.json", file)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def write_assets(
    config: PretrainedConfig, dtype: str, tokenizer: PreTrainedTokenizerBase | None, folder: Path
) -> None:
    """Writes all of a Hugging Face folder but the weights, which will be in `dtype`."""
    saved = copy.deepcopy(config)
    saved.dtype = DTYPES[dtype]
    saved.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    saved.save_pretrained(folder)
    # Not save_pretrained, which refuses the contradictory settings that some hub models ship.
    _generation_config(config).to_json_file(folder / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _write_weights(weights: Weights, dtype: torch.dtype, folder: Path) -> None:
    shards = list(_shards(weights.units, dtype.itemsize))
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        tensors = {parameter.name: weights.values(unit, parameter, dtype) for unit, parameter in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(unit.parameter_count for unit in weights.units) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(units: tuple[Unit, ...], itemsize: int) -> Iterator[list[tuple[Unit, Parameter]]]:
    """The parameters in order, in groups of at most SHARD_BYTES."""
    shard: list[tuple[Unit, Parameter]] = []
    size = 0
    for unit in units:
        for parameter in unit.parameters:
            nbytes = parameter.numel * itemsize
            if shard and size + nbytes > SHARD_BYTES:
                yield shard
                shard, size = [], 0
            shard.append((unit, parameter))
            size += nbytes
    yield shard


def _generation_config(config: PretrainedConfig) -> GenerationConfig:
    """The one that came with the model (its stop tokens, sampling), else what its config implies."""
    try:
        return GenerationConfig.from_pretrained(config.name_or_path or "", local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(config)
