"""Heuristics for suspicious data: outliers, duplicates, units that do not fit, net forces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepmd_ema.arrays import Array
from deepmd_ema.data.check.scan import SystemScan

OUTLIER_SIGMAS = 12.0  # robust standard deviations from the median residual; a normal distribution never gets there
OUTLIER_ENERGY = 0.02  # eV/atom; a smaller residual is no outlier, however narrow the distribution
NET_FORCE = 0.1  # eV/angstrom, and also the least fraction of the frame's RMS force
LARGE_FORCE_RMS = 15.0  # eV/angstrom, far beyond liquids at 3000 K, usual for kcal/mol/angstrom
_MOST_NAMED = 3
_FEWEST_PAIRS = 8  # of neighboring frames, to judge units
_FEWEST_FRAMES = 10  # to judge outliers
_HARTREE, _BOHR, _KCAL = 27.211386, 0.52917721, 0.0433641  # eV, angstrom, eV
# ratio of energy difference to work of the forces when a file has other units than eV and eV/angstrom
_UNIT_RATIOS = {
    -1.0: "the forces have the wrong sign (gradients instead of forces)",
    1 / _HARTREE: "the energies look like Hartree",
    1 / _KCAL: "the energies look like kcal/mol",
    _HARTREE / _BOHR: "the forces look like Hartree/bohr",
    1 / _BOHR: "energies and forces look like Hartree and Hartree/bohr",
    _KCAL: "the forces look like kcal/mol/angstrom",
    96.485: "the energies look like kJ/mol",
    1 / 96.485: "the forces look like kJ/mol/angstrom",
    964.85: "the forces look like kJ/mol/nm with energies in kJ/mol and lengths in angstrom",
}


def duplicate_warnings(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> list[str]:
    """Return warnings about frames that occur twice in the training data, or in both training and validation data."""
    warnings = []
    first_place: dict[bytes, str] = {}
    twice: list[str] = []
    for place, digest in _places(training):
        if digest in first_place:
            twice.append(f"{place} is {first_place[digest]}")
        first_place.setdefault(digest, place)
    if twice:
        copies = "1 training frame is a copy" if len(twice) == 1 else f"{len(twice):,} training frames are copies"
        warnings.append(f"{copies} of another (first: {twice[0]}).")
    frames = list(_places(validation))
    shared = [f"{place} is {first_place[digest]}" for place, digest in frames if digest in first_place]
    if shared:
        warnings.append(
            f"{len(shared):,} of {len(frames):,} validation frames are also training frames (first: "
            f"{shared[0]}): validation errors will look too good."
        )
    return warnings


def energy_outliers(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> list[str]:
    """Return warnings about frames far from energies per element fitted to the training frames."""
    known = [np.isfinite(scan.energy) for scan in training]
    energy = np.concatenate([np.zeros(0), *(scan.energy[k] for scan, k in zip(training, known))])
    if len(energy) < _FEWEST_FRAMES:
        return []
    counts = np.concatenate([scan.type_counts[k] for scan, k in zip(training, known)]).astype(np.float64)
    fit = np.linalg.lstsq(counts, energy, rcond=None)[0]
    residual = (energy - counts @ fit) / counts.sum(axis=1)
    middle = np.median(residual)
    spread = 1.4826 * np.median(np.abs(residual - middle))
    bound = max(OUTLIER_SIGMAS * spread, OUTLIER_ENERGY)
    found = []
    for scan in [*training, *validation]:
        atoms = scan.type_counts.sum(axis=1)
        off = (scan.energy - scan.type_counts @ fit) / atoms - middle
        found += [
            (abs(off[k]), f"{scan.system.name} frame {k} ({off[k]:+.3f} eV/atom)")
            for k in np.flatnonzero(np.abs(off) > bound)
        ]
    if not found:
        return []
    worst = ", ".join(text for _, text in sorted(found, reverse=True)[:_MOST_NAMED])
    what = "1 frame has an energy" if len(found) == 1 else f"{len(found):,} frames have energies"
    return [
        f"{what} far from the others (after subtraction of energies per element; half "
        f"of all lie within {spread / 1.4826:.4f} eV/atom): {worst}. Have they converged?"
    ]


def unit_warnings(scans: Sequence[SystemScan]) -> list[str]:
    """Return warnings about energies and forces that do not belong together, or forces that are very large.

    Between two frames close to each other the energy changes by the work of the forces; another ratio shows other
    units.
    """
    warnings = []
    for scan in scans:
        text = _unit_ratio(np.array(scan.work).reshape(-1, 2))
        if text:
            warnings.append(f"{scan.system.name}: {text}. Expected eV and eV/angstrom.")
    rms = [(float(np.nanmedian(s.force_rms)), s) for s in scans if np.isfinite(s.force_rms).any()]
    large = [(value, s) for value, s in rms if value > LARGE_FORCE_RMS]
    if large:
        value, scan = max(large, key=lambda pair: pair[0])
        warnings.append(
            f"{scan.system.name}: forces have an RMS of {value:.3g} in half of the frames. Expected "
            "eV/angstrom; are they in kcal/mol/angstrom?"
        )
    return warnings


def net_force_warnings(scans: Sequence[SystemScan]) -> list[str]:
    """Return a warning if the forces of some frames do not add up to zero."""
    total, worst, place = 0, 0.0, ""
    for scan in scans:
        known = np.nan_to_num(scan.net_force)
        off = (known > NET_FORCE) & (known > NET_FORCE * np.nan_to_num(scan.force_rms))
        total += int(off.sum())
        if off.any() and known[off].max() > worst:
            frame = int(np.where(off, known, 0).argmax())
            worst, place = float(known[frame]), f"{scan.system.name} frame {frame}"
    if not total:
        return []
    frames = "1 frame" if total == 1 else f"{total:,} frames"
    return [
        f"the forces of {frames} do not add up to zero (worst: {worst:.3g} eV/angstrom in {place}): no "
        "model can learn this part. Without an outer field it points to unconverged forces."
    ]


def _unit_ratio(pairs: Array) -> str:
    """Return which units the ratio of energy differences to works points to; empty if it is 1 or not significant."""
    if len(pairs) < _FEWEST_PAIRS:
        return ""
    rise, work = pairs[:, 0], pairs[:, 1]
    scale = float(np.sqrt((rise**2).sum() * (work**2).sum()))
    if scale == 0 or abs(float((rise * work).sum())) < 0.97 * scale:
        return ""
    ratio = float((rise * work).sum() / (work**2).sum())
    for expected, meaning in _UNIT_RATIOS.items():
        if 0.9 < ratio / expected < 1.1:
            return f"{meaning}: between close frames the energy changes by {ratio:.3g} times the work of the forces"
    if not 0.67 < ratio < 1.5:
        return f"between close frames the energy changes by {ratio:.3g} times the work of the forces"
    return ""


def _places(scans: Sequence[SystemScan]) -> list[tuple[str, bytes]]:
    return [(f"{scan.system.name} frame {k}", digest) for scan in scans for k, digest in enumerate(scan.digests)]
