"""DeepPot-SE with radial information only (se_e2_r)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, Sums, of_atoms
from deepmd_ema.model.interpolation.sums import NeighborSum
from deepmd_ema.model.nn.layers import Network

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, S slots up to sel, M channels

SCALE = 1 / 5  # of the features, as DeePMD-kit has it


class SeE2RDescriptor(ByTypeDescriptor):
    """``D = sum_k G(s_k) / (5 S)`` over all S slots, s the normalised radial column of the environment matrix.

    DeepPot-SE (Zhang et al., arXiv:1805.09003), the radial part. An empty slot has ``s = -mean / spread``; a pair of
    ``exclude_types`` has ``s = 0`` and still adds ``G(0)``.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
    """

    num_columns: ClassVar[int] = 1

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, M) and their vector-Jacobian product."""
        summed, vjp, embedded = self._sums(batch, torch.ones_like, _radial, _direct_sums)
        trimmed = reduce(torch.add, [(values * beyond).sum(1) for _, values, beyond in self._trimmed(batch, embedded)])
        scale = SCALE / sum(self.sel)
        return (summed + of_atoms(trimmed, batch)) * scale, lambda grad: vjp(grad * scale)


def _radial(summed: NeighborSum) -> Sums:
    return summed.value[:, 0], lambda grad: summed.vjp(grad[:, None])[1][..., None]


def _direct_sums(rows: Tensor, net: Network) -> Sums:
    value, derivative = net.value_and_derivative(rows.contiguous())
    return value.sum(1), lambda grad: torch.bmm(derivative, grad[..., None])
