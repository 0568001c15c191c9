"""Checks of the data before training: problems, warnings and a summary."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepmd_ema.data.check.heuristics import duplicate_warnings, energy_outliers, net_force_warnings, unit_warnings
from deepmd_ema.data.check.scan import Range, SystemScan, scan_system
from deepmd_ema.data.source import BOX, COORD, FrameSource
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import FrameGeometry, NeighborStatistics, neighbor_statistics
from deepmd_ema.labels import ENERGY, LABELS, VIRIAL

MIN_DISTANCE = 0.3  # angstrom; no two nuclei of a useful frame come closer (H2 has 0.74)
_MOST_MESSAGES = 5  # of one kind and system
_MOST_ROWS = 20  # systems in the table


@dataclass
class DataReport:
    """What the checks found.

    Attributes:
        problems: faults that make training impossible, each with file and frame.
        warnings: what a user should look at.
        training: scan of each training system.
        validation: scan of each validation system.
        neighbors: statistics over the usable frames, or over a sample of them.
        num_searched: number of frames in ``neighbors``.
        closest: the frame with the shortest distance of all, for messages.
    """

    type_map: tuple[str, ...]
    rcut: float
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    training: list[SystemScan] = field(default_factory=list)
    validation: list[SystemScan] = field(default_factory=list)
    neighbors: NeighborStatistics | None = None
    num_searched: int = 0
    closest: str = ""

    def raise_problems(self) -> None:
        """Raise DataError with all problems, if there are any."""
        if self.problems:
            raise DataError(self.problems)

    def lines(self) -> list[str]:
        """Return the summary as lines of text, without problems and warnings."""
        out = _table("Training data", self.training, self.type_map)
        if self.validation:
            out += _table("Validation data", self.validation, self.type_map)
        return out + self._neighbor_lines()

    def _neighbor_lines(self) -> list[str]:
        if self.neighbors is None:
            return []
        names, nearest = self.type_map, self.neighbors.nearest
        pairs = [
            f"{names[a]}-{names[b]} {nearest[a, b]:.3f}"
            for a in range(len(names))
            for b in range(a, len(names))
            if math.isfinite(nearest[a, b])
        ]
        most = [f"{n} {name}" for n, name in zip(self.neighbors.max_neighbors, names)]
        seen = f" (in {self.num_searched:,} frames, evenly taken)" if self._is_sampled() else ""
        most.append(f"{self.neighbors.max_total} together")
        where = f" (closest: {self.closest})" if self.closest else ""
        return [
            f"Nearest pairs{seen}: {', '.join(pairs) or 'none within the cutoff'} angstrom{where}",
            f"Most neighbors within {self.rcut:g} angstrom{seen}: {', '.join(most)}",
        ]

    def _is_sampled(self) -> bool:
        scans = self.training + self.validation
        return self.num_searched < sum(s.system.num_frames - len(s.bad_frames) for s in scans)


def check_systems(
    training: Sequence[FrameSource],
    validation: Sequence[FrameSource],
    type_map: Sequence[str],
    rcut: float,
    labels: Sequence[str] = (),
    min_distance: float | None = None,
    sel: Sequence[int] | None = None,
    max_searched: int = 20_000,
) -> DataReport:
    """Return problems, warnings and a summary of the data; nothing is raised for wrong data.

    Args:
        training: training systems.
        validation: validation systems, may be none.
        type_map: the model's elements.
        rcut: cutoff radius, angstrom.
        labels: labels that the loss has a prefactor for.
        min_distance: atoms closer than this, angstrom, are a problem; None for 0.3.
        sel: most neighbors that the model keeps, one number per element or one for all; None if not yet chosen.
        max_searched: largest number of frames whose neighbors are searched; of more frames an even sample is taken.
    """
    report = DataReport(tuple(type_map), rcut)
    report.training = [scan_system(s, len(type_map)) for s in training]
    report.validation = [scan_system(s, len(type_map)) for s in validation]
    every = report.training + report.validation
    for scan in every:
        report.problems += scan.problems
    chosen = _choose_frames(every, max_searched)
    report.num_searched = len(chosen)
    if chosen:
        report.neighbors = neighbor_statistics(_geometries(every, chosen), rcut, len(type_map))
        if math.isfinite(report.neighbors.min_distance):
            k, index = chosen[int(report.neighbors.frame_min.argmin())]
            report.closest = f"{every[k].system.name} frame {index}"
        bound = MIN_DISTANCE if min_distance is None else min_distance
        report.problems += _too_close(every, chosen, report.neighbors, bound, type_map)
        report.warnings += _sel_warnings(sel, report.neighbors, rcut)
    report.problems += _no_labels(report.training, labels)
    report.warnings += _label_warnings(report.training, labels, "training")
    report.warnings += _label_warnings(report.validation, labels, "validation")
    report.warnings += _element_warnings(report, type_map)
    report.warnings += duplicate_warnings(report.training, report.validation)
    report.warnings += energy_outliers(report.training, report.validation)
    report.warnings += unit_warnings(every)
    report.warnings += net_force_warnings(every)
    return report


def _choose_frames(scans: Sequence[SystemScan], most: int) -> list[tuple[int, int]]:
    """Return (system, frame) of the frames to search neighbors in, without frames of broken geometry."""
    usable = [(k, i) for k, scan in enumerate(scans) for i in range(scan.system.num_frames) if i not in scan.bad_frames]
    if len(usable) <= most:
        return usable
    return [usable[int(i)] for i in np.linspace(0, len(usable) - 1, most).round()]


def _geometries(scans: Sequence[SystemScan], chosen: Sequence[tuple[int, int]]) -> Iterator[FrameGeometry]:
    """Yield coordinates, cell and types of the frames ``chosen``, which are sorted."""
    frames_of: dict[int, list[int]] = {}
    for k, index in chosen:
        frames_of.setdefault(k, []).append(index)
    for k, frames in frames_of.items():
        for chunk in scans[k].system.chunks((COORD, BOX)):
            start, stop = bisect_left(frames, chunk.first), bisect_left(frames, chunk.first + chunk.num_frames)
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
    counts: dict[int, int] = {}
    for number in np.flatnonzero(found.frame_min < bound).tolist():
        k, index = chosen[number]
        counts[k] = counts.get(k, 0) + 1
        if counts[k] > _MOST_MESSAGES:
            continue
        system = scans[k].system
        place, frame = system.where(index, COORD), system.frame(index)
        atoms = [
            (a if frame.file_index is None else frame.file_index[a], type_map[frame.atom_type[a]])
            for a in found.frame_pair[number]
        ]
        pair = " and ".join(f"{a} ({element})" for a, element in atoms)
        problems.append(
            f"{place.file}: frame {place.frame} (of {place.num_frames}, from 0): atoms {pair} are "
            f"{found.frame_min[number]:.3f} angstrom apart, expected at least {bound:g}. "
            "Remove the frame or, if it is meant, lower training.training_data.min_pair_dist."
        )
    more = {scans[k].system.name: count - _MOST_MESSAGES for k, count in counts.items() if count > _MOST_MESSAGES}
    return problems + [f"{name}: {n} more frames have atoms closer than {bound:g} angstrom" for name, n in more.items()]


def _sel_warnings(sel: Sequence[int] | None, found: NeighborStatistics, rcut: float) -> list[str]:
    if sel is None:
        return []
    needed = list(found.max_neighbors) if len(sel) == len(found.max_neighbors) else [found.max_total]
    if all(n <= s for n, s in zip(needed, sel)):
        return []
    enough = [max(n, s) for n, s in zip(needed, sel)]
    return [
        f"sel = {list(sel)} is too small: an atom has up to {needed} neighbors within {rcut:g} angstrom, and the "
        f"farthest are dropped, which makes the energy jump. Use sel {enough} or more, or auto."
    ]


def _no_labels(training: Sequence[SystemScan], labels: Sequence[str]) -> list[str]:
    if not labels or any(scan.label_frames.get(label) for scan in training for label in labels):
        return []
    files = ", ".join(f"{LABELS[label].files[0]}.npy" for label in labels)
    return [f"training data: no label of the loss is present in any system ({files}): there is nothing to learn."]


def _label_warnings(scans: Sequence[SystemScan], labels: Sequence[str], kind: str) -> list[str]:
    warnings = []
    for label in labels:
        # an open frame has no virial by nature
        lacking = [
            s for s in scans if s.label_frames.get(label, 0) < s.system.num_frames - s.open_frames * (label == VIRIAL)
        ]
        file = f"{LABELS[label].files[0]}.npy"
        if scans and not any(s.label_frames.get(label) for s in scans):
            loss = "this term of the loss is left out" if kind == "training" else "its error is not known"
            warnings.append(
                f"no {label} in the {kind} data, but the loss has a prefactor for it: {loss}. "
                f"Add set.*/{file} or set the prefactor to 0."
            )
        elif lacking:
            frames = sum(s.system.num_frames - s.label_frames.get(label, 0) for s in lacking)
            warnings.append(
                f"no {label} in {frames:,} {kind} frames of {len(lacking)} of {len(scans)} systems (first: "
                f"{lacking[0].system.name}): they do not count in this term of the loss."
            )
    return warnings


def _element_warnings(report: DataReport, type_map: Sequence[str]) -> list[str]:
    if not report.training:
        return []
    trained, validated = (
        sum((s.type_counts.sum(axis=0) for s in scans), np.zeros(len(type_map), np.int64))
        for scans in (report.training, report.validation)
    )
    warnings = []
    unseen = [name for name, n in zip(type_map, trained) if not n]
    if unseen:
        warnings.append(f"type_map has {', '.join(unseen)}, but no training frame does: their networks stay untrained.")
    only_validated = [name for name, a, b in zip(type_map, trained, validated) if b and not a]
    if only_validated:
        warnings.append(f"validation frames have {', '.join(only_validated)}, but no training frame does.")
    return warnings


def _table(title: str, scans: Sequence[SystemScan], type_map: Sequence[str]) -> list[str]:
    frames = sum(s.system.num_frames for s in scans)
    counts = sum((s.type_counts.sum(axis=0) for s in scans), np.zeros(len(type_map), np.int64))
    elements = ", ".join(f"{name} {n:,}" for name, n in zip(type_map, counts))
    plural = "system" if len(scans) == 1 else "systems"
    out = [f"{title}: {len(scans)} {plural}, {frames:,} frames, {int(counts.sum()):,} atoms ({elements})"]
    width = max((len(s.system.name) for s in scans[:_MOST_ROWS]), default=0)
    for scan in scans[:_MOST_ROWS]:
        system = scan.system
        sizes = scan.type_counts.sum(axis=1)
        atoms = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()}-{sizes.max()}"
        cell = {0: "periodic", system.num_frames: "open"}.get(scan.open_frames, "both")
        out.append(
            f"  {system.name:<{width}}  {system.num_frames:>6,} frames  {atoms:>4} atoms  {cell:<8}  "
            f"{', '.join(_label_text(scan, label) for label in scan.label_frames) or 'no labels'}"
        )
    if len(scans) > _MOST_ROWS:
        out.append(f"  ... and {len(scans) - _MOST_ROWS} more systems")
    return out + [line for label in LABELS if (line := _range_line(scans, label))]


def _label_text(scan: SystemScan, label: str) -> str:
    have = scan.label_frames[label]
    return label if have == scan.system.num_frames else f"{label} ({have:,} frames)"


def _range_line(scans: Sequence[SystemScan], label: str) -> str:
    labelled = [s for s in scans if label in s.ranges and s.ranges[label].count]
    if not labelled:
        return ""
    total = Range()
    for scan in labelled:
        total.merge(scan.ranges[label])
    worst = max(labelled, key=lambda s: s.ranges[label].largest)
    where = f"{worst.system.name} frame {worst.ranges[label].largest_frame}"
    unit = LABELS[label].unit + "/atom" * LABELS[label].extensive
    rms = f", RMS {total.rms:.4g}" if label != ENERGY else ""
    return f"  {label:<6} {total.low:.6g} to {total.high:.6g} {unit}{rms} (largest: {where})"
