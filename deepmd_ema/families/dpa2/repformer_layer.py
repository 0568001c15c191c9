"""One layer of DPA-2: atoms, pairs and vectors of pairs change each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa2.repformer_attention import AtomAttention, PairAttention, Surroundings
from deepmd_ema.model.descriptor.symmetrization import symmetrized
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import Layer, linear
from deepmd_ema.model.nn.norm import LayerNorm, eps_of
from deepmd_ema.model.nn.update import Update
from deepmd_ema.model.ops.cpu.repformer_layer import LayerWeights
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.dpa2.section import RepformerConfig

# A atoms, K neighbor slots, C channels of an atom, G of a pair


class RepformerLayer(nn.Module):
    """A layer of the repformer (DPA-2, Zhang et al., arXiv:2312.15492, section "repformer").

    Atoms take the convolution ``sum_k (W g_k) f_k``, scalar products of the moments of the channels g of their pairs
    (``grrg``) and of the features f of their neighbors (``drrd``), and attention to neighbors. Pairs take a layer of
    their channels, the product of the features of both atoms, and attention among the pairs of an atom, which also
    changes their vectors. Each is an option.

    Args:
        options: the section ``repformer``.
        last: whether it is the last layer, in which pairs do not change.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, options: RepformerConfig, *, last: bool, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.options, self.last, self._dtype, self._seed = options, last, dtype, seed
        self.act = activation(options.activation_function).value
        width, pair_width = options.g1_dim, options.g2_dim
        conv_outside = options.update_g1_has_conv and options.g1_out_conv
        self.linear_node = self._linear(self._num_terms, width, "linear_node")
        self.node_mlp = self._linear(width, width, "node_mlp") if options.g1_out_mlp else None
        self.conv: Layer | None = None
        if options.update_g1_has_conv:
            widths = (pair_width, width) if options.g1_out_conv else (width, pair_width)
            self.conv = self._linear(*widths, "conv", bias=False)
        self.attention = None
        if options.update_g1_has_attn:
            self.attention = AtomAttention(
                width, options.attn1_hidden, options.attn1_nhead, dtype=dtype, seed=seed_for("attention", seed)
            )
        self.node_update = self._update(1 + options.g1_out_mlp + conv_outside + options.update_g1_has_attn, width)
        self._gathers = options.update_g1_has_conv or options.update_g1_has_drrd
        if not last:
            self._add_pairs(options)

    def forward(self, node: Tensor, pair: Tensor, vectors: Tensor, around: Surroundings) -> tuple[Tensor, ...]:
        """Return the features of atoms (A, C), the channels (A, K, G) and the vectors (A, K, 3) of pairs, changed."""
        weight = around.weight[..., None]
        needed = self._gathers or (not self.last and self.options.update_g2_has_g1g1)
        messages = around.gather(node) * weight if needed else node.new_zeros(0)
        new_node = self._change_node(node, messages, pair, vectors, around)
        if self.last:
            return new_node, pair, vectors
        return new_node, *self._change_pairs(node, messages, pair, vectors, around)

    @property
    def can_be_fused(self) -> bool:
        """Whether its options are those of the function of all layers (``ops.cpu.repformer``)."""
        options = self.options
        wanted = options.update_g1_has_conv and options.update_g1_has_drrd and options.update_g1_has_grrg
        other = options.update_g1_has_attn or options.update_g2_has_g1g1 or options.update_g2_has_attn
        apart = options.g1_out_conv and options.g1_out_mlp
        return wanted and apart and not (other or options.update_h2) and options.activation_function == "tanh"

    def weights(self) -> LayerWeights:
        """Return the parameters, for the function of all layers."""
        own, conv, terms = self.node_mlp, self.conv, self.linear_node
        assert own is not None
        assert conv is not None
        of_pair: tuple[Tensor | None, ...] = (None, None, None)
        if not self.last:
            of_pair = self.linear_pair.weight, self.linear_pair.bias, *self.pair_update.each_factor(own.weight)
        factors = self.node_update.each_factor(own.weight)
        weights = own.weight, own.bias, conv.weight, terms.weight, terms.bias
        return LayerWeights._make([*weights, *factors, *of_pair])

    def _change_node(
        self, node: Tensor, messages: Tensor, pair: Tensor, vectors: Tensor, around: Surroundings
    ) -> Tensor:
        options, changes = self.options, []
        terms = [] if options.g1_out_mlp else [node]
        if self.node_mlp is not None:
            changes.append(self.act(self.node_mlp(node)))
        if self.conv is not None:
            if options.g1_out_conv:  # summed over neighbors before the map, which then sees one row for an atom
                outer = torch.bmm(pair.transpose(1, 2), messages)
                changes.append((outer * self.conv.weight).sum(1) * around.per_neighbor)
            else:
                terms.append((pair * self.conv(messages)).sum(1) * around.per_neighbor)
        if options.update_g1_has_grrg or options.update_g1_has_drrd:
            vectors = vectors * (around.per_moment * 3**-0.5)
        if options.update_g1_has_grrg:
            weighted = pair * around.weight[..., None]
            terms.append(symmetrized(weighted, vectors, options.axis_neuron))
        if options.update_g1_has_drrd:
            terms.append(symmetrized(messages, vectors, options.axis_neuron))
        changes.append(self.act(self.linear_node(torch.cat(terms, -1))))
        if self.attention is not None:
            changes.append(self.attention(node, around))
        changed: Tensor = self.node_update(node, changes)
        return changed

    def _change_pairs(
        self, node: Tensor, messages: Tensor, pair: Tensor, vectors: Tensor, around: Surroundings
    ) -> tuple[Tensor, Tensor]:
        changes = [self.act(self.linear_pair(pair))]
        if self.product is not None:
            changes.append(self.product(node[:, None] * messages))
        if self.pair_attention is not None:
            weights = self.pair_attention.weights(pair, vectors, around)
            if self.norm is not None:
                changes.append(self.norm(self.pair_attention.change_of_channels(weights, pair)))
            if self.vector_update is not None:
                vectors = self.vector_update(vectors, [self.pair_attention.change_of_vectors(weights, vectors)])
        return self.pair_update(pair, changes), vectors

    def _add_pairs(self, options: RepformerConfig) -> None:
        """Add the modules that change pairs."""
        width, pair_width = options.g1_dim, options.g2_dim
        attends = options.update_g2_has_attn
        self.linear_pair = self._linear(pair_width, pair_width, "linear_pair")
        self.product: Layer | None = None
        if options.update_g2_has_g1g1:
            self.product = self._linear(width, pair_width, "product", bias=False)
        self.pair_attention: PairAttention | None = None
        if attends or options.update_h2:
            self.pair_attention = PairAttention(
                pair_width,
                options.attn2_hidden,
                options.attn2_nhead,
                gated=options.attn2_has_gate,
                of_channels=attends,
                of_vectors=options.update_h2,
                dtype=self._dtype,
                seed=seed_for("pair_attention", self._seed),
            )
        self.norm: LayerNorm | None = None
        if attends:
            eps = eps_of(options.ln_eps)
            self.norm = LayerNorm(pair_width, eps=eps, trainable=options.trainable_ln, dtype=self._dtype)
        self.pair_update = self._update(1 + options.update_g2_has_g1g1 + attends, pair_width, "pair")
        self.vector_update = self._update(1, 1, "vector") if options.update_h2 else None

    @property
    def _num_terms(self) -> int:
        """Number of inputs of the layer of all terms."""
        options = self.options
        conv_inside = options.update_g1_has_conv and not options.g1_out_conv
        moments = options.g2_dim * options.update_g1_has_grrg + options.g1_dim * options.update_g1_has_drrd
        return options.g1_dim * (not options.g1_out_mlp) + options.axis_neuron * moments + options.g2_dim * conv_inside

    def _linear(self, num_in: int, num_out: int, name: str, bias: bool = True) -> Layer:
        return linear(num_in, num_out, self._dtype, seed_for(name, self._seed), bias)

    def _update(self, num_changes: int, width: int, name: str = "node") -> Update:
        return Update(width, num_changes, self.options, dtype=self._dtype, seed=seed_for(name, self._seed))
