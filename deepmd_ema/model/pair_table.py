"""Pair energies from a table: the cubic spline through its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray

# R rows, P pairs of elements, T types


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
