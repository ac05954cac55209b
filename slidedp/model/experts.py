"""The routers of a mixture's layers: what they chose in a pass, and the loss that keeps experts balanced.

The loss is transformers' `load_balancing_loss_func`: experts · Σ_e f_e · p_e, where f_e is how many of its
experts a token has in expert e, and p_e the probability that a router gives e, both in the mean over the
tokens of all layers. f has no gradient. The gradient of the probabilities is therefore a multiple of f, the
same in every layer, and known once the last layer's forward is over: layers can stream. The tokens are
those of all ranks, so that N ranks learn what one would from the global batch.
"""

from typing import Any, NamedTuple

import torch

from slidedp.errors import ConfigError
from slidedp.model.loss import IGNORED


class Experts(NamedTuple):
    """A mixture's sizes, and the weight of its balance in the loss."""

    layers: int
    per_layer: int
    per_token: int
    weight: float
    """Of the load-balancing loss against the mean cross-entropy; 0 leaves it out."""


def experts_of(model: Any, coefficient: float | None = None) -> Experts | None:
    """The mixture that a transformers config describes, None for a dense model. Without a `coefficient` the
    balance counts as transformers counts it: by router_aux_loss_coef, if output_router_logits is set."""
    if not hasattr(model, "num_experts"):
        if coefficient:
            raise ConfigError(
                f"router_aux_loss_coef={coefficient}: {type(model).__name__} has no experts to balance: "
                "leave it out"
            )
        return None
    if coefficient is None:
        coefficient = model.router_aux_loss_coef if model.output_router_logits else 0.0
    return Experts(model.num_hidden_layers, model.num_experts, model.num_experts_per_tok, coefficient)


def tokens_that_count(labels: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Bool [batch, length]: tokens that the loss depends on, those of each document up to its last target.
    So padding is left out. `position_ids` are None where a sequence is one document."""
    length = labels.shape[1]
    places = torch.arange(length).expand_as(labels)
    never = torch.full_like(places, length)

    def following(marked: torch.Tensor) -> torch.Tensor:
        """The first marked place from each on; `length` if there is none."""
        return torch.where(marked, places, never).flip(1).cummin(1).values.flip(1)

    target = following(labels != IGNORED)
    if position_ids is None:
        return target < length
    ends = torch.ones_like(labels, dtype=torch.bool)
    ends[:, :-1] = position_ids[:, 1:] == 0
    return target <= following(ends)


class Routing:
    """One rank's routers in one pass, layer by layer, and the gradient of their balance."""

    def __init__(self, experts: Experts, counted: torch.Tensor, scale: float) -> None:
        """`counted` bool [batch, length]: tokens that count. `scale`: of the balance's gradient."""
        self.experts, self._scale = experts, scale
        self._counted = counted.flatten().float()
        self.sums = torch.zeros(experts.layers + 1, experts.per_layer, device=counted.device)
        """FP32: the tokens of each expert by layer, and last, over all layers, the summed probabilities. Sum
        it over the ranks before `close`."""
        self._pull: torch.Tensor | None = None

    def through(self, layer: int, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """`hidden` as it is, the output of a layer from 0 on whose router computed `logits` [tokens,
        experts]; its backward gives the logits their gradient."""
        if self._pull is None:  # else the layer is computed again
            self._record(layer, logits.detach())
        if self.experts.weight == 0:
            return hidden
        return _Balanced.apply(hidden, logits, self)

    def _record(self, layer: int, logits: torch.Tensor) -> None:
        # As the router itself does it, so that equal probabilities make the same choice.
        probabilities = torch.softmax(logits.float(), -1)
        chosen = probabilities.topk(self.experts.per_token, -1).indices
        weights = self._counted[:, None].expand_as(chosen)
        self.sums[layer].scatter_add_(0, chosen.flatten(), weights.flatten())
        self.sums[-1] += self._counted @ probabilities

    def close(self) -> None:
        """The last layer's forward is over, and `sums` are those of all ranks: backward may begin."""
        tokens = self.sums[:-1].sum(0)
        passed = (tokens.sum() / self.experts.per_token).clamp(min=1)  # of tokens through layers
        self._pull = tokens * (self.experts.per_layer * self.experts.weight * self._scale / passed**2)

    def gradient(self, logits: torch.Tensor) -> torch.Tensor:
        """That of a layer's logits, by the softmax's derivative."""
        assert self._pull is not None
        probabilities = torch.softmax(logits.float(), -1)
        pull = self._pull - (probabilities @ self._pull)[:, None]
        return (probabilities * pull * self._counted[:, None]).to(logits.dtype)


class _Balanced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, logits: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.routing = routing
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        return gradient, ctx.routing.gradient(logits), None


def balance_loss(sums: torch.Tensor, per_token: int) -> float:
    """The load-balancing loss of a pass, unweighted, from its `Routing.sums` over all ranks."""
    tokens, probabilities = sums[:-1].sum(0).double(), sums[-1].double()
    passed = max(1.0, float(tokens.sum()) / per_token)
    return float(len(tokens) * (tokens @ probabilities) / passed**2)
