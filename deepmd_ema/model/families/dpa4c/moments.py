"""Envelopes and harmonics of pairs of atoms, and invariant features of their moments."""

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

NEGLIGIBLE = (
    1e-14  # elements of coupling tensors below it are round-off of the quadrature
)
QUADRATURE = (
    8  # nodes of the polar angle: exact for products of three harmonics of degree 4
)


def harmonics(u: Sequence[Tensor], lmax: int) -> list[Tensor]:
    """Return the harmonics of degrees 1 to L of directions, one after the other.

    Those of a degree have ``sum_m B_m(u) B_m(v) = P_l(u v)`` for unit vectors u and v. They are
    homogeneous polynomials: a vector of length r has r^l times those of its direction.

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
    # x, y, z; orders -l to l from degree 2 on
    values = [x, y, z]
    values += [
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
        values += [
            root(5 / 8) * y * odd,
            root(15) * xy * z,
            root(3 / 8) * y * along,
            0.5 * z * (5 * zz - 3 * rr),
            root(3 / 8) * x * along,
            0.5 * root(15) * z * difference,
            root(5 / 8) * x * even,
        ]
    if lmax >= 4:
        # Legendre factors of orders 1 and 2
        first_order, second_order = 7 * zz - 3 * rr, 7 * zz - rr
        values += [
            0.5 * root(35) * xy * difference,
            0.25 * root(70) * yz * odd,
            0.5 * root(5) * xy * second_order,
            0.25 * root(10) * yz * first_order,
            0.125 * (35 * zz * zz - 30 * zz * rr + 3 * rr * rr),
            0.25 * root(10) * xz * first_order,
            0.25 * root(5) * difference * second_order,
            0.25 * root(70) * xz * even,
            0.125 * root(35) * (xx * xx - 6 * xx * yy + yy * yy),
        ]
    return values


def triples(lmax: int) -> list[Triple]:
    """Return degrees l1 <= l2 <= l3 with a product invariant under rotation and inversion."""
    # the triangle rule of angular momenta, and an even number of factors that change sign
    degrees = combinations_with_replacement(range(1, lmax + 1), 3)
    return [(a, b, c) for a, b, c in degrees if c <= a + b and (a + b + c) % 2 == 0]


@lru_cache(maxsize=8)
def couplings(lmax: int) -> dict[Triple, Tensor]:
    """Return the tensors (2 l1 + 1, 2 l2 + 1, 2 l3 + 1) of the products of `triples`, float64.

    They are integrals of three harmonics. Their norm is 1, and their first number is positive.
    """
    points, weight = sphere()
    basis = torch.stack(harmonics(points.unbind(0), lmax), -1).numpy()
    blocks = [
        basis[:, degree**2 - 1 : (degree + 1) ** 2 - 1] for degree in range(1, lmax + 1)
    ]
    tensors = {}
    for degrees in triples(lmax):
        factors = [blocks[degree - 1] for degree in degrees]
        tensor = np.einsum("p,pi,pj,pk->ijk", weight, *factors)
        tensor /= np.linalg.norm(tensor)
        # a sign by convention, so that it does not depend on the quadrature
        is_element = np.abs(tensor) > NEGLIGIBLE
        first = tensor.flat[np.flatnonzero(is_element)[0]]
        tensor = np.copysign(1.0, first) * np.where(is_element, tensor, 0.0)
        tensors[degrees] = torch.from_numpy(tensor)
    return tensors


def sphere() -> tuple[Tensor, np.ndarray]:
    """Return points (3, P) of a sphere with their weights (P,), float64."""
    # Gauss-Legendre in z and even steps of the angle about z, which are exact for orders below 16
    heights, weights = np.polynomial.legendre.leggauss(QUADRATURE)
    angles = 2 * np.pi * np.arange(2 * QUADRATURE) / (2 * QUADRATURE)
    radii = np.sqrt(1 - heights**2)[:, None]
    points = np.stack(
        [radii * np.cos(angles), radii * np.sin(angles), heights[:, None] + 0 * angles]
    )
    return torch.from_numpy(points.reshape(3, -1)), np.repeat(weights, len(angles))


def distinct_products(
    degrees: Triple, ranks: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the places of products of channels that differ, and the roots of their numbers.

    With the roots as factors, the features have the norm of all products, equal ones included.

    Args:
        degrees: of the three moments.
        ranks: K_l of the degrees 1 to L; places are those in (K_l1, K_l2, K_l3).
    """
    sizes = [ranks[degree - 1] for degree in degrees]
    number: Counter[tuple[int, ...]] = Counter()
    # channels of one degree can be exchanged without a change of the product: of equal products the
    # first one is taken
    alike = [
        order
        for order in permutations(range(3))
        if all(degrees[order[k]] == degrees[k] for k in range(3))
    ]
    for channels in product(*map(range, sizes)):
        number[min(tuple(channels[k] for k in order) for order in alike)] += 1
    distinct = sorted(number)
    places = [(a * sizes[1] + b) * sizes[2] + c for a, b, c in distinct]
    return places, [math.sqrt(number[channels]) for channels in distinct]


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
        # degrees above 2 have one channel, and nothing to align
        self.channel_alignment = module_list(
            Dense(width, width, source.part("alignment", degree))
            for degree, width in enumerate(self.widths[1:3], 1)
        )
        # maps to the fewer channels that enter products of three
        self.probe_projections = nn.ModuleDict()
        for degree, (width, rank) in enumerate(zip(self.widths[1:], self.ranks), 1):
            if rank < width:
                drawn = Dense(width, rank, source.part("probes", degree))
                # columns of length 1 that are normal to each other
                with torch.no_grad():
                    drawn.matrix.copy_(torch.linalg.qr(drawn.matrix.double())[0])
                self.probe_projections[str(degree - 1)] = drawn
        for degrees, tensor in couplings(config.lmax).items():
            places, factors = distinct_products(degrees, self.ranks)
            self._add_buffer(f"_coupling_{_digits(degrees)}", tensor.to(source.dtype))
            self._add_buffer(f"_places_{_digits(degrees)}", torch.tensor(places))
            self._add_buffer(
                f"_factors_{_digits(degrees)}",
                torch.tensor(factors, dtype=source.dtype),
            )
        for degree, width in enumerate(self.widths[1:], 1):
            row, column = torch.triu_indices(width, width)
            self._add_buffer(f"_pairs_{degree}", row * width + column)
            # 2^1/2 beside the diagonal, whose products occur once in the matrix, others twice
            scales = (2 - (row == column).double()).sqrt()
            self._add_buffer(f"_scales_{degree}", scales.to(source.dtype))
        num_triples = sum(
            len(distinct_products(degrees, self.ranks)[0]) for degrees in self.triples
        )
        num_pairs = sum(width * (width + 1) // 2 for width in self.widths[1:])
        num_quartic = self.ranks[0] * self.ranks[1]
        self.dim_out = self.widths[0] + num_pairs + num_triples + num_quartic

    def forward(self, scalar: Tensor, moments: Sequence[Tensor]) -> Tensor:
        """Return the features (A, dim_out).

        Args:
            scalar: (A, C_0) of degree 0.
            moments: (A, 2 l + 1, C_l) of the degrees 1 to L.
        """
        aligned = list(moments)
        for k, layer in enumerate(self.channel_alignment):
            aligned[k] = aligned[k] + layer(aligned[k])
        features = [scalar]
        for degree, moment in enumerate(aligned, 1):
            # (A, C_l^2), a symmetric matrix whose upper triangle is read
            gram = torch.bmm(moment.transpose(1, 2), moment).flatten(1)
            places = self.get_buffer(f"_pairs_{degree}")
            features.append(
                gram.index_select(1, places) * self.get_buffer(f"_scales_{degree}")
            )
        # (A, 2 l + 1, K_l)
        probes = [
            self.probe_projections[str(k)](moment)
            if str(k) in self.probe_projections
            else moment
            for k, moment in enumerate(aligned)
        ]
        quartic = scalar[:, :0]
        for degrees in self.triples:
            first, *pair_factors = (probes[degree - 1] for degree in degrees)
            coupling = self.get_buffer(f"_coupling_{_digits(degrees)}")
            # (A, 2 l1 + 1, K2, K3)
            pair = torch.einsum("ijk,ajn,akm->ainm", coupling, *pair_factors)
            full = torch.bmm(first.transpose(1, 2), pair.flatten(2)).flatten(1)
            places, factors = (
                self.get_buffer(f"_{name}_{_digits(degrees)}")
                for name in ("places", "factors")
            )
            features.append(full.index_select(1, places) * factors)
            # products of four: squared lengths of a matrix of degree 2 times a vector, which the
            # tensor (1, 1, 2) gives over -5^(1/2)
            if degrees == (1, 1, 2):
                quartic = 5 * pair.square().sum(1).transpose(1, 2).flatten(1)
        return torch.cat([*features, quartic], 1)

    def _add_buffer(self, name: str, values: Tensor) -> None:
        # buffers follow from the section, and are not saved
        self.register_buffer(name, values, persistent=False)


def _digits(degrees: Triple) -> str:
    return "".join(map(str, degrees))


# A atoms, K neighbor slots, Q = (L + 1)^2 harmonics of degrees 0 to L

EXPONENT = 5  # p of the envelope, see `cutoff_envelope`
# the derivative of the envelope by x = r / rcut is -SLOPE x^4 (1 - x)^3
SLOPE = EXPONENT * math.comb(EXPONENT + 3, 3)
EPS = 1e-7  # angstrom, added in squares to a length, which then has a derivative at 0


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
    # distances have a derivative inside of the cutoff only, and none where a pair is dropped
    inside, share = envelope > 0, (length / rcut).clamp(max=1)
    slope = share.square().square() * (1 - share) ** 3 * (-SLOPE / rcut) * inside

    def vjp(by_rows: Tensor, by_distance: Tensor, by_masses: Tensor) -> Tensor:
        by_angular = by_rows[:, 1:]
        second = by_masses[:, :1]
        fourth = by_masses[:, 1:]
        by_squared = (by_angular * angular).sum(1) + second + 2 * squared * fourth
        # gradient by the length, (A, K): envelope, its square in the rows, and the distance itself
        along = (
            by_rows[:, 0] + 2 * envelope * by_squared
        ) * slope + by_distance * inside
        terms = (slopes.flatten(0, 1) @ by_angular).unflatten(1, slopes.shape[:2])
        # gradient by the unit vector, (A, 3, K): derivatives of harmonics are sums of harmonics of
        # lower degrees, of which that of degree 0 is 1
        lower = angular[:, None, : slopes.shape[1] - 1]
        by_unit = terms[:, :, 0] + (terms[:, :, 1:] * lower).sum(2)
        by_unit = by_unit * (squared / length)[:, None]
        # a unit vector does not change along itself
        along = along - (unit * by_unit).sum(1)
        return (by_unit + unit * along[:, None]).movedim(1, -1)

    return (rows, length.clamp(max=rcut), masses), vjp


@lru_cache(maxsize=8)
def slopes(lmax: int) -> Tensor:
    """Return (3, L^2, Q - 1) float64, derivatives of harmonics of degrees 1 to L.

    They are sums of harmonics of degrees up to L - 1, whose coefficients are fitted on a sphere.
    """
    points = sphere()[0]
    basis = torch.stack(
        [torch.ones_like(points[0]), *harmonics(points.unbind(0), lmax)[: lmax**2 - 1]],
        1,
    )
    with torch.enable_grad():
        variable = points.clone().requires_grad_()  # (3, P)
        gradients = [
            torch.autograd.grad(value.sum(), variable, retain_graph=True)[0]
            for value in harmonics(variable.unbind(0), lmax)
        ]
    values = torch.stack(gradients).permute(2, 0, 1)  # (P, Q - 1, 3)
    # The default driver starts from pivots that torch does not set: the last bits of its solution
    # differ from process to process, and a restart would not be bitwise.
    solution = torch.linalg.lstsq(basis, values.flatten(1), driver="gels").solution
    coefficients = solution.unflatten(1, values.shape[1:])
    # a fit leaves about 1e-15 where coefficients are 0
    is_element = coefficients.abs() > math.sqrt(NEGLIGIBLE)
    return torch.where(is_element, coefficients, 0.0).permute(2, 0, 1).contiguous()
