"""Rotations of spherical harmonics into frames of pairs, and exact integrals of three of them.

The coefficients of degree l stand in the order m = -l, ..., l, degree after degree: (l, m) is
number l^2 + l + m. Their basis is that of DeePMD-kit: real harmonics, without the Condon-Shortley
phase, of the vector (x, -y, -z).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.polynomial import Legendre
from numpy.polynomial.legendre import leggauss
from torch import Tensor, nn

# E pairs, D coefficients of all degrees, K orders -M..M in the sequence 0, -1, 1, -2, 2, ...; G
# rotations of a grid, P monomials of degree 2 lmax of a quaternion

# coefficients of polynomials are 0 or much larger; where they are 0, the least-squares fit leaves
# less than this
_NEGLIGIBLE = 1e-11


def num_coefficients(lmax: int) -> int:
    """Return D, the number of coefficients of the degrees from 0 to ``lmax``."""
    return (lmax + 1) ** 2


def degrees(lmax: int) -> list[int]:
    """Return the degree of each of the D coefficients."""
    return [degree for degree in range(lmax + 1) for _ in range(2 * degree + 1)]


def orders(mmax: int) -> list[int]:
    """Return 0, -1, 1, ..., -mmax, mmax."""
    return [0, *(sign * m for m in range(1, mmax + 1) for sign in (-1, 1))]


def quaternions(direction: Tensor) -> Tensor:
    """Return (E, 4) unit quaternions w, x, y, z that turn each direction to the z axis.

    The rest of the rotation, about z, is free: no result depends on it. It is chosen by half spaces
    so that no divisor is small.

    Args:
        direction: (E, 3) unit vectors.
    """
    x, y, z = direction.unbind(-1)
    is_up, zero = z >= 0, torch.zeros_like(z)
    # the upper half space takes the shortest rotation to the z axis, (1 + z, y, -x, 0) over its
    # length (2 + 2 z)^1/2, which goes to 0 at -z; the lower one takes (-x, 0, 1 - z, y) over
    # (2 - 2 z)^1/2
    parts = (
        torch.where(is_up, 1 + z, -x),
        torch.where(is_up, y, zero),
        torch.where(is_up, -x, 1 - z),
        torch.where(is_up, zero, y),
    )
    # abs(z) has a derivative of 0 at 0, which is that of neither half space
    return (
        torch.stack(parts, -1) * (2 + 2 * torch.where(is_up, z, -z)).rsqrt()[..., None]
    )


class FrameRotations(nn.Module):
    """Rows of the Wigner matrices that rotate coefficients, as polynomials of unit quaternions.

    Only rows of the orders up to ``mmax`` are computed. The matrix of a degree is a polynomial of
    degree 2 l; with ``|q| = 1`` all of them are polynomials of degree 2 lmax, so one product gives
    all.

    Args:
        lmax: largest degree.
        mmax: largest order of the rows.
        dtype: of the results.
    """

    def __init__(self, lmax: int, mmax: int, dtype: torch.dtype) -> None:
        super().__init__()
        table, self._degree = _rotation_polynomials(lmax), 2 * lmax
        # (K, D, P): rotations do not mix degrees, so that the rows of one order in all degrees fit
        # in one row, each in the columns of its degree
        rows = np.zeros((2 * mmax + 1, num_coefficients(lmax), len(table)))
        for column, degree in enumerate(degrees(lmax)):
            for k, order in enumerate(orders(mmax)):
                if abs(order) <= degree:
                    rows[k, column] = table[:, degree * (degree + 1) + order, column]
        self._shape = rows.shape[:2]
        self._table: Tensor
        self.register_buffer(
            "_table", torch.tensor(rows, dtype=dtype).flatten(0, 1), persistent=False
        )
        # matrices of 0 and 1: the power of each variable in each monomial
        exponents = torch.tensor(monomials(self._degree)).T
        powers = nn.functional.one_hot(exponents, self._degree + 1).to(dtype)
        self._powers: Tensor  # (4, P, 2 lmax + 1)
        self.register_buffer("_powers", powers, persistent=False)

    def forward(self, quaternion: Tensor) -> Tensor:
        """Return (E, K, D), the elements of the Wigner matrices in rows of the orders up to mmax.

        They are those in row (l, order) and column (l, m), 0 where l has no such order.

        Args:
            quaternion: (E, 4) unit quaternions.
        """
        variables = quaternion.T  # (4, E)
        powers = [torch.ones_like(variables)]
        for _ in range(self._degree):
            powers.append(powers[-1] * variables)
        # (P, E) each: powers are picked by products, not by an index, whose derivative adds in any
        # order on a GPU
        w, x, y, z = torch.bmm(self._powers, torch.stack(powers, 1))
        return (self._table @ (w * x * (y * z))).T.reshape(-1, *self._shape)


def rotation_grid(lmax: int, kmax: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices from coefficients of frames to values on a grid of rotations, and back.

    The functions are the elements of the Wigner matrices in the rows of the orders up to ``kmax``.
    The grid, points of Gauss and Legendre in one angle and even steps in the others, integrates
    products of three of them exactly, so the product of two functions on the grid has the exact
    coefficients.

    Returns:
        (G, D K) and (D K, G).
    """
    z, weight = leggauss(3 * lmax // 2 + 1)
    half = np.arccos(z) / 2
    # halves of the Euler angles: 3 l + 1 even steps integrate products of three functions of orders
    # up to l; rows have orders up to kmax only, and need fewer steps of the last angle
    first, last = (math.pi / n * np.arange(n) for n in (3 * lmax + 1, 3 * kmax + 1))
    a, b, c = (v.ravel() for v in np.meshgrid(last, half, first, indexing="ij"))
    quaternion = np.stack(
        [
            np.cos(b) * np.cos(a + c),
            np.sin(b) * np.cos(a - c),
            np.sin(b) * np.sin(a - c),
            np.cos(b) * np.sin(a + c),
        ],
        1,
    )
    values = FrameRotations(lmax, kmax, torch.float64)(torch.tensor(quaternion)).numpy()
    # (G, K, D) to (G, D K)
    values = values.transpose(0, 2, 1).reshape(len(values), -1)
    weights = np.broadcast_to(
        weight[None, :, None] / (2 * len(first) * len(last)),
        (len(last), len(z), len(first)),
    )
    # the mean square of an element of degree l over all rotations is 1 / (2 l + 1)
    norms = np.repeat(2 * np.array(degrees(lmax)) + 1, 2 * kmax + 1)
    back = values * weights.reshape(-1, 1) * norms
    return values, back.T


def sphere_grid(
    lmax: int, mmax: int, places: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices from coefficients to values on a grid of directions, and back.

    They are normalised as those of e3nn with ``component``. Coefficients of a degree that lacks its
    orders beyond ``mmax`` are enlarged. Products of two functions have the exact coefficients.

    Args:
        lmax: largest degree.
        mmax: largest order of the coefficients.
        places: numbers of the J coefficients among all D, in the order that is wanted.

    Returns:
        (G, J) and (J, G).
    """
    z, weight = leggauss(3 * lmax // 2 + 1)
    # as in `rotation_grid`: exact for products of three functions
    turns = 3 * mmax + 1
    degree = np.array(degrees(lmax))[list(places)]
    enlarged = (
        real_harmonics(lmax, _points_on_circles(z, turns))[:, list(places)]
        * truncation_factors(lmax, mmax)[degree]
    )
    # (G, J), and back with the weights of the points
    to_grid = enlarged / math.sqrt(lmax + 1)
    weights = np.repeat(weight / (2 * turns), turns)[:, None]
    return to_grid, (enlarged * weights * math.sqrt(lmax + 1) * (2 * degree + 1)).T


def _points_on_circles(z: np.ndarray, turns: int) -> np.ndarray:
    """Return unit vectors (Z turns, 3), ``turns`` evenly around the axis at each height (Z,)."""
    angle = 2 * math.pi / turns * np.arange(turns)
    rho = np.sqrt(1 - z**2)
    points = np.stack(
        [
            np.outer(rho, np.cos(angle)),
            np.outer(rho, np.sin(angle)),
            np.outer(z, np.ones(turns)),
        ],
        -1,
    )
    return points.reshape(-1, 3)


def truncation_factors(lmax: int, mmax: int) -> np.ndarray:
    """Return factors of the degrees (lmax + 1,) that make up for orders beyond ``mmax``.

    They are roots of the number of all orders of a degree over that of the orders left.
    """
    return np.array(
        [
            math.sqrt(max(1.0, (2 * degree + 1) / (2 * mmax + 1)))
            for degree in range(lmax + 1)
        ]
    )


def real_harmonics(lmax: int, points: np.ndarray) -> np.ndarray:
    """Return (N, D) real harmonics of unit vectors (N, 3), without Condon-Shortley phase.

    The squares of those of a degree add up to 1.
    """
    x, y, z = points.T
    harmonics = np.empty((len(points), num_coefficients(lmax)))
    for degree in range(lmax + 1):
        for m in range(degree + 1):
            scale = math.sqrt(
                (2 if m else 1)
                * math.factorial(degree - m)
                / math.factorial(degree + m)
            )
            # the derivative of the polynomial times rho^m exp(i m phi): no division by rho at poles
            values = scale * Legendre.basis(degree).deriv(m)(z) * (x + 1j * y) ** m
            harmonics[:, degree * (degree + 1) + m] = values.real
            if m:
                harmonics[:, degree * (degree + 1) - m] = values.imag
    return harmonics


def monomials(degree: int) -> list[tuple[int, int, int, int]]:
    """Return the exponents of all monomials of one degree of four variables.

    Those of degree 1 are the variables in turn.
    """
    return [
        (a, b, c, degree - a - b - c)
        for a in range(degree, -1, -1)
        for b in range(degree - a, -1, -1)
        for c in range(degree - a - b, -1, -1)
    ]


@cache
def _rotation_polynomials(lmax: int) -> np.ndarray:
    """Return (P, D, D), the elements of the Wigner matrices as polynomials of a unit quaternion."""
    exponents = np.array(monomials(2 * lmax))
    # twice as many rotations as monomials determine the coefficients well; with a fixed seed, all
    # runs and ranks have the same table
    random = np.random.default_rng(0)
    sample = random.normal(size=(2 * len(exponents) + 8, 4))
    sample /= np.linalg.norm(sample, axis=1, keepdims=True)
    powers = np.prod(sample[:, None] ** exponents, -1)
    elements = _wigner_matrices(lmax, sample).reshape(len(sample), -1)
    coefficients, *_ = np.linalg.lstsq(powers, elements, rcond=None)
    coefficients[np.abs(coefficients) < _NEGLIGIBLE] = 0
    dim = num_coefficients(lmax)
    return coefficients.reshape(len(exponents), dim, dim)


def _wigner_matrices(lmax: int, quaternion: np.ndarray) -> np.ndarray:
    """Return (N, D, D), the Wigner matrices of unit quaternions (N, 4).

    Their elements are integrals ``int b_i(R r) b_j(r)`` over directions r.
    """
    points = int(2 * lmax + 1)
    # points that integrate products of two functions of degrees up to lmax exactly
    z, weight = leggauss(lmax + 1)
    grid = _points_on_circles(z, points)
    weights = np.repeat(weight / (2 * points), points)
    degree = np.array(degrees(lmax))
    before = _basis(lmax, grid) * weights[:, None] * (2 * degree + 1)
    w, x, y, z = quaternion.T
    # the rotation matrices of the quaternions (N, 3, 3)
    rotation = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    ).transpose(2, 0, 1)
    after = np.stack([_basis(lmax, grid @ matrix.T) for matrix in rotation])
    matrices = after.transpose(0, 2, 1) @ before
    # rotations do not mix degrees: what is left there is round-off
    return np.where(degree[:, None] == degree, matrices, 0)


def _basis(lmax: int, points: np.ndarray) -> np.ndarray:
    """Return (N, D) the basis of the coefficients at unit vectors (N, 3)."""
    # DeePMD-kit's choice of axes (see above), which coefficients in its files have
    return real_harmonics(lmax, points * [1, -1, -1])
