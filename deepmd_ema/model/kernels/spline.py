"""Embedding nets of one number by splines in models that are only evaluated, and the choice between these and series.

An embedding net G of se_e2_a, se_e2_r and se_atten is a function of one number s per pair. Over the range of a table
(:mod:`deepmd_ema.model.kernels.spline_table`) it is interpolated by a spline of degree 7 with uniform knots (de Boor, A
Practical Guide to Splines, 1978). Its B coefficients are linear in the values of the net at a few dozen sites, and
eight of the B-splines are not zero at an s::

    G(s) = sum_b w_b(s) c_b,    c = S G(sites)

A sum over the neighbors of an atom is taken over the B-splines first, and contracted with the coefficients once per
atom::

    sum_k left[k] G(s_k) = (sum_k left[k] w(s_k)) c

So the cost of a net does not grow with the number of pairs, and there is no number per pair and channel. The error goes
with the eighth power of the spacing of the knots, that of the derivative with the seventh.

Where G also depends on elements there are several functions of s, and ``left`` has a column for each, which is zero for
the pairs of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.kernels import series
from deepmd_ema.model.kernels.direct_sum import DirectSum
from deepmd_ema.model.kernels.embedding import embed
from deepmd_ema.model.kernels.series import SeriesSum, Transform
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.reference import UsesOperations

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.model.kernels.spline_table import SplineTables, SplitSum

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, B splines, P = DEGREE + 1, N functions

DEGREE = 7
MARGIN = 12  # intervals beyond both ends, over which the effect of the ends decays by 0.535 each
LEAST_SPACING = 1 / 64  # of knots: nearer ones only amplify the rounding of derivatives
MIN_HALF = 0.5  # of the length of the range of a series, for the same reason
# of the derivative of a series, over the largest one of its net
MAX_ERROR = {torch.float64: 1e-9, torch.float32: 1e-6}
NUMBERS_WORTH_BANDS = 1 << 20  # of dense weights of all atoms, from which on bands are asked for on a CPU
WORTH_TWO_BANDS = 0.8  # of the work in one
NUMBERS_IN_CACHE = 1 << 19  # of the dense weights of a portion of atoms, for each thread of a CPU


@dataclass(frozen=True)
class Basis:
    """The B-splines that are not zero at each s.

    Attributes:
        size: B.
        first: (A, K) int64, the first of P of them.
        values: (A, K, 2, P) their values, and their derivatives with respect to s.
    """

    size: int
    first: Tensor
    values: Tensor


@dataclass(frozen=True)
class SplineSum:
    """``sum_k left[k] G(s_k)`` over the neighbors of each atom, and its vector-Jacobian product.

    Attributes:
        left: (A, K, C N), a column for each of the N functions, one after the other.
        basis: at each s.
        coefficients: (N B, M) of the functions, one after the other; functions of the parameters of the net.
        value: (A, C, M), a function of the parameters of the net.
        is_reference: whether only operations are used that make new tensors.
    """

    left: Tensor
    basis: Basis
    coefficients: Tensor
    value: Tensor
    is_reference: bool

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` (A, K, C N) and s (A, K) from that of the value."""
        basis = self.basis
        vjp = _plain_vjp if self.is_reference else _vjp_in_portions
        return vjp(grad_value, self.coefficients, self.left, basis.first, basis.values, basis.size)


class Spline(UsesOperations):
    """Evaluates embedding nets of one number once per site, or leaves it to the caller to evaluate them at each pair.

    While weights change a net is a series between the ends of each batch (:mod:`deepmd_ema.model.kernels.series`). The
    error of every series is estimated, and one that is too short is not used: it is made again with more terms, or
    the net is evaluated at each pair. A model that is only evaluated reads splines from tables. It has no parameters,
    and no state that files hold.

    Args:
        wanted: ``spline``, ``direct``, or ``auto``, which leaves it to a training run.
        precision: of the nets, for the accuracy.

    Attributes:
        terms: N of the first series of an evaluation; 0: each pair is evaluated directly.
        max_error: of the derivative of a series, over its largest value.
        recording: whether evaluations without gradients are recorded as well.
        needed: terms that are enough for all evaluations since it was set to 0, with a margin; more than `MAX_TERMS` if
            a net was evaluated at each pair.
        direct_numbers: that the layers would have for all pairs of these evaluations, if each was evaluated directly.
        evaluated_sites: at which nets were evaluated instead.
        tables: of a model that is only evaluated; None: the range of s is that of each batch.
    """

    def __init__(self, wanted: str, precision: torch.dtype) -> None:
        super().__init__()
        self.wanted, self.precision, self.terms = wanted, precision, 0
        self.max_error = MAX_ERROR[precision]
        self.recording = False
        self.needed = self.direct_numbers = self.evaluated_sites = 0
        self.tables: SplineTables | None = None
        for name in Transform._fields:  # buffers, because graphs take these as inputs
            self.register_buffer(name, torch.empty(0, dtype=torch.float64), persistent=False)

    def serves(self, batch: Batch) -> bool:
        """Whether the nets are evaluated here for a batch."""
        return self.terms > 0 if self.tables is None else self.tables.serve(batch.neighbor)

    def use(self, terms: int) -> None:
        """Evaluate nets as series that have this length at first from now on; 0: directly."""
        if terms == self.terms:
            return
        self.terms = terms
        if terms:
            for name, value in series.transform(terms)._asdict().items():
                setattr(self, name, value)

    def forward(
        self, left: Tensor, s: Tensor, net: Network, beside: Tensor | None = None, which: int = 0
    ) -> SeriesSum | DirectSum | SplineSum | SplitSum:
        """Return ``sum_k left[k] net(s_k)``, or with further inputs of the net ``sum_kn left[k, n] net(s_k, n)``.

        Args:
            left: (A, K, C N) of each pair.
            s: (A, K) first input of the net.
            net: whose functions of s these are.
            beside: (N, inputs) further inputs that make N functions of the net; None: it has no other.
            which: of several ``beside`` with which the net is evaluated.
        """
        if self.tables is not None:
            return self.tables.sum(left, s, net, beside, which, self.ops.is_reference)
        return self.series(left, s, net, beside)[0]

    def series(
        self, left: Tensor, s: Tensor, net: Network, beside: Tensor | None = None, further: Tensor | None = None
    ) -> tuple[SeriesSum | DirectSum, Tensor]:
        """Return the sums of :meth:`forward` from series, and the values (B, M) of the net at ``further`` (B,) numbers.

        These are evaluated with the sites: a call of the net with few rows takes as long as one with many.
        """
        # those of this batch, so that no s is outside; a list of no pairs has none
        low, high = s.detach().aminmax() if s.numel() else (s.new_zeros(()), s.new_ones(()))
        centre, half = 0.5 * (low + high), (0.5 * series.STRETCH * (high - low)).clamp(min=MIN_HALF)
        terms, constants = self.terms, Transform(*(getattr(self, name) for name in Transform._fields))
        while True:
            # in float64: derivatives amplify the rounding of coefficients by the square of their number
            wide = half.double()
            sites = centre.double() + wide * constants.sites
            inputs = inputs_at(sites if further is None else torch.cat([sites, further.double()]), beside)
            values, beyond = embed(inputs, net).split([terms, inputs.shape[1] - terms], 1)
            coefficients = torch.cat([constants.solve, constants.slope / wide]) @ values  # (N, 2 terms, M)
            coefficients = coefficients.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2)
            with torch.no_grad():
                left_out, rounding = series.estimated_errors(coefficients, constants, wide)
            if torch.compiler.is_dynamo_compiling():
                # a graph has one number of terms: whoever calls it evaluates a batch again that has no finite numbers
                coefficients = torch.where(left_out + rounding > self.max_error, torch.nan, coefficients)
                break
            error = float(left_out)
            if not error + float(rounding) > self.max_error:  # not so of nan, which the sums show
                self._record(terms, error, s, net, beside)
                break
            if terms >= series.MAX_TERMS or 2 * float(rounding) > self.max_error:
                self._record(series.MAX_TERMS + series.MULTIPLE, error, s, net, beside)
                return DirectSum(left, s, net, beside), beyond.flatten(0, 1).to(s.dtype)
            longer = max(terms + series.MULTIPLE, series.terms_for(terms, error, self.max_error))
            terms = min(longer, series.MAX_TERMS)
            constants = series.transform(terms)
        found_sum = series.series_sum(left, s, coefficients.to(s.dtype), centre, half, terms, self.ops.is_reference)
        return found_sum, beyond.flatten(0, 1).to(s.dtype)

    def _record(self, terms: int, error: float, s: Tensor, net: Network, beside: Tensor | None) -> None:
        # evaluations without gradients may be of averaged weights, whose number must not change the training
        if torch.is_grad_enabled() or self.recording:
            self.direct_numbers += s.numel() * sum(layer.weight.shape[1] for layer in net.stack)
            self.evaluated_sites += terms if beside is None else terms * len(beside)
            if terms <= series.MAX_TERMS and math.isfinite(error):
                terms = min(series.terms_for(terms, error, self.max_error / series.MARGIN), series.MAX_TERMS)
            self.needed = max(self.needed, terms)


def inputs_at(s: Tensor, beside: Tensor | None) -> Tensor:
    """Return the inputs (N, S, 1 + further ones) of a net at (S,) numbers, beside each of N rows of further inputs."""
    if beside is None:
        return s[None, :, None]
    further = beside.to(s.dtype)[:, None].expand(-1, len(s), -1)
    return torch.cat([s[:, None].expand(len(beside), -1, -1), further], -1)


def _interpolation(intervals: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sites in units of the spacing, 0 where the first interval begins, and the matrix S (B, sites).

    Sites are the knots and, in the three intervals at each end, the middles: as many as there are B-splines. The
    coefficients near the ends are ill-conditioned, so `MARGIN` intervals more are interpolated than are used.
    """
    count = intervals + 2 * MARGIN
    middles = np.arange((DEGREE - 1) // 2) + 0.5
    sites = np.sort(np.concatenate([np.arange(count + 1), middles, count - middles]))
    first = np.minimum(sites.astype(int), count - 1)
    weights = (sites - first)[:, None] ** np.arange(DEGREE + 1) @ _pieces().T
    matrix = np.zeros((len(sites), count + DEGREE))
    np.put_along_axis(matrix, first[:, None] + np.arange(DEGREE + 1), weights, 1)
    solve = np.linalg.inv(matrix)[MARGIN : MARGIN + intervals + DEGREE]
    return sites - MARGIN, solve


def _pieces() -> np.ndarray:
    """Return (P, P): the coefficients, by powers of u, of each B-spline that is not zero in an interval 0 <= u < 1.

    By the recursion of Cox and de Boor (de Boor, chapter IX, equation 14) for uniform knots.
    """
    pieces = np.ones((1, 1))
    for degree in range(1, DEGREE + 1):
        raised = np.zeros((degree + 1, degree + 1))
        for k, lower in enumerate(pieces):  # the lower spline k rises into k + 1 and falls into k
            raised[k + 1, :-1] += (degree - k - 1) * lower
            raised[k + 1, 1:] += lower
            raised[k, :-1] += (k + 1) * lower
            raised[k, 1:] -= lower
        pieces = raised / degree
    return pieces


def _pieces_and_slopes() -> np.ndarray:
    """Return (P, 2 P): what powers of u are multiplied by for the values and for the derivatives with respect to u."""
    pieces = _pieces()
    slopes = np.zeros_like(pieces)
    slopes[:, :-1] = pieces[:, 1:] * np.arange(1, DEGREE + 1)
    return np.concatenate([pieces, slopes]).T.copy()


def _basis(s: Tensor, low: Tensor, spacing: Tensor, pieces: Tensor, size: int) -> Basis:
    place = (s - low) / spacing
    # a number that is not finite has no place, and is still seen in the weights
    first = place.detach().floor().nan_to_num(0.0).clamp(0, size - DEGREE - 1)
    u = place - first
    powers = [torch.ones_like(u), u]
    for _ in range(DEGREE - 1):
        powers.append(powers[-1] * u)
    per_s = torch.stack([torch.ones_like(spacing), spacing.reciprocal()]).repeat_interleave(DEGREE + 1)
    values = torch.mm(torch.stack(powers).flatten(1).T, pieces * per_s)
    return Basis(size, first.long(), values.view(*s.shape, 2, DEGREE + 1))


def _dense(first: Tensor, values: Tensor, size: int) -> Tensor:
    """Return (A, K, B) with ``values`` (A, K, P) at ``first`` and the places after it, zeros elsewhere."""
    places = first[..., None] + torch.arange(DEGREE + 1, device=first.device)
    return values.new_zeros(*first.shape, size).scatter(-1, places, values)


def _plain_sum(
    left: Tensor, s: Tensor, coefficients: Tensor, low: Tensor, spacing: Tensor, pieces: Tensor, size: int
) -> SplineSum:
    basis = _basis(s, low, spacing, pieces, size)
    # each place is written once: unlike index_add, this has no order that could change
    summed = torch.bmm(left.transpose(1, 2), _dense(basis.first, basis.values[..., 0, :], size))
    value = summed.view(summed.shape[0], left.shape[2] * size // len(coefficients), len(coefficients)) @ coefficients
    return SplineSum(left, basis, coefficients, value, is_reference=True)


def _plain_vjp(
    grad_value: Tensor, coefficients: Tensor, left: Tensor, first: Tensor, values: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    along = (grad_value @ coefficients.T).view(left.shape[0], left.shape[2], size).transpose(1, 2)
    of_left, through_s = (torch.bmm(_dense(first, part, size), along) for part in values.unbind(-2))
    return of_left, (through_s * left).sum(-1)


def _sum_in_bands(
    left: Tensor, s: Tensor, coefficients: Tensor, low: Tensor, spacing: Tensor, pieces: Tensor, size: int
) -> SplineSum:
    basis = _basis(s.detach(), low, spacing, pieces, size)
    # torch reads the signature of such a function at each ``apply``
    sums = _SplineSum.apply if torch.is_grad_enabled() else _SplineSum.forward
    value = sums(left, s, coefficients, basis.first, basis.values, size)
    return SplineSum(left, basis, coefficients, value, is_reference=False)


class _SplineSum(torch.autograd.Function):
    """The sum, with the gradient by ``left`` and s that ``torch.func.vjp`` of a whole descriptor asks for."""

    @staticmethod
    def forward(left: Tensor, s: Tensor, coefficients: Tensor, first: Tensor, values: Tensor, size: int) -> Tensor:
        num_atoms, _, columns = left.shape
        summed = _summed_weights(left, first, values[:, :, 0], size)
        summed = summed.view(num_atoms, columns * size // len(coefficients), len(coefficients))
        value = torch.mm(summed.flatten(0, 1), coefficients)
        return value.view(*summed.shape[:2], coefficients.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        left, _, coefficients, first, values, ctx.size = inputs
        ctx.save_for_backward(coefficients, left, first, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, left, first, values = ctx.saved_tensors
        of_left, of_s = _vjp_in_portions(grad_value, coefficients, left, first, values, ctx.size)
        return of_left, of_s, None, None, None, None


def _vjp_in_portions(
    grad_value: Tensor, coefficients: Tensor, left: Tensor, first: Tensor, values: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    num_atoms, num_slots, columns = left.shape
    along = torch.mm(grad_value.flatten(0, 1), coefficients.T)
    along = along.view(num_atoms, columns, size).transpose(1, 2).contiguous()
    # rows of all P places from any one on: they overlap, and are only read
    rows = along.as_strided((max(num_atoms * size - DEGREE, 0), (DEGREE + 1) * columns), (columns, 1))
    start = first + size * torch.arange(num_atoms, device=first.device)[:, None]
    of_left = left.new_empty(left.shape)
    of_s = left.new_empty(left.shape[:2])
    for part in _portions(first, num_slots * (DEGREE + 1) * columns):
        picked = rows.index_select(0, start[part].flatten()).view(-1, DEGREE + 1, columns)
        both = torch.bmm(values[part].reshape(-1, 2, DEGREE + 1), picked)
        both = both.view(len(start[part]), num_slots, 2, columns)
        of_left[part] = both[:, :, 0]
        of_s[part] = (both[:, :, 1] * left[part]).sum(-1)
    return of_left, of_s


def _summed_weights(left: Tensor, first: Tensor, values: Tensor, size: int) -> Tensor:
    """Return ``sum_k left[k] w(s_k)`` (A, C, B) over the neighbors of each atom.

    Args:
        left: (A, K, C).
        first: (A, K) the first B-spline of each pair.
        values: (A, K, P) of those that are not zero.
        size: B.
    """
    num_atoms, _, columns = left.shape
    bands = _bands(first, size)
    most = max((band.stop - band.start) * (last - start) for band, start, last in bands)
    portions = _portions(first, most)
    kept = values.new_empty(most * max((part.stop - part.start for part in portions), default=0))
    make = values.new_empty if len(bands) == 1 else values.new_zeros
    summed = make(num_atoms, columns, size)
    for part in portions:
        for band, start, last in bands:
            weights = _dense_in(kept, first[part, band] - start, values[part, band], last - start)
            if len(bands) == 1:
                torch.bmm(left[part].transpose(1, 2), weights, out=summed[part])
            else:
                summed[part, :, start:last] += torch.bmm(left[part, band].transpose(1, 2), weights)
    return summed


def _dense_in(kept: Tensor, first: Tensor, values: Tensor, size: int) -> Tensor:
    """Return (A, K, B) dense weights of ``values`` (A, K, P) in ``kept``."""
    places = first[..., None] + torch.arange(DEGREE + 1, device=first.device)
    out = kept[: first.numel() * size].zero_().view(*first.shape, size)
    return out.scatter_(-1, places, values)


def _bands(first: Tensor, size: int) -> list[tuple[slice, int, int]]:
    """Return the slots in one or two bands, each with the first and the end of the B-splines that are not zero there.

    Slots come by distance, so that those of far neighbors need only some of the B-splines. To ask is to wait for a GPU.
    """
    num_slots = first.shape[1]
    whole = [(slice(0, num_slots), 0, size)]
    if first.device.type != "cpu" or num_slots < 2 or first.numel() * size < NUMBERS_WORTH_BANDS:
        return whole
    low, high = (ends.tolist() for ends in first.aminmax(dim=0))
    near = list(zip(accumulate(low, min), accumulate(high, max)))  # of all slots up to each
    far = list(zip(accumulate(low[::-1], min), accumulate(high[::-1], max)))[::-1]  # of all from each on
    work, k = min((k * _width(near[k - 1]) + (num_slots - k) * _width(far[k]), k) for k in range(1, num_slots))
    if work > WORTH_TWO_BANDS * num_slots * size:
        return whole
    return [
        (slice(0, k), near[k - 1][0], near[k - 1][1] + DEGREE + 1),
        (slice(k, num_slots), far[k][0], far[k][1] + DEGREE + 1),
    ]


def _width(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0] + DEGREE + 1


def _portions(first: Tensor, numbers: int) -> list[slice]:
    """Return slices over the atoms, of so many numbers each, that stay in the cache of a CPU; all at once on a GPU."""
    num_atoms = first.shape[0]
    step = max(1, num_atoms)
    if first.device.type == "cpu":
        step = max(1, NUMBERS_IN_CACHE * torch.get_num_threads() // max(1, numbers))
    return [slice(start, min(start + step, num_atoms)) for start in range(0, num_atoms, step)]
