"""The values, the gradient and the second derivatives of a layer of attention, for some of the atoms.

Notation as in :mod:`~deepmd_ema.model.kernels.attention`. ``S`` are the queries, keys and values of a pair times the
factors ``f = (scaling w, w, 1)``: ``S = f Z / |Z|`` with ``Z = X W_in + b_in`` if rows have the length 1, else
``S = f Z``. ``L = q' k'^T + 20 w w^T`` are the logits, ``G = h h^T`` and ``U = P G`` the weights, ``O = U v`` the sums
and ``R = X + O W_out + b_out`` what is normalised.

Slots beyond the last neighbor of all these atoms neither attend nor are attended to: N of the K slots are left, and
only the layer norm sees all. A cotangent has the prefix ``by_``, a change (tangent) the prefix ``d_``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_ema.model.nn.attention import Weights

# A atoms, K neighbor slots, N of them with neighbors, M channels of a pair, H hidden width, C columns of the factors h

LARGEST_EXPONENT = 60.0  # whose exponential is finite in float32
EPS = 1e-12  # shorter rows are divided by this number; as torch.nn.functional.normalize


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer of attention does.

    Attributes:
        gated: whether weights are multiplied by the cosines of the angles between neighbors.
        unit: whether queries, keys and values have the length 1.
        scaling: factor of the product of query and key.
        shift: added to logits before they are multiplied by the switch; None where they are not, which is not smooth.
        eps: of the layer norm.
    """

    gated: bool
    unit: bool
    scaling: float
    shift: float | None
    eps: float


class Surroundings(NamedTuple):
    """What a layer knows of the neighbors beside their channels.

    Attributes:
        switch: (A, N), w; ones if the layer is not smooth.
        sides: (A, N, C), h: directions, switch or both; those without a neighbor have 0.
        mask: (A, N) bool, where there is a neighbor, or None if the switch says it.
        absent: number of slots that are not here, which count in a smooth softmax.
    """

    switch: Tensor
    sides: Tensor
    mask: Tensor | None
    absent: int


@dataclass
class Values:
    """Values of a layer that its derivatives need."""

    around: Surroundings
    pairs: Tensor  # (A N, M), X
    scale: Tensor  # (A, N, 3, 1), f
    share: Tensor  # (A, N, 3, 1), 1 / f, 0 beyond the cutoff, where nothing asks for it
    inverse: Tensor  # (A, N, 3, 1), 1 / |Z|, or 1
    rows: Tensor  # (A, N, 3, H), S
    attention: Tensor  # (A, N, N), P
    absent: Tensor | float  # (A, N, 1), what P gives to slots that are not here
    weights: Tensor  # (A, N, N), U
    attended: Tensor  # (A N, H), O
    summed: Tensor  # (A, K, M), R
    mean: Tensor  # (A, K, 1), of R
    spread: Tensor  # (A, K, 1), 1 / sqrt(variance + eps) of R


@dataclass
class Cotangents:
    """Intermediate values of the gradient ``J^T g``."""

    given: Tensor  # (A, K, M), g
    summed: Tensor  # (A, K, M), by R
    inner: Tensor  # (A N, M), those of the slots with neighbors
    attended: Tensor  # (A, N, H), by O
    weights: Tensor  # (A, N, N), by U
    total: Tensor  # (A, N, 1), sum of by_U U
    logits: Tensor  # (A, N, N), by L
    rows: Tensor  # (A, N, 3, H), by S
    along: Tensor  # (A, N, 3, 1), S . by_S


@dataclass
class Changes:
    """Intermediate values of the change ``J t``."""

    pairs: Tensor  # (A N, M), of X
    scale: Tensor  # (A, N, 3, 1), of f
    rows: Tensor  # (A, N, 3, H), of S
    along: Tensor  # (A, N, 3, 1), S . d_Z
    attention: Tensor  # (A, N, N), of P
    mean: Tensor  # (A, N, 1), sum of P d_L
    weights: Tensor  # (A, N, N), of U
    attended: Tensor  # (A N, H), of O
    summed: Tensor  # (A, K, M), of R


Past = tuple[Cotangents, Changes]


def evaluate(pairs: Tensor, around: Surroundings, weights: Weights, options: AttentionOptions) -> tuple[Tensor, Values]:
    """Return the output (A, K, M) and the values that led there.

    Args:
        pairs: (A, K, M).
        around: of N slots.
        weights: of the layer.
        options: of the layer.
    """
    (num_atoms, num_inside), width = around.switch.shape, pairs.shape[-1]
    flat = pairs[:, :num_inside].reshape(-1, width)
    rows = torch.addmm(weights.in_bias, flat, weights.in_weight).view(num_atoms, num_inside, 3, -1)
    of_switch = around.switch.unsqueeze(-1)
    scale = torch.stack([of_switch * options.scaling, of_switch, torch.ones_like(of_switch)], 2)
    inverse = torch.ones_like(scale)
    if options.unit:
        inverse = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).clamp_(min=EPS).reciprocal_()
    query, key, value = rows.mul_(scale * inverse).unbind(2)
    attention, absent = _attention(query, key, around, options)
    mixed = torch.bmm(around.sides, around.sides.transpose(1, 2)).mul_(attention)
    attended = torch.bmm(mixed, value).view(flat.shape[0], -1)
    summed = pairs + weights.out_bias
    summed[:, :num_inside] += torch.mm(attended, weights.out_weight).view(num_atoms, num_inside, width)
    out, mean, spread = torch.native_layer_norm(
        summed, (width,), weights.norm_weight, weights.norm_bias, options.eps
    )  # fmt: skip
    share = torch.where(scale == 0, 0, scale.reciprocal())
    values = Values(around, flat, scale, share, inverse, rows, attention, absent, mixed, attended, summed, mean, spread)
    return out, values


def _attention(
    query: Tensor, key: Tensor, around: Surroundings, options: AttentionOptions
) -> tuple[Tensor, Tensor | float]:
    """Return P (A, N, N) and what it gives to slots that are not here (A, N, 1)."""
    if options.shift is None:
        assert around.mask is not None
        logits = torch.bmm(query, key.transpose(1, 2))
        # finite, so that a row of empty slots has no nan
        return logits.masked_fill_(~around.mask[:, None], torch.finfo(logits.dtype).min).softmax(-1), 0.0
    switch = around.switch
    logits = (switch * options.shift).unsqueeze(2) * switch.unsqueeze(1)
    logits.baddbmm_(query, key.transpose(1, 2))
    others: Tensor | float = float(around.absent)
    if not options.unit or abs(options.scaling) + options.shift > LARGEST_EXPONENT:
        largest = logits.amax(-1, keepdim=True).clamp_(min=0)
        logits.sub_(largest)
        others = largest.neg_().exp_().mul_(others)
    share = logits.exp_().sum(-1, keepdim=True).add_(others).reciprocal_()
    return logits.mul_(share), share * others


def pull(
    v: Values, given: Tensor, weights: Weights, sums: Weights | None, past: Past | None, options: AttentionOptions
) -> tuple[Tensor, Cotangents]:
    """Return the gradient by the pairs (A, K, M) and the values that led there.

    Args:
        v: of the layer.
        given: (A, K, M) gradient by the output.
        weights: of the layer.
        sums: gradients by the parameters, which are added to, or None.
        past: a gradient ``J^T g`` and a change ``J t``; the gradient of ``g . J t`` is added. Or None.
        options: of the layer.
    """
    num_atoms, num_inside = v.around.switch.shape
    query, key, value = v.rows.unbind(2)
    summed = _pull_norm(v, given, weights, sums, past)
    inner = summed[:, :num_inside].reshape(-1, given.shape[-1])
    attended = torch.mm(inner, weights.out_weight.T).view(num_atoms, num_inside, -1)
    by_weights = torch.bmm(attended, value.transpose(1, 2))
    # each of the three contiguous: torch multiplies batches of matrices one by one if the result is not
    by_rows = attended.new_empty(3, *attended.shape)
    by_query, by_key, by_value = by_rows.unbind(0)
    torch.bmm(v.weights.transpose(1, 2), attended, out=by_value)
    logits = by_weights * v.weights
    if past is not None:
        cot, change = past
        by_weights.baddbmm_(cot.attended, change.rows[:, :, 2].transpose(1, 2))
        by_value.baddbmm_(change.weights.transpose(1, 2), cot.attended)
        torch.mul(by_weights, v.weights, out=logits)
        logits.addcmul_(cot.weights, change.weights).addcmul_(change.attention, cot.total, value=-1)
    total = logits.sum(-1, keepdim=True)
    logits.addcmul_(v.attention, total if past is None else total + cot.total * change.mean * v.absent, value=-1)
    torch.bmm(logits, key, out=by_query)
    torch.bmm(logits.transpose(1, 2), query, out=by_key)
    if past is not None:
        d_query, d_key, _ = change.rows.unbind(2)
        by_query.baddbmm_(cot.logits, d_key)
        by_key.baddbmm_(cot.logits.transpose(1, 2), d_query)
    rows = by_rows.permute(1, 2, 0, 3)
    along = (v.rows * rows).sum(-1, keepdim=True)
    found = Cotangents(given, summed, inner, attended, by_weights, total, logits, rows, along)
    projected = _pull_rows(v, found, past, options).view(inner.shape[0], -1)
    if sums is not None:
        _add_up(sums, v, found, projected, past, options)
    by_pairs = summed.clone()
    by_pairs[:, :num_inside] += torch.mm(projected, weights.in_weight.T).view(num_atoms, num_inside, -1)
    return by_pairs, found


def _pull_norm(v: Values, given: Tensor, weights: Weights, sums: Weights | None, past: Past | None) -> Tensor:
    """Return the gradient by what is normalised (A, K, M)."""
    wanted = [True, sums is not None, sums is not None]
    summed: Tensor
    summed, by_weight, by_bias = torch.ops.aten.native_layer_norm_backward(
        given, v.summed, given.shape[-1:], v.mean, v.spread, weights.norm_weight, weights.norm_bias, wanted
    )
    if sums is not None:
        sums.norm_weight.add_(by_weight)
        sums.norm_bias.add_(by_bias)
    if past is None:
        return summed
    cot, change = past
    x = (v.summed - v.mean).mul_(v.spread)
    pushed = _normalised_change(v, change.summed)
    first, second = _mean_product(cot.given * weights.norm_weight, x), _mean_product(x, change.summed)
    both = _mean_product(cot.summed, change.summed)
    summed.addcmul_(x.mul_(both).addcmul_(cot.summed, second).addcmul_(pushed, first), v.spread, value=-1)
    if sums is not None:
        sums.norm_weight.add_(pushed.mul_(cot.given).flatten(0, 1).sum(0))
    return summed


def _normalised_change(v: Values, change: Tensor) -> Tensor:
    """Return the change of the layer norm without its weight as what is normalised changes (A, K, M)."""
    # its matrix is symmetric
    found: Tensor = torch.ops.aten.native_layer_norm_backward(
        change, v.summed, change.shape[-1:], v.mean, v.spread, None, None, [True, False, False]
    )[0]
    return found


def _mean_product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).mean(-1, keepdim=True)


def _pull_rows(v: Values, by: Cotangents, past: Past | None, options: AttentionOptions) -> Tensor:
    """Return the gradient by ``Z`` (A, N, 3, H) from that by the rows."""
    out = torch.mul(by.rows, v.inverse * v.scale, out=torch.empty_like(v.rows))
    if not options.unit:
        return out if past is None else out.addcmul_(past[0].rows, past[1].scale)
    if past is None:
        return out.addcmul_(v.rows, by.along * v.inverse * v.share, value=-1)
    cot, change = past
    turned = (change.rows * cot.rows).sum(-1, keepdim=True).add_(by.along)
    past_along = v.inverse * cot.along * v.share
    both = v.inverse * change.along
    out.addcmul_(cot.rows, v.inverse * (change.scale - both))
    out.addcmul_(v.rows, (change.scale + both) * past_along * v.share - v.inverse * v.share * turned)
    return out.addcmul_(change.rows, past_along, value=-1)


def _add_up(
    sums: Weights, v: Values, by: Cotangents, projected: Tensor, past: Past | None, options: AttentionOptions
) -> None:
    """Add the gradients by the parameters of the linear maps."""
    sums.in_weight.addmm_(v.pairs.T, projected)
    sums.in_bias.add_(projected.sum(0))
    sums.out_weight.addmm_(v.attended.T, by.inner)
    sums.out_bias.add_(by.summed.flatten(0, 1).sum(0))
    if past is not None:
        cot, change = past
        sums.in_weight.addmm_(change.pairs.T, _pull_rows(v, cot, None, options).view(projected.shape))
        sums.out_weight.addmm_(change.attended.T, cot.inner)


def by_surroundings(v: Values, by: Cotangents, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the gradients by the switch (A, N) and by the factors h (A, N, C)."""
    of_products, (switch, sides, *_) = by.weights * v.attention, v.around
    by_sides = torch.bmm(of_products, sides).baddbmm_(of_products.transpose(1, 2), sides)
    if options.shift is None:
        return torch.zeros_like(switch), by_sides
    by_switch = (by.along[:, :, :2] * v.share[:, :, 1:2]).sum(2)
    column = (switch * options.shift).unsqueeze(-1)
    by_switch.baddbmm_(by.logits, column).baddbmm_(by.logits.transpose(1, 2), column)
    return by_switch.squeeze(-1), by_sides


def push(
    v: Values, d_pairs: Tensor, d_switch: Tensor, d_sides: Tensor, weights: Weights, options: AttentionOptions
) -> tuple[Tensor, Changes]:
    """Return the change of the output (A, K, M) and the changes that led there.

    Args:
        v: of the layer.
        d_pairs: (A, K, M) change of the pairs.
        d_switch: (A, N) change of the switch.
        d_sides: (A, N, C) change of the factors h.
        weights: of the layer.
        options: of the layer.
    """
    (num_atoms, num_inside), width = d_switch.shape, d_pairs.shape[-1]
    switch, sides, *_ = v.around
    flat = d_pairs[:, :num_inside].reshape(-1, width)
    rows = torch.mm(flat, weights.in_weight).view(v.rows.shape)
    of_switch = d_switch.unsqueeze(-1)
    scale = torch.stack([of_switch * options.scaling, of_switch, torch.zeros_like(of_switch)], 2)
    along, of_rows = scale, scale * v.share
    if options.unit:
        along = (v.rows * rows).sum(-1, keepdim=True)
        of_rows.addcmul_(along, v.inverse * v.share, value=-1)
    rows.mul_(v.inverse * v.scale).addcmul_(v.rows, of_rows)
    query, key, value = v.rows.unbind(2)
    d_query, d_key, d_value = rows.unbind(2)
    logits = torch.bmm(d_query, key.transpose(1, 2)).baddbmm_(query, d_key.transpose(1, 2))
    if options.shift is not None:
        both = torch.stack([d_switch, switch], 2)
        logits.baddbmm_(both, both.flip(2).transpose(1, 2), alpha=options.shift)
    attention = logits * v.attention
    mean = attention.sum(-1, keepdim=True)
    attention.addcmul_(v.attention, mean, value=-1)
    mixed = torch.bmm(sides, sides.transpose(1, 2)).mul_(attention)
    left, right = torch.cat([d_sides, sides], -1), torch.cat([sides, d_sides], -1)
    mixed.addcmul_(torch.bmm(left, right.transpose(1, 2), out=logits), v.attention)
    attended = torch.bmm(mixed, value).baddbmm_(v.weights, d_value).view(flat.shape[0], -1)
    summed = d_pairs.clone()
    summed[:, :num_inside] += torch.mm(attended, weights.out_weight).view(num_atoms, num_inside, width)
    out = _normalised_change(v, summed).mul_(weights.norm_weight)
    return out, Changes(flat, scale, rows, along, attention, mean, mixed, attended, summed)
