"""Trajectories of CP2K: NAME-pos-1.xyz with energies in its comments, and beside it NAME-frc-1.xyz and the cell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from deepmd_ema.data.formats.extxyz import blocks
from deepmd_ema.data.formats.properties import Inventory, StoredFrame
from deepmd_ema.errors import DataError, show_text
from deepmd_ema.sorting import Array

HARTREE = 27.211386245988  # eV; CODATA 2018
_BOHR = 0.529177210903  # angstrom
_COMMENT = re.compile(r"\s*i\s*=\s*(\d+)\s*,.*\bE\s*=\s*(\S+)")
_NAME = re.compile(r"(.+)-(pos|frc|vel)-(\d+)\.xyz$")
_VECTOR = re.compile(
    r"^\s*(A|B|C|ABC|ALPHA_BETA_GAMMA)\s+(?:\[(?:angstrom|deg)\]\s+)?"
    r"([-+\d.eE]+)\s+([-+\d.eE]+)\s+([-+\d.eE]+)\s*(?:[!#].*)?$",
    re.I,
)


def is_cp2k_trajectory(path: Path) -> bool:
    """Whether a file is named and begins as the trajectories of CP2K do."""
    if not _NAME.match(path.name):
        return False
    with path.open("rb") as file:
        file.readline(100)
        return _COMMENT.match(file.readline(1000).decode(errors="replace")) is not None


def cp2k_frames(path: Path, inventory: Inventory) -> Iterator[StoredFrame]:
    """Yield the frames of a trajectory, whose forces and cell are in files beside it.

    Args:
        path: ``NAME-pos-1.xyz``, in angstrom.
        inventory: gets what a user should know.

    Raises:
        DataError: if there is no cell, or a file cannot be read.
    """
    name = _NAME.match(path.name)
    assert name is not None, "checked by is_cp2k_trajectory"
    if name[2] != "pos":
        raise DataError(
            f"{path}: holds forces or velocities of CP2K. Name {name[1]}-pos-{name[3]}.xyz, with it beside."
        )
    forces_file = path.with_name(f"{name[1]}-frc-{name[3]}.xyz")
    forces = {}
    if forces_file.exists():
        forces = {step: rows * (HARTREE / _BOHR) for step, _, _, rows in _steps(forces_file)}
    from_steps, cell = _cells(path, name[1], name[3])
    where = f"{forces_file.name} (hartree/bohr)" if forces else f"nowhere: {forces_file.name} is not there, or empty"
    inventory.other[f"energies are from the comments (hartree), forces from {where}"] = 0
    for step, energy, symbols, coord in _steps(path):
        box = from_steps.get(step) if from_steps else cell
        if from_steps and box is None:
            raise DataError(
                f"step {step} is not in {name[1]}-{name[3]}.cell. Print cell and positions at the same steps."
            )
        if step not in forces:
            inventory.other[f"no forces in {forces_file.name}"] += 1
        per_atom = {"forces": forces[step]} if step in forces else {}
        yield StoredFrame(symbols, coord, box, {"energy": energy * HARTREE}, per_atom)


def _steps(path: Path) -> Iterator[tuple[int, float, list[str], Array]]:
    """Yield number, energy (hartree), elements and (N, 3) rows of each step of an XYZ file."""
    for number, (_, block) in enumerate(blocks(path)):
        _, comment, *rows = block.decode(errors="replace").splitlines()
        found, words = _COMMENT.match(comment), [row.split() for row in rows]
        try:
            if found is None:
                raise ValueError("the comment names no step and energy")
            values = np.array([row[1:4] for row in words], np.float64)
            if values.shape != (len(rows), 3):
                raise ValueError("expected three numbers for each atom")
            step, energy = int(found[1]), float(found[2])
        except ValueError as error:
            raise DataError(f"{path}: frame {number}: {error}: {show_text(comment.strip())}.") from error
        yield step, energy, [row[0] for row in words], values


def _cells(path: Path, name: str, run: str) -> tuple[dict[int, Array], Array | None]:
    """Return the cells (3, 3) in angstrom by step, or that of all steps; None for an open system."""
    file = path.with_name(f"{name}-{run}.cell")
    if file.exists():
        try:
            rows = np.loadtxt(file, ndmin=2)
            return {int(row[0]): row[2:11].reshape(3, 3) for row in rows}, None
        except ValueError as error:
            raise DataError(f"{file}: is no table of cells of CP2K: {error}") from error
    inputs = [
        path.with_name(f"{name}-{run}.restart"),
        path.with_name(f"{name}.inp"),
        *sorted(path.parent.glob("*.inp")),
    ]
    for given in filter(Path.exists, inputs):
        found = _cell_of_input(given.read_text(errors="replace"))
        if found is not None:
            return {}, None if not found.any() else found
    raise DataError(
        f"{path}: a trajectory of CP2K without its cell. Expected beside it {name}-{run}.cell (MOTION/PRINT/CELL), "
        f"{name}-{run}.restart, or the input (.inp) with A, B and C or ABC in &CELL."
    )


def _cell_of_input(text: str) -> Array | None:
    """Return the (3, 3) cell in ``&CELL`` of an input; zeros if it is not periodic, None if there is none."""
    section = re.search(r"^\s*&CELL\s*$(.*?)^\s*&END", text, re.M | re.S | re.I)
    if section is None:
        return None
    if re.search(r"^\s*PERIODIC\s+NONE\s*$", section[1], re.M | re.I):
        return np.zeros((3, 3))
    rows = {v[1].upper(): [float(x) for x in v.groups()[1:]] for v in map(_VECTOR.match, section[1].splitlines()) if v}
    if "ABC" in rows:
        return _cell_of_lengths(np.array(rows["ABC"]), rows.get("ALPHA_BETA_GAMMA", [90.0, 90.0, 90.0]))
    return np.array([rows[v] for v in "ABC"]) if {"A", "B", "C"} <= rows.keys() else None


def _cell_of_lengths(lengths: Array, degrees: Sequence[float]) -> Array:
    """Return the (3, 3) cell of CP2K: the first vector along x, the second in the plane of x and y."""
    alpha, beta, gamma = np.cos(np.radians(degrees)).round(12)  # of a right angle exactly zero
    sine = np.sqrt(1 - gamma**2)
    third = np.array([beta, (alpha - beta * gamma) / sine, 0.0])
    third[2] = np.sqrt(1 - third @ third)
    return lengths[:, None] * np.array([[1.0, 0.0, 0.0], [gamma, sine, 0.0], third])
