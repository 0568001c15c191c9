"""Checks of the data before training: problems, warnings and a summary."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.config.schema.descriptor import HasInnerNeighbors
from deepmd_ema.data.check.plausibility import (
    Suspects,
    energy_outliers,
    find_copies,
    isolated_atom_notes,
    large_force_warnings,
    large_virial_warnings,
    net_forces,
    shear_ratio_warnings,
)
from deepmd_ema.data.check.scan import SystemScan, scan_system
from deepmd_ema.data.check.units import UnitReport, judge_units
from deepmd_ema.data.source import BOX, COORD, FrameSource
from deepmd_ema.errors import DataError, counted, first_few
from deepmd_ema.geometry import FrameGeometry, NeighborStatistics, neighbor_statistics
from deepmd_ema.labels import APARAM, FORCE, FPARAM, LABELS, VIRIAL
from deepmd_ema.sorting import Array

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig

MIN_DISTANCE = 0.3  # angstrom; no two nuclei of a useful frame come closer (H2 has 0.74)
# names of checks of frames, and keys of `dp-ema check --json`
COPIES, SHARED, OUTLIERS, NET_FORCES = "duplicates", "in_training_and_validation", "energy_outliers", "net_forces"
NEAR_COPIES = "near_training_frames"
_MAX_MESSAGES = 5  # of one kind and system
_FEW = 16  # of so many frames one is read alone, not among all of them
_MAX_ELEMENTS = 12  # numbers of so many elements in one line


@dataclass
class DataReport:
    """Results of the checks of a data set; one that was remembered has notes, warnings and neighbors alone.

    Attributes:
        problems: faults that make training impossible, each with file and frame.
        warnings: what a user should look at.
        notes: remarks on sources of other formats, one line each, and on frames of isolated atoms.
        training: scan of each training system.
        validation: scan of each validation system.
        neighbors: statistics over the usable frames, or over a sample of them.
        num_searched: number of frames in ``neighbors``.
        closest: the frame with the shortest distance of all, for messages.
        suspects: frames that a check has found, by its name.
        units: what is known about units and signs; None of data with problems.
        date: when the data were read, if that is remembered.
    """

    type_map: tuple[str, ...]
    rcut: float
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    training: list[SystemScan] = field(default_factory=list)
    validation: list[SystemScan] = field(default_factory=list)
    neighbors: NeighborStatistics | None = None
    num_searched: int = 0
    closest: str = ""
    suspects: dict[str, Suspects] = field(default_factory=dict)
    units: UnitReport | None = None
    date: str = ""

    def raise_problems(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError(self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return problems, notes, warnings and neighbors as JSON values."""
        found: dict[str, Any] = {"problems": self.problems, "notes": self.notes, "warnings": self.warnings}
        for name, value in asdict(self.neighbors).items() if self.neighbors is not None else ():
            if not name.startswith("frame_"):
                found[name] = np.asarray(value).tolist()
        return found

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], type_map: Sequence[str], rcut: float) -> DataReport:
        """Return the report of ``to_dict``, with the date when it was stored."""
        neighbors = NeighborStatistics(
            tuple(stored["max_neighbors"]), np.array(stored["by_rank"]), np.array(stored["nearest"]),
            frame_min=np.empty(0), frame_pair=np.empty((0, 2), np.int64),
        )  # fmt: skip
        notes, warnings, date = list(stored["notes"]), list(stored["warnings"]), stored["date"]
        return cls(tuple(type_map), rcut, [], warnings, notes, neighbors=neighbors, date=date)


def check_systems(
    training: Sequence[FrameSource],
    validation: Sequence[FrameSource],
    type_map: Sequence[str],
    descriptor: DescriptorConfig,
    labels: Sequence[str] = (),
    min_distance: float = MIN_DISTANCE,
    max_searched: int = 20_000,
    task: str = "",
) -> DataReport:
    """Return problems, warnings and a summary of the data; nothing is raised for wrong data.

    Args:
        training: training systems.
        validation: validation systems, may be none.
        type_map: the model's elements.
        descriptor: section of the model, which knows its cutoff and how many neighbors it keeps.
        labels: labels that the loss has a prefactor for.
        min_distance: atoms closer than this, angstrom, are a problem.
        max_searched: largest number of frames whose neighbors are searched; of more frames an even sample is taken.
        task: whose data these are, for warnings; empty in a run of one task.
    """
    report = DataReport(tuple(type_map), descriptor.cutoff)
    report.training = [scan_system(s, len(type_map), descriptor.cutoff) for s in training]
    report.validation = [scan_system(s, len(type_map), descriptor.cutoff) for s in validation]
    every = report.training + report.validation
    # a source whose frames are in both parts is there twice
    report.notes += dict.fromkeys(f"{scan.system.name}: {note}" for scan in every for note in scan.system.notes)
    report.notes += isolated_atom_notes(every, type_map)
    report.problems += [problem for scan in every for problem in scan.problems]
    chosen = _sample(every, max_searched)
    report.num_searched = len(chosen)
    if chosen:
        report.neighbors = neighbor_statistics(_geometries(every, chosen), descriptor.cutoff, len(type_map))
        if math.isfinite(report.neighbors.min_distance):
            k, index = chosen[int(report.neighbors.frame_min.argmin())]
            report.closest = every[k].name_of(index)
        report.problems += _too_close(every, chosen, report.neighbors, min_distance, type_map)
        report.warnings += _too_few_neighbors(descriptor, report.neighbors, type_map)
        report.warnings += _too_few_inside(descriptor, report.neighbors)
    report.problems += _no_labels(report.training, labels)
    report.warnings += _label_warnings(report.training, labels, "training")
    report.warnings += _label_warnings(report.validation, labels, "validation")
    report.warnings += _unread_warnings(every)
    report.warnings += _element_warnings(report, type_map, task)
    copies, shared = find_copies(report.training, report.validation)
    outliers = energy_outliers(report.training, report.validation)
    report.warnings += [found.warning for found in (copies, shared, outliers) if found.warning]
    if not report.problems:  # numbers that are no energies would make it blind
        report.units = judge_units(every, type_map)
        report.warnings += report.units.warnings
    reported = report.units.suspicious if report.units is not None else []
    report.warnings += large_force_warnings(every, reported)
    report.warnings += large_virial_warnings(every, report.units.of_virials if report.units is not None else [])
    report.warnings += shear_ratio_warnings(report.training, report.validation)
    net = net_forces(every)
    report.warnings += [net.warning] * bool(net.warning)
    report.suspects = {COPIES: copies, SHARED: shared, OUTLIERS: outliers, NET_FORCES: net}
    report.warnings = [f"task {task}: {text}" if task else text for text in report.warnings]
    return report


def _sample(scans: Sequence[SystemScan], most: int) -> list[tuple[int, int]]:
    """Return scan and number of all frames whose geometry is valid; of more than ``most`` an even sample, in order."""
    ends = np.cumsum([scan.system.num_frames - len(scan.bad_frames) for scan in scans])
    total = int(ends[-1]) if scans else 0
    places = np.arange(total) if total <= most else np.linspace(0, total - 1, most).round().astype(np.int64)
    chosen: list[tuple[int, int]] = []
    for k, numbers in enumerate(np.split(places, np.searchsorted(places, ends))[:-1]):
        own = numbers - (int(ends[k - 1]) if k else 0)
        if scans[k].bad_frames:
            own = np.delete(np.arange(scans[k].system.num_frames), sorted(scans[k].bad_frames))[own]
        chosen += [(k, index) for index in own.tolist()]
    return chosen


def _geometries(scans: Sequence[SystemScan], chosen: Sequence[tuple[int, int]]) -> Iterator[FrameGeometry]:
    """Yield coordinates, cell and types of the frames ``chosen``, which are sorted."""
    for k, group in groupby(chosen, key=itemgetter(0)):
        frames, system = [index for _, index in group], scans[k].system
        if len(frames) * _FEW < system.num_frames:
            yield from ((f.coord, f.box, f.atom_type) for f in map(system.frame, frames))
            continue
        for chunk in system.chunks((COORD, BOX)):
            start, stop = bisect_left(frames, chunk.first), bisect_left(frames, chunk.first + len(chunk.types))
            for row in (index - chunk.first for index in frames[start:stop]):
                exists = chunk.types[row] >= 0
                box = chunk.arrays[BOX][row].reshape(3, 3) if BOX in chunk.arrays else None
                yield chunk.arrays[COORD][row][exists], box, chunk.types[row][exists]


def _too_close(
    scans: Sequence[SystemScan],
    chosen: Sequence[tuple[int, int]],
    found: NeighborStatistics,
    bound: float,
    type_map: Sequence[str],
) -> list[str]:
    problems: list[str] = []
    counts: Counter[int] = Counter()
    for number in np.flatnonzero(found.frame_min < bound).tolist():
        k, index = chosen[number]
        counts[k] += 1
        if counts[k] > _MAX_MESSAGES:
            continue
        system = scans[k].system
        place, frame = system.where(index, COORD), system.frame(index)
        pair = " and ".join(frame.describe_atom(a, type_map) for a in found.frame_pair[number])
        problems.append(
            f"{place.file}: frame {place.frame} (of {place.num_frames}, from 0): atoms {pair} are "
            f"{found.frame_min[number]:.3f} angstrom apart, expected at least {bound:g}. "
            f"Remove the frame, or set training.training_data.min_pair_dist: {bound:g} leaves such training frames "
            "out, a smaller number accepts them."
        )
    more = {scans[k].system.name: count - _MAX_MESSAGES for k, count in counts.items() if count > _MAX_MESSAGES}
    return problems + [f"{name}: {n} more frames have atoms closer than {bound:g} angstrom" for name, n in more.items()]


def _too_few_neighbors(descriptor: DescriptorConfig, found: NeighborStatistics, type_map: Sequence[str]) -> list[str]:
    kept, option, rcut = descriptor.neighbors, descriptor.neighbors_option, descriptor.cutoff
    if kept is None:
        return []
    needed = list(found.max_neighbors) if len(kept) == len(found.max_neighbors) else [found.max_total]
    if all(n <= most for n, most in zip(needed, kept)):
        return []
    if len(kept) > _MAX_ELEMENTS:
        short = [f"{type_map[k]} {n} (kept: {most})" for k, (n, most) in enumerate(zip(needed, kept)) if n > most]
        return [
            f"{option} is too small: within {rcut:g} angstrom an atom has up to {first_few(short)} "
            f"neighbors, and the farthest are dropped, which makes the energy jump. Use {option} auto."
        ]
    return [_too_small(option, list(kept), needed, rcut, [max(n, most) for n, most in zip(needed, kept)])]


def _too_few_inside(descriptor: DescriptorConfig, found: NeighborStatistics) -> list[str]:
    if not isinstance(descriptor, HasInnerNeighbors):
        return []
    lists = [(option, kept, found.max_within(rcut), rcut) for option, rcut, kept in descriptor.inner_neighbors()]
    return [_too_small(option, kept, most, rcut, most) for option, kept, most, rcut in lists if most > kept]


def _too_small(option: str, kept: object, needed: object, rcut: float, enough: object) -> str:
    """Return a warning about neighbors that a descriptor does not keep; numbers are of all types or one per type."""
    return (
        f"{option} = {kept} is too small: an atom has up to {needed} neighbors within {rcut:g} angstrom, and the "
        f"farthest are dropped, which makes the energy jump. Use {option} {enough} or more, or auto."
    )


def _no_labels(training: Sequence[SystemScan], labels: Sequence[str]) -> list[str]:
    if not labels or any(scan.label_frames.get(label) for scan in training for label in labels):
        return []
    files = ", ".join(f"{LABELS[label].files[0]}.npy" for label in labels)
    return [f"training data: no label of the loss is present in any system ({files}): there is nothing to learn."]


def _label_warnings(scans: Sequence[SystemScan], labels: Sequence[str], kind: str) -> list[str]:
    warnings = []
    for label in labels:
        lacking = {scan: number for scan in scans if (number := _frames_without(scan, label)) > 0}
        file = f"{LABELS[label].files[0]}.npy"
        if scans and not any(s.label_frames.get(label) for s in scans):
            loss = "this term of the loss is left out" if kind == "training" else "its error is not known"
            warnings.append(
                f"no {label} in the {kind} data, but the loss has a prefactor for it: {loss}. "
                f"Add set.*/{file} or set the prefactor to 0."
            )
        elif lacking:
            frames = sum(lacking.values())
            warnings.append(
                f"no {label} in {frames:,} {kind} frames of {len(lacking)} of {len(scans)} systems (first: "
                f"{next(iter(lacking)).system.name}): they do not count in this term of the loss."
            )
    return warnings


def _frames_without(scan: SystemScan, label: str) -> int:
    """Return the number of frames that lack a label which they could have."""
    by_nature = {
        VIRIAL: scan.open_frames,
        FORCE: int(np.count_nonzero(scan.isolated & np.isnan(scan.force_rms))),  # zero; NaN is a missing one
    }
    return scan.system.num_frames - scan.label_frames.get(label, 0) - by_nature.get(label, 0)


def _unread_warnings(scans: Sequence[SystemScan]) -> Iterator[str]:
    """Yield a warning for each kind of parameters that the data have and the model does not take."""
    for name, each in ((FPARAM, "frame"), (APARAM, "atom")):
        if having := [scan.system.name for scan in scans if name in scan.system.unread]:
            yield (
                f"{name} in {len(having)} of {counted(len(scans), 'system')} (first: {having[0]}) is not "
                f"read: model.fitting_net.numb_{name} is 0. Set it to the numbers per {each}, or leave it if the model "
                "shall not depend on them."
            )


def _element_warnings(report: DataReport, type_map: Sequence[str], task: str) -> list[str]:
    if not report.training:
        return []
    trained, validated = (_count_elements(scans, type_map) for scans in (report.training, report.validation))
    warnings = []
    unseen = [name for name, n in zip(type_map, trained) if not n]
    if unseen:
        but = ", but for what other tasks share and train" * bool(task)
        text = f"type_map has {first_few(unseen)}, but no training frame does: their networks stay untrained{but}."
        warnings.append(text)
    only_validated = [name for name, a, b in zip(type_map, trained, validated) if b and not a]
    if only_validated:
        warnings.append(f"validation frames have {first_few(only_validated)}, but no training frame does.")
    return warnings


def _count_elements(scans: Sequence[SystemScan], type_map: Sequence[str]) -> Array:
    return sum((s.type_counts.sum(axis=0) for s in scans), np.zeros(len(type_map), np.int64))
