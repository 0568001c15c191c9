"""Labels, each declared once: name, symbol, shape, unit, files, and errors.

Reading, collation, the loss, metrics and all tables take what they know about labels from
``LABELS``; a further label is one more entry there. Labels whose width the model sets have it in
their names, such as ``dos[250]``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# keys of labels and predictions in dictionaries
ENERGY = "energy"
FORCE = "force"
VIRIAL = "virial"
ATOM_ENERGY = "atom_energy"
ATOM_PREF = "atom_pref"
ATOM_WEIGHT = "atom_weight"
HESSIAN = "hessian"
DIPOLE, ATOM_DIPOLE = "dipole", "atom_dipole"
POLAR, ATOM_POLAR = "polarizability", "atom_polarizability"
DOS = "dos"
WEIGHT = "weight"
ENERGY_WEIGHT = "energy_weight"
FORCE_WEIGHT = "force_weight"
VIRIAL_WEIGHT = "virial_weight"
# weights of a frame in the loss, no targets
WEIGHTS = (WEIGHT, ENERGY_WEIGHT, FORCE_WEIGHT, VIRIAL_WEIGHT)
# weight of one label of a frame, which multiplies the weight of the frame
WEIGHT_OF = {ENERGY: ENERGY_WEIGHT, FORCE: FORCE_WEIGHT, VIRIAL: VIRIAL_WEIGHT}
# keys of conditions, on which an energy depends beside positions and elements; F frames, A atoms
FPARAM = "fparam"  # (F, P) frame parameters, any unit
APARAM = "aparam"  # (A, Q) atomic parameters, any unit
# names of the arrays of dpdata and of DeePMD-kit's LMDB data, and those of their files in a set
NAMES_OF_DPDATA = {
    "coords": "coord",
    "cells": "box",
    "energies": ENERGY,
    "forces": FORCE,
    "virials": VIRIAL,
}
GPA = 160.2176634  # in one eV/angstrom^3


@dataclass(frozen=True)
class Quantity:
    """One error that is measured of a label.

    Attributes:
        name: name in ``Errors.summary()`` (``mae_<name>``, ``rmse_<name>``) and detail files
            (``<prefix>.<name>.out``).
        title: head of its rows and panels.
        unit: unit of the error, in ASCII.
        per: divisor of the label's error: ``atom`` (number of atoms of the frame), ``volume`` (of
            the cell; open frames do not count), or nothing.
        metric: letter in ``validation_metric``, ``val.log`` and tables; empty if it is not shown
            there.
        milli: whether tables show a thousandth of the unit.
    """

    name: str
    title: str
    unit: str
    per: str = ""
    metric: str = ""
    milli: bool = True

    @property
    def unit_symbol(self) -> str:
        """The unit with the symbol of angstrom, such as ``eV/Å³``."""
        return self.unit.replace("angstrom", "Å").replace("^3", "³")

    @property
    def display_unit(self) -> str:
        """The unit of tables and figures, such as ``meV/Å³``."""
        return f"m{self.unit_symbol}" if self.milli else self.unit_symbol

    @property
    def display_factor(self) -> float:
        """Numbers in ``unit`` times this are in ``display_unit``."""
        return 1000.0 if self.milli else 1.0


@dataclass(frozen=True)
class Label:
    """One label.

    Attributes:
        name: key in dictionaries.
        symbol: name in options of the loss (``start_pref_<symbol>``) and columns of ``lcurve.out``
            (``rmse_<symbol>``).
        unit: unit in ASCII; empty without one.
        files: names of the array in a set, without suffix; the next is looked for when one is
            absent.
        shape: shape of one row.
        per_atom: whether an atom has a row; without this and the next, a frame has one.
        per_pair: whether each two of the 3 N coordinates of a frame have a row, (3 N)^2 of them row
            by row.
        extensive: whether it grows with the number of atoms, so that it is judged per atom.
        errors: errors that are measured of it.
    """

    name: str
    symbol: str
    unit: str
    files: tuple[str, ...]
    shape: tuple[int, ...] = ()
    per_atom: bool = False
    per_pair: bool = False
    extensive: bool = False
    errors: tuple[Quantity, ...] = ()

    def num_rows(self, num_atoms: int) -> int:
        """Return the number of rows of a frame of ``num_atoms`` atoms."""
        if self.per_atom:
            return num_atoms
        return (3 * num_atoms) ** 2 if self.per_pair else 1

    def shape_of(self, *sizes: int) -> tuple[int, ...]:
        """Return the shape of the label of frames with these numbers of atoms together."""
        return (sum(map(self.num_rows, sizes)), *self.shape)

    def shape_in_frame(self, num_atoms: int) -> tuple[int, ...]:
        """Return the shape of the label of one frame; without rows where the frame is the row."""
        return (
            self.shape_of(num_atoms) if self.per_atom or self.per_pair else self.shape
        )


_ENERGY_ERRORS = (
    Quantity("e", "Energy", "eV"),
    Quantity("e_peratom", "Energy", "eV/atom", per="atom", metric="E"),
)
_VIRIAL_ERRORS = (
    Quantity("v", "Virial", "eV"),
    Quantity("v_peratom", "Virial", "eV/atom", per="atom", metric="V"),
    Quantity("s", "Stress", "eV/angstrom^3", per="volume", metric="S"),
)
_FORCE_ERROR = Quantity("f", "Force", "eV/angstrom", metric="F")
# error of forces weighted by atom_pref.npy, beside the one in which all atoms count alike
WEIGHTED_FORCE = Quantity("fw", "Force weighted", "eV/angstrom", metric="Q")
_ATOM_ENERGY_ERROR = Quantity("ae", "Atomic ener", "eV")
_HESSIAN_ERROR = Quantity("h", "Hessian", "eV/angstrom^2")


# Dipoles and polarizabilities have the units of the data; these are the units of DeePMD-kit's
# examples.
_DIPOLE_ERRORS = (
    Quantity("dipole", "Dipole", "e*angstrom", milli=False),
    Quantity(
        "dipole_peratom",
        "Dipole",
        "e*angstrom/atom",
        per="atom",
        metric="D",
        milli=False,
    ),
)
_POLAR_ERRORS = (
    Quantity("polar", "Polarizability", "angstrom^3", milli=False),
    Quantity(
        "polar_peratom",
        "Polarizability",
        "angstrom^3/atom",
        per="atom",
        metric="A",
        milli=False,
    ),
)
_ATOM_DIPOLE_ERROR = Quantity(
    "adipole", "Atomic dipole", "e*angstrom", metric="W", milli=False
)
_ATOM_POLAR_ERROR = Quantity(
    "apolar", "Atomic polarizability", "angstrom^3", metric="B", milli=False
)
# errors of the label of a frame, and of that of an atom: _Labels chooses by a boolean
_DOS_ERRORS = (
    (
        Quantity("dos", "Density of states", "1/eV", milli=False),
        Quantity(
            "dos_peratom",
            "Density of states",
            "1/eV/atom",
            per="atom",
            metric="N",
            milli=False,
        ),
    ),
    (Quantity("ados", "Atomic density of states", "1/eV", metric="M", milli=False),),
)
_PROPERTY_ERRORS = (
    (Quantity("property", "Property", "", metric="P", milli=False),),
    (Quantity("aproperty", "Atomic property", "", milli=False),),
)
_DECLARED = (
    Label(ENERGY, "e", "eV", ("energy",), extensive=True, errors=_ENERGY_ERRORS),
    Label(
        FORCE,
        "f",
        "eV/angstrom",
        ("force",),
        (3,),
        per_atom=True,
        errors=(_FORCE_ERROR,),
    ),
    # row major, positive: sum_i r_i (x) f_i for an open system; the stress is minus this per volume
    Label(VIRIAL, "v", "eV", ("virial",), (9,), extensive=True, errors=_VIRIAL_ERRORS),
    Label(
        ATOM_ENERGY,
        "ae",
        "eV",
        ("atom_ener", "atomic_ener"),
        per_atom=True,
        errors=(_ATOM_ENERGY_ERROR,),
    ),
    Label(
        ATOM_PREF, "pf", "", ("atom_pref", "atomic_pref"), per_atom=True
    ),  # a weight, no target
    Label(
        ATOM_WEIGHT, "", "", ("atomic_weight", "atom_weight"), per_atom=True
    ),  # the same, of tensors
    # second derivatives of the energy by the coordinates, x y z of the first atom, of the second,
    # ...
    Label(
        HESSIAN,
        "h",
        "eV/angstrom^2",
        ("hessian",),
        per_pair=True,
        errors=(_HESSIAN_ERROR,),
    ),
    *(Label(name, "", "", (name,)) for name in WEIGHTS),
    Label(
        DIPOLE,
        "",
        "e*angstrom",
        ("dipole",),
        (3,),
        extensive=True,
        errors=_DIPOLE_ERRORS,
    ),
    Label(
        ATOM_DIPOLE,
        "",
        "e*angstrom",
        ("atom_dipole", "atomic_dipole"),
        (3,),
        per_atom=True,
        errors=(_ATOM_DIPOLE_ERROR,),
    ),
    # row major
    Label(
        POLAR,
        "",
        "angstrom^3",
        ("polarizability",),
        (9,),
        extensive=True,
        errors=_POLAR_ERRORS,
    ),
    Label(
        ATOM_POLAR,
        "",
        "angstrom^3",
        ("atom_polarizability", "atomic_polarizability"),
        (9,),
        per_atom=True,
        errors=(_ATOM_POLAR_ERROR,),
    ),
)


class _Labels(dict[str, Label]):
    """The declared labels, and any of a width: ``dos[250]``, ``atom_dos[250]``, ``gap[1]``.

    Labels of any name with a width are properties.
    """

    def __missing__(self, name: str) -> Label:
        match = re.fullmatch(r"(atom_)?(.+)\[(\d+)\]", name)
        if match is None:
            raise KeyError(name)
        is_atomic = match[1] is not None
        kind = match[2]
        shape = (int(match[3]),)
        errors = (_DOS_ERRORS if kind == DOS else _PROPERTY_ERRORS)[is_atomic]
        files = (f"atom_{kind}", f"atomic_{kind}") if is_atomic else (kind,)
        symbol = errors[0].name if kind == DOS else ""
        return Label(
            name,
            symbol,
            errors[0].unit,
            files,
            shape,
            per_atom=is_atomic,
            errors=errors,
        )

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or str(name).endswith("]")


LABELS = _Labels({label.name: label for label in _DECLARED})
_ERRORS = [
    *(label.errors for label in LABELS.values()),
    *_DOS_ERRORS,
    *_PROPERTY_ERRORS,
]
QUANTITIES = {quantity.name: quantity for errors in _ERRORS for quantity in errors}
# the last: sums in older checkpoints have no row of it
QUANTITIES[WEIGHTED_FORCE.name] = WEIGHTED_FORCE
METRICS = {
    quantity.metric: quantity for quantity in QUANTITIES.values() if quantity.metric
}
