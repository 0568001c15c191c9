"""Names of units, as files and users write them, and their factors to eV and angstrom."""

from __future__ import annotations

import re
from functools import lru_cache

from deepmd_ema.config.labels import GPA
from deepmd_ema.errors import DataError
from deepmd_ema.text import show_text

BOHR = 0.529177210903  # angstrom, CODATA 2018
HARTREE = 27.211386245988  # eV
_KJ_PER_MOL = 1 / 96.48533212331  # eV
_DEBYE = 0.2081943328  # e*angstrom
LENGTHS = {"angstrom": 1.0, "bohr": BOHR, "nm": 10.0}
ENERGIES = {
    "ev": 1.0,
    "hartree": HARTREE,
    "rydberg": HARTREE / 2,
    "kcal/mol": 4.184 * _KJ_PER_MOL,
    "kj/mol": _KJ_PER_MOL,
    "mev": 1e-3,
}
_PRESSURES = {
    "gpa": 1 / GPA,
    "kbar": 0.1 / GPA,
    "kb": 0.1 / GPA,
    "mpa": 1e-3 / GPA,
    "bar": 1e-4 / GPA,
    "pa": 1e-9 / GPA,
}
STRESS_UNIT = "eV/angstrom^3"
# with other spellings
_LENGTHS = LENGTHS | {
    "ang": 1.0,
    "a": 1.0,
    "angstroms": 1.0,
    "a0": BOHR,
    "bohrs": BOHR,
    "au": BOHR,
    "nanometer": 10.0,
}
_ENERGIES = ENERGIES | {
    "electronvolt": 1.0,
    "ha": HARTREE,
    "eh": HARTREE,
    "hartrees": HARTREE,
    "au": HARTREE,
    "ry": HARTREE / 2,
    "kcal/mole": 4.184 * _KJ_PER_MOL,
    "kj/mole": _KJ_PER_MOL,
}
# units of energy (eV) and of length (angstrom) of all numbers of a file, by the names that ASE and
# LAMMPS have for them
_SYSTEMS = {
    "metal": (1.0, 1.0),
    "ase": (1.0, 1.0),
    "real": (ENERGIES["kcal/mol"], 1.0),
    "au": (HARTREE, BOHR),
    "electron": (HARTREE, BOHR),
}
# powers of energy and length in the units that labels have
_POWERS = {
    "angstrom": (0, 1),
    "eV": (1, 0),
    "eV/angstrom": (1, -1),
    "eV/angstrom^2": (1, -2),
    STRESS_UNIT: (1, -3),
    "e*angstrom": (0, 1),
    "angstrom^3": (0, 3),
}
_KNOWN = (
    "eV, hartree, rydberg, kcal/mol, kJ/mol, meV; angstrom, bohr, nm; their quotients; GPa, kbar, "
    "bar; debye"
)
# patterns and replacements, in this order: later patterns expect what earlier ones wrote
_SPELLINGS = (
    (r"å|ångström|ångstrom", "angstrom"),
    (r"³", "^3"),
    (r"\*\*", "^"),
    (r"\ba\.u\.?|\batomic(_units?)?\b", "au"),
    (r"\s+per\s+", "/"),
    (r"\s*([/*^()])\s*", r"\1"),
    (r"[\s·]+", "*"),
    # kcal/(mol*angstrom) becomes kcal/mol/angstrom, eV*angstrom^-3 becomes eV/angstrom^3
    (r"/\(([^()*]+)\*([^()*]+)\)", r"/\1/\2"),
    (r"\*([a-z][a-z0-9]*?)\^?-(\d)", r"/\1^\2"),
    (r"\^1(?!\d)", ""),
    (r"(?<=[a-z])([23])$", r"^\1"),  # angstrom3
)


def quantity_factor(energy: float, length: float, unit: str) -> float:
    """Return the factor to ``unit`` of numbers in the same powers of other units.

    Args:
        energy: the other unit of energy, in eV.
        length: the other unit of length, in angstrom.
        unit: of a label, in eV and angstrom.
    """
    powers = _POWERS[unit]
    return energy ** powers[0] * length ** powers[1]


@lru_cache(maxsize=1000)  # a file states the same in each frame
def stated_factor(key: str, text: str, unit: str) -> float:
    """Return the factor from the unit ``text``, which a file states under ``key``, to ``unit``.

    Raises:
        DataError: if the unit is not known, or one of another quantity.
    """
    spelled, powers = spelled_unit(text), _POWERS[unit]
    # all spellings of units of this quantity: lengths and energies alone or as quotients
    table = {"au": quantity_factor(HARTREE, BOHR, unit)}
    power = "" if abs(powers[1]) == 1 else f"^{abs(powers[1])}"
    if unit == STRESS_UNIT:
        table |= _PRESSURES
    if unit == "e*angstrom":
        table |= {
            "debye": _DEBYE,
            "d": _DEBYE,
            **{f"e*{name}": factor for name, factor in _LENGTHS.items()},
        }
    elif not powers[0]:
        table |= {
            name + power: quantity_factor(1.0, factor, unit)
            for name, factor in _LENGTHS.items()
        }
    elif not powers[1]:
        table |= _ENERGIES
    else:
        for name, factor in _ENERGIES.items():
            for length in _LENGTHS:
                table[f"{name}/{length}{power}"] = quantity_factor(
                    factor, _LENGTHS[length], unit
                )
    if spelled not in table:
        shown = show_text(text)
        raise DataError(
            f"{key} = {shown}: is not a known unit of a quantity in {unit}. Known: {_KNOWN}."
        )
    return table[spelled]


@lru_cache(maxsize=1000)
def stated_system(key: str, text: str) -> tuple[float, float]:
    """Return the units of energy (eV) and length (angstrom) that a file states for all numbers.

    Args:
        key: name under which the file states them, for messages.
        text: name of a system of units, or units of energy, length or force.

    Raises:
        DataError: if they are not known.
    """
    if (spelled := spelled_unit(text)) in _SYSTEMS:
        return _SYSTEMS[spelled]
    # a list of units: what it does not name is in eV and angstrom
    energy = 1.0
    length = 1.0
    for part in re.split(r"[,;\s]+", text.strip()):
        word = spelled_unit(part)
        dividend, _, divisor = word.rpartition("/")
        if dividend and divisor in _LENGTHS:  # the unit of forces
            energy = stated_factor(key, dividend, "eV")
            length = _LENGTHS[divisor]
        elif word in _LENGTHS:
            length = _LENGTHS[word]
        else:
            energy = stated_factor(key, part, "eV")
    return energy, length


def is_unusual(text: str) -> bool:
    """Whether a text is another unit of energy or length, or system of them, than eV, angstrom."""
    spelled = spelled_unit(text)
    parts = {spelled, *spelled.rsplit("/", 1)}
    factors = {(_ENERGIES | _LENGTHS).get(part, 1.0) for part in parts}
    return {*factors, *_SYSTEMS.get(spelled, ())} != {1.0}


def spelled_unit(text: str) -> str:
    """Return a unit in one spelling: in small letters, as a quotient, with powers after ^."""
    spelled = text.strip().lower()
    for pattern, replacement in _SPELLINGS:
        spelled = re.sub(pattern, replacement, spelled)
    return spelled
