"""Energies of pairs of atoms from a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch

if TYPE_CHECKING:
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
