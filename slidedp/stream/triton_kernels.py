"""Kernels that torch has no fast form of; imported only where there is a GPU."""

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _adamw(
    master, exp_avg, exp_avg_sq, out, gradient, n,
    scale, decay, a1, b2, a2, inverse_root, eps, rate, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gradient + at, inside).to(tl.float32) * scale
    p = tl.load(master + at, inside) * decay
    m = tl.load(exp_avg + at, inside)
    v = tl.load(exp_avg_sq + at, inside)
    m += a1 * (g - m)
    v = b2 * v + a2 * g * g
    p -= rate * m / (tl.sqrt(v) * inverse_root + eps)
    tl.store(master + at, p, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    tl.store(out + at, p.to(out.dtype.element_ty), inside)


def adamw_update(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor,
    gradient: torch.Tensor,
    factors: tuple[float, ...],
) -> None:
    """`slidedp.stream.adamw.adamw_update` in one pass: 24 bytes of state and 4 of BF16 a parameter.
    `factors` as `slidedp.host.kernels.adamw_factors` returns them."""
    n = master.numel()
    _adamw[(-(-n // _BLOCK),)](master, exp_avg, exp_avg_sq, out, gradient, n, *factors, BLOCK=_BLOCK)


@triton.jit
def _sum_of_squares(x, partial, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n, other=0.0).to(tl.float64)
    tl.store(partial + tl.program_id(0), tl.sum(value * value, 0))


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """FP64 scalar on the device, of a flat tensor. torch's own FP64 norm of a BF16 tensor reads 8 GB/s."""
    programs = -(-x.numel() // _BLOCK)
    partial = torch.empty(programs, dtype=torch.float64, device=x.device)
    if programs:
        _sum_of_squares[(programs,)](x, partial, x.numel(), BLOCK=_BLOCK)
    return partial.sum()
