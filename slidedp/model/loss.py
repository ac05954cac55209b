"""The head's loss: linear projection and cross-entropy, a piece of the tokens at a time.

The logits of the whole batch never exist, and the weight gradient accumulates in FP32 over pieces.
"""

from collections.abc import Callable

import torch

IGNORED = -100
"""The label of a position that is no target, as in torch.nn.functional.cross_entropy."""

SoftmaxGradient = Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


def softmax_gradient(
    logits: torch.Tensor, targets: torch.Tensor, scale: float, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy (FP32 scalar) of logits [tokens, vocabulary], and `scale` times its
    gradient in the dtype of the logits: softmax minus one-hot, zero where the target is IGNORED.
    With a `cap`, that of the logits bent into (-cap, cap)."""
    values = capped(logits.float(), cap)
    normalizer = values.logsumexp(1)
    valid = targets != IGNORED
    classes = targets.clamp(min=0)[:, None]
    losses = normalizer - values.gather(1, classes)[:, 0]
    one_hot = torch.arange(logits.shape[1], device=logits.device)[None] == classes
    gradient = (torch.exp(values - normalizer[:, None]) - one_hot.float()) * scale
    if cap is not None:
        gradient = gradient * (1 - (values / cap) ** 2)
    loss = torch.where(valid, losses, 0.0).sum()
    return loss, torch.where(valid[:, None], gradient, 0.0).to(logits.dtype)


def capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Logits bent into (-cap, cap), as Gemma does it; as they are without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    weight_gradient: torch.Tensor | None,
    softmax: SoftmaxGradient = softmax_gradient,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss summed over targets (FP32 scalar) and `scale` times its gradient with respect to hidden.

    hidden [tokens, width], weight [vocabulary, width], targets [tokens] int64; the gradient of the
    weight is added to `weight_gradient`, FP32 of the weight's shape, and not computed where that is None.
    """
    piece = tokens_at_once(len(weight), hidden.is_cuda)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    gradient = torch.empty_like(hidden)
    for start in range(0, hidden.shape[0], piece):
        part, labels = hidden[start : start + piece], targets[start : start + piece]
        partial, signal = softmax(part @ weight.t(), labels, scale)
        loss += partial
        torch.mm(signal, weight, out=gradient[start : start + piece])
        if weight_gradient is not None:
            add_product(weight_gradient, signal.t(), part)
    return loss, gradient


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a @ b to `total`, FP32, whatever their dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        # The matrix product adds to the sum itself: nobody writes and reads an FP32 product in between.
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += (a @ b).float()


def piece_statistics(
    logits: torch.Tensor, targets: torch.Tensor, cap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logsumexp of logits [tokens, rows of a vocabulary's piece], and each token's target logit, 0 where
    the target is in another piece (-1); both FP32 [tokens]. With a `cap`, of the logits bent below it."""
    values = capped(logits.float(), cap)
    chosen = values.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return values.logsumexp(1), torch.where(targets < 0, 0.0, chosen)


def piece_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    valid: torch.Tensor,
    scale: float,
    cap: float | None = None,
) -> torch.Tensor:
    """`softmax_gradient`'s part for one piece of the vocabulary, given the logsumexp over all of it, FP32
    [tokens], and which tokens are targets; `targets` as for `piece_statistics`."""
    one_hot = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
    values = capped(logits.float(), cap)
    gradient = (torch.exp(values - normalizer[:, None]) - one_hot.float()) * scale
    if cap is not None:
        gradient = gradient * (1 - (values / cap) ** 2)
    return torch.where(valid[:, None], gradient, 0.0).to(logits.dtype)


def summed_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, cap: float | None = None
) -> torch.Tensor:
    """The loss of `linear_cross_entropy` alone."""
    piece = tokens_at_once(len(weight), hidden.is_cuda)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part, labels in zip(hidden.split(piece), targets.split(piece), strict=True):
        logits = capped((part @ weight.t()).float(), cap)
        loss += torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss


def tokens_at_once(vocabulary: int, cuda: bool) -> int:
    """Tokens whose logits exist at a time. A GPU wants pieces that fill its matrix units (1 GiB of BF16
    logits), a CPU its cache."""
    return max(1, (2**29 if cuda else 2**22) // vocabulary)
