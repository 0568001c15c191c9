"""Scalar products of the moments of features, which do not change under rotation."""

from __future__ import annotations

import torch
from torch import Tensor

# A atoms, K neighbor slots, C channels, X axis channels


def symmetrized(features: Tensor, vectors: Tensor, num_axis: int) -> Tensor:
    """Return ``M[:, :X]^T M`` as (A, X C) with the moments ``M = sum_k h_k g_k^T`` (A, 3, C).

    The terms ``grrg`` and ``drrd`` of DPA-2, Zhang et al., arXiv:2312.15492, which are divided by 3 there.

    Args:
        features: (A, K, C) g, zero where there is no neighbor.
        vectors: (A, K, 3) h, which turn with the frame, times all factors of the moments.
        num_axis: X.
    """
    moments = torch.bmm(vectors.transpose(1, 2), features)
    return torch.bmm(moments[..., :num_axis].transpose(1, 2), moments).flatten(1)
