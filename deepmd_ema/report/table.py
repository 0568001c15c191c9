"""A table as data: title, columns with units, rows. How it looks is decided where it is rendered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Cell: TypeAlias = "str | float | None"  # None: there is no value


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: stands above it; a table whose columns have no names has no head.
        unit: stands below the name.
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
        rows: one cell per column; a number is formatted by the column's ``spec``, text stands as it is.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


def facts(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and what is to be said of each; names without a text are left out."""
    return Table(title, (Column(), Column()), [pair for pair in pairs if pair[1]])
