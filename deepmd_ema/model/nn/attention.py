"""Attention among the neighbors of an atom, gated by the angles between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.layers import linear
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.kernels.norm import LayerNorm

LOGIT_SHIFT = 20.0  # a neighbor at the cutoff has the logit of an empty slot, -20, in smooth attention; as DeePMD-kit

# A atoms, K neighbor slots, M channels of a pair, H hidden width


class GatedAttention(nn.Module):
    """Self-attention over the neighbors of an atom (DPA-1, Zhang et al., arXiv:2208.08236, eq. 11 to 14).

    Args:
        width: M.
        hidden: H.
        gated: whether weights are multiplied by the cosines of the angles between neighbors.
        unit_rows: gives queries, keys and values (..., H) the length 1; None leaves them as they are.
        scaling: factor of the product of query and key.
        smooth: whether weights vanish with the switch of either neighbor.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        gated: bool,
        unit_rows: Callable[[Tensor], Tensor] | None,
        scaling: float,
        smooth: bool,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.gated, self.unit_rows, self.scaling, self.smooth = gated, unit_rows, scaling, smooth
        self.in_proj = linear(width, 3 * hidden, dtype, seed_for("in_proj", seed))
        self.out_proj = linear(hidden, width, dtype, seed_for("out_proj", seed))

    def forward(self, pairs: Tensor, mask: Tensor, switch: Tensor, direction: Tensor, num_slots: int) -> Tensor:
        """Return what attention adds to the channels of each pair (A, K, M).

        Args:
            pairs: (A, K, M).
            mask: (A, K) bool, where there is a neighbor.
            switch: (A, K), 0 where there is none.
            direction: (A, K, 3), unit vectors, 0 where there is none.
            num_slots: slots of an atom with those that are not here; the empty ones count in a smooth softmax.
        """
        projected = self.in_proj(pairs).unflatten(-1, (3, -1))
        query, key, value = (projected if self.unit_rows is None else self.unit_rows(projected)).unbind(-2)
        logits = torch.bmm(query * self.scaling, key.transpose(1, 2))
        both = switch[:, :, None] * switch[:, None, :]
        if self.smooth:
            logits = (logits + LOGIT_SHIFT) * both - LOGIT_SHIFT
            weights, factor = softmax_with_absent(logits, num_slots), both  # 0 where there is no neighbor
        else:
            weights, factor = masked_softmax(logits, mask[:, None, :]), mask[:, :, None].to(logits.dtype)
        if self.gated:
            factor = factor * torch.bmm(direction, direction.transpose(1, 2))
        return self.out_proj(torch.bmm(weights * factor, value))

    def of_no_neighbor(self, pairs: Tensor) -> Tensor:
        """Return what attention adds to the channels (..., M) of an empty slot, which attends to nothing."""
        nothing = pairs.new_zeros(*pairs.shape[:-1], len(self.out_proj.weight))
        return self.out_proj(nothing)


class AttentionLayer(nn.Module):
    """Attention with a skip connection, normalised.

    Args:
        attention: the attention.
        norm: the normalisation.
    """

    def __init__(self, attention: GatedAttention, norm: LayerNorm) -> None:
        super().__init__()
        self.attention, self.norm = attention, norm

    def forward(self, pairs: Tensor, mask: Tensor, switch: Tensor, direction: Tensor, num_slots: int) -> Tensor:
        """Return the channels of each pair (A, K, M)."""
        attended: Tensor = self.attention(pairs, mask, switch, direction, num_slots)
        return cast("Tensor", self.norm(pairs + attended))

    def of_no_neighbor(self, pairs: Tensor) -> Tensor:
        """Return the channels (..., M) of an empty slot."""
        return cast("Tensor", self.norm(pairs + self.attention.of_no_neighbor(pairs)))


def softmax_with_absent(logits: Tensor, num_slots: int) -> Tensor:
    """Return the softmax of ``logits`` (..., K) among ``num_slots`` of which those beyond K are empty, at -20."""
    absent = torch.full_like(logits[..., :1], num_slots - logits.shape[-1]).log() - LOGIT_SHIFT
    return torch.cat([logits, absent], -1).softmax(-1)[..., :-1]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of ``logits`` (..., K) where ``mask`` is true; equal numbers where it is nowhere true."""
    # finite, so that a row of empty slots has no nan
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)
