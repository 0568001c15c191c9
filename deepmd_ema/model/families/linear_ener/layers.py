"""A table of pair energies as a part of a model; it is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentDescriptor
from deepmd_ema.model.pair_table import PairEnergies

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Block, Sums, Vjp
    from deepmd_ema.model.pair_table import PairTable

# A atoms, K neighbor slots, T types


class PairTableDescriptor(EnvironmentDescriptor):
    """A table of pair energies in the place of a descriptor: its one feature of an atom is half of its pair energies.

    It measures nothing.

    Args:
        table: pair energies of all elements of the model.
        sel: most neighbors that count.
    """

    dtype = torch.float64
    mixed_types = True
    passes_messages = False
    dim_out = 1

    def __init__(self, table: PairTable, sel: int) -> None:
        super().__init__()
        self.pairs, self.sel, self.environments = PairEnergies(table), sel, []

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout of the nearest ``sel`` neighbors of all types."""
        return NeighborLayout(
            self.pairs.rcut, (self.sel,), self.pairs.num_types, by_type=False, excluded_pairs=excluded_pairs
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the energies (A, 1) float64, eV, and their vector-Jacobian product."""
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        # an empty slot is beyond the cutoff of the list, which is not nearer than that of the table
        energy, slope = self.pairs(batch, distance, distance < self.pairs.rcut)
        along = (0.5 * slope / distance).unsqueeze(-1) * batch.vector
        return 0.5 * energy.sum(1, keepdim=True), lambda grad: grad.unsqueeze(-1) * along


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
        """0: a table does not distinguish tasks."""
        return 0

    def set_case(self, index: int) -> None:
        """Take nothing: a table is the same for all tasks."""

    def apply_statistics(self, sums: Sums, protect: float) -> None:
        """Take nothing."""

    def blocks(self) -> list[Block]:
        """Return none."""
        return []
