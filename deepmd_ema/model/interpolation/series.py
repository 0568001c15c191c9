"""Embedding nets of one number as series of Chebyshev polynomials, and sums over neighbors.

The range of s is cut into P equal panels. In each of them, and a little beyond, a net G is
interpolated at the N zeros of a Chebyshev polynomial (Trefethen, Approximation Theory and
Approximation Practice, 2019, chapters 2 to 4). With ``x = (s - centre) / half``::

    G(s) = sum_n c_n T_n(x),    G'(s) = sum_n d_n T_n(x),    c = S G(sites),    d = D c / half

S is the discrete cosine transform and D the derivative of a series. The error falls geometrically
with N, the more slowly the steeper the net; it is estimated from the decay of the coefficients
(:func:`estimated_errors`). A sum over the neighbors of an atom is computed over the polynomials
first, and contracted with the coefficients once per atom::

    sum_k left[k] G(s_k) = (sum_k left[k] T(x_k)) c

So the cost of a net does not grow with the number of pairs, and there is no number per pair and
channel. Everything but the polynomials is a product of matrices, whose sums have a fixed order.
Panels are further functions, each with columns of ``left`` that are zero for the pairs of other
panels.
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

from deepmd_ema.model.interpolation.sums import NeighborSum, inputs_at
from deepmd_ema.model.nn.layers import RadialFunctions

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, N polynomials, P
# panels, F functions

# Largest estimated error of the derivative of a series, over its largest value, with which it is
# used; tables, which are made once, aim at a tenth of it. It is no bound: of softplus nets whose
# first layer is 10 or 30 times as steep as that of a new one an eighth of the series are off by
# more, by 1.2e-8 at most.
MAX_ERROR = {torch.float64: 1e-9, torch.float32: 1e-6}
# longer than the range of s: at the ends of a series the rounding of its derivative grows with the
# third power of N
STRETCH = 1.02
MIN_HALF = 0.5  # least half length of a panel: nearer sites only amplify rounding of derivatives
MIN_TERMS = 16
FIRST_TERMS = 32
# the rounding of derivatives, which grows with N^1.5, is then still below what float64 allows
MAX_TERMS = 384
MULTIPLE = 4  # numbers of terms are multiples of it
PARTS = 8  # parts of a series, to compare the decay of the last three
# an estimate that is not below it comes from coefficients that do not decay yet: it says nothing
# about N
UNRESOLVED = 0.1
RESOLVED = 1e-13  # an estimate below it is one of rounding
# error of coefficients, over the largest one: measured 3e-15 to 8e-15 with 64 to 512 terms
ROUNDING = 1e-14
MAX_DECAY = (
    0.98  # from part to part: a slower decay is not resolved, or is that of rounding
)
_TINY = 1e-300


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


@lru_cache(maxsize=64)
def transform(terms: int) -> Transform:
    """Return the constants of the series of N terms."""
    n = np.arange(terms)
    m = n[:, None]
    angles = (n + 0.5) * np.pi / terms
    sign = signs(terms)[:, None]
    at_sites = np.cos(np.outer(angles, n)) * sign.T
    solve = 2 / terms * np.cos(np.outer(n, angles))
    solve[0] /= 2
    # the derivative of T_n is 2 n times the sum of all T_m with m < n and n - m odd, T_0 half
    # (Trefethen, exercise 3.2)
    slope = np.where((n > m) & ((n - m) % 2 == 1), 2.0 * n, 0.0)
    slope[0] /= 2
    # |T_n'| is at most n^2 at the ends of a series, and n / sqrt(1 - x^2) at x, here at 1 / STRETCH
    steepest = np.minimum(n**2, n / np.sqrt(1 - STRETCH**-2))
    arrays = np.cos(angles), sign * solve, sign * (slope @ solve), at_sites, steepest
    return Transform(*map(torch.from_numpy, arrays))


def signs(terms: int) -> np.ndarray:
    """Return the signs (N,) of the polynomials of a basis: + + - - and again.

    With these each step of the recurrence is one addition.
    """
    return np.where(np.arange(terms) % 4 < 2, 1.0, -1.0)


@dataclass(frozen=True)
class Series:
    """The functions of a net on a range of s.

    Attributes:
        centres: (P,) of the panels.
        half: () of the length of a panel, with what it is interpolated beyond its ends.
        coefficients: (2 F P N, M) those of the functions, one after the other, in each panel, then
            those of their derivatives; functions of the parameters of the net.
        terms: N.
        error: of the derivatives, over their largest value, as it is estimated.
    """

    centres: Tensor
    half: Tensor
    coefficients: Tensor
    terms: int
    error: float

    def sum(
        self,
        left: Tensor,
        s: Tensor,
        in_place: bool = True,
        beyond: Tensor | None = None,
    ) -> SeriesSum:
        """Return the sums over neighbors.

        Args:
            left: (A, K, C F).
            s: (A, K) in the range.
            in_place: whether polynomials are made in place, which is for eager mode and not
                differentiable twice by s.
            beyond: of the sum.
        """
        panels = len(self.centres)
        sums = _sum_in_place if in_place else _plain_sum
        wide = left
        centre = self.centres[0]
        panel = None
        if panels > 1:
            width = self.centres[1] - centre
            # nan has no panel: it takes the first one, and shows in the sums
            place = (
                ((s.detach() - centre) / width)
                .round()
                .nan_to_num(0.0)
                .clamp(0, panels - 1)
            )
            panel = place.long()
            index = panel[..., None, None].expand(*left.shape, 1)
            # (A, K, C F P): a column of a pair is 0 but for the panel of its s
            wide = left.new_zeros(*left.shape, panels).scatter(
                3, index, left.unsqueeze(3)
            )
            wide = wide.flatten(2)
            centre = centre + width * place
        value, basis = sums(wide, s, self.coefficients, centre, self.half, self.terms)
        return SeriesSum(left, basis, self.coefficients, value, panel, beyond)


class Fit(NamedTuple):
    """Result of an interpolation.

    Attributes:
        series: None: no number of terms has the accepted error.
        beyond: (B, M), the net at further numbers.
        terms: that were tried last.
        error: of these, by the terms left out.
    """

    series: Series | None
    beyond: Tensor
    terms: int
    error: float


def fit(
    net: RadialFunctions,
    beside: Tensor | None,
    centres: Tensor,
    half: Tensor,
    constants: Transform,
    max_error: float,
    further: Tensor | None = None,
) -> Fit:
    """Interpolate a net with as many terms as its error allows.

    A series whose error is too large is made again with as many terms as the decay of its
    coefficients requires, at most ``MAX_TERMS``. A graph that is compiled has one number of terms,
    and nan if these are too few: its caller evaluates such a batch again.

    Args:
        net: G.
        beside: (F, inputs) further inputs that make F functions of the net; None: it has no other.
        centres: (P,) of the panels, with the precision of the sums.
        half: () of the length of a panel.
        constants: of the number of terms that is tried first.
        max_error: that is accepted.
        further: (B,) numbers at which the net is evaluated as well: a call with few rows takes as
            long as with many.
    """
    # in float64: derivatives amplify the rounding of coefficients by the square of their number
    wide = half.double()
    panels = len(centres)
    while True:
        terms = len(constants.sites)
        # (P N,) sites of all panels, then the further numbers: one call of the net
        sites = (centres.double().unsqueeze(1) + wide * constants.sites).flatten()
        numbers = sites if further is None else torch.cat([sites, further.double()])
        inputs = inputs_at(numbers, beside)
        values, beyond = net(inputs).split(
            [panels * terms, inputs.shape[1] - panels * terms], 1
        )
        values = values.unflatten(1, (panels, terms)).flatten(0, 1)  # (F P, N, M)
        # the coefficients of the functions and of their derivatives, (F P, 2 N, M)
        coefficients = torch.cat([constants.solve, constants.slope / wide]) @ values
        coefficients = coefficients.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)
        beyond = beyond.flatten(0, 1).to(half.dtype)
        with torch.no_grad():
            left_out, rounding = estimated_errors(coefficients, constants, wide)
        if torch.compiler.is_dynamo_compiling():
            coefficients = torch.where(
                left_out + rounding > max_error, torch.nan, coefficients
            )
            series = Series(centres, half, coefficients.to(half.dtype), terms, 0.0)
            return Fit(series, beyond, terms, 0.0)
        left_out, rounding = float(left_out), float(rounding)
        if (
            not left_out + rounding > max_error
        ):  # also for nan, which then shows in the sums
            error = left_out + rounding
            series = Series(centres, half, coefficients.to(half.dtype), terms, error)
            return Fit(series, beyond, terms, left_out)
        # more terms round more: they help only if the terms left out are most of the error
        if terms >= MAX_TERMS or 2 * rounding > max_error:
            return Fit(None, beyond, terms, left_out)
        longer = max(terms + MULTIPLE, terms_for(terms, left_out, max_error))
        constants = transform(min(longer, MAX_TERMS))


def terms_for(terms: int, error: float, accepted: float) -> int:
    """Return the number of terms with an accepted error, if ``terms`` have ``error``.

    The error falls geometrically, so that its logarithm is proportional to the number of terms.
    """
    growth = 2.0
    if error < UNRESOLVED:
        growth = min(growth, math.log(accepted) / math.log(max(error, RESOLVED)))
    return max(MIN_TERMS, MULTIPLE * math.ceil(growth * terms / MULTIPLE))


def estimated_errors(
    coefficients: Tensor, constants: Transform, half: Tensor
) -> tuple[Any, Any]:
    """Return the errors of the derivative by the terms left out and by rounding.

    Both are over its largest value.

    The terms that are left out are extrapolated: bounds of the derivatives of the last terms, in
    three parts of N / 8 each, decay at least by the slower one of the two ratios of their largest
    values, and the sum of a geometric series follows. Coefficients that are interpolated hold the
    terms left out once more (Trefethen, theorem 4.2).

    Args:
        coefficients: (2 F P N, M), those of the functions and of their derivatives.
        constants: of N terms.
        half: of the length of a panel.

    Returns:
        Two numbers, or in a graph that is compiled two scalars.
    """
    terms = len(constants.sites)
    part = terms // PARTS
    values, slopes = coefficients.view(2, -1, terms, coefficients.shape[1]).unbind(
        0
    )  # (F P, N, M)
    sizes = values.abs().amax((0, 2))  # (N,)
    last = sizes[-3 * part :] * constants.steepest[-3 * part :]
    noise: Any = sizes.amax() * constants.steepest[-1]
    scale: Any = (constants.at_sites @ slopes).abs().amax() * half
    at_least: Any = torch.clamp_min
    at_most: Any = torch.clamp_max
    parts: Sequence[Any]
    if torch.compiler.is_dynamo_compiling():
        parts = last.unflatten(0, (3, part)).amax(1).unbind(0)
    else:
        # in numbers of Python, because an operation of torch on one number takes longer than all
        # that follows
        joined = torch.cat([last, noise.view(1), scale.view(1)])
        try:
            numbers = joined.tolist()
        except RuntimeError:  # a tensor made inside torch.func has no list
            numbers = list(map(float, joined))
        noise, scale = numbers[-2:]
        parts = [max(numbers[k * part : (k + 1) * part]) for k in range(3)]
        at_least = max
        at_most = min
    # two of them are divisors
    first = at_least(parts[0], _TINY)
    second = at_least(parts[1], _TINY)
    third = parts[2]
    scale = at_least(scale, _TINY)
    decay = at_most(at_least(second / first, third / second), MAX_DECAY)
    noise = ROUNDING * noise
    left_out = 2 * part * at_least(third - 3 * noise, 0.0) * decay / (1 - decay)
    return left_out / scale, math.sqrt(terms) * noise / scale


@dataclass(frozen=True)
class SeriesSum(NeighborSum):
    """The sum with a series.

    Attributes:
        left: (A, K, C F).
        basis: (N, A, K) the polynomials, with the signs of :func:`signs`.
        coefficients: (2 F P N, M) of :class:`Series`.
        value: (A, C, M).
        panel: (A, K) int64 of each pair; None: there is one.
        beyond: (B, M), the net at further numbers, if there were any.
    """

    left: Tensor
    basis: Tensor
    coefficients: Tensor
    value: Tensor
    panel: Tensor | None = None
    beyond: Tensor | None = None

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` and s from that of the value."""
        num_atoms, columns = grad_value.shape[:2]
        num_slots = self.left.shape[1]
        terms = len(self.basis)
        functions = self.left.shape[2] // columns
        # (A, C 2 F P, N): the gradient by the polynomials, for values and for slopes
        along = grad_value @ self.coefficients.T
        along = along.view(num_atoms, columns * len(self.coefficients) // terms, terms)
        grads = torch.bmm(along, self.basis.transpose(0, 1))  # (A, C 2 F P, K)
        if self.panel is not None:
            rows = 2 * columns * functions
            grads = grads.view(num_atoms, rows, grads.shape[1] // rows, num_slots)
            grads = grads.gather(2, self.panel[:, None, None].expand(-1, rows, 1, -1))
        grad_left, through_s = grads.view(
            num_atoms, columns, 2, functions, num_slots
        ).unbind(2)
        grad_s = (through_s.flatten(1, 2) * self.left.transpose(1, 2)).sum(1)
        return grad_left.flatten(1, 2).transpose(1, 2), grad_s


def _sum_in_place(
    left: Tensor,
    s: Tensor,
    coefficients: Tensor,
    centre: Tensor,
    half: Tensor,
    terms: int,
) -> tuple[Tensor, Tensor]:
    """Return the sums of series of one panel, and the basis (N, A, K).

    Args:
        left: (A, K, C F).
        s: (A, K), between ``centre - half`` and ``centre + half``.
        coefficients: (2 F N, M).
        centre: of the range of the series, () or (A, K).
        half: of the length of the range of the series.
        terms: N.
    """
    # T_n+1 = 2 x T_n - T_n-1, up to signs, with which a step is one operation in place
    twice = (s.detach() - centre) * (2 / half)
    basis = s.new_empty(terms, *s.shape)
    parts = basis.unbind(0)
    parts[0].fill_(1.0)
    torch.mul(twice, 0.5, out=parts[1])
    for n in range(2, terms):
        torch.addcmul(
            parts[n - 2], twice, parts[n - 1], value=1 - 2 * (n % 2 == 0), out=parts[n]
        )
    # torch reads the signature of a function at each ``apply``, which takes longer than many an
    # operation
    sums = _SeriesSum.apply if torch.is_grad_enabled() else _SeriesSum.forward
    return sums(left, s, coefficients, basis)[0], basis


def _plain_sum(
    left: Tensor,
    s: Tensor,
    coefficients: Tensor,
    centre: Tensor,
    half: Tensor,
    terms: int,
) -> tuple[Tensor, Tensor]:
    """Return the same by ``T_m+j = 2 T_m T_j - T_m-j``.

    Few operations make all polynomials: each step doubles their number.
    """
    x = (s - centre) / half
    # the polynomials are last in memory: inductor refuses a bmm with strides that are products of
    # unknown sizes
    polynomials = torch.stack([torch.ones_like(x), x], -1)
    while polynomials.shape[-1] < terms:
        last = polynomials[..., -1:]
        higher = 2 * last * polynomials[..., 1:] - polynomials[..., :-1].flip(-1)
        polynomials = torch.cat([polynomials, higher], -1)
    basis = polynomials[..., :terms] * torch.from_numpy(signs(terms)).to(x)
    basis = basis.permute(2, 0, 1)
    size = len(coefficients) // 2
    summed = torch.bmm(left.transpose(1, 2), basis.permute(1, 2, 0))
    summed = summed.view(summed.shape[0], left.shape[2] * terms // size, size)
    return summed @ coefficients[:size], basis


class _SeriesSum(torch.autograd.Function):
    """The sum, with the gradient by ``left`` and s for ``torch.func.vjp`` of a descriptor."""

    @staticmethod
    def forward(
        left: Tensor, s: Tensor, coefficients: Tensor, basis: Tensor
    ) -> tuple[Tensor, Tensor]:
        num_atoms = left.shape[0]
        columns = left.shape[2]
        size = len(coefficients) // 2
        rows = columns * len(basis) // size
        # (A C, F P N): all polynomials of a row are contracted with the coefficients at once
        summed = torch.bmm(left.transpose(1, 2), basis.permute(1, 2, 0))
        summed = summed.view(num_atoms * rows, size)
        value = torch.mm(summed, coefficients[:size])
        return value.view(num_atoms, rows, coefficients.shape[1]), summed

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]
    ) -> None:
        left, _, coefficients, basis = inputs
        ctx.save_for_backward(left, coefficients, basis, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        left, coefficients, basis, summed = ctx.saved_tensors
        grad_left = grad_s = grad_coefficients = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            pair_sum = SeriesSum(left, basis, coefficients, grad_value)
            grad_left, grad_s = pair_sum.vjp(grad_value)
        if ctx.needs_input_grad[2]:
            # the value does not depend on the coefficients of the derivatives
            grad_values = summed.T @ grad_value.flatten(0, 1)
            grad_coefficients = torch.cat([grad_values, torch.zeros_like(grad_values)])
        return grad_left, grad_s, grad_coefficients, None
