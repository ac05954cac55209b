"""Makes a rank's compute from a model, compiled if the config says so."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers import PretrainedConfig

from slidedp.config import Config
from slidedp.model.documents import VARLEN, has_varlen, within_documents
from slidedp.model.experts import experts_of
from slidedp.model.families import (
    embedding_scale,
    layer_function,
    layer_halves,
    layer_kinds,
    norm_function,
    position_tables,
    skeleton,
)
from slidedp.model.loss import piece_gradient, piece_statistics, softmax_gradient
from slidedp.stream.device import Device
from slidedp.stream.functions import ModelFunctions
from slidedp.stream.vocabulary import PieceFunctions


def model_functions(
    config: Config,
    model_config: PretrainedConfig,
    device: Device,
    dtype: torch.dtype,
    bounded: bool = False,
) -> ModelFunctions:
    """The compute of embed, layer and head, compiled if the config says so. `bounded`: for sequences that
    hold several documents."""
    model = skeleton(model_config)
    positions = position_tables(model_config, model, config.sequence_length, device.torch, dtype)
    masked = any(own.bounds is not None for own in positions.values())
    varlen = bounded and not masked and has_varlen(model_config, device.torch, dtype)
    if varlen:
        from slidedp.model.varlen import register_varlen  # takes the compiler along

        register_varlen()
    experts = experts_of(model_config, config.router_aux_loss_coef)
    balanced = experts is not None and experts.weight > 0
    layer = layer_function(model, VARLEN if varlen else "sdpa", balanced)
    attend, mlp = layer_halves(model)
    cap = getattr(model_config, "final_logit_softcapping", None)

    # One after another, and not one wrapper for all: torch.compile caches by code object.
    def softmax(
        logits: torch.Tensor, targets: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return softmax_gradient(logits, targets, scale, cap)

    def statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return piece_statistics(logits, targets, cap)

    def gradient(logits: torch.Tensor, targets: torch.Tensor, *rest: Any) -> torch.Tensor:
        normalizer, valid, scale = rest
        return piece_gradient(logits, targets, normalizer, valid, scale, cap)

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False) if config.compile else function

    def at_budget(function: Any, half: bool) -> Callable[[float], Any]:
        if not config.compile:
            return lambda budget: function
        from slidedp.stream.partition import attention_share, compile_partial  # takes the compiler along

        attention = attention_share(model_config, dtype, config.sequence_length, half)
        return cache(partial(compile_partial, function, attention))

    padding = model.model.embed_tokens.padding_idx
    return ModelFunctions(
        layer=compiled(layer),
        partial=at_budget(layer, half=False),
        attention=compiled(attend),
        partial_attention=at_budget(attend, half=True),
        mlp=compiled(mlp),
        norm=norm_function(model),
        softmax=compiled(softmax),
        pieces=PieceFunctions(compiled(statistics), compiled(gradient)),
        kinds=layer_kinds(model_config),
        positions=positions,
        within_documents=partial(within_documents, positions, varlen, device.bring),
        padding_index=-1 if padding is None else padding,
        embedding_scale=embedding_scale(model, dtype),
        logit_cap=cap,
        experts=experts,
    )
