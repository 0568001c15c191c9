"""The environment matrix: smooth, normalised coordinates of the neighbors, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.ops.switch import exponential_switch, switch, switch_and_derivative
from deepmd_ema.model.ops.twin import Kernel

# A atoms, K neighbor slots, S slots up to sel, T types


@dataclass(frozen=True)
class RadialParts:
    """Numbers of each pair at distance r from which the environment matrix and its gradient are made; all (A, K).

    The raw rows are ``(s, c x, c y, c z)`` with ``s = w / (r + p)``, ``c = w / (r + p)^2``, w the smooth switch and p
    the protection.
    """

    s: Tensor
    c: Tensor
    ds_over_r: Tensor
    dc_over_r: Tensor


def radial_parts(distance: Tensor, rcut: float, rcut_smth: float, protection: float) -> RadialParts:
    """Return the radial parts; all are zero beyond ``rcut``, so empty slots have no gradient."""
    weight, dweight = switch_and_derivative(distance, rcut, rcut_smth)
    inverse = (distance + protection).reciprocal()
    s = weight * inverse
    c = s * inverse
    ds = (dweight - s) * inverse
    dc = (ds - c) * inverse
    return RadialParts(s, c, ds / distance, dc / distance)


def environment_rows(
    vector: Tensor, distance: Tensor, rcut: float, rcut_smth: float, protection: float, exponential: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the raw rows ``(s, c x, c y, c z)`` (..., 4) and the switch w (...), for autograd to differentiate.

    Args:
        vector: (..., 3) float64, angstrom.
        distance: (...) its length.
        rcut: cutoff radius, angstrom.
        rcut_smth: start of the switch, angstrom.
        protection: added to distances before division, angstrom.
        exponential: whether w is the exponential switch instead of the polynomial.
    """
    weight = (exponential_switch if exponential else switch)(distance, rcut, rcut_smth)
    inverse = (distance + protection).reciprocal()
    s = weight * inverse
    return torch.cat([s.unsqueeze(-1), (s * inverse).unsqueeze(-1) * vector], -1), weight


class Environment:
    """Normalised environment matrix of a batch and its vector-Jacobian product.

    Args:
        vector: (A, K, 3) float64, angstrom.
        parts: of the lengths of ``vector``.
        mean: (A, K, 4) float64, subtracted from the rows.
        spread: (A, K, 4) float64, the rows are divided by it.
        dropped: (A, K) bool, pairs whose rows are zero after normalisation, or None; no empty slots.
        dtype: precision of the rows.

    Attributes:
        rows: (A, K, 4). An empty slot has the row ``-mean / spread``.
    """

    def __init__(
        self,
        vector: Tensor,
        parts: RadialParts,
        mean: Tensor,
        spread: Tensor,
        dropped: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._vector, self._parts = vector, parts
        self._scale = spread.reciprocal()
        raw = torch.cat([parts.s.unsqueeze(-1), parts.c.unsqueeze(-1) * vector], -1)
        rows = raw.sub_(mean).mul_(self._scale)
        if dropped is not None:
            keep = (~dropped).unsqueeze(-1).to(rows.dtype)
            rows = rows * keep
            self._scale = self._scale * keep
        self.rows = rows.to(dtype)

    def vjp(self, grad_rows: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that with respect to ``rows``."""
        parts = self._parts
        return _rows_vjp(grad_rows.double() * self._scale, self._vector, parts.c, parts.ds_over_r, parts.dc_over_r)


class RadialEnvironment:
    """Radial column of the normalised environment matrix of a batch and its vector-Jacobian product.

    Arguments are those of `Environment`, ``mean`` and ``spread`` with one column.

    Attributes:
        rows: (A, K, 1). An empty slot has the row ``-mean / spread``.
    """

    def __init__(
        self,
        vector: Tensor,
        parts: RadialParts,
        mean: Tensor,
        spread: Tensor,
        dropped: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        scale = spread.reciprocal()
        if dropped is not None:
            scale = scale * (~dropped).unsqueeze(-1)
        self.rows = ((parts.s.unsqueeze(-1) - mean) * scale).to(dtype)
        self._along = scale * parts.ds_over_r.unsqueeze(-1) * vector  # ds/dvector

    def vjp(self, grad_rows: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that with respect to ``rows``."""
        return grad_rows.double() * self._along


def _plain_vjp(grad: Tensor, vector: Tensor, c: Tensor, ds_over_r: Tensor, dc_over_r: Tensor) -> Tensor:
    angular = grad[..., 1:]
    along = ds_over_r * grad[..., 0] + dc_over_r * (vector * angular).sum(-1)
    return torch.addcmul(c.unsqueeze(-1) * angular, along.unsqueeze(-1), vector)


class _RowsVjp(torch.autograd.Function):
    """``_plain_vjp``, differentiable by ``grad`` alone, with a backward pass that writes its four columns once."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, vector: Tensor, c: Tensor, ds_over_r: Tensor, dc_over_r: Tensor) -> Tensor:
        ctx.save_for_backward(vector, c, ds_over_r, dc_over_r)
        return _plain_vjp(grad, vector, c, ds_over_r, dc_over_r)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_vector: Tensor) -> tuple[Tensor, None, None, None, None]:
        vector, c, ds_over_r, dc_over_r = ctx.saved_tensors
        along = (vector * grad_vector).sum(-1)
        out = vector.new_empty(*c.shape, 4)
        out[..., 0] = ds_over_r * along
        torch.addcmul(c.unsqueeze(-1) * grad_vector, (dc_over_r * along).unsqueeze(-1), vector, out=out[..., 1:])
        return out, None, None, None, None


_rows_vjp = Kernel("environment_vjp", _RowsVjp.apply, _plain_vjp)
