"""DeepPot-SE with radial information only (se_e2_r)."""

from __future__ import annotations

from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, joined, of_atoms
from deepmd_ema.model.kernels.env_mat import RadialEnvironment

# A atoms, K neighbor slots, S slots up to sel, M channels

SCALE = 1 / 5  # of the features, as DeePMD-kit has it


class SeE2RDescriptor(ByTypeDescriptor):
    """``D = sum_k G(s_k) / (5 S)`` over all S slots, s the normalised radial column of the environment matrix.

    DeepPot-SE (Zhang et al., arXiv:1805.09003), the radial part. An empty slot has ``s = -mean / spread``; a pair of
    ``exclude_types`` has ``s = 0`` and still adds ``G(0)``.
    """

    num_columns: ClassVar[int] = 1

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels

    def forward(self, batch: Batch) -> tuple[Tensor, SeE2RVjp]:
        """Return the features (A, M) and their vector-Jacobian product."""
        env = self._environment_matrix(RadialEnvironment, batch)
        # values and derivatives (A', K', M) of each section, for all atoms or for those of each type
        groups = [
            [net.value_and_derivative(rows.contiguous()) for rows, net in part]
            for part in self._rows_by_net(env.rows, batch)
        ]
        summed = joined([reduce(torch.add, [value.sum(1) for value, _ in group]) for group in groups])
        trimmed = reduce(torch.add, [(embedded * beyond).sum(1) for _, embedded, beyond in self._trimmed(batch)])
        scale = SCALE / sum(self.sel)
        derivatives = [[derivative for _, derivative in group] for group in groups]
        return (summed + of_atoms(trimmed, batch)) * scale, SeE2RVjp(env, derivatives, scale)


class SeE2RVjp:
    """Vector-Jacobian product: from the gradient of the features to that of the vectors of a batch."""

    def __init__(self, env: RadialEnvironment, derivatives: list[list[Tensor]], scale: float) -> None:
        self._env, self._derivatives, self._scale = env, derivatives, scale

    def __call__(self, grad_features: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that of the features (A, M)."""
        parts = (grad_features * self._scale)[..., None].split([group[0].shape[0] for group in self._derivatives])
        groups = zip(parts, self._derivatives, strict=True)
        return self._env.vjp(joined([joined([torch.bmm(d, part) for d in group], 1) for part, group in groups]))
