"""Embedding nets of one number as series of Chebyshev polynomials, evaluated once per site instead of once per pair.

An embedding net G of se_e2_a, se_e2_r and se_atten is a function of one number s per pair. Between the least and the
largest s of a batch, and a little beyond, it is interpolated at the N zeros of a Chebyshev polynomial (Trefethen,
Approximation Theory and Approximation Practice, 2019, chapters 2 to 4). With ``x = (s - centre) / half``::

    G(s) = sum_n c_n T_n(x),    G'(s) = sum_n d_n T_n(x),    c = S G(sites),    d = D c / half

S is the discrete cosine transform and D the derivative of a series. The error falls geometrically with N, the more
slowly the steeper the net; it is estimated from the decay of the coefficients at every evaluation
(:func:`estimated_errors`). A sum over the neighbors of an atom is taken over the polynomials first, and contracted with
the coefficients once per atom::

    sum_k left[k] G(s_k) = (sum_k left[k] T(x_k)) c

So the cost of a net does not grow with the number of pairs, and there is no number per pair and channel. Everything but
the polynomials is a product of matrices, whose sums have a fixed order.

Where G also depends on elements there are several functions of s, and ``left`` has a column for each, which is zero for
the pairs of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, N polynomials, F functions

# of the range of s: at the ends of a series the rounding of its derivative grows with the third power of N
STRETCH = 1.02
MIN_TERMS, FIRST_TERMS = 16, 32
MAX_TERMS = 384  # the rounding of derivatives, which grows with N^1.5, is then still below what float64 allows
MULTIPLE = 4  # of which numbers of terms are multiples
PARTS = 8  # of a series, of which the decay of the last three is compared
# an estimate that is not below it comes from coefficients that do not decay yet: it says nothing about N
UNRESOLVED = 0.1
RESOLVED = 1e-13  # an estimate below it is one of rounding
MARGIN = 2  # the number of terms kept for later batches gives an error so many times smaller than what is accepted
ROUNDING = 1e-14  # of coefficients, over the largest one: measured 3e-15 to 8e-15 with 64 to 512 terms
_TINY = 1e-300
MAX_DECAY = 0.98  # of a part to the next: a slower decay is not resolved, or is that of rounding


class Transform(NamedTuple):
    """Constants of the series of N terms, float64 on the CPU.

    Attributes:
        sites: (N,) the zeros of the polynomial, in -1 to 1.
        solve: (N, N) S, from values at the sites to coefficients, in the signs of the basis.
        slope: (N, N) D S, from values at the sites to the coefficients of the derivative.
        at_sites: (N, N) the basis at the sites.
        steepest: (N,) bounds of the derivatives of the polynomials between the ends of s.
    """

    sites: Tensor
    solve: Tensor
    slope: Tensor
    at_sites: Tensor
    steepest: Tensor


@dataclass(frozen=True)
class SeriesSum:
    """``sum_k left[k] G(s_k)`` over the neighbors of each atom, and its vector-Jacobian product.

    Attributes:
        left: (A, K, C F), a column for each of the F functions, one after the other.
        basis: (N, A, K) the polynomials, with the signs of :func:`signs`.
        coefficients: (2 F N, M) those of the functions, one after the other, then those of their derivatives; functions
            of the parameters of the net.
        value: (A, C, M), a function of the parameters of the net.
    """

    left: Tensor
    basis: Tensor
    coefficients: Tensor
    value: Tensor

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` (A, K, C F) and s (A, K) from that of the value."""
        return _plain_vjp(grad_value, self.coefficients, self.left, self.basis)

    def rows_vjp(self, grad_value: Tensor) -> Tensor:
        """Return the gradient with respect to ``left`` (A, K, C) whose first column is s, from that of the value."""
        return _plain_rows_vjp(grad_value, self.coefficients, self.left, self.basis)


@lru_cache(maxsize=64)
def transform(terms: int) -> Transform:
    """Return the constants of the series of N terms."""
    n, m = np.arange(terms), np.arange(terms)[:, None]
    angles = (n + 0.5) * np.pi / terms
    sign = signs(terms)[:, None]
    at_sites = np.cos(np.outer(angles, n)) * sign.T
    solve = 2 / terms * np.cos(np.outer(n, angles))
    solve[0] /= 2
    # the derivative of T_n is 2 n times the sum of all T_m with m < n and n - m odd, T_0 half (Trefethen, exercise 3.2)
    slope = np.where((n > m) & ((n - m) % 2 == 1), 2.0 * n, 0.0)
    slope[0] /= 2
    steepest = np.minimum(n**2, n / np.sqrt(1 - STRETCH**-2))
    arrays = np.cos(angles), sign * solve, sign * (slope @ solve), at_sites, steepest
    return Transform(*map(torch.from_numpy, arrays))


def estimated_errors(coefficients: Tensor, constants: Transform, half: Tensor) -> tuple[Any, Any]:
    """Return the errors of the derivative, over its largest value, by the terms left out and by rounding.

    The terms that are left out are extrapolated: bounds of the derivatives of the last terms, in three parts of N / 8
    each, decay at least by the slower one of the two ratios of their largest values, and the sum of a geometric series
    follows. Coefficients that are interpolated hold the terms left out once more (Trefethen, theorem 4.2).

    Args:
        coefficients: (2 F N, M), those of the functions and of their derivatives.
        constants: of N terms.
        half: of the length of the range of the series.

    Returns:
        Two numbers, or in a graph that is compiled two scalars.
    """
    terms = len(constants.sites)
    part = terms // PARTS
    values, slopes = coefficients.view(2, -1, terms, coefficients.shape[1]).unbind(0)  # (F, N, M)
    sizes = values.abs().amax((0, 2))
    last = sizes[-3 * part :] * constants.steepest[-3 * part :]
    largest = (constants.at_sites @ slopes).abs().amax() * half
    if torch.compiler.is_dynamo_compiling():
        parts, noise = last.unflatten(0, (3, part)).amax(1).unbind(0), sizes.amax() * constants.steepest[-1]
        return _extrapolated(parts, noise, largest, terms, torch.clamp_min, torch.clamp_max)
    # of lists, because an operation of torch on one number takes longer than all that follows
    numbers, steepest = _listed(last), float(constants.steepest[-1])
    parts = [max(numbers[k * part : (k + 1) * part]) for k in range(3)]
    return _extrapolated(parts, max(_listed(sizes)) * steepest, float(largest), terms, max, min)


def _listed(numbers: Tensor) -> list[float]:
    try:
        return numbers.tolist()
    except RuntimeError:  # a tensor made inside torch.func has no list
        return list(map(float, numbers))


def _extrapolated(
    parts: Sequence[Any], largest: Any, scale: Any, terms: int, at_least: Any, at_most: Any
) -> tuple[Any, Any]:
    """Return both errors of ``estimated_errors``.

    Args:
        parts: the largest derivatives of the terms of the last three parts.
        largest: the derivative of the last term, if it had the largest coefficient.
        scale: the largest derivative of the sum.
        terms: N.
        at_least: maximum of two numbers.
        at_most: minimum of two numbers.
    """
    part = terms // PARTS
    first, second, third = parts
    first, second, scale = (at_least(value, _TINY) for value in (first, second, scale))
    decay = at_most(at_least(second / first, third / second), MAX_DECAY)
    noise = ROUNDING * largest
    left_out = 2 * part * at_least(third - 3 * noise, 0.0) * decay / (1 - decay)
    return left_out / scale, math.sqrt(terms) * noise / scale


def terms_for(terms: int, error: float, accepted: float) -> int:
    """Return how many terms have an error that is accepted, if ``terms`` have ``error``; it falls geometrically."""
    growth = 2.0 if error >= UNRESOLVED else min(2.0, math.log(accepted) / math.log(max(error, RESOLVED)))
    return max(MIN_TERMS, MULTIPLE * math.ceil(growth * terms / MULTIPLE))


def signs(terms: int) -> np.ndarray:
    """Return the signs (N,) of the polynomials of a basis: + + - - and again, with which each step is one addition."""
    return np.where(np.arange(terms) % 4 < 2, 1.0, -1.0)


def series_sum(
    left: Tensor, s: Tensor, coefficients: Tensor, centre: Tensor, half: Tensor, terms: int, is_reference: bool
) -> SeriesSum:
    """Return the sums of series.

    Args:
        left: (A, K, C F).
        s: (A, K), between ``centre - half`` and ``centre + half``.
        coefficients: (2 F N, M).
        centre: of the range of the series.
        half: of the length of the range of the series.
        terms: N.
        is_reference: whether only operations are used that make new tensors.
    """
    return (_plain_sum if is_reference else _sum_by_hand)(left, s, coefficients, centre, half, terms)


def _basis(s: Tensor, centre: Tensor, half: Tensor, terms: int) -> Tensor:
    """Return the basis (N, A, K), in place: ``T_n+1 = 2 x T_n - T_n-1``, up to signs."""
    if s.device.type != "cpu":
        return _plain_basis(s, centre, half, terms)
    twice = (s - centre) * (2 / half)
    out = s.new_empty(terms, *s.shape)
    parts = out.unbind(0)
    parts[0].fill_(1.0)
    torch.mul(twice, 0.5, out=parts[1])
    for n in range(2, terms):
        torch.addcmul(parts[n - 2], twice, parts[n - 1], value=1 - 2 * (n % 2 == 0), out=parts[n])
    return out


def _plain_basis(s: Tensor, centre: Tensor, half: Tensor, terms: int) -> Tensor:
    """Return the same by ``T_m+j = 2 T_m T_j - T_m-j``, with which few operations make all."""
    x = (s - centre) / half
    found = torch.stack([torch.ones_like(x), x])
    while len(found) < terms:
        last = len(found) - 1
        found = torch.cat([found, 2 * found[last] * found[1:] - found[:last].flip(0)])
    return found[:terms] * torch.from_numpy(signs(terms)).to(x).view(-1, 1, 1)


def _plain_sum(left: Tensor, s: Tensor, coefficients: Tensor, centre: Tensor, half: Tensor, terms: int) -> SeriesSum:
    basis = _plain_basis(s, centre, half, terms)
    size = len(coefficients) // 2
    summed = torch.bmm(left.transpose(1, 2), basis.permute(1, 2, 0))
    value = summed.view(summed.shape[0], left.shape[2] * terms // size, size) @ coefficients[:size]
    return SeriesSum(left, basis, coefficients, value)


def _plain_vjp(grad_value: Tensor, coefficients: Tensor, left: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    num_atoms, _, columns = left.shape
    along = (grad_value @ coefficients.T).unflatten(2, (2, -1, len(basis)))
    along = along.transpose(1, 2).reshape(num_atoms, 2 * columns, len(basis))
    of_left, through_s = torch.bmm(along, basis.transpose(0, 1)).transpose(1, 2).split(columns, 2)
    return of_left, (through_s * left).sum(-1)


def _plain_rows_vjp(grad_value: Tensor, coefficients: Tensor, left: Tensor, basis: Tensor) -> Tensor:
    of_left, of_s = _plain_vjp(grad_value, coefficients, left, basis)
    return torch.cat([of_left[..., :1] + of_s.unsqueeze(-1), of_left[..., 1:]], -1)


def _sum_by_hand(left: Tensor, s: Tensor, coefficients: Tensor, centre: Tensor, half: Tensor, terms: int) -> SeriesSum:
    basis = _basis(s.detach(), centre, half, terms)
    value, _ = _SeriesSum.apply(left, s, coefficients, basis)
    return SeriesSum(left, basis, coefficients, value)


class _SeriesSum(torch.autograd.Function):
    """The sum, with a gradient that is differentiable by the coefficients and by the gradient that it is given."""

    @staticmethod
    def forward(left: Tensor, s: Tensor, coefficients: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        num_atoms, _, columns = left.shape
        size = len(coefficients) // 2
        rows = columns * len(basis) // size
        summed = torch.bmm(left.transpose(1, 2), basis.permute(1, 2, 0)).view(num_atoms * rows, size)
        value = torch.mm(summed, coefficients[:size])
        return value.view(num_atoms, rows, coefficients.shape[1]), summed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        left, _, coefficients, basis = inputs
        ctx.save_for_backward(left, coefficients, basis, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        left, coefficients, basis, summed = ctx.saved_tensors
        of_left = of_s = of_coefficients = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            of_left, of_s = _SeriesVjp.apply(grad_value, coefficients, left, basis)
        if ctx.needs_input_grad[2]:
            of_values = summed.T @ grad_value.flatten(0, 1)
            of_coefficients = torch.cat([of_values, torch.zeros_like(of_values)])
        return of_left, of_s, of_coefficients, None


class _SeriesVjp(torch.autograd.Function):
    """Gradients with respect to ``left`` and s, differentiable by the given gradient and the coefficients."""

    @staticmethod
    def forward(grad_value: Tensor, coefficients: Tensor, left: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
        found = _along(grad_value, coefficients, basis)
        of_left, through_s = (found[:, :, part].flatten(1, 2) for part in (0, 1))
        return of_left.transpose(1, 2), (through_s * left.transpose(1, 2)).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_left: Tensor, grad_s: Tensor) -> tuple[Tensor | None, ...]:
        return *_derivative(grad_left, grad_s, *ctx.saved_tensors), None, None


def _along(grad_value: Tensor, coefficients: Tensor, basis: Tensor) -> Tensor:
    """Return (A, C, 2, F, K), products of a gradient (A, C, M) with the functions and their derivatives at each s."""
    terms, num_atoms, num_slots = basis.shape
    along = torch.mm(grad_value.flatten(0, 1), coefficients.T)
    columns, functions = grad_value.shape[1], len(coefficients) // (2 * terms)
    found = torch.bmm(along.view(num_atoms, 2 * columns * functions, terms), basis.transpose(0, 1))
    return found.view(num_atoms, columns, 2, functions, num_slots)


def _derivative(
    grad_left: Tensor, grad_s: Tensor, grad_value: Tensor, coefficients: Tensor, left: Tensor, basis: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients by ``grad_value`` and ``coefficients`` from those by the two results of the product."""
    num_atoms, columns, channels = grad_value.shape
    both = left.new_empty(num_atoms, columns, 2, left.shape[2] // columns, left.shape[1])
    both[:, :, 0] = grad_left.transpose(1, 2).view(both[:, :, 0].shape)
    torch.mul(left.transpose(1, 2).view(both[:, :, 1].shape), grad_s[:, None, None], out=both[:, :, 1])
    summed = torch.bmm(both.flatten(1, 3), basis.permute(1, 2, 0)).view(num_atoms * columns, len(coefficients))
    of_value = torch.mm(summed, coefficients).view(num_atoms, columns, channels)
    return of_value, torch.mm(summed.T, grad_value.flatten(0, 1))
