"""Layers of DPA-2: atoms, pairs and vectors of pairs change each other, also by attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import Layer, linear
from deepmd_ema.model.nn.norm import LayerNorm, eps_of
from deepmd_ema.model.nn.update import Update
from deepmd_ema.model.ops.attention import (
    LOGIT_SHIFT,
    masked_softmax,
    softmax_with_absent,
)
from deepmd_ema.model.ops.gather import gather_neighbors, sum_over_reverse
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa2.section import RepformerConfig

# A atoms, K neighbor slots (J and K of two neighbors), S slots up to sel, M reverse slots, C
# channels of an atom, G of a pair, X axis channels, D hidden width of a head, H heads


@dataclass(frozen=True)
class Surroundings:
    """The neighbors between which messages pass.

    Attributes:
        neighbor: (A, K) int64, flat atom index of each neighbor; ``A`` is none.
        reverse: (A, M) int64, the flat slots in which an atom is a neighbor.
        mask: (A, K) bool, where there is a neighbor.
        weight: (A, K) of a neighbor in sums: the switch if smooth, else 1; 0 where there is none.
        smooth: whether the weight is the switch.
        num_slots: S, which counts in softmax.
        per_neighbor: what sums over neighbors are multiplied by: one over their number, a number or
            (A, 1).
        per_moment: the same for moments, a number or (A, 1, 1).
    """

    neighbor: Tensor
    reverse: Tensor
    mask: Tensor
    weight: Tensor
    smooth: bool
    num_slots: int
    per_neighbor: Tensor | float
    per_moment: Tensor | float

    def gather(self, node: Tensor) -> Tensor:
        """Return the features of the neighbors (A, K, C), 0 where there is none, from (A, C)."""
        return gather_neighbors(node, self.neighbor, self.reverse)


# gradients by atoms and pairs (None: 0) to those by atoms, pairs, weights and sides
LayerVjp = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor, Tensor, Tensor]]


class RepformerLayer(UsesOperations):
    """A layer of the repformer (DPA-2, Zhang et al., arXiv:2312.15492, section "repformer").

    Atoms take the convolution ``sum_k (W g_k) f_k``, scalar products of the moments of the channels
    g of their pairs (``grrg``) and of the features f of their neighbors (``drrd``), and attention
    to neighbors. Pairs take a layer of their channels, the product of the features of both atoms,
    and attention among the pairs of an atom, which also changes their vectors. Each is an option.

    Args:
        options: the section ``repformer``.
        last: whether it is the last layer, in which pairs do not change.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self, options: RepformerConfig, *, last: bool, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.options = options
        self.last = last
        self.act = activation(options.activation_function).value
        width = options.g1_dim
        pair_width = options.g2_dim
        conv_outside = options.g1_out_conv
        has_conv = options.update_g1_has_conv
        has_attn = options.update_g1_has_attn
        attends = options.update_g2_has_attn

        def dense(num_in: int, num_out: int, name: str, bias: bool = True) -> Layer:
            return linear(num_in, num_out, dtype, seed_for(name, seed), bias)

        def update(num_changes: int, width: int, name: str) -> Update:
            return Update(
                width, num_changes, options, dtype=dtype, seed=seed_for(name, seed)
            )

        # the width of all terms of `forward` side by side
        num_terms = options.axis_neuron * (
            pair_width * options.update_g1_has_grrg + width * options.update_g1_has_drrd
        )
        if not options.g1_out_mlp:
            num_terms += width
        if has_conv and not conv_outside:
            num_terms += pair_width
        self.linear_node = dense(num_terms, width, "linear_node")
        self.node_mlp = dense(width, width, "node_mlp") if options.g1_out_mlp else None
        # maps channels to features after the sum over neighbors, or features to channels before it
        widths = (pair_width, width) if conv_outside else (width, pair_width)
        self.conv = dense(*widths, "conv", bias=False) if has_conv else None
        self.attention = (
            AtomAttention(options, dtype, seed_for("attention", seed))
            if has_attn
            else None
        )
        self.node_update = update(
            1 + options.g1_out_mlp + (has_conv and conv_outside) + has_attn,
            width,
            "node",
        )
        # pairs after the last layer have no effect on atoms: there are no parameters for them
        if last:
            return
        self.linear_pair = dense(pair_width, pair_width, "linear_pair")
        self.product = (
            dense(width, pair_width, "product", bias=False)
            if options.update_g2_has_g1g1
            else None
        )
        self.pair_attention: PairAttention | None = None
        if attends or options.update_h2:
            self.pair_attention = PairAttention(
                options, dtype, seed_for("pair_attention", seed)
            )
        self.norm: LayerNorm | None = None
        if attends:
            eps = eps_of(options.ln_eps)
            self.norm = LayerNorm(
                pair_width, eps=eps, trainable=options.trainable_ln, dtype=dtype
            )
        self.pair_update = update(
            1 + options.update_g2_has_g1g1 + attends, pair_width, "pair"
        )
        # one factor for all three components, or vectors would not rotate with the atoms
        self.vector_update = update(1, 1, "vector") if options.update_h2 else None

    def forward(
        self, node: Tensor, pair: Tensor, vectors: Tensor, around: Surroundings
    ) -> tuple[Tensor, ...]:
        """Return the changed features of atoms, channels and vectors of pairs.

        Args:
            node: (A, C) features of atoms.
            pair: (A, K, G) channels of pairs.
            vectors: (A, K, 3) of pairs.
            around: the neighbors.
        """
        options, weight = self.options, around.weight[..., None]
        gathers = options.update_g1_has_conv or options.update_g1_has_drrd
        needed = gathers or (not self.last and options.update_g2_has_g1g1)
        # (A, K, C)
        messages = around.gather(node) * weight if needed else node.new_zeros(0)
        # changes are added to the atom; terms are inputs of one layer, which is a change
        changes, terms = [], [] if options.g1_out_mlp else [node]
        if self.node_mlp is not None:
            changes.append(self.act(self.node_mlp(node)))
        if self.conv is not None:
            if options.g1_out_conv:
                # the sum over neighbors (A, G, C) comes before the map, which then acts once for an
                # atom, not on every pair
                outer = torch.bmm(pair.transpose(1, 2), messages)
                changes.append((outer * self.conv.weight).sum(1) * around.per_neighbor)
            else:
                terms.append((pair * self.conv(messages)).sum(1) * around.per_neighbor)
        if options.update_g1_has_grrg or options.update_g1_has_drrd:
            # products of two moments are means over x, y, z: 3^-1/2 is a factor of each
            scaled = vectors * (around.per_moment * 3**-0.5)
            if options.update_g1_has_grrg:
                terms.append(
                    self.ops.symmetrized(pair * weight, scaled, options.axis_neuron)
                )
            if options.update_g1_has_drrd:
                terms.append(
                    self.ops.symmetrized(messages, scaled, options.axis_neuron)
                )
        changes.append(self.act(self.linear_node(torch.cat(terms, -1))))
        if self.attention is not None:
            changes.append(self.attention(node, around))
        new_node = self.node_update(node, changes)
        # pairs change by the atoms before this layer, not by new_node
        if self.last:
            return new_node, pair, vectors
        changes = [self.act(self.linear_pair(pair))]
        if self.product is not None:
            changes.append(self.product(node[:, None] * messages))
        if self.pair_attention is not None:
            weights = self.pair_attention.weights(pair, vectors, around)
            if self.norm is not None:
                change = self.pair_attention.change_of_channels(weights, pair)
                changes.append(
                    self.ops.normalised(
                        change, self.norm.weight, self.norm.bias, self.norm.eps
                    )
                )
            # weights follow from the old vectors
            if self.vector_update is not None:
                vectors = self.vector_update(
                    vectors, [self.pair_attention.change_of_vectors(weights, vectors)]
                )
        return new_node, self.pair_update(pair, changes), vectors

    @property
    def is_written_out(self) -> bool:
        """Whether :meth:`with_vjp` serves its options."""
        options = self.options
        has_terms = (
            options.update_g1_has_conv
            and options.update_g1_has_drrd
            and options.update_g1_has_grrg
        )
        has_attention = options.update_g1_has_attn or options.update_g2_has_attn
        is_apart = options.g1_out_conv and options.g1_out_mlp
        return (
            has_terms
            and is_apart
            and not (has_attention or options.update_g2_has_g1g1 or options.update_h2)
            and options.activation_function == "tanh"
        )

    def with_vjp(
        self, node: Tensor, pair: Tensor, sides: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor, LayerVjp]:
        """Return changed features of atoms (A, C) and channels of pairs (A, K, G), and their vjp.

        With n the features of an atom, g the channels, h the vector and w the weight of a pair, m
        the features of its neighbor, ``Q = [w g, q w h / sqrt(3)]``, and p and q the factors of
        sums over neighbors and of moments::

            B = sum_k Q_k m_k^T = [O, D]        R = sum_k q w_k h_k g_k^T / sqrt(3)
            e = [R[:X]^T R, D[:X]^T D]          grrg and drrd
            n' = a (n + r_1 tanh(n W_1 + b_1) + r_2 p sum_g O_g C_g + r_3 tanh(e W_3 + b_3))
            g' = b (g + r_4 tanh(g W_4 + b_4))

        The weight of a neighbor is applied to its few channels, not to its many features. All are
        ordinary operations: the layers take about half of those that autograd makes of them for a
        loss of forces.

        Args:
            node: n.
            pair: g.
            sides: (A, K, 3), q w h / sqrt(3).
            around: the neighbors.

        Returns:
            n', g' and the function from the gradients by these (None: by g' it is 0) to those by n,
            g, w (A, K, 1) with the sides fixed, and the sides (A, K, 3).
        """
        weight = around.weight[..., None]
        axis = self.options.axis_neuron
        width = pair.shape[2]
        assert self.node_mlp is not None
        assert self.conv is not None
        mlp_weight = self.node_mlp.weight
        conv_weight = self.conv.weight
        terms_weight = self.linear_node.weight
        # r_1, r_2 and r_3
        mlp_factor, conv_factor, terms_factor = self.node_update.each_factor(mlp_weight)
        scale, conv_factor = self.node_update.scale, conv_factor * around.per_neighbor
        # Q (A, K, G + 3) and m (A, K, C); the convolution and the moments are one product B,
        # because both sum over the same features
        factors, gathered = torch.cat([pair * weight, sides], -1), around.gather(node)
        sums = torch.bmm(factors.transpose(1, 2), gathered)
        # O (A, G, C) and D (A, 3, C); a slice would be differentiated by a sum with zeros
        outer, atom_moments = sums.split([width, 3], 1)
        moments = (
            torch.bmm(sides.transpose(1, 2), pair),
            atom_moments,
        )  # R (A, 3, G) and D
        columns = [m[..., :axis] for m in moments]
        # sums of three products: batches of such small matrices take three times as long
        products = [
            (first.unsqueeze(3) * m.unsqueeze(2)).sum(1).flatten(1)
            for first, m in zip(columns, moments)
        ]
        mlp = torch.addmm(self.node_mlp.bias, node, mlp_weight).tanh()
        terms = torch.addmm(
            self.linear_node.bias, torch.cat(products, 1), terms_weight
        ).tanh()
        conv = (outer * conv_weight).sum(1)
        out = (
            torch.addcmul(node, mlp, mlp_factor)
            .addcmul(conv, conv_factor)
            .addcmul(terms, terms_factor)
        )
        changed, channels = pair, None
        if not self.last:
            channels = self.linear_pair(pair).tanh()
            changed = torch.addcmul(
                pair, channels, self.pair_update.each_factor(pair)[0]
            )
            changed = _times(changed, self.pair_update.scale)

        def vjp(
            by_node: Tensor, by_pair: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            by_node = _times(by_node, scale)
            by_mlp = _by_tanh(by_node * mlp_factor, mlp)
            by_terms = _by_tanh(by_node * terms_factor, terms)
            by_products = (by_terms @ terms_weight.T).split(
                [axis * width, axis * node.shape[1]], 1
            )
            # gradients by R (A, 3, G) and by D (A, 3, C)
            by_pair_moments, by_atom_moments = (
                _by_moments(m, first, by.unflatten(1, (axis, -1)))
                for m, first, by in zip(moments, columns, by_products)
            )
            by_outer = conv_weight * (by_node * conv_factor).unsqueeze(1)
            by_sums = torch.cat([by_outer, by_atom_moments], 1)
            # the gradient by m goes back to the atom that is the neighbor
            by_gathered = sum_over_reverse(
                torch.bmm(factors, by_sums), around.neighbor, around.reverse
            )
            by_old_node = torch.addmm(by_node, by_mlp, mlp_weight.T) + by_gathered
            by_weighted, by_sides = torch.bmm(gathered, by_sums.transpose(1, 2)).split(
                [width, 3], -1
            )
            by_old_pair = torch.baddbmm(by_weighted * weight, sides, by_pair_moments)
            by_sides = torch.baddbmm(by_sides, pair, by_pair_moments.transpose(1, 2))
            if by_pair is not None and channels is not None:
                by_pair = _times(by_pair, self.pair_update.scale)
                by_tanh = _by_tanh(
                    by_pair * self.pair_update.each_factor(pair)[0], channels
                )
                by_old_pair = (
                    by_old_pair + by_pair + by_tanh @ self.linear_pair.weight.T
                )
            by_weight = (by_weighted * pair).sum(-1, keepdim=True)
            return by_old_node, by_old_pair, by_weight, by_sides

        return _times(out, scale), changed, vjp


def _by_moments(moments: Tensor, columns: Tensor, by_products: Tensor) -> Tensor:
    """Return the gradient by moments (A, 3, C), from that by the products (A, X, C).

    The products are those of the first X columns of the moments with all of them.
    """
    whole = (columns.unsqueeze(3) * by_products.unsqueeze(1)).sum(2)
    by_columns = (moments.unsqueeze(2) * by_products.unsqueeze(1)).sum(3)
    # moments are both factors; the first of them has the first columns only
    first, rest = whole.split(
        [by_products.shape[1], moments.shape[2] - by_products.shape[1]], 2
    )
    return torch.cat([first + by_columns, rest], 2)


def _by_tanh(grad: Tensor, tanh: Tensor) -> Tensor:
    by_input: Tensor = torch.ops.aten.tanh_backward(grad, tanh)
    return by_input


def _times(x: Tensor, number: float) -> Tensor:
    # the update styles without a scale spare a pass over x
    return x if number == 1 else x * number


class AtomAttention(nn.Module):
    """An atom attends to its neighbors: ``sum_k softmax_k(q_i . k_k / sqrt(D)) v_k``.

    Heads are joined by a layer.

    Args:
        options: the section ``repformer``.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, options: RepformerConfig, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.width = width = options.g1_dim
        self.hidden = hidden = options.attn1_hidden
        self.num_heads = num_heads = options.attn1_nhead
        self.query = linear(
            width, hidden * num_heads, dtype, seed_for("query", seed), bias=False
        )
        self.key_value = linear(
            width,
            (hidden + width) * num_heads,
            dtype,
            seed_for("key_value", seed),
            bias=False,
        )
        self.head_map = linear(
            width * num_heads, width, dtype, seed_for("head_map", seed)
        )

    def forward(self, node: Tensor, around: Surroundings) -> Tensor:
        """Return the update of ``node`` (A, C) by attention."""
        query = self.query(node).unflatten(-1, (self.hidden, self.num_heads))
        # heads are the last dimension, as in DeePMD-kit's files; keys and values of an atom are
        # computed once and gathered, not computed for each pair
        pairs = around.gather(self.key_value(node)).unflatten(
            -1, (self.hidden + self.width, self.num_heads)
        )
        key, value = pairs.split([self.hidden, self.width], 2)
        logits = torch.einsum("adh,akdh->ahk", query, key) * self.hidden**-0.5
        weight = around.weight[:, None]
        if around.smooth:
            # a neighbor at the cutoff has the logit of an empty slot, which counts up to sel
            logits = (logits + LOGIT_SHIFT) * weight - LOGIT_SHIFT
            weights = softmax_with_absent(logits, around.num_slots) * weight
        else:
            weights = masked_softmax(logits, around.mask[:, None]) * weight
        return self.head_map(torch.einsum("ahk,akch->ahc", weights, value).flatten(1))


class PairAttention(nn.Module):
    """Pairs of an atom attend to each other, weighted by the scalar product of their vectors.

    ``W_jk = softmax_k(q_j . k_k / sqrt(D) [h_j . h_k]) h_j . h_k / sqrt(3)``, the factor in
    brackets if gated. The channels change by ``sum_k W_jk v_k``, normalised by the caller, the
    vectors by ``sum_k W_jk h_k``; heads are joined by a layer.

    Args:
        options: the section ``repformer``.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, options: RepformerConfig, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.width = width = options.g2_dim
        self.hidden = hidden = options.attn2_hidden
        self.num_heads = num_heads = options.attn2_nhead
        self.gated = options.attn2_has_gate
        self.query_key = linear(
            width,
            2 * hidden * num_heads,
            dtype,
            seed_for("query_key", seed),
            bias=False,
        )
        self.value: Layer | None = None
        self.head_map: Layer | None = None
        self.vector_map: Layer | None = None
        if options.update_g2_has_attn:
            self.value = linear(
                width, width * num_heads, dtype, seed_for("value", seed), bias=False
            )
            self.head_map = linear(
                width * num_heads, width, dtype, seed_for("head_map", seed)
            )
        if options.update_h2:
            self.vector_map = linear(
                num_heads, 1, dtype, seed_for("vector_map", seed), bias=False
            )

    def weights(self, pair: Tensor, vectors: Tensor, around: Surroundings) -> Tensor:
        """Return W (A, H, J, K) from channels (A, K, G) and vectors (A, K, 3).

        It is 0 where either neighbor is none.
        """
        query_key = self.query_key(pair).unflatten(
            -1, (self.hidden, 2 * self.num_heads)
        )
        query, key = query_key.chunk(2, -1)  # (A, K, D, H)
        logits = torch.einsum("ajdh,akdh->ahjk", query, key) * self.hidden**-0.5
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, None]  # (A, 1, J, K)
        if self.gated:
            logits = logits * products
        # a pair of neighbors vanishes with either of them
        both = (around.weight[:, :, None] * around.weight[:, None, :])[:, None]
        if around.smooth:
            logits = (logits + LOGIT_SHIFT) * both - LOGIT_SHIFT
            attention = softmax_with_absent(logits, around.num_slots)
        else:
            attention = masked_softmax(logits, around.mask[:, None, None])
        return attention * (both * products * 3**-0.5)

    def change_of_channels(self, weights: Tensor, pair: Tensor) -> Tensor:
        """Return the update of the channels (A, K, G) by attention."""
        assert self.value is not None
        assert self.head_map is not None
        # (A, K, G, H), heads last
        value = self.value(pair).unflatten(-1, (self.width, self.num_heads))
        changed: Tensor = self.head_map(
            torch.einsum("ahjk,akgh->ajgh", weights, value).flatten(2)
        )
        return changed

    def change_of_vectors(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the update of the vectors (A, K, 3) by attention."""
        assert self.vector_map is not None
        changed: Tensor = self.vector_map(
            torch.einsum("ahjk,akx->ajxh", weights, vectors)
        )
        return changed.squeeze(-1)
