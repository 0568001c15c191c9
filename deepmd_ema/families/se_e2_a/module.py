"""DeepPot-SE with radial and angular information (se_e2_a)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, Sums, joined, of_atoms
from deepmd_ema.model.descriptor.env_statistics import radial_range
from deepmd_ema.model.interpolation import InterpolatedNets, Interpolation, numbers_per_pair
from deepmd_ema.model.ops.environment import Environment
from deepmd_ema.model.ops.reference import axis_features, axis_features_vjp

if TYPE_CHECKING:
    from deepmd_ema.families.se_e2_a.section import SeE2AConfig

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
        self.interpolation: Interpolation = Interpolation(config.interpolate, self.dtype)

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels * self.num_axis

    def interpolated_nets(self, min_distance: float) -> InterpolatedNets:
        """Return the networks, and the range of their input for atoms that are not nearer (angstrom)."""
        width = numbers_per_pair(self.networks[0])
        return InterpolatedNets(self.interpolation, width, *radial_range(self, min_distance))

    def forward(self, batch: Batch) -> tuple[Tensor, SeE2AVjp]:
        """Return the features (A, M X) and their vector-Jacobian product."""
        env = self._environment_matrix(Environment, batch)
        parts = self._rows_by_net(env.rows, batch)
        groups: list[list[Sums]]
        embedded = None
        if self.interpolation.serves(batch):
            sums, embedded = self._interpolated(parts, lambda rows: rows)
            groups = [[(one.value, one.rows_vjp) for one in group] for group in sums]
        else:
            moments_of = [[self.ops.moments(rows, net) for rows, net in part] for part in parts]
            groups = [[(one.value, one.vjp) for one in group] for group in moments_of]
        summed = [reduce(torch.add, [value for value, _ in group]) for group in groups]
        moments = (joined(summed) + self._trimmed_moments(batch, embedded)) / sum(self.sel)
        features = axis_features(moments, self.num_axis)
        return features, SeE2AVjp(env, groups, moments, self.num_axis, sum(self.sel))

    def _trimmed_moments(self, batch: Batch, embedded: list[Tensor] | None) -> Tensor:
        """Return the part of the moments (A, 4, M) from empty slots beyond those of the batch."""
        parts = [
            torch.bmm((rows * beyond).transpose(1, 2), values)
            for rows, values, beyond in self._trimmed(batch, embedded)
        ]
        return of_atoms(reduce(torch.add, parts), batch)


class SeE2AVjp:
    """Vector-Jacobian product: from the gradient of the features to that of the vectors of a batch."""

    def __init__(
        self,
        env: Environment,
        groups: list[list[Sums]],
        moments: Tensor,
        num_axis: int,
        num_slots: int,
    ) -> None:
        self._env, self._groups, self._moments = env, groups, moments
        self._num_axis, self._num_slots = num_axis, num_slots

    def __call__(self, grad_features: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that of the features (A, M X)."""
        grad_moments = axis_features_vjp(grad_features, self._moments, self._num_axis) / self._num_slots
        parts = grad_moments.split([group[0][0].shape[0] for group in self._groups])
        groups = zip(parts, self._groups, strict=True)
        return self._env.vjp(joined([joined([vjp(part) for _, vjp in group], 1) for part, group in groups]))
