"""The report of ``dp-ema check``: data, plan and cost of a run before it starts.

It is text or a JSON document, which is described in doc/data.md; keys end with the unit of their
numbers. Modules that load torch are imported where the data are read, so that an input is checked
without.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from deepmd_ema.config import config_summary, config_warnings, ignored_options, to_dict
from deepmd_ema.config.labels import APARAM, ENERGY, FORCE, FPARAM, VIRIAL
from deepmd_ema.errors import DataError, UserError
from deepmd_ema.findings import (
    ERROR,
    NOTE,
    UNUSED,
    WARNING,
    Finding,
    note,
    texts_of,
    warning,
    with_severity,
    with_task,
)
from deepmd_ema.report.table import Cell, Column, Table, duration, render, render_facts
from deepmd_ema.text import YELLOW, colored, counted
from deepmd_ema.utils import __version__

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.check.report import DataReport
    from deepmd_ema.data.check.scan import SystemScan
    from deepmd_ema.data.run import TaskLength
    from deepmd_ema.data.split import Split
    from deepmd_ema.training.estimate import Cost

FORMAT = (
    3  # of the JSON document; it rises when a key is removed or changes its meaning
)
MAX_ROWS = 12  # of a table; `--json` has all
_MAX_NAME = 24  # letters of the name of a system in a table
_F_RMS, _F_MAX = "force_rms_eV_per_angstrom", "force_max_eV_per_angstrom"
# keys of the first numbers of a TaskLength, in their order; its findings are among the warnings
_LENGTH_KEYS = (
    "share_of_steps",
    "epochs",
    "batches_per_epoch",
    "frames_per_step",
    "max_atoms_per_batch",
)
# suffixes of the keys of a label; extensive labels are per atom
_UNITS = {ENERGY: "eV_per_atom", FORCE: "eV_per_angstrom", VIRIAL: "eV_per_atom"}
# Two columns for each label. The zero of energies is arbitrary, so that their range is shown; that
# of forces and virials is not, so that their size is.
_LABEL_COLUMNS = {
    ENERGY: (Column("E min", "eV/atom", ".3f"), Column("E max", "eV/atom", ".3f")),
    FORCE: (Column("F RMS", "eV/Å", ".3f"), Column("F max", "eV/Å", ".2f")),
    VIRIAL: (Column("V RMS", "eV/atom", ".3f"), Column("V max", "eV/atom", ".2f")),
}
_ELEMENT_COLUMNS = {
    "element": Column("element"),
    "training_atoms": Column("training", "atoms", ",d"),
    "validation_atoms": Column("validation", "atoms", ",d"),
    _F_RMS: Column("F RMS", "eV/Å", ".3f"),
    _F_MAX: Column("F max", "eV/Å", ".2f"),
    "nearest": Column("nearest", "Å"),
    "max_neighbors": Column("neighbors", "at most", "d"),
}
# by name of a check: its name in the table, which frame is named, and what the frames are
_CHECKS = {
    "duplicates": ("duplicates", "first", "training frames are copies of others"),
    "in_training_and_validation": (
        "leaks",
        "first",
        "validation frames are also training frames",
    ),
    "near_training_frames": (
        "near copies",
        "first",
        "validation frames are near a training frame",
    ),
    "in_training_and_test": ("leaks", "first", "test frames are also training frames"),
    "test_near_training_frames": (
        "near copies",
        "first",
        "test frames are near a training frame",
    ),
    "energy_outliers": (
        "outliers",
        "worst",
        "frames have energies far from the others",
    ),
    "force_outliers": (
        "large forces",
        "worst",
        "frames have forces far larger than the others",
    ),
    "zero_forces": ("zero forces", "first", "frames have no forces"),
    "net_forces": (
        "net forces",
        "worst",
        "frames have forces that do not add up to zero",
    ),
}


class RunCheck:
    """Facts about a run before it starts; they become known when the data are read.

    Attributes:
        config: of the run; with numbers of neighbors once the data are read.
        splits: validation frames that are split off, by task.
        reports: of the data, by task.
        num_steps: of the run; 0 while it is not known.
        tasks: length of the training of each task; empty while it is not known.
        steps_per: steps of one of ``frames`` and ``epochs``; empty while they are not known.
        groups: of parameters with learning rates of their own, a line each.
        parameters: number of trained parameters; None while it is not known.
        cost: measured; None unless it was requested.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.splits: Mapping[str, Split] = {}
        self.reports: dict[str, DataReport] = {}
        self._errors: list[Finding] = []
        self.num_steps = 0
        self.tasks: Mapping[str, TaskLength] = {}
        self.steps_per: Mapping[str, float] = {}
        self.groups: list[str] = []
        self.parameters: int | None = None
        self.cost: Cost | None = None

    def read_data(self) -> None:
        """Read and check the data.

        Errors of the data are among the findings; errors that leave no data to check are raised.

        Raises:
            DataError: if data cannot be opened or split.
        """
        from deepmd_ema.data import run
        from deepmd_ema.data.check.suspects import SHARED_OF, findings_of
        from deepmd_ema.data.split import find_near_copies
        from deepmd_ema.model.build import build_models
        from deepmd_ema.optim.build import describe_groups

        data = run.open_run(self.config)
        self.splits = run.choose_validation(
            self.config, data, self.config.training.seed or 0
        )
        data = run.split_off(self.config, data, self.splits)
        self.reports = {
            name: run.check_task(self.config, name, data[name])
            for name in self.config.tasks
        }
        for name, report in self.reports.items():
            # near copies are searched in validation data that were given, as a split keeps copies
            # in one part; this is the order of SHARED_OF
            can_have_copies = [
                data[name].valid and name not in self.splits,
                data[name].test,
            ]
            if not any(can_have_copies) or report.problems:
                continue
            checks = find_near_copies(data[name], len(report.type_map))
            for (key, shared), is_searched in zip(SHARED_OF.items(), can_have_copies):
                if not is_searched:
                    continue
                near = report.suspects[key] = checks[key]
                # frames that are equal to training frames are near copies as well, and have a
                # warning of their own
                if near.num_frames > report.suspects[shared].num_frames:
                    report.findings += with_task(name, findings_of({key: near}))
        if self.problems:
            return
        # the rest is known from sound data alone: the length from the number of frames, the models
        # from the number of neighbors (`sel`: "auto")
        try:
            length = run.run_length(self.config, data)
            self.num_steps = length.num_steps
            self.tasks = length.tasks
            self.steps_per = length.steps_per
            neighbors = {
                name: report.neighbors
                for name, report in self.reports.items()
                if report.neighbors is not None
            }
            self.config = config = run.with_neighbors(self.config, neighbors)
            sections = {name: task.model for name, task in config.tasks.items()}
            models = build_models(sections, config.links)
            parameters = dict(models.named_parameters())
            # a parameter that tasks share has the name of its first task, and is counted once
            self.groups = describe_groups(
                config.optimizer.groups, models.first_names(), parameters, config.source
            )
            self.parameters = sum(
                parameter.numel()
                for parameter in parameters.values()
                if parameter.requires_grad
            )
        except (
            UserError
        ) as error:  # options that do not fit the data, such as a batch size
            self._errors = error.findings

    @property
    def problems(self) -> list[Finding]:
        """Errors of the data, and of options that do not fit them."""
        return with_severity(ERROR, self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Findings about input, length of the run, split and data, in the order of messages.

        Notes on the data are beside their tables.
        """
        findings = [note("", text) for text in self.config.notes]
        findings += [Finding(UNUSED, "", text) for text in ignored_options(self.config)]
        remarks = config_warnings(self.config, self.num_steps or None, self.steps_per)
        findings += [warning("", text) for text in remarks]
        for length in self.tasks.values():
            findings += length.findings
        for name, split in self.splits.items():
            findings += with_task(name, split.findings())
        for report in self.reports.values():
            findings += [
                finding for finding in report.findings if finding.severity != NOTE
            ]
        return findings + self._errors

    def raise_problems(self) -> None:
        """Raise the errors of the data.

        Raises:
            DataError: with all of them.
        """
        DataError.raise_if_any(self.problems)


def data_lines(check: RunCheck) -> Iterator[str]:
    """Yield tables of systems and elements and the results of the checks, task by task."""
    for task, report in check.reports.items():
        suffix = f" of task {task}" if task else ""
        yield ""
        for part, scans in report.parts.items():
            if scans or part == "training":
                yield from _system_table(f"{part.title()} data{suffix}", scans, report)
        rows = [
            row
            for row in _elements(report)
            if row["training_atoms"] or row["validation_atoms"]
        ]
        for row in rows:
            nearest = row["nearest_angstrom"]
            row["nearest"] = (
                "-" if nearest is None else f"{nearest:.3f} ({row['nearest_element']})"
            )
        # elements are in the order of type_map; the largest forces come first if some are cut off
        if len(rows) > MAX_ROWS:
            rows.sort(key=lambda row: -(row[_F_MAX] or 0.0))
        yield from render(_table("Elements", _ELEMENT_COLUMNS, rows[:MAX_ROWS]), "  ")
        if len(rows) > MAX_ROWS:
            yield f"  ... and {len(rows) - MAX_ROWS} more elements"
        yield from render_facts(
            f"Checks of the data{suffix}", _results(check, task, report)
        )


def _system_table(
    title: str, scans: Sequence[SystemScan], report: DataReport
) -> Iterator[str]:
    """Yield the table of systems, the most suspicious first if there are many."""
    from deepmd_ema.data.check.scan import Range

    suspects = _suspicious_frames(report)
    frames = sum(scan.system.num_frames for scan in scans)
    atoms = sum(int(scan.type_counts.sum(dtype=np.int64)) for scan in scans)
    size = f"{counted(len(scans), 'system')}, {counted(frames, 'frame')}, {counted(atoms, 'atom')}"
    # by the identity of a scan: whether all of its frames have a cell
    cells = {
        id(s): {0: "periodic", s.system.num_frames: "open"}.get(s.open_frames, "both")
        for s in scans
    }
    # a column only where systems differ; otherwise the title says it
    has_several = len(set(cells.values())) > 1
    size += f", {next(iter(cells.values()), '')}" if not has_several else ""
    shown = list(scans)
    if len(shown) > MAX_ROWS:
        shown.sort(
            key=lambda s: (
                suspects[id(s)],
                s.ranges[FORCE].size if FORCE in s.ranges else 0.0,
            ),
            reverse=True,
        )
        size += "; the most suspicious and those with the largest forces first"
    conditions = [
        name
        for name in (FPARAM, APARAM)
        if any(name in scan.conditions for scan in scans)
    ]
    labels = [
        name for name in _LABEL_COLUMNS if any(name in scan.ranges for scan in scans)
    ]

    columns = {
        "system": Column("system"),
        "frames": Column("frames", "", ",d"),
        "atoms": Column("atoms", "", "s"),
    }
    columns |= {"cell": Column("cell")} if has_several else {}
    columns |= {
        f"{name} {k}": column
        for name in labels
        for k, column in enumerate(_LABEL_COLUMNS[name])
    }
    columns |= {name: Column(name) for name in conditions}
    if any(suspects[id(scan)] for scan in scans):
        columns["suspicious"] = Column("suspicious", "frames", "d")

    # cells of a row about one system, or of the last row about all of them
    def numbers_of(systems: Sequence[SystemScan]) -> dict[str, Cell]:
        numbers: dict[str, Cell] = {
            "frames": sum(scan.system.num_frames for scan in systems)
        }
        for name in labels:
            values = Range.of(
                [scan.ranges[name] for scan in systems if name in scan.ranges]
            )
            pair = (
                (values.low, values.high)
                if name == ENERGY
                else (values.rms, values.size)
            )
            for k, value in enumerate(pair):
                numbers[f"{name} {k}"] = value if values.count else None
        return numbers | {"suspicious": sum(suspects[id(scan)] for scan in systems)}

    rows = list[dict[str, Cell]]()
    for scan in shown[:MAX_ROWS]:
        name = scan.system.whole.name
        if len(name) > _MAX_NAME:  # names are paths, which differ at their ends
            half = _MAX_NAME // 2 - 1
            name = f"{name[:half]}..{name[-half:]}"
        row: dict[str, Cell] = {"system": name}
        # (frames,) atoms of each frame, which differ in systems of mixed type
        sizes = scan.type_counts.sum(axis=1)
        row["atoms"] = (
            f"{sizes.min()}"
            if sizes.min() == sizes.max()
            else f"{sizes.min()}-{sizes.max()}"
        )
        for name in conditions:
            low, high, width = scan.conditions.get(name, (math.nan, math.nan, 0))
            numbers = f" ({width} numbers)" if width > 1 else ""
            row[name] = f"{low:.4g} to {high:.4g}{numbers}" if width else "-"
        rows.append(row | {"cell": cells[id(scan)]} | numbers_of([scan]))
    if len(scans) > MAX_ROWS:
        rows.append({"system": f"... and {len(scans) - MAX_ROWS} more"})
    if len(scans) > 1:
        rows.append({"system": "all", **numbers_of(scans)})
    yield from render(_table(f"{title}: {size}", columns, rows), "  ")
    # a label has a line if it has no columns, or if some frames lack it
    for label in dict.fromkeys(name for scan in scans for name in scan.label_frames):
        labelled = sum(scan.label_frames.get(label, 0) for scan in scans)
        if labelled and (labelled < frames or label not in (ENERGY, FORCE, VIRIAL)):
            yield f"  {label}: {labelled:,} of {counted(frames, 'frame')}"


def _table(
    title: str, columns: Mapping[str, Column], rows: Sequence[Mapping[str, Cell]]
) -> Table:
    """Return a table of columns and cells by key; a cell that a row does not have is empty."""
    return Table(
        title,
        [*columns.values()],
        [[row.get(key, "") for key in columns] for row in rows],
    )


def _suspicious_frames(report: DataReport) -> dict[int, int]:
    """Return the number of suspicious frames of each system, by the identity of its scan."""
    from deepmd_ema.data.check.suspects import SHARED_OF

    # by check, a number for each system in the order of the parts
    counts = {
        name: frames.by_system
        for name, frames in report.suspects.items()
        if frames.by_system
    }
    for near, shared in SHARED_OF.items():
        if (
            near in counts
        ):  # equal frames are among the near copies: they would count twice
            counts[shared] = tuple(map(max, counts[shared], counts.pop(near)))
    scans = [*report.training, *report.validation, *report.test]
    return {
        id(scan): len(scan.bad_frames)
        + sum(by_system[k] for by_system in counts.values())
        for k, scan in enumerate(scans)
    }


def _results(
    check: RunCheck, task: str, report: DataReport
) -> Iterator[tuple[str, str]]:
    """Yield the name and the result of each check."""
    if task in check.splits:
        yield "split", "; ".join(line.strip() for line in check.splits[task].lines)
        if check.config.training.seed is None:
            yield (
                "",
                "training.seed is not given: a run draws one, and chooses other frames",
            )
    for key, (name, which, what) in _CHECKS.items():
        suspects = report.suspects.get(key)
        if (
            suspects is not None and suspects.total
        ):  # without frames to check there is no result
            example = f" ({which}: {suspects.worst})" if suspects.worst else ""
            yield name, f"{suspects.num_frames:,} of {suspects.total:,} {what}{example}"
    if report.units is not None:
        for number, line in enumerate(report.units.lines()):
            yield "" if number else "units, signs", line
        if report.units.faults:
            systems = counted(len(report.units.faults), "system")
            yield "", f"suspicious: {systems}, see the warnings"
    near = report.neighbors
    if near is not None and math.isfinite(near.min_distance):
        # neighbors are searched in the usable frames, or in a sample of large data
        scans = [*report.training, *report.validation]
        usable = sum(scan.system.num_frames - len(scan.bad_frames) for scan in scans)
        seen = ""
        if report.num_searched < usable:
            seen = f"in {report.num_searched:,} frames, evenly spaced: "
        nearest = f"{seen}the nearest atoms are {near.min_distance:.3f} angstrom apart"
        yield "distances", f"{nearest} ({report.closest})"
        yield (
            "neighbors",
            f"{seen}at most {near.max_total} within {report.rcut:g} angstrom",
        )
    for text in report.notes:
        yield "note", text


def plan_lines(check: RunCheck) -> list[str]:
    """Return the table of what will be trained, how, and for how long."""
    pairs = config_summary(check.config, check.num_steps, check.steps_per)
    for name, length in check.tasks.items():
        part = ""
        if len(check.tasks) > 1:
            share = f"{100 * length.share:.3g} % of the steps"
            part = f"{name}: {share} = {length.epochs:.1f} epochs, "
        # a mean, which is no whole number where batches differ in size
        frames = f"{length.frames:.4g} {'frame' if length.frames == 1 else 'frames'} in a step"
        atoms = f"at most {counted(length.max_atoms, 'atom')}"
        if check.config.training.accumulate > 1:  # a step has several batches
            atoms += " in a batch"
        pairs.append(("batch", f"{part}{frames}, {atoms}, in one process"))
    pairs += [("group", line) for line in check.groups]
    if check.parameters is not None:
        pairs.append(("parameters", f"{check.parameters:,} are trained"))
    return ["", *render_facts("Plan", pairs)]


def cost_lines(check: RunCheck) -> list[str]:
    """Return time and memory, which are known where steps were measured."""
    cost = check.cost
    if cost is None:
        pairs = [("time", "not measured, nor is memory; --time measures some steps")]
        return ["", *render_facts("Cost", pairs)]
    end = datetime.now() + timedelta(seconds=cost.total_s)
    step = f"{counted(cost.steps, 'step')} of {_seconds(cost.step_s)}"
    # later epochs take neighbor lists from a cache; less than a tenth is noise
    if cost.step_of_first_epoch_s > 1.1 * cost.step_s:
        step += (
            f" ({_seconds(cost.step_of_first_epoch_s)} in the first epoch, when neighbors are "
            "searched)"
        )
    parts = [
        f"start {_seconds(cost.start_s)}",
        step,
        f"{counted(cost.rows, 'row')} of {_seconds(cost.row_s)}",
    ]
    if cost.validations:
        parts.append(
            f"{counted(cost.validations, 'validation')} of {_seconds(cost.validation_s)}"
        )
    parts.append(
        f"{counted(cost.checkpoints, 'checkpoint')} of {_seconds(cost.checkpoint_s)}"
    )
    on_gpu = (
        f", {_size(cost.gpu_memory_bytes)} of the GPU" if cost.gpu_memory_bytes else ""
    )
    pairs = [
        (
            "time",
            f"{duration(cost.total_s)}; started now, it ends at {end:%Y-%m-%d %H:%M}",
        ),
        ("", ", ".join(parts)),
        ("memory", f"{_size(cost.memory_bytes)} at most{on_gpu}"),
    ]
    title = f"Cost on this machine as it is now ({counted(cost.steps_measured, 'step')} measured)"
    return ["", *render_facts(title, pairs)]


def closing_lines(check: RunCheck) -> list[str]:
    """Return notes on the input, options without effect, and warnings, which are numbered."""
    findings = check.findings
    lines = list[str]()
    for severity in (NOTE, UNUSED, WARNING):
        texts = texts_of(severity, findings)
        title = "Notes on the input"
        if severity == UNUSED:
            title = f"{counted(len(texts), 'option')} without effect"
        elif severity == WARNING:
            title = "No warnings"
            if texts:
                title = colored(counted(len(texts), "warning"), YELLOW, sys.stdout)
        if texts or severity == WARNING:
            numbered = (f"{number:3d}. {text}" for number, text in enumerate(texts, 1))
            lines += ["", title, *numbered]
    return lines


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{value:.2g} s"


def _size(num_bytes: float) -> str:
    """Return bytes in the unit that gives 1 to 999 of it."""
    # 999.5 and more would be rounded to 1000: log10(0.9995) / 3 = -0.7e-4
    power = min(3, int(math.log10(max(num_bytes, 1)) / 3 + 2e-4))
    number = num_bytes / 1000**power
    unit = ("B", "kB", "MB", "GB")[power]
    return f"{number:.2g} {unit}" if number < 10 else f"{number:.0f} {unit}"


def document(
    input_file: str, check: RunCheck | None, problems: Sequence[Finding]
) -> dict[str, Any]:
    """Return the report as JSON values.

    Parts that are not known, because of problems, are null or empty.

    Args:
        input_file: as given.
        check: facts about the run; None if the input has problems.
        problems: errors, those about the input with their places.
    """
    findings = [] if check is None else check.findings
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": __version__,
        "input": input_file,
        "problems": [_problem(problem) for problem in problems],
        "warnings": texts_of(WARNING, findings),
        "without_effect": texts_of(UNUSED, findings),
        "notes": texts_of(NOTE, findings),
        "plan": None,
        "data": [],
        "cost": None,
    }
    if check is None:
        return values
    plan = {
        "num_steps": check.num_steps or check.config.training.numb_steps or None,
        "parameters": check.parameters,
        "tasks": [
            {"task": name, **dict(zip(_LENGTH_KEYS, length))}
            for name, length in check.tasks.items()
        ],
        "summary": [
            list(row)
            for row in config_summary(check.config, check.num_steps, check.steps_per)
        ],
        "input_with_defaults": to_dict(check.config),
    }
    measured = (
        None
        if check.cost is None
        else {"total_s": check.cost.total_s, **asdict(check.cost)}
    )
    return values | {
        "plan": plan,
        "data": [_data(name, report) for name, report in check.reports.items()],
        "cost": {"measured": measured} if check.reports or problems else None,
    }


def _problem(problem: Finding) -> dict[str, Any]:
    """Return message, path and line of an error; errors of data have neither path nor line."""
    # until config yields findings, its messages have attributes
    path = problem.place if problem.file else getattr(problem.text, "path", None)
    line = problem.line or getattr(problem.text, "line", None)
    return {"path": path, "line": line or None, "message": str(problem)}


def _data(task: str, report: DataReport) -> dict[str, Any]:
    suspects = _suspicious_frames(report)
    systems = []
    for part, scans in report.parts.items():
        for scan in scans:
            sizes = scan.type_counts.sum(axis=1)
            frames = scan.system.num_frames
            labels = dict[str, Any]()
            for name, number in scan.label_frames.items():
                if not number:
                    continue
                labels[name] = {"frames": number}
                values = scan.ranges.get(name)
                if name in _UNITS and values is not None and values.count:
                    # JSON has no infinities, which are the range of no values
                    unit = _UNITS[name]
                    labels[name][f"min_{unit}"] = values.low
                    labels[name][f"max_{unit}"] = values.high
                    labels[name][f"rms_{unit}"] = values.rms
                    # numbered as in the source, of which these frames may be a part
                    labels[name]["largest_in_frame"] = int(
                        scan.system.numbers[values.worst]
                    )
            systems.append(
                {
                    "system": scan.system.whole.name,
                    "part": part,
                    "frames": frames,
                    "min_atoms": int(sizes.min()) if len(sizes) else 0,
                    "max_atoms": int(sizes.max(initial=0)),
                    "periodic_frames": frames - scan.open_frames,
                    "suspicious_frames": suspects[id(scan)],
                    "labels": labels,
                }
            )
    units = report.units
    return {
        "task": task,
        "systems": systems,
        "elements": list(_elements(report)),
        "checks": {
            name: {
                "frames": frames.num_frames,
                "of_frames": frames.total,
                "example": frames.worst or None,
            }
            for name, frames in report.suspects.items()
        },
        "units": None
        if units is None
        else {
            "systems": units.num_systems,
            "verified": units.verified,
            "not_verified": {
                name: list(names) for name, names in units.unverified.items() if names
            },
        },
        "nearest_atoms": report.closest or None,
    }


def _elements(report: DataReport) -> Iterator[dict[str, Any]]:
    """Yield atoms, forces, nearest neighbors and numbers of neighbors of each element."""
    scans = [*report.training, *report.validation]
    near = report.neighbors
    for k, name in enumerate(report.type_map):
        # type_counts: (frames, types)
        training = sum(int(scan.type_counts[:, k].sum()) for scan in report.training)
        validation = sum(
            int(scan.type_counts[:, k].sum()) for scan in report.validation
        )
        # element_forces: (types, 3) number of components, sum of their squares, the largest
        forces = [scan.element_forces[k] for scan in scans]
        number = sum(float(row[0]) for row in forces)
        squares = sum(float(row[1]) for row in forces)
        # (types,) distance to the nearest atom of each element; infinite where there is none
        nearest = None
        if near is not None and np.isfinite(near.nearest[k]).any():
            nearest = near.nearest[k]
        yield {
            "element": name,
            "training_atoms": training,
            "validation_atoms": validation,
            _F_RMS: math.sqrt(squares / number) if number else None,
            _F_MAX: max(float(row[2]) for row in forces) if number else None,
            "nearest_angstrom": float(nearest.min()) if nearest is not None else None,
            "nearest_element": report.type_map[int(nearest.argmin())]
            if nearest is not None
            else None,
            "max_neighbors": int(near.max_neighbors[k]) if near is not None else None,
        }
