"""AdaMuon: momentum made orthogonal, then scaled per element."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.dist.dtensor import from_local, full_tensor, local_shard, shard_like
from deepmd_ema.optim.guarded import GuardedOptimizer, adam_change, adam_state
from deepmd_ema.optim.orthogonal import newton_schulz

RMS = 0.2  # AdaMuon, algorithm 1: the root mean square of an update of Adam
EPS = 1e-8  # AdaMuon, algorithm 1: keeps both denominators from zero


class AdaMuon(GuardedOptimizer):
    """AdaMuon (arXiv:2507.11005, algorithm 1) for matrices, Adam for scalars and vectors, as in DeePMD-kit.

    With the gradient g of a matrix of R rows and C columns (an array of more dims: its first, and all others):

        m <- momentum * m + (1 - momentum) * g
        O  = NewtonSchulz(sign(momentum * m + (1 - momentum) * g))
        v <- momentum * v + (1 - momentum) * O^2             (per element)
        H  = O / (sqrt(v) + eps)
        w <- (1 - lr * weight_decay) * w - lr * a * 0.2 * sqrt(R * C) / |H| * H

    a is ``sqrt(max(1, R / C))`` with ``lr_adjust > 0``, when Adam has the rate ``lr / lr_adjust``; else
    ``lr_adjust_coeff * sqrt(max(R, C))``, and Adam has ``lr``. The direction is taken in bfloat16, v and the update in
    float32, whatever the precision of the weights. Sharded matrices are gathered for it.

    Args:
        params: parameters that are trained.
        options: those of the section AdaMuon, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments."""
        if p.ndim < 2:
            return adam_state(p)
        return {"momentum": torch.zeros_like(p), "second_moment": torch.zeros_like(p, dtype=torch.float32)}

    def change(self, p: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the new parameter and state by the formulas of the class."""
        if p.ndim < 2:
            return adam_change(p, group, state)
        lr, beta = group["lr"], group["momentum"]
        assert p.grad is not None
        gradient = local_shard(p.grad)
        momentum = local_shard(state["momentum"]).lerp(gradient, 1 - beta)
        sign = full_tensor(from_local(gradient.lerp(momentum, beta).sign().to(torch.bfloat16), p))
        rows, columns = p.shape[0], p.numel() // max(1, p.shape[0])
        direction = newton_schulz(sign.reshape(1, rows, columns)).to(torch.float32).reshape(p.shape)
        direction = shard_like(direction, p)
        second = (local_shard(state["second_moment"]) * beta).addcmul_(direction, direction, value=1 - beta)
        scaled = direction / (second.sqrt() + EPS)
        size = RMS * math.sqrt(rows * columns)
        scaled = scaled / (full_tensor(torch.linalg.vector_norm(from_local(scaled, p))) + EPS) * size
        scaled *= matrix_scale(rows, columns, group)
        new = (local_shard(p) * (1 - lr * group["weight_decay"])).add_(scaled, alpha=-lr)
        return {"": new, "momentum": momentum, "second_moment": second}


def matrix_scale(rows: int, columns: int, group: dict[str, Any]) -> float:
    """Return the factor by which the update of a matrix of this shape is multiplied."""
    if group["lr_adjust"] > 0:
        return math.sqrt(max(1.0, rows / columns))
    return float(group["lr_adjust_coeff"] * math.sqrt(max(rows, columns)))
