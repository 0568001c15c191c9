"""Attention of atoms to their neighbors, and among the pairs of an atom, in the layers of DPA-2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.layers import Layer, linear
from deepmd_ema.model.ops.gather import gather_neighbors
from deepmd_ema.model.ops.reference import LOGIT_SHIFT, masked_softmax, softmax_with_absent
from deepmd_ema.seeds import seed_for

# A atoms, K neighbor slots (J and K of two neighbors), S slots up to sel, C channels of an atom, G of a pair,
# D hidden width of a head, H heads


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
        per_neighbor: what sums over neighbors are multiplied by: one over their number, a number or (A, 1).
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
        """Return the features of the neighbors (A, K, C), 0 where there is none, from those of the atoms (A, C)."""
        return gather_neighbors(node, self.neighbor, self.reverse)


class AtomAttention(nn.Module):
    """An atom attends to its neighbors: ``sum_k softmax_k(q_i . k_k / sqrt(D)) v_k``, heads joined by a layer.

    Args:
        width: C.
        hidden: D.
        num_heads: H.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, width: int, hidden: int, num_heads: int, *, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.width, self.hidden, self.num_heads = width, hidden, num_heads
        self.query = linear(width, hidden * num_heads, dtype, seed_for("query", seed), bias=False)
        self.key_value = linear(width, (hidden + width) * num_heads, dtype, seed_for("key_value", seed), bias=False)
        self.head_map = linear(width * num_heads, width, dtype, seed_for("head_map", seed))

    def forward(self, node: Tensor, around: Surroundings) -> Tensor:
        """Return the update of ``node`` (A, C) by attention."""
        query = self.query(node).unflatten(-1, (self.hidden, self.num_heads))
        # heads stand last, as in DeePMD-kit's files; a linear map of an atom is gathered, not computed for each pair
        pairs = around.gather(self.key_value(node)).unflatten(-1, (self.hidden + self.width, self.num_heads))
        key, value = pairs.split([self.hidden, self.width], 2)
        logits = torch.einsum("adh,akdh->ahk", query, key) * self.hidden**-0.5
        weight = around.weight[:, None]
        if around.smooth:
            logits = (logits + LOGIT_SHIFT) * weight - LOGIT_SHIFT
            weights = softmax_with_absent(logits, around.num_slots) * weight
        else:
            weights = masked_softmax(logits, around.mask[:, None]) * weight
        return self.head_map(torch.einsum("ahk,akch->ahc", weights, value).flatten(1))


class PairAttention(nn.Module):
    """Pairs of an atom attend to each other, weighted by the scalar product of their vectors.

    ``W_jk = softmax_k(q_j . k_k / sqrt(D) [h_j . h_k]) h_j . h_k / sqrt(3)``, the factor in brackets if gated. The
    channels change by ``sum_k W_jk v_k``, normalised by the caller, the vectors by ``sum_k W_jk h_k``; heads are joined
    by a layer.

    Args:
        width: G.
        hidden: D.
        num_heads: H.
        gated: whether logits are gated.
        of_channels: whether channels are changed.
        of_vectors: whether vectors are changed.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_heads: int,
        *,
        gated: bool,
        of_channels: bool,
        of_vectors: bool,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.width, self.hidden, self.num_heads, self.gated = width, hidden, num_heads, gated
        self.query_key = linear(width, 2 * hidden * num_heads, dtype, seed_for("query_key", seed), bias=False)
        self.value: Layer | None = None
        self.head_map: Layer | None = None
        self.vector_map: Layer | None = None
        if of_channels:
            self.value = linear(width, width * num_heads, dtype, seed_for("value", seed), bias=False)
            self.head_map = linear(width * num_heads, width, dtype, seed_for("head_map", seed))
        if of_vectors:
            self.vector_map = linear(num_heads, 1, dtype, seed_for("vector_map", seed), bias=False)

    def weights(self, pair: Tensor, vectors: Tensor, around: Surroundings) -> Tensor:
        """Return W (A, H, J, K) from channels (A, K, G) and vectors (A, K, 3); 0 where either neighbor is none."""
        query, key = self.query_key(pair).unflatten(-1, (self.hidden, 2 * self.num_heads)).chunk(2, -1)
        logits = torch.einsum("ajdh,akdh->ahjk", query, key) * self.hidden**-0.5
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, None]
        if self.gated:
            logits = logits * products
        both = (around.weight[:, :, None] * around.weight[:, None, :])[:, None]
        if around.smooth:
            attention = softmax_with_absent((logits + LOGIT_SHIFT) * both - LOGIT_SHIFT, around.num_slots)
        else:
            attention = masked_softmax(logits, around.mask[:, None, None])
        return attention * (both * products * 3**-0.5)

    def change_of_channels(self, weights: Tensor, pair: Tensor) -> Tensor:
        """Return the update of the channels (A, K, G) by attention."""
        assert self.value is not None
        assert self.head_map is not None
        value = self.value(pair).unflatten(-1, (self.width, self.num_heads))
        changed: Tensor = self.head_map(torch.einsum("ahjk,akgh->ajgh", weights, value).flatten(2))
        return changed

    def change_of_vectors(self, weights: Tensor, vectors: Tensor) -> Tensor:
        """Return the update of the vectors (A, K, 3) by attention."""
        assert self.vector_map is not None
        changed: Tensor = self.vector_map(torch.einsum("ahjk,akx->ajxh", weights, vectors))
        return changed.squeeze(-1)
