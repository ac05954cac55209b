"""AdamW on a rank's device, for the units that are updated where their summed gradient is.

The operations are those of `slidedp.host.kernels.adamw_update`. On a CPU they are that function, to the
bit; on a GPU one Triton kernel reads 12 bytes of state and the gradient of each parameter once, and
writes the state and what ranks compute with.
"""

from typing import Any

import numpy as np
import torch

from slidedp.host import kernels


def adamw_update(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor,
    gradient: torch.Tensor,
    *,
    grad_scale: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step on n parameters: `master`, `exp_avg` and `exp_avg_sq`, FP32 [n], change in place; `out`
    [n] receives the new master in the compute dtype. `gradient` [n], BF16 or FP32, is
    multiplied by `grad_scale`. `step` counts from 1."""
    settings: dict[str, Any] = {
        "grad_scale": grad_scale,
        "lr": lr,
        "beta1": betas[0],
        "beta2": betas[1],
        "eps": eps,
        "weight_decay": weight_decay,
        "step": step,
    }
    if master.is_cuda:
        from slidedp.stream import triton_kernels  # Triton comes with torch where there is a GPU

        factors = kernels.adamw_factors(**settings)
        triton_kernels.adamw_update(master, exp_avg, exp_avg_sq, out, gradient, factors)
        return
    state = master.numpy(), exp_avg.numpy(), exp_avg_sq.numpy()
    working = _bits(out) if out.dtype == torch.bfloat16 else None
    kernels.adamw_update(*state, working, _bits(gradient), offset=0, lane_stride=0, lanes=1, **settings)
    if out.dtype == torch.float32:
        out.copy_(master)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
