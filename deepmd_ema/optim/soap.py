"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner for matrices, AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.optim.guarded import (
    ADAM_EPS,
    WEIGHT,
    GuardedOptimizer,
    Out,
    ParameterVector,
    Values,
    adam_state,
)

SIDES = ("left", "right")  # the rows and the columns of a matrix
# The share of the mean of the diagonal of a covariance that is added to it. Where there were no
# gradients yet, any basis is one of eigenvectors, and rounding would choose another on each rank
# and at each zero_stage.
RIDGE = 1e-6

# B matrices of R rows and C columns; n is R or C


class SOAP(GuardedOptimizer):
    """SOAP (Vyas et al., arXiv:2409.11321, algorithm 3) for matrices, AdamW for the rest.

    Dims of size 1 do not count. The first other dim of a parameter is the rows of its matrix, all
    others are the columns. With its gradient g in step t:

        m  <- b1 * m + (1 - b1) * g                               b1, b2 = adam_beta1, adam_beta2
        v  <- b2 * v + (1 - b2) * (U^T g V)^2                     per element
        w  <- (1 - lr * weight_decay) * w
              - lr * U [(U^T m V) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)] V^T
        L  <- shampoo_beta * L + (1 - shampoo_beta) * g g^T       R, of the columns, with g^T g
        U  <- QR(L U)                                             V with R; algorithm 4

    The last line is for the first ``precondition_frequency`` steps of the run and each step that is
    a multiple of it. U and V are the identity at first, and for a side longer than
    ``max_precond_dim``. Sharded matrices are gathered; each rank has all of L, R, U and V of every
    matrix.

    Args:
        params: parameters that are trained, or groups of them.
        options: those of the section SOAP, and ``lr``.
    """

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zero moments and covariances, and bases of unit vectors."""
        shape = self.kind(p, group)
        if shape is None:
            return adam_state(p)
        state = adam_state(p, p.dtype)
        for side, size in zip(SIDES, shape):
            if size <= group["max_precond_dim"]:
                state[side] = torch.zeros(size, size, dtype=p.dtype, device=p.device)
                state[f"{side}_basis"] = torch.eye(size, dtype=p.dtype, device=p.device)
        return state

    def kind(self, p: Tensor, group: dict[str, Any]) -> tuple[int, int] | None:
        """Return rows and columns of a parameter as one matrix, None where it is no matrix.

        It is one with two dims or more that are not of size 1.
        """
        # a parameter with one element has no dim left: (1,) makes it a vector, which takes AdamW
        rows, *inner = (
            (size for size in p.shape if size != 1) if p.numel() != 1 else (1,)
        )
        return (rows, math.prod(inner)) if inner else None

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states by the formulas of the class."""
        shape = self.kind(vector.parameters[0], group)
        if shape is None:
            # lr_adjust is an option of the Muon optimizers: 0 leaves the learning rate as it is
            return self.adam_updated(
                vector,
                values,
                out,
                {**group, "lr_adjust": 0},
                decay=group["weight_decay"],
            )
        # All matrices of this vector have one shape (:meth:`kind`), so each product below is one
        # batched product over (B, R, C).
        lr = group["lr"]
        b1 = group["adam_beta1"]
        b2 = group["adam_beta2"]
        gradient = vector.gradient()
        count = len(vector.parameters)
        # (B, R, R) and (B, C, C); None for a side that is too long, where the basis is the identity
        bases = [
            None
            if values.get(side) is None
            else values[f"{side}_basis"].view(count, n, n)
            for side, n in zip(SIDES, shape)
        ]
        # The mean m is kept in the coordinates of the weights and rotated anew in each step: a
        # change of the bases then needs no correction of m. v is in the basis of its time.
        new = {
            "exp_avg": torch.lerp(
                values["exp_avg"], gradient, 1 - b1, out=out["exp_avg"]
            )
        }
        new["step"] = torch.add(values["step"], 1, out=out["step"])
        g, mean = (
            vector.full(t).view(count, *shape) for t in (gradient, new["exp_avg"])
        )
        in_basis, mean = (rotated(t, bases) for t in (g, mean))
        # this rank keeps its own entries of v, where parameters are sharded
        square = vector.own((in_basis * in_basis).reshape(-1))
        new["exp_avg_sq"] = square = torch.lerp(
            values["exp_avg_sq"], square, 1 - b2, out=out["exp_avg_sq"]
        )
        # in float64: 1 - b2^t loses its digits in float32, where b2^t is close to 1
        wide = new["step"].to(torch.float64)  # (B,)
        rates, corrections = (1 - b1**wide).reciprocal() * lr, 1 - b2**wide
        lengths = (
            square / vector.per_entry(corrections.to(square.dtype))
        ).sqrt() + ADAM_EPS
        direction = (
            vector.own(mean.reshape(-1))
            / lengths
            * vector.per_entry(rates.to(square.dtype))
        )
        # back to the coordinates of the weights: U D V^T, the rotation with transposed bases
        inverse = [None if basis is None else basis.mT for basis in bases]
        direction = rotated(vector.full(direction).view(count, *shape), inverse)
        weights = self.decayed(values[WEIGHT], lr, group["weight_decay"], out[WEIGHT])
        new[WEIGHT] = torch.sub(
            weights, vector.own(direction.reshape(-1)), out=out[WEIGHT]
        )
        # The host decides whether bases are due, which a CUDA graph could not repeat: SOAP has
        # none (training.modes.why_no_graphs), so the number of the step is one of the host.
        number = int(self.number)
        frequency = group["precondition_frequency"]
        # in each of the first steps, because the identity is far from the eigenvectors
        is_due = number <= frequency or number % frequency == 0
        for side, basis, factor in zip(SIDES, bases, (g, g.mT)):
            if basis is not None:
                covariance = (
                    values[side]
                    .view_as(basis)
                    .lerp(factor @ factor.mT, 1 - group["shampoo_beta"])
                )
                new[side] = covariance.reshape(-1)
                if is_due:  # nearer to eigenvectors, by a step of orthogonal iteration
                    ridge = RIDGE * covariance.diagonal(dim1=1, dim2=2).mean(1)  # (B,)
                    basis = torch.linalg.qr(
                        covariance @ basis + ridge[:, None, None] * basis
                    )[0]
                new[f"{side}_basis"] = basis.reshape(-1)
        return new


def rotated(matrices: Tensor, bases: Sequence[Tensor | None]) -> Tensor:
    """Return ``U^T X V`` for matrices X (B, R, C).

    Args:
        matrices: X.
        bases: U (B, R, R) and V (B, C, C); None is the identity.
    """
    left, right = bases
    matrices = matrices if left is None else left.mT @ matrices
    return matrices if right is None else matrices @ right
