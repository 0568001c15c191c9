"""Checks of the data before training: problems, warnings and a summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.config.labels import APARAM, ENERGY, FORCE, FPARAM, LABELS, VIRIAL
from deepmd_ema.config.schema.descriptor import HasInnerNeighbors
from deepmd_ema.data.check.identities import UnitReport, judge_units
from deepmd_ema.data.check.scan import SAME_CELL, SystemScan, scan_system
from deepmd_ema.data.check.suspects import (
    SHARED,
    SHARED_TEST,
    Suspects,
    energy_outliers,
    energy_residuals,
    find_copies,
    findings_of,
    force_outliers,
    name_of,
    net_forces,
    odd_forces,
    placeholders,
    shifted_systems,
    zero_forces,
)
from deepmd_ema.data.source import BOX, COORD, FrameSource, FrameSubset, evenly_spaced
from deepmd_ema.errors import DataError
from deepmd_ema.findings import (
    ERROR,
    NOTE,
    WARNING,
    Finding,
    error,
    note,
    texts_of,
    warning,
    with_severity,
    with_task,
)
from deepmd_ema.geometry import FrameGeometry, NeighborStatistics, neighbor_statistics
from deepmd_ema.text import counted, first_few

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor import DescriptorConfig

MIN_DISTANCE = (
    0.3  # angstrom; no two nuclei of a useful frame come closer (H2 has 0.74)
)
_MAX_MESSAGES = 5  # messages of one kind about one system
# a part with fewer than one of so many frames is read frame by frame, not among all frames
_FEW = 16
_MAX_ELEMENTS = 12  # numbers of so many elements in one line


@dataclass
class DataReport:
    """Results of the checks of a data set.

    One that was remembered has findings and neighbors alone.

    Attributes:
        findings: errors are faults that make training impossible, each with file and frame; notes
            are remarks on sources of other formats and on frames of isolated atoms.
        training: scan of each training system.
        validation: scan of each validation system.
        test: scan of each test system.
        neighbors: statistics over the usable frames, or over a sample of them.
        num_searched: number of frames in ``neighbors``.
        closest: the frame with the shortest distance of all, for messages.
        suspects: frames that a check has found, by its name.
        units: judgement of units and signs; None of data with problems.
        date: when the data were read, if that is remembered.
    """

    type_map: tuple[str, ...]
    rcut: float
    findings: list[Finding] = field(default_factory=list)
    training: list[SystemScan] = field(default_factory=list)
    validation: list[SystemScan] = field(default_factory=list)
    test: list[SystemScan] = field(default_factory=list)
    neighbors: NeighborStatistics | None = None
    num_searched: int = 0
    closest: str = ""
    suspects: dict[str, Suspects] = field(default_factory=dict)
    units: UnitReport | None = None
    date: str = ""

    @property
    def parts(self) -> dict[str, list[SystemScan]]:
        """Scans of training, validation and test systems by the name of the part."""
        return {
            "training": self.training,
            "validation": self.validation,
            "test": self.test,
        }

    @property
    def problems(self) -> list[str]:
        """Messages of the errors."""
        return texts_of(ERROR, self.findings)

    @property
    def warnings(self) -> list[str]:
        """Messages of the warnings."""
        return texts_of(WARNING, self.findings)

    @property
    def notes(self) -> list[str]:
        """Messages of the notes."""
        return texts_of(NOTE, self.findings)

    def raise_problems(self) -> None:
        """Raise DataError with all errors, if there are any."""
        DataError.raise_if_any(with_severity(ERROR, self.findings))

    def to_dict(self) -> dict[str, Any]:
        """Return findings, messages of errors and neighbors as JSON values."""
        findings = list(map(astuple, self.findings))
        values: dict[str, Any] = {"problems": self.problems, "findings": findings}
        for name, value in (
            asdict(self.neighbors).items() if self.neighbors is not None else ()
        ):
            if not name.startswith(
                "frame_"
            ):  # arrays of all frames, which messages alone need
                values[name] = np.asarray(value).tolist()
        return values

    @classmethod
    def from_dict(
        cls, stored: Mapping[str, Any], type_map: Sequence[str], rcut: float
    ) -> DataReport:
        """Return the report of ``to_dict``, with the date when it was stored."""
        neighbors = NeighborStatistics(
            tuple(stored["max_neighbors"]),
            np.array(stored["by_rank"]),
            np.array(stored["nearest"]),
            frame_min=np.empty(0),
            frame_pair=np.empty((0, 2), np.int64),
        )
        findings = [Finding(*entry) for entry in stored["findings"]]
        date = stored["date"]
        return cls(tuple(type_map), rcut, findings, neighbors=neighbors, date=date)


def check_systems(
    training: Sequence[FrameSource],
    validation: Sequence[FrameSource],
    type_map: Sequence[str],
    descriptor: DescriptorConfig,
    labels: Sequence[str] = (),
    min_distance: float = MIN_DISTANCE,
    max_searched: int = 20_000,
    task: str = "",
    test: Sequence[FrameSource] = (),
) -> DataReport:
    """Return findings about the data and a summary; nothing is raised for wrong data.

    Args:
        training: training systems.
        validation: validation systems, may be none.
        type_map: the model's elements.
        descriptor: section of the model, which knows its cutoff and how many neighbors it keeps.
        labels: labels that the loss has a prefactor for.
        min_distance: atoms closer than this, angstrom, are a problem.
        max_searched: largest number of frames whose neighbors are searched; of more frames an even
            sample is taken.
        task: whose data these are, for warnings; empty in a run of one task.
        test: test systems, of which neighbors are not counted: nothing in a run depends on them.
    """
    report = DataReport(tuple(type_map), descriptor.cutoff)
    for scans, systems in zip(report.parts.values(), (training, validation, test)):
        scans += [scan_system(s, len(type_map), descriptor.cutoff) for s in systems]
    # nothing in a run depends on test data, such as the number of neighbors (sel: auto)
    in_run = report.training + report.validation
    every = in_run + report.test
    # a source whose frames are split between parts has two scans with the same notes
    remarks = (
        note(scan.system.whole.name, f": {text}")
        for scan in every
        for text in scan.system.notes
    )
    # energies of test data are not proposed for the model
    findings = [*dict.fromkeys(remarks), *_isolated_atom_notes(in_run, type_map)]
    for scan in every:
        findings += scan.findings()
    for scans in (in_run, report.test):
        # neighbors in the frames whose geometry is valid, or of an even sample of them
        usable = [
            np.delete(np.arange(scan.system.num_frames), sorted(scan.bad_frames))
            for scan in scans
        ]
        searched = evenly_spaced(
            [FrameSubset(s.system, frames) for s, frames in zip(scans, usable)],
            max_searched,
        )
        frames = [
            (part, index) for part in searched for index in range(part.num_frames)
        ]
        if not frames:
            continue
        near = neighbor_statistics(
            _geometries(searched), descriptor.cutoff, len(type_map)
        )
        if near.min_distance < min_distance:
            findings += _too_close(frames, near, min_distance, type_map)
        # a warning about neighbors of training data is not repeated for test data
        if not any(finding.severity == WARNING for finding in findings):
            findings += _neighbor_warnings(descriptor, near, type_map)
        if scans is in_run:
            report.neighbors, report.num_searched = near, len(frames)
            if math.isfinite(near.min_distance):
                report.closest = name_of(searched, int(near.frame_min.argmin()))
    has_labels = any(
        scan.label_frames.get(label) for scan in report.training for label in labels
    )
    if labels and not has_labels:
        findings.append(_nothing_to_learn(report.training, labels))
    else:
        for part, scans in report.parts.items():
            findings += _label_warnings(scans, labels, part)
    findings += _unread_warnings(every)
    has_virials = any(VIRIAL in scan.label_frames for scan in report.training)
    if (ENERGY in labels or FORCE in labels) and not has_virials:
        findings += _pressure_notes(report.training)
    findings += _element_warnings(report, task)
    for scan in every:
        findings += placeholders(scan, labels)
    # outliers are found before units are judged, which leaves them out
    residuals = energy_residuals(report.training, report.validation + report.test)
    if len(every) > 1:
        findings += shifted_systems(every, residuals)
    copies = find_copies(report.training, report.validation, report.test)
    report.suspects = {
        **dict(zip(("duplicates", SHARED, SHARED_TEST), copies)),
        "energy_outliers": energy_outliers(every, residuals),
        "force_outliers": force_outliers(every, type_map),
        "zero_forces": zero_forces(every),
        "net_forces": net_forces(every),
    }
    findings += findings_of(report.suspects)
    # energies that are not finite would hide a wrong unit of others
    if not any(scan.faults for scan in every):
        report.units = judge_units(every, type_map)
        findings += report.units.findings()
        judged = [
            scan for scan in every if scan.system.whole.name not in report.units.faults
        ]
        findings += odd_forces(judged, type_map)
    for finding in findings:
        # errors and notes name files, which show the task that they belong to
        is_warning = finding.severity == WARNING
        report.findings += with_task(task if is_warning else "", [finding])
    return report


def _geometries(sources: Sequence[FrameSource]) -> Iterator[FrameGeometry]:
    """Yield coordinates, cell and types of all frames."""
    for source in sources:
        if source.num_frames * _FEW < source.whole.num_frames:
            for frame in map(source.frame, range(source.num_frames)):
                yield frame.coord, frame.box, frame.atom_type
            continue
        for chunk in source.chunks((COORD, BOX)):
            for row, types in enumerate(chunk.types):
                box = (
                    chunk.arrays[BOX][row].reshape(3, 3)
                    if BOX in chunk.arrays
                    else None
                )
                yield chunk.arrays[COORD][row][types >= 0], box, types[types >= 0]


def _too_close(
    frames: Sequence[tuple[FrameSource, int]],
    near: NeighborStatistics,
    bound: float,
    type_map: Sequence[str],
) -> Iterator[Finding]:
    """Yield errors about the first frames with atoms closer than ``bound``, angstrom."""
    counts = Counter[str]()
    for number in np.flatnonzero(near.frame_min < bound).tolist():
        source, index = frames[number]
        counts[source.name] += 1
        if counts[source.name] > _MAX_MESSAGES:
            continue
        place = source.where(index, COORD)
        frame = source.frame(index)
        pair = " and ".join(
            frame.describe_atom(a, type_map) for a in near.frame_pair[number]
        )
        yield error(
            place.file,
            f": frame {place.frame} (of {place.num_frames}, from 0): atoms {pair} are "
            f"{near.frame_min[number]:.3f} angstrom apart, expected at least {bound:g}. "
            f"Remove the frame, or set training.training_data.min_pair_dist: {bound:g} "
            "leaves such training frames out, a smaller number accepts them.",
        )
    for name, number in counts.items():
        more = number - _MAX_MESSAGES
        if more > 0:
            yield error(
                name, f": {more} more frames have atoms closer than {bound:g} angstrom"
            )


def _neighbor_warnings(
    descriptor: DescriptorConfig, near: NeighborStatistics, type_map: Sequence[str]
) -> Iterator[Finding]:
    """Yield warnings about neighbors that a descriptor leaves out."""
    # option, its value, the neighbors that atoms have (of all types, or of each type), the cutoff,
    # and a value that is enough
    small = list[tuple[str, Any, Any, float, Any]]()
    jumps = "the farthest are dropped, which makes the energy jump"
    if (limits := descriptor.neighbors) is not None:
        option = descriptor.neighbors_option
        rcut = descriptor.cutoff
        by_type = len(limits) == len(near.max_neighbors)
        needed = list(near.max_neighbors) if by_type else [near.max_total]
        short = [
            (k, n, most) for k, (n, most) in enumerate(zip(needed, limits)) if n > most
        ]
        if short and len(limits) > _MAX_ELEMENTS:
            names = first_few(
                [f"{type_map[k]} {n} (kept: {most})" for k, n, most in short]
            )
            yield warning(
                option,
                f" is too small: within {rcut:g} angstrom an atom has up to {names} neighbors, "
                f"and {jumps}. Use {option} auto.",
            )
        elif short:
            small.append(
                (option, list(limits), needed, rcut, list(map(max, needed, limits)))
            )
    if isinstance(descriptor, HasInnerNeighbors):
        lists = [
            (option, limit, near.max_within(rcut), rcut)
            for option, rcut, limit in descriptor.inner_neighbors()
        ]
        small += [
            (option, limit, most, rcut, most)
            for option, limit, most, rcut in lists
            if most > limit
        ]
    for option, limit, needs, rcut, enough in small:
        yield warning(
            option,
            f" = {limit} is too small: an atom has up to {needs} neighbors "
            f"within {rcut:g} angstrom, and {jumps}. Use {option} {enough} or more, or auto.",
        )


def _nothing_to_learn(scans: Sequence[SystemScan], labels: Sequence[str]) -> Finding:
    """Return an error about training data without a label of the loss.

    It names the options with which the loss learns the labels that the data have.
    """
    # files that the loss could learn from, and then labels that the data have
    files = ", ".join(f"{LABELS[label].files[0]}.npy" for label in labels)
    text = f": no label of the loss is present in any system ({files}): there is nothing to learn."
    for name in dict.fromkeys(name for scan in scans for name in scan.label_frames):
        label = LABELS[name]
        options = "pref_atomic" if label.per_atom else "pref"
        if label.symbol:
            options = f"start_pref_{label.symbol} and limit_pref_{label.symbol}"
        elif (
            not label.unit
        ):  # weights of frames, and properties of atoms, which no loss learns
            continue
        text += f" {label.files[0]}.npy is there: the loss learns it with {options} above 0."
    folder = scans[0].system.whole.name
    # files whose names are not those of a label
    unread = {path.name for path in Path(folder).glob("set.*/*.npy")} - {
        "coord.npy",
        "box.npy",
    }
    if unread and not scans[0].label_frames:
        text += f" {folder} has {', '.join(sorted(unread))}."
    return error("training data", text)


def _label_warnings(
    scans: Sequence[SystemScan], labels: Sequence[str], kind: str
) -> Iterator[Finding]:
    """Yield warnings about labels of the loss that frames of a ``kind`` lack."""
    for label in labels:
        lacking = []  # systems, and their frames without a label that they could have
        for scan in scans:
            # frames that cannot have a label, or need none: open frames have no virial, and forces
            # of isolated atoms are zero (NaN where the file has none)
            by_nature = {
                VIRIAL: scan.open_frames,
                FORCE: int((scan.isolated & np.isnan(scan.force_rms)).sum()),
            }
            number = scan.system.num_frames - scan.label_frames.get(label, 0)
            number -= by_nature.get(label, 0)
            if number > 0:
                lacking.append((scan.system.name, number))
        if scans and not any(s.label_frames.get(label) for s in scans):
            loss = (
                "this term of the loss is left out"
                if kind == "training"
                else "its error is not known"
            )
            yield warning(
                "",
                f"no {label} in the {kind} data, but the loss has a prefactor for it: {loss}. "
                f"Add set.*/{LABELS[label].files[0]}.npy or set the prefactor to 0.",
            )
        elif lacking:
            number = sum(number for _, number in lacking)
            yield warning(
                "",
                f"no {label} in {number:,} {kind} frames of {len(lacking)} of {len(scans)} systems "
                f"(first: {lacking[0][0]}): they do not count in this term of the loss.",
            )


def _pressure_notes(scans: Sequence[SystemScan]) -> Iterator[Finding]:
    """Yield a note if nothing in the training data says how energies change with the cell."""
    # with one cell the model has no data on how energies change with it, however good its forces
    cells = []
    for scan in scans:
        if BOX in scan.varying:
            return
        if BOX in scan.first:
            cells.append(scan.first[BOX])
    if cells and np.ptp(cells, axis=0).max() <= SAME_CELL:
        yield note(
            "",
            "no virials, and one cell in all training frames: pressures and stresses of the model "
            "mean nothing. Use it at constant volume, or train it with virials or frames of other "
            "volumes.",
        )


def _unread_warnings(scans: Sequence[SystemScan]) -> Iterator[Finding]:
    """Yield warnings about frame and atomic parameters that the model does not read."""
    for name, each in ((FPARAM, "frame"), (APARAM, "atom")):
        systems = [scan.system.name for scan in scans if name in scan.system.unread]
        if systems:
            yield warning(
                name,
                f" in {len(systems)} of {counted(len(scans), 'system')} (first: {systems[0]}) "
                f"is not read: model.fitting_net.numb_{name} is 0. Set it to the numbers "
                f"per {each}, or leave it if the model shall not depend on them.",
            )


def _element_warnings(report: DataReport, task: str) -> Iterator[Finding]:
    """Yield warnings about elements that no training frame has."""
    if not report.training:
        return
    no_atoms = np.zeros(len(report.type_map), np.int64)
    counts = {
        part: sum((scan.type_counts.sum(axis=0) for scan in scans), no_atoms)
        for part, scans in report.parts.items()
    }
    trained = counts.pop("training")  # (T,) atoms of each element
    if unseen := [name for name, number in zip(report.type_map, trained) if not number]:
        but = ", but for what other tasks share and train" if task else ""
        text = "but no training frame does: their networks stay untrained"
        yield warning("type_map", f" has {first_few(unseen)}, {text}{but}.")
    for part, atoms in counts.items():
        if untrained := [
            name for name, a, b in zip(report.type_map, trained, atoms) if b and not a
        ]:
            text = f"{part} frames have {first_few(untrained)}, but no training frame does."
            yield warning("", text)


def _isolated_atom_notes(
    scans: Sequence[SystemScan], type_map: Sequence[str]
) -> Iterator[Finding]:
    """Yield a note with the energies of isolated atoms, if any, as an option of the model."""
    lowest = dict[int, float]()
    first = ""
    number = 0
    for scan in scans:
        for frame in np.flatnonzero(scan.isolated & np.isfinite(scan.energy)).tolist():
            # several calculations of one atom: the ground state counts
            element = int(scan.type_counts[frame].argmax())
            lowest[element] = min(
                lowest.get(element, math.inf), float(scan.energy[frame])
            )
            first = first or name_of([scan.system], frame)
            number += 1
    energies = ", ".join(
        f"{lowest[k]:.10g}" if k in lowest else "null" for k in range(len(type_map))
    )
    if number:
        yield note(
            "",
            f"{counted(number, 'frame')} of one isolated atom (first: {first}): trained on "
            "like the others, and they fix energies of elements that compositions leave open. "
            f"To give the model exactly these, set model.fitting_net.atom_ener = [{energies}] "
            "(eV; needs set_davg_zero and many more steps: the network then has to learn "
            "the whole binding energy).",
        )
