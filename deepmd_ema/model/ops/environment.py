"""The smooth switches at the cutoff, and directions, with their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# A atoms, K neighbor slots


def switch_and_derivative(
    distance: Tensor, rcut: float, rcut_smth: float
) -> tuple[Tensor, Tensor]:
    """Return w(r) and dw/dr (1/angstrom), of any shape.

    w is 1 below ``rcut_smth``, 0 beyond ``rcut``, with two continuous derivatives between.
    """
    u = ((distance - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)
    square = u * u
    # 10 - 15 u + 6 u^2; rsub takes a factor beside the difference, in one kernel
    polynomial = torch.rsub(u * torch.rsub(u, 15, alpha=6), 10)
    return torch.rsub(square * u * polynomial, 1), (u - square).square() * (
        -30 / (rcut - rcut_smth)
    )


def exponential_switch_and_derivative(
    distance: Tensor, rcut: float, rcut_smth: float
) -> tuple[Tensor, Tensor]:
    """Return w(r) and dw/dr (1/angstrom) of ``w = exp(-exp(20 (r - s) / s))``, s = ``rcut_smth``.

    It is about 1 below 0.8 s, and has the value at ``rcut`` beyond that, small but not zero (DPA-3,
    arXiv:2506.01686).
    """
    exponent = (distance.clamp(max=rcut) - rcut_smth) * (20 / rcut_smth)
    # from 7 on it is zero in float64; larger exponents would give 0 times infinity in the
    # derivative
    growth = exponent.clamp(max=10).exp()
    weight = (-growth).exp()
    return weight, torch.where(distance < rcut, growth * weight * (-20 / rcut_smth), 0)


class Radial(NamedTuple):
    """The length of vectors and the switch of it, which several functions take; all (A, K)."""

    distance: Tensor  # angstrom
    weight: Tensor
    dweight: Tensor  # dw/dr, 1/angstrom

    @classmethod
    def of(cls, vector: Tensor, rcut: float, rcut_smth: float) -> Radial:
        """Return those of vectors (A, K, 3), angstrom."""
        distance = torch.linalg.vector_norm(vector, dim=-1)
        return cls(distance, *switch_and_derivative(distance, rcut, rcut_smth))


def switch_and_vjp(
    vector: Tensor, mask: Tensor, radial: Radial
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return w (A, K) of vectors (A, K, 3), 0 outside of ``mask`` (A, K), and the vjp of it."""
    # dw/dr times the unit vector, 1/angstrom
    along = torch.where(mask, radial.dweight / radial.distance, 0)[..., None] * vector
    return torch.where(
        mask, radial.weight, 0
    ), lambda grad: grad.double()[..., None] * along


def directions_and_vjp(
    vector: Tensor, mask: Tensor, distance: Tensor, rcut: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return unit vectors (A, K, 3), 0 outside of ``mask`` (A, K) and ``rcut``, and their vjp."""
    inverse = torch.where(mask & (distance < rcut), 1 / distance, 0)[..., None]
    unit = vector * inverse

    def vjp(grad: Tensor) -> Tensor:
        # the derivative of a direction has no part along it: (g - u (u . g)) / r
        grad = grad.double()
        return (
            torch.addcmul(grad, unit, (unit * grad).sum(-1, keepdim=True), value=-1)
            * inverse
        )

    return unit, vjp
