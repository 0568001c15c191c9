"""Envelopes and harmonics of pairs of atoms, and features of their moments that do not change under
rotation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, permutations, product
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.layers import Dense, Source
from deepmd_ema.model.families.dpa4.module import cutoff_envelope
from deepmd_ema.model.nn.layers import module_list

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4c.section import DPA4CConfig

# A atoms, C_l channels of degree l, K_l of them in products, Q = (L + 1)^2 harmonics

Triple = tuple[int, int, int]

NEGLIGIBLE = 1e-14
QUADRATURE = 8  # nodes of the polar angle: exact for products of three harmonics of degree 4


def harmonics(u: Sequence[Tensor], lmax: int) -> list[Tensor]:
    """Return the harmonics of degrees 1 to L of directions, one after the other, each without the
    dimension of u.

    Those of a degree have ``sum_m B_m(u) B_m(v) = P_l(u v)`` for unit vectors; of others they are
    homogeneous.

    Args:
        u: x, y and z of directions.
        lmax: L, at most 4.
    """
    x, y, z = u
    xx = x * x
    yy = y * y
    zz = z * z
    rr = xx + yy + zz
    root = math.sqrt
    xy = x * y
    xz = x * z
    yz = y * z
    difference = xx - yy
    found = [x, y, z]
    found += [
        root(3) * xy,
        root(3) * yz,
        1.5 * zz - 0.5 * rr,
        root(3) * xz,
        0.5 * root(3) * difference,
    ]
    if lmax >= 3:
        along = 5 * zz - rr
        odd = 3 * xx - yy
        even = xx - 3 * yy
        found += [
            root(5 / 8) * y * odd,
            root(15) * xy * z,
            root(3 / 8) * y * along,
            0.5 * z * (5 * zz - 3 * rr),
            root(3 / 8) * x * along,
            0.5 * root(15) * z * difference,
            root(5 / 8) * x * even,
        ]
    if lmax >= 4:
        three, one = 7 * zz - 3 * rr, 7 * zz - rr
        found += [
            0.5 * root(35) * xy * difference,
            0.25 * root(70) * yz * odd,
            0.5 * root(5) * xy * one,
            0.25 * root(10) * yz * three,
            0.125 * (35 * zz * zz - 30 * zz * rr + 3 * rr * rr),
            0.25 * root(10) * xz * three,
            0.25 * root(5) * difference * one,
            0.25 * root(70) * xz * even,
            0.125 * root(35) * (xx * xx - 6 * xx * yy + yy * yy),
        ]
    return found


def triples(lmax: int) -> list[Triple]:
    """Return the degrees l1 <= l2 <= l3 of which one product of three is invariant under rotation
    and inversion.
    """
    found = combinations_with_replacement(range(1, lmax + 1), 3)
    return [(a, b, c) for a, b, c in found if c <= a + b and (a + b + c) % 2 == 0]


@lru_cache(maxsize=8)
def couplings(lmax: int) -> dict[Triple, Tensor]:
    """Return the tensors (2 l1 + 1, 2 l2 + 1, 2 l3 + 1) of these products: integrals of three
    harmonics, float64.

    Their norm is 1, and their first number is positive.
    """
    points, weight = sphere()
    basis = torch.stack(harmonics(points.unbind(0), lmax), -1).numpy()
    blocks = [basis[:, degree**2 - 1 : (degree + 1) ** 2 - 1] for degree in range(1, lmax + 1)]
    found = {}
    for degrees in triples(lmax):
        one, two, three = (blocks[degree - 1] for degree in degrees)
        tensor = np.einsum("p,pi,pj,pk->ijk", weight, one, two, three)
        tensor /= np.linalg.norm(tensor)
        first = tensor.flat[np.flatnonzero(np.abs(tensor) > NEGLIGIBLE)[0]]
        found[degrees] = torch.from_numpy(
            np.copysign(1.0, first) * np.where(np.abs(tensor) > NEGLIGIBLE, tensor, 0.0)
        )
    return found


def sphere() -> tuple[Tensor, np.ndarray]:
    """Return points (3, P) of a sphere with their weights (P,), float64."""
    heights, weights = np.polynomial.legendre.leggauss(QUADRATURE)
    angles = 2 * np.pi * np.arange(2 * QUADRATURE) / (2 * QUADRATURE)
    radii = np.sqrt(1 - heights**2)[:, None]
    points = np.stack(
        [radii * np.cos(angles), radii * np.sin(angles), heights[:, None] + 0 * angles]
    )
    return torch.from_numpy(points.reshape(3, -1)), np.repeat(weights, len(angles))


def distinct_products(degrees: Triple, ranks: Sequence[int]) -> tuple[list[int], list[float]]:
    """Return the places of products of channels that differ, and the roots of how often each
    occurs.

    Args:
        degrees: of the three moments.
        ranks: K_l of the degrees 1 to L; places are those in (K_l1, K_l2, K_l3).
    """
    sizes = [ranks[degree - 1] for degree in degrees]
    number: Counter[tuple[int, ...]] = Counter()
    # channels of one degree can be exchanged: the first order is kept
    alike = [
        order
        for order in permutations(range(3))
        if all(degrees[order[k]] == degrees[k] for k in range(3))
    ]
    for channels in product(*map(range, sizes)):
        number[min(tuple(channels[k] for k in order) for order in alike)] += 1
    kept = sorted(number)
    return [(a * sizes[1] + b) * sizes[2] + c for a, b, c in kept], [
        math.sqrt(number[one]) for one in kept
    ]


class InvariantReadout(nn.Module):
    """Features of moments: those of degree 0, products of two, of three, and of four.

    Args:
        config: the section ``model.descriptor``.
        source: of the initial parameters.

    Attributes:
        dim_out: number of features.
    """

    def __init__(self, config: DPA4CConfig, source: Source) -> None:
        super().__init__()
        self.widths = config.widths
        self.ranks = config.ranks
        self.triples = triples(config.lmax)
        self.channel_alignment = module_list(
            Dense(width, width, source.part("alignment", degree))
            for degree, width in enumerate(self.widths[1:3], 1)
        )
        self.probe_projections = nn.ModuleDict()
        for degree, (width, rank) in enumerate(zip(self.widths[1:], self.ranks), 1):
            if rank < width:
                drawn = Dense(width, rank, source.part("probes", degree))
                with torch.no_grad():  # columns of length 1 that are normal to each other
                    drawn.matrix.copy_(torch.linalg.qr(drawn.matrix.double())[0])
                self.probe_projections[str(degree - 1)] = drawn
        for degrees, tensor in couplings(config.lmax).items():
            places, factors = distinct_products(degrees, self.ranks)
            self._keep(f"_coupling_{_digits(degrees)}", tensor.to(source.dtype))
            self._keep(f"_places_{_digits(degrees)}", torch.tensor(places))
            self._keep(f"_factors_{_digits(degrees)}", torch.tensor(factors, dtype=source.dtype))
        for degree, width in enumerate(self.widths[1:], 1):
            row, column = torch.triu_indices(width, width)
            self._keep(f"_pairs_{degree}", row * width + column)
            self._keep(f"_scales_{degree}", (2 - (row == column).double()).sqrt().to(source.dtype))
        of_three = sum(len(distinct_products(degrees, self.ranks)[0]) for degrees in self.triples)
        of_two = sum(width * (width + 1) // 2 for width in self.widths[1:])
        self.dim_out = self.widths[0] + of_two + of_three + self.ranks[0] * self.ranks[1]

    def forward(self, scalar: Tensor, moments: Sequence[Tensor]) -> Tensor:
        """Return the features (A, dim_out).

        Args:
            scalar: (A, C_0) of degree 0.
            moments: (A, 2 l + 1, C_l) of the degrees 1 to L.
        """
        aligned = list(moments)
        for k, layer in enumerate(self.channel_alignment):
            aligned[k] = aligned[k] + layer(aligned[k])
        found = [scalar]
        for degree, moment in enumerate(aligned, 1):
            gram = torch.bmm(moment.transpose(1, 2), moment).flatten(1)
            places, scales = (
                self.get_buffer(f"_pairs_{degree}"),
                self.get_buffer(f"_scales_{degree}"),
            )
            found.append(gram.index_select(1, places) * scales)
        seen = [
            self.probe_projections[str(k)](moment) if str(k) in self.probe_projections else moment
            for k, moment in enumerate(aligned)
        ]
        quartic = scalar[:, :0]
        for degrees in self.triples:
            one, two, three = (seen[degree - 1] for degree in degrees)
            coupling = self.get_buffer(f"_coupling_{_digits(degrees)}")
            # (A, 2 l1 + 1, K2, K3)
            pair = torch.einsum("ijk,ajn,akm->ainm", coupling, two, three)
            full = torch.bmm(one.transpose(1, 2), pair.flatten(2)).flatten(1)
            places, factors = (
                self.get_buffer(f"_{name}_{_digits(degrees)}") for name in ("places", "factors")
            )
            found.append(full.index_select(1, places) * factors)
            if degrees == (
                1,
                1,
                2,
            ):  # matrix of degree 2 times vector: the tensor is that matrix over -5^(1/2)
                quartic = 5 * pair.square().sum(1).transpose(1, 2).flatten(1)
        return torch.cat([*found, quartic], 1)

    def _keep(self, name: str, values: Tensor) -> None:
        self.register_buffer(name, values, persistent=False)


def _digits(degrees: Triple) -> str:
    return "".join(map(str, degrees))


# A atoms, K neighbor slots, Q = (L + 1)^2 harmonics of degrees 0 to L

EXPONENT = 5  # of the envelope
SLOPE = EXPONENT * math.comb(
    EXPONENT + 3, 3
)  # the derivative of the envelope is -SLOPE x^4 (1 - x)^3
EPS = 1e-7  # angstrom


def pair_numbers(
    vector: Tensor, dropped: Tensor | None, rcut: float, lmax: int, slopes: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return envelopes, harmonics and distances of pairs, and their vector-Jacobian product.

    The product is written out: with that of autograd a training step took 1.06 times as long
    (water, L = 2).

    Args:
        vector: (A, K, 3) angstrom, in the precision of the descriptor.
        dropped: (A, K) bool, pairs that do not see each other, or None.
        rcut: cutoff, angstrom.
        lmax: L.
        slopes: of :func:`slopes`, in that precision.

    Returns:
        Rows (A, Q, K), the envelope, then the squared envelope times the harmonics from degree 1
        on; distances (A, K), at most the cutoff; and sums (A, 2) of the second and fourth powers of
        the envelopes. Then a function of the gradients by these three, which returns that by the
        vectors.
    """
    vector = vector.movedim(-1, 1).contiguous()  # A, 3, K
    length = (vector.square().sum(1) + EPS**2).sqrt()
    envelope = cutoff_envelope(length, rcut, EXPONENT)
    if dropped is not None:
        envelope = envelope.masked_fill(dropped, 0)
    squared = envelope * envelope
    unit = vector / length[:, None]
    angular = torch.stack(harmonics(unit.unbind(1), lmax), 1)
    rows = torch.cat([envelope[:, None], squared[:, None] * angular], 1)
    masses = torch.stack([squared.sum(1), (squared * squared).sum(1)], 1)
    inside, share = envelope > 0, (length / rcut).clamp(max=1)
    slope = share.square().square() * (1 - share) ** 3 * (-SLOPE / rcut) * inside

    def vjp(by_rows: Tensor, by_distance: Tensor, by_masses: Tensor) -> Tensor:
        by_angular = by_rows[:, 1:]
        second = by_masses[:, :1]
        fourth = by_masses[:, 1:]
        by_squared = (by_angular * angular).sum(1) + second + 2 * squared * fourth
        along = (by_rows[:, 0] + 2 * envelope * by_squared) * slope + by_distance * inside
        terms = (slopes.flatten(0, 1) @ by_angular).unflatten(1, slopes.shape[:2])
        # degree 0 is 1
        by_unit = terms[:, :, 0] + (terms[:, :, 1:] * angular[:, None, : slopes.shape[1] - 1]).sum(
            2
        )
        by_unit = by_unit * (squared / length)[:, None]
        along = along - (unit * by_unit).sum(1)
        return (by_unit + unit * along[:, None]).movedim(1, -1)

    return (rows, length.clamp(max=rcut), masses), vjp


@lru_cache(maxsize=8)
def slopes(lmax: int) -> Tensor:
    """Return (3, L^2, Q - 1) float64, the derivatives of harmonics of degrees 1 to L as sums of
    those up to L - 1.
    """
    points = sphere()[0]
    basis = torch.stack(
        [torch.ones_like(points[0]), *harmonics(points.unbind(0), lmax)[: lmax**2 - 1]], 1
    )
    derivatives = torch.func.jacrev(lambda u: torch.stack(harmonics(u.unbind(0), lmax)))
    of_points = torch.vmap(derivatives)(points.T)  # P, Q - 1, 3
    found = torch.linalg.lstsq(basis, of_points.flatten(1)).solution.unflatten(
        1, of_points.shape[1:]
    )
    return (
        torch.where(found.abs() > math.sqrt(NEGLIGIBLE), found, 0.0).permute(2, 0, 1).contiguous()
    )
