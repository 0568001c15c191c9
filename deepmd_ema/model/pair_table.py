"""Energies of pairs of atoms from a table: the cubic spline through its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch

Array: TypeAlias = np.ndarray

# R rows, P pairs of elements, T types, A atoms, K neighbor slots


@dataclass(frozen=True, eq=False)
class PairTable:
    """Pair energies at evenly spaced distances, up to a cutoff.

    Attributes:
        rows: (R, 1 + P) distance, angstrom, and energies, eV; with rows of zeros up to the cutoff.
        rcut: distance from which the energy is 0, angstrom.
    """

    rows: Array
    rcut: float

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]], rcut: float) -> PairTable:
        """Return the table of a file, continued with zeros where it ends before the cutoff."""
        table = np.array(rows, dtype=np.float64)
        step = table[1, 0] - table[0, 0]
        missing = math.ceil(rcut / step - table[0, 0] / step) - (len(table) - 1)
        if rcut <= table[-1, 0] or missing <= 0:
            return cls(table, rcut)
        more = np.zeros((missing, table.shape[1]))
        more[:, 0] = np.linspace(table[-1, 0] + step, table[-1, 0] + step * missing, missing)
        return cls(np.concatenate([table, more]), rcut)

    @property
    def first(self) -> float:
        """Distance of the first row, angstrom."""
        return float(self.rows[0, 0])

    @property
    def step(self) -> float:
        """Distance between two rows, angstrom."""
        return float(self.rows[1, 0] - self.rows[0, 0])

    @property
    def num_types(self) -> int:
        """T, from the number of pairs T (T + 1) / 2."""
        return (math.isqrt(8 * (self.rows.shape[1] - 1) + 1) - 1) // 2

    def coefficients(self) -> Array:
        """Return (T, T, R - 1, 4): the energy in an interval is ``((c0 u + c1) u + c2) u + c3``, u from 0 to 1.

        The spline has two continuous derivatives, and none at the first and the last row.
        """
        value = self.rows[:, 1:]
        slope = _slopes(value)
        rise, here, there = value[1:] - value[:-1], slope[:-1], slope[1:]
        by_pair = np.stack([here + there - 2 * rise, 3 * rise - 2 * here - there, here, value[:-1]], -1)
        num_types = self.num_types
        out = np.empty((num_types, num_types, *by_pair[:, 0].shape))
        for pair, (i, j) in enumerate(zip(*np.triu_indices(num_types))):
            out[i, j] = out[j, i] = by_pair[:, pair]
        return out


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


def _slopes(value: Array) -> Array:
    """Return (R, P) the derivatives at the rows, per step, of the clamped cubic spline.

    They solve ``s[k-1] + 4 s[k] + s[k+1] = 3 (v[k+1] - v[k-1])`` with s = 0 at both ends, here by elimination.
    """
    slope, right = np.zeros_like(value), 3 * (value[2:] - value[:-2])
    factor, reduced = np.zeros(len(right)), np.zeros_like(right)
    for k in range(len(right)):
        pivot = 4 - (factor[k - 1] if k else 0.0)
        factor[k] = 1 / pivot
        reduced[k] = (right[k] - (reduced[k - 1] if k else 0.0)) / pivot
    for k in range(len(right) - 1, -1, -1):
        slope[k + 1] = reduced[k] - factor[k] * slope[k + 2]
    return slope
