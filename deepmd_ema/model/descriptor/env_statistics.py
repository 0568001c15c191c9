"""Means and spreads of the environment matrix by type of centre, which several descriptors normalise it with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.kernels.switch import switch
from deepmd_ema.model.statistics import mean_and_spread, sum_by_type

SMALLEST_SPREAD = 1e-2  # of the environment, as DeePMD-kit has it
SPREAD_UNSEEN = 1e-1  # of the environment of a type that the data do not hold


class EnvironmentStatistics:
    """How the sums of an environment matrix are measured and what follows from them.

    Args:
        num_types: T.
        rcut: cutoff radius, angstrom.
        rcut_smth: start of the switch, angstrom.
        protection: added to distances before division, angstrom.
        sel: most neighbors, per element or one number for all.
        by_type: whether neighbors come in one section per element.
        exclude_types: pairs of types that do not see each other in this descriptor.
        radial_only: whether the rows have no angular columns.
    """

    def __init__(
        self,
        num_types: int,
        rcut: float,
        rcut_smth: float,
        protection: float,
        sel: tuple[int, ...],
        *,
        by_type: bool,
        exclude_types: list[list[int]],
        radial_only: bool = False,
    ) -> None:
        self._num_types, self._rcut, self._rcut_smth, self._protection = num_types, rcut, rcut_smth, protection
        self._sel, self._by_type, self._radial_only = sel, by_type, radial_only
        self._exclude_types = exclude_types

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums by type of centre, as DeePMD-kit names them in a stat file."""
        kinds = "r" if self._radial_only else "ra"
        return tuple(f"{kind}_{t}" for kind in kinds for t in range(self._num_types))

    def measure(self, batch: Batch, dropped: Tensor | None = None) -> dict[str, np.ndarray]:
        """Return count, sum and sum of squares (3,) of the radial column of the environment matrix, ``r_<type>``, and
        of its three angular columns together, ``a_<type>``, by type of centre.

        All ``sel`` slots are counted; empty ones are zeros.

        Args:
            batch: on the CPU.
            dropped: (A, K) bool, pairs that do not see each other in this descriptor.
        """  # noqa: D205
        vector = batch.vector
        distance = torch.linalg.vector_norm(vector, dim=-1)
        inverse = (distance + self._protection).reciprocal_()
        radial = switch(distance, self._rcut, self._rcut_smth).mul_(inverse)
        if dropped is not None:
            radial[dropped] = 0
        count = radial.new_full((len(radial),), sum(self._sel))
        columns = [count, radial.sum(1), (radial * radial).sum(1)]
        if not self._radial_only:
            angular = inverse.mul_(radial)
            along = torch.bmm(angular[:, None], vector).sum((1, 2))
            columns += [3 * count, along, angular.mul_(distance).square_().sum(1)]
        by_type = sum_by_type(torch.stack(columns, 1), batch)
        parts = [by_type[:, :3]] if self._radial_only else [by_type[:, :3], by_type[:, 3:]]
        return dict(zip(self.sum_names, np.concatenate(parts), strict=True))

    def mean_and_spread(self, sums: Mapping[str, np.ndarray], zero_mean: bool) -> tuple[Tensor, Tensor]:
        """Return mean and spread of the columns of the environment matrix (T, 1, 4), or (T, 1, 1) if radial only.

        Args:
            sums: of ``measure``, over all data.
            zero_mean: whether the mean is zero instead of measured.
        """
        stacked = np.stack([sums[name] for name in self.sum_names])
        radial, angular = (stacked, None) if self._radial_only else np.split(stacked, 2)
        radial_mean, radial_spread = mean_and_spread(radial, SMALLEST_SPREAD)
        unseen = radial[:, 0] == 0
        spread = radial_spread[:, None]
        if angular is not None:
            spread = np.stack([radial_spread, *3 * [mean_and_spread(angular, SMALLEST_SPREAD)[1]]], 1)
        mean = np.zeros_like(spread)
        if not zero_mean:
            mean[:, 0] = np.where(unseen, 0.0, radial_mean)
        spread[unseen] = SPREAD_UNSEEN
        return torch.as_tensor(mean[:, None]), torch.as_tensor(spread[:, None])

    def identity(self) -> dict[str, Any]:
        """Return what DeePMD-kit hashes for the name of the folder of a stat file."""
        return {
            "type": "se_r" if self._radial_only else "se_a",
            "ntypes": self._num_types,
            "rcut": round(self._rcut, 2),
            "rcut_smth": round(self._rcut_smth, 2),
            "nsel": sum(self._sel),
            "sel": list(self._sel),
            "mixed_types": not self._by_type,
        }

    def settings(self) -> dict[str, Any]:
        """Return what DeePMD-kit's hash rounds or leaves out."""
        return {
            "rcut": self._rcut,
            "rcut_smth": self._rcut_smth,
            "exclude_types": sorted(sorted(pair) for pair in self._exclude_types),
            "env_protection": self._protection,
        }
