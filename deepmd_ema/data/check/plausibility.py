"""Heuristics for suspicious data: outliers, duplicates, units that do not fit, net forces."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from deepmd_ema.data.check.scan import Range, SystemScan
from deepmd_ema.data.source import FrameSource
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


def name_of(sources: Sequence[FrameSource], frame: int) -> str:
    """Return the name of a frame, which is counted through all ``sources``, with its number in the file or system."""
    for source in sources:
        if frame < source.num_frames:
            break
        frame -= source.num_frames
    return f"{source.name} frame {source.numbers[frame]}"


def find_copies(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> tuple[Suspects, Suspects]:
    """Return training frames that are copies of others, and validation frames that are also training frames."""
    scans, sources = [*training, *validation], [scan.system for scan in (*training, *validation)]
    num_training = sum(scan.system.num_frames for scan in training)
    digests = np.concatenate([np.zeros((0, 2), np.uint64), *(scan.digests for scan in scans)])
    order = np.lexsort(digests.T)  # stable: equal ones stay in order
    is_new = np.append(True, (digests[order[1:]] != digests[order[:-1]]).any(axis=1))[: len(order)]
    first, numbers = np.empty(len(order), np.int64), np.arange(len(order))  # the first frame that is equal to each
    first[order] = order[np.flatnonzero(is_new)][np.cumsum(is_new) - 1]
    ends, kinds = np.cumsum([source.num_frames for source in sources])[:-1], []
    for is_copy in ((numbers < num_training) & (first < numbers), (numbers >= num_training) & (first < num_training)):
        frame = int(is_copy.argmax()) if is_copy.any() else None
        worst = "" if frame is None else f"{name_of(sources, frame)} is {name_of(sources, int(first[frame]))}"
        by_system = tuple(int(part.sum()) for part in np.split(is_copy, ends)) if sources else ()
        kinds.append(Suspects(by_system, worst=worst))
    copies, shared = kinds[0]._replace(total=num_training), kinds[1]._replace(total=len(first) - num_training)
    if copies.worst:
        many = counted(copies.num_frames, "training frame is a copy", "training frames are copies")
        copies = copies._replace(warning=f"{many} of another (first: {copies.worst}).")
    if shared.worst:
        many = f"{shared.num_frames:,} of {shared.total:,} validation frames are also training frames"
        shared = shared._replace(warning=f"{many} (first: {shared.worst}): validation errors will look too good.")
    return copies, shared


def energy_outliers(training: Sequence[SystemScan], validation: Sequence[SystemScan]) -> Suspects:
    """Return frames far from energies per element that are fitted to the training frames."""
    scans = [*training, *validation]
    # without isolated atoms, which are a cohesive energy above all others
    energies = [np.where(scan.isolated, np.nan, scan.energy) for scan in scans]
    num_known = sum(int(np.isfinite(energy).sum()) for energy in energies[: len(training)])
    if num_known < _MIN_FRAMES:
        return Suspects()
    num_types = training[0].type_counts.shape[1]
    reduced = np.zeros((0, num_types + 1))  # compositions and energies, as the triangle that a QR decomposition leaves
    for counts, energy in _parts(training, energies):
        known = np.isfinite(energy)
        rows = np.concatenate([counts[known].astype(np.float64), energy[known, None]], axis=1)
        reduced = np.asarray(np.linalg.qr(np.concatenate([reduced, rows]), mode="r"))
    smallest = np.finfo(np.float64).eps * max(num_known, num_types)  # as if all frames were fitted at once
    fit = np.linalg.lstsq(reduced[:, :-1], reduced[:, -1], rcond=smallest)[0]
    residuals = [  # eV/atom
        np.concatenate([np.zeros(0), *((e - c @ fit) / c.sum(axis=1) for c, e in _parts([scan], [energy]))])
        for scan, energy in zip(scans, energies)
    ]
    trained = np.concatenate(residuals[: len(training)])
    trained = trained[np.isfinite(trained)]
    middle = np.median(trained)
    spread = 1.4826 * np.median(np.abs(trained - middle))
    bound = max(OUTLIER_SIGMAS * spread, OUTLIER_ENERGY)
    outliers: list[tuple[float, str]] = []
    by_system, total = [], 0
    for scan, residual in zip(scans, residuals):
        far = np.flatnonzero(np.abs(residual - middle) > bound)
        by_system.append(len(far))
        total += int(np.isfinite(residual).sum())
        outliers += [(residual[k] - middle, name_of([scan.system], k)) for k in far.tolist()]
    if not outliers:
        return Suspects(tuple(by_system), total)
    outliers.sort(key=lambda one: -abs(one[0]))
    named = [f"{name} ({value:+.3f} eV/atom)" for value, name in outliers[:_MAX_NAMES]]
    what = "1 frame has an energy" if len(outliers) == 1 else f"{len(outliers):,} frames have energies"
    warning = (
        f"{what} far from the others (after subtraction of energies per element; half "
        f"of all lie within {spread / 1.4826:.4f} eV/atom): {', '.join(named)}. Have they converged?"
    )
    return Suspects(tuple(by_system), total, named[0], warning)


def _parts(scans: Sequence[SystemScan], energies: Sequence[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield compositions and energies of some frames at a time."""
    for scan, energy in zip(scans, energies):
        for begin in range(0, len(energy), _AT_ONCE):
            yield scan.type_counts[begin : begin + _AT_ONCE], energy[begin : begin + _AT_ONCE]


def isolated_atom_notes(scans: Sequence[SystemScan], type_map: Sequence[str]) -> list[str]:
    """Return a note with the energies of isolated atoms as an option of the model, if there are such frames."""
    lowest, first, number = dict[int, float](), "", 0
    for scan in scans:
        for frame in np.flatnonzero(scan.isolated & np.isfinite(scan.energy)).tolist():
            element = int(scan.type_counts[frame].argmax())
            lowest[element] = min(lowest.get(element, math.inf), float(scan.energy[frame]))
            first, number = first or name_of([scan.system], frame), number + 1
    energies = ", ".join(f"{lowest[k]:.10g}" if k in lowest else "null" for k in range(len(type_map)))
    return [
        f"{counted(number, 'frame')} of one isolated atom (first: {first}): trained on like the others, and "
        "they fix energies of elements that compositions leave open. To give the model exactly these, set "
        f"model.fitting_net.atom_ener = [{energies}] (eV; needs set_davg_zero and many more steps: the network then "
        "has to learn the whole binding energy)."
    ] * bool(number)


def size_warnings(
    training: Sequence[SystemScan],
    validation: Sequence[SystemScan],
    suspicious: Collection[str],
    of_virials: Collection[str],
) -> Iterator[str]:
    """Yield warnings about forces and virials that are very large, or differ between the two parts.

    Compared between the parts are shear components of virials, which do not depend on pressure, alone and relative to
    the forces, which are as small as they in relaxed structures.

    Args:
        training: training systems.
        validation: validation systems.
        suspicious: systems whose forces are reported already.
        of_virials: systems whose virials are reported already.
    """
    scans = [*training, *validation]
    rms = [(float(np.nanmedian(s.force_rms)), s.system.name) for s in scans if np.isfinite(s.force_rms).any()]
    large = [(value, name) for value, name in rms if value > LARGE_FORCE_RMS and name not in suspicious]
    if large:
        value, name = max(large, key=lambda pair: pair[0])
        yield (
            f"{name}: forces have an RMS of {value:.3g} in half of the frames. Expected "
            "eV/angstrom; are they in kcal/mol/angstrom?"
        )
    rms = [(scan.ranges[VIRIAL].rms, scan.system.name) for scan in scans if VIRIAL in scan.ranges]
    large = [(value, name) for value, name in rms if value > LARGE_VIRIAL_RMS and name not in of_virials]
    if large:
        value, name = max(large)
        more = f" (and those of {counted(len(large) - 1, 'more system')})" if len(large) > 1 else ""
        yield (
            f"{name}: virials have an RMS of {value:.4g} eV/atom{more}; no material has more than "
            f"{LARGE_VIRIAL_RMS:g}. Expected virial = -volume * stress in eV; are they from stresses in kbar or GPa?"
        )
    shear, force = [], []
    for part in (training, validation):
        having = [scan for scan in part if scan.shear.count and FORCE in scan.ranges]
        shear.append(Range.of([scan.shear for scan in having]).rms)
        force.append(Range.of([scan.ranges[FORCE] for scan in having]).rms)
    size = math.log(shear[0] / shear[1]) if min(shear) > 0 else math.nan
    by_force = size - math.log(force[0] / force[1]) if min(force) > 0 else math.nan
    bound = math.log(LARGE_SHEAR_RATIO)
    if min(size, by_force) > bound or max(size, by_force) < -bound:  # not so where one is not known
        yield (
            f"virials without their trace have an RMS of {shear[0]:.4g} eV/atom in the training data and of "
            f"{shear[1]:.4g} in the validation data, forces of {force[0]:.4g} and {force[1]:.4g} eV/angstrom: one of "
            "the two has virials in another unit. Expected virial = -volume * stress in eV."
        )


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
            worst, name = float(each[frame]), name_of([scan.system], frame)
            place = f"{net[frame]:.3g} eV/angstrom in {name}, RMS force {rms[frame]:.3g}"
    warning = (
        f"the forces of {counted(sum(by_system), 'frame')} of {known:,} do not add up to zero (worst: {place}): no "
        "model can learn this part. Without an outer field it points to unconverged forces."
    )
    return Suspects(tuple(by_system), known, place, warning * bool(place))
