"""Trees of models that stand in another one: networks and tables of pair energies; in types ``zbl`` and ``linear``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.interchange.dp.files import VARIABLES, Tree

if TYPE_CHECKING:
    from deepmd_ema.model.pair_table import PairTable


def part_tree(whole: Mapping[str, Any], kind: str, entries: Tree) -> Tree:
    """Return the tree of a part of the model ``whole``, whose energies of the elements are those of the whole.

    Args:
        whole: tree of the model.
        kind: ``standard`` or ``pairtab``.
        entries: what a tree of this kind has beside.
    """
    num_types = len(whole["type_map"])
    return {
        "type_map": list(whole["type_map"]),
        "atom_exclude_types": [],
        "pair_exclude_types": [],
        "rcond": whole["rcond"],
        "preset_out_bias": None,
        VARIABLES: {"out_bias": np.zeros((1, num_types, 1)), "out_std": np.ones((1, num_types, 1))},
        "@class": "Model",
        "@version": 2,
        "type": kind,
        **entries,
    }


def part_bias(part: Mapping[str, Any]) -> np.ndarray:
    """Return the energies (1, T, 1) that a part adds for each atom of an element, eV."""
    return np.asarray(part[VARIABLES]["out_bias"], dtype=np.float64)


def refuse_own_exclusions(part: Mapping[str, Any]) -> None:
    """Check that only the whole model excludes types.

    Raises:
        ValueError: if a part does.
    """
    if any(part.get(name) for name in ("atom_exclude_types", "pair_exclude_types")):
        raise ValueError("a part of the model excludes types on its own, which is not available here")


def table_entries(table: PairTable, sel: int) -> Tree:
    """Return the entries of the tree of a table beside those of any part."""
    rows, num_types = table.rows, table.num_types
    num_intervals = len(rows) - 1
    tab = {
        "@class": "PairTab",
        "@version": 1,
        "rmin": table.first,
        "rmax": float(rows[-1, 0]),
        "hh": table.step,
        "ntypes": num_types,
        "rcut": table.rcut,
        "nspline": num_intervals,
        VARIABLES: {
            "vdata": rows,
            "tab_info": np.array([table.first, table.step, num_intervals, num_types], dtype=np.float64),
            "tab_data": table.coefficients().ravel(),
        },
    }
    return {"tab": tab, "rcut": table.rcut, "sel": sel}


def table_rows(part: Mapping[str, Any]) -> list[list[float]]:
    """Return the rows of the table of a part.

    Raises:
        ValueError: if it is continued beyond its last energies.
    """
    rows = np.asarray(part["tab"][VARIABLES]["vdata"])
    if rows[-1, 0] + 1e-6 < float(part["rcut"]):
        raise ValueError("its table was extrapolated to 0, which is not available here")
    return [list(map(float, row)) for row in rows]


def table_lines(rows: Sequence[Sequence[float]]) -> list[str]:
    """Return the lines of the file of a table."""
    return [" ".join(map(repr, row)) for row in rows]


def rows_of_lines(option: str, lines: Any) -> list[list[float]]:
    """Return the rows of the table in the lines of its file; ``option`` is for the message.

    Raises:
        ValueError: if the file is named instead.
    """
    if not isinstance(lines, list):
        raise ValueError(f"{option} = {lines!r} is the name of a file, which may be another one by now")
    return [[float(number) for number in line.split()] for line in lines]
