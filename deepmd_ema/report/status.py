"""Status of a run, from its files alone: at any moment, without writing or locking one, and without loading torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.config import RunConfig, load_config
from deepmd_ema.config.outputs import LOCK, POINTER, RECORD, Outputs, is_sharded, read_pointer
from deepmd_ema.errors import UserError, counted, first_few
from deepmd_ema.labels import METRICS
from deepmd_ema.locks import Holder, read_holder
from deepmd_ema.report.curves import LCURVE, VALIDATION, Curve, curve_files, read_curve
from deepmd_ema.report.progress import duration
from deepmd_ema.report.record import Part, read_record
from deepmd_ema.report.table import Table, facts
from deepmd_ema.report.tables import significant

PREPARING, TRAINING, ENDED, INTERRUPTED, KILLED, UNKNOWN = (
    "preparing", "training", "ended", "interrupted", "killed", "not training",
)  # fmt: skip
_DIGITS = 4
_MAX_WARNINGS = 3


@dataclass(frozen=True)
class Rows:
    """Errors in one row of a validation log.

    Attributes:
        weights: whose errors, with the task before them where there are several.
        step: of the row.
        errors: by column of the file.
    """

    weights: str
    step: int
    errors: Mapping[str, float]


@dataclass(frozen=True)
class RunStatus:
    """Progress of a run.

    Attributes:
        folder: of the run.
        state: preparing, training, ended, interrupted, killed or not training.
        remark: how it ended, or which process trains.
        step: optimizer steps done.
        num_steps: of the whole run; 0: not known.
        elapsed: seconds of all parts of the run; None: not known.
        left: seconds until the end, of a run that is training; None: not known.
        last_row: last row of the learning curve, by column; empty without one.
        validation: last rows of the validation logs.
        best: the rows with the smallest errors by ``metric``.
        metric: column of the validation logs by which the best row is chosen.
        checkpoint: the newest, relative to the folder; empty without one.
        averages: newest file of each average, relative to the folder.
        parts: record of the run; empty where there is none.
    """

    folder: Path
    state: str
    remark: str
    step: int
    num_steps: int
    elapsed: float | None = None
    left: float | None = None
    last_row: Mapping[str, float] = field(default_factory=dict)
    validation: Sequence[Rows] = ()
    best: Sequence[Rows] = ()
    metric: str = ""
    checkpoint: str = ""
    averages: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Part] = ()

    def describe(self) -> str:
        """Return one line: ``training, step 240 of 2,000 (12 %)``."""
        of = f" of {self.num_steps:,} ({100 * self.step / self.num_steps:.0f} %)" if self.num_steps else ""
        remark = f" ({self.remark})" if self.remark else ""
        return f"{self.state}{remark}" if self.state == PREPARING else f"{self.state}{remark}, step {self.step:,}{of}"

    def table(self) -> Table:
        """Return the status for people."""
        return facts(f"{self.folder}: {self.describe()}", self._rows())

    def to_dict(self) -> dict[str, object]:
        """Return the status for programs; times in seconds, errors by column of the files."""
        of_rows = {
            name: {row.weights: {"step": row.step, **row.errors} for row in rows}
            for name, rows in (("validation", self.validation), ("best", self.best))
        }
        names = ("state", "remark", "step", "num_steps", "elapsed", "left", "last_row", "metric", "checkpoint")
        values = {name: getattr(self, name) for name in (*names, "averages")}
        warnings = self.parts[-1].warnings if self.parts else []
        found: dict[str, object] = _without_nan({"folder": str(self.folder), **values, **of_rows, "warnings": warnings})
        return found

    def describe_best(self, row: Rows) -> str:
        """Return the smallest error of some weights: ``F RMSE 44.4 meV/Å at step 200``."""
        return f"{describe_row({self.metric: row.errors[self.metric]})} at step {row.step:,}"

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "time", self._time()
        if self.last_row:
            shown = [f"{n} {v:.3g}" for n, v in self.last_row.items() if n.startswith(("rmse_", "lr")) and v == v]
            shown = [text for text in shown if not text.startswith(("rmse_val", "rmse_trn"))] or shown  # the loss
            yield "last row", f"step {self.last_row['step']:,.0f}, single batches, eV and Å: {', '.join(shown)}"
        best = {row.weights: row for row in self.best}
        for row in self.validation:
            least = f"; least {self.describe_best(best[row.weights])}" if row.weights in best else ""
            yield "validation", f"{row.weights}, step {row.step:,}: {describe_row(row.errors)}{least}"
        yield "checkpoint", _with_age(self.folder, self.checkpoint)
        facts_of = self.parts[-1].averages if self.parts else {}
        for name, file in self.averages.items():
            found = facts_of.get(name)
            age = f", {counted(found['updates'], 'update')}, mean age {found['mean_age']:,.1f} steps" if found else ""
            yield "average", f"{name}: {file or 'no file yet'}{age}"
        warnings = self.parts[-1].warnings if self.parts else []
        for time, text in warnings[-_MAX_WARNINGS:]:
            yield "warning", f"{time[11:19]} {text}"

    def _time(self) -> str:
        so_far = " so far" * (self.state in (PREPARING, TRAINING))
        parts = [f"{duration(self.elapsed)}{so_far}"] if self.elapsed is not None else []
        if self.left is not None:
            end = datetime.now() + timedelta(seconds=self.left)
            parts.append(f"{duration(self.left)} left, ends about {end:%Y-%m-%d %H:%M}")
        return ", ".join(parts)


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run.

    Raises:
        UserError: if there is no run in it; runs in folders below it are named.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder. Give the folder in which `dp-ema train` was started.")
    if _is_run(folder):
        return folder
    below = sorted(str(child) for child in folder.iterdir() if child.is_dir() and _is_run(child))
    if below:
        number = counted(len(below), "run")
        raise UserError(f"{path}: no run here, but {number} in folders: {first_few(below)}. Give one of them.")
    raise UserError(f"{path}: no run here. Give the folder in which `dp-ema train` was started.")


def read_status(folder: str | Path) -> RunStatus:
    """Return the status of the run in a folder.

    Raises:
        UserError: if there is none.
    """
    folder = run_folder(folder)
    config = _config(folder)
    parts, holder = read_record(folder), read_holder(folder / LOCK)
    curves = list(_curves(folder))
    rows = [curve for curve in curves if curve.kind == LCURVE]
    validated = [curve for curve in curves if curve.kind == VALIDATION]
    steps = [int(curve.steps[-1]) for curve in curves]
    num_steps = parts[-1].num_steps if parts else 0
    num_steps = num_steps or (config.training.numb_steps or 0 if config is not None else 0)
    step = max([*steps, parts[-1].step if parts else 0])
    state, remark = _state(parts, holder, step, num_steps)
    since = (datetime.now().astimezone() - datetime.fromisoformat(parts[-1].updated)).total_seconds() if parts else 0.0
    running = since if state == TRAINING else 0.0
    left = parts[-1].left if parts and state == TRAINING else None
    metric = _metric(config, validated)
    measured = [(curve, curve.columns[metric]) for curve in validated if metric in curve.columns]
    return RunStatus(
        folder=folder,
        state=state,
        remark=remark,
        step=step,
        num_steps=num_steps,
        elapsed=sum(part.elapsed for part in parts) + running if parts else None,
        left=None if left is None else max(0.0, left - running),
        last_row=_row(rows[0], -1) if rows else {},
        validation=[_rows(curve, -1) for curve in validated],
        best=[_rows(curve, int(np.nanargmin(errors))) for curve, errors in measured if np.isfinite(errors).any()],
        metric=metric,
        checkpoint=_pointer(folder),
        averages=_averages(folder, config),
        parts=parts,
    )


def _is_run(folder: Path) -> bool:
    names = (RECORD, POINTER, "lcurve.out", "val.log")
    return any((folder / name).is_file() for name in names) or (folder / LOCK).exists()


def _state(parts: Sequence[Part], holder: Holder | None, step: int, num_steps: int) -> tuple[str, str]:
    """Return the state of a run and a remark on it."""
    if holder is not None and holder.is_alive:
        has_begun = bool(parts) and not parts[-1].ended and parts[-1].num_steps > 0
        return TRAINING if has_begun else PREPARING, f"process {holder.pid} on {holder.host}"
    if not parts:
        return (ENDED, "") if num_steps and step >= num_steps else (UNKNOWN, "it has left no record")
    how = parts[-1].ended
    if how.startswith(ENDED):
        return ENDED, how.removeprefix(ENDED).strip()
    return (INTERRUPTED, how.removeprefix(f"{INTERRUPTED} ")) if how else (KILLED, "without a last entry in its record")


def _config(folder: Path) -> RunConfig | None:
    """Return the normalized input of a run, if it is there and of this version."""
    with suppress(UserError):
        return load_config(folder / "out.json")
    return None


def _curves(folder: Path) -> Iterator[Curve]:
    """Yield the files of rows that can be read; others have no rows yet, or are being replaced."""
    files: list[Path] = []
    with suppress(UserError):
        files = curve_files(folder)
    for file in files:
        with suppress(UserError):
            yield read_curve(file)


def _metric(config: RunConfig | None, validated: Sequence[Curve]) -> str:
    """Return the column of the validation logs by which the best row is chosen; empty without rows."""
    if not validated:
        return ""
    name = config.validating.validation_metric if config is not None else "F:RMSE"
    column = f"{name.replace(':', '_')}({METRICS[name[0]].display_unit})"
    return column if all(column in curve.columns for curve in validated) else next(iter(validated[0].columns))


def _row(curve: Curve, index: int) -> dict[str, float]:
    return {"step": int(curve.steps[index]), **{name: float(values[index]) for name, values in curve.columns.items()}}


def _rows(curve: Curve, index: int) -> Rows:
    errors = {name: value for name, value in _row(curve, index).items() if name != "step"}
    return Rows(f"{curve.task} {curve.weights}".strip(), int(curve.steps[index]), errors)


def describe_row(errors: Mapping[str, float]) -> str:
    """Return errors of a validation log by column: ``E MAE 3.512, RMSE 4.205 meV/atom``."""
    shown: dict[tuple[str, str], list[str]] = {}
    for column, value in errors.items():
        name, _, unit = column.rstrip(")").partition("(")
        quantity, _, kind = name.partition("_")
        if value == value:
            shown.setdefault((quantity, unit), []).append(f"{kind} {significant(value, _DIGITS)}")
    return "; ".join(f"{quantity} {', '.join(texts)} {unit}" for (quantity, unit), texts in shown.items())


def _pointer(folder: Path) -> str:
    """Return the newest checkpoint as the run names it, from its folder; empty where it names none."""
    with suppress(OSError, ValueError):
        if (folder / POINTER).is_file():
            named = read_pointer(folder / POINTER)
            return os.path.relpath(named, folder) if named.is_file() or is_sharded(named) else ""
    return ""


def _averages(folder: Path, config: RunConfig | None) -> dict[str, str]:
    """Return the newest file of each average of a run."""
    found: dict[str, str] = {}
    if config is None:
        return found
    for average in config.training.averaging:
        link = folder / Outputs(config).checkpoint_link(average.name)
        with suppress(OSError):
            link = link.parent / os.readlink(link)
        found[average.name] = os.path.relpath(link, folder) if link.exists() else ""
    return found


def _without_nan(values: Any) -> Any:
    """Return values with None in place of nan, which JSON does not have."""
    if isinstance(values, Mapping):
        return {name: _without_nan(value) for name, value in values.items()}
    return None if isinstance(values, float) and not np.isfinite(values) else values


def _with_age(folder: Path, file: str) -> str:
    if not file:
        return "the run names none"
    with suppress(OSError):
        seconds = datetime.now().timestamp() - (folder / file).stat().st_mtime
        return f"{file}, {duration(max(0.0, seconds))} ago"
    return file
