"""Values of embedding nets."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from deepmd_ema.model.nn.layers import Network


def embed(x: Tensor, net: Network) -> Tensor:
    """Return ``net(x)`` (..., M) of inputs (..., N), in their precision."""
    return cast("Tensor", net(x))
