"""Normalisation of features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DEFAULT_EPS = 1e-5


def eps_of(ln_eps: float | None) -> float:
    """Return the value of an option ``ln_eps``."""
    return DEFAULT_EPS if ln_eps is None else ln_eps


class LayerNorm(nn.Module):
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension.



    Args:
        width: numbers of the last dimension.
        eps: added to the variance.
        trainable: whether weight and bias are trained.
        dtype: precision of the parameters.
    """

    def __init__(
        self, width: int, *, eps: float, trainable: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps = eps
        # parameters even where they are not trained: files of DeePMD-kit have them
        self.weight = nn.Parameter(
            torch.ones(width, dtype=dtype), requires_grad=trainable
        )
        self.bias = nn.Parameter(
            torch.zeros(width, dtype=dtype), requires_grad=trainable
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return y, of the shape of x."""
        return normalised(x, self.weight, self.bias, self.eps)


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the same as ``torch.nn.functional.layer_norm``, with all derivatives.

    That takes mean and variance as constants in its third derivative, without an error (torch
    2.13). Hessians in a loss need it.
    """
    centred = x - x.mean(
        -1, keepdim=True
    )  # torch.var_mean warns of inputs without rows
    return (
        centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        + bias
    )
