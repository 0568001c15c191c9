"""Units and signs of lengths, energies, forces and virials, judged by what frames say about them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.data.check.physics import BOHR, LONG_BONDS, NO_BONDS, Evidence, judge
from deepmd_ema.data.check.scan import SystemScan
from deepmd_ema.errors import counted, first_few

_HARTREE = 27.211386  # eV
_KCAL, _KJ = 23.060548, 96.485332  # kcal/mol and kJ/mol of 1 eV
_GPA = 160.21766  # of 1 eV/angstrom^3
# numbers that 1 eV and 1 eV/angstrom have in other units; "" is the right one
_ENERGY_UNITS = {"": 1.0, "Hartree": 1 / _HARTREE, "Rydberg": 2 / _HARTREE, "kcal/mol": _KCAL, "kJ/mol": _KJ}
_FORCE_UNITS = {
    "": 1.0,
    "Hartree/bohr": BOHR / _HARTREE,
    "Rydberg/bohr": 2 * BOHR / _HARTREE,
    "kcal/mol/angstrom": _KCAL,
    "kJ/mol/angstrom": _KJ,
    "kJ/mol/nm": 10 * _KJ,
}
# Measured on right data: the sets of benchmarks/results/2026-11-21-data_check.md, with those that came later.
_SOFT, _STIFF = 0.2, 20.0  # stiffness of bonds in eV and angstrom: 0.3 in potassium, 1.0 to 12.3 in the sets
_USUAL_STIFFNESS, _STIFFNESS_SPREAD = 3.6, 0.45  # median in the sets, and mean distance of its logarithm from it
_RATIO_SPREAD = 0.15  # mean size of the logarithm of a ratio to what a fit gives
_EXACT_RATIO = 1.5  # between close frames of right data 0.83 to 1.04; an angstrom is 1.89 bohr
_MIN_RATIO = 0.25  # of frames farther apart, 0.60 to 1.19: repulsion lowers it; the next unit below is 1 / 3.8
_FIT_RATIO = 8.0  # of energies to those of a fit: 0.73 to 4.5 in right data, most in Ge; the nearest unit is 14 away
_FIT_VIRIAL = 4.0  # of virials to those of a fit: 0.82 to 1.41
_CLOSE_UNIT = 1.1  # of a ratio between close frames to that of a unit that is named: kcal/mol is 1.18 hartree^-1
_PATH_UNIT = 1.2  # of one between frames farther apart
_FIT_UNIT = 2.2  # of another ratio: the scatter of one that fits less well, and a bit
_RARE = 1.0  # cost of Rydberg: of two units that fit alike the other is named first
_NEXT = 3.0  # of two units with costs closer than this both are named: one of them has a chance of 5 % or more
_MIN_PAIRS = 8  # of neighboring frames: a correlation of _CLOSE_FIT is no chance then
_CLOSE_FIT = 0.97  # correlation of energy differences and work: of close frames they are one, up to curvature
_MIN_FRAMES = 12  # of a system that is judged for itself: 8 more than a few numbers of composition explain
# what is judged in less than about a second, and a minute for all
_MAX_FRAMES = 64  # of a system
_MAX_ATOMS = 6000  # of these frames together, if more than _MIN_FRAMES
_MAX_SYSTEMS = 40
COMMON = "a unit common to energies and forces"


@dataclass
class UnitReport:
    """Result of the check of units and signs.

    Attributes:
        warnings: one for each system in which something is wrong.
        suspicious: names of these systems.
        of_virials: names of those with suspicious virials.
        num_systems: systems, or groups of small ones, that were judged.
        num_all: systems and groups there are.
        verified: number of judged ones in which each quantity could be verified.
        unverified: names of those in which it has data and could not.
    """

    warnings: list[str] = field(default_factory=list)
    suspicious: list[str] = field(default_factory=list)
    of_virials: list[str] = field(default_factory=list)
    num_systems: int = 0
    num_all: int = 0
    verified: dict[str, int] = field(default_factory=dict)
    unverified: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, labels: Collection[str], verified: Collection[str]) -> None:
        """Count the quantities of a system with ``labels`` that could be verified."""
        for what, label in {"lengths": FORCE, "forces": FORCE, "energies": ENERGY, "virials": VIRIAL}.items():
            if label in labels:
                is_verified = ("lengths" if what == "lengths" else label) in verified
                self.verified[what] = self.verified.get(what, 0) + is_verified
                self.unverified.setdefault(what, []).extend([] if is_verified else [name])
        if ENERGY in verified and COMMON not in verified:
            self.unverified.setdefault(COMMON, []).append(name)

    def lines(self) -> list[str]:
        """Return lines with the quantities that could be verified and those that could not."""
        if not self.num_systems:
            return ["cannot be verified without forces"]
        many = counted(self.num_systems, "system")
        if self.num_systems < self.num_all:
            many = f"{self.num_systems:,} evenly spaced systems of {self.num_all:,}"
        verified = ", ".join(f"{what} in {count:,}" for what, count in self.verified.items())
        out = [f"verified: {verified} of {many}"]
        for what, names in self.unverified.items():
            if names:
                out.append(f"not verified: {what} of {first_few(names, 3)}")
        return out


def judge_units(scans: Sequence[SystemScan], type_map: Sequence[str]) -> UnitReport:
    """Return warnings about systems with other units than eV, eV/angstrom and angstrom, or with wrong signs."""
    groups = list(_groups(scans))
    chosen = groups
    if len(groups) > _MAX_SYSTEMS:
        chosen = [groups[int(k)] for k in np.linspace(0, len(groups) - 1, _MAX_SYSTEMS).round()]
    report = UnitReport(num_systems=len(chosen), num_all=len(groups))
    for name, places, close in chosen:
        frames = [scan.system.frame(index) for scan, index in places]
        findings = _Findings(judge(frames, type_map), close)
        if findings.texts:
            report.suspicious.append(name)
            report.of_virials += [name] * any(text.startswith("the virials") for text in findings.texts)
            expected = "Expected eV, eV/angstrom and angstrom, and virial = -volume * stress in eV."
            report.warnings.append(f"{name}: {'; '.join(findings.texts)}. {expected}")
        report.count(name, {label for frame in frames for label in frame.labels}, findings.verified)
    return report


def _groups(scans: Sequence[SystemScan]) -> Iterator[tuple[str, list[tuple[SystemScan, int]], float | None]]:
    """Yield name, some frames and the ratio between close frames of each system, or of all small systems together.

    The ratio is that of energy differences over the work of the forces between neighboring close frames.
    """
    small: dict[bool, list[tuple[SystemScan, int]]] = {True: [], False: []}
    groups: list[tuple[str, list[tuple[SystemScan, int]], float | None]] = []
    for scan in scans:
        usable = [(scan, k) for k in np.flatnonzero(np.isfinite(scan.force_rms)).tolist() if k not in scan.bad_frames]
        if scan.open_frames not in (0, scan.system.num_frames):
            continue
        if len(usable) < _MIN_FRAMES:
            small[scan.open_frames == 0] += usable
            continue
        (rise, work), ratio = scan.work, None
        scale, common = float(np.sqrt((rise**2).sum() * (work**2).sum())), float((rise * work).sum())
        if len(rise) >= _MIN_PAIRS and scale and abs(common) >= _CLOSE_FIT * scale:
            ratio = common / float((work**2).sum())
        groups.append((scan.system.name, usable, ratio))
    for places in filter(None, small.values()):
        others = len({scan.system.name for scan, _ in places}) - 1
        more = f" and {others} more systems of few frames" if others else ""
        groups.append((f"{places[0][0].system.name}{more}", places, None))
    for name, places, ratio in groups:  # evenly spaced frames, so that they are quickly judged
        atoms = max(int(places[0][0].type_counts.sum(axis=1).max()), 1)
        most = min(len(places), max(_MIN_FRAMES, min(_MAX_FRAMES, _MAX_ATOMS // atoms)))
        chosen = np.linspace(0, len(places) - 1, most).round() if most < len(places) else np.arange(most)
        yield name, [places[int(k)] for k in chosen], ratio


class _Findings:
    """Conclusions from evidence: texts of mistakes, and the quantities that it verifies."""

    def __init__(self, evidence: Evidence, close: float | None) -> None:
        self.texts: list[str] = []
        self.verified: set[str] = set()
        in_bohr = evidence.bond is not None and LONG_BONDS < evidence.bond < NO_BONDS
        self._length = 1 / BOHR if in_bohr else 1.0  # of an angstrom in the file
        if evidence.bond is not None and evidence.bond < NO_BONDS:
            self.verified.add("lengths")
        if in_bohr:
            self.texts.append(
                f"lengths look like bohr: neighbors are {evidence.bond:.2g} sums of covalent radii apart, expected 0.7 "
                "to 1.3"
            )
        fitted = evidence.energy if evidence.energy is not None and evidence.energy.is_clear else None
        path, ratio = evidence.paths.energy, fitted.value if fitted is not None else None
        # ratio, bounds of right data, factor to a unit that is named; the most exact one that is known
        self._is_exact = close is not None or path is not None
        if close is not None:
            ratio, self._bounds, self._unit_bound = close, (1 / _EXACT_RATIO, _EXACT_RATIO), _CLOSE_UNIT
        elif path is not None:
            ratio, self._bounds, self._unit_bound = path, (_MIN_RATIO, _EXACT_RATIO), _PATH_UNIT
        else:
            self._bounds, self._unit_bound = (1 / _FIT_RATIO, _FIT_RATIO), _FIT_UNIT
        self._ratio = None if ratio is None else ratio * self._length
        stiff = evidence.stiffness if (evidence.bond or 0.0) < NO_BONDS else None
        self._stiffness = None if stiff is None else stiff / self._length**2
        if self._ratio is not None:
            self.verified |= {ENERGY, FORCE}
        if stiff is not None:
            self.verified |= {FORCE, COMMON}
        signs, units = self._judge_signs(), self._judge_units()
        energy, force = (sign * unit for sign, unit in zip(signs, units))
        if evidence.paths.virial is not None:
            self.verified.add(VIRIAL)
            self._judge_virial(evidence.paths.virial * energy, evidence.volume or 1.0, "the energies of strained cells")
        elif evidence.virial is not None and evidence.virial.is_clear:
            self.verified.add(VIRIAL)
            self._judge_virial(evidence.virial.value * self._length * force, evidence.volume or 1.0, "the forces")

    def _judge_signs(self) -> tuple[float, float]:
        """Say which sign is wrong, and return those of energies and forces."""
        ratio, stiffness = self._ratio, self._stiffness or 0.0
        if (stiffness if ratio is None else ratio) >= 0:
            return 1.0, 1.0
        if ratio is not None and stiffness > 0:
            self.texts.append(f"the energies have the wrong sign: {self._reason(ratio)}")
            return -1.0, 1.0
        reason = "they push atoms apart that are far from each other, and together those that are near"
        reason = reason if ratio is None else self._reason(ratio)
        self.texts.append(f"the forces have the wrong sign (gradients instead of forces): {reason}")
        return 1.0, -1.0

    def _judge_units(self) -> tuple[float, float]:
        """Say which units energies and forces look like, and return how many of them 1 eV and 1 eV/angstrom are."""
        if self._cost(1.0, 1.0, *self._bounds) is not None:
            return 1.0, 1.0
        costs = self._costs(self._unit_bound)
        if not costs and self._stiffness is not None:  # close frames were not so close
            costs = self._costs(_FIT_UNIT)
        if self._ratio is not None and not self._bounds[0] < abs(self._ratio) < self._bounds[1]:
            reason = self._reason(abs(self._ratio))
        else:
            reason = (
                f"forces along bonds change by {abs(self._stiffness or 0.0):.2g} e^2/r^3 with their length r, expected "
                "0.5 to 15"
            )
        if not costs:
            self.texts.append(reason)
            return 1.0, 1.0
        best = min(costs, key=lambda units: costs[units])
        near = [units for units in costs if costs[units] < costs[best] + _NEXT and units != best][:1]
        what = " and ".join(filter(None, ("energies" * bool(best[0]), "forces" * bool(best[1]))))
        looks = " or ".join(" and ".join(filter(None, units)) for units in [best, *near])
        self.texts.append(f"{'the ' * (not all(best))}{what} look like {looks}: {reason}")
        return _ENERGY_UNITS[best[0]], _FORCE_UNITS[best[1]]

    def _costs(self, bound: float) -> dict[tuple[str, str], float]:
        """Return the cost of each wrong pair of units that fits within a factor ``bound``."""
        return {
            (energy, force): cost + _RARE * ("Rydberg" in energy + force)
            for (energy, a), (force, b) in product(_ENERGY_UNITS.items(), _FORCE_UNITS.items())
            # someone may have one of them right, or both of one kind
            if (energy or force)
            and (not energy or (self._ratio is not None and (not force or force.startswith(energy))))
            and (cost := self._cost(a, b, 1 / bound, bound)) is not None
        }

    def _cost(self, a: float, b: float, low: float, high: float) -> float | None:
        """Return minus the logarithm of how likely units are, up to a constant; None if they do not fit."""
        cost = 0.0
        if self._ratio is not None:
            own = abs(self._ratio) * b / a
            if not low < own < high:
                return None
            cost += abs(math.log(own)) / _RATIO_SPREAD
        if self._stiffness is not None:
            own = abs(self._stiffness) / b
            if not _SOFT < own < _STIFF:
                return None
            cost += abs(math.log(own / _USUAL_STIFFNESS)) / _STIFFNESS_SPREAD
        return cost

    def _judge_virial(self, ratio: float, volume: float, of: str) -> None:
        """Say which unit or sign virials look like, given their ratio to what something else gives, in eV."""
        if 1 / _FIT_VIRIAL < ratio < _FIT_VIRIAL:
            return
        units = {name: number for name, number in _ENERGY_UNITS.items() if name}
        units |= {"GPa * angstrom^3": _GPA, "kbar * angstrom^3": 10 * _GPA}
        stress = {"eV/angstrom^3": 1.0, "GPa": _GPA, "kbar": 10 * _GPA}
        units |= {f"a stress in {name}, not a virial": number / volume for name, number in stress.items()}
        units |= {"": 1.0} if ratio < 0 else {}  # the right one with the wrong sign
        off = {name: abs(math.log(abs(ratio) / number)) for name, number in units.items()}
        near = sorted((name for name in off if off[name] < math.log(_FIT_UNIT)), key=lambda name: off[name])[:2]
        found = f"they are {ratio:.3g} times what {of} give"
        looks = []
        for name in near:
            sign = " with the wrong sign" if ratio < 0 and "stress" not in name else ""
            looks.append(f"look like {name}{sign}" if name else "have the wrong sign")
        named = " or ".join(looks).replace(" or look like ", " or ") or "do not fit the forces"
        self.texts.append(f"the virials {named}: {found}")

    def _reason(self, ratio: float) -> str:
        if self._is_exact:
            return f"between near frames the energy changes by {ratio:.3g} times the work of the forces"
        return f"from frame to frame the energy changes by {ratio:.2g} times what the forces give"
