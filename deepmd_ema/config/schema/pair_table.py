"""A table of pair energies, which ``model.use_srtab`` names: its file and its checks."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

from deepmd_ema.config.fields import Check
from deepmd_ema.findings import Findings, error

Table = list[list[float]]
"""Rows of a distance, angstrom, and energies of pairs, eV: O-O, O-H, H-H for ["O", "H"]."""

# fractions of the spacing: tables are printed with few digits, and a sum of steps is rounded
_UNEVEN = 1e-2
_ROUNDED = 1e-9


def read_table(value: str | Table) -> Table:
    """Return the rows of a table, with distances in even steps from the first to the last.

    Whoever takes the difference of the first two rows as the step of all, as DeePMD-kit does, would
    be off by the digits that the file does not have, times the number of the row.

    Args:
        value: the name of a text file; in the config of a checkpoint the rows.
    """
    table = _rows_of(value)
    first = table[0][0]
    step = (table[-1][0] - first) / max(1, len(table) - 1)
    even = [first + k * step for k in range(len(table))]
    if all(abs(row[0] - r) <= _ROUNDED * step for r, row in zip(even, table)):
        return table
    return [[r, *row[1:]] for r, row in zip(even, table)]


def _rows_of(value: str | Table) -> Table:
    if not isinstance(value, str):
        return [list(map(float, row)) for row in value]
    lines = (
        line.partition("#")[0].split()
        for line in Path(value).read_text(encoding="utf-8").splitlines()
    )
    return [list(map(float, line)) for line in lines if line]


def table_findings(name: str, table: Table, num_types: int, rcut: float) -> Findings:
    """Yield errors of the table of an option that does not fit to the elements and the cutoff."""
    columns = len(table[0]) - 1
    expected = num_types * (num_types + 1) // 2
    if columns != expected:
        yield error(
            name,
            f": has energies of {columns} pairs, expected {expected}, one for each pair of "
            f"{num_types} elements.",
        )
    if table[-1][0] < rcut and any(table[-1][1:]):
        yield error(
            name,
            f": ends at {table[-1][0]:g} angstrom with energies that are not 0, and "
            f"rcut is {rcut:g}. Continue it until they are 0, or to rcut.",
        )


def _is_table(value: Any) -> bool:
    try:
        table = _rows_of(value)
    except (OSError, ValueError, TypeError):
        return False
    widths = {len(row) for row in table}
    if (
        len(table) < 3
        or len(widths) != 1
        or min(widths) < 2
        or not all(map(math.isfinite, chain(*table)))
    ):
        return False
    first = table[0][0]
    step = (table[-1][0] - first) / (len(table) - 1)
    return step > 0 and all(
        abs(row[0] - first - k * step) < _UNEVEN * step for k, row in enumerate(table)
    )


pair_table = Check(
    _is_table,
    "a readable text file of at least three rows: a distance in even steps, then an energy for "
    "each pair of elements",
)
