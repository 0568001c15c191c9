"""Heuristics for suspicious data: outliers, duplicates, units that do not fit, net forces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

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


def duplicate_warnings(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> list[str]:
    """Return warnings about frames that occur twice in the training data, or in both training and validation data."""
    warnings = []
    scans = [*training, *validation]
    num_training = sum(scan.system.num_frames for scan in training)
    first = _first_equal(np.concatenate([np.zeros((0, 2), np.uint64), *(scan.digests for scan in scans)]))
    copies = np.flatnonzero(first[:num_training] < np.arange(num_training))
    if len(copies):
        many = "1 training frame is a copy" if len(copies) == 1 else f"{len(copies):,} training frames are copies"
        place, of = _place(scans, copies[0]), _place(scans, first[copies[0]])
        warnings.append(f"{many} of another (first: {place} is {of}).")
    shared = num_training + np.flatnonzero(first[num_training:] < num_training)
    if len(shared):
        place, of = _place(scans, shared[0]), _place(scans, first[shared[0]])
        warnings.append(
            f"{len(shared):,} of {len(first) - num_training:,} validation frames are also training frames (first: "
            f"{place} is {of}): validation errors will look too good."
        )
    return warnings


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
    return f"{scan.system.name} frame {frame}"


def energy_outliers(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> list[str]:
    """Return warnings about frames far from energies per element fitted to the training frames."""
    known = [np.isfinite(_bound_energy(scan)) for scan in training]
    num_known = sum(int(k.sum()) for k in known)
    if num_known < _MIN_FRAMES:
        return []
    fit = _energies_of_elements(training, num_known)
    residual = np.concatenate([_per_atom(scan, fit)[k] for scan, k in zip(training, known)])
    middle = np.median(residual)
    spread = 1.4826 * np.median(np.abs(residual - middle))
    bound = max(OUTLIER_SIGMAS * spread, OUTLIER_ENERGY)
    found = []
    for scan in [*training, *validation]:
        off = _per_atom(scan, fit) - middle
        found += [
            (abs(off[k]), f"{scan.system.name} frame {k} ({off[k]:+.3f} eV/atom)")
            for k in np.flatnonzero(np.abs(off) > bound)
        ]
    if not found:
        return []
    worst = ", ".join(text for _, text in sorted(found, reverse=True)[:_MAX_NAMES])
    what = "1 frame has an energy" if len(found) == 1 else f"{len(found):,} frames have energies"
    return [
        f"{what} far from the others (after subtraction of energies per element; half "
        f"of all lie within {spread / 1.4826:.4f} eV/atom): {worst}. Have they converged?"
    ]


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
            places.append(f"{scan.system.name} frame {frame}")
    if not places:
        return []
    energies = ", ".join(f"{lowest[k]:.10g}" if k in lowest else "null" for k in range(len(type_map)))
    return [
        f"{counted(len(places), 'frame')} of one isolated atom (first: {places[0]}): trained on like the others, and "
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


def net_force_warnings(scans: Sequence[SystemScan]) -> list[str]:
    """Return a warning if the forces of some frames do not add up to zero.

    Errors of N forces that have nothing to do with each other add up to sqrt(N) times one of them, so the sum is judged
    by that.
    """
    total, known, worst, place = 0, 0, 0.0, ""
    for scan in scans:
        net, rms = np.nan_to_num(scan.net_force), np.nan_to_num(scan.force_rms)
        each = net / np.sqrt(np.maximum(scan.type_counts.sum(axis=1), 1))
        off = (net > NET_FORCE) & (each > NET_FORCE * rms)
        total, known = total + int(off.sum()), known + int(np.isfinite(scan.net_force).sum())
        if off.any() and each[off].max() > worst:
            frame = int(np.where(off, each, 0).argmax())
            worst = float(each[frame])
            place = f"{net[frame]:.3g} eV/angstrom in {scan.system.name} frame {frame}, RMS force {rms[frame]:.3g}"
    if not total:
        return []
    frames = "1 frame" if total == 1 else f"{total:,} frames"
    return [
        f"the forces of {frames} of {known:,} do not add up to zero (worst: {place}): no "
        "model can learn this part. Without an outer field it points to unconverged forces."
    ]
