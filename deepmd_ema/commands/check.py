"""The report of ``dp-ema check``: data, plan and cost of a run before it starts, as text and as
JSON.

The JSON document is described in doc/data.md; keys end with the unit of their numbers. Modules that
load torch are imported where the data are read, so that an input is checked without.
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
from deepmd_ema.errors import YELLOW, DataError, UserError, colored, counted
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
from deepmd_ema.report.table import Cell, Column, Table, duration, facts, render
from deepmd_ema.utils import __version__

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.check.report import DataReport
    from deepmd_ema.data.check.scan import SystemScan
    from deepmd_ema.data.run import TaskLength
    from deepmd_ema.data.split import Split
    from deepmd_ema.training.estimate import Cost

FORMAT = 3  # rises when a key changes its meaning or goes
MAX_ROWS = 12  # of a table; `--json` has all
_MAX_NAME = 24  # letters of the name of a system in a table
_F_RMS, _F_MAX = "force_rms_eV_per_angstrom", "force_max_eV_per_angstrom"
# of the numbers of a TaskLength, in their order
_LENGTH_KEYS = (
    "share_of_steps",
    "epochs",
    "batches_per_epoch",
    "frames_per_step",
    "max_atoms_per_batch",
)
_UNITS = {ENERGY: "eV_per_atom", FORCE: "eV_per_angstrom", VIRIAL: "eV_per_atom"}
_LABEL_COLUMNS = {  # of what is shown of a label: the range of energies, the size of the others
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
    "in_training_and_validation": ("leaks", "first", "validation frames are also training frames"),
    "near_training_frames": ("near copies", "first", "validation frames are near a training frame"),
    "in_training_and_test": ("leaks", "first", "test frames are also training frames"),
    "test_near_training_frames": ("near copies", "first", "test frames are near a training frame"),
    "energy_outliers": ("outliers", "worst", "frames have energies far from the others"),
    "force_outliers": ("large forces", "worst", "frames have forces far larger than the others"),
    "zero_forces": ("zero forces", "first", "frames have no forces"),
    "net_forces": ("net forces", "worst", "frames have forces that do not add up to zero"),
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
        """Read and check the data; errors are kept, those that leave no data to check are raised.

        Raises:
            DataError: if data cannot be opened or split.
        """
        from deepmd_ema.data import run
        from deepmd_ema.data.check.suspects import SHARED_OF, findings_of
        from deepmd_ema.data.split import find_near_copies
        from deepmd_ema.model.build import build_models
        from deepmd_ema.optim.build import describe_groups

        data = run.open_run(self.config)
        self.splits = run.choose_validation(self.config, data, self.config.training.seed or 0)
        data = run.split_off(self.config, data, self.splits)
        self.reports = {
            name: run.check_task(task, data[name]) for name, task in self.config.tasks.items()
        }
        for name, report in self.reports.items():
            is_given = [
                data[name].valid and name not in self.splits,
                data[name].test,
            ]  # a split has no near copies
            if not any(is_given) or report.problems:
                continue
            checks = find_near_copies(data[name], len(report.type_map))
            for (key, shared), is_part in zip(SHARED_OF.items(), is_given):
                if not is_part:
                    continue
                near = report.suspects[key] = checks[key]
                # frames that are training frames have a warning of their own
                if near.num_frames > report.suspects[shared].num_frames:
                    report.findings += with_task(name, findings_of({key: near}))
        if self.problems:
            return
        try:  # what the data and the models say of the run
            self.num_steps, self.tasks, _, self.steps_per = run.run_length(self.config, data)
            neighbors = {
                name: of.neighbors for name, of in self.reports.items() if of.neighbors is not None
            }
            self.config = config = run.with_neighbors(self.config, neighbors)
            models = build_models(
                {name: task.model for name, task in config.tasks.items()}, config.links
            )
            parameters = dict(models.named_parameters())
            self.groups = describe_groups(
                config.optimizer.groups, models.first_names(), parameters, config.source
            )
            self.parameters = sum(
                parameter.numel() for parameter in parameters.values() if parameter.requires_grad
            )
        except UserError as error:
            self._errors = error.findings

    @property
    def problems(self) -> list[Finding]:
        """Errors of the data, and of options that do not fit them."""
        return with_severity(ERROR, self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Findings about input, length of the run, split and data, in the order of messages.

        Notes on the data stand beside their tables.
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
            findings += [finding for finding in report.findings if finding.severity != NOTE]
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
        of = f" of task {task}" if task else ""
        yield ""
        for part, scans in report.parts.items():
            if scans or part == "training":
                yield from _system_table(f"{part.title()} data{of}", scans, report)
        rows = [
            row for row in _elements(report) if row["training_atoms"] or row["validation_atoms"]
        ]
        for row in rows:
            nearest = row["nearest_angstrom"]
            row["nearest"] = "-" if nearest is None else f"{nearest:.3f} ({row['nearest_element']})"
        more = [f"  ... and {len(rows) - MAX_ROWS} more elements"] * (len(rows) > MAX_ROWS)
        if more:
            rows.sort(key=lambda row: -(row[_F_MAX] or 0.0))
        yield from (*render(_table("Elements", _ELEMENT_COLUMNS, rows[:MAX_ROWS]), "  "), *more)
        yield from render(facts(f"Checks of the data{of}", _results(check, task, report)), "  ")


def _system_table(title: str, scans: Sequence[SystemScan], report: DataReport) -> Iterator[str]:
    """Yield the table of systems; of many those with suspicious frames and the largest forces come
    first.
    """
    from deepmd_ema.data.check.scan import Range

    suspects = _suspicious_frames(report)
    frames = sum(scan.system.num_frames for scan in scans)
    atoms = sum(int(scan.type_counts.sum(dtype=np.int64)) for scan in scans)
    size = f"{counted(len(scans), 'system')}, {counted(frames, 'frame')}, {counted(atoms, 'atom')}"
    cells = {
        id(s): {0: "periodic", s.system.num_frames: "open"}.get(s.open_frames, "both")
        for s in scans
    }
    has_several = len(set(cells.values())) > 1
    size += f", {next(iter(cells.values()), '')}" if not has_several else ""
    shown = list(scans)
    if len(shown) > MAX_ROWS:
        shown.sort(
            key=lambda s: (suspects[id(s)], s.ranges[FORCE].size if FORCE in s.ranges else 0.0),
            reverse=True,
        )
        size += "; the most suspicious and those with the largest forces first"
    conditions = [
        name for name in (FPARAM, APARAM) if any(name in scan.conditions for scan in scans)
    ]
    labels = [name for name in _LABEL_COLUMNS if any(name in scan.ranges for scan in scans)]

    columns = {
        "system": Column("system"),
        "frames": Column("frames", "", ",d"),
        "atoms": Column("atoms", "", "s"),
    }
    columns |= {"cell": Column("cell")} if has_several else {}
    columns |= {
        f"{name} {k}": column for name in labels for k, column in enumerate(_LABEL_COLUMNS[name])
    }
    columns |= {name: Column(name) for name in conditions}
    if any(suspects[id(scan)] for scan in scans):
        columns["suspicious"] = Column("suspicious", "frames", "d")

    def numbers_of(of: Sequence[SystemScan]) -> dict[str, Cell]:
        numbers: dict[str, Cell] = {"frames": sum(scan.system.num_frames for scan in of)}
        for name in labels:
            one = Range.of([scan.ranges[name] for scan in of if name in scan.ranges])
            pair = (one.low, one.high) if name == ENERGY else (one.rms, one.size)
            numbers |= {f"{name} {k}": value if one.count else None for k, value in enumerate(pair)}
        return numbers | {"suspicious": sum(suspects[id(scan)] for scan in of)}

    rows = list[dict[str, Cell]]()
    for scan in shown[:MAX_ROWS]:
        name = scan.system.whole.name
        sizes = scan.type_counts.sum(axis=1)
        half = _MAX_NAME // 2 - 1
        row: dict[str, Cell] = {
            "system": name if len(name) <= _MAX_NAME else f"{name[:half]}..{name[-half:]}"
        }
        row["atoms"] = (
            f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()}-{sizes.max()}"
        )
        for name in conditions:
            low, high, numbers = scan.conditions.get(name, (math.nan, math.nan, 0))
            row[name] = (
                f"{low:.4g} to {high:.4g}" + (f" ({numbers} numbers)" if numbers > 1 else "")
                if numbers
                else "-"
            )
        rows.append(row | {"cell": cells[id(scan)]} | numbers_of([scan]))
    if len(scans) > MAX_ROWS:
        rows.append({"system": f"... and {len(scans) - MAX_ROWS} more"})
    if len(scans) > 1:
        rows.append({"system": "all", **numbers_of(scans)})
    yield from render(_table(f"{title}: {size}", columns, rows), "  ")
    for label in dict.fromkeys(
        name for scan in scans for name in scan.label_frames
    ):  # others, or of some frames
        having = sum(scan.label_frames.get(label, 0) for scan in scans)
        if having and (having < frames or label not in (ENERGY, FORCE, VIRIAL)):
            yield f"  {label}: {having:,} of {counted(frames, 'frame')}"


def _table(title: str, columns: Mapping[str, Column], rows: Sequence[Mapping[str, Cell]]) -> Table:
    """Return a table of columns and cells by key; a cell that a row does not have is empty."""
    return Table(
        title, [*columns.values()], [[row.get(key, "") for key in columns] for row in rows]
    )


def _suspicious_frames(report: DataReport) -> dict[int, int]:
    """Return the number of frames that the checks have found in each system, by the identity of its
    scan.
    """
    from deepmd_ema.data.check.suspects import SHARED_OF

    found = {name: one.by_system for name, one in report.suspects.items() if one.by_system}
    for near, shared in SHARED_OF.items():
        if near in found:  # frames that are in both parts are near copies as well
            found[shared] = tuple(map(max, found[shared], found.pop(near)))
    every = enumerate([*report.training, *report.validation, *report.test])
    return {
        id(scan): len(scan.bad_frames) + sum(of[k] for of in found.values()) for k, scan in every
    }


def _results(check: RunCheck, task: str, report: DataReport) -> Iterator[tuple[str, str]]:
    """Yield the name and the result of each check."""
    if task in check.splits:
        yield "split", "; ".join(line.strip() for line in check.splits[task].lines)
        if check.config.training.seed is None:
            yield "", "training.seed is not given: a run draws one, and chooses other frames"
    for key, (name, which, what) in _CHECKS.items():
        found = report.suspects.get(key)
        if found is not None and found.total:
            result = f"{found.num_frames:,} of {found.total:,} {what}"
            yield name, result + (f" ({which}: {found.worst})" if found.worst else "")
    if report.units is not None:
        for number, line in enumerate(report.units.lines()):
            yield "" if number else "units, signs", line
        if report.units.faults:
            systems = counted(len(report.units.faults), "system")
            yield "", f"suspicious: {systems}, see the warnings"
    near = report.neighbors
    if near is not None and math.isfinite(near.min_distance):
        usable = sum(
            s.system.num_frames - len(s.bad_frames) for s in [*report.training, *report.validation]
        )
        seen = (
            f"in {report.num_searched:,} frames, evenly spaced: "
            if report.num_searched < usable
            else ""
        )
        yield (
            "distances",
            f"{seen}the nearest atoms are {near.min_distance:.3f} angstrom apart "
            f"({report.closest})",
        )
        yield "neighbors", f"{seen}at most {near.max_total} within {report.rcut:g} angstrom"
    for text in report.notes:
        yield "note", text


def plan_lines(check: RunCheck) -> list[str]:
    """Return the table of what will be trained, how, and for how long."""
    pairs = config_summary(check.config, check.num_steps, check.steps_per)
    for name, of in check.tasks.items():
        part = (
            f"{name}: {100 * of.share:.3g} % of the steps = {of.epochs:.1f} epochs, "
            if len(check.tasks) > 1
            else ""
        )
        frames = f"{of.frames:.4g} {'frame' if of.frames == 1 else 'frames'} in a step"
        atoms = f"at most {counted(of.max_atoms, 'atom')}" + (
            " in a batch" if check.config.training.accumulate > 1 else ""
        )
        pairs.append(("batch", f"{part}{frames}, {atoms}, in one process"))
    pairs += [("group", line) for line in check.groups]
    if check.parameters is not None:
        pairs.append(("parameters", f"{check.parameters:,} are trained"))
    return ["", *render(facts("Plan", pairs), "  ")]


def cost_lines(check: RunCheck) -> list[str]:
    """Return time and memory, which are known where steps were measured."""
    cost = check.cost
    if cost is None:
        return [
            "",
            *render(
                facts(
                    "Cost", [("time", "not measured, nor is memory; --time measures some steps")]
                ),
                "  ",
            ),
        ]
    end = datetime.now() + timedelta(seconds=cost.total_s)
    step = f"{counted(cost.steps, 'step')} of {_seconds(cost.step_s)}"
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
        parts.append(f"{counted(cost.validations, 'validation')} of {_seconds(cost.validation_s)}")
    parts.append(f"{counted(cost.checkpoints, 'checkpoint')} of {_seconds(cost.checkpoint_s)}")
    on_gpu = f", {_size(cost.gpu_memory_bytes)} of the GPU" if cost.gpu_memory_bytes else ""
    pairs = [
        ("time", f"{duration(cost.total_s)}; started now, it ends at {end:%Y-%m-%d %H:%M}"),
        ("", ", ".join(parts)),
        ("memory", f"{_size(cost.memory_bytes)} at most{on_gpu}"),
    ]
    title = f"Cost on this machine as it is now ({counted(cost.steps_measured, 'step')} measured)"
    return ["", *render(facts(title, pairs), "  ")]


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
    power = min(3, int(math.log10(max(num_bytes, 1)) / 3 + 2e-4))
    number, unit = num_bytes / 1000**power, ("B", "kB", "MB", "GB")[power]
    return f"{number:.2g} {unit}" if number < 10 else f"{number:.0f} {unit}"


def document(
    input_file: str, check: RunCheck | None, problems: Sequence[Finding]
) -> dict[str, Any]:
    """Return the report as JSON values; parts that are not known, because of problems, are null or
    empty.

    Args:
        input_file: as given.
        check: what is known of the run; None if the input has problems.
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
            {"task": name, **dict(zip(_LENGTH_KEYS, of))} for name, of in check.tasks.items()
        ],
        "summary": [
            list(row) for row in config_summary(check.config, check.num_steps, check.steps_per)
        ],
        "input_with_defaults": to_dict(check.config),
    }
    measured = None if check.cost is None else {"total_s": check.cost.total_s, **asdict(check.cost)}
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
    suspects, systems = _suspicious_frames(report), []
    for part, scans in report.parts.items():
        for scan in scans:
            sizes = scan.type_counts.sum(axis=1)
            frames = scan.system.num_frames
            labels = dict[str, Any]()
            for name in (name for name, number in scan.label_frames.items() if number):
                labels[name] = {"frames": scan.label_frames[name]}
                values = scan.ranges.get(name)
                if name in _UNITS and values is not None and values.count:
                    for key, value in (
                        ("min", values.low),
                        ("max", values.high),
                        ("rms", values.rms),
                    ):
                        labels[name][f"{key}_{_UNITS[name]}"] = value
                    labels[name]["largest_in_frame"] = int(scan.system.numbers[values.worst])
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
                "frames": found.num_frames,
                "of_frames": found.total,
                "example": found.worst or None,
            }
            for name, found in report.suspects.items()
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
    every, near = [*report.training, *report.validation], report.neighbors
    for k, name in enumerate(report.type_map):
        training, both = (
            sum(int(s.type_counts[:, k].sum()) for s in scans) for scans in (report.training, every)
        )
        number, squares = (
            sum(float(scan.element_forces[k, column]) for scan in every) for column in (0, 1)
        )
        nearest = (
            near.nearest[k] if near is not None and np.isfinite(near.nearest[k]).any() else None
        )
        yield {
            "element": name,
            "training_atoms": training,
            "validation_atoms": both - training,
            _F_RMS: math.sqrt(squares / number) if number else None,
            _F_MAX: max(float(scan.element_forces[k, 2]) for scan in every) if number else None,
            "nearest_angstrom": float(nearest.min()) if nearest is not None else None,
            "nearest_element": report.type_map[int(nearest.argmin())]
            if nearest is not None
            else None,
            "max_neighbors": int(near.max_neighbors[k]) if near is not None else None,
        }
