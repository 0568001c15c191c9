"""The smooth switch with which neighbors appear at the cutoff."""

from __future__ import annotations

from torch import Tensor


def switch(distance: Tensor, rcut: float, rcut_smth: float) -> Tensor:
    """Return w(r): 1 below ``rcut_smth``, 0 beyond ``rcut``, with two continuous derivatives between (any shape)."""
    return _value(_reduced(distance, rcut, rcut_smth))


def switch_and_derivative(distance: Tensor, rcut: float, rcut_smth: float) -> tuple[Tensor, Tensor]:
    """Return w(r) and dw/dr (1/angstrom)."""
    u = _reduced(distance, rcut, rcut_smth)
    return _value(u), (u * (1 - u)).square() * (-30 / (rcut - rcut_smth))


def _reduced(distance: Tensor, rcut: float, rcut_smth: float) -> Tensor:
    return ((distance - rcut_smth) / (rcut - rcut_smth)).clamp(0, 1)


def _value(u: Tensor) -> Tensor:
    return u**3 * (-6 * u * u + 15 * u - 10) + 1
