"""DeepPot-SE with radial and angular information (se_e2_a)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, Sums, of_atoms
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.reference import axis_features, axis_features_vjp

if TYPE_CHECKING:
    from deepmd_ema.families.se_e2_a.section import SeE2AConfig
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, S slots up to sel, T types, M channels, X axis channels


class SeE2ADescriptor(ByTypeDescriptor):
    """``D = g g[:X]^T`` with ``g = sum_k G(s_k) R_k / S`` over the neighbors, R their normalised environment matrix.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
    """

    def __init__(self, config: SeE2AConfig, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed)
        self.num_axis = config.axis_neuron

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels * self.num_axis

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, M X) and their vector-Jacobian product."""

        def evaluated(rows: Tensor, net: Network) -> Sums:
            found = self.ops.moments(rows, net)
            return found.value, found.vjp

        summed, vjp, embedded = self._sums(
            batch, lambda rows: rows, lambda interpolated: (interpolated.value, interpolated.rows_vjp), evaluated
        )
        num_slots, axis = sum(self.sel), self.num_axis
        moments = (summed + self._trimmed_moments(batch, embedded)) / num_slots
        return axis_features(moments, axis), lambda grad: vjp(axis_features_vjp(grad, moments, axis) / num_slots)

    def _trimmed_moments(self, batch: Batch, embedded: list[Tensor] | None) -> Tensor:
        """Return the part of the moments (A, 4, M) from empty slots beyond those of the batch."""
        parts = [
            torch.bmm((rows * beyond).transpose(1, 2), values)
            for rows, values, beyond in self._trimmed(batch, embedded)
        ]
        return of_atoms(reduce(torch.add, parts), batch)
