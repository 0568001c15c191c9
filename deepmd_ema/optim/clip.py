"""Global norm of the gradients, and clipping to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.dist.dtensor import local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NORM_GUARD = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and DeePMD-kit: no division by zero


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, all_reduce_sum: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale the gradients so that their global L2 norm is at most ``max_norm``; nothing waits for the device.

    Parameters without a gradient are left out.

    Args:
        parameters: owners of the gradients, on one device, of any precisions.
        max_norm: largest norm, or None to leave the gradients as they are.
        all_reduce_sum: adds a scalar up over the ranks, when each holds a part of every gradient.

    Returns:
        The norm before clipping, a scalar; it is finite only if every gradient is.
    """
    # of a sharded gradient, the part that this process holds
    gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(gradients)
    total = torch.linalg.vector_norm(torch.stack([norm.to(torch.float64) for norm in norms]))
    if all_reduce_sum is not None:
        total = all_reduce_sum(total.square()).sqrt()
    if max_norm is not None:
        factor = (max_norm / (total + NORM_GUARD)).clamp(max=1.0)
        for dtype in {g.dtype for g in gradients}:
            torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
    return total
