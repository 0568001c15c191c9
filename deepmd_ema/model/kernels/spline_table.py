"""Splines of embedding nets with coefficients that are made once, for models that are only evaluated.

The range of s is known from a model alone: from the cutoff, where it is least, to a least distance of two atoms. Pairs
outside of it, nearer than that, are evaluated by the net itself: there is no distance at which a table is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.model.kernels import spline as splines
from deepmd_ema.model.kernels.direct_sum import DirectSum
from deepmd_ema.model.kernels.spline import DEGREE, SplineSum, inputs_at
from deepmd_ema.model.nn.layers import Network

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, B splines, N functions, D slots of
# which some are evaluated directly

# of a derivative, over the largest one of its net (decision 0062)
LARGEST_ERROR = {torch.float64: 1e-10, torch.float32: 1e-6}
MOST = 1024  # intervals
_FIRST, _MULTIPLE = 32, 8  # intervals that are tried first, and of which numbers of them are multiples
_MARGIN = 1e-6  # of the range, for the rounding of s
_SHORTER = 8  # ranges that are tried, each half as long as the one before
_FEWEST = 2  # slots that a graph evaluates directly


@dataclass(frozen=True)
class Table:
    """Spline of the functions of one net.

    Attributes:
        weights: (P,) all parameters of the net for which it holds, in the order of `tensors_of`.
        beside: further inputs of the net, for which it holds, or None.
        low: least s.
        high: largest s.
        spacing: of the knots.
        coefficients: (N B, M).
        pieces: of the splines.
        size: B.
        error: of derivatives, over the largest one.
    """

    weights: Tensor
    beside: Tensor | None
    low: Tensor
    high: Tensor
    spacing: Tensor
    coefficients: Tensor
    pieces: Tensor
    size: int
    error: float

    @property
    def intervals(self) -> int:
        """Between the knots."""
        return self.size - DEGREE

    def cloned(self) -> Table:
        """Return the same table of new tensors."""
        return replace(
            self,
            weights=self.weights.clone(),
            beside=None if self.beside is None else self.beside.clone(),
            low=self.low.clone(),
            high=self.high.clone(),
            spacing=self.spacing.clone(),
            coefficients=self.coefficients.clone(),
            pieces=self.pieces.clone(),
        )

    def holds(self, net: Network, beside: Tensor | None) -> bool:
        """Whether the net has the weights, and the further inputs are those, for which this was made."""
        same = beside is self.beside or (beside is not None and torch.equal(beside, cast("Tensor", self.beside)))
        # numbers, not versions of tensors: `.data` and views of other libraries change weights without a trace
        return same and torch.equal(_flat(tensors_of(net)), self.weights)

    def sum(self, left: Tensor, s: Tensor, is_reference: bool = False) -> SplineSum:
        """Return the sums over pairs that are inside the range."""
        sums = splines._plain_sum if is_reference else splines._sum_in_bands
        return sums(left, s, self.coefficients, self.low, self.spacing, self.pieces, self.size)


class SplineTables:
    """Tables of the nets of a `Spline`, made when they are first asked for and again when weights have changed.

    Args:
        low: least s.
        high: largest s that tables are made for.
        precision: of the nets, for the accuracy.
        fewest: pairs of a batch, below which nets are evaluated at each of them.

    Attributes:
        sealed: tables are neither made nor compared with the weights any more: for graphs that are written to a file.
    """

    def __init__(self, low: float, high: float, precision: torch.dtype, fewest: int = 0) -> None:
        margin = _MARGIN * (high - low)
        self.low, self.high, self.precision, self.fewest = low - margin, high + margin, precision, fewest
        self.sealed = False
        self._kept: tuple[Tensor, list[Tensor]] | None = None
        self._tables: dict[tuple[Network, int], Table] = {}  # a copy of the model has a copy of its nets here

    def kept(self, tensors: list[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what ``make`` makes of tensors, which is kept until one of them has changed."""
        if self._kept is None or not (self.sealed or torch.equal(_flat(tensors), self._kept[0])):
            with torch.no_grad():
                self._kept = _flat(tensors), make()
        return self._kept[1]

    @property
    def by_centre(self) -> bool:
        """Whether there are tables for each element of the centre, which need atoms in the order of their types."""
        return any(which for _, which in self._tables)

    @property
    def made(self) -> list[Table]:
        """The tables that there are."""
        return list(self._tables.values())

    def settle(self) -> None:
        """Make the tables such that they can be copied: those made inside torch.func are wrapped tensors."""
        self._tables = {key: table.cloned() for key, table in self._tables.items()}

    def serve(self, neighbor: Tensor) -> bool:
        """Whether the slots (A, K) of a batch are enough for tables to be less work."""
        return self.sealed or neighbor.numel() >= self.fewest

    def sum(
        self, left: Tensor, s: Tensor, net: Network, beside: Tensor | None, which: int, is_reference: bool = False
    ) -> SplineSum | SplitSum | DirectSum:
        """Return ``sum_k left[k] net(s_k)`` for `Spline.forward`, which has the same arguments."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in net.parameters()):
            return DirectSum(left, s, net, beside)
        key = net, which
        table = self._tables.get(key)
        if not self.sealed and (table is None or not table.holds(net, beside)):
            table = self._tables[key] = make_table(net, beside, self.low, self.high, self.precision, s)
        assert table is not None, "sealed before it was made"
        inside = (s >= table.low) & (s <= table.high)  # not so of nan
        if self.sealed:
            width = _symbolic_width(inside)
        elif inside.all():
            return table.sum(left, s, is_reference)
        else:
            width = int(_last_outside(inside))
        keep = inside.unsqueeze(-1).to(left.dtype)
        far = table.sum(left * keep, torch.where(inside, s, table.low), is_reference)
        near = DirectSum(_first(left * (1 - keep), width), _first(s, width), net, beside)
        return SplitSum(left, far, near, _first(keep, width))


@dataclass(frozen=True)
class SplitSum:
    """What `SplineSum` is, of pairs that are in part evaluated directly.

    Attributes:
        left: (A, K, C N).
        far: of the pairs in the range of the table.
        near: of the others, which are among the first D slots; 0 in ``left`` of the rest of these.
        keep: (A, D, 1), 1 where a pair is in the range.
    """

    left: Tensor
    far: SplineSum
    near: DirectSum
    keep: Tensor

    @property
    def value(self) -> Tensor:
        """The sums (A, C, M)."""
        return self.far.value + self.near.value

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients with respect to ``left`` (A, K, C N) and s (A, K) from that of the value."""
        of_left, of_s = self.near.vjp(grad_value)
        far_left, far_s = self.far.vjp(grad_value)
        width = self.keep.shape[1]
        inside = _placed(self.keep, torch.ones_like(far_left[..., :1]), width)
        beyond = _placed(of_left * (1 - self.keep), torch.zeros_like(far_left), width)
        return far_left * inside + beyond, far_s + _placed(of_s, torch.zeros_like(far_s), width)


def make_table(
    net: Network, beside: Tensor | None, low: float, high: float, precision: torch.dtype, like: Tensor
) -> Table:
    """Return the table with the fewest intervals, in multiples of 8, whose error over the whole range is allowed.

    If 1024 are not enough the range ends earlier; it is empty if the net has a kink.

    Args:
        net: whose functions these are.
        beside: (N, inputs) further inputs that make N functions of the net; None: it has no other.
        low: least s.
        high: largest s.
        precision: of the net, for the accuracy.
        like: with the precision and the device of the coefficients.
    """
    allowed = LARGEST_ERROR[precision]
    for halves in range(_SHORTER):
        found = _fewest(net, beside, low, low + (high - low) / 2**halves, allowed, like)
        if found is not None:
            return found
    none = _with_intervals(net, beside, low, high, _MULTIPLE, like)
    return replace(none, high=none.low - 1)


def _fewest(net: Network, beside: Tensor | None, low: float, high: float, allowed: float, like: Tensor) -> Table | None:
    found, least, intervals = None, _MULTIPLE, _FIRST  # fewer than `least` are not enough
    while least <= intervals <= MOST:
        made = _with_intervals(net, beside, low, high, intervals, like)
        # the error goes with the seventh power of their number
        wanted = intervals * (min(max(made.error, 1e-30), 1e30) / allowed) ** (1 / DEGREE)
        wanted = _MULTIPLE * max(1, math.ceil(wanted / _MULTIPLE))
        if made.error <= allowed:
            found = made
            intervals = min(wanted, intervals - _MULTIPLE)
        else:
            least = intervals + _MULTIPLE
            if found is not None:
                intervals = least
                if intervals + DEGREE >= found.size:
                    break
            else:
                intervals = max(wanted, least)
    return found


def _with_intervals(
    net: Network, beside: Tensor | None, low: float, high: float, intervals: int, like: Tensor
) -> Table:
    device = like.device
    units, solve, pieces = (torch.from_numpy(array).to(device) for array in _made(intervals))
    spacing = max((high - low) / intervals, splines.LEAST_SPACING)
    with torch.no_grad():
        values = net(inputs_at(low + spacing * units, beside))
        coefficients = torch.cat([solve @ function for function in values.unbind(0)])
        error = _error(net, beside, coefficients, low, spacing, pieces)
    # not like.new_tensor: of a tensor inside torch.func it would be one that ends there
    ends = torch.tensor([low, high, spacing], dtype=like.dtype, device=device).unbind(0)
    given = None if beside is None else beside.detach().clone()
    made = coefficients.to(like.dtype), pieces.to(like.dtype)
    return Table(_flat(tensors_of(net)), given, ends[0], ends[1], ends[2], *made, size=len(solve), error=error)


def _error(
    net: Network, beside: Tensor | None, coefficients: Tensor, low: float, spacing: float, pieces: Tensor
) -> float:
    """Return the largest difference of derivatives on the knots and between them, over the largest derivative."""
    functions = 1 if beside is None else len(beside)
    windows = coefficients.view(functions, -1, coefficients.shape[1]).unfold(1, DEGREE + 1, 1)
    largest, worst = 0.0, 0.0
    for place in (0.0, 0.25, 0.5):  # by symmetry not those of the other half
        powers = torch.full_like(pieces[0, :1], place) ** torch.arange(DEGREE + 1, device=pieces.device)
        found = windows @ (powers @ pieces).view(2, -1)[1] / spacing
        s = low + spacing * (place + torch.arange(found.shape[1], device=pieces.device, dtype=torch.float64))
        expected = net.value_and_derivative(inputs_at(s, beside))[1]
        worst = max(worst, float((found - expected).abs().max()))
        largest = max(largest, float(expected.abs().max()))
    return worst / max(largest, torch.finfo(torch.float64).tiny)


@lru_cache(maxsize=16)
def _made(intervals: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (*splines._interpolation(intervals), splines._pieces_and_slopes())


def tensors_of(net: Network) -> list[Tensor]:
    """Return the parameters of a net."""
    return [p for layer in net.stack for p in (layer.weight, layer.bias, layer.idt) if p is not None]


def _flat(tensors: list[Tensor]) -> Tensor:
    """Return a copy of the numbers of tensors, one after the other."""
    return torch.cat([t.detach().flatten() for t in tensors])


def _last_outside(inside: Tensor) -> Tensor:
    """Return one more than the last slot in which any atom has a pair outside of the range."""
    slot = torch.arange(1, inside.shape[1] + 1, device=inside.device)
    return torch.where(inside, 0, slot).amax()


def _symbolic_width(inside: Tensor) -> int:
    """Return the slots that are evaluated directly in a graph: at least 2, as sizes that a graph does not know."""
    width = cast("int", _last_outside(inside).clamp(min=_FEWEST).item())
    torch.sym_constrain_range(width, min=_FEWEST)
    return width


# picked and copied, not sliced: a graph asks whether a slice is shorter than its tensor. There are enough slots with
# `_FEWEST` more


def _first(per_slot: Tensor, width: int) -> Tensor:
    """Return the first slots of (A, K, ...)."""
    more = per_slot.new_zeros(per_slot.shape[0], _FEWEST, *per_slot.shape[2:])
    return torch.cat([per_slot, more], 1).index_select(1, torch.arange(width, device=per_slot.device))


def _placed(first: Tensor, others: Tensor, width: int) -> Tensor:
    """Return ``others`` (A, K, ...) with the first slots exchanged."""
    more = others.new_zeros(others.shape[0], _FEWEST, *others.shape[2:])
    whole = torch.cat([others, more], 1).index_copy(1, torch.arange(width, device=others.device), first)
    return whole.split([others.shape[1], _FEWEST], 1)[0]
