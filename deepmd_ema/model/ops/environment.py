"""The smooth switches at the cutoff; the environment matrix of them, normalised, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A atoms, K neighbor slots, S slots up to sel, T types


def switch(distance: Tensor, rcut: float, rcut_smth: float) -> Tensor:
    """Return w(r): 1 below ``rcut_smth``, 0 beyond ``rcut``, with two continuous derivatives between (any shape)."""
    return _value(_reduced(distance, rcut, rcut_smth))


def exponential_switch(distance: Tensor, rcut: float, rcut_smth: float) -> Tensor:
    """Return ``exp(-exp(20 (r - s) / s))``, s = ``rcut_smth``, at most at ``rcut`` (DPA-3, arXiv:2506.01686).

    It is about 1 below 0.8 s and constant beyond ``rcut``, small but not zero.
    """
    exponent = (distance.clamp(max=rcut) - rcut_smth) * (20 / rcut_smth)
    # from 7 on it is zero in float64; larger exponents would give 0 times infinity in the derivative
    return (-exponent.clamp(max=10).exp()).exp()


def switch_and_derivative(distance: Tensor, rcut: float, rcut_smth: float) -> tuple[Tensor, Tensor]:
    """Return w(r) and dw/dr (1/angstrom)."""
    u = _reduced(distance, rcut, rcut_smth)
    return _value(u), (u * (1 - u)).square() * (-30 / (rcut - rcut_smth))


def _reduced(distance: Tensor, rcut: float, rcut_smth: float) -> Tensor:
    return ((distance - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)


def _value(u: Tensor) -> Tensor:
    return u**3 * (-6 * u * u + 15 * u - 10) + 1


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


def normalised_environment(
    vector: Tensor, parts: RadialParts, mean: Tensor, spread: Tensor, dropped: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the normalised environment matrix of a batch and its vector-Jacobian product.

    Args:
        vector: (A, K, 3) float64, angstrom.
        parts: of the lengths of ``vector``.
        mean: (A, K, 4) float64, subtracted from the rows, or (A, K, 1): there is the radial column alone.
        spread: of the shape of ``mean``, the rows are divided by it.
        dropped: (A, K) bool, pairs whose rows are zero after normalisation, or None; no empty slots.
        dtype: precision of the rows.

    Returns:
        The rows (A, K, 4) or (A, K, 1), ``-mean / spread`` in an empty slot, and a function from the gradient by them
        to that by ``vector`` (A, K, 3) float64.
    """
    scale = spread.reciprocal()
    keep = None if dropped is None else (~dropped).unsqueeze(-1).to(scale.dtype)
    if mean.shape[-1] == 1:
        scale = scale if keep is None else scale * keep
        ds_dvector = scale * parts.ds_over_r.unsqueeze(-1) * vector
        rows = (parts.s.unsqueeze(-1) - mean) * scale
        return rows.to(dtype), lambda grad_rows: grad_rows.double() * ds_dvector
    raw = torch.cat([parts.s.unsqueeze(-1), parts.c.unsqueeze(-1) * vector], -1)
    rows = raw.sub_(mean).mul_(scale)
    if keep is not None:
        rows, scale = rows * keep, scale * keep

    def vjp(grad_rows: Tensor) -> Tensor:
        grad = grad_rows.double() * scale
        angular = grad[..., 1:]
        along = parts.ds_over_r * grad[..., 0] + parts.dc_over_r * (vector * angular).sum(-1)
        return torch.addcmul(parts.c.unsqueeze(-1) * angular, along.unsqueeze(-1), vector)

    return rows.to(dtype), vjp
