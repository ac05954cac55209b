"""A decoder layer whose second half runs over tiles of tokens.

Norm and MLP treat each token alone. A tile at a time, their intermediates (three intermediate widths and
more per token) exist for the tokens of one tile only: in forward they are dropped at once, in backward a
tile is computed again and differentiated before the next one. What a layer holds for the whole sequence is
attention's part: see docs/memory.md.

Weight gradients are summed over tiles in FP32. A tile's own gradient is the compute dtype's: rounded once,
as that of a whole layer is. A sum in BF16 would round once more at every tile, and lose a tile's share
where it is below 1/256 of the sum.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slidedp.model.families import LayerFunction, LayerHalf, of_second_half


def tiled(attention: LayerHalf, mlp: LayerHalf, tile: int, read: bool = True) -> LayerFunction:
    """The layer made of its two halves (`slidedp.model.families.layer_halves`), the second one on `tile`
    tokens at a time. Not `read`: only the output's gradient function is wanted; its values are left
    undefined, which saves the second half's forward where a layer runs again for its backward."""

    def layer(
        parameters: dict[str, torch.Tensor],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        bounds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        hidden = attention(parameters, hidden, cos, sin, bounds)
        names = of_second_half(parameters)
        weights = [parameters[name] for name in names]
        output = _Tiled.apply(mlp, names, tile, read, hidden.flatten(0, 1), *weights)
        assert isinstance(output, torch.Tensor)
        return output.view_as(hidden), None

    return layer


class _Tiled(torch.autograd.Function):
    """function(weights, hidden) over tiles of hidden, [tokens, width]; saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        function: LayerHalf,
        names: tuple[str, ...],
        tile: int,
        read: bool,
        hidden: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.function, ctx.names, ctx.tile = function, names, tile
        ctx.trained = [weight.requires_grad for weight in weights]
        ctx.save_for_backward(hidden, *weights)
        output = torch.empty_like(hidden)
        if read:
            named = dict(zip(names, weights, strict=True))
            for source, target in zip(hidden.split(tile), output.split(tile), strict=True):
                target.copy_(function(named, source[None])[0])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *weights = ctx.saved_tensors
        weights = [w.detach().requires_grad_(t) for w, t in zip(weights, ctx.trained, strict=True)]
        named = dict(zip(ctx.names, weights, strict=True))
        trained = [weight for weight in weights if weight.requires_grad]
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
        gradient = torch.empty_like(hidden)

        def backward_of_tile(source: torch.Tensor, signal: torch.Tensor, target: torch.Tensor) -> None:
            # A function, so that its weight gradients are gone before the next tile's are made.
            entry = source[None].detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.function(named, entry)
            of_entry, *parts = torch.autograd.grad(output, [entry, *trained], signal[None])
            target.copy_(of_entry[0])
            for total, part in zip(sums, parts, strict=True):
                total += part

        tiles = zip(hidden.split(ctx.tile), upstream.split(ctx.tile), gradient.split(ctx.tile), strict=True)
        for tile in tiles:
            backward_of_tile(*tile)
        found = iter(sums)
        of_weights = [next(found).to(weight.dtype) if weight.requires_grad else None for weight in weights]
        return None, None, None, None, gradient, *of_weights
