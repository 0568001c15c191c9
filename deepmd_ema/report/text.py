"""Tables as plain text."""

from __future__ import annotations

import math

from deepmd_ema.report.table import Cell, Column, Table


def render(table: Table, indent: str = "") -> list[str]:
    """Return the lines of a table: title, names, units, rows; numbers are set to the right and text to the left.

    Args:
        table: to be shown.
        indent: what every line but the title begins with.
    """
    rows = [[_cell(value, column) for value, column in zip(row, table.columns)] for row in table.rows]
    heads = [[column.name for column in table.columns], [column.unit for column in table.columns]]
    grid = [head for head in heads if any(head)] + rows
    widths = [max(map(len, cells)) for cells in zip(*grid)]
    lines = [table.title] if table.title else []
    for cells in grid:
        parts = (
            text.rjust(width) if column.spec else text.ljust(width)
            for text, width, column in zip(cells, widths, table.columns)
        )
        lines.append(f"{indent}{'  '.join(parts)}".rstrip())
    return lines


def _cell(value: Cell, column: Column) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None or math.isnan(value) else format(value, column.spec)
