"""Tables as data and as plain text, and how numbers and times are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = "str | float | None"  # None: there is no value
_DIGITS = 5  # significant ones of an error
_MIN_WITH_EXPONENT = (
    1e12  # val.log has all digits of smaller numbers, as that of DeePMD-kit
)


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: printed above it; a table whose columns have no names has no head.
        unit: printed below the name.
        spec: format of its numbers, such as ``.3f``, or ``.3s`` for three significant digits; empty
            for a column of text.
        missing: in place of a value that there is not.
    """

    name: str = ""
    unit: str = ""
    spec: str = ""
    missing: str = "-"

    def text(self, value: Cell) -> str:
        """Return a cell of this column as text."""
        if isinstance(value, str):
            return value
        if value is None or math.isnan(value):
            return self.missing
        if self.spec.endswith("s"):
            return significant(value, int(self.spec[1:-1]))
        is_huge = abs(value) >= 1e9 and self.spec.endswith(
            "f"
        )  # a label that is a mistake may be
        return format(value, ".3g" if is_huge else self.spec)


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: its content; may be empty.
        columns: from left to right.
        rows: one cell per column; a number is formatted by the column's ``spec``, text is printed
            as it is.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def texts(self) -> list[list[str]]:
        """Return the cells of every row as text."""
        return [
            [column.text(value) for value, column in zip(row, self.columns)]
            for row in self.rows
        ]


def render(table: Table, indent: str = "") -> list[str]:
    """Return a table as plain text: title, names, units, rows.

    Numbers are set to the right and text to the left.

    Args:
        table: to be shown.
        indent: begin of every line but the title.
    """
    heads = [
        [column.name for column in table.columns],
        [column.unit for column in table.columns],
    ]
    grid = [head for head in heads if any(head)] + table.texts()
    widths = [max(map(len, cells)) for cells in zip(*grid)]
    lines = [table.title] if table.title else []
    for cells in grid:
        columns = zip(cells, widths, table.columns)
        parts = [
            text.rjust(width) if column.spec else text.ljust(width)
            for text, width, column in columns
        ]
        lines.append(f"{indent}{'  '.join(parts)}".rstrip())
    return lines


def render_facts(title: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return names and texts as plain text; names without a text are left out."""
    rows = [pair for pair in pairs if pair[1]]
    return render(Table(title, (Column(), Column()), rows), "  ")


def significant(value: float, digits: int = _DIGITS) -> str:
    """Return ``value`` with so many significant digits.

    A value of a run that has failed, which is huge, has an exponent.
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= _MIN_WITH_EXPONENT:
        return f"{value:.{digits - 1}e}"
    # the exponent after rounding: 9.996 with three digits is 10.0
    decimals = digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2])
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def without_nan(values: object) -> object:
    """Return values for JSON, which has no nan and no infinity: None is in their place."""
    if isinstance(values, Mapping):
        return {name: without_nan(value) for name, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values


def duration(seconds: float) -> str:
    """Return a time in the two largest of its units: ``4 min 7 s``."""
    parts: list[str] = []
    rest = round(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) if seconds >= 10 else f"{seconds:.1f} s"
