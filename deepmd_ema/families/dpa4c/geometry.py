"""Envelopes and spherical harmonics of pairs of atoms, and the gradient by their vectors."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.initial import cutoff_envelope
from deepmd_ema.families.dpa4c.readout import NEGLIGIBLE, harmonics, sphere

# A atoms, K neighbor slots, Q = (L + 1)^2 harmonics of degrees 0 to L

EXPONENT = 5  # of the envelope
SLOPE = EXPONENT * math.comb(EXPONENT + 3, 3)  # the derivative of the envelope is -SLOPE x^4 (1 - x)^3
EPS = 1e-7  # angstrom


class Geometry(NamedTuple):
    """Envelopes, harmonics and distances of pairs, in the precision of the descriptor.

    Attributes:
        rows: (A, Q, K), the envelope, then the squared envelope times the harmonics from degree 1 on.
        distance: (A, K) angstrom, at most the cutoff.
        masses: (A, 2) sums of the second and fourth powers of the envelopes.
    """

    rows: Tensor
    distance: Tensor
    masses: Tensor


class PairGeometry(nn.Module):
    """Computes `Geometry` and its vector-Jacobian product.

    The gradient of a solid harmonic is a sum of those of one degree less, so that both need the same numbers.

    Args:
        rcut: cutoff, angstrom.
        lmax: L.
        dtype: precision.
    """

    def __init__(self, rcut: float, lmax: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rcut, self.lmax, self.dtype = rcut, lmax, dtype
        self._slopes: Tensor
        self.register_buffer("_slopes", slopes(lmax).to(dtype), persistent=False)

    def forward(self, vector: Tensor, dropped: Tensor | None) -> tuple[Geometry, GeometryVjp]:
        """Return the numbers of vectors (A, K, 3) without the pairs ``dropped`` (A, K), and their vjp."""
        vector = vector.to(self.dtype).movedim(-1, 1).contiguous()  # A, 3, K
        length = (vector.square().sum(1) + EPS**2).sqrt()
        envelope = cutoff_envelope(length, self.rcut, EXPONENT)
        if dropped is not None:
            envelope = envelope.masked_fill(dropped, 0)
        squared = envelope * envelope
        unit = vector / length[:, None]
        angular = torch.stack(harmonics(unit.unbind(1), self.lmax), 1)
        rows = torch.cat([envelope[:, None], squared[:, None] * angular], 1)
        fourth = squared * squared
        masses = torch.stack([squared.sum(1), fourth.sum(1)], 1)
        found = Geometry(rows, length.clamp(max=self.rcut), masses)
        inside = envelope > 0
        share = (length / self.rcut).clamp(max=1)
        slope = share.square().square() * (1 - share) ** 3 * (-SLOPE / self.rcut) * inside
        return found, GeometryVjp(self._slopes, unit, length, envelope, slope, angular, inside)


class GeometryVjp(NamedTuple):
    """The vector-Jacobian product of a `Geometry`, a linear function.

    Attributes:
        slopes: (3, L^2, Q - 1) of :func:`slopes`.
        unit: (A, 3, K) directions.
        length: (A, K) angstrom.
        envelope: (A, K).
        slope: (A, K) derivative of the envelope by the length.
        angular: (A, Q - 1, K) harmonics.
        inside: (A, K) bool, whether the envelope is above 0.
    """

    slopes: Tensor
    unit: Tensor
    length: Tensor
    envelope: Tensor
    slope: Tensor
    angular: Tensor
    inside: Tensor

    def __call__(self, by_rows: Tensor, by_distance: Tensor, by_masses: Tensor) -> Tensor:
        """Return the gradient (A, K, 3) float64 by the vectors from those by the members of a `Geometry`."""
        envelope, unit, angular = self.envelope, self.unit, self.angular
        squared = envelope * envelope
        by_angular = by_rows[:, 1:]
        second, fourth = by_masses[:, :1], by_masses[:, 1:]
        by_squared = (by_angular * angular).sum(1) + second + 2 * squared * fourth
        along = (by_rows[:, 0] + 2 * envelope * by_squared) * self.slope + by_distance * self.inside
        _, lower, number = self.slopes.shape
        terms = (self.slopes.view(3 * lower, number) @ by_angular).unflatten(1, (3, lower))
        # degree 0 is 1
        by_unit = terms[:, :, 0] + (terms[:, :, 1:] * angular[:, None, : lower - 1]).sum(2)
        by_unit = by_unit * (squared / self.length)[:, None]
        along = along - (unit * by_unit).sum(1)
        return (by_unit + unit * along[:, None]).movedim(1, -1).double()


@lru_cache(maxsize=8)
def slopes(lmax: int) -> Tensor:
    """Return (3, L^2, Q - 1) float64, the derivatives of harmonics of degrees 1 to L as sums of those up to L - 1."""
    points = sphere()[0]
    basis = torch.stack([torch.ones_like(points[0]), *harmonics(points.unbind(0), lmax)[: lmax**2 - 1]], 1)
    derivatives = torch.func.jacrev(lambda u: torch.stack(harmonics(u.unbind(0), lmax)))
    given = torch.vmap(derivatives)(points.T)  # P, Q - 1, 3
    found = torch.linalg.lstsq(basis, given.flatten(1)).solution.unflatten(1, given.shape[1:])
    found = torch.where(found.abs() > math.sqrt(NEGLIGIBLE), found, 0.0)
    return found.permute(2, 0, 1).contiguous()
