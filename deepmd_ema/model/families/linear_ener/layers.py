"""A table of pair energies as a part of a model; it is not trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentDescriptor
from deepmd_ema.model.interface import Fitting

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp
    from deepmd_ema.model.pair_table import PairTable

# A atoms, K neighbor slots, T types


class PairTableDescriptor(EnvironmentDescriptor):
    """A table of pair energies in the place of a descriptor.

    Its one feature of an atom is half of the energies of its pairs. It measures nothing.

    Args:
        table: pair energies of all elements of the model.
        sel: most neighbors that count.
    """

    # float64: energies keep all digits of the file
    dtype = torch.float64
    mixed_types = True
    passes_messages = False
    dim_out = 1

    def __init__(self, table: PairTable, sel: int) -> None:
        super().__init__()
        self.pairs = table
        self.sel = sel

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout of the nearest ``sel`` neighbors of all types."""
        return NeighborLayout(
            self.pairs.rcut,
            (self.sel,),
            self.pairs.num_types,
            by_type=False,
            excluded_pairs=excluded_pairs,
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the energies (A, 1) float64, eV, and their vector-Jacobian product."""
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        # an empty slot is beyond the cutoff of the list, which is not nearer than that of the table
        energy, slope = self.pairs(batch, distance, distance < self.pairs.rcut)
        # (A, K, 3): each of both atoms of a pair has half of its energy
        along = (0.5 * slope / distance).unsqueeze(-1) * batch.vector
        return 0.5 * energy.sum(
            1, keepdim=True
        ), lambda grad: grad.unsqueeze(-1) * along


class PairTableFitting(Fitting):
    """The energy of an atom is the one feature that a table gives it."""

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energies (A,), eV, and their gradient (A, 1) with respect to the features."""
        return features[:, 0], torch.ones_like(features)
