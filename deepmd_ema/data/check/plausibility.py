"""Heuristics for suspicious data: outliers, duplicates, units that do not fit, net forces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deepmd_ema.data.check.scan import Range, SystemScan
from deepmd_ema.errors import counted
from deepmd_ema.labels import FORCE, VIRIAL
from deepmd_ema.sorting import Array

OUTLIER_SIGMAS = 12.0  # robust standard deviations from the median residual; a normal distribution never gets there
OUTLIER_ENERGY = 0.02  # eV/atom; a smaller residual is no outlier, however narrow the distribution
NET_FORCE = 0.1  # eV/angstrom, and also, per square root of the atoms, the least fraction of the RMS force
LARGE_FORCE_RMS = 15.0  # eV/angstrom, far beyond liquids at 3000 K, usual for kcal/mol/angstrom
LARGE_VIRIAL_RMS = 20.0  # eV/atom; 10 angstrom^3 per atom under 300 GPa; stresses in kbar are 1,602 times too large
LARGE_SHEAR_RATIO = 50.0  # of two sets of data; GPa instead of eV/angstrom^3 is 160
_MAX_NAMES = 3
_MIN_FRAMES = 10  # to judge outliers
_AT_ONCE = 20_000  # frames whose compositions are in memory as floating-point numbers


class Suspects(NamedTuple):
    """Frames that a check has found.

    Attributes:
        by_system: their number in each system, of training and then of validation.
        total: frames that were looked at.
        worst: the frame to look at first, with its number; empty without any.
        warning: for the user; empty without any.
    """

    by_system: tuple[int, ...] = ()
    total: int = 0
    worst: str = ""
    warning: str = ""

    @property
    def num_frames(self) -> int:
        """Their number in all systems."""
        return sum(self.by_system)


def find_copies(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> tuple[Suspects, Suspects]:
    """Return training frames that are copies of others, and validation frames that are also training frames."""
    scans = [*training, *validation]
    num_training = sum(scan.system.num_frames for scan in training)
    first = _first_equal(np.concatenate([np.zeros((0, 2), np.uint64), *(scan.digests for scan in scans)]))
    numbers = np.arange(len(first))
    is_copy = (numbers < num_training) & (first < numbers)
    is_shared = (numbers >= num_training) & (first < num_training)
    worst, warnings = [], []
    for found in (is_copy, is_shared):
        frame = int(found.argmax()) if found.any() else None
        worst.append("" if frame is None else f"{_place(scans, frame)} is {_place(scans, int(first[frame]))}")
    many = counted(int(is_copy.sum()), "training frame is a copy", "training frames are copies")
    warnings.append(f"{many} of another (first: {worst[0]})." * bool(worst[0]))
    many = f"{int(is_shared.sum()):,} of {len(first) - num_training:,} validation frames are also training frames"
    warnings.append(f"{many} (first: {worst[1]}): validation errors will look too good." * bool(worst[1]))
    ends = np.cumsum([scan.system.num_frames for scan in scans])[:-1]
    copies, shared = (
        tuple(int(part.sum()) for part in np.split(found, ends)) if scans else () for found in (is_copy, is_shared)
    )
    return (
        Suspects(copies, num_training, worst[0], warnings[0]),
        Suspects(shared, len(first) - num_training, worst[1], warnings[1]),
    )


def _first_equal(digests: Array) -> Array:
    """Return for each digest (F, 2) the number of the first one that is equal."""
    order = np.lexsort(digests.T)  # stable: equal ones stay in order
    is_new = np.append(True, (digests[order[1:]] != digests[order[:-1]]).any(axis=1))[: len(order)]
    first = np.empty(len(order), np.int64)
    first[order] = order[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    return first


def _place(scans: Sequence[SystemScan], frame: int) -> str:
    """Return system and number of a frame that is counted through all systems."""
    for scan in scans:
        if frame < scan.system.num_frames:
            break
        frame -= scan.system.num_frames
    return scan.name_of(frame)


def energy_outliers(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> Suspects:
    """Return frames far from energies per element that are fitted to the training frames."""
    known = [np.isfinite(_bound_energy(scan)) for scan in training]
    num_known = sum(int(k.sum()) for k in known)
    if num_known < _MIN_FRAMES:
        return Suspects()
    fit = _energies_of_elements(training, num_known)
    residual = np.concatenate([_per_atom(scan, fit)[k] for scan, k in zip(training, known)])
    middle = np.median(residual)
    spread = 1.4826 * np.median(np.abs(residual - middle))
    bound = max(OUTLIER_SIGMAS * spread, OUTLIER_ENERGY)
    found: list[tuple[float, SystemScan, int]] = []
    by_system, total = [], 0
    for scan in [*training, *validation]:
        off = _per_atom(scan, fit) - middle
        far = np.flatnonzero(np.abs(off) > bound)
        by_system.append(len(far))
        total += int(np.isfinite(off).sum())
        found += [(off[k], scan, k) for k in far.tolist()]
    if not found:
        return Suspects(tuple(by_system), total)
    found.sort(key=lambda one: -abs(one[0]))
    named = [f"{scan.name_of(k)} ({value:+.3f} eV/atom)" for value, scan, k in found[:_MAX_NAMES]]
    what = "1 frame has an energy" if len(found) == 1 else f"{len(found):,} frames have energies"
    warning = (
        f"{what} far from the others (after subtraction of energies per element; half "
        f"of all lie within {spread / 1.4826:.4f} eV/atom): {', '.join(named)}. Have they converged?"
    )
    return Suspects(tuple(by_system), total, named[0], warning)


def _energies_of_elements(scans: Sequence[SystemScan], num_known: int) -> Array:
    """Return the energy of each element that explains the energies of frames best, which are known of ``num_known``."""
    num_types = scans[0].type_counts.shape[1]
    reduced = np.zeros((0, num_types + 1))  # compositions and energies, as the triangle that a QR decomposition leaves
    for counts, energy in _parts(scans):
        known = np.isfinite(energy)
        rows = np.concatenate([counts[known].astype(np.float64), energy[known, None]], axis=1)
        reduced = np.asarray(np.linalg.qr(np.concatenate([reduced, rows]), mode="r"))
    smallest = np.finfo(np.float64).eps * max(num_known, num_types)  # as if all frames were fitted at once
    fit: Array = np.linalg.lstsq(reduced[:, :-1], reduced[:, -1], rcond=smallest)[0]
    return fit


def _per_atom(scan: SystemScan, fit: Array) -> Array:
    """Return (F,) the energy of each frame that energies of elements do not explain, eV/atom."""
    parts = [(energy - counts @ fit) / counts.sum(axis=1) for counts, energy in _parts([scan])]
    return np.concatenate([np.zeros(0), *parts])


def _parts(scans: Sequence[SystemScan]) -> Iterator[tuple[Array, Array]]:
    """Yield compositions and energies of some frames at a time."""
    for scan in scans:
        energy = _bound_energy(scan)
        for begin in range(0, len(energy), _AT_ONCE):
            yield scan.type_counts[begin : begin + _AT_ONCE], energy[begin : begin + _AT_ONCE]


def _bound_energy(scan: SystemScan) -> Array:
    """Return the energies of frames; NaN for isolated atoms, which are a cohesive energy above all others."""
    return np.where(scan.isolated, np.nan, scan.energy)


def isolated_atom_notes(scans: Sequence[SystemScan], type_map: Sequence[str]) -> list[str]:
    """Return a note with the energies of isolated atoms as an option of the model, if there are such frames."""
    lowest: dict[int, float] = {}
    places = []
    for scan in scans:
        for frame in np.flatnonzero(scan.isolated & np.isfinite(scan.energy)).tolist():
            element = int(scan.type_counts[frame].argmax())
            lowest[element] = min(lowest.get(element, math.inf), float(scan.energy[frame]))
            places.append((scan, frame))
    if not places:
        return []
    first = places[0][0].name_of(places[0][1])
    energies = ", ".join(f"{lowest[k]:.10g}" if k in lowest else "null" for k in range(len(type_map)))
    return [
        f"{counted(len(places), 'frame')} of one isolated atom (first: {first}): trained on like the others, and "
        "they fix energies of elements that compositions leave open. To give the model exactly these, set "
        f"model.fitting_net.atom_ener = [{energies}] (eV; needs set_davg_zero and many more steps: the network then "
        "has to learn the whole binding energy)."
    ]


def large_force_warnings(scans: Sequence[SystemScan], reported: Collection[str]) -> list[str]:
    """Return a warning about forces that are very large, unless the system is one of ``reported``."""
    rms = [(float(np.nanmedian(s.force_rms)), s) for s in scans if np.isfinite(s.force_rms).any()]
    large = [(value, s) for value, s in rms if value > LARGE_FORCE_RMS and s.system.name not in reported]
    if not large:
        return []
    value, scan = max(large, key=lambda pair: pair[0])
    return [
        f"{scan.system.name}: forces have an RMS of {value:.3g} in half of the frames. Expected "
        "eV/angstrom; are they in kcal/mol/angstrom?"
    ]


def large_virial_warnings(scans: Sequence[SystemScan], reported: Collection[str]) -> list[str]:
    """Return a warning about virials larger than those of any material, unless of a system in ``reported``."""
    found = [(scan.ranges[VIRIAL].rms, scan.system.name) for scan in scans if VIRIAL in scan.ranges]
    large = [(rms, name) for rms, name in found if rms > LARGE_VIRIAL_RMS and name not in reported]
    if not large:
        return []
    rms, name = max(large)
    more = f" (and those of {counted(len(large) - 1, 'more system')})" if len(large) > 1 else ""
    return [
        f"{name}: virials have an RMS of {rms:.4g} eV/atom{more}; no material has more than {LARGE_VIRIAL_RMS:g}. "
        "Expected virial = -volume * stress in eV; are they from stresses in kbar or GPa?"
    ]


def shear_ratio_warnings(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> list[str]:
    """Return a warning if virials of training and validation data differ by more than their matter can.

    Compared are their shear components, which do not depend on pressure, alone and relative to the forces, which are as
    small as they in relaxed structures.
    """
    shear, force = [], []
    for scans in (training, validation):
        having = [scan for scan in scans if scan.shear.count and FORCE in scan.ranges]
        shear.append(Range.of([scan.shear for scan in having]).rms)
        force.append(Range.of([scan.ranges[FORCE] for scan in having]).rms)
    size = math.log(shear[0] / shear[1]) if min(shear) > 0 else math.nan
    by_force = size - math.log(force[0] / force[1]) if min(force) > 0 else math.nan
    bound = math.log(LARGE_SHEAR_RATIO)
    if not (min(size, by_force) > bound or max(size, by_force) < -bound):  # also where one is not known
        return []
    return [
        f"virials without their trace have an RMS of {shear[0]:.4g} eV/atom in the training data and of {shear[1]:.4g} "
        f"in the validation data, forces of {force[0]:.4g} and {force[1]:.4g} eV/angstrom: one of the two has virials "
        "in another unit. Expected virial = -volume * stress in eV."
    ]


def net_forces(scans: Sequence[SystemScan]) -> Suspects:
    """Return frames whose forces do not add up to zero.

    Errors of N forces that have nothing to do with each other add up to sqrt(N) times one of them, so the sum is judged
    by that.
    """
    by_system, known, worst, place = [], 0, 0.0, ""
    for scan in scans:
        net, rms = np.nan_to_num(scan.net_force), np.nan_to_num(scan.force_rms)
        each = net / np.sqrt(np.maximum(scan.type_counts.sum(axis=1), 1))
        off = (net > NET_FORCE) & (each > NET_FORCE * rms)
        by_system.append(int(off.sum()))
        known += int(np.isfinite(scan.net_force).sum())
        if off.any() and each[off].max() > worst:
            frame = int(np.where(off, each, 0).argmax())
            worst = float(each[frame])
            place = f"{net[frame]:.3g} eV/angstrom in {scan.name_of(frame)}, RMS force {rms[frame]:.3g}"
    if not any(by_system):
        return Suspects(tuple(by_system), known)
    warning = (
        f"the forces of {counted(sum(by_system), 'frame')} of {known:,} do not add up to zero (worst: {place}): no "
        "model can learn this part. Without an outer field it points to unconverged forces."
    )
    return Suspects(tuple(by_system), known, place, warning)
