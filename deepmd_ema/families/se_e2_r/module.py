"""DeepPot-SE with radial information only (se_e2_r)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, GradRows, Sums, joined, of_atoms
from deepmd_ema.model.descriptor.env_statistics import radial_range
from deepmd_ema.model.interpolation import InterpolatedNets, Interpolation, NeighborSum, numbers_per_pair
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.environment import RadialEnvironment

if TYPE_CHECKING:
    from deepmd_ema.families.se_e2_r.section import SeE2RConfig

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

    def __init__(self, config: SeE2RConfig, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed)
        self.interpolation: Interpolation = Interpolation(config.interpolate, self.dtype)

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels

    def interpolated_nets(self, min_distance: float) -> InterpolatedNets:
        """Return the networks, and the range of their input for atoms that are not nearer (angstrom)."""
        width = numbers_per_pair(self.networks[0])
        return InterpolatedNets(self.interpolation, width, *radial_range(self, min_distance))

    def forward(self, batch: Batch) -> tuple[Tensor, SeE2RVjp]:
        """Return the features (A, M) and their vector-Jacobian product."""
        env = self._environment_matrix(RadialEnvironment, batch)
        # sums over the neighbors of each section, for all atoms or for those of each type
        parts, embedded = self._rows_by_net(env.rows, batch), None
        if self.interpolation.serves(batch):
            sums, embedded = self._interpolated(parts, torch.ones_like)
            groups = [[_radial(one) for one in group] for group in sums]
        else:
            groups = [[_direct_sums(rows, net) for rows, net in part] for part in parts]
        summed = joined([reduce(torch.add, [value for value, _ in group]) for group in groups])
        trimmed = reduce(torch.add, [(values * beyond).sum(1) for _, values, beyond in self._trimmed(batch, embedded)])
        scale = SCALE / sum(self.sel)
        vjps = [[vjp for _, vjp in group] for group in groups]
        counts = [group[0][0].shape[0] for group in groups]
        return (summed + of_atoms(trimmed, batch)) * scale, SeE2RVjp(env, vjps, counts, scale)


def _radial(summed: NeighborSum) -> Sums:
    return summed.value[:, 0], lambda grad: summed.vjp(grad[:, None])[1][..., None]


def _direct_sums(rows: Tensor, net: Network) -> Sums:
    value, derivative = net.value_and_derivative(rows.contiguous())
    return value.sum(1), lambda grad: torch.bmm(derivative, grad[..., None])


class SeE2RVjp:
    """Vector-Jacobian product: from the gradient of the features to that of the vectors of a batch."""

    def __init__(self, env: RadialEnvironment, vjps: list[list[GradRows]], counts: list[int], scale: float) -> None:
        self._env, self._vjps, self._counts, self._scale = env, vjps, counts, scale

    def __call__(self, grad_features: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that of the features (A, M)."""
        groups = zip((grad_features * self._scale).split(self._counts), self._vjps, strict=True)
        return self._env.vjp(joined([joined([vjp(part) for vjp in group], 1) for part, group in groups]))
