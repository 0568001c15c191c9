"""Units and signs, by identities between energies, forces and virials, and by bounds of lengths.

Along a path on which atoms move by u and the cell by a strain e the energy changes by -F u - W e,
with the means F and W of forces and virials at both ends (trapezoidal rule, which is exact in a
harmonic potential). The virial of an open system is ``sum_i r_i F_i^T``, which has no antisymmetric
part. A unit that energies, forces and virials have in common changes no identity and is not
verified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
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
from deepmd_ema.findings import Finding, warning
from deepmd_ema.geometry import Array, traceless
from deepmd_ema.text import counted, first_few
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
FORCE_UNITS = {
    "Hartree/bohr": BOHR / HARTREE,
    "Rydberg/bohr": 2 * BOHR / HARTREE,
    "Hartree/angstrom": 1 / HARTREE,
    "kcal/mol/angstrom": _KCAL,
    "kJ/mol/angstrom": _KJ,
    "kJ/mol/nm": 10 * _KJ,
    "meV/angstrom": 1e3,
}
_VIRIALS = {**ENERGY_UNITS, "GPa * angstrom^3": GPA, "kbar * angstrom^3": 10 * GPA}
_STRESSES = {"eV/angstrom^3": 1.0, "GPa": GPA, "kbar": 10 * GPA}
# exponents of the factors of quantities in three ratios: energy differences over the work of
# forces, energy differences over the work of virials, and virials over sum_i r_i F_i^T
_EXPONENTS = {
    "energies": (1, 1, 0),
    "forces": (-1, 0, -1),
    "virials": (0, -1, 1),
    "lengths": (-1, 0, -1),
}
# ratio of equal quantities: 0.83 to 1.2 in right data, where a line explains the share _EXPLAINED
_SAME = 1.5
_SAME_UNIT = 1.2  # ratio to that of a unit that is named: kcal/mol is 1.18 / hartree
_EXPLAINED = (
    0.95  # least share of the squares of the energy differences that a line explains
)
_HALF = 0.5  # forces that belong to their frames explain a larger share than this
# least share in each half of the frames, whose ratios differ by at most _SAME
_EXPLAINED_BY_HALF = 0.9
# largest displacement of an atom (angstrom) and strain of two frames; nearer ones are compared
# first
_LEVELS = ((0.3, 0.03), (0.6, 0.06), (1.0, 0.1))
_MIN_STRAIN = 1e-6  # a smaller strain is rounding
_MAX_STRAIN = 1e-3  # frames in one cell have a smaller strain
# eV/angstrom, RMS of the changes of forces with which changes of virials are compared
_MIN_CHANGE = 0.2
# Bounds of the change of virials over that of forces times the spacing of atoms. It is 0.03 to 3 in
# right data, 160 and 1,602 times as much from stresses in GPa and kbar, and a volume of 100
# angstrom^3 and more times less as a stress.
_SMALL_CHANGE, _LARGE_CHANGE = 5e-3, 10.0
_MIN_WORK = 1e-6  # eV, RMS; forces that are zero by symmetry do less
_MIN_FRAMES = 8  # frames in the pairs
_MIN_OPEN = 3  # frames of an open system, whose virials or torques are compared
_MIN_FORCE = (
    0.1  # eV/angstrom, the largest of a frame; those of relaxed molecules are noise
)
# antisymmetric part of sum_i r_i F_i^T over the symmetric one: rounding in right data, 1 by chance
_MAX_TORQUE = 0.3
# The shortest bonds have a ratio of 0.64 in angstrom and of 1.2 in bohr. Where the nearest pair has
# less than this, lengths are right, and atoms without near neighbors are of dissociated molecules.
_MAX_SHORTEST = 1.2
# bounds within which lengths are verified: ratios in bohr are 1.43 to 2.2, beryllium in angstrom
# has 1.43
_USUAL = (0.75, 1.35)
# factors by which lengths are wrong, and what they look like
_LENGTHS = {
    1 / BOHR: "bohr, or were converted from bohr although they were in angstrom",
    BOHR: "angstrom that were divided by 1.89 as if they were in bohr",
    0.1: "nm",
    100.0: "pm",
}
_RUN = 8  # consecutive frames
_MAX_FRAMES = 64  # frames of a system
_MAX_ATOMS = 6000  # atoms of these frames together, if they are more than two runs
_SEARCHED = 8  # frames of a system in which nearest neighbors are searched
_MAX_SYSTEMS = 40
# columns of the array of pairs of frames, see _pairs
_RISE = 2
_FORCE_WORK = 3
_VIRIAL_WORK = 4
_STEP = 5
_STRAIN = 6
_CHANGE = 7


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
        remarks = {"energies and forces": "(with each other) "}
        verified = ", ".join(
            f"{what} {remarks.get(what, '')}in {n:,}"
            for what, n in self.verified.items()
        )
        return [
            f"verified: {verified} of {many}",
            *(
                f"not verified: {what} of {first_few(names, 3)}"
                for what, names in self.unverified.items()
                if names
            ),
        ]


class Ratios(NamedTuple):
    """Ratios that are 1 where units and signs are right; None where no identity gives them.

    Attributes:
        force: energy differences over the work of the forces.
        virial: energy differences over the work of the virials.
        open_virial: virials over ``sum_i r_i F_i^T``, of open systems; NaN if they are no multiple
            of it.
        torque: the antisymmetric part of that sum over the symmetric one.
        change: change of virials over that of forces times the spacing of atoms, between frames in
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
        frames = [
            _without_unknown_forces(f) if ATOM_PREF in f.labels else f for f in frames
        ]
        sample = [frames[k] for k in even_places(len(frames), _SEARCHED)]
        lengths = _judge_lengths(sample, type_map)
        # distances in a wrong unit are no bonds of any elements
        bonds = [] if lengths.texts else misplaced_types(frames, type_map)
        if bonds:
            report.bonds[name] = bonds
        ratios = ratios_of(frames)
        texts, verified = _judge_ratios(ratios, frames, lengths.angstrom)
        if ratios.force is None and not texts and (place := misplaced_forces(frames)):
            texts = [
                f"the forces are those of {place}: with these the energy changes by their work "
                "between near frames"
            ]
        if lengths.texts or texts:
            report.faults[name] = [*lengths.texts, *texts]
        if lengths.is_usual and not bonds:
            verified.add("lengths")
        labels = {label for frame in frames for label in frame.labels}
        had = {
            "lengths": True,
            "energies and forces": {ENERGY, FORCE} <= labels,
            "virials": VIRIAL in labels,
        }
        for what, has in had.items():
            if not has:
                continue
            report.verified[what] = report.verified.get(what, 0) + (what in verified)
            unverified = report.unverified.setdefault(what, [])
            if what not in verified:
                unverified.append(name)
    return report


def _without_unknown_forces(frame: Frame) -> Frame:
    """Return a frame without its forces if some of them have no weight, as they may be unknown."""
    if frame.labels[ATOM_PREF].all():
        return frame
    labels = {name: label for name, label in frame.labels.items() if name != FORCE}
    return replace(frame, labels=labels)


def _groups(
    scans: Sequence[SystemScan],
) -> Iterator[tuple[str, list[tuple[SystemScan, int]]]]:
    """Yield the name and some frames of each system, or of all small systems together.

    Frames are taken in runs of consecutive frames, which are near each other.
    """
    # small systems by whether they are periodic
    small: dict[bool, list[tuple[SystemScan, int]]] = {True: [], False: []}
    # frames of one file may be split between training and validation
    parts: dict[str, list[SystemScan]] = {}
    for scan in scans:
        parts.setdefault(scan.system.whole.name, []).append(scan)
    for name, part_scans in parts.items():
        # an outlier would hide a wrong unit of all other frames
        usable = [
            (scan, k)
            for scan in part_scans
            for k in range(scan.system.num_frames)
            if k not in scan.bad_frames and k not in scan.outliers
        ]
        usable.sort(key=lambda place: int(place[0].system.numbers[place[1]]))
        if len(usable) < _MIN_FRAMES:
            small[part_scans[0].open_frames == 0] += usable
            continue
        atoms = max(
            int(scan.type_counts.sum(axis=1).max(initial=1)) for scan in part_scans
        )
        runs = max(min(_MAX_FRAMES, _MAX_ATOMS // atoms) // _RUN, 2)
        starts = even_places(len(usable) - _RUN + 1, runs)
        yield (
            name,
            [
                usable[k]
                for k in np.unique(np.add.outer(starts, np.arange(_RUN))).tolist()
            ],
        )
    for places in filter(None, small.values()):
        num_more = len({scan.system.whole.name for scan, _ in places}) - 1
        more = (
            f" and {counted(num_more, 'more system')} of few frames" if num_more else ""
        )
        yield f"{places[0][0].system.whole.name}{more}", places[:_MAX_FRAMES]


class _Lengths(NamedTuple):
    """Judgement of the unit of lengths.

    Attributes:
        angstrom: in the unit of the frames; 1 where the unit is right or not known.
        texts: faults; empty without any.
        is_usual: whether distances are within the bounds of right data.
    """

    angstrom: float = 1.0
    texts: Sequence[str] = ()
    is_usual: bool = False


def _judge_lengths(frames: Sequence[Frame], type_map: Sequence[str]) -> _Lengths:
    """Return a judgement of the unit of lengths by the distances of nearest neighbors."""
    bonds = nearest_bonds(frames, type_map)
    if not bonds:
        far = f"lengths are too large: no atom has a neighbor within {REACH} sums of covalent radii"
        radii = bond_radii(type_map)
        searched = (f for f in frames if 2 < f.num_atoms <= MAX_SEARCHED)
        can_bond = any(np.isfinite(radii[frame.atom_type]).any() for frame in searched)
        return _Lengths(texts=[far] if can_bond else [])
    shortest = bonds[0].ratio
    ratio = bonds[int(0.5 * (len(bonds) - 1))].ratio
    ninth = bonds[int(0.9 * (len(bonds) - 1))].ratio
    if ratio == 0:  # an error of its own; no unit makes a distance of it
        return _Lengths()
    if SHORT <= ratio <= LONG:
        return _Lengths(is_usual=_USUAL[0] < ratio < _USUAL[1])
    if ninth > SHORT and shortest < _MAX_SHORTEST:
        return _Lengths()
    factor = min(_LENGTHS, key=lambda factor: abs(math.log(ratio / factor)))
    is_near = abs(math.log(ratio / factor)) < math.log(1.4)
    looks = (
        f"lengths look like {_LENGTHS[factor]}"
        if is_near
        else "lengths have another unit"
    )
    groups = bonds_by_elements(bonds).values()
    middles = sorted(
        (group[len(group) // 2] for group in groups), key=attrgetter("ratio")
    )
    pairs = [
        f"{bond.ratio:.2g} ({bond.distance:.3g} apart: {bond.describe(type_map)})"
        for bond in middles
        if not SHORT <= bond.ratio <= LONG
    ]
    text = (
        f"{looks}: half of the atoms have their nearest neighbor within {ratio:.2g} sums of "
        f"covalent radii, expected {SHORT} to {LONG}; by pair of elements {first_few(pairs, 3)}"
    )
    return _Lengths(factor if is_near else 1.0, [text])


def _judge_ratios(
    ratios: Ratios, frames: Sequence[Frame], length: float
) -> tuple[list[str], set[str]]:
    """Return texts about wrong units and signs, and the quantities that are verified.

    Args:
        ratios: of :func:`ratios_of`.
        frames: of the system.
        length: an angstrom in the unit of the frames, whose error is reported already.
    """
    by_force = ratios.force and ratios.force * length
    by_virial = ratios.virial
    between = ratios.open_virial and ratios.open_virial / length
    if ratios.torque is not None and ratios.torque > _MAX_TORQUE:
        why = f"their torque is {ratios.torque:.2g} of the sum of positions and forces, expected 0"
        return [
            f"the forces belong to other atoms or frames, or act from outside: {why}"
        ], set()
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
        evidence.append(
            f"the virials are {between:.3g} times the sum of positions and forces"
        )
    boxes = [
        abs(float(np.linalg.det(frame.box)))
        for frame in frames
        if frame.box is not None
    ]
    virials = _VIRIALS | (
        {f"a stress in {u}": n / np.mean(boxes) for u, n in _STRESSES.items()}
        if boxes
        else {}
    )
    by_force = _rounded(by_force)
    by_virial = _rounded(by_virial)
    between = _rounded(between)
    # two of the ratios determine the third
    if by_force and between:
        by_virial = by_force / between
    elif by_force and by_virial:
        between = by_force / by_virial
    if {by_force, by_virial, between} - {None, 1.0}:
        explanation = _explain((by_force, by_virial, between), virials)
        return [f"{explanation}: {', '.join(evidence)}"], set()
    verified = {"energies and forces"} if by_force else set()
    if by_virial or between:
        return [], verified | {"virials"}
    # virials without work or sum of positions and forces: only their size can be judged
    if ratios.change is None or length != 1.0:
        return [], verified
    looks = "volume * stress in kbar or GPa" if ratios.change > 1 else "a stress"
    why = (
        f"{ratios.change:.3g} times the change of the forces times the spacing of atoms, expected "
        "0.03 to 3"
    )
    text = f"the virials look like {looks}: between frames in one cell they change by {why}"
    return [text], verified


def _rounded(ratio: float | None) -> float | None:
    """Return a ratio, and exactly 1 or -1 where it is near one of these."""
    return ratio and (math.copysign(1.0, ratio) if _is_one(abs(ratio)) else ratio)


def _is_one(ratio: float | None) -> bool:
    return ratio is not None and 1 / _SAME < ratio < _SAME


def _explain(ratios: Sequence[float | None], virials: Mapping[str, float]) -> str:
    """Return at most two explanations of wrong ratios as text.

    Args:
        ratios: whose exponents are ``_EXPONENTS``; None where one is not known.
        virials: units of virials, and the number that 1 eV is in each.
    """
    # factors of the quantities that are in another unit, by the text of the explanation
    units = {"energies": ENERGY_UNITS, "forces": FORCE_UNITS, "virials": virials}
    options = {
        "the forces have the wrong sign (gradients instead of forces)": {"forces": -1.0}
    }
    options |= {
        f"the {what} have the wrong sign": {what: -1.0}
        for what in ("energies", "virials")
    }
    for what, table in units.items():
        for sign, end in ((1, ""), (-1, " with the wrong sign")):
            options |= {
                f"the {what} look like {name}{end}": {what: sign * number}
                for name, number in table.items()
            }
    options |= {
        f"the lengths look like {name}": {"lengths": factor}
        for factor, name in _LENGTHS.items()
    }
    for (a, x), (b, y) in product(ENERGY_UNITS.items(), FORCE_UNITS.items()):
        if b.startswith(a):
            options[f"the energies and forces look like {a} and {b}"] = {
                "energies": x,
                "forces": y,
            }
    if None not in ratios:
        options |= {
            f"the energies and virials look like {a}": dict.fromkeys(
                ("energies", "virials"), x
            )
            for a, x in ENERGY_UNITS.items()
        }
    # explanations by the largest of the logarithms by which their ratios differ
    off = dict[str, float]()
    for text, numbers in options.items():
        expected = [
            math.prod(n ** _EXPONENTS[what][k] for what, n in numbers.items())
            for k in range(3)
        ]
        parts = [
            ratio / number
            for ratio, number in zip(ratios, expected)
            if ratio is not None
        ]
        off[text] = (
            max(abs(math.log(part)) for part in parts) if min(parts) > 0 else math.inf
        )
    near = sorted(
        (text for text in off if off[text] < math.log(_SAME_UNIT)),
        key=lambda text: off[text],
    )[:2]
    if near:
        return " or ".join(near)
    wrong = {k: ratio for k, ratio in enumerate(ratios) if ratio not in (None, 1.0)}
    # one quantity may not fit the two others, which fit each other
    names = [
        what
        for what in units
        if len(wrong) == 3 or all(_EXPONENTS[what][k] for k in wrong)
    ]
    if len(names) > 1:
        return f"{' and '.join(names)} do not fit together"
    k, ratio = next(iter(wrong.items()))
    return (
        f"the {names[0]} are {ratio ** _EXPONENTS[names[0]][k]:.3g} times the expected"
    )


def ratios_of(frames: Sequence[Frame]) -> Ratios:
    """Return the ratios that identities give, from frames that are all open, or all periodic."""
    labelled = [
        frame
        for frame in frames
        if FORCE in frame.labels and np.isfinite(frame.labels[FORCE]).all()
    ]
    ratios = _works(labelled)
    opened = [
        frame
        for frame in labelled
        if frame.box is None and np.abs(frame.labels[FORCE]).max() > _MIN_FORCE
    ]
    # sum_i r_i F_i^T, (3, 3), from the center of the atoms: forces may have a small sum
    sums = [
        (f, (f.coord - f.coord.mean(axis=0)).T @ f.labels[FORCE].reshape(-1, 3))
        for f in opened
    ]
    if len(sums) < _MIN_OPEN:
        return ratios
    sizes = np.array(
        [[np.linalg.norm(m - m.T), np.linalg.norm(m + m.T)] for _, m in sums]
    )
    torque = float(np.median(sizes[:, 0] / np.maximum(sizes[:, 1], 1e-12)))
    both = [
        (np.reshape(f.labels[VIRIAL], -1), m.ravel())
        for f, m in sums
        if VIRIAL in f.labels
    ]
    between = None
    if len(both) >= _MIN_OPEN and torque <= _MAX_TORQUE:
        virials, expected = (np.concatenate(part) for part in zip(*both))
        if (
            np.isfinite(virials).all() and expected.any()
        ):  # atoms in one place have no sum
            # least squares; the share of the virials that the line explains must be large
            between = float(virials @ expected / (expected @ expected))
            if between**2 * (expected @ expected) <= _EXPLAINED * (virials @ virials):
                between = math.nan
    return Ratios(ratios.force, ratios.virial, between, torque)


def misplaced_forces(frames: Sequence[Frame]) -> str:
    """Return the frames or atoms that forces belong to, if not to their own; empty if they do."""
    labelled = {frame.source: frame for frame in frames if FORCE in frame.labels}
    pairs = _pairs_of(list(labelled.values()))
    shares = list[float]()
    for max_step, _ in _LEVELS:
        near = pairs[(pairs[:, _STEP] < max_step) & np.isfinite(pairs[:, _VIRIAL_WORK])]
        shares.append(_partial(near, _FORCE_WORK, _VIRIAL_WORK)[1])
    # a smooth scan has about the forces of the frame before, too; and frames without near ones have
    # no work, of whatever forces
    if max(shares) > _HALF or len(np.unique(near[:, :2])) < _MIN_FRAMES:
        return ""
    for text, step in (
        ("the frame before", 1),
        ("the frame after", -1),
        ("atoms in the order of their types", 0),
    ):
        moved = list[Frame]()
        for (name, number), frame in labelled.items():
            other = labelled.get((name, number + step))
            order = np.arange(frame.num_atoms)
            if (
                not step
            ):  # the atoms were sorted by their types, and the forces were not
                order = np.argsort(frame.atom_type, kind="stable")
            if (
                other is not None
                and other.num_atoms == frame.num_atoms
                and (step or (np.diff(order) < 0).any())
            ):
                force = np.empty_like(other.labels[FORCE].reshape(-1, 3))
                force[order] = other.labels[FORCE].reshape(-1, 3)
                moved.append(replace(frame, labels={**frame.labels, FORCE: force}))
        if _is_one(_works(moved).force):
            return text
    return ""


def _works(frames: Sequence[Frame]) -> Ratios:
    """Return the ratios of energy differences over works, and of changes, between near frames."""
    force = virial = None
    pairs = _pairs_of(frames)
    for max_step, max_strain in _LEVELS:
        near = pairs[
            (pairs[:, _STEP] < max_step)
            & (pairs[:, _STRAIN] < max_strain)
            & np.isfinite(pairs[:, _RISE : _VIRIAL_WORK + 1]).all(axis=1)
        ]
        force = _slope(near, _FORCE_WORK, _VIRIAL_WORK) if force is None else force
        virial = _slope(near, _VIRIAL_WORK, _FORCE_WORK) if virial is None else virial
    changes = pairs[(pairs[:, _STRAIN] < _MAX_STRAIN) & np.isfinite(pairs[:, _CHANGE])][
        :, _CHANGE:
    ]
    # Changes that are too large are judged without the pressure, which hot electrons change in
    # right data, and changes that are too small with it.
    change = None
    if len(changes) >= _MIN_OPEN:
        whole, without_trace = np.median(changes, axis=0).tolist()
        if without_trace > _LARGE_CHANGE:
            change = without_trace
        elif 0 < whole < _SMALL_CHANGE:
            change = whole
    return Ratios(force, virial, change=change)


def _slope(pairs: Array, column: int, other: int) -> float | None:
    """Return the energy differences over a work, after another work; None if no line explains them.

    The line must explain them in all pairs, and in the pairs of each half of the frames.

    Args:
        pairs: rows of :func:`_pairs`.
        column: of the work.
        other: column of the other work.
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
    (slope, explained), *halves = (_partial(part, column, other) for part in parts)
    agree = (
        _is_one(half / slope) and share > _EXPLAINED_BY_HALF for half, share in halves
    )
    return slope if slope and explained > _EXPLAINED and all(agree) else None


def _partial(pairs: Array, column: int, other: int) -> tuple[float, float]:
    """Return the slope of energy differences over a work, and the share that it explains.

    The part of both that the other work explains is subtracted first (partial regression).

    Args:
        pairs: rows of :func:`_pairs`.
        column: of the work.
        other: column of the other work.
    """
    rise = pairs[:, _RISE]
    work = pairs[:, column]
    other_work = pairs[:, other]
    scale = float(other_work @ other_work)
    if scale > 0:
        rise = rise - other_work * float(rise @ other_work) / scale
        work = work - other_work * float(work @ other_work) / scale
    square = float(work @ work)
    size = square * float(rise @ rise)
    if square < _MIN_WORK**2 * len(work) or size <= 0:
        return 0.0, 0.0
    common = float(work @ rise)
    return common / square, common**2 / size


def _pairs_of(frames: Sequence[Frame]) -> Array:
    """Return the rows of :func:`_pairs` of all frames with the same atoms in the same order."""
    groups: dict[tuple[bytes, bool], list[Frame]] = {}
    for frame in frames:
        if ENERGY in frame.labels and np.isfinite(frame.labels[ENERGY]):
            groups.setdefault(
                (frame.atom_type.tobytes(), frame.box is None), []
            ).append(frame)
    several = [group for group in groups.values() if len(group) > 1]
    # frames are numbered through all groups
    shift = np.cumsum([0, *map(len, several)])
    rows = [_pairs(group) + k * (np.arange(9) < 2) for group, k in zip(several, shift)]
    return np.concatenate([np.zeros((0, 9)), *rows])


def _pairs(frames: Sequence[Frame]) -> Array:
    """Return (pairs, 9): quantities of each pair of frames, eV and angstrom, NaN where unknown.

    Columns are the numbers of both frames, the energy difference, the works of forces and of
    virials, the largest displacement of an atom, the strain, and the changes of the virial and of
    its traceless part over that of the forces times the spacing of atoms. The traceless part has no
    pressure of hot electrons.
    """
    coord = np.stack([frame.coord for frame in frames])
    force = np.stack([frame.labels[FORCE].reshape(-1, 3) for frame in frames])
    energy = np.array([float(frame.labels[ENERGY]) for frame in frames])
    virial = np.stack(
        [
            np.reshape(frame.labels.get(VIRIAL, np.full(9, np.nan)), (3, 3))
            for frame in frames
        ]
    )
    box = (
        np.stack([frame.box for frame in frames if frame.box is not None])
        if frames[0].box is not None
        else None
    )
    rows = []
    for k in range(len(frames) - 1):
        if box is None:
            start = coord[k] - coord[k].mean(axis=0)
            ends = coord[k + 1 :] - coord[k + 1 :].mean(axis=1, keepdims=True)
            left, _, right = np.linalg.svd(
                ends.transpose(0, 2, 1) @ start
            )  # Kabsch 1976
            left[:, :, 2] *= np.linalg.det(left @ right)[
                :, None
            ]  # a rotation, no reflection
            turn = left @ right
            step = ends @ turn - start
            strain = np.zeros_like(turn)
        else:
            # A turned or mirrored frame has the same energy. What is left of the change of its cell
            # is symmetric and positive definite, so that the mean cell is not singular.
            left, _, right = np.linalg.svd(np.linalg.solve(box[k], box[k + 1 :]))
            turn = (left @ right).transpose(0, 2, 1)  # of the polar decomposition
            other = box[k + 1 :] @ turn
            middle = 0.5 * (box[k] + other)
            # displacements in cells, to the nearest image, without a shift of all atoms
            step = coord[k + 1 :] @ np.linalg.inv(box[k + 1 :]) - coord[
                k
            ] @ np.linalg.inv(box[k])
            step -= np.round(step)
            step -= np.round(
                step - step[:, :1]
            )  # a shift by half a cell rounds either way
            step -= step.mean(axis=1, keepdims=True)
            step = step @ middle
            strain = np.linalg.solve(middle, other - box[k])
        # the trapezoidal rule, with forces and virials of the second frame turned to the first
        by_force = -0.5 * ((force[k] + force[k + 1 :] @ turn) * step).sum(axis=(1, 2))
        size = np.linalg.norm(strain, axis=(1, 2))
        turned = turn.transpose(0, 2, 1) @ virial[k + 1 :] @ turn
        by_strain = -0.5 * ((virial[k] + turned) * strain).sum(axis=(1, 2))
        by_strain[size < _MIN_STRAIN] = 0.0
        # Changes of virials and of forces are sums over neighbors; those of the forces of relaxed
        # frames are noise.
        change = turned - virial[k]
        pull = np.linalg.norm(force[k + 1 :] @ turn - force[k], axis=(1, 2))
        pull[pull < _MIN_CHANGE * math.sqrt(force[k].size)] = np.nan
        spacing = (
            np.nan
            if box is None
            else abs(np.linalg.det(box[k]) / len(force[k])) ** (1 / 3)
        )
        changes = [
            np.linalg.norm(part, axis=(1, 2)) / (pull * spacing)
            for part in (change, traceless(change))
        ]
        rise = energy[k + 1 :] - energy[k]
        first, second = np.full(len(rise), k), np.arange(k + 1, len(frames))
        longest = np.linalg.norm(step, axis=2).max(axis=1)
        rows.append(
            np.stack(
                [first, second, rise, by_force, by_strain, longest, size, *changes],
                axis=1,
            )
        )
    return np.concatenate(rows)
