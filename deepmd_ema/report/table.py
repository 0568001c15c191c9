"""Tables as data and as plain text, and how errors and times are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from deepmd_ema.config.labels import GPA, METRICS

if TYPE_CHECKING:
    from deepmd_ema.model.metrics import Errors

Cell: TypeAlias = "str | float | None"  # None: there is no value
METRICS_IN_ORDER = "EFQSVDWABNMP"  # letters, in the order of tables
# by letter, the symbol in columns of lcurve.out where it is not this letter
CURVE_NAMES = {
    "Q": "pf",
    "D": "global_dipole",
    "W": "local_dipole",
    "A": "global_polar",
    "B": "local_polar",
    "N": "global_dos",
    "M": "local_dos",
}
KINDS = ("MAE", "RMSE")
_DIGITS = 5  # significant ones of an error
_MIN_WITH_EXPONENT = 1e12  # val.log has all digits of smaller numbers, as that of DeePMD-kit


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: printed above it; a table whose columns have no names has no head.
        unit: printed below the name.
        spec: format of its numbers, such as ``.3f``; empty for a column of text.
    """

    name: str = ""
    unit: str = ""
    spec: str = ""

    def text(self, value: Cell) -> str:
        """Return a cell of this column as text."""
        if isinstance(value, str):
            return value
        if value is None or math.isnan(value):
            return "-"
        is_huge = abs(value) >= 1e9 and self.spec.endswith("f")  # a label that is a mistake may be
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
            [column.text(value) for value, column in zip(row, self.columns)] for row in self.rows
        ]


def render(table: Table, indent: str = "") -> list[str]:
    """Return a table as plain text: title, names, units, rows.

    Numbers are set to the right and text to the left.

    Args:
        table: to be shown.
        indent: begin of every line but the title.
    """
    heads = [[column.name for column in table.columns], [column.unit for column in table.columns]]
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


def show_metric(metric: str, value: float) -> str:
    """Return a metric such as ``E:MAE`` with its unit: eV to ``94.363 meV/atom``."""
    quantity = METRICS[metric[0].upper()]
    return f"{significant(quantity.display_factor * value)} {quantity.display_unit}".rstrip()


def labelled(errors: Errors) -> str:
    """Return the letters of the quantities that some frame has a label of."""
    return "".join(q for q in METRICS_IN_ORDER if not math.isnan(errors.metric(f"{q}:MAE")))


def mae_rmse(errors: Errors, quantity: str, factor: float = 0.0) -> str:
    """Return both errors of a quantity as ``94.363 / 120.02``.

    They are in its unit of tables, or times ``factor``.
    """
    factor = factor or METRICS[quantity].display_factor
    return " / ".join(significant(factor * errors.metric(f"{quantity}:{kind}")) for kind in KINDS)


def describe_errors(errors: Errors, before: Errors | None = None, with_gpa: bool = False) -> str:
    """Return MAE and RMSE of every quantity that some frame has a label of.

    Args:
        errors: to be shown.
        before: errors that are shown in front of them: ``E 9 / 12 -> 3 / 4 meV/atom``.
        with_gpa: whether errors of the stress are in GPa as well.
    """
    parts = []
    for quantity in labelled(errors):
        first = f"{mae_rmse(before, quantity)} -> " if before is not None else ""
        in_gpa = f" ({mae_rmse(errors, quantity, GPA)} GPa)" if with_gpa and quantity == "S" else ""
        unit = METRICS[quantity].display_unit
        parts.append(f"{quantity} {first}{mae_rmse(errors, quantity)} {unit}{in_gpa}".rstrip())
    return ", ".join(parts)


def table_of_errors(title: str, errors: Mapping[str, Errors]) -> Table:
    """Return MAE and RMSE of each quantity by task; the only task of a run has no name."""
    present = {q for task_errors in errors.values() for q in labelled(task_errors)}
    quantities = [q for q in METRICS_IN_ORDER if q in present]
    columns = [Column("task"), Column("frames", "", ",.0f")]
    columns += [Column(METRICS[q].title, METRICS[q].display_unit, "s") for q in quantities]
    rows = list[list[Cell]]()
    for task, task_errors in errors.items():
        cells = [mae_rmse(task_errors, q) for q in quantities]
        rows.append([task, task_errors.summary()["num_frames"], *cells])
    first = 1 if "" in errors else 0
    return Table(title, columns[first:], [row[first:] for row in rows])


def duration(seconds: float) -> str:
    """Return a time in the two largest of its units: ``4 min 7 s``."""
    parts: list[str] = []
    rest = round(seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) if seconds >= 10 else f"{seconds:.1f} s"
