"""Means and spreads of the environment matrix by type of centre, which descriptors divide by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.schema.descriptor import HasInnerNeighbors
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.interface import mean_and_spread, sum_by_type
from deepmd_ema.model.ops.environment import Radial, switch_and_derivative

# A atoms, K neighbor slots, S slots up to sel, T types, C columns of the environment matrix

MIN_SPREAD = 1e-2  # least spread of a column, as DeePMD-kit has it
SPREAD_UNSEEN = 1e-1  # spread for a type that the data do not hold


class EnvironmentMatrix(nn.Module):
    """Base of modules that normalise an environment matrix, each column by the type of the centre.

    Attributes:
        rcut: cutoff, angstrom.
        rcut_smth: where the switch begins, angstrom.
        protection: added to distances, angstrom.
        dtype: precision of the normalised rows.
        mean: (T, S, C) buffer of each column.
        stddev: (T, S, C) buffer of each column.
    """

    rcut: float
    rcut_smth: float
    protection: float
    dtype: torch.dtype
    mean: Tensor
    stddev: Tensor

    def add_normalisation(
        self, shape: tuple[int, int, int], dtype: torch.dtype, spread: float = 1.0
    ) -> None:
        """Make the buffers ``mean`` and ``stddev`` of this shape (T, S, C)."""
        self.register_buffer("mean", torch.zeros(shape, dtype=dtype))
        self.register_buffer("stddev", torch.full(shape, spread, dtype=dtype))

    def radial_range(self, min_distance: float) -> tuple[float, float]:
        """Return the least and the largest number of pairs at which nets are evaluated.

        It is that of the first column.

        Args:
            min_distance: of two atoms, angstrom.
        """
        mean = self.mean[..., 0].double()  # (T, S)
        spread = self.stddev[..., 0].double()
        # s = w / (r + p) falls with the distance: it is largest for the nearest pair
        distance = torch.tensor([min_distance], dtype=torch.float64, device=mean.device)
        weight, _ = switch_and_derivative(distance, self.rcut, self.rcut_smth)
        largest = weight / (distance + self.protection)
        # normalised numbers: 0 of an excluded pair; at the cutoff and in an empty slot, where the
        # raw number is 0; of the nearest pair
        ends = torch.stack(
            [torch.zeros_like(mean), -mean / spread, (largest - mean) / spread]
        )
        return float(ends.min()), float(ends.max())

    def environment_matrix(
        self,
        vector: Tensor,
        dropped: Tensor | None,
        atom_type: Tensor,
        slots: Tensor | None = None,
        radial: Radial | None = None,
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the normalised environment matrix and its vector-Jacobian product.

        Its raw rows are ``(s, c x, c y, c z)`` with ``s = w / (r + p)``, ``c = w / (r + p)^2``, w
        the smooth switch and p the protection; where the buffers have one column, ``s`` alone. All
        are zero beyond the cutoff, so that empty slots have no gradient.

        Args:
            vector: (A, K, 3) float64, angstrom.
            dropped: (A, K) bool, pairs whose rows are zero after normalisation, or None; no empty
                slots.
            atom_type: (A,) of the centres.
            slots: (K,) of the vectors; None: the first ones.
            radial: of the vectors, if it is at hand.

        Returns:
            The rows (A, K, 4) or (A, K, 1), ``-mean / spread`` in an empty slot, and a function
            from the gradient by them to that by ``vector`` (A, K, 3) float64.
        """
        radial = radial or Radial.of(vector, self.rcut, self.rcut_smth)
        distance = radial.distance
        inverse = (distance + self.protection).reciprocal()
        # (A, K): s, 1/angstrom, c, 1/angstrom^2, and the derivative of s by r
        s = radial.weight * inverse
        c = s * inverse
        ds = (radial.dweight - s) * inverse
        ds_over_r = ds / distance
        mean, spread = self.normalisation(
            vector.shape[1] if slots is None else slots, atom_type
        )
        scale = spread.reciprocal()
        # after normalisation: a dropped pair has 0, not the number of an empty slot
        keep = None if dropped is None else (~dropped).unsqueeze(-1).to(scale.dtype)
        if mean.shape[-1] == 1:
            # s depends on the length alone: its gradient is along the vector
            scale = scale if keep is None else scale * keep
            ds_dvector = scale * ds_over_r.unsqueeze(-1) * vector
            rows = (s.unsqueeze(-1) - mean) * scale
            return rows.to(
                self.dtype
            ), lambda grad_rows: grad_rows.double() * ds_dvector
        dc_over_r = (ds - c) * inverse / distance
        rows = (
            torch.cat([s.unsqueeze(-1), c.unsqueeze(-1) * vector], -1)
            .sub_(mean)
            .mul_(scale)
        )
        if keep is not None:
            rows = rows * keep
            scale = scale * keep

        def vjp(grad_rows: Tensor) -> Tensor:
            grad = grad_rows.double() * scale
            angular = grad[..., 1:]
            # the gradient through c x: c for each component, and dc/dr along the vector
            along = ds_over_r * grad[..., 0] + dc_over_r * (vector * angular).sum(-1)
            return torch.addcmul(c.unsqueeze(-1) * angular, along.unsqueeze(-1), vector)

        return rows.to(self.dtype), vjp

    def normalisation(
        self, slots: Tensor | int, atom_type: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return mean and spread (A, K, C) in float64 of slots, by type of centre (A,).

        Slots are (K,) places, or a number: the first ones.
        """
        if isinstance(slots, Tensor) or torch.compiler.is_compiling():
            # selected, not sliced: whether a slice is contiguous depends on its length, as a graph
            # then would
            if not isinstance(slots, Tensor):  # a number, or a symbol of a graph
                slots = torch.arange(slots, device=atom_type.device)
            tables = [
                table.index_select(1, slots) for table in (self.mean, self.stddev)
            ]
        else:
            tables = [self.mean[:, :slots], self.stddev[:, :slots]]
        mean, stddev = (table.double()[atom_type] for table in tables)
        return mean, stddev


class EnvironmentStatistics:
    """Measurement of the sums of the environment matrix of a module, and its mean and spread.

    Args:
        module: with ``sel``: the most neighbors of each element, which come in one section each, or
            one number for all.
        exclude_types: pairs of types that do not see each other in this descriptor.
        zero_mean: whether the mean is zero instead of measured.

    Attributes:
        most: sum of ``sel``.
        sum_names: radial and angular sums by type of centre, where DeePMD-kit keeps them in a stat
            file.
    """

    def __init__(
        self, module: Any, exclude_types: Sequence[Sequence[int]], zero_mean: bool
    ) -> None:
        self._module = module
        self._zero_mean = zero_mean
        self.rcut = module.rcut
        mixed_types = isinstance(module.sel, int)
        sel: list[int] = [module.sel] if mixed_types else list(module.sel)
        self.most = sum(sel)
        num_types = len(module.mean)
        num_columns = module.mean.shape[2]
        kinds = "r" if num_columns == 1 else "ra"
        # DeePMD-kit hashes these options for the name of the folder of a stat file. It rounds the
        # radii and leaves out all other options
        identity = {
            "type": "se_r" if num_columns == 1 else "se_a",
            "ntypes": num_types,
            "rcut": round(self.rcut, 2),
            "rcut_smth": round(module.rcut_smth, 2),
            "nsel": self.most,
            "sel": sel,
            "mixed_types": mixed_types,
        }
        folder = hashlib.sha1(
            json.dumps(identity).encode(), usedforsecurity=False
        ).hexdigest()
        self.sum_names = tuple(
            f"{folder}/{kind}_{t}" for kind in kinds for t in range(num_types)
        )

    def measure(self, batch: Batch, excluded: ExcludedPairs) -> dict[str, np.ndarray]:
        """Return count, sum and sum of squares (3,) of columns by type of centre.

        These are the radial column of the environment matrix, ``r_<type>``, and its three angular
        columns together, ``a_<type>``.

        All ``sel`` slots are counted; empty ones are zeros.

        Args:
            batch: on the CPU.
            excluded: pairs that do not see each other in this descriptor.
        """
        # a list for all elements is measured as far as this descriptor sees it
        neighborhood = None
        if isinstance(self._module.sel, int):
            neighborhood = batch.within(self.rcut, self.most)
        vector = (neighborhood or batch).vector
        dropped = excluded(batch, neighborhood)
        distance = torch.linalg.vector_norm(vector, dim=-1)
        inverse = (distance + self._module.protection).reciprocal_()
        weight, _ = switch_and_derivative(distance, self.rcut, self._module.rcut_smth)
        radial = weight.mul_(inverse)
        if dropped is not None:
            radial[dropped] = 0
        # (A,) each; the squares of the three angular columns add up to (c r)^2
        count = radial.new_full((len(radial),), self.most)
        columns = [count, radial.sum(1), (radial * radial).sum(1)]
        if self._module.mean.shape[2] > 1:
            angular = inverse.mul_(radial)
            along = torch.bmm(angular[:, None], vector).sum((1, 2))
            columns += [3 * count, along, angular.mul_(distance).square_().sum(1)]
        by_type = sum_by_type(torch.stack(columns, 1), batch)  # (T, 3) or (T, 6)
        parts = np.split(by_type, by_type.shape[1] // 3, 1)
        return dict(zip(self.sum_names, np.concatenate(parts), strict=True))

    def apply(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns from ``measure`` over all data.

        They are equal for all slots of a type.
        """
        num_types = len(self._module.mean)
        num_columns = self._module.mean.shape[2]
        measured = np.stack([sums[name] for name in self.sum_names])
        radial, *angular = measured.reshape(-1, num_types, 3)
        radial_mean, radial_spread = mean_and_spread(radial, MIN_SPREAD)
        spreads = [mean_and_spread(columns, MIN_SPREAD)[1] for columns in angular]
        # the mean of the angular columns stays 0: another one would depend on the orientation
        spread = np.stack([radial_spread, *3 * spreads], 1)
        mean = np.zeros((num_types, num_columns))
        unseen = radial[:, 0] == 0
        if not self._zero_mean:
            mean[:, 0] = np.where(unseen, 0.0, radial_mean)
        spread[unseen] = SPREAD_UNSEEN
        self._module.mean.copy_(torch.as_tensor(mean[:, None]))
        self._module.stddev.copy_(torch.as_tensor(spread[:, None]))


class EnvironmentDescriptor(nn.Module):
    """Base of descriptors that normalise environment matrices or nothing, and of their layout.

    Attributes:
        section: the section ``model.descriptor``.
        num_types: number of elements.
        environments: what is measured, of each normalised matrix.
        excluded: pairs of types that do not see each other.
    """

    section: Any
    num_types: int
    environments: Sequence[EnvironmentStatistics] = ()
    excluded: ExcludedPairs

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return the layout of neighbors of this descriptor: one list for all elements."""
        section = self.section
        inner = (
            section.inner_neighbors() if isinstance(section, HasInnerNeighbors) else ()
        )
        return NeighborLayout(
            section.cutoff,
            section.neighbors,
            self.num_types,
            by_type=False,
            excluded_pairs=excluded_pairs,
            inner=tuple((rcut, most) for _, rcut, most in inner),
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums of the environment matrices by type of centre, as DeePMD-kit has them.

        Matrices of equal options have one set of sums.
        """
        names = (
            name for environment in self.environments for name in environment.sum_names
        )
        return tuple(dict.fromkeys(names))

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrices by type of centre."""
        sums: dict[str, np.ndarray] = {}
        for environment in self.environments:
            sums |= environment.measure(batch, self.excluded)
        return sums

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns of the environment matrices."""
        for environment in self.environments:
            environment.apply(sums)


def has_equal_slots(model: nn.Module) -> bool:
    """Whether all slots have one mean and spread: a neighbor counts the same in any of them.

    Statistics of this program are equal; those in files of others may differ from slot to slot.
    """
    tables = [
        table
        for name, table in model.named_buffers()
        if name.rpartition(".")[2] in ("mean", "stddev")
    ]
    return all(bool((table == table[:, :1]).all()) for table in tables)
