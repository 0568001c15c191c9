"""Errors of a model as data, in the units of tables, and as text.

Logs, files, JSON and the page of a run show what is here: they only format it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from deepmd_ema.config.labels import GPA, METRICS
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.report.table import Cell, Column, Table, significant

if TYPE_CHECKING:
    from deepmd_ema.model.metrics import Errors

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


def labelled(*errors: Errors) -> str:
    """Return the letters of the quantities that some frame has a label of."""
    return "".join(
        q
        for q in METRICS_IN_ORDER
        if any(not math.isnan(e.metric(f"{q}:MAE")) for e in errors)
    )


def metrics_of(quantities: Iterable[str]) -> list[Metric]:
    """Return both errors of each quantity by its letter."""
    return [Metric(f"{quantity}:{kind}") for quantity in quantities for kind in KINDS]


def displayed(errors: Errors, metric: str) -> float:
    """Return an error such as ``F:RMSE`` in its unit of tables."""
    return METRICS[metric[0]].display_factor * errors.metric(metric)


def show_metric(metric: str, value: float) -> str:
    """Return a metric such as ``E:MAE`` with its unit: eV to ``94.363 meV/atom``."""
    quantity = METRICS[metric[0]]
    return f"{significant(quantity.display_factor * value)} {quantity.display_unit}".rstrip()


def mae_rmse(errors: Errors, quantity: str, factor: float = 0.0) -> str:
    """Return both errors of a quantity as ``94.363 / 120.02``.

    They are in its unit of tables, or times ``factor``.
    """
    factor = factor or METRICS[quantity].display_factor
    return " / ".join(
        significant(factor * errors.metric(f"{quantity}:{kind}")) for kind in KINDS
    )


def describe_errors(
    errors: Errors, before: Errors | None = None, with_gpa: bool = False
) -> str:
    """Return MAE and RMSE of every quantity that some frame has a label of.

    Args:
        errors: to be shown.
        before: errors that are shown in front of them: ``E 9 / 12 -> 3 / 4 meV/atom``.
        with_gpa: whether errors of the stress are in GPa as well.
    """
    parts = []
    for quantity in labelled(errors):
        first = f"{mae_rmse(before, quantity)} -> " if before is not None else ""
        in_gpa = (
            f" ({mae_rmse(errors, quantity, GPA)} GPa)"
            if with_gpa and quantity == "S"
            else ""
        )
        unit = METRICS[quantity].display_unit
        parts.append(
            f"{quantity} {first}{mae_rmse(errors, quantity)} {unit}{in_gpa}".rstrip()
        )
    return ", ".join(parts)


def error_table(
    title: str,
    heads: tuple[Column, Column],
    columns: Mapping[str, Column],
    errors: Mapping[str, Errors],
    cell: Callable[[Errors, str], Cell] = displayed,
) -> Table:
    """Return a table with a row for each entry of ``errors``; a single one may have no name.

    Args:
        title: its content.
        heads: columns of the names of the entries, and of their numbers of frames or of atoms.
        columns: by what ``cell`` returns of the errors: a metric, or a quantity.
        errors: by the name of what they are of.
        cell: returns an error.
    """
    rows = list[Sequence[Cell]]()
    for name, entry in errors.items():
        count = entry.summary()[f"num_{heads[1].name}"]
        rows.append((name, count, *(cell(entry, key) for key in columns)))
    first = 1 if "" in errors else 0
    return Table(
        title, [*heads, *columns.values()][first:], [row[first:] for row in rows]
    )
