"""Weights into the host state: from safetensors, or random.

One stored tensor at a time is converted into its place in the FP32 master. The files are mapped, so
their pages are page cache: no second copy of the model is ever in memory.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from slidedp.errors import ConfigError
from slidedp.host import kernels
from slidedp.host.state import HostState
from slidedp.model.families import skeleton
from slidedp.model.units import Parameter, Unit

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_FLOATING = ("BF16", "F16", "F32", "F64")


class _Stored(NamedTuple):
    """What a file's header says about a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def check_pretrained(units: tuple[Unit, ...], folder_or_hub_id: str) -> None:
    """Refuses weights that do not fit, by headers alone; fetches them first if they are on the hub."""
    _checked(units, folder_or_hub_id)


def load_pretrained(state: HostState, folder_or_hub_id: str) -> None:
    """Fills the master from a Hugging Face folder or hub id, then the working copy from it.

    Everything is checked before anything is written: each parameter is stored with its shape, and
    nothing is stored that the model has no place for.
    """
    stored = _checked(state.units, folder_or_hub_id)
    targets = {
        parameter.name: (parameter, torch.from_numpy(state.unit(unit).master))
        for unit in state.units
        for parameter in unit.parameters
    }
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name in targets:
                    parameter, master = targets[name]
                    parameter.view(master).copy_(tensors.get_tensor(name))
    state.refresh_working()


def _checked(units: tuple[Unit, ...], folder_or_hub_id: str) -> dict[str, _Stored]:
    folder = _local_folder(folder_or_hub_id)
    stored = _headers(_weight_files(folder))
    _check(folder, stored, {p.name: p for unit in units for p in unit.parameters})
    return stored


def fill_random(state: HostState, config: PretrainedConfig, seed: int) -> None:
    """Initial weights as transformers draws them: N(0, initializer_range²) matrices and embeddings,
    norms at 1 (at 0 where they count from 1), biases at 0.

    A parameter's values depend on its name and `seed` alone, not on how many layers there are.
    """
    norm = float(type(skeleton(config).model.norm)(1).weight.detach())
    for unit in state.units:
        master = state.unit(unit).master
        for parameter in unit.parameters:
            values = master[parameter.offset : parameter.offset + parameter.numel]
            if len(parameter.shape) > 1:
                digest = hashlib.blake2b(parameter.name.encode(), digest_size=8).digest()
                stream = int.from_bytes(digest, "little")
                kernels.fill_normal(values, config.initializer_range, seed, stream)
            else:
                values[:] = norm if "norm" in parameter.name else 0.0
    state.refresh_working()


def _local_folder(folder_or_hub_id: str) -> Path:
    if Path(folder_or_hub_id).is_dir():
        return Path(folder_or_hub_id)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                folder_or_hub_id,
                # Not consolidated.safetensors, which repeats the weights in another naming.
                allow_patterns=[
                    "model*.safetensors",
                    INDEX,
                    "config.json",
                    "generation_config.json",
                ],
            )
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model={folder_or_hub_id!r}: no such folder, and the hub does not give it ({reason}): "
            "give a local folder, or a hub id that this machine can reach"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        found = "only pickled weights, which can run code" if pickled else f"no {WEIGHTS} or {INDEX}"
        raise ConfigError(
            f"{folder}: {found}: convert the model with transformers' save_pretrained, which writes "
            "safetensors"
        )
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{folder / INDEX}: not a safetensors index: download it again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{folder / INDEX}: {name!r} is not a file beside it: download it again")
    return [folder / name for name in sorted(names)]


def _headers(files: list[Path]) -> dict[str, _Stored]:
    """Every stored tensor by name; reads headers only."""
    stored = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    part = tensors.get_slice(name)
                    stored[name] = _Stored(file, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: missing or not whole ({error}): download it again") from error
    return stored


def _check(folder: Path, stored: dict[str, _Stored], parameters: dict[str, Parameter]) -> None:
    """Refuses, by its name, the first tensor that keeps `stored` from being this model's weights."""
    for name, parameter in parameters.items():
        if name not in stored:
            raise ConfigError(
                f"{folder}: no tensor {name}: the weights are of another model than config.json"
            )
        file, shape, dtype = stored[name]
        if shape != parameter.shape:
            raise ConfigError(
                f"{file}: {name} is {list(shape)}, the model needs {list(parameter.shape)}: take "
                "config.json and weights of the same model"
            )
        if dtype not in _FLOATING:
            raise ConfigError(
                f"{file}: {name} is stored as {dtype}: quantised weights cannot be trained, give "
                f"the model in one of {', '.join(_FLOATING)}"
            )
    for name in stored:
        if name in parameters or name.endswith("rotary_emb.inv_freq"):
            continue
        if name != LM_HEAD:
            raise ConfigError(
                f"{stored[name].file}: {name} has no place in the model: take config.json and "
                "weights of the same model"
            )
        # The config ties it to the embedding, so it must be a copy; else the config is wrong.
        if not torch.equal(_read(stored, LM_HEAD), _read(stored, EMBEDDING)):
            raise ConfigError(
                f"{stored[name].file}: {LM_HEAD} differs from {EMBEDDING}, which config.json ties: "
                "set tie_word_embeddings to false there"
            )


def _read(stored: dict[str, _Stored], name: str) -> torch.Tensor:
    """A stored tensor, mapped from its file."""
    with safe_open(stored[name].file, framework="pt") as tensors:
        return tensors.get_tensor(name)
