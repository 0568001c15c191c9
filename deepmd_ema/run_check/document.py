"""The report of ``dp-ema check --json``, described in doc/check.md; keys end with the unit of their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from deepmd_ema.config import config_summary, config_warnings, ignored_options, to_dict
from deepmd_ema.config.messages import Message
from deepmd_ema.data.run import RunLength
from deepmd_ema.labels import ENERGY, FORCE, LABELS, VIRIAL
from deepmd_ema.version import __version__

if TYPE_CHECKING:
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.check.report import DataReport
    from deepmd_ema.data.check.scan import Range, SystemScan
    from deepmd_ema.run_check.check import RunCheck

FORMAT = 2  # rises when a key changes its meaning or goes
_UNITS = {ENERGY: "eV_per_atom", FORCE: "eV_per_angstrom", VIRIAL: "eV_per_atom"}


def document(
    input_file: str, config: RunConfig | None, check: RunCheck | None, problems: Sequence[str]
) -> dict[str, Any]:
    """Return the report as JSON values; parts that are not known, because of problems, are null or empty.

    Args:
        input_file: as given.
        config: of the run; None if the input has problems.
        check: what is known of the data; None if they were not read.
        problems: messages, those about the input with their places.
    """
    used = check.config if check is not None else config
    warnings, unused = [], []
    if config is not None:
        unused = ignored_options(config)
        warnings = check.warnings if check is not None else config_warnings(config)
    return {
        "format": FORMAT,
        "version": __version__,
        "input": input_file,
        "problems": [_problem(text) for text in problems],
        "warnings": warnings,
        "without_effect": unused,
        "notes": list(config.notes) if config is not None else [],
        "plan": _plan(used, check) if used is not None else None,
        "data": [_data(name, report) for name, report in check.reports.items()] if check is not None else [],
        "cost": _cost(check) if check is not None else None,
    }


def _problem(text: str) -> dict[str, Any]:
    at = text if isinstance(text, Message) else None
    return {"path": at.path if at else None, "line": at.line or None if at else None, "message": str(text)}


def _plan(config: RunConfig, check: RunCheck | None) -> dict[str, Any]:
    length = check.length if check is not None else RunLength(config.training.numb_steps or 0, {}, {})
    sizes = check.sizes if check is not None else None
    return {
        "num_steps": length.num_steps or None,
        "parameters": sizes.parameters if sizes is not None else None,
        "tasks": [
            {
                "task": name,
                "share_of_steps": of.share,
                "epochs": of.epochs,
                "batches_per_epoch": of.batches,
                "frames_per_step": of.frames,
                "max_atoms_per_batch": of.max_atoms,
            }
            for name, of in length.tasks.items()
        ],
        "summary": [list(row) for row in config_summary(config, length.num_steps, length.steps_per or None)],
        "input_with_defaults": to_dict(config),
    }


def _data(task: str, report: DataReport) -> dict[str, Any]:
    from deepmd_ema.run_check.text import suspicious_frames

    suspects = suspicious_frames(report)
    parts = {"training": report.training, "validation": report.validation}
    units = report.units
    return {
        "task": task,
        "systems": [_system(part, scan, suspects[id(scan)]) for part, scans in parts.items() for scan in scans],
        "elements": _elements(report),
        "checks": {
            name: {"frames": found.num_frames, "of_frames": found.total, "example": found.worst or None}
            for name, found in report.suspects.items()
        },
        "units": {
            "systems": units.num_systems,
            "verified": units.verified,
            "not_verified": {name: list(names) for name, names in units.unverified.items() if names},
        }
        if units is not None
        else None,
        "nearest_atoms": report.closest or None,
    }


def _system(part: str, scan: SystemScan, suspicious: int) -> dict[str, Any]:
    sizes = scan.type_counts.sum(axis=1)
    frames = scan.system.num_frames
    return {
        "system": scan.system.name,
        "part": part,
        "frames": frames,
        "min_atoms": int(sizes.min()) if len(sizes) else 0,
        "max_atoms": int(sizes.max(initial=0)),
        "periodic_frames": frames - scan.open_frames,
        "suspicious_frames": suspicious,
        "labels": {name: _label(scan, name) for name in LABELS if scan.label_frames.get(name)},
    }


def _label(scan: SystemScan, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"frames": scan.label_frames[name]}
    values: Range | None = scan.ranges.get(name)
    if name in _UNITS and values is not None and values.count:
        unit = _UNITS[name]
        found |= {f"min_{unit}": values.low, f"max_{unit}": values.high, f"rms_{unit}": values.rms}
        found["largest_in_frame"] = int(scan.system.numbers[values.worst])
    return found


def _elements(report: DataReport) -> Iterable[dict[str, Any]]:
    every = [*report.training, *report.validation]
    found, rows = report.neighbors, []
    for k, name in enumerate(report.type_map):
        atoms = [sum(int(scan.type_counts[:, k].sum()) for scan in scans) for scans in (report.training, every)]
        number, squares = (sum(float(scan.element_forces[k, column]) for scan in every) for column in (0, 1))
        nearest = float(found.nearest[k].min(initial=math.inf)) if found is not None else math.inf
        rows.append({
            "element": name,
            "training_atoms": atoms[0],
            "validation_atoms": atoms[1] - atoms[0],
            "force_rms_eV_per_angstrom": math.sqrt(squares / number) if number else None,
            "force_max_eV_per_angstrom": max(float(scan.element_forces[k, 2]) for scan in every) if number else None,
            "nearest_angstrom": nearest if math.isfinite(nearest) else None,
            "max_neighbors": int(found.max_neighbors[k]) if found is not None else None,
        })  # fmt: skip
    return rows


def _cost(check: RunCheck) -> dict[str, Any]:
    cost, memory = check.cost, check.memory
    estimated = sum(memory) if memory is not None else None
    return {
        "estimated_memory_bytes": estimated,
        "measured": None
        if cost is None
        else {
            "total_s": cost.total,
            "start_s": cost.start,
            "step_s": cost.step,
            "step_of_first_epoch_s": cost.new_step,
            "steps": cost.num_steps,
            "row_s": cost.row,
            "rows": cost.rows,
            "first_validation_s": cost.first_validation,
            "validation_s": cost.validation,
            "validations": cost.validations,
            "checkpoint_s": cost.checkpoint,
            "checkpoints": cost.checkpoints,
            "end_s": cost.end,
            "memory_bytes": cost.memory,
            "gpu_memory_bytes": cost.gpu_memory,
            "steps_measured": cost.measured,
        },
    }
