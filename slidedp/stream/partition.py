"""What a layer keeps under `partial`: torch's partitioner decides, within a budget of bytes.

It keeps what costs most FLOPs per byte to compute again, but takes attention by cuDNN or over documents for
free, and computes it again at any budget. In long sequences attention is most of a layer (35 of 60 TFLOP in
Qwen3-8B at 65,536 tokens), so its output is then kept first, and the budget spent on the rest.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PretrainedConfig

from slidedp.model.families import LayerFunction
from slidedp.model.footprint import kept_per_token

ATTENTION = ("aten._scaled_dot_product", "aten._flash_attention", "torch_attn._varlen_attn")
"""How the names of attention's operators begin."""


class _KeepAttention(CustomGraphPass):
    """Marks what attention computes as not to be computed again."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            name = str(node.target)
            if name.startswith(ATTENTION) and "backward" not in name:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def uuid(self) -> str:
        """For the compiler's caches: another one whenever this class does something else."""
        return "slidedp keeps attention 1"


def attention_share(model: PretrainedConfig, dtype: torch.dtype, length: int, half: bool) -> float:
    """The part of a layer's intermediates (of its first `half`) that attention's output is, where it is dear:
    an element of it costs 2 × `length` FLOPs, one of a matrix product 2 × width; else 0."""
    if length <= model.hidden_size:
        return 0.0
    heads = model.num_attention_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // heads
    # Besides the layer's input; a first half's output is no intermediate of it either.
    outside = (2 if half else 1) * model.hidden_size * dtype.itemsize
    output = heads * (head_dim * dtype.itemsize + 4)  # and its logsumexp
    return output / (kept_per_token(model, dtype, True, half) - outside)


def compile_partial(layer: Any, attention: float, budget: float) -> LayerFunction:
    """The layer compiled to keep `budget`, a fraction in (0, 1], of its intermediates; `attention` of them
    are its output's, as `attention_share` says, and come first."""
    # torch.compile caches by code object: a variant needs one of its own.
    code = layer.__code__.replace(co_name=f"{layer.__name__}_keeping_{budget}")
    variant = types.FunctionType(code, layer.__globals__, code.co_name, None, layer.__closure__)
    compiled: Callable[..., Any] = torch.compile(variant, dynamic=False)
    first = 0 < attention < budget
    rest = budget - attention if first else budget

    def call(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Read when a call compiles; entering them costs microseconds.
        with (
            functorch_config.patch(activation_memory_budget=rest),
            inductor_config.patch(joint_custom_pre_pass=_KeepAttention() if first else None),
        ):
            return compiled(*arguments)

    return call
