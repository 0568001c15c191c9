"""Energies of pairs of atoms from a table, and such a table as a part of a model that is not trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Block, Sums
    from deepmd_ema.model.pair_table import PairTable

# A atoms, K neighbor slots, T types


class PairEnergies(nn.Module):
    """The energy of each pair and its derivative, from a table; without parameters.

    Its buffers are not saved: they follow from the config.

    Args:
        table: pair energies of T elements.
    """

    def __init__(self, table: PairTable) -> None:
        super().__init__()
        self.table, self.num_types = table, table.num_types
        # plain numbers: torch.compile does not look into arrays of numpy
        self._first, self._step, self.rcut = table.first, table.step, table.rcut
        coefficients = torch.from_numpy(table.coefficients())
        self._num_rows = coefficients.shape[2]
        self._coefficients: Tensor
        self.register_buffer("_coefficients", coefficients.view(-1, 4), persistent=False)

    def forward(self, batch: Batch, distance: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energy (A, K) of each pair, eV, and its derivative, nan nearer than the first row.

        Args:
            batch: frames with their neighbors.
            distance: (A, K) of each pair, angstrom.
            near: (A, K) which pairs are nearer than the cutoff of the table; the others have no energy.
        """
        place = (distance - self._first) / self._step
        interval = place.floor().clamp(0, self._num_rows - 1)
        u = place - interval
        kinds = batch.atom_type[:, None] * self.num_types + batch.neighbor_type
        row = (kinds * self._num_rows + interval.long()).flatten()
        c0, c1, c2, c3 = self._coefficients.index_select(0, row).view(*distance.shape, 4).unbind(-1)
        counts = near & (place < self._num_rows)
        bad = torch.where(place < 0, torch.nan, 0.0).to(distance)
        energy = torch.where(counts, ((c0 * u + c1) * u + c2) * u + c3 + bad, 0.0)
        slope = torch.where(counts, ((3 * c0 * u + 2 * c1) * u + c2) / self._step + bad, 0.0)
        return energy, slope


class PairTableDescriptor(nn.Module):
    """A table of pair energies in the place of a descriptor: its one feature of an atom is half of its pair energies.

    Args:
        table: pair energies of all elements of the model.
        sel: most neighbors that count.
    """

    dtype = torch.float64
    mixed_types = True
    passes_messages = False
    sum_names: tuple[str, ...] = ()
    dim_out = 1

    def __init__(self, table: PairTable, sel: int) -> None:
        super().__init__()
        self.pairs, self.sel = PairEnergies(table), sel

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout of the nearest ``sel`` neighbors of all types."""
        return NeighborLayout(
            self.pairs.rcut, (self.sel,), self.pairs.num_types, by_type=False, excluded_pairs=excluded_pairs
        )

    def forward(self, batch: Batch) -> tuple[Tensor, PairVjp]:
        """Return the energies (A, 1) float64, eV, and their vector-Jacobian product."""
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        # an empty slot is beyond the cutoff of the list, which is not nearer than that of the table
        energy, slope = self.pairs(batch, distance, distance < self.pairs.rcut)
        along = (0.5 * slope / distance).unsqueeze(-1) * batch.vector
        return 0.5 * energy.sum(1, keepdim=True), PairVjp(along)

    def measure(self, batch: Batch) -> Sums:
        """Return nothing: a table has no statistics."""
        return {}

    def apply_statistics(self, sums: Sums) -> None:
        """Take nothing."""

    def stat_settings(self) -> Mapping[str, Any]:
        """Return nothing: no sums depend on it."""
        return {}

    def blocks(self) -> list[Block]:
        """Return none."""
        return []


class PairVjp:
    """Vector-Jacobian product of pair energies.

    Args:
        along: (A, K, 3) derivative of the energy of each atom with respect to the vectors.
    """

    def __init__(self, along: Tensor) -> None:
        self._along = along

    def __call__(self, grad_features: Tensor) -> Tensor:
        """Return the gradient (A, K, 3) with respect to ``vector`` from that of the energies (A, 1)."""
        return grad_features.unsqueeze(-1) * self._along


class PairTableFitting(nn.Module):
    """The energy of an atom is the one feature that a table gives it.

    Args:
        num_types: T.
        excluded_types: types whose atoms have no energy of their own.
    """

    skips_absent = True

    def __init__(self, num_types: int, excluded_types: tuple[int, ...]) -> None:
        super().__init__()
        counted = torch.tensor([t not in excluded_types for t in range(num_types)], dtype=torch.float64)
        self._counted: Tensor
        self.register_buffer("_counted", counted, persistent=False)

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energies (A,), eV, and their gradient (A, 1) with respect to the features."""
        counted = self._counted[batch.atom_type]
        return features[:, 0] * counted, counted[:, None]

    def share_networks(self, other: PairTableFitting, whose: str) -> None:
        """Take nothing."""

    @property
    def case(self) -> int:
        """0: a table does not tell tasks apart."""
        return 0

    def set_case(self, index: int) -> None:
        """Take nothing: a table is the same for all tasks."""

    def apply_statistics(self, sums: Sums, protect: float) -> None:
        """Take nothing."""

    def blocks(self) -> list[Block]:
        """Return none."""
        return []
