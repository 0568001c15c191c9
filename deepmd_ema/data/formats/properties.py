"""Names of labels in files of other programs, and their arrays as those of ``config.labels``."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deepmd_ema.config.labels import (
    APARAM,
    ATOM_DIPOLE,
    ATOM_ENERGY,
    ATOM_POLAR,
    ATOM_PREF,
    ATOM_WEIGHT,
    DIPOLE,
    ENERGY,
    FORCE,
    FPARAM,
    HESSIAN,
    LABELS,
    POLAR,
    VIRIAL,
    WEIGHTS,
)
from deepmd_ema.data.source import BOX, COORD, Frame, ReadSpec, rows_per
from deepmd_ema.data.units import (
    STRESS_UNIT,
    is_unusual,
    quantity_factor,
    spelled_unit,
    stated_factor,
    stated_system,
)
from deepmd_ema.errors import DataError, collect_problems
from deepmd_ema.geometry import Array
from deepmd_ema.text import counted, did_you_mean, first_few, show_text

# (3, 3) or Voigt's six, eV/angstrom^3, positive under tension: minus the virial over the volume
STRESS = "stress"
# usual names in small letters, without prefixes of origin such as REF_ (_ORIGIN)
_NAMES = {
    ENERGY: ("energy", "potential_energy", "total_energy"),
    FORCE: ("force", "forces"),
    VIRIAL: ("virial", "virials"),
    STRESS: ("stress", "stresses"),
    ATOM_ENERGY: (
        "atom_energy",
        "atomic_energy",
        "atom_energies",
        "atomic_energies",
        "atom_ener",
        "energies",
    ),
    ATOM_PREF: ("atom_pref", "atomic_pref"),
    HESSIAN: ("hessian",),
    DIPOLE: ("dipole", "dipole_moment"),
    POLAR: ("polarizability", "polar"),
    **{name: LABELS[name].files for name in (ATOM_DIPOLE, ATOM_POLAR, ATOM_WEIGHT)},
    FPARAM: ("fparam",),
    APARAM: ("aparam",),
    # names of GPUMD, and names of MACE
    **dict(
        zip(
            WEIGHTS,
            (
                ("weight", "config_weight"),
                ("energy_weight", "config_energy_weight"),
                ("force_weight", "forces_weight", "config_forces_weight"),
                ("virial_weight", "config_virials_weight", "config_stress_weight"),
            ),
            strict=True,
        )
    ),
}
KIND_NAMES = (
    "config_type",
    "group",
)  # under which files name the kind of calculation of a frame
_ORIGIN = re.compile(r"^(ref|reference|dft|qm|target)[_-]")
# places of the nine components, row by row, among xx yy zz yz xz xy, as ASE orders them
_VOIGT = [0, 5, 4, 5, 1, 3, 4, 3, 2]
_MAX_NAMES = 12
_MAX_SHOWN = 40  # letters of a value in a message
# with electrons at a temperature, the energy whose gradient the forces are; it is read only where
# there is no other energy
_FREE = "free_energy"
_SMEARED = 1e-5  # eV; VASP and ASE round to less
_OTHER = {
    VIRIAL: STRESS,
    STRESS: VIRIAL,
}  # one is enough, and where both are they may differ
# energy_unit, units_of_force
_UNIT_KEY = re.compile(
    r"(.*?)[_\- ]?units?|units?[_\- ](?:of[_\- ])?(.+)", re.IGNORECASE
)
# quantities that are not read, in units that energies or lengths may have
_OTHER_UNITS = re.compile("time|mass|charge|mag|temperature|veloc|moment|freq|spin")
_LENGTH_NAMES = {
    COORD,
    "length",
    "lengths",
    "distance",
    "pos",
    "position",
    "positions",
    "coords",
}
_LENGTH_NAMES |= {"coordinates", "lattice", "cell", BOX}
# the quantity whose unit is that of another one where none is stated for it
_SAME_UNIT = {
    VIRIAL: ENERGY,
    ATOM_ENERGY: ENERGY,
    ENERGY: ATOM_ENERGY,
    DIPOLE: ATOM_DIPOLE,
    ATOM_DIPOLE: DIPOLE,
    POLAR: ATOM_POLAR,
    ATOM_POLAR: POLAR,
}
# quantities whose units are powers of those of energy and length
_MECHANICAL = (ENERGY, FORCE, VIRIAL, STRESS, ATOM_ENERGY, HESSIAN)


@dataclass(frozen=True, eq=False)
class StoredFrame:
    """A frame as a file has it, before names are understood.  N atoms.

    Attributes:
        symbols: (N,) names of elements.
        coord: (N, 3) float64, angstrom.
        box: (3, 3) float64, angstrom, rows are cell vectors; None for an open frame.
        per_frame: by name, what belongs to the frame: text, number or array.
        per_atom: by name, (N, numbers) arrays.
        unread: names of what the file has beside that.
    """

    symbols: Sequence[str]
    coord: Array
    box: Array | None
    per_frame: Mapping[str, Any]
    per_atom: Mapping[str, Array]
    unread: Collection[str] = ()


@dataclass
class Inventory:
    """Content of the frames of a file, the part that is read, and the names that it has.

    Attributes:
        chosen: names that the user has chosen: label, ``stress``, ``fparam`` or ``aparam`` to the
            name in the file.
        wanted: labels, ``fparam`` and ``aparam`` that are read; None: all but those whose width a
            model sets.
        num_frames: frames seen.
        read: by what is read, the number of frames that have it under each name.
        both: number of frames with a virial and a stress.
        left: number of frames that have each name that is not read.
        kinds: by the name under which frames name their kind of calculation, the number of frames
            of each kind.
        other: further remarks, with the number of frames they are about; 0 of the whole file.
        unused: what frames have that is not wanted.
        states_units: whether frames name the units of their numbers.
        stating: by what is read, the number of frames whose unit of it is stated.
        stated: by property, the number of frames that state each unit of it.
        converts: whether a unit is not the usual one.
        reader: the program that reads the file, and the name that it has for the format.
        units: units of length and energy that this reader takes the numbers for; None for those
            that the format says.
    """

    chosen: Mapping[str, str] = field(default_factory=dict)
    wanted: Collection[str] | None = None
    num_frames: int = 0
    read: dict[str, Counter[str]] = field(default_factory=dict)
    both: int = 0
    left: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    other: Counter[str] = field(default_factory=Counter)
    unused: set[str] = field(default_factory=set)
    states_units: bool = False
    stating: Counter[str] = field(default_factory=Counter)
    stated: dict[str, Counter[str]] = field(default_factory=dict)
    converts: bool = False
    reader: str = "dp-ema"
    units: tuple[str, str] | None = ("angstrom", "eV")
    _names: dict[tuple[frozenset[str], frozenset[str]], dict[str, list[str]]] = field(
        default_factory=dict, repr=False
    )

    def sources(self, frame: StoredFrame) -> dict[str, str]:
        """Return the name of everything that is read of a frame, the first of several."""
        return {what: names[0] for what, names in self._names_of(frame).items()}

    def _names_of(self, frame: StoredFrame) -> dict[str, list[str]]:
        """Return all names under which a frame has each thing that is read."""
        # frames of a file mostly have the same names, which are looked up once
        per_frame = frozenset(frame.per_frame)
        per_atom = frozenset(frame.per_atom)
        key = per_frame, per_atom
        if key in self._names:
            return self._names[key]
        names_of = dict[str, list[str]]()
        for what, names in _names_of(self.wanted or ()).items():
            stored = sorted(per_atom if rows_per(what) == "atom" else per_frame)
            if what in self.chosen:
                matching = [name for name in stored if name == self.chosen[what]]
            elif _OTHER.get(what) in self.chosen:
                continue  # the user has chosen a stress, and not the virial, or the other way round
            else:
                # REF_energy and energy are both matches: the user must choose if both are there
                usual = set(map(str.lower, names))
                plain = {name: name.lower().replace("-", "_") for name in stored}
                matching = [
                    name
                    for name in stored
                    if usual & {plain[name], _ORIGIN.sub("", plain[name])}
                ]
                if what == ENERGY and not matching:
                    matching = [
                        name for name in stored if _ORIGIN.sub("", plain[name]) == _FREE
                    ]
                label = VIRIAL if what == STRESS else what
                if matching and self.wanted is not None and label not in self.wanted:
                    self.unused.add(what)
                    continue
            if matching:
                names_of[what] = matching
        self._names[key] = names_of
        return names_of

    def add(self, frame: StoredFrame) -> None:
        """Count a frame; raises DataError if its cell has no volume."""
        self.num_frames += 1
        names = self._names_of(frame)
        sources = self.sources(frame)
        if frame.box is not None and not np.linalg.det(frame.box):
            shown = " ".join(f"{number:g}" for number in frame.box.ravel())
            raise DataError(
                f'is periodic with a cell without volume ({shown}). Molecules have pbc = "F F F".'
            )
        for what, matching in names.items():
            self.read.setdefault(what, Counter()).update(matching)
        self.both += VIRIAL in names and STRESS in names
        left = {*frame.per_frame, *frame.per_atom, *frame.unread}.difference(
            *names.values()
        )
        if name := name_of_kind(frame):
            self.kinds.setdefault(name, Counter())[str(frame.per_frame[name])] += 1
        stated = stated_units(frame.per_frame)
        self.left.update(left - {name} - {key for key, _ in stated.values()})
        if stated:
            self.states_units = True
            factors = unit_factors(frame.per_frame, sources)
            self.stating.update(factors.keys())
            self.converts |= any(factor != 1 for factor in factors.values())
            for what in sources.keys() - _NAMES.keys():
                if entry := stated.get(sources[what].lower()):
                    unit = spelled_unit(entry[1])
                    self.stated.setdefault(what, Counter())[unit] += 1
            converted = [
                f"{what} by {factor:.9g}"
                for what, factor in factors.items()
                if factor != 1
            ]
            if converted:
                values = ", ".join(
                    dict.fromkeys(f"{key} = {value}" for key, value in stated.values())
                )
                self.other[
                    f"the file states {values}: converted to eV and angstrom "
                    f"({', '.join(converted)})"
                ] += 1
        if frame.box is None and STRESS in sources:
            self.other["stress is left out, open frames have no volume"] += 1
        if (
            sources.get(ENERGY) != _FREE
            and ENERGY in sources
            and _FREE in frame.per_frame
        ):
            free = numbers(_FREE, frame.per_frame[_FREE])[0]
            energy = numbers(sources[ENERGY], frame.per_frame[sources[ENERGY]])[0]
            if abs(free - energy) > _SMEARED:
                self.other[
                    f"{_FREE} differs, and forces belong to it: FILE#energy={_FREE} reads it"
                ] += 1

    def problems(self, file: str) -> list[str]:
        """Return the mistakes in names over all frames of ``file``."""
        several = {what: names for what, names in self.read.items() if len(names) > 1}
        # a virial and a stress are one label, and nothing shows which of them is meant
        if self.both:
            several = {w: n for w, n in several.items() if w != STRESS}
            several[VIRIAL] = self.read[VIRIAL] + self.read[STRESS]
        problems = []
        choice = dict(self.chosen)
        shown = list[str]()
        for what, names in several.items():
            shown.append(
                f"{what} may be "
                + " or ".join(f"{n} ({counted(k, 'frame')})" for n, k in names.items())
            )
            # the proposal is the name of most frames; among equals the one with a prefix of origin,
            # as names without a prefix may be those of a model's predictions
            name = max(
                names, key=lambda name: (names[name], bool(_ORIGIN.match(name.lower())))
            )
            choice[
                STRESS if what == VIRIAL and name in self.read.get(STRESS, ()) else what
            ] = name
        if shown:
            which = ",".join(f"{what}={name}" for what, name in choice.items())
            problems.append(
                f"{'; '.join(shown)}. Say which after the name of the file, such as {file}#{which}."
            )
        frames_with = {what: names.total() for what, names in self.read.items()}
        frames_with[COORD] = self.num_frames
        problems += [
            f"{what} is in {' and '.join(units)}: expected one unit in all frames."
            for what, units in self.stated.items()
            if len(units) > 1
        ]
        for what, number in self.stating.items():
            if self.converts and 0 < number < frames_with.get(what, 0):
                problems.append(
                    f"{what}: {counted(number, 'frame')} of {frames_with[what]} state its unit. "
                    "Add it to all frames."
                )
        every = sorted({*self.left}.union(*self.read.values()))
        for what, name in self.chosen.items():
            if name not in self.read.get(what, {}):
                problems.append(
                    f"#{what}={name}: no frame has it. {did_you_mean(name, every)}"
                )
        return problems

    def lines(self, base_units: str = "angstrom,eV") -> list[str]:
        """Return lines with the names that are read, and those that are not.

        Args:
            base_units: of length and energy in the file.
        """
        length, energy = base_units.split(",")

        def in_frames(number: int) -> str:
            return (
                "" if number == self.num_frames else f" in {counted(number, 'frame')}"
            )

        parts = list[str]()
        for what, names in self.read.items():
            name, frames = max(names.items(), key=lambda item: item[1])
            text = what if what == name else f"{what} from {name}"
            if what == STRESS:
                text = (
                    f"virial = -volume * {name} ({name} in {energy}/{length}^3, positive under "
                    "tension, as in ASE)"
                )
            if what == VIRIAL:
                text += f" ({energy}, -volume * stress)"
            if units := self.stated.get(what):
                text += f" (stated in {first_few([*units])})"
            parts.append(text + in_frames(frames))
        lines = [f"reads {', '.join(parts) or 'positions only'}"]
        if self.left:
            left = [f"{name}{in_frames(n)}" for name, n in sorted(self.left.items())]
            lines.append(f"does not read {first_few(left, _MAX_NAMES)}")
        for name, kinds in self.kinds.items():
            lines.append(
                f"{name} has {counted(len(kinds), 'value')} in {counted(kinds.total(), 'frame')}"
            )
        return lines + [
            text + (f" ({counted(n, 'frame')})" if n else "")
            for text, n in self.other.items()
        ]


def name_of_kind(frame: StoredFrame) -> str:
    """Return the name under which a frame has its kind of calculation; empty if it has none."""
    stored = {name.lower(): name for name in frame.per_frame}
    return next((stored[name] for name in KIND_NAMES if name in stored), "")


def kind_of(frame: StoredFrame) -> str:
    """Return the kind of calculation that a frame names; empty if it names none."""
    name = name_of_kind(frame)
    return str(frame.per_frame[name]) if name else ""


def describe_singles(kinds: Sequence[str]) -> str:
    """Return a line if ``kinds`` name single frames; empty if they name groups.

    Args:
        kinds: of each frame; empty where it names none.
    """
    named = sum(map(bool, kinds))
    values = len(set(kinds) - {""})
    # numbers of frames as kinds, for one; a group has two frames or more on average
    if values < 2 or 2 * values <= named:
        return ""
    return (
        f"{' or '.join(KIND_NAMES)} names single frames and no groups ({values:,} values in "
        f"{named:,} frames)"
    )


def _names_of(wanted: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the usual names of all labels, with labels in ``wanted`` whose width a model sets."""
    return _NAMES | {name: LABELS[name].files for name in wanted if name not in _NAMES}


def parse_choice(text: str, wanted: Collection[str] = ()) -> dict[str, str]:
    """Return the names after ``#`` in ``train.extxyz#energy=REF_energy,force=REF_forces``.

    Args:
        text: after ``#``.
        wanted: labels that are read.

    Raises:
        DataError: if it is anything else.
    """
    choice = {}
    for part in filter(None, text.split(",")):
        what, _, name = (word.strip() for word in part.partition("="))
        keys = [
            key
            for key, names in _names_of(wanted).items()
            if {what, what.lower()} & {key, *names}
        ]
        if not name or not keys:
            raise DataError(
                f"#{text}: {part!r} is not understood. Expected e.g. "
                "energy=REF_energy,force=REF_forces."
            )
        choice[keys[0]] = name
    if VIRIAL in choice and STRESS in choice:
        raise DataError(f"#{text}: names a virial and a stress. Expected one of them.")
    return choice


def labels_of(
    frame: StoredFrame, sources: Mapping[str, str], wanted: Collection[str]
) -> dict[str, Array]:
    """Return the arrays of a frame by label, in the shapes of ``deepmd_ema.data.source.Frame``.

    Args:
        frame: as stored.
        sources: the names to read, of :meth:`Inventory.sources`.
        wanted: labels, ``fparam`` and ``aparam`` to return where the frame has them.

    Raises:
        DataError: if an array has a wrong shape or is no number.
    """
    arrays = {}
    factors = unit_factors(frame.per_frame, sources)
    for what, name in sources.items():
        label = VIRIAL if what == STRESS else what
        factor = factors.get(what, 1.0)
        # open frames have no volume by which a stress becomes a virial
        if label not in wanted or (what == STRESS and frame.box is None):
            continue
        if rows_per(label) == "atom":
            width = 0 if label == APARAM else math.prod(LABELS[label].shape)
            rows = factor * _rows(name, frame.per_atom[name], width)
            arrays[label] = (
                rows.reshape(len(rows), *LABELS[label].shape)
                if label != APARAM
                else rows
            )
            continue
        values = factor * numbers(name, frame.per_frame[name])
        if label == VIRIAL and values.size == 6:
            values = values[_VOIGT]
        natoms = len(frame.symbols)
        # any number of parameters here: make_frame compares it with numb_fparam
        size = values.size
        if label != FPARAM:
            size = math.prod(LABELS[label].shape_of(natoms))
        if values.size != size:
            expected = f"{size} for the frame"
            if label == VIRIAL:
                expected = "9 (3x3) or 6 (xx, yy, zz, yz, xz, xy)"
            elif label in (ENERGY, *WEIGHTS):
                expected = "one for the frame"
            elif label == HESSIAN:
                expected = f"{size} for {counted(natoms, 'atom')}: (3 N)^2"
            raise DataError(f"{name}: has {values.size} numbers, expected {expected}.")
        # stress is in eV/angstrom^3 now and positive under tension
        if what == STRESS and frame.box is not None:
            values = -abs(float(np.linalg.det(frame.box))) * values
        arrays[label] = values.reshape(()) if label in (ENERGY, *WEIGHTS) else values
    return arrays


def stated_units(per_frame: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return key and value of the units that a frame states, by the quantity.

    Quantities are labels, names of arrays, and lengths (``coord``). A unit of all numbers is under
    an empty name. Keys of other quantities, such as ``time_unit``, are left out.

    Raises:
        DataError: if a unit is not eV or angstrom, and its key names no quantity.
    """
    stated = dict[str, tuple[str, str]]()
    present = {"", *map(str.lower, per_frame)}
    for key, value in per_frame.items():
        match = _UNIT_KEY.fullmatch(key) if "unit" in key.lower() else None
        if match is None:
            continue
        # a cell, unless it is a unit
        if re.fullmatch("unit.cell", key.lower()) and not is_unusual(str(value)):
            continue
        name = (match[1] or match[2] or "").lower()
        plain = _ORIGIN.sub("", name).replace("-", "_")
        # a pressure has the unit of a stress
        plain = "stress" if plain == "pressure" else plain
        name = "" if plain == "system" else name
        spellings = {plain, plain.removesuffix("s")}
        labels = [what for what, names in _NAMES.items() if spellings & {what, *names}]
        quantities = labels[:1]
        if not quantities and plain in _LENGTH_NAMES:
            quantities = [COORD]
        if quantities or name in present:
            for quantity in (name, *quantities):
                stated.setdefault(quantity, (key, str(value)))
        elif is_unusual(str(value)) and not _OTHER_UNITS.search(plain):
            raise DataError(
                f"{key} = {show_text(str(value))}: is the unit of nothing that is known. Expected "
                "energy_unit, forces_unit, length_unit, NAME_unit of an array, or units of all."
            )
    return stated


def refuse_other_units(place: str, entries: Mapping[str, Any], name: str = "") -> None:
    """Check that units are those of ``config.labels``, in formats whose numbers are not converted.

    Args:
        place: of the entries, for messages.
        entries: attributes of a file, of a group, or of an array, or a record of a frame.
        name: of the array.

    Raises:
        DataError: if a unit is another one, or not known.
    """
    units = {
        f"{name}_{key}".strip("_"): " ".join(np.ravel(value).astype(str))
        for key, value in entries.items()
        if "unit" in key.lower()
    }
    if not units:  # as in records of LMDB, of which each frame is one
        return
    problems = list[str]()
    with collect_problems(problems, place):
        stating = {name: "", **units}
        # a unit of all numbers is that of energies, too
        quantities = [what or ENERGY for what in stated_units(stating)]
        factors = unit_factors(stating, dict(zip(quantities, quantities)))
        if {*factors.values()} - {1}:
            shown = ", ".join(map(" = ".join, units.items()))
            raise DataError(f"{shown}: expected eV and angstrom. Convert the numbers.")
    DataError.raise_if_any(problems)


def unit_factors(
    per_frame: Mapping[str, Any], sources: Mapping[str, str]
) -> dict[str, float]:
    """Return factors to the units of ``config.labels`` of everything whose unit a frame states.

    Positions are among it. A unit that is not stated follows from others: that of a virial from
    that of the energy, of labels of atoms and of frames from each other, all from the unit of all.

    Args:
        per_frame: what belongs to the frame, by name.
        sources: the names that are read, of :meth:`Inventory.sources`.

    Raises:
        DataError: if a unit is not known, or one is not stated while others are stated that it may
            or may not follow.
    """
    stated = stated_units(per_frame)
    factors = dict[str, float]()
    if not stated:
        return factors
    system = stated_system(*stated[""]) if "" in stated else None
    lengths = {stated[name] for name in _LENGTH_NAMES & stated.keys()}
    if lengths:
        length_factors = {stated_factor(*entry, "angstrom") for entry in lengths}
        factors[COORD] = min(length_factors)
        if len(length_factors) > 1:
            raise DataError(
                f"{' and '.join(sorted(f'{k} = {v}' for k, v in lengths))}: expected one unit of "
                "lengths."
            )
    elif system is not None:
        factors[COORD] = system[1]
    # Units of energy, and of length, other than eV and angstrom. A quantity without a stated unit
    # may be in these or in the usual ones, so that such files are refused.
    unusual = {unit: list[str]() for unit in ("eV", "angstrom")}
    if factors.get(COORD, 1.0) != 1 and system is None:
        unusual["angstrom"] += [f"{key} = {value}" for key, value in lengths]
    unstated = []
    for what, name in sources.items():
        unit = (
            STRESS_UNIT
            if what == STRESS
            else LABELS[what].unit
            if what in LABELS
            else ""
        )
        if not unit or what not in _NAMES:
            continue
        fallback = stated.get(_SAME_UNIT.get(what, what))
        entry = stated.get(name.lower(), stated.get(what, fallback))
        if entry is not None:
            factors[what] = stated_factor(*entry, unit)
            # a stress in GPa says nothing about the unit of energies
            if factors[what] != 1 and what in _MECHANICAL and what != STRESS:
                unusual["eV"].append(f"{entry[0]} = {entry[1]}")
        elif system is not None:
            factors[what] = quantity_factor(*system, unit)
        elif what in _MECHANICAL or what in _SAME_UNIT:
            unstated.append((name, unit))
    for name, unit in unstated:
        if reasons := [
            text for base, texts in unusual.items() if base in unit for text in texts
        ]:
            raise DataError(
                f"{reasons[0]}, and the unit of {name} is not stated. Add {name}_unit, such as "
                f"{unit}."
            )
    return factors


def in_angstrom(stored: StoredFrame) -> StoredFrame:
    """Return a frame with positions and cell in angstrom, from the unit that it states."""
    factor = unit_factors(stored.per_frame, {}).get(COORD, 1.0)
    if factor == 1:
        return stored
    return replace(
        stored,
        coord=stored.coord * factor,
        box=None if stored.box is None else stored.box * factor,
    )


def make_frame(
    stored: StoredFrame,
    sources: Mapping[str, str],
    spec: ReadSpec,
    source: tuple[str, int],
) -> Frame:
    """Return a frame with the types of the model and what it reads.

    Args:
        stored: as the file has it.
        sources: the names to read, of :meth:`Inventory.sources`.
        spec: what is read.
        source: name and number of the frame, for messages.

    Raises:
        DataError: if the frame lacks parameters of the model, or has other elements.
    """
    read = labels_of(stored, sources, {*spec.labels, *spec.conditions})
    if spec.numb_fparam and spec.default_fparam is not None:
        read.setdefault(FPARAM, np.array(spec.default_fparam, np.float64))
    for name, number in spec.conditions.items():
        if name not in read or read[name].shape[-1] != number:
            has = f"{read[name].shape[-1]} numbers" if name in read else "none"
            raise DataError(f"{name}: has {has}, but numb_{name} = {number}.")
    # atoms of other elements cannot be left out: energies and forces of the frame are with them
    type_of = {element: number for number, element in enumerate(spec.type_map)}
    if unknown := sorted(set(stored.symbols) - type_of.keys()):
        raise DataError(
            f"element {show_text(unknown[0])} is not in model.type_map. "
            f"{did_you_mean(unknown[0], spec.type_map)} Add it to model.type_map, or leave the "
            "data out."
        )
    atom_type = np.array([type_of[element] for element in stored.symbols], np.int64)
    labels = {name: read[name] for name in spec.labels if name in read}
    return Frame(
        stored.coord,
        atom_type,
        stored.box,
        labels,
        read.get(FPARAM),
        read.get(APARAM),
        source,
    )


def numbers(name: str, value: Any) -> Array:
    """Return a text or array as (n,) float64; 3x3 tensors row by row.

    Raises:
        DataError: if it is neither.
    """
    if isinstance(value, str):
        value = re.sub(r"^_JSON ", "", value)  # ASE writes it before lists
        value = [word for word in re.split(r"[\s,\[\](){}]+", value) if word]
    try:
        array = np.asarray(value, np.float64).reshape(-1)
    except (TypeError, ValueError):
        array = np.empty(0)
    if not array.size:  # an empty text or list, or one that is not of numbers
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        raise DataError(f"{name}: is {show_text(text, _MAX_SHOWN)}, expected numbers.")
    return array


def _rows(name: str, array: Array, width: int) -> Array:
    """Return (N, width) rows, (N,) numbers where the width is 1; any width where it is 0."""
    rows = array.reshape(len(array), -1)
    if width and rows.shape[1] != width:
        raise DataError(
            f"{name}: has {counted(rows.shape[1], 'column')}, expected {width}."
        )
    try:
        rows = rows.astype(np.float64)
    except (TypeError, ValueError) as error:
        text = str(error).rpartition(": ")[2].strip("'")  # the word that is no number
        raise DataError(
            f"{name}: has {show_text(text, _MAX_SHOWN)}, expected numbers."
        ) from None
    return rows[:, 0] if width == 1 else rows
