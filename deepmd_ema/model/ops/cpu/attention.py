"""Moments of layers of attention among the neighbors of an atom, with written-out gradients.

The gradient and the gradient of that are written out.

With the channels X (K, M) of the pairs of an atom, the switch w and the directions d of its
neighbors a layer is::

    [q, k, v] = X W_in + b_in            each row of length 1 if ``unit``
    P = softmax(scaling q k^T)           if smooth, of (scaling q_j . k_k + 20) w_j w_k - 20
    U_jk = P_jk w_j w_k (d_j . d_k)      the last factor if ``gated``
    Y = layer_norm(X + U v W_out + b_out)

The switch goes into the rows: with ``q' = scaling w q`` and ``k' = w k`` the logits are ``q' k'^T +
20 w w^T`` up to the constant 20, and with ``h = w d`` the factor of P is ``h h^T``. So there are
few passes over (K, K). After the last layer the moments are ``R^T Y`` with rows R (K, C).

Portions of atoms go through all layers while they stay in a cache, sorted by their numbers of
slots, so that few empty ones are computed.

``S`` are the queries, keys and values of a pair times the factors ``f = (scaling w, w, 1)``: ``S =
f Z / |Z|`` with ``Z = X W_in + b_in`` if rows have the length 1, else ``S = f Z``. ``L = q' k'^T +
20 w w^T`` are the logits, ``G = h h^T`` and ``U = P G`` the weights, ``O = U v`` the sums and ``R =
X + O W_out + b_out`` what is normalised. All pairs of atoms and N slots are rows of one matrix, but
the three parts of S stand one after the other, as torch multiplies batches of matrices faster if
each of them is without gaps. A cotangent has the prefix ``by_``, a change (tangent) the prefix
``d_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.ops import attention
from deepmd_ema.model.ops.attention import EPS, Attended, AttentionOptions
from deepmd_ema.model.ops.cpu.engine import Value
from deepmd_ema.model.ops.cpu.moments import portions

# A atoms, K neighbor slots, N of them in a portion, M channels of a pair, H hidden width
# C columns: those of the rows, or those of h

MAX_EXPONENT = 60.0  # its exponential is finite in float32


def attended_moments(
    neighbors: Attended, layers: Sequence[Weights], options: AttentionOptions
) -> Tensor:
    """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers of attention."""
    if not neighbors.mask.numel():
        return attention.attended_moments(neighbors, layers, options)
    smooth = options.shift is not None
    rows = neighbors.rows
    mask = neighbors.mask
    switch = neighbors.switch
    counts = neighbors.counts
    if not smooth:
        switch = mask.to(rows.dtype)
    sides = switch.unsqueeze(-1)
    if options.gated:
        sides = neighbors.direction * sides if smooth else neighbors.direction
    # the mask is in `sides`, and queries and keys are not scaled by it
    if not smooth:
        switch = torch.ones_like(switch)
    if counts is None:
        counts = torch.full_like(mask[:, 0], rows.shape[1], dtype=torch.int64)
    # atoms with equally many neighbors next to each other: a portion is as wide as its widest atom
    counts, order = counts.sort(stable=True)
    most = max(1, int(counts[-1]))
    parts = portions(counts, most * len(layers[0].in_bias))
    sized = [(part, max(1, int(counts[part][-1]))) for part in parts]
    embedded = neighbors.embed(
        *(tensor.index_select(0, order) for tensor in neighbors.inputs)
    )
    mask = mask.index_select(0, order)
    inputs = Inputs(
        embedded, *(tensor.index_select(0, order) for tensor in (rows, switch, sides))
    )
    evaluation = _Attention(
        options, sized, None if smooth else mask, neighbors.num_slots
    )
    weights = [weight for layer in layers for weight in layer]
    moments: Tensor = Value.apply(evaluation, len(inputs), *inputs, *weights)
    return moments.index_select(0, order.argsort())  # back in the order of the batch


class Inputs(NamedTuple):
    """Inputs of the layers, or gradients by these, or changes of these."""

    pairs: Tensor  # (A, K, M), X
    rows: Tensor  # (A, K, C)
    switch: Tensor  # (A, K), w
    sides: Tensor  # (A, K, columns), h


class _Portion(NamedTuple):
    """Some of the atoms, with the values of all layers that their derivatives need."""

    part: slice  # the atoms
    width: int  # N, the slots that are computed
    rows: Tensor  # (A, N, C)
    values: list[Values]  # one entry per layer
    out: Tensor  # (A, N, M), the channels after all layers

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor (A, K, ...) of all atoms."""
        return tensor[self.part, : self.width]


class _Attention:
    """The moments (A, C, M) of :class:`Inputs`.

    The object keeps the values that derivatives need (:mod:`deepmd_ema.model.ops.cpu.engine`).

    Args:
        options: of the layers.
        parts: of the atoms, with the slots that are computed of each.
        mask: (A, K) bool, where there is a neighbor; None where the switch says it.
        num_slots: slots of an atom with those that are not here.
    """

    def __init__(
        self,
        options: AttentionOptions,
        parts: list[tuple[slice, int]],
        mask: Tensor | None,
        num_slots: int,
    ) -> None:
        self._options = options
        self._parts = parts
        self._mask = mask
        self._num_slots = num_slots
        self.past: list[Any] = []
        self._portions: list[_Portion] = []
        self._inputs: Sequence[Tensor] = ()

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return the moments."""
        self._inputs = inputs
        moments = []
        for part, width in self._parts:
            local = Inputs(*(tensor[part, :width] for tensor in inputs))
            mask = None if self._mask is None else self._mask[part, :width]
            around = Surroundings(
                local.switch, local.sides, mask, self._num_slots - width
            )
            values = []
            pairs = local.pairs.flatten(0, 1)
            for layer in _by_layer(weights):
                pairs, layer_values = evaluate(pairs, around, layer, self._options)
                values.append(layer_values)
            out = pairs.view(len(local.rows), width, -1)
            self._portions.append(_Portion(part, width, local.rows, values, out))
            moments.append(torch.bmm(local.rows.transpose(1, 2), out))
        return torch.cat(moments)

    def gradient(
        self, grad: Tensor, weights: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Any]:
        """Return the gradients by the inputs, and their details by portion and layer."""
        grads = [torch.zeros_like(tensor) for tensor in self._inputs]
        cotangents = []
        for portion in self._portions:
            # views, which are written to: slots beyond the width of a portion keep the gradient 0
            by = Inputs(*map(portion.of, grads))
            portion_grad = grad[portion.part]  # (A, C, M)
            torch.bmm(portion.out, portion_grad.transpose(1, 2), out=by.rows)
            by_out = torch.bmm(portion.rows, portion_grad).flatten(0, 1)
            by_layers = []
            for values, layer in zip(portion.values[::-1], _by_layer(weights)[::-1]):
                by_out, by_layer = pull(
                    values, by_out, layer, None, None, self._options
                )
                by_switch, by_sides = by_surroundings(values, by_layer, self._options)
                by.switch.add_(by_switch)
                by.sides.add_(by_sides)
                by_layers.append(by_layer)
            by.pairs.copy_(by_out.view(by.pairs.shape))
            cotangents.append(by_layers[::-1])
        return grads, (grad, cotangents)

    def change(
        self, changes: Sequence[Tensor], weights: Sequence[Any]
    ) -> tuple[Tensor, Any]:
        """Return the change of the moments as inputs change, and details by portion and layer."""
        moments = []
        details = []
        for portion in self._portions:
            d = Inputs(*map(portion.of, changes))
            pairs = d.pairs.flatten(0, 1)
            d_layers = []
            for values, layer in zip(portion.values, _by_layer(weights)):
                pairs, d_layer = push(
                    values, pairs, d.switch, d.sides, layer, self._options
                )
                d_layers.append(d_layer)
            # both factors of rows^T Y change
            change = torch.bmm(d.rows.transpose(1, 2), portion.out)
            d_out = pairs.view(portion.out.shape)
            moments.append(change.baddbmm_(portion.rows.transpose(1, 2), d_out))
            details.append(d_layers)
        return torch.cat(moments), (changes[1], details)

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the gradients by the pairs and by the weights."""
        sums = [torch.zeros_like(weight) for weight in weights]
        by_pairs = torch.zeros_like(self._inputs[0])
        layers = list(zip(_by_layer(weights), _by_layer(sums)))
        for number, portion in enumerate(self._portions):
            by_out = torch.bmm(portion.rows, grad[portion.part])
            pasts: list[Past | None] = [None] * len(layers)
            if past is not None:
                (other, cotangents), (d_rows, changes) = past
                by_out.baddbmm_(portion.of(d_rows), other[portion.part])
                pasts = list(zip(cotangents[number], changes[number]))
            by_out = by_out.flatten(0, 1)
            # from the last layer to the first; `sums` are added to in place
            backwards = zip(portion.values[::-1], layers[::-1], pasts[::-1])
            for values, (layer, layer_sums), before in backwards:
                by_out, _ = pull(
                    values, by_out, layer, layer_sums, before, self._options
                )
            by_pairs[portion.part, : portion.width] = by_out.view(portion.out.shape)
        return by_pairs, sums


def _by_layer(weights: Sequence[Tensor]) -> list[Weights]:
    size = len(Weights._fields)
    return [
        Weights(*weights[start : start + size])
        for start in range(0, len(weights), size)
    ]


class Surroundings(NamedTuple):
    """Inputs of a layer beside the channels of the neighbors.

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
    scale: Tensor  # (3, A, N, 1), f
    share: Tensor  # (3, A, N, 1), 1 / f, 0 beyond the cutoff, where it is not used
    inverse: Tensor  # (3, A, N, 1), 1 / |Z|, or 1
    rows: Tensor  # (3, A, N, H), S
    attention: Tensor  # (A, N, N), P
    absent: Tensor | float  # (A, N, 1), what P gives to slots that are not here
    weights: Tensor  # (A, N, N), U
    attended: Tensor  # (A N, H), O
    summed: Tensor  # (A N, M), R
    mean: Tensor  # (A N, 1), of R
    spread: Tensor  # (A N, 1), 1 / sqrt(variance + eps) of R


@dataclass
class Cotangents:
    """Intermediate values of the gradient ``J^T g``."""

    out: Tensor  # (A N, M), g
    summed: Tensor  # (A N, M), by R
    attended: Tensor  # (A, N, H), by O
    weights: Tensor  # (A, N, N), by U
    total: Tensor  # (A, N, 1), sum of by_U U
    logits: Tensor  # (A, N, N), by L
    rows: Tensor  # (3, A, N, H), by S
    along: Tensor  # (3, A, N, 1), S . by_S
    projected: Tensor  # (A N, 3 H), by Z


@dataclass
class Changes:
    """Intermediate values of the change ``J t``."""

    pairs: Tensor  # (A N, M), of X
    scale: Tensor  # (3, A, N, 1), of f
    rows: Tensor  # (3, A, N, H), of S
    along: Tensor  # (3, A, N, 1), S . d_Z
    attention: Tensor  # (A, N, N), of P
    mean: Tensor  # (A, N, 1), sum of P d_L
    weights: Tensor  # (A, N, N), of U
    attended: Tensor  # (A N, H), of O
    summed: Tensor  # (A N, M), of R
    spread: Tensor  # (A N, M), of the layer norm without its weight


Past = tuple[Cotangents, Changes]


def evaluate(
    pairs: Tensor, around: Surroundings, weights: Weights, options: AttentionOptions
) -> tuple[Tensor, Values]:
    """Return the output (A N, M) and the values that led there.

    Args:
        pairs: (A N, M).
        around: of the slots.
        weights: of the layer.
        options: of the layer.
    """
    projected = _in_three(
        torch.addmm(weights.in_bias, pairs, weights.in_weight), around.switch
    )
    column = around.switch.unsqueeze(-1)
    scale = torch.stack([column * options.scaling, column, torch.ones_like(column)])
    inverse = torch.ones_like(scale)
    if options.unit:
        length = torch.linalg.vector_norm(projected, dim=-1, keepdim=True)
        inverse = length.clamp_(min=EPS).reciprocal_()
    # into memory of its own: `projected` is a view with gaps, of which bmm would make copies
    rows = torch.mul(projected, scale * inverse, out=pairs.new_empty(projected.shape))
    query, key, value = rows.unbind(0)
    attention, absent = _attention(query, key, around, options)
    mixed = torch.bmm(around.sides, around.sides.transpose(1, 2)).mul_(attention)
    attended = torch.bmm(mixed, value).flatten(0, 1)
    summed = torch.addmm(pairs, attended, weights.out_weight).add_(weights.out_bias)
    out, mean, spread = torch.native_layer_norm(
        summed, summed.shape[-1:], weights.norm_weight, weights.norm_bias, options.eps
    )
    # S . by_S / f is the gradient by f; a neighbor with f = 0 has S = 0, and the switch is flat
    # there
    share = torch.where(scale == 0, 0, scale.reciprocal())
    values = Values(
        around,
        pairs,
        scale,
        share,
        inverse,
        rows,
        attention,
        absent,
        mixed,
        attended,
        summed,
        mean,
        spread,
    )
    return out, values


def _in_three(projected: Tensor, switch: Tensor) -> Tensor:
    """Return queries, keys and values (3, A, N, H), a view of (A N, 3 H)."""
    return projected.view(*switch.shape, 3, -1).permute(2, 0, 1, 3)


def _attention(
    query: Tensor, key: Tensor, around: Surroundings, options: AttentionOptions
) -> tuple[Tensor, Tensor | float]:
    """Return P (A, N, N) and what it gives to slots that are not here (A, N, 1)."""
    if options.shift is None:
        assert around.mask is not None
        logits = torch.bmm(query, key.transpose(1, 2))
        # finite, so that a row of empty slots has no nan
        logits.masked_fill_(~around.mask[:, None], torch.finfo(logits.dtype).min)
        return logits.softmax(-1), 0.0
    switch = around.switch
    logits = (switch * options.shift).unsqueeze(2) * switch.unsqueeze(1)
    logits.baddbmm_(query, key.transpose(1, 2))
    # exp(0) each: the logits are those of the formula plus 20
    absent: Tensor | float = float(around.absent)
    # rows of length 1 have logits of at most this sum, whose exponential is finite: no pass for the
    # largest one
    if not options.unit or abs(options.scaling) + options.shift > MAX_EXPONENT:
        largest = logits.amax(-1, keepdim=True).clamp_(min=0)
        logits.sub_(largest)
        absent = largest.neg_().exp_().mul_(absent)
    share = logits.exp_().sum(-1, keepdim=True).add_(absent).reciprocal_()
    return logits.mul_(share), share * absent


def pull(
    v: Values,
    by_out: Tensor,
    weights: Weights,
    sums: Weights | None,
    past: Past | None,
    options: AttentionOptions,
) -> tuple[Tensor, Cotangents]:
    """Return the gradient by the pairs (A N, M) and the values that led there.

    Args:
        v: of the layer.
        by_out: (A N, M) gradient by the output.
        weights: of the layer.
        sums: gradients by the parameters, which are added to, or None.
        past: a gradient ``J^T g`` and a change ``J t``; the gradient of ``g . J t`` is added. Or
            None.
        options: of the layer.
    """
    query, key, value = v.rows.unbind(0)
    summed = _pull_norm(v, by_out, weights, sums, past)
    attended = torch.mm(summed, weights.out_weight.T).view(query.shape)
    by_weights = torch.bmm(attended, value.transpose(1, 2))
    rows = torch.empty_like(v.rows)
    by_query, by_key, by_value = rows.unbind(0)
    torch.bmm(v.weights.transpose(1, 2), attended, out=by_value)
    if past is not None:
        cot, change = past
        by_weights.baddbmm_(cot.attended, change.rows[2].transpose(1, 2))
        by_value.baddbmm_(change.weights.transpose(1, 2), cot.attended)
    # U = P G and G = sides sides^T: by_P * P is by_U * U, so that G is not needed
    logits = by_weights * v.weights
    if past is not None:
        # terms of the change of by_L = by_U U - P total
        logits.addcmul_(cot.weights, change.weights).addcmul_(
            change.attention, cot.total, value=-1
        )
    total = logits.sum(-1, keepdim=True)
    along_p = total if past is None else total + cot.total * change.mean * v.absent
    logits.addcmul_(v.attention, along_p, value=-1)
    torch.bmm(logits, key, out=by_query)
    torch.bmm(logits.transpose(1, 2), query, out=by_key)
    if past is not None:
        by_query.baddbmm_(cot.logits, change.rows[1])
        by_key.baddbmm_(cot.logits.transpose(1, 2), change.rows[0])
    along = (v.rows * rows).sum(-1, keepdim=True)
    projected = _pull_rows(v, rows, along, past, options)
    cotangents = Cotangents(
        by_out, summed, attended, by_weights, total, logits, rows, along, projected
    )
    if sums is not None:
        _add_up(sums, v, cotangents, past)
    return torch.addmm(summed, projected, weights.in_weight.T), cotangents


def _pull_norm(
    v: Values, by_out: Tensor, weights: Weights, sums: Weights | None, past: Past | None
) -> Tensor:
    """Return the gradient by what is normalised (A N, M)."""
    wanted = [True, sums is not None, sums is not None]
    summed: Tensor
    summed, by_weight, by_bias = torch.ops.aten.native_layer_norm_backward(
        by_out,
        v.summed,
        by_out.shape[-1:],
        v.mean,
        v.spread,
        weights.norm_weight,
        weights.norm_bias,
        wanted,
    )
    if sums is not None:
        sums.norm_weight.add_(by_weight)
        sums.norm_bias.add_(by_bias)
    if past is None:
        return summed
    cot, change = past
    # the derivative of the gradient of a layer norm: three terms, each along x, the gradient or the
    # change
    x = (v.summed - v.mean).mul_(v.spread)
    pushed = change.spread
    first = _mean_product(cot.out * weights.norm_weight, x)
    second = _mean_product(x, change.summed)
    both = _mean_product(cot.summed, change.summed)
    x.mul_(both).addcmul_(cot.summed, second).addcmul_(pushed, first)
    summed.addcmul_(x, v.spread, value=-1)
    if sums is not None:
        sums.norm_weight.add_((pushed * cot.out).sum(0))
    return summed


def _mean_product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).mean(-1, keepdim=True)


def _pull_rows(
    v: Values, rows: Tensor, along: Tensor, past: Past | None, options: AttentionOptions
) -> Tensor:
    """Return the gradient by ``Z`` (A N, 3 H) from that by the rows."""
    flat = rows.new_empty(v.pairs.shape[0], 3 * rows.shape[-1])
    out = _in_three(
        flat, v.around.switch
    )  # a view: the caller multiplies `flat` at once
    factor = v.inverse * v.scale
    if not options.unit:
        torch.mul(rows, factor, out=out)
        if past is not None:
            out.addcmul_(past[0].rows, past[1].scale)
    elif past is None:
        torch.addcmul(
            rows * factor, v.rows, along * v.inverse * v.share, value=-1, out=out
        )
    else:
        cot, change = past
        turned = (change.rows * cot.rows).sum(-1, keepdim=True).add_(along)
        past_along = v.inverse * cot.along * v.share
        both = v.inverse * change.along
        by_projected = (rows * factor).addcmul_(
            cot.rows, v.inverse * (change.scale - both)
        )
        stretch = (
            change.scale + both
        ) * past_along * v.share - v.inverse * v.share * turned
        by_projected.addcmul_(v.rows, stretch)
        torch.addcmul(by_projected, change.rows, past_along, value=-1, out=out)
    return flat


def _add_up(sums: Weights, v: Values, by: Cotangents, past: Past | None) -> None:
    """Add the gradients by the parameters of the linear maps."""
    sums.in_weight.addmm_(v.pairs.T, by.projected)
    sums.in_bias.add_(by.projected.sum(0))
    sums.out_weight.addmm_(v.attended.T, by.summed)
    sums.out_bias.add_(by.summed.sum(0))
    if past is not None:
        cot, change = past
        sums.in_weight.addmm_(change.pairs.T, cot.projected)
        sums.out_weight.addmm_(change.attended.T, cot.summed)


def by_surroundings(
    v: Values, by: Cotangents, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return the gradients by the switch (A, N) and by the factors h (A, N, C)."""
    by_products = by.weights * v.attention  # (A, N, N), by G = h h^T
    switch = v.around.switch
    sides = v.around.sides
    by_sides = torch.bmm(by_products, sides).baddbmm_(
        by_products.transpose(1, 2), sides
    )
    if options.shift is None:
        return torch.zeros_like(switch), by_sides
    # only queries and keys have the switch: their factors are constants times w
    by_switch = (by.along[:2] * v.share[1]).sum(0)
    column = (switch * options.shift).unsqueeze(-1)
    by_switch.baddbmm_(by.logits, column).baddbmm_(by.logits.transpose(1, 2), column)
    return by_switch.squeeze(-1), by_sides


def push(
    v: Values,
    d_pairs: Tensor,
    d_switch: Tensor,
    d_sides: Tensor,
    weights: Weights,
    options: AttentionOptions,
) -> tuple[Tensor, Changes]:
    """Return the change of the output (A N, M) and the changes that led there.

    Args:
        v: of the layer.
        d_pairs: (A N, M) change of the pairs.
        d_switch: (A, N) change of the switch.
        d_sides: (A, N, C) change of the factors h.
        weights: of the layer.
        options: of the layer.
    """
    switch = v.around.switch
    sides = v.around.sides
    projected = _in_three(torch.mm(d_pairs, weights.in_weight), switch)
    column = d_switch.unsqueeze(-1)
    scale = torch.stack([column * options.scaling, column, torch.zeros_like(column)])
    # d_S = f d_Z / |Z| + S (d_f / f - S . d_Z / (f |Z|)), the last term if rows have the length 1
    along = scale
    stretch = scale * v.share
    if options.unit:
        along = (v.rows * projected).sum(-1, keepdim=True)
        stretch.addcmul_(along, v.inverse * v.share, value=-1)
    rows = torch.mul(projected, v.inverse * v.scale, out=torch.empty_like(v.rows))
    rows.addcmul_(v.rows, stretch)
    query, key, value = v.rows.unbind(0)
    d_query, d_key, d_value = rows.unbind(0)
    logits = torch.bmm(d_query, key.transpose(1, 2)).baddbmm_(
        query, d_key.transpose(1, 2)
    )
    if options.shift is not None:
        # the change of w w^T as one product of (N, 2) and (2, N)
        both = torch.stack([d_switch, switch], 2)
        logits.baddbmm_(both, both.flip(2).transpose(1, 2), alpha=options.shift)
    attention = logits * v.attention
    mean = attention.sum(-1, keepdim=True)
    # P is normalised: its change has the sum 0
    attention.addcmul_(v.attention, mean, value=-1)
    mixed = torch.bmm(sides, sides.transpose(1, 2)).mul_(attention)
    # the change of h h^T, likewise
    left, right = torch.cat([d_sides, sides], -1), torch.cat([sides, d_sides], -1)
    mixed.addcmul_(torch.bmm(left, right.transpose(1, 2), out=logits), v.attention)
    attended = torch.bmm(mixed, value).baddbmm_(v.weights, d_value).flatten(0, 1)
    summed = torch.addmm(d_pairs, attended, weights.out_weight)
    # the matrix of the layer norm without its weight is symmetric
    spread: Tensor = torch.ops.aten.native_layer_norm_backward(
        summed,
        v.summed,
        summed.shape[-1:],
        v.mean,
        v.spread,
        None,
        None,
        [True, False, False],
    )[0]
    changes = Changes(
        d_pairs, scale, rows, along, attention, mean, mixed, attended, summed, spread
    )
    return spread * weights.norm_weight, changes
