"""Which architectures are supported, and the template modules that compute their units.

A template lives on the meta device and owns no memory: its parameters are replaced by views into a
slot at every call (`torch.func.functional_call`). All decoder layers share one template.
"""

import copy
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from slidedp.errors import ConfigError, reason
from slidedp.model.documents import Positions, PositionsByKind, within_window
from slidedp.model.units import lowest_trained, units_of

ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Models of the shape embed_tokens, layers, norm, lm_head with rotary positions and causal SDPA. Experts
of a mixture are computed by transformers' grouped matrix products. docs/families.md: how to add one."""

DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop")
"""Fields of a config; only Phi-3 has the last two."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers: transformers' names in `layer_types`."""
UNTURNED = ", no rotation"
"""Behind the kind of layers that rotate nothing (SmolLM3)."""

LayerFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""(parameters, hidden, cos, sin, bounds) -> hidden and the router's logits; see
`slidedp.model.documents.Positions` and `layer_function`."""
LayerHalf = Callable[..., torch.Tensor]
"""See `layer_halves`."""


def load_config(model: str | PretrainedConfig, positions: int | None = None) -> PretrainedConfig:
    """The transformers config of a folder or hub id; refuses what cannot be trained, in one line. With
    `positions`, a copy that has so many."""
    if positions is not None:
        changed: Any = copy.deepcopy(load_config(model))
        changed.max_position_embeddings = positions
        return changed
    if isinstance(model, str):
        remedy = "give a Hugging Face folder with a config.json, or a hub id"
        # What cannot be a hub id is refused at once: the hub's own refusal takes its time.
        if not os.path.isdir(model) and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
            raise ConfigError(f"model={model!r}: no such folder: {remedy}")
        try:
            return AutoConfig.from_pretrained(model, trust_remote_code=False)
        except Exception as error:  # a dozen kinds, not all of them ValueErrors
            raise ConfigError(f"model={model!r}: {reason(error)}: {remedy}") from error
    return model


def skeleton(config: PretrainedConfig, sequence_length: int | None = None) -> Any:
    """The transformers model on the meta device: every shape, no memory."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except Exception as error:  # whatever a number in a config.json leads to
        accepted = f"give a config of one of {', '.join(ARCHITECTURES)}"
        raise ConfigError(
            f"model: {type(config).__name__} makes no language model ({reason(error)}): {accepted}"
        ) from error
    name = type(model).__name__
    if name not in ARCHITECTURES:
        raise ConfigError(f"model: {name} is not supported; accepted: {', '.join(ARCHITECTURES)}")
    if len(model.model.layers) == 0:
        raise ConfigError("model: num_hidden_layers is 0: give a model with at least one decoder layer")
    shapes = [{n: p.shape for n, p in layer.named_parameters()} for layer in model.model.layers]
    if any(layer != shapes[0] for layer in shapes):
        raise ConfigError(
            "model: its layers differ (mlp_only_layers or decoder_sparse_step in config.json), and one "
            "template must serve all: give a model whose layers are alike"
        )
    for dropout in DROPOUTS:
        if getattr(config, dropout, 0.0):
            raise ConfigError(
                f"model: {dropout}={getattr(config, dropout)} is not supported, since a recomputed layer "
                "would draw another mask; set it to 0 in config.json"
            )
    other = sorted({kind.removesuffix(UNTURNED) for kind in layer_kinds(config)} - {FULL, SLIDING})
    if other or getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(
            f"model: {other[0] if other else 'bidirectional attention'} is not supported: give a model of "
            f"{FULL} and {SLIDING} layers"
        )
    if sequence_length is not None and sequence_length > config.max_position_embeddings:
        raise ConfigError(
            f"sequence_length={sequence_length}: the model's positions end at "
            f"{config.max_position_embeddings}; use at most that, or set max_position_embeddings="
            f"{sequence_length}, which trains positions that the model has never met"
        )
    return model


def layer_kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer."""
    given = getattr(config, "layer_types", None)
    if given is not None:
        turned = getattr(config, "no_rope_layers", None) or [1] * len(given)  # 1 where positions rotate
        return tuple(kind + UNTURNED * (not turns) for kind, turns in zip(given, turned, strict=False))
    window = getattr(config, "sliding_window", None)
    return (FULL if window is None else SLIDING,) * config.num_hidden_layers


def layer_function(model: Any, attention: str = "sdpa", balanced: bool = False) -> LayerFunction:
    """f(parameters, hidden, cos, sin, bounds) -> hidden and router logits of one decoder layer; hidden is
    [batch, seq, width], the logits [batch · seq, experts], or None if the layer has no router. Without bounds
    attention is causal over the whole sequence. `balanced`: the logits will have a gradient."""
    template = model.model.layers[0]
    template.train()
    template.self_attn.config._attn_implementation = attention
    template.self_attn.use_rope = True  # SmolLM3 asks; a layer without has tables that rotate by nothing
    routed: list[torch.Tensor] = []
    router = getattr(template.mlp, "gate", None)
    if router is not None:
        router.register_forward_hook(lambda module, inputs, output: routed.append(output[0]))

    def layer(
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bounds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = functional_call(
            template,
            parameters,
            (hidden,),
            {"position_embeddings": (cos, sin), "attention_mask": bounds, "use_cache": False},
        )
        if router is None:
            return hidden, None
        logits = routed.pop()
        return hidden, logits if balanced else logits.detach()

    return layer


def has_halves(config: Any) -> bool:
    """Whether `layer_halves` make up the layer: not where routers are heard."""
    return not hasattr(config, "num_experts")


class Norms(NamedTuple):
    """A layer's norms before and behind its attention and its MLP; None where it has none."""

    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None


def layer_norms(names: Collection[str]) -> Norms:
    """Those of a layer with parameters of these names."""
    first, second = "input_layernorm", "post_attention_layernorm"
    before, behind = "pre_feedforward_layernorm", "post_feedforward_layernorm"
    if f"{before}.weight" in names:  # Gemma
        return Norms(first, second, before, behind)
    if f"{behind}.weight" in names:  # OLMo
        return Norms(None, second, None, behind)
    return Norms(first, None, second, None)


def of_second_half(names: Collection[str]) -> tuple[str, ...]:
    """Of a layer's parameters, those that the second of `layer_halves` reads."""
    norms = layer_norms(names)
    modules = ("mlp", norms.before_mlp, norms.behind_mlp)
    return tuple(name for name in names if name.split(".")[0] in modules)


def layer_halves(model: Any) -> tuple[LayerHalf, LayerHalf]:
    """The layer of `layer_function` (called first: it sets the attention) in two halves:
    f(parameters, hidden, cos, sin, bounds) of attention, its norms and residual, and f(parameters, hidden)
    of the MLP, its norms and residual; for models that `has_halves`."""
    template = model.model.layers[0]
    norms = layer_norms([name for name, _ in template.named_parameters()])
    multiplier = getattr(template, "residual_multiplier", 1.0)  # Granite's

    def part(name: str, parameters: dict[str, torch.Tensor], *args: Any, **settings: Any) -> Any:
        module, prefix = getattr(template, name), name + "."
        own = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        return functional_call(module, own, args, settings)

    def normed(name: str | None, parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        return hidden if name is None else part(name, parameters, hidden)

    def added(hidden: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        return hidden + (branch if multiplier == 1.0 else branch * multiplier)

    def attention(
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bounds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        entry = normed(norms.before_attention, parameters, hidden)
        positions = {"position_embeddings": (cos, sin), "attention_mask": bounds}
        branch = part("self_attn", parameters, hidden_states=entry, **positions)[0]
        return added(hidden, normed(norms.behind_attention, parameters, branch))

    def mlp(parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        branch = part("mlp", parameters, normed(norms.before_mlp, parameters, hidden))
        return added(hidden, normed(norms.behind_mlp, parameters, branch))

    return attention, mlp


def norm_function(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """f(weight, hidden) -> the final norm, divided by what Granite divides logits by."""
    template, divisor = model.model.norm, getattr(model.config, "logits_scaling", 1.0)

    def norm(weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        normed = functional_call(template, {"weight": weight}, (hidden,))
        return normed if divisor == 1.0 else normed / divisor

    return norm


def embedding_scale(model: Any, dtype: torch.dtype) -> float:
    """What rows of the embedding are multiplied by: Gemma's scale, rounded to `dtype`; Granite's; or 1."""
    rounded = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    if rounded is not None:
        return float(torch.tensor(rounded, dtype=dtype))
    return float(getattr(model.config, "embedding_multiplier", 1.0))


def position_tables(
    config: Any,
    model: Any,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> PositionsByKind:
    """Rotary tables of positions 0..length-1 for each kind of layer that the model has; a mask as well where
    a window slides over a longer sequence."""
    with torch.device(device):
        rotary = type(model.model.rotary_emb)(config)
    places, like = torch.arange(length, device=device)[None], torch.empty(0, dtype=dtype, device=device)
    tables: PositionsByKind = {}
    for kind in sorted(set(layer_kinds(config))):
        attention = kind.removesuffix(UNTURNED)
        own = (attention,) if hasattr(rotary, "layer_types") else ()  # each kind at its own speed
        slides = attention == SLIDING and length > config.sliding_window
        bounds = within_window(config.sliding_window, length, device) if slides else None
        cos, sin = rotary(like, places, *own)
        if kind != attention:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        tables[kind] = Positions(cos, sin, bounds)
    return tables


def active_parameters(config: Any, sizes: dict[str, int]) -> int:
    """Elements that a token meets of parameters with these names and sizes: of a mixture, the experts
    that it goes to."""
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    if experts:
        experts -= experts * config.num_experts_per_tok // config.num_experts
    return sum(sizes.values()) - experts


def flops_per_token(model: Any, attended_length: float, freeze: tuple[str, ...] = ()) -> float:
    """Floating-point operations of one trained token: 6 per parameter outside the input embedding (of
    experts, those that a token goes to), plus causal attention (12 · heads · head_dim for each layer and
    token seen, of a document of `attended_length` tokens in the mean); no recompute counted. Of units that
    `freeze` names 4 per parameter, and below all that is trained the forward's third alone."""
    config, units = model.config, units_of(model, freeze)
    lowest = lowest_trained(units)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    seen = tokens_seen(config, attended_length)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    total = 0.0
    for unit in units:
        forward_alone = 0 < unit.index < lowest
        if unit.index or tied:  # as a head; the input embedding is looked up
            parameters = active_parameters(config, {view.name: view.numel for view in unit.views})
            total += (2.0 if forward_alone else 4.0 if unit.frozen else 6.0) * parameters
        if 0 < unit.index <= len(seen):
            total += (4.0 if forward_alone else 12.0) * heads * head_dim * seen[unit.index - 1]
    return total


def tokens_seen(config: Any, length: float) -> list[float]:
    """By layer, how many tokens a token of a document of `length` tokens sees in the mean: half of them, or
    with a window that slides, what it lets through."""
    slides = [kind.removesuffix(UNTURNED) == SLIDING for kind in layer_kinds(config)]
    # The window is not full yet for the first tokens of a document.
    windows = [min(config.sliding_window, length) if sliding else length for sliding in slides]
    return [window - window**2 / 2 / length for window in windows]
