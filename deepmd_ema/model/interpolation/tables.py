"""Tables of embedding nets: series made once, for models that are only evaluated.

The range of s is known from a model alone: from the cutoff, where it is least, to a least distance
of two atoms. Pairs outside of it, nearer than that, are evaluated by the net itself: no number is
extrapolated, at any distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from deepmd_ema.model.interpolation.series import (
    MAX_ERROR,
    MIN_HALF,
    MIN_TERMS,
    STRETCH,
    Series,
    fit,
    terms_for,
    transform,
)
from deepmd_ema.model.interpolation.sums import DirectSum, NeighborSum
from deepmd_ema.model.nn.layers import RadialFunctions

# A atoms, K neighbor slots, C columns of what is summed, M channels of the net, F functions, D
# slots of which some are evaluated directly

PANELS = 4  # a sum costs about as much with 2 and with 4; with one it is up to 1.7 times slower
MARGIN = (
    10  # tables aim at an error so many times smaller than the one that is accepted
)
_ENDS = 1e-6  # part of the range that is added at its ends, for the rounding of s
_MIN_DIRECT = 2  # slots that a graph evaluates directly


@dataclass(frozen=True)
class Table:
    """The functions of one net between two numbers.

    Attributes:
        source: the numbers that it was made of.
        low: least s.
        high: largest s.
        series: None: the net cannot be interpolated, and is evaluated at each pair.
        beyond: (B, M), the net at further numbers, if there were any.
    """

    source: Tensor
    low: Tensor
    high: Tensor
    series: Series | None
    beyond: Tensor


class Tables:
    """Tables of the nets of one `Interpolation`.

    They are made when they are first used, and again when weights have changed.

    Args:
        low: least s.
        high: largest s that tables are made for.
        precision: of the nets, for the accuracy.
        min_pairs: of a batch, below which nets are evaluated at each of them.
        longest: largest number of terms of a table that is used; the net is evaluated at each pair
            instead.

    Attributes:
        sealed: tables are neither made nor compared with the weights any more: for graphs that are
            written to a file.
    """

    def __init__(
        self,
        low: float,
        high: float,
        precision: torch.dtype,
        min_pairs: int,
        longest: float,
    ) -> None:
        margin = _ENDS * (high - low)
        self.low = low - margin
        self.high = high + margin
        self.precision = precision
        self.min_pairs = min_pairs
        self.longest = longest
        self.sealed = False
        # by net and `which`: in a copy of the model the keys are copies of the nets
        self._tables: dict[tuple[RadialFunctions, int], Table] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy.

        Tensors that were made inside torch.func are wrapped, and cannot be copied.
        """
        tables = {key: _cloned(table) for key, table in self._tables.items()}
        return vars(self) | {"_tables": tables}

    @property
    def made(self) -> list[Series]:
        """The series that are used."""
        return [
            t.series
            for t in self._tables.values()
            if t.series and t.series.terms <= self.longest
        ]

    @property
    def by_centre(self) -> bool:
        """Whether there are tables for each element of the centre.

        These need atoms in the order of their types.
        """
        return any(which for _, which in self._tables)

    def serve(self, neighbor: Tensor) -> bool:
        """Whether the slots (A, K) of a batch are enough for tables to be less work."""
        return self.sealed or neighbor.numel() >= self.min_pairs

    def sum(
        self,
        left: Tensor,
        s: Tensor,
        net: RadialFunctions,
        beside: Tensor | None,
        which: int,
        in_place: bool = True,
        further: Tensor | None = None,
    ) -> NeighborSum:
        """Return ``sum_k left[k] net(s_k)`` for `Interpolation.forward`, with its arguments."""
        # tables have no gradients by parameters
        if torch.is_grad_enabled() and any(p.requires_grad for p in net.parameters()):
            beyond = None if further is None else net(further[:, None])
            return DirectSum(left, s, net, beside, beyond)
        table = self._tables.get((net, which))
        if table is None or not self.sealed:
            # numbers, not versions of tensors: `.data` and views of other libraries change weights
            # without a trace
            made_of = [
                *net.parameters(),
                *(t for t in (beside, further) if t is not None),
            ]
            source = torch.cat([t.detach().flatten() for t in made_of])
            if table is None or not torch.equal(source, table.source):
                with torch.no_grad():
                    table = make_table(
                        net,
                        beside,
                        self.low,
                        self.high,
                        self.precision,
                        s,
                        source,
                        further,
                    )
                self._tables[net, which] = table
        if table.series is None or table.series.terms > self.longest:
            return DirectSum(left, s, net, beside, table.beyond)
        inside = (s >= table.low) & (s <= table.high)  # false for nan
        if self.sealed:
            width = _symbolic_width(inside)
        elif inside.all():
            return table.series.sum(left, s, in_place, table.beyond)
        else:
            width = int(_last_outside(inside))
        # each pair is in one of two sums: with the table, or with the net in the first slots
        keep = inside.unsqueeze(-1).to(left.dtype)
        far = table.series.sum(left * keep, torch.where(inside, s, table.low), in_place)
        near = DirectSum(
            _first(left * (1 - keep), width), _first(s, width), net, beside
        )
        return SplitSum(left, far, near, _first(keep, width), table.beyond)


class SplitSum(NeighborSum):
    """The sum where some pairs are evaluated directly.

    Args:
        left: (A, K, C F).
        far: of the pairs in the range of the table.
        near: of the others, which are among the first D slots; 0 in ``left`` of the rest of these.
        keep: (A, D, 1), 1 where a pair is in the range.
        beyond: as of the sum.
    """

    def __init__(
        self,
        left: Tensor,
        far: NeighborSum,
        near: NeighborSum,
        keep: Tensor,
        beyond: Tensor,
    ) -> None:
        self.left = left
        self.value = far.value + near.value
        self.beyond = beyond
        self._far = far
        self._near = near
        self._keep = keep

    def vjp(self, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by ``left`` (A, K, C F) and s (A, K) from that by the value."""
        near_left, near_s = self._near.vjp(grad_value)
        far_left, far_s = self._far.vjp(grad_value)
        width = self._keep.shape[1]
        inside = _placed(self._keep, torch.ones_like(far_left[..., :1]), width)
        beyond = _placed(
            near_left * (1 - self._keep), torch.zeros_like(far_left), width
        )
        return far_left * inside + beyond, far_s + _placed(
            near_s, torch.zeros_like(far_s), width
        )


def make_table(
    net: RadialFunctions,
    beside: Tensor | None,
    low: float,
    high: float,
    precision: torch.dtype,
    like: Tensor,
    source: Tensor,
    further: Tensor | None = None,
) -> Table:
    """Return the table of a net with the fewest terms whose error over the whole range is allowed.

    Args:
        net: whose functions these are.
        beside: (F, inputs) further inputs that make F functions of the net; None: it has no other.
        low: least s.
        high: largest s.
        precision: of the net, for the accuracy.
        like: with the precision and the device of the sums.
        source: the numbers of which it is made.
        further: (B,) numbers at which the net is evaluated as well.
    """
    width = (high - low) / PANELS
    options = dict[str, Any](dtype=like.dtype, device=like.device)
    # not like.new_tensor: inside torch.func it returns a wrapped tensor, which is invalid
    # afterwards
    centres = torch.tensor([low + (k + 0.5) * width for k in range(PANELS)], **options)
    half = torch.tensor(max(0.5 * STRETCH * width, MIN_HALF), **options)
    largest = MAX_ERROR[precision]
    accepted = largest / MARGIN
    fitted = fit(net, beside, centres, half, transform(MIN_TERMS), accepted, further)
    series = fitted.series
    # the search goes up in large steps: fewer terms may do. If none do, a larger error is accepted
    if series is not None:
        fewer = terms_for(fitted.terms, fitted.error, accepted)
        if fewer < fitted.terms:
            series = fit(net, beside, centres, half, transform(fewer), accepted).series
    if series is None:
        series = fit(net, beside, centres, half, transform(MIN_TERMS), largest).series
    lowest = torch.tensor(low, **options)
    highest = torch.tensor(high, **options)
    return Table(source, lowest, highest, series, fitted.beyond)


def _cloned(value: Any) -> Any:
    """Return a copy of what a table holds with new tensors."""
    if isinstance(value, Table | Series):
        return replace(
            value, **{name: _cloned(part) for name, part in vars(value).items()}
        )
    return value.clone() if isinstance(value, Tensor) else value


def _last_outside(inside: Tensor) -> Tensor:
    """Return one more than the last slot in which any atom has a pair outside of the range."""
    slot = torch.arange(1, inside.shape[1] + 1, device=inside.device)
    return torch.where(inside, 0, slot).amax()


def _symbolic_width(inside: Tensor) -> int:
    """Return the number of slots that are evaluated directly in a graph.

    It is at least 2, as sizes that a graph does not know must be.
    """
    width = cast("int", _last_outside(inside).clamp(min=_MIN_DIRECT).item())
    torch.sym_constrain_range(width, min=_MIN_DIRECT)
    return width


# picked and copied, not sliced: a graph depends on whether a slice is shorter than its tensor.
# There are enough slots with `_MIN_DIRECT` more


def _first(per_slot: Tensor, width: int) -> Tensor:
    """Return the first slots of (A, K, ...)."""
    more = per_slot.new_zeros(per_slot.shape[0], _MIN_DIRECT, *per_slot.shape[2:])
    slots = torch.arange(width, device=per_slot.device)
    return torch.cat([per_slot, more], 1).index_select(1, slots)


def _placed(first: Tensor, rest: Tensor, width: int) -> Tensor:
    """Return ``rest`` (A, K, ...) with the first slots exchanged."""
    more = rest.new_zeros(rest.shape[0], _MIN_DIRECT, *rest.shape[2:])
    slots = torch.arange(width, device=rest.device)
    whole = torch.cat([rest, more], 1).index_copy(1, slots, first)
    return whole.split([rest.shape[1], _MIN_DIRECT], 1)[0]
