"""Attention among the neighbors of an atom, gated by the angles between them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.layers import linear
from deepmd_ema.model.nn.norm import LayerNorm
from deepmd_ema.utils import seed_for

# A atoms, K neighbor slots, M channels of a pair, H hidden width


class Weights(NamedTuple):
    """The parameters of a layer: of the two linear maps and of the layer norm."""

    in_weight: Tensor  # (M, 3 H)
    in_bias: Tensor  # (3 H,)
    out_weight: Tensor  # (H, M)
    out_bias: Tensor  # (M,)
    norm_weight: Tensor  # (M,)
    norm_bias: Tensor  # (M,)


class GatedAttention(nn.Module):
    """Self-attention over the neighbors of an atom.

    DPA-1, Zhang et al., arXiv:2208.08236, eq. 11 to 14.

    Args:
        width: M.
        hidden: H.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self, width: int, hidden: int, *, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.in_proj = linear(width, 3 * hidden, dtype, seed_for("in_proj", seed))
        self.out_proj = linear(hidden, width, dtype, seed_for("out_proj", seed))


class AttentionLayer(nn.Module):
    """Attention with a skip connection, normalised.

    Args:
        width: M.
        hidden: H.
        eps: of the layer norm.
        trainable_norm: whether weight and bias of the layer norm are trained.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        eps: float,
        trainable_norm: bool,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.attention = GatedAttention(width, hidden, dtype=dtype, seed=seed)
        self.norm = LayerNorm(width, eps=eps, trainable=trainable_norm, dtype=dtype)

    @property
    def weights(self) -> Weights:
        """The parameters."""
        first = self.attention.in_proj
        last = self.attention.out_proj
        norm = self.norm
        return Weights(
            first.weight, first.bias, last.weight, last.bias, norm.weight, norm.bias
        )
