"""The report of ``dp-ema check`` as text, section by section."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np

from deepmd_ema.config import config_summary
from deepmd_ema.data.check.report import COPIES, NEAR_COPIES, NET_FORCES, OUTLIERS, SHARED, DataReport
from deepmd_ema.data.check.scan import Range, SystemScan
from deepmd_ema.data.run import UNKNOWN_LENGTH
from deepmd_ema.errors import counted
from deepmd_ema.labels import APARAM, ENERGY, FORCE, FPARAM, LABELS, VIRIAL
from deepmd_ema.report.table import Cell, Column, Table, duration, facts, render
from deepmd_ema.terminal import YELLOW, colored

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.run_check.check import RunCheck

MAX_ROWS = 12  # of a table; `--json` has all
_MAX_NAME = 24  # letters of the name of a system in a table
_LABEL_COLUMNS = {  # of what is shown of a label: the range of energies, the size of the others
    ENERGY: (Column("E min", "eV/atom", ".3f"), Column("E max", "eV/atom", ".3f")),
    FORCE: (Column("F RMS", "eV/Å", ".3f"), Column("F max", "eV/Å", ".2f")),
    VIRIAL: (Column("V RMS", "eV/atom", ".3f"), Column("V max", "eV/atom", ".2f")),
}
_FRAMES = {
    COPIES: ("duplicates", "training frames are copies of others"),
    SHARED: ("leaks", "validation frames are also training frames"),
    NEAR_COPIES: ("near copies", "validation frames are near a training frame"),
    OUTLIERS: ("outliers", "frames have energies far from the others"),
    NET_FORCES: ("net forces", "frames have forces that do not add up to zero"),
}


def data_lines(check: RunCheck) -> Iterator[str]:
    """Yield tables of systems and elements and the results of the checks, task by task."""
    for task, report in check.reports.items():
        of = f" of task {task}" * bool(task)
        yield ""
        yield from system_table(f"Training data{of}", report.training, report)
        if report.validation:
            yield from system_table(f"Validation data{of}", report.validation, report)
        yield from element_table(report)
        yield from render(facts(f"Checks of the data{of}", _results(check, task, report)), "  ")


def system_table(title: str, scans: Sequence[SystemScan], report: DataReport) -> Iterator[str]:
    """Yield the table of systems; of many those with suspicious frames and the largest forces come first."""
    frames = sum(scan.system.num_frames for scan in scans)
    counts = sum((scan.type_counts.sum(axis=0) for scan in scans), np.zeros(len(report.type_map), np.int64))
    size = f"{counted(len(scans), 'system')}, {counted(frames, 'frame')}, {counted(int(counts.sum()), 'atom')}"
    kinds = sorted({_boundaries(scan) for scan in scans})
    size += f", {kinds[0]}" * (len(kinds) == 1)
    suspects = suspicious_frames(report)
    chosen = list(scans)
    if len(chosen) > MAX_ROWS:
        chosen.sort(key=lambda scan: (suspects[id(scan)], _largest_force(scan)), reverse=True)
        size += "; the most suspicious and those with the largest forces first"
    conditions = [name for name in (FPARAM, APARAM) if any(name in scan.conditions for scan in scans)]
    labels = [name for name in _LABEL_COLUMNS if any(name in scan.ranges for scan in scans)]
    columns = [
        Column("system"),
        Column("frames", "", ",d"),
        Column("atoms", "", "s"),
        *[Column("cell")] * (len(kinds) > 1),
        *(column for name in labels for column in _LABEL_COLUMNS[name]),
        *(Column(name) for name in conditions),
        *[Column("suspicious", "frames", "d")] * any(suspects[id(scan)] for scan in scans),
    ]
    rows = [
        [*_cells(scan, kinds), *_label_cells([scan], labels), *_conditions(scan, conditions), suspects[id(scan)]]
        for scan in chosen[:MAX_ROWS]
    ]
    if len(scans) > MAX_ROWS:
        rows.append([f"... and {len(scans) - MAX_ROWS} more", *[""] * (len(columns) - 1)])
    if len(scans) > 1:
        total = sum(suspects[id(scan)] for scan in scans)
        head: list[Cell] = ["all", frames, "", *[""] * (len(kinds) > 1)]
        rows.append([*head, *_label_cells(scans, labels), *[""] * len(conditions), total])
    yield from render(Table(f"{title}: {size}", columns, [row[: len(columns)] for row in rows]), "  ")
    yield from _gaps(scans)


def suspicious_frames(report: DataReport) -> dict[int, int]:
    """Return the number of frames that the checks have found in each system, by the identity of its scan."""
    every = [*report.training, *report.validation]
    found = {name: one.by_system for name, one in report.suspects.items() if one.by_system}
    if NEAR_COPIES in found:  # frames that are in both parts are near copies as well
        found[SHARED] = tuple(map(max, found[SHARED], found.pop(NEAR_COPIES)))
    return {id(scan): len(scan.bad_frames) + sum(of[k] for of in found.values()) for k, scan in enumerate(every)}


def _largest_force(scan: SystemScan) -> float:
    return scan.ranges[FORCE].size if FORCE in scan.ranges else 0.0


def _boundaries(scan: SystemScan) -> str:
    return {0: "periodic", scan.system.num_frames: "open"}.get(scan.open_frames, "both")


def _cells(scan: SystemScan, kinds: Sequence[str]) -> list[Cell]:
    """Return name, frames, atoms and, of several ``kinds`` of boundaries, that of a system."""
    system, sizes = scan.system, scan.type_counts.sum(axis=1)
    atoms = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()}-{sizes.max()}"
    half = _MAX_NAME // 2 - 1
    name = system.name if len(system.name) <= _MAX_NAME else f"{system.name[:half]}..{system.name[-half:]}"
    return [name, system.num_frames, atoms, *[_boundaries(scan)] * (len(kinds) > 1)]


def _label_cells(scans: Sequence[SystemScan], labels: Sequence[str]) -> list[Cell]:
    """Return the cells of the labels of systems together; None where there are none."""
    cells: list[Cell] = []
    for name in labels:
        one = Range.of([scan.ranges[name] for scan in scans if name in scan.ranges])
        known = (one.low, one.high) if name == ENERGY else (one.rms, one.size)
        cells += known if one.count else (None, None)
    return cells


def _conditions(scan: SystemScan, names: Sequence[str]) -> Iterator[str]:
    """Yield the range of frame and atomic parameters."""
    for name in names:
        low, high, numbers = scan.conditions.get(name, (math.nan, math.nan, 0))
        yield f"{low:.4g} to {high:.4g}" + f" ({numbers} numbers)" * (numbers > 1) if numbers else "-"


def _gaps(scans: Sequence[SystemScan]) -> Iterator[str]:
    """Yield other labels, and labels that some frames lack."""
    frames = sum(scan.system.num_frames for scan in scans)
    for name in LABELS:
        having = sum(scan.label_frames.get(name, 0) for scan in scans)
        if having and (having < frames or name not in (ENERGY, FORCE, VIRIAL)):
            yield f"  {name}: {having:,} of {counted(frames, 'frame')}"


def element_table(report: DataReport) -> list[str]:
    """Return the table of elements: atoms, forces, nearest neighbors and numbers of neighbors."""
    parts = [
        sum((scan.type_counts.sum(axis=0, dtype=np.int64) for scan in scans), np.zeros(len(report.type_map), np.int64))
        for scans in (report.training, report.validation)
    ]
    every = [*report.training, *report.validation]
    forces = np.stack([scan.element_forces for scan in every])
    number, squares, largest = forces[..., 0].sum(axis=0), forces[..., 1].sum(axis=0), forces[..., 2].max(axis=0)
    found, names = report.neighbors, report.type_map
    rows: list[list[Cell]] = []
    for k, name in enumerate(names):
        if not any(part[k] for part in parts):
            continue
        row: list[Cell] = [name, *(int(part[k]) for part in parts)]
        row += [math.sqrt(squares[k] / number[k]), largest[k]] if number[k] else [None, None]
        if found is not None and np.isfinite(found.nearest[k]).any():
            other = int(found.nearest[k].argmin())
            row += [f"{found.nearest[k, other]:.3f} ({names[other]})", found.max_neighbors[k]]
        else:
            row += ["-", found.max_neighbors[k] if found is not None else None]
        rows.append(row)
    by_force = sorted(rows, key=lambda row: -(row[4] if isinstance(row[4], float) else 0.0))
    columns = [
        Column("element"), Column("training", "atoms", ",d"), Column("validation", "atoms", ",d"),
        Column("F RMS", "eV/Å", ".3f"), Column("F max", "eV/Å", ".2f"), Column("nearest", "Å"),
        Column("neighbors", "at most", "d"),
    ]  # fmt: skip
    lines = render(Table("Elements", columns, rows if len(rows) <= MAX_ROWS else by_force[:MAX_ROWS]), "  ")
    return lines + [f"  ... and {len(rows) - MAX_ROWS} more elements"] * (len(rows) > MAX_ROWS)


def _results(check: RunCheck, task: str, report: DataReport) -> Iterator[tuple[str, str]]:
    """Yield the name and the result of each check."""
    if task in check.splits:
        yield "split", "; ".join(line.strip() for line in check.splits[task].lines)
        if check.seed_is_drawn:
            yield "", "training.seed is not given: a run draws one, and chooses other frames"
    for key, (name, what) in _FRAMES.items():
        found = report.suspects.get(key)
        if found is not None and found.total:
            result = f"{found.num_frames:,} of {found.total:,} {what}"
            which = "first" if key in (COPIES, SHARED, NEAR_COPIES) else "worst"
            yield name, result + f" ({which}: {found.worst})" * bool(found.worst)
    if report.units is not None:
        first, *more = report.units.lines()
        yield "units, signs", first
        yield from (("", line) for line in more)
        if report.units.suspicious:
            yield "", f"suspicious: {counted(len(report.units.suspicious), 'system')}, see the warnings"
    near = report.neighbors
    if near is not None and math.isfinite(near.min_distance):
        usable = sum(s.system.num_frames - len(s.bad_frames) for s in [*report.training, *report.validation])
        seen = f"in {report.num_searched:,} frames, evenly spaced: " * (report.num_searched < usable)
        yield "distances", f"{seen}the nearest atoms are {near.min_distance:.3f} angstrom apart ({report.closest})"
        yield "neighbors", f"{seen}at most {near.max_total} within {report.rcut:g} angstrom"
    yield from (("note", note) for note in report.notes)


def plan_lines(config: RunConfig, check: RunCheck | None = None) -> list[str]:
    """Return the table of what will be trained, how, and for how long; ``check`` has read the data."""
    length = check.length if check else UNKNOWN_LENGTH
    pairs = config_summary(config, length.num_steps, length.steps_per or None)
    for name, of in length.tasks.items():
        part = f"{name}: {100 * of.share:.3g} % of the steps = {of.epochs:.1f} epochs, " * (len(length.tasks) > 1)
        frames = f"{of.frames:.4g} {'frame' if of.frames == 1 else 'frames'} in a step"
        atoms = f"at most {counted(of.max_atoms, 'atom')}" + " in a batch" * (config.training.accumulate > 1)
        pairs.append(("batch", f"{part}{frames}, {atoms}, in one process"))
    pairs += [("group", line) for line in check.groups] if check else []
    if check and check.sizes is not None:
        pairs.append(("parameters", f"{check.sizes.parameters:,} are trained"))
    return ["", *render(facts("Plan", pairs), "  ")]


def cost_lines(check: RunCheck) -> list[str]:
    """Return time and memory, measured where steps were."""
    pairs: list[tuple[str, str]] = []
    cost, memory = check.cost, check.memory
    if cost is not None:
        end = datetime.now() + timedelta(seconds=cost.total)
        pairs.append(("time", f"{duration(cost.total)}; started now, it ends at {end:%Y-%m-%d %H:%M}"))
        step = f"{counted(cost.num_steps, 'step')} of {_seconds(cost.step)}"
        if cost.new_step > 1.1 * cost.step:
            step += f" ({_seconds(cost.new_step)} in the first epoch, when neighbors are searched)"
        parts = [f"start {_seconds(cost.start)}", step, f"{counted(cost.rows, 'row')} of {_seconds(cost.row)}"]
        if cost.validations:
            parts.append(f"{counted(cost.validations, 'validation')} of {_seconds(cost.validation)}")
        parts.append(f"{counted(cost.checkpoints, 'checkpoint')} of {_seconds(cost.checkpoint)}")
        pairs.append(("", ", ".join(parts)))
        on_gpu = f", {_size(cost.gpu_memory)} of the GPU" if cost.gpu_memory else ""
        pairs.append(("memory", f"{_size(cost.memory)} at most{on_gpu}"))
    elif memory is not None:
        parts = [
            f"{_size(value)} {name}"
            for name, value in zip(("program", "tensors", "neighbor lists", "batch"), memory)
            if value > 0.01 * sum(memory)
        ]
        pairs.append(("memory", f"about {_size(sum(memory))} on a CPU ({', '.join(parts)})"))
        pairs.append(("time", "not measured; --time measures some steps"))
    title = "Cost" if cost is None else f"Cost on this machine as it is now ({counted(cost.measured, 'step')} measured)"
    return ["", *render(facts(title, pairs), "  ")] if pairs else []


def closing_lines(notes: Sequence[str], unused: Sequence[str], warnings: Sequence[str]) -> list[str]:
    """Return notes on the input, options without effect, and warnings, which are numbered."""
    lines = ["", "Notes on the input", *_numbered(notes)] if notes else []
    if unused:
        lines += ["", f"{counted(len(unused), 'option')} without effect", *_numbered(unused)]
    number = colored(counted(len(warnings), "warning"), YELLOW, sys.stdout) if warnings else "No warnings"
    return [*lines, "", number, *_numbered(warnings)]


def _numbered(texts: Iterable[str]) -> list[str]:
    return [f"{number:3d}. {text}" for number, text in enumerate(texts, 1)]


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{value:.2g} s"


def _size(num_bytes: float) -> str:
    """Return bytes in the unit that gives 1 to 999 of it."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5 or unit == "GB":
            break
    return f"{num_bytes:.2g} {unit}" if num_bytes < 10 else f"{num_bytes:.0f} {unit}"
