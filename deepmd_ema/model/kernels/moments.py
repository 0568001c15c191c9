"""Moments of embedding nets that are interpolated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepmd_ema.model.kernels.direct_sum import DirectSum
from deepmd_ema.model.kernels.series import SeriesSum
from deepmd_ema.model.kernels.spline import Spline, SplineSum
from deepmd_ema.model.kernels.spline_table import SplitSum
from deepmd_ema.model.nn.layers import Network

# A atoms, K neighbor slots, M channels of the embedding


@dataclass(frozen=True)
class SplineMoments:
    """The moments of one section of neighbors from a series or spline of its net, and their gradient."""

    summed: SeriesSum | DirectSum | SplineSum | SplitSum

    @property
    def rows(self) -> Tensor:
        """The normalised environment matrix (A, K, 4)."""
        return self.summed.left

    @property
    def value(self) -> Tensor:
        """The moments (A, 4, M), a function of the parameters of the net."""
        return self.summed.value

    def vjp(self, grad_moments: Tensor) -> Tensor:
        """Return the gradient with respect to the rows (A, K, 4), also through s, from that of the moments."""
        if isinstance(self.summed, SeriesSum):
            return self.summed.rows_vjp(grad_moments)
        of_rows, of_s = self.summed.vjp(grad_moments)
        return torch.cat([of_rows[..., :1] + of_s.unsqueeze(-1), of_rows[..., 1:]], -1)


def spline_moments(spline: Spline, rows: Tensor, net: Network) -> SplineMoments:
    """Return the moments from a series or spline of the net."""
    return SplineMoments(spline(rows, rows[..., 0], net))
