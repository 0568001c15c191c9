"""Heuristics for suspicious data: outliers, duplicates, units that do not fit, net forces."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from deepmd_ema.data.check.scan import SystemScan

OUTLIER_SIGMAS = 12.0  # robust standard deviations from the median residual; a normal distribution never gets there
OUTLIER_ENERGY = 0.02  # eV/atom; a smaller residual is no outlier, however narrow the distribution
NET_FORCE = 0.1  # eV/angstrom, and also, per square root of the atoms, the least fraction of the RMS force
LARGE_FORCE_RMS = 15.0  # eV/angstrom, far beyond liquids at 3000 K, usual for kcal/mol/angstrom
_MOST_NAMED = 3
_FEWEST_FRAMES = 10  # to judge outliers


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


def large_force_warnings(scans: Sequence[SystemScan], told: Collection[str]) -> list[str]:
    """Return a warning about forces that are very large, unless it is one of the systems ``told`` already."""
    rms = [(float(np.nanmedian(s.force_rms)), s) for s in scans if np.isfinite(s.force_rms).any()]
    large = [(value, s) for value, s in rms if value > LARGE_FORCE_RMS and s.system.name not in told]
    if not large:
        return []
    value, scan = max(large, key=lambda pair: pair[0])
    return [
        f"{scan.system.name}: forces have an RMS of {value:.3g} in half of the frames. Expected "
        "eV/angstrom; are they in kcal/mol/angstrom?"
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


def _places(scans: Sequence[SystemScan]) -> list[tuple[str, bytes]]:
    return [(f"{scan.system.name} frame {k}", digest) for scan in scans for k, digest in enumerate(scan.digests)]
