"""A table as data: title, columns with units, rows; and how it looks as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = "str | float | None"  # None: there is no value


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: printed above it; a table whose columns have no names has no head.
        unit: printed below the name.
        spec: how its numbers are formatted, such as ``.3f``; empty for a column of text.
    """

    name: str = ""
    unit: str = ""
    spec: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: what it shows; may be empty.
        columns: from left to right.
        rows: one cell per column; a number is formatted by the column's ``spec``, text is printed as it is.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def texts(self) -> list[list[str]]:
        """Return the cells of every row as text."""
        return [[_cell(value, column) for value, column in zip(row, self.columns)] for row in self.rows]


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts; names without a text are left out."""
    return Table(title, (Column(), Column()), [pair for pair in pairs if pair[1]])


def render(table: Table, indent: str = "") -> list[str]:
    """Return a table as plain text: title, names, units, rows; numbers are set to the right and text to the left.

    Args:
        table: to be shown.
        indent: what every line but the title begins with.
    """
    rows = table.texts()
    heads = [[column.name for column in table.columns], [column.unit for column in table.columns]]
    grid = [head for head in heads if any(head)] + rows
    widths = [max(map(len, cells)) for cells in zip(*grid)]
    lines = [table.title] if table.title else []
    for cells in grid:
        parts = (
            text.rjust(w) if column.spec else text.ljust(w) for text, w, column in zip(cells, widths, table.columns)
        )
        lines.append(f"{indent}{'  '.join(parts)}".rstrip())
    return lines


def _cell(value: Cell, column: Column) -> str:
    if isinstance(value, str):
        return value
    is_huge = value is not None and abs(value) >= 1e9 and column.spec.endswith("f")  # of a label that is a mistake
    return "-" if value is None or math.isnan(value) else format(value, ".3g" if is_huge else column.spec)
