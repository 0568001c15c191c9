"""Energies of pairs of atoms from a table: the cubic spline through its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch

Array: TypeAlias = np.ndarray

# R rows, P pairs of elements, T types, A atoms, K neighbor slots


class PairTable(nn.Module):
    """The energy of each pair and its derivative, from a table of evenly spaced distances.

    The table ends at a cutoff. There are no parameters.

    Its buffer is not saved: it follows from the config.

    Args:
        rows: (R, 1 + P) distance, angstrom, and energies, eV, of a file, with P = T (T + 1) / 2.
        rcut: distance from which the energy is 0, angstrom.

    Attributes:
        rows: continued with zeros where they end before the cutoff.
        first: distance of the first row, angstrom.
        step: distance between two rows, angstrom.
        coefficients: (T T (R - 1), 4) buffer: the energy in an interval is ``((c0 u + c1) u + c2) u
            + c3``, u from 0 to 1. The spline has two continuous derivatives, and none at the first
            and the last row.
    """

    def __init__(self, rows: Sequence[Sequence[float]], rcut: float) -> None:
        super().__init__()
        table = np.array(rows, dtype=np.float64)
        # plain numbers: torch.compile does not look into arrays of numpy
        self.rcut = rcut
        self.first = float(table[0, 0])
        self.step = float(table[1, 0] - table[0, 0])
        # the energy is 0 from the last row on: rows of zeros up to the cutoff
        missing = math.ceil(rcut / self.step - self.first / self.step) - (
            len(table) - 1
        )
        if rcut > table[-1, 0] and missing > 0:
            more = np.zeros((missing, table.shape[1]))
            more[:, 0] = np.linspace(
                table[-1, 0] + self.step, table[-1, 0] + self.step * missing, missing
            )
            table = np.concatenate([table, more])
        self.rows = table
        self._num_intervals = len(table) - 1
        # P = T (T + 1) / 2, solved for T
        self.num_types = (math.isqrt(8 * (table.shape[1] - 1) + 1) - 1) // 2
        # (R - 1, P, 4): between two rows a cubic with the values and slopes of both
        value = table[:, 1:]
        slope = _slopes(value)
        rise = value[1:] - value[:-1]
        left = slope[:-1]
        right = slope[1:]
        by_pair = np.stack(
            [left + right - 2 * rise, 3 * rise - 2 * left - right, left, value[:-1]], -1
        )
        # columns of the file are pairs i <= j; both orders are filled, so that no pair is sorted
        out = np.empty((self.num_types, self.num_types, *by_pair[:, 0].shape))
        for pair, (i, j) in enumerate(zip(*np.triu_indices(self.num_types))):
            out[i, j] = out[j, i] = by_pair[:, pair]
        self.coefficients = nn.Buffer(
            torch.from_numpy(out).view(-1, 4), persistent=False
        )

    def forward(
        self, batch: Batch, distance: Tensor, near: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the energy (A, K) of each pair, eV, and its derivative by distance, eV/angstrom.

        Both are nan nearer than the first row.

        Args:
            batch: frames with their neighbors.
            distance: (A, K) of each pair, angstrom.
            near: (A, K) which pairs are nearer than the cutoff of the table; the others have no
                energy.
        """
        # in steps from the first row; pairs beyond the table read its last interval, and are unused
        place = (distance - self.first) / self.step
        interval = place.floor().clamp(0, self._num_intervals - 1)
        u = place - interval
        kinds = batch.atom_type[:, None] * self.num_types + batch.neighbor_type
        row = (kinds * self._num_intervals + interval.long()).flatten()
        coefficients = self.coefficients.index_select(0, row).view(*distance.shape, 4)
        c0, c1, c2, c3 = coefficients.unbind(-1)  # (A, K)
        counts = near & (place < self._num_intervals)
        # a table has no energy nearer than its first row; steps and tests report nan
        bad = torch.where(place < 0, torch.nan, 0.0).to(distance)
        energy = torch.where(counts, ((c0 * u + c1) * u + c2) * u + c3 + bad, 0.0)
        slope = torch.where(
            counts, ((3 * c0 * u + 2 * c1) * u + c2) / self.step + bad, 0.0
        )
        return energy, slope


def _slopes(value: Array) -> Array:
    """Return (R, P) the derivatives at the rows, per step, of the clamped cubic spline.

    They solve ``s[k-1] + 4 s[k] + s[k+1] = 3 (v[k+1] - v[k-1])`` with s = 0 at both ends, here by
    elimination.
    """
    slope = np.zeros_like(value)
    right = 3 * (value[2:] - value[:-2])
    # elimination downwards, row by row of the tridiagonal system, then back
    factor = np.zeros(len(right))
    reduced = np.zeros_like(right)
    for k in range(len(right)):
        pivot = 4 - (factor[k - 1] if k else 0.0)
        factor[k] = 1 / pivot
        reduced[k] = (right[k] - (reduced[k - 1] if k else 0.0)) / pivot
    for k in range(len(right) - 1, -1, -1):
        slope[k + 1] = reduced[k] - factor[k] * slope[k + 2]
    return slope
