"""Identities between energies, forces and virials, and bounds of lengths: what shows units and
signs without a guess.

Along a path on which atoms move by u and the cell by a strain e the energy changes by -F u - W e,
with the means F and W of forces and virials at both ends (trapezoidal rule, which is exact in a
harmonic potential). The virial of an open system is ``sum_i r_i F_i^T``, which has no antisymmetric
part. What no identity reaches is not verified, as a unit that energies, forces and virials have in
common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from deepmd_ema.config.labels import ATOM_PREF, ENERGY, FORCE, GPA, VIRIAL
from deepmd_ema.data.check.bonds import (
    LONG,
    MAX_SEARCHED,
    REACH,
    SHORT,
    bond_radii,
    bonds_by_elements,
    misplaced_types,
    nearest_bonds,
)
from deepmd_ema.data.check.scan import SystemScan
from deepmd_ema.data.source import Frame
from deepmd_ema.data.units import BOHR, ENERGIES, HARTREE
from deepmd_ema.errors import counted, first_few
from deepmd_ema.findings import Finding, warning
from deepmd_ema.geometry import Array
from deepmd_ema.utils import even_places

_KCAL = 1 / ENERGIES["kcal/mol"]
_KJ = 1 / ENERGIES["kj/mol"]
# numbers that 1 eV, 1 eV/angstrom and 1 eV of a virial have in other units; those of a stress are
# over the volume
ENERGY_UNITS = {
    "Hartree": 1 / HARTREE,
    "Rydberg": 2 / HARTREE,
    "kcal/mol": _KCAL,
    "kJ/mol": _KJ,
    "meV": 1e3,
}
_FORCES = {
    "Hartree/bohr": BOHR / HARTREE,
    "Rydberg/bohr": 2 * BOHR / HARTREE,
    "kcal/mol/angstrom": _KCAL,
    "kJ/mol/angstrom": _KJ,
    "kJ/mol/nm": 10 * _KJ,
    "meV/angstrom": 1e3,
}
_VIRIALS = {**ENERGY_UNITS, "GPa * angstrom^3": GPA, "kbar * angstrom^3": 10 * GPA}
_STRESSES = {"eV/angstrom^3": 1.0, "GPa": GPA, "kbar": 10 * GPA}
# of three ratios: energy differences over the works of forces and of virials, and virials over
# those works of forces
_EXPONENTS = {
    "energies": (1, 1, 0),
    "forces": (-1, 0, -1),
    "virials": (0, -1, 1),
    "lengths": (-1, 0, -1),
}
# ratio of what is equal: 0.83 to 1.2 in right data, where a line explains the share of _EXPLAINED
_SAME = 1.5
_SAME_UNIT = 1.2  # ratio to that of a unit that is named: kcal/mol is 1.18 / hartree
_EXPLAINED = 0.95  # least share of the squares of the energy differences that a line explains
_HALF = 0.5  # a larger share is explained by forces that are those of the frames
_EXPLAINED_BY_HALF = (
    0.9  # the same in each half of the frames, whose ratios differ by at most _SAME
)
# largest displacement of an atom (angstrom) and strain of two frames; nearer ones are compared
# first
_LEVELS = ((0.3, 0.03), (0.6, 0.06), (1.0, 0.1))
_MIN_STRAIN = 1e-6  # of rounding
_MAX_STRAIN = 1e-3  # of frames in one cell
_MIN_CHANGE = (
    0.2  # eV/angstrom, RMS of the changes of forces that changes of virials are held against
)
# Bounds of the change of virials over that of forces times the spacing of atoms. It is 0.03 to 3 in
# right data, 160 and 1,602 times as much from stresses in GPa and kbar, and a volume of 100
# angstrom^3 and more times less as a stress.
_SMALL_CHANGE, _LARGE_CHANGE = 5e-3, 10.0
_MIN_WORK = 1e-6  # eV, RMS; forces that are zero by symmetry do less
_MIN_FRAMES = 8  # in the pairs
_MIN_OPEN = 3  # frames of an open system, whose virials or torques are compared
_MIN_FORCE = 0.1  # eV/angstrom, the largest of a frame; those of relaxed molecules are noise
# antisymmetric part of sum_i r_i F_i^T over the symmetric one: rounding in right data, 1 by chance
_MAX_TORQUE = 0.3
_MAX_SHORTEST = (
    1.2  # of all, 0.64 in angstrom: where it is less, the others are atoms of dissociated molecules
)
_USUAL = (
    0.75,
    1.35,
)  # where lengths are verified: in bohr they are 1.43 to 2.2, beryllium in angstrom has 1.43
# factors by which lengths are wrong, and what they look like
_LENGTHS = {
    1 / BOHR: "bohr, or were converted from bohr although they were in angstrom",
    BOHR: "angstrom that were divided by 1.89 as if they were in bohr",
    0.1: "nm",
    100.0: "pm",
}
_RUN = 8  # consecutive frames
_MAX_FRAMES = 64  # of a system
_MAX_ATOMS = 6000  # of these frames together, if they are more than two runs
_SEARCHED = 8  # frames of a system in which nearest neighbors are searched
_MAX_SYSTEMS = 40


@dataclass
class UnitReport:
    """Units and signs, as identities and lengths show them.

    Attributes:
        faults: what is wrong in a system, by its name.
        bonds: distances that no bonds of their elements have, by the name of the system.
        num_systems: systems, or groups of small ones, that were looked at.
        num_all: systems and groups there are.
        verified: number of systems in which each quantity could be verified.
        unverified: names of those that have it and in which it could not.
    """

    faults: dict[str, list[str]] = field(default_factory=dict)
    bonds: dict[str, list[str]] = field(default_factory=dict)
    num_systems: int = 0
    num_all: int = 0
    verified: dict[str, int] = field(default_factory=dict)
    unverified: dict[str, list[str]] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        """Yield a warning for each system in which something is wrong."""
        expected = "Expected eV, eV/angstrom and angstrom, and virial = -volume * stress in eV."
        for name, texts in self.faults.items():
            yield warning(name, f": {'; '.join(texts)}. {expected}")
        for name, texts in self.bonds.items():
            yield warning(
                name,
                f": {'; '.join(texts)}. Expected types in the order of the positions, "
                "and elements (type_map.raw) in the order of the numbers of the types.",
            )

    def lines(self) -> list[str]:
        """Return lines with the quantities that could be verified and those that could not."""
        many = counted(self.num_systems, "system")
        if self.num_systems < self.num_all:
            many = f"{self.num_systems:,} evenly spaced systems of {self.num_all:,}"
        # a unit or sign that energies and forces have in common changes no identity
        verified = ", ".join(
            f"{what} {'(with each other) ' * ('and' in what)}in {n:,}"
            for what, n in self.verified.items()
        )
        names = {what: first_few(names, 3) for what, names in self.unverified.items() if names}
        return [
            f"verified: {verified} of {many}",
            *(f"not verified: {what} of {of}" for what, of in names.items()),
        ]


class Ratios(NamedTuple):
    """Ratios that are 1 where units and signs are right; None where no identity gives them.

    Attributes:
        force: energy differences over the work of the forces.
        virial: energy differences over the work of the virials.
        open_virial: virials over ``sum_i r_i F_i^T``, of open systems; NaN if they are no multiple
            of it.
        torque: the antisymmetric part of that sum over the symmetric one.
        change: that of virials over that of forces times the spacing of atoms, between frames in
            one cell; None within its bounds.
    """

    force: float | None = None
    virial: float | None = None
    open_virial: float | None = None
    torque: float | None = None
    change: float | None = None


def judge_units(scans: Sequence[SystemScan], type_map: Sequence[str]) -> UnitReport:
    """Return a report on units and signs, and the systems that have others than expected."""
    groups = list(_groups(scans))
    most = min(len(groups), _MAX_SYSTEMS)
    report = UnitReport(num_systems=most, num_all=len(groups))
    for k in even_places(len(groups), most):
        name, places = groups[k]
        frames = [scan.system.frame(index) for scan, index in places]
        frames = [_without_unknown_forces(f) if ATOM_PREF in f.labels else f for f in frames]
        sample = [frames[k] for k in even_places(len(frames), _SEARCHED)]
        length, texts, is_known = _judge_lengths(sample, type_map)
        bonds = [] if texts else misplaced_types(sample, type_map)
        if bonds:
            report.bonds[name] = bonds
            is_known = False
        ratios = ratios_of(frames)
        found, verified = _judge_ratios(ratios, frames, length)
        if ratios.force is None and not found and (place := misplaced_forces(frames)):
            found = [
                f"the forces are those of {place}: with these the energy changes by their work "
                "between near frames"
            ]
        if texts or found:
            report.faults[name] = texts + found
        verified |= {"lengths"} if is_known else set()
        labels = {label for frame in frames for label in frame.labels}
        had = {
            "lengths": True,
            "energies and forces": {ENERGY, FORCE} <= labels,
            "virials": VIRIAL in labels,
        }
        for what in (what for what, has in had.items() if has):
            report.verified[what] = report.verified.get(what, 0) + (what in verified)
            report.unverified.setdefault(what, []).extend([name] * (what not in verified))
    return report


def _without_unknown_forces(frame: Frame) -> Frame:
    """Return a frame without its forces if the loss does not compare those of some atoms, which may
    be unknown.
    """
    if frame.labels[ATOM_PREF].all():
        return frame
    labels = {name: label for name, label in frame.labels.items() if name != FORCE}
    return replace(frame, labels=labels)


def _groups(scans: Sequence[SystemScan]) -> Iterator[tuple[str, list[tuple[SystemScan, int]]]]:
    """Yield the name and some frames of each system, or of all small systems together, in runs of
    consecutive ones.
    """
    small: dict[bool, list[tuple[SystemScan, int]]] = {True: [], False: []}
    parts: dict[
        str, list[SystemScan]
    ] = {}  # frames of one file may be split between training and validation
    for scan in scans:
        parts.setdefault(scan.system.whole.name, []).append(scan)
    for name, own in parts.items():
        usable = [
            (scan, k)
            for scan in own
            for k in range(scan.system.num_frames)
            if k not in scan.bad_frames and k not in scan.outliers
        ]
        usable.sort(key=lambda place: int(place[0].system.numbers[place[1]]))
        if len(usable) < _MIN_FRAMES:
            small[own[0].open_frames == 0] += usable
            continue
        atoms = max(int(scan.type_counts.sum(axis=1).max(initial=1)) for scan in own)
        runs = max(min(_MAX_FRAMES, _MAX_ATOMS // atoms) // _RUN, 2)
        starts = even_places(len(usable) - _RUN + 1, runs)
        yield name, [usable[k] for k in np.unique(np.add.outer(starts, np.arange(_RUN))).tolist()]
    for places in filter(None, small.values()):
        others = len({scan.system.whole.name for scan, _ in places}) - 1
        more = f" and {counted(others, 'more system')} of few frames" if others else ""
        yield f"{places[0][0].system.whole.name}{more}", places[:_MAX_FRAMES]


def _judge_lengths(
    frames: Sequence[Frame], type_map: Sequence[str]
) -> tuple[float, list[str], bool]:
    """Return an angstrom in the unit of the frames, texts about it, and whether lengths are within
    their bounds.
    """
    found = nearest_bonds(frames, type_map)
    if not found:
        far = f"lengths are too large: no atom has a neighbor within {REACH} sums of covalent radii"
        radii, searched = (
            bond_radii(type_map),
            (f for f in frames if 2 < f.num_atoms <= MAX_SEARCHED),
        )
        return (
            1.0,
            [far] * any(np.isfinite(radii[frame.atom_type]).any() for frame in searched),
            False,
        )
    shortest, ratio, ninth = (found[int(share * (len(found) - 1))][0] for share in (0, 0.5, 0.9))
    if ratio == 0:  # an error of its own; no unit makes a distance of it
        return 1.0, [], False
    if SHORT <= ratio <= LONG:
        return 1.0, [], _USUAL[0] < ratio < _USUAL[1]
    if ninth > SHORT and shortest < _MAX_SHORTEST:
        return 1.0, [], False
    factor = min(_LENGTHS, key=lambda factor: abs(math.log(ratio / factor)))
    is_near = abs(math.log(ratio / factor)) < math.log(1.4)
    looks = f"lengths look like {_LENGTHS[factor]}" if is_near else "lengths have another unit"
    middles = sorted(
        (own[len(own) // 2] for own in bonds_by_elements(found).values()), key=lambda one: one[0]
    )
    pairs = [
        f"{of:.2g} ({distance:.3g} apart: atoms {frame.describe_atom(i, type_map)} and "
        f"{frame.describe_atom(j, type_map)} in {frame.source[0]} frame {frame.source[1]})"
        for of, distance, i, j, frame in middles
        if not SHORT <= of <= LONG
    ]
    text = (
        f"{looks}: half of the atoms have their nearest neighbor within {ratio:.2g} sums of "
        f"covalent radii, expected {SHORT} to {LONG}; by pair of elements {first_few(pairs, 3)}"
    )
    return factor if is_near else 1.0, [text], False


def _judge_ratios(
    ratios: Ratios, frames: Sequence[Frame], length: float
) -> tuple[list[str], set[str]]:
    """Return texts about wrong units and signs, and the quantities that are verified; ``length`` is
    an angstrom.
    """
    by_force = ratios.force and ratios.force * length
    by_virial = ratios.virial
    between = ratios.open_virial and ratios.open_virial / length
    if ratios.torque is not None and ratios.torque > _MAX_TORQUE:
        why = f"their torque is {ratios.torque:.2g} of the sum of positions and forces, expected 0"
        return [f"the forces belong to other atoms or frames, or act from outside: {why}"], set()
    if between is not None and math.isnan(between):
        why = "they are no multiple of the sum of positions and forces, which an open system has"
        return [f"the virials are placeholders, or another quantity: {why}"], set()
    evidence = [
        f"between near frames the energy changes by {ratio:.3g} times the work of the {what}"
        for ratio, what in (
            (by_force, "forces"),
            (by_virial if between is None else None, "virials"),
        )
        if ratio is not None
    ]
    if between is not None:
        evidence.append(f"the virials are {between:.3g} times the sum of positions and forces")
    boxes = [abs(float(np.linalg.det(frame.box))) for frame in frames if frame.box is not None]
    virials = _VIRIALS | (
        {f"a stress in {u}": n / np.mean(boxes) for u, n in _STRESSES.items()} if boxes else {}
    )
    by_force, by_virial, between = (  # what is one, but for its sign, is exactly one
        ratio and (math.copysign(1.0, ratio) if _is_one(abs(ratio)) else ratio)
        for ratio in (by_force, by_virial, between)
    )
    if by_force and between:
        by_virial = by_force / between
    elif by_force and by_virial:
        between = by_force / by_virial
    if {by_force, by_virial, between} - {None, 1.0}:
        return [
            f"{_explain((by_force, by_virial, between), virials)}: {', '.join(evidence)}"
        ], set()
    verified = {"energies and forces"} if by_force else set()
    if by_virial or between:
        return [], verified | {"virials"}
    if ratios.change is None or length != 1.0:
        return [], verified
    looks = "volume * stress in kbar or GPa" if ratios.change > 1 else "a stress"
    why = (
        f"{ratios.change:.3g} times the change of the forces times the spacing of atoms, expected "
        "0.03 to 3"
    )
    return [
        f"the virials look like {looks}: between frames in one cell they change by {why}"
    ], verified


def _is_one(ratio: float | None) -> bool:
    return ratio is not None and 1 / _SAME < ratio < _SAME


def _explain(ratios: Sequence[float | None], virials: Mapping[str, float]) -> str:
    """Return at most two explanations of wrong ratios, whose exponents are ``_EXPONENTS``, as
    text.
    """
    units = {"energies": ENERGY_UNITS, "forces": _FORCES, "virials": virials}
    options = {"the forces have the wrong sign (gradients instead of forces)": {"forces": -1.0}}
    options |= {f"the {what} have the wrong sign": {what: -1.0} for what in ("energies", "virials")}
    for what, of in units.items():
        options |= {f"the {what} look like {name}": {what: number} for name, number in of.items()}
        options |= {
            f"the {what} look like {name} with the wrong sign": {what: -number}
            for name, number in of.items()
        }
    options |= {
        f"the lengths look like {name}": {"lengths": factor} for factor, name in _LENGTHS.items()
    }
    for (a, x), (b, y) in product(ENERGY_UNITS.items(), _FORCES.items()):
        if b.startswith(a):
            options[f"the energies and forces look like {a} and {b}"] = {"energies": x, "forces": y}
    if None not in ratios:
        options |= {
            f"the energies and virials look like {a}": dict.fromkeys(("energies", "virials"), x)
            for a, x in ENERGY_UNITS.items()
        }
    off = dict[str, float]()
    for text, numbers in options.items():
        expected = [
            math.prod(n ** _EXPONENTS[what][k] for what, n in numbers.items()) for k in range(3)
        ]
        parts = [ratio / of for ratio, of in zip(ratios, expected) if ratio is not None]
        off[text] = max(abs(math.log(part)) for part in parts) if min(parts) > 0 else math.inf
    near = sorted(
        (text for text in off if off[text] < math.log(_SAME_UNIT)), key=lambda text: off[text]
    )[:2]
    if near:
        return " or ".join(near)
    wrong = {k: ratio for k, ratio in enumerate(ratios) if ratio not in (None, 1.0)}
    # one quantity may not fit the two others, which fit each other
    names = [what for what in units if len(wrong) == 3 or all(_EXPONENTS[what][k] for k in wrong)]
    if len(names) > 1:
        return f"{' and '.join(names)} do not fit together"
    k, ratio = next(iter(wrong.items()))
    return f"the {names[0]} are {ratio ** _EXPONENTS[names[0]][k]:.3g} times the expected"


def ratios_of(frames: Sequence[Frame]) -> Ratios:
    """Return the ratios that identities give, from frames that are all open, or all periodic."""
    labelled = [
        frame
        for frame in frames
        if FORCE in frame.labels and np.isfinite(frame.labels[FORCE]).all()
    ]
    force, virial, change = _works(labelled)
    opened = [
        frame
        for frame in labelled
        if frame.box is None and np.abs(frame.labels[FORCE]).max() > _MIN_FORCE
    ]
    sums = [
        (f, (f.coord - f.coord.mean(axis=0)).T @ f.labels[FORCE].reshape(-1, 3)) for f in opened
    ]
    if len(sums) < _MIN_OPEN:
        return Ratios(force, virial, change=change)
    sizes = np.array([[np.linalg.norm(m - m.T), np.linalg.norm(m + m.T)] for _, m in sums])
    torque = float(np.median(sizes[:, 0] / np.maximum(sizes[:, 1], 1e-12)))
    both = [(np.reshape(f.labels[VIRIAL], -1), m.ravel()) for f, m in sums if VIRIAL in f.labels]
    between = None
    if len(both) >= _MIN_OPEN and torque <= _MAX_TORQUE:
        given, expected = (np.concatenate(part) for part in zip(*both))
        if np.isfinite(given).all() and expected.any():  # atoms in one place have no sum
            between = float(given @ expected / (expected @ expected))
            if between**2 * (expected @ expected) <= _EXPLAINED * (given @ given):
                between = math.nan
    return Ratios(force, virial, between, torque)


def misplaced_forces(frames: Sequence[Frame]) -> str:
    """Return the frames or atoms whose forces are at others, as near frames show; empty if there
    are none.
    """
    labelled = {frame.source: frame for frame in frames if FORCE in frame.labels}
    pairs = _pairs_of(list(labelled.values()))
    shares = [
        _partial(*pairs[(pairs[:, 5] < step) & np.isfinite(pairs[:, 4])][:, 2:5].T)[1]
        for step, _ in _LEVELS
    ]
    if max(shares) > _HALF:  # a smooth scan has about the forces of the frame before, too
        return ""
    for text, step in (
        ("the frame before", 1),
        ("the frame after", -1),
        ("atoms in the order of their types", 0),
    ):
        moved = list[Frame]()
        for (name, number), frame in labelled.items():
            other, order = labelled.get((name, number + step)), np.arange(frame.num_atoms)
            if not step:  # the atoms were sorted by their types, and the forces were not
                order = np.argsort(frame.atom_type, kind="stable")
            if (
                other is not None
                and other.num_atoms == frame.num_atoms
                and (step or (np.diff(order) < 0).any())
            ):
                force = np.empty_like(other.labels[FORCE].reshape(-1, 3))
                force[order] = other.labels[FORCE].reshape(-1, 3)
                moved.append(replace(frame, labels={**frame.labels, FORCE: force}))
        if _is_one(_works(moved)[0]):
            return text
    return ""


def _works(frames: Sequence[Frame]) -> tuple[float | None, float | None, float | None]:
    """Return the energy differences over the works of forces and of virials, and the change of
    virials, of frames.
    """
    force = virial = None
    pairs = _pairs_of(frames)
    for max_step, max_strain in _LEVELS if len(pairs) else ():
        near = pairs[
            (pairs[:, 5] < max_step)
            & (pairs[:, 6] < max_strain)
            & np.isfinite(pairs[:, 2:5]).all(axis=1)
        ]
        force = _slope(near, 3, 4) if force is None else force
        virial = _slope(near, 4, 3) if virial is None else virial
    changes = pairs[(pairs[:, 6] < _MAX_STRAIN) & np.isfinite(pairs[:, 7])][:, 7:]
    least, most = np.median(changes, axis=0) if len(changes) >= _MIN_OPEN else (1.0, 1.0)
    return (
        force,
        virial,
        float(most)
        if most > _LARGE_CHANGE
        else float(least)
        if 0 < least < _SMALL_CHANGE
        else None,
    )


def _slope(pairs: Array, column: int, other: int) -> float | None:
    """Return by what a work of ``pairs`` is multiplied in the energy differences; None if no line
    explains them.

    It must do so in all pairs and in those of each half of the frames.
    """
    numbers = np.unique(pairs[:, :2])
    if len(numbers) < _MIN_FRAMES:
        return None
    middle = numbers[len(numbers) // 2]
    parts = (
        pairs,
        pairs[(pairs[:, :2] < middle).all(axis=1)],
        pairs[(pairs[:, :2] >= middle).all(axis=1)],
    )
    (slope, explained), *halves = (
        _partial(part[:, 2], part[:, column], part[:, other]) for part in parts
    )
    agree = (
        all(_is_one(of_half / slope) and by > _EXPLAINED_BY_HALF for of_half, by in halves)
        if slope
        else False
    )
    return slope if agree and explained > _EXPLAINED else None


def _partial(rise: Array, one: Array, other: Array) -> tuple[float, float]:
    """Return the slope of ``rise`` over ``one``, and the share that it explains, after what
    ``other`` explains.
    """
    scale = float(other @ other)
    if scale > 0:
        rise, one = (values - other * float(values @ other) / scale for values in (rise, one))
    size = float(one @ one) * float(rise @ rise)
    if float(one @ one) < _MIN_WORK**2 * len(one) or size <= 0:
        return 0.0, 0.0
    common = float(one @ rise)
    return common / float(one @ one), common**2 / size


def _pairs_of(frames: Sequence[Frame]) -> Array:
    """Return the rows of :func:`_pairs` of all frames with the same atoms in the same order."""
    groups: dict[tuple[bytes, bool], list[Frame]] = {}
    for frame in frames:
        if ENERGY in frame.labels and np.isfinite(frame.labels[ENERGY]):
            groups.setdefault((frame.atom_type.tobytes(), frame.box is None), []).append(frame)
    several = [group for group in groups.values() if len(group) > 1]
    shift = np.cumsum([0, *map(len, several)])
    rows = [
        _pairs(group) + np.array([k, k, 0, 0, 0, 0, 0, 0, 0]) for group, k in zip(several, shift)
    ]
    return np.concatenate([np.zeros((0, 9)), *rows])


def _pairs(frames: Sequence[Frame]) -> Array:
    """Return (pairs, 9): two frames, energy difference, work of forces and virials, displacement,
    strain; eV, angstrom.

    Then the change of the virial, and of its traceless part, which has no pressure of hot
    electrons, over that of the forces times the spacing of atoms. Numbers that are not known are
    NaN.
    """
    coord = np.stack([frame.coord for frame in frames])
    force = np.stack([frame.labels[FORCE].reshape(-1, 3) for frame in frames])
    energy = np.array([float(frame.labels[ENERGY]) for frame in frames])
    virial = np.stack(
        [np.reshape(frame.labels.get(VIRIAL, np.full(9, np.nan)), (3, 3)) for frame in frames]
    )
    box = (
        np.stack([frame.box for frame in frames if frame.box is not None])
        if frames[0].box is not None
        else None
    )
    rows = []
    for k in range(len(frames) - 1):
        if box is None:
            start, ends = (
                coord[k] - coord[k].mean(axis=0),
                coord[k + 1 :] - coord[k + 1 :].mean(axis=1, keepdims=True),
            )
            left, _, right = np.linalg.svd(ends.transpose(0, 2, 1) @ start)  # Kabsch 1976
            left[:, :, 2] *= np.linalg.det(left @ right)[:, None]  # a rotation, no reflection
            turn = left @ right
            step, strain = ends @ turn - start, np.zeros_like(turn)
        else:
            # A turned or mirrored frame has the same energy. What is left of the change of its cell
            # is symmetric and positive definite, so that the mean cell is not singular.
            left, _, right = np.linalg.svd(np.linalg.solve(box[k], box[k + 1 :]))
            turn = (left @ right).transpose(0, 2, 1)  # of the polar decomposition
            other = box[k + 1 :] @ turn
            middle = 0.5 * (box[k] + other)
            step = coord[k + 1 :] @ np.linalg.inv(box[k + 1 :]) - coord[k] @ np.linalg.inv(box[k])
            step -= np.round(step)
            step -= np.round(
                step - step[:, :1]
            )  # a shift of all atoms by half a cell rounds either way
            step -= step.mean(axis=1, keepdims=True)
            step, strain = step @ middle, np.linalg.solve(middle, other - box[k])
        by_force = -0.5 * ((force[k] + force[k + 1 :] @ turn) * step).sum(axis=(1, 2))
        size = np.linalg.norm(strain, axis=(1, 2))
        turned = turn.transpose(0, 2, 1) @ virial[k + 1 :] @ turn
        by_strain = -0.5 * ((virial[k] + turned) * strain).sum(axis=(1, 2))
        by_strain[size < _MIN_STRAIN] = 0.0
        # Both are sums over neighbors; those of the forces of relaxed frames are noise.
        change, pull = (
            turned - virial[k],
            np.linalg.norm(force[k + 1 :] @ turn - force[k], axis=(1, 2)),
        )
        pull[pull < _MIN_CHANGE * math.sqrt(force[k].size)] = np.nan
        traceless = change - np.trace(change, axis1=1, axis2=2)[:, None, None] / 3 * np.eye(3)
        spacing = np.nan if box is None else abs(np.linalg.det(box[k]) / len(force[k])) ** (1 / 3)
        changes = [np.linalg.norm(of, axis=(1, 2)) / (pull * spacing) for of in (change, traceless)]
        rise = energy[k + 1 :] - energy[k]
        first, second = np.full(len(rise), k), np.arange(k + 1, len(frames))
        longest = np.linalg.norm(step, axis=2).max(axis=1)
        rows.append(
            np.stack([first, second, rise, by_force, by_strain, longest, size, *changes], axis=1)
        )
    return np.concatenate(rows)
