"""The values, the gradient and the second derivatives of a layer of the repformer.

Notation: n are the features of an atom, g the channels and h the vector of a pair, w its weight, and m the features of
its neighbor. With ``Q = [w g, w h]``, p and q the factors of sums over neighbors and of moments, X axis channels::

    B = sum_k Q_k m_k^T = [O, D']       D = q D' / sqrt(3)       R = q sum_k w_k h_k g_k^T / sqrt(3)
    e = [R[:X]^T R, D[:X]^T D]          grrg and drrd
    n' = a (n + r_1 tanh(n W_1 + b_1) + r_2 p sum_g O_g C_g + r_3 tanh(e W_3 + b_3))
    g' = b (g + r_4 tanh(g W_4 + b_4))

The weight of a neighbor is applied to its few channels, not beside its many features, and so a neighbor's features are
only read. A cotangent has the prefix ``by_``, a change (tangent) the prefix ``d_``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A atoms, K neighbor slots, M reverse slots, C channels of an atom, G of a pair, X axis channels

OfPairs = Any  # a tensor, or None in the last layer, where pairs do not change


class LayerWeights(NamedTuple):
    """The parameters of a layer, in the letters of the formulas.

    The factors r of the changes are vectors, or numbers (tensors without dimensions) that are not trained.
    """

    own_weight: Tensor  # (C, C), W_1
    own_bias: Tensor  # (C,), b_1
    conv_weight: Tensor  # (G, C), C
    terms_weight: Tensor  # (X (G + C), C), W_3
    terms_bias: Tensor  # (C,), b_3
    own_factor: Tensor  # (C,), r_1
    conv_factor: Tensor  # (C,), r_2
    terms_factor: Tensor  # (C,), r_3
    pair_weight: OfPairs  # (G, G), W_4
    pair_bias: OfPairs  # (G,), b_4
    pair_factor: OfPairs  # (G,), r_4


@dataclass(frozen=True)
class LayerOptions:
    """Options of all layers.

    Attributes:
        num_axis: X.
        node_scale: a.
        pair_scale: b.
        per_neighbor: p, a number or (A, 1).
        per_moment: q / sqrt(3), a number or (A, 1, 1).
    """

    num_axis: int
    node_scale: float
    pair_scale: float
    per_neighbor: Tensor | float
    per_moment: Tensor | float


class Neighbors:
    """Maps between atoms and pairs, as in :mod:`~deepmd_ema.model.ops.gather`.

    Args:
        neighbor: (A, K) int64, atom in each slot; ``A`` is none.
        reverse: (A, M) int64, the slots that hold an atom; ``A * K`` is none.
    """

    def __init__(self, neighbor: Tensor, reverse: Tensor) -> None:
        if reverse.numel():
            # a part with a shorter cutoff has few of the slots of the list: those of none go last, and are cut off
            reverse = reverse.sort(1).values
            most = int((reverse < neighbor.numel()).any(0).sum())
            reverse = reverse[:, : max(1, most)]
        self._neighbor, self._reverse, self._shape = neighbor.flatten(), reverse, neighbor.shape

    def gather(self, node: Tensor) -> Tensor:
        """Return the features of the neighbors (A, K, C) of those of the atoms (A, C), 0 where there is none."""
        padded = torch.cat([node, node.new_zeros(1, node.shape[1])])
        return padded.index_select(0, self._neighbor).view(*self._shape, node.shape[1])

    def sum_of_product(self, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the sums (A, C) over all slots that hold an atom of products (A, K, N) times (A, N, C)."""
        width = factors[0][1].shape[2]
        num_slots = self._neighbor.shape[0]
        padded = factors[0][0].new_empty(num_slots + 1, width)
        padded[-1] = 0  # read by `reverse` where there is none; all else is written below
        pairs = padded[:-1].view(*self._shape, width)
        torch.bmm(*factors[0], out=pairs)
        for left, right in factors[1:]:
            pairs.baddbmm_(left, right)
        return padded.index_select(0, self._reverse.flatten()).view(*self._reverse.shape, width).sum(1)


class Pairs(NamedTuple):
    """Inputs that are the same for all layers."""

    weight: Tensor  # (A, K, 1), w
    sides: Tensor  # (A, K, 3), w h


@dataclass
class Values:
    """Values of a layer that its derivatives need."""

    node: Tensor  # (A, C), n
    pair: Tensor  # (A, K, G), g
    factors: Tensor  # (A, K, G + 3), Q
    gathered: Tensor  # (A, K, C), m
    outer: Tensor  # (A, G, C), O
    of_atoms: Tensor  # (A, 3, C), D
    of_pairs: Tensor  # (A, 3, G), R
    terms: Tensor  # (A, X (G + C)), e
    own: Tensor  # (A, C), tanh(n W_1 + b_1)
    conv: Tensor  # (A, C), p sum_g O_g C_g
    all_terms: Tensor  # (A, C), tanh(e W_3 + b_3)
    of_pair: OfPairs  # (A, K, G), tanh(g W_4 + b_4)


@dataclass
class Cotangents:
    """Intermediate values of the gradient."""

    node: Tensor  # (A, C), by n' times a
    own: Tensor  # (A, C), by n W_1 + b_1
    terms: Tensor  # (A, C), by e W_3 + b_3
    products: Tensor  # (A, X (G + C)), by e
    of_pairs: Tensor  # (A, 3, G), by R, times q / sqrt(3)
    sums: Tensor  # (A, G + 3, C), by B
    factors: Tensor  # (A, K, G + 3), by Q
    pair: OfPairs  # (A, K, G), by g' times b
    of_pair: OfPairs  # (A, K, G), by g W_4 + b_4


@dataclass
class Changes:
    """Intermediate values of the change."""

    weight: Tensor  # (A, K, 1), of w
    sides: Tensor  # (A, K, 3), of w h
    node: Tensor  # (A, C), of n
    pair: Tensor  # (A, K, G), of g
    factors: Tensor  # (A, K, G + 3), of Q
    gathered: Tensor  # (A, K, C), of m
    outer: Tensor  # (A, G, C), of O
    of_atoms: Tensor  # (A, 3, C), of D
    of_pairs: Tensor  # (A, 3, G), of R
    terms: Tensor  # (A, X (G + C)), of e
    own: Tensor  # (A, C), of n W_1 + b_1
    conv: Tensor  # (A, C), of p sum_g O_g C_g
    all_terms: Tensor  # (A, C), of e W_3 + b_3
    of_pair: OfPairs  # (A, K, G), of g W_4 + b_4


Past = tuple[Cotangents, Changes]


def evaluate(
    node: Tensor, pair: Tensor, pairs: Pairs, near: Neighbors, weights: LayerWeights, options: LayerOptions
) -> tuple[Tensor, Tensor, Values]:
    """Return the features of atoms (A, C) and the channels of pairs (A, K, G), changed, and what led there."""
    factors = torch.cat([pair * pairs.weight, pairs.sides], -1)
    gathered = near.gather(node)
    # the convolution and the moments in one product, because both sum over the same features
    sums = torch.bmm(factors.transpose(1, 2), gathered)
    outer, of_atoms = sums[:, : pair.shape[2]], sums[:, pair.shape[2] :] * options.per_moment
    of_pairs = torch.bmm(pairs.sides.transpose(1, 2), pair).mul_(options.per_moment)
    terms = torch.cat([_products(of_pairs, of_pairs, options), _products(of_atoms, of_atoms, options)], 1)
    own = torch.addmm(weights.own_bias, node, weights.own_weight).tanh_()
    conv = (outer * weights.conv_weight).sum(1).mul_(options.per_neighbor)
    all_terms = torch.addmm(weights.terms_bias, terms, weights.terms_weight).tanh_()
    out = torch.addcmul(node, own, weights.own_factor).addcmul_(conv, weights.conv_factor)
    out = _times_(out.addcmul_(all_terms, weights.terms_factor), options.node_scale)
    of_pair, changed = None, pair
    if weights.pair_weight is not None:  # not in the last layer, whose pairs nobody reads
        of_pair = torch.addmm(weights.pair_bias, pair.flatten(0, 1), weights.pair_weight).tanh_().view(pair.shape)
        changed = _times_(torch.addcmul(pair, of_pair, weights.pair_factor), options.pair_scale)
    values = Values(
        node, pair, factors, gathered, outer, of_atoms, of_pairs, terms, own, conv, all_terms, of_pair
    )  # fmt: skip
    return out, changed, values


def push(
    v: Values, node: Tensor, pair: Tensor, change: Pairs, pairs: Pairs, near: Neighbors, weights: LayerWeights,
    options: LayerOptions,
) -> tuple[Tensor, Tensor, Changes]:  # fmt: skip
    """Return the changes of the results of :func:`evaluate`, and the changes that led there.

    Args:
        v: of the layer.
        node: (A, C) change of n.
        pair: (A, K, G) change of g.
        change: those of w and of w h.
        pairs: as in the layer.
        near: as in the layer.
        weights: of the layer.
        options: of the layer.
    """
    width = pair.shape[2]
    factors = torch.cat([torch.addcmul(pair * pairs.weight, v.pair, change.weight), change.sides], -1)
    gathered = near.gather(node)
    sums = torch.bmm(factors.transpose(1, 2), v.gathered).baddbmm_(v.factors.transpose(1, 2), gathered)
    outer, of_atoms = sums[:, :width], sums[:, width:] * options.per_moment
    of_pairs = torch.bmm(change.sides.transpose(1, 2), v.pair).baddbmm_(pairs.sides.transpose(1, 2), pair)
    of_pairs.mul_(options.per_moment)
    terms = torch.cat(
        [
            _products(a, b, options).add_(_products(b, a, options))
            for a, b in ((of_pairs, v.of_pairs), (of_atoms, v.of_atoms))
        ],
        1,
    )
    own, all_terms = torch.mm(node, weights.own_weight), torch.mm(terms, weights.terms_weight)
    conv = (outer * weights.conv_weight).sum(1).mul_(options.per_neighbor)
    out = torch.addcmul(node, _times_slope(own, v.own), weights.own_factor).addcmul_(conv, weights.conv_factor)
    out = _times_(
        out.addcmul_(_times_slope(all_terms, v.all_terms), weights.terms_factor), options.node_scale
    )  # fmt: skip
    of_pair, changed = None, pair
    if weights.pair_weight is not None:
        of_pair = torch.mm(pair.flatten(0, 1), weights.pair_weight).view(pair.shape)
        changed = torch.addcmul(pair, _times_slope(of_pair, v.of_pair), weights.pair_factor)
        changed = _times_(changed, options.pair_scale)
    found = Changes(
        change.weight, change.sides, node, pair, factors, gathered, outer, of_atoms, of_pairs, terms, own, conv,
        all_terms, of_pair,
    )  # fmt: skip
    return out, changed, found


def pull(
    v: Values, by_node: Tensor, by_pair: OfPairs, pairs: Pairs, near: Neighbors, weights: LayerWeights,
    past: Past | None, options: LayerOptions,
) -> tuple[Tensor, Tensor, Cotangents]:  # fmt: skip
    """Return the gradients by the features of atoms (A, C) and the channels of pairs (A, K, G), and what led there.

    Args:
        v: of the layer.
        by_node: (A, C) gradient by n'.
        by_pair: (A, K, G) gradient by g', None in the last layer.
        pairs: as in the layer.
        near: as in the layer.
        weights: of the layer.
        past: a gradient ``J^T g`` and a change ``J t``; the gradient of ``g . J t`` is added. Or None.
        options: of the layer.
    """
    cot: Any = past and past[0]
    change: Any = past and past[1]
    by_node = by_node if options.node_scale == 1 else by_node * options.node_scale
    own = _by_tanh(by_node, v.own, weights.own_factor, cot and (cot.node, change.own))
    terms = _by_tanh(by_node, v.all_terms, weights.terms_factor, cot and (cot.node, change.all_terms))
    products = torch.mm(terms, weights.terms_weight.T)
    split = options.num_axis * v.pair.shape[2]
    of_pairs, of_atoms = (
        _by_moments(m, products[:, part], cot and (d, cot.products[:, part]), options)
        for m, d, part in (
            (v.of_pairs, change and change.of_pairs, slice(0, split)),
            (v.of_atoms, change and change.of_atoms, slice(split, None)),
        )
    )
    outer = weights.conv_weight * (by_node * weights.conv_factor * options.per_neighbor).unsqueeze(1)
    sums = torch.cat([outer, of_atoms], 1)
    factors = torch.bmm(v.gathered, sums.transpose(1, 2))
    summed = [(v.factors, sums)]  # added up per slot before the slots of an atom are read once
    if cot is not None:
        factors.baddbmm_(change.gathered, cot.sums.transpose(1, 2))
        summed.append((change.factors, cot.sums))
    found_node = torch.addmm(by_node, own, weights.own_weight.T).add_(near.sum_of_product(summed))
    found_pair = (factors[..., : v.pair.shape[2]] * pairs.weight).baddbmm_(pairs.sides, of_pairs)
    if cot is not None:
        found_pair.addcmul_(cot.factors[..., : v.pair.shape[2]], change.weight).baddbmm_(change.sides, cot.of_pairs)
    of_pair = None
    if by_pair is not None:
        by_pair = by_pair if options.pair_scale == 1 else by_pair * options.pair_scale
        of_pair = _by_tanh(by_pair, v.of_pair, weights.pair_factor, cot and (cot.pair, change.of_pair))
        found_pair.add_(by_pair).view(-1, of_pair.shape[2]).addmm_(of_pair.flatten(0, 1), weights.pair_weight.T)
    found = Cotangents(by_node, own, terms, products, of_pairs, sums, factors, by_pair, of_pair)
    return found_node, found_pair, found


def by_pairs(v: Values, by: Cotangents) -> tuple[Tensor, Tensor]:
    """Return the gradients by w (A, K, 1), with w h fixed, and by w h (A, K, 3)."""
    of_channels, of_sides = by.factors.split([v.pair.shape[2], 3], -1)
    by_sides = torch.baddbmm(of_sides, v.pair, by.of_pairs.transpose(1, 2))
    return (of_channels * v.pair).sum(-1, keepdim=True), by_sides


def by_weights(
    v: Values, by: Cotangents, past: Past | None, weights: LayerWeights, options: LayerOptions
) -> list[Tensor | None]:
    """Return the gradients by the parameters, in their order; None for factors that are no parameters."""
    cot: Any = past and past[0]
    change: Any = past and past[1]
    own, terms = torch.mm(v.node.T, by.own), torch.mm(v.terms.T, by.terms)
    factors = [by.node * v.own, by.node * v.conv, by.node * v.all_terms]
    conv = v.outer * _by_conv(by, weights, options)
    if past is not None:
        own.addmm_(change.node.T, cot.own)
        terms.addmm_(change.terms.T, cot.terms)
        factors[0].addcmul_(cot.node, _times_slope(change.own, v.own))
        factors[1].addcmul_(cot.node, change.conv)
        factors[2].addcmul_(cot.node, _times_slope(change.all_terms, v.all_terms))
        conv.addcmul_(change.outer, _by_conv(cot, weights, options))
    of_pair = pair_bias = pair_factor = None
    if by.of_pair is not None:
        flat = by.of_pair.flatten(0, 1)
        of_pair, pair_bias = torch.mm(v.pair.flatten(0, 1).T, flat), flat.sum(0)
        pair_factor = by.pair * v.of_pair
        if past is not None:
            of_pair.addmm_(change.pair.flatten(0, 1).T, cot.of_pair.flatten(0, 1))
            pair_factor.addcmul_(cot.pair, _times_slope(change.of_pair, v.of_pair))
        pair_factor = pair_factor.flatten(0, 1).sum(0)
    trained = weights.own_factor.dim()  # numbers, without dimensions, are options
    own_factor, conv_factor, terms_factor = (found.sum(0) if trained else None for found in factors)
    return [
        own, by.own.sum(0), conv.sum(0), terms, by.terms.sum(0), own_factor, conv_factor, terms_factor,
        of_pair, pair_bias, pair_factor if trained else None,
    ]  # fmt: skip


def _by_conv(by: Cotangents, weights: LayerWeights, options: LayerOptions) -> Tensor:
    """Return the gradient by ``sum_g O_g C_g`` (A, 1, C)."""
    return (by.node * weights.conv_factor * options.per_neighbor).unsqueeze(1)


def _products(first: Tensor, second: Tensor, options: LayerOptions) -> Tensor:
    """Return (A, X C), scalar products of the first X columns of moments (A, 3, C) with all of others."""
    return torch.bmm(first[..., : options.num_axis].transpose(1, 2), second).flatten(1)


def _by_moments(
    moments: Tensor, by_products: Tensor, past: tuple[Tensor, Tensor] | None, options: LayerOptions
) -> Tensor:
    """Return the gradient by moments (A, 3, C) before their scaling, from that by their products (A, X C).

    ``past`` is a change of the moments and a gradient by the change of the products.
    """
    axis, found = options.num_axis, torch.zeros_like(moments)
    for one, by_one in ((moments, by_products), *([past] if past else [])):
        given = by_one.unflatten(1, (axis, -1))
        found.baddbmm_(one[..., :axis], given)
        found[..., :axis] += torch.bmm(one, given.transpose(1, 2))
    return found.mul_(options.per_moment)


def _by_tanh(by: Tensor, tanh: Tensor, factor: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the gradient by z of ``factor tanh(z)``; ``past`` is an earlier gradient and the change of z."""
    if past is not None:
        cot, change = past
        by = torch.addcmul(by, cot * change, tanh, value=-2)
    return _times_slope(by * factor, tanh)


def _times_slope(given: Tensor, tanh: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.tanh_backward(given, tanh)
    return found


def _times_(x: Tensor, number: float) -> Tensor:
    return x if number == 1 else x.mul_(number)  # the usual style has no scale: no pass over x
