"""Means and spreads of the environment matrix by type of centre, which descriptors normalise it with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.model.ops.environment import normalised_environment, radial_parts, switch
from deepmd_ema.model.sums import mean_and_spread, sum_by_type

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Block

# A atoms, K neighbor slots, S slots up to sel, T types, C columns of the environment matrix

_SETTINGS = ("rcut", "rcut_smth", "protection", "dtype")
MIN_SPREAD = 1e-2  # of the environment, as DeePMD-kit has it
SPREAD_UNSEEN = 1e-1  # of the environment of a type that the data do not hold


@runtime_checkable
class HasRadialRange(Protocol):
    """A module whose nets are not functions of an environment matrix."""

    def radial_range(self, min_distance: float) -> tuple[float, float]:
        """Return the least and the largest number of pairs at which they are evaluated."""


class EnvironmentStatistics:
    """Measurement of the sums of the environment matrix of a module, and its mean and spread.

    Args:
        module: with the buffers of ``add_normalisation``, its cutoffs, its protection and ``sel``: the most neighbors
            of each element, which come in one section each, or one number for all.
        exclude_types: pairs of types that do not see each other in this descriptor.
        zero_mean: whether the mean is zero instead of measured.
    """

    def __init__(self, module: Any, exclude_types: Sequence[Sequence[int]], zero_mean: bool) -> None:
        self._module, self._zero_mean = module, zero_mean
        self.rcut, self._rcut_smth, self._protection, _ = (getattr(module, name) for name in _SETTINGS)
        mixed_types = isinstance(module.sel, int)
        sel: list[int] = [module.sel] if mixed_types else list(module.sel)
        self.most = sum(sel)
        self._num_types, _, num_columns = module.get_buffer("mean").shape
        self._radial_only = num_columns == 1
        # what DeePMD-kit hashes for the name of the folder of a stat file, and what that rounds or leaves out
        identity = {
            "type": "se_r" if self._radial_only else "se_a",
            "ntypes": self._num_types,
            "rcut": round(self.rcut, 2),
            "rcut_smth": round(self._rcut_smth, 2),
            "nsel": self.most,
            "sel": sel,
            "mixed_types": mixed_types,
        }
        self._folder = hashlib.sha1(json.dumps(identity).encode(), usedforsecurity=False).hexdigest()
        self.settings = {
            "rcut": self.rcut,
            "rcut_smth": self._rcut_smth,
            "exclude_types": sorted(sorted(pair) for pair in exclude_types),
            "env_protection": self._protection,
        }

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums by type of centre, where DeePMD-kit keeps them in a stat file."""
        kinds = "r" if self._radial_only else "ra"
        return tuple(f"{self._folder}/{kind}_{t}" for kind in kinds for t in range(self._num_types))

    def measure(self, vector: Tensor, dropped: Tensor | None, batch: Batch) -> dict[str, np.ndarray]:
        """Return count, sum and sum of squares (3,) of the radial column of the environment matrix, ``r_<type>``, and
        of its three angular columns together, ``a_<type>``, by type of centre.

        All ``sel`` slots are counted; empty ones are zeros.

        Args:
            vector: (A, K, 3) angstrom.
            dropped: (A, K) bool, pairs that do not see each other in this descriptor, or None.
            batch: that the vectors are of, on the CPU.
        """  # noqa: D205
        distance = torch.linalg.vector_norm(vector, dim=-1)
        inverse = (distance + self._protection).reciprocal_()
        radial = switch(distance, self.rcut, self._rcut_smth).mul_(inverse)
        if dropped is not None:
            radial[dropped] = 0
        count = radial.new_full((len(radial),), self.most)
        columns = [count, radial.sum(1), (radial * radial).sum(1)]
        if not self._radial_only:
            angular = inverse.mul_(radial)
            along = torch.bmm(angular[:, None], vector).sum((1, 2))
            columns += [3 * count, along, angular.mul_(distance).square_().sum(1)]
        by_type = sum_by_type(torch.stack(columns, 1), batch)
        parts = [by_type[:, :3]] if self._radial_only else [by_type[:, :3], by_type[:, 3:]]
        return dict(zip(self.sum_names, np.concatenate(parts), strict=True))

    def apply(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns from ``measure`` over all data, equal for all slots of a type."""
        stacked = np.stack([sums[name] for name in self.sum_names])
        radial, angular = (stacked, None) if self._radial_only else np.split(stacked, 2)
        radial_mean, radial_spread = mean_and_spread(radial, MIN_SPREAD)
        unseen = radial[:, 0] == 0
        spread = radial_spread[:, None]
        if angular is not None:
            spread = np.stack([radial_spread, *3 * [mean_and_spread(angular, MIN_SPREAD)[1]]], 1)
        mean = np.zeros_like(spread)
        if not self._zero_mean:
            mean[:, 0] = np.where(unseen, 0.0, radial_mean)
        spread[unseen] = SPREAD_UNSEEN
        self._module.get_buffer("mean").copy_(torch.as_tensor(mean[:, None]))
        self._module.get_buffer("stddev").copy_(torch.as_tensor(spread[:, None]))


class EnvironmentDescriptor(nn.Module):
    """Base of descriptors that normalise environment matrices.

    Attributes:
        environments: what is measured, of each normalised matrix.
    """

    environments: list[EnvironmentStatistics]

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Sums of the environment matrices by type of centre, where DeePMD-kit keeps them in a stat file."""
        return tuple(dict.fromkeys(name for one in self.environments for name in one.sum_names))

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrices by type of centre."""
        found: dict[str, np.ndarray] = {}
        for one in self.environments:
            found |= one.measure(*self._seen(batch, one), batch)
        return found

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns of the environment matrices."""
        for one in self.environments:
            one.apply(sums)

    def stat_settings(self) -> dict[str, Any]:
        """Return the settings of the sums beyond their names."""
        settings = [one.settings for one in self.environments]
        return settings[0] if len(settings) == 1 else {str(n): one for n, one in enumerate(settings)}

    def blocks(self) -> list[Block]:
        """Return none: all networks are small, and all of them are used in every step."""
        return []

    def _seen(self, batch: Batch, environment: EnvironmentStatistics) -> tuple[Tensor, Tensor | None]:
        """Return the vectors (A, K, 3) of a matrix, and which pairs (A, K) do not see each other, or None."""
        raise NotImplementedError


def add_normalisation(module: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 1.0) -> None:
    """Give a module the buffers ``mean`` and ``stddev`` (T, S, C) of the columns of its environment matrix."""
    module.register_buffer("mean", torch.zeros(shape, dtype=dtype))
    module.register_buffer("stddev", torch.full(shape, spread, dtype=dtype))


def has_equal_slots(model: nn.Module) -> bool:
    """Whether all slots have one mean and spread, so that a neighbor counts the same in any of them.

    Statistics of this program are equal; those in files of others may differ from slot to slot.
    """
    tables = [table for name, table in model.named_buffers() if name.rpartition(".")[2] in ("mean", "stddev")]
    return all(bool((table == table[:, :1]).all()) for table in tables)


def radial_range(module: nn.Module, min_distance: float) -> tuple[float, float]:
    """Return the least and the largest number of pairs at which the nets of a module are evaluated.

    It is that of the first column of the normalised environment matrix, or what the module says.

    Args:
        module: with ``radial_range``, or the buffers of ``add_normalisation``, its cutoffs and its protection.
        min_distance: of two atoms, angstrom.
    """
    if isinstance(module, HasRadialRange):
        return module.radial_range(min_distance)
    rcut, rcut_smth, protection, _ = (getattr(module, name) for name in _SETTINGS)
    mean, spread = (module.get_buffer(name)[..., 0].double() for name in ("mean", "stddev"))
    distance = torch.tensor([min_distance], dtype=torch.float64, device=mean.device)
    largest = radial_parts(distance, rcut, rcut_smth, protection).s
    # 0 of pairs that are excluded; at the cutoff, and in empty slots, the raw number is 0
    ends = torch.stack([torch.zeros_like(mean), -mean / spread, (largest - mean) / spread])
    return float(ends.min()), float(ends.max())


def normalised(rows: Tensor, module: nn.Module, atom_type: Tensor) -> Tensor:
    """Return rows (A, K, C) in float64 minus the mean and over the spread of their slots and types of centre (A,)."""
    mean, stddev = normalisation(module, rows.shape[1], atom_type)
    return (rows - mean) / stddev


def environment(
    module: nn.Module, vector: Tensor, dropped: Tensor | None, atom_type: Tensor, slots: Tensor | None = None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the normalised environment matrix of a module and its vector-Jacobian product.

    Args:
        module: with the buffers of ``add_normalisation``, its cutoffs, protection and precision.
        vector: (A, K, 3) float64, angstrom.
        dropped: (A, K) bool, pairs that do not see each other, or None.
        atom_type: (A,) of the centres.
        slots: (K,) of the vectors; None: the first ones.
    """
    rcut, rcut_smth, protection, dtype = (getattr(module, name) for name in _SETTINGS)
    parts = radial_parts(torch.linalg.vector_norm(vector, dim=-1), rcut, rcut_smth, protection)
    mean, spread = normalisation(module, vector.shape[1] if slots is None else slots, atom_type)
    return normalised_environment(vector, parts, mean, spread, dropped, dtype)


def normalisation(module: nn.Module, slots: Tensor | int, atom_type: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread (A, K, C) in float64 of slots (K,), or of the first ones, by type of centre (A,)."""
    # selected, not sliced: whether a slice is contiguous depends on its length, on which a compiled graph would depend
    if not isinstance(slots, Tensor):  # a number, or a symbol of a graph
        slots = torch.arange(slots, device=atom_type.device)
    mean, stddev = (module.get_buffer(name).index_select(1, slots).double()[atom_type] for name in ("mean", "stddev"))
    return mean, stddev
