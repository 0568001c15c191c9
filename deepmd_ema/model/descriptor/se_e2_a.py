"""DeepPot-SE with radial and angular information (se_e2_a)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout, both_orders
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics
from deepmd_ema.model.kernels.env_mat import Environment
from deepmd_ema.model.kernels.moments import Moments, moments_kernel
from deepmd_ema.model.nn.layers import Network, freeze
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.config.schema.se_e2_a import SeE2AConfig
    from deepmd_ema.model.interface import Block

# A atoms, K neighbor slots, S slots up to sel, T types, M channels, X axis channels


class SeE2ADescriptor(nn.Module):
    """``D = g g[:X]^T`` with ``g = sum_k G(s_k) R_k / S`` over the neighbors, R their normalised environment matrix.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
    """

    mixed_types = False

    def __init__(self, config: SeE2AConfig, num_types: int, seed: int) -> None:
        super().__init__()
        assert not isinstance(config.sel, str), "sel must be resolved to numbers"
        self.section = config
        self.rcut, self.rcut_smth, self.protection = config.rcut, config.rcut_smth, config.env_protection
        self.sel = tuple(config.sel)
        self.one_side = config.type_one_side
        self.num_types, self.num_channels = num_types, config.neuron[-1]
        self.num_axis = config.axis_neuron
        self.dtype = precision(config.precision)
        self.excluded = both_orders(config.exclude_types)
        start = seed if config.seed is None else config.seed
        self.embeddings = nn.ModuleList(
            Network(
                [1, *config.neuron],
                config.activation_function,
                timestep=config.resnet_dt,
                dtype=self.dtype,
                seed=seed_for("embedding", start, index),
            )
            for index in range(num_types if self.one_side else num_types**2)
        )
        freeze(self.embeddings, config.trainable)
        self._moments = moments_kernel(self.networks)
        self.mean: Tensor
        self.stddev: Tensor
        self.register_buffer("mean", torch.zeros(num_types, sum(self.sel), 4, dtype=self.dtype))
        self.register_buffer("stddev", torch.ones(num_types, sum(self.sel), 4, dtype=self.dtype))
        self._statistics = EnvironmentStatistics(
            num_types,
            config.rcut,
            config.rcut_smth,
            config.env_protection,
            self.sel,
            by_type=True,
            exclude_types=config.exclude_types,
        )
        table = torch.tensor([[(i, j) in self.excluded for j in range(num_types)] for i in range(num_types)])
        self._excluded_table: Tensor
        self.register_buffer("_excluded_table", table, persistent=False)

    @property
    def networks(self) -> list[Network]:
        """The embedding nets: one per neighbor type, or per pair at ``centre + neighbor * T``."""
        return cast("list[Network]", list(self.embeddings))

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels * self.num_axis

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return how this descriptor wants its neighbors."""
        return NeighborLayout(self.rcut, self.sel, self.num_types, by_type=True, excluded_pairs=excluded_pairs)

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums by type of centre, as DeePMD-kit names them in a stat file."""
        return self._statistics.sum_names

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrix by type of centre."""
        return self._statistics.measure(batch, self._dropped(batch))

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns of the environment matrix, equal for all slots of a type of centre."""
        mean, spread = self._statistics.mean_and_spread(sums, self.section.set_davg_zero)
        self.mean.copy_(mean)
        self.stddev.copy_(spread)

    def stat_identity(self) -> dict[str, Any]:
        """Return what DeePMD-kit hashes for the name of the folder."""
        return self._statistics.identity()

    def stat_settings(self) -> dict[str, Any]:
        """Return what DeePMD-kit's hash rounds or leaves out."""
        return self._statistics.settings()

    def blocks(self) -> list[Block]:
        """Return none: the embedding nets are small, and all of them are used in every step."""
        return []

    def forward(self, batch: Batch) -> tuple[Tensor, SeE2AVjp]:
        """Return the features (A, M X) and their vector-Jacobian product."""
        assert all(n <= sel for n, sel in zip(batch.slots, self.sel)), f"slots {batch.slots} exceed sel {self.sel}"
        env = self._environment(batch)
        # split, not sliced: a slice compares its ends with the size, which a compiled graph would be asked about
        centres = [env.rows] if self.one_side else env.rows.split(batch.type_counts)
        groups = [
            [self._moments(rows, net) for rows, net in zip(part.split(batch.slots, 1), nets, strict=True)]
            for part, nets in zip(centres, self._nets_of_centres(), strict=True)
        ]
        summed = [reduce(torch.add, [m.value for m in group]) for group in groups]
        moments = (_cat(summed) + self._trimmed_moments(batch)) / sum(self.sel)
        features = torch.bmm(moments.transpose(1, 2), moments[..., : self.num_axis]).flatten(1)
        return features, SeE2AVjp(env, groups, moments, self.num_axis, sum(self.sel))

    def _nets_of_centres(self) -> list[list[Network]]:
        """Return for all atoms, or for those of each type, the net of each neighbor type."""
        types = range(self.num_types)
        if self.one_side:
            return [self.networks]
        return [[self.networks[centre + neighbor * self.num_types] for neighbor in types] for centre in types]

    def _environment(self, batch: Batch) -> Environment:
        sections = list(zip(accumulate(self.sel, initial=0), batch.slots))
        mean, spread = (
            torch.cat([table[:, start : start + n] for start, n in sections], 1).double()[batch.atom_type]
            for table in (self.mean, self.stddev)
        )
        return Environment(
            batch.vector,
            mean,
            spread,
            rcut=self.rcut,
            rcut_smth=self.rcut_smth,
            protection=self.protection,
            dropped=self._dropped(batch),
            dtype=self.dtype,
        )

    def _dropped(self, batch: Batch) -> Tensor | None:
        """Return (A, K) bool, pairs that do not see each other, or None where all do."""
        if not self.excluded:
            return None
        rows = self._excluded_table[batch.atom_type]
        return torch.cat([rows[:, j : j + 1].expand(-1, n) for j, n in enumerate(batch.slots)], 1)

    def _trimmed_moments(self, batch: Batch) -> Tensor:
        """Return what the empty slots beyond those of the batch add to the moments (A, 4, M).

        They are normalised like all slots, so each holds the row ``-mean / stddev`` of its type of centre: a constant
        per type, whose embedding is evaluated once.
        """
        rows = -(self.mean.double() / self.stddev.double()).to(self.dtype)
        total = rows.new_zeros(self.num_types, 4, self.num_channels)
        nets = self._nets_of_centres()
        for j, (end, sel, used) in enumerate(zip(accumulate(self.sel), self.sel, batch.slots)):
            padding = rows[:, end - sel : end]
            parts = padding.split(self.num_types if self.one_side else 1)
            embedded = _cat([group[j](part[..., :1].reshape(-1, 1)) for group, part in zip(nets, parts, strict=True)])
            # by a weight of 0, not by a shorter slice: whether it is empty would be asked of every compiled graph
            beyond = (torch.arange(sel, device=rows.device) >= used).to(self.dtype)
            weighted = padding * beyond[:, None]
            total = total + torch.bmm(weighted.transpose(1, 2), embedded.view(self.num_types, sel, self.num_channels))
        return torch.cat([total[t : t + 1].expand(n, -1, -1) for t, n in enumerate(batch.type_counts)])


class SeE2AVjp:
    """Vector-Jacobian product: from the gradient of the features to that of the vectors of a batch."""

    def __init__(
        self,
        env: Environment,
        groups: list[list[Moments]],
        moments: Tensor,
        num_axis: int,
        num_slots: int,
    ) -> None:
        self._env, self._groups, self._moments = env, groups, moments
        self._num_axis, self._num_slots = num_axis, num_slots

    def __call__(self, grad_features: Tensor) -> Tensor:
        """Return the gradient with respect to ``vector`` (A, K, 3) float64 from that of the features (A, M X)."""
        moments, axis = self._moments, self._num_axis
        grad = grad_features.view(len(moments), -1, axis)
        whole = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
        first = whole[..., :axis] + torch.bmm(moments, grad)
        grad_moments = torch.cat([first, whole[..., axis:]], -1) / self._num_slots
        parts = grad_moments.split([len(group[0].rows) for group in self._groups])
        rows = _cat([_cat([m.vjp(part) for m in group], 1) for part, group in zip(parts, self._groups, strict=True)])
        return self._env.vjp(rows)


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
