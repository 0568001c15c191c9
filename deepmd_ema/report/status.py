"""Status of a run, from its files alone.

It is read at any moment, without writing or locking a file, and without loading torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from deepmd_ema.config import load_config
from deepmd_ema.config.outputs import (
    LOCK,
    POINTER,
    RECORD,
    Outputs,
    is_sharded,
    read_pointer,
)
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.errors import UserError
from deepmd_ema.locks import read_holder
from deepmd_ema.report.curves import LCURVE, VALIDATION, Curve, curve_files
from deepmd_ema.report.log import describe_values
from deepmd_ema.report.record import Part, read_record
from deepmd_ema.report.table import duration, render_facts, significant, without_nan
from deepmd_ema.text import counted, first_few

PREPARING = "preparing"
TRAINING = "training"
ENDED = "ended"
INTERRUPTED = "interrupted"
KILLED = "killed"
UNKNOWN = "not training"
_DIGITS = 4
_MAX_WARNINGS = 3
# attributes of a status that are keys of `dp-ema show --json`
_IN_JSON = (
    "state",
    "remark",
    "step",
    "num_steps",
    "elapsed",
    "left",
    "last_row",
    "validation",
    "best",
    "metric",
    "test",
    "checkpoint",
    "averages",
)


class RunStatus:
    """Progress of a run, read from its files.

    Args:
        folder: of the run.

    Attributes:
        folder: of the run.
        state: preparing, training, ended, interrupted, killed or not training.
        remark: reason of its end, or the process that trains.
        step: optimizer steps done.
        num_steps: of the whole run; 0: not known.
        elapsed: seconds of all parts of the run; None: not known.
        left: seconds until the end, of a run that is training; None: not known.
        last_row: last row of the learning curve, by column; empty without one.
        validation: by weights, and task where there are several, the last row of a validation log,
            by column.
        best: the same for the rows with the smallest errors by ``metric``.
        metric: column of the validation logs by which the best row is chosen, of the first log.
        metrics: the same of each log.
        test: errors on the test data, as ``validation``; empty before the last step.
        checkpoint: the newest, relative to the folder; empty without one.
        averages: newest file of each average, relative to the folder.
        parts: record of the run; empty where there is none.

    Raises:
        UserError: if there is no run in the folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder = run_folder(folder)
        config = None
        with suppress(
            UserError
        ):  # the normalized input is not there, or of another version
            config = load_config(folder / "out.json")
        self.parts = read_record(folder)
        holder = read_holder(folder / LOCK)
        curves = list[Curve]()
        with suppress(UserError):  # there are no files of rows
            for file in curve_files(folder):
                with suppress(UserError):  # it has no rows yet, or is being replaced
                    curves.append(Curve(file))
        last = self.parts[-1] if self.parts else Part()
        self.num_steps = last.num_steps
        if (
            not self.num_steps and config is not None
        ):  # 0 if the length is given in epochs
            self.num_steps = config.training.numb_steps or 0
        # rows are written at once, the record some seconds later
        self.step = max([last.step, *(int(curve.steps[-1]) for curve in curves)])
        self.state = INTERRUPTED
        self.remark = last.ended.removeprefix(f"{INTERRUPTED} ")
        if holder is not None and holder.is_alive:
            # the last part of the record is that of an earlier process until the first entry
            has_begun = not last.ended and last.num_steps > 0
            self.state = TRAINING if has_begun else PREPARING
            self.remark = f"process {holder.pid} on {holder.host}"
        elif (
            not self.parts
        ):  # a run of DeePMD-kit, or one whose record could not be written
            is_whole = self.num_steps and self.step >= self.num_steps
            self.state = ENDED if is_whole else UNKNOWN
            self.remark = "" if is_whole else "it has left no record"
        elif last.ended.startswith(ENDED):
            self.state = ENDED
            self.remark = last.ended.removeprefix(ENDED).strip()
        elif not last.ended:
            self.state = KILLED
            self.remark = "without a last entry in its record"
        # seconds since the last entry of a run that is training
        running = 0.0
        if self.state == TRAINING:
            now = datetime.now().astimezone()
            running = (now - datetime.fromisoformat(last.updated)).total_seconds()
        self.elapsed = (
            sum(part.elapsed for part in self.parts) + running if self.parts else None
        )
        self.left = None
        if last.left is not None and self.state == TRAINING:
            self.left = max(0.0, last.left - running)
        self.last_row = next(
            (_row(curve, -1) for curve in curves if curve.kind == LCURVE), {}
        )
        validated = {
            f"{curve.task} {curve.weights}".strip(): curve
            for curve in curves
            if curve.kind == VALIDATION
        }
        self.validation = {
            weights: _row(curve, -1) for weights, curve in validated.items()
        }
        # tasks may predict different quantities, each of which has a metric of its own
        self.metrics = dict[str, str]()
        for weights, curve in validated.items():
            metric = Metric("F:RMSE")
            if config is not None:
                metric = config.validating.validation_metric
                if curve.task in config.tasks:
                    metric = config.tasks[curve.task].metric(metric)
            column = metric.column
            self.metrics[weights] = (
                column if column in curve.columns else next(iter(curve.columns))
            )
        self.metric = next(iter(self.metrics.values()), "")
        errors = {
            weights: curve.columns[self.metrics[weights]]
            for weights, curve in validated.items()
        }
        self.best = {
            weights: _row(validated[weights], int(np.nanargmin(values)))
            for weights, values in errors.items()
            if np.isfinite(values).any()
        }
        self.test = last.test
        self.checkpoint = ""
        # the pointer may be damaged, or gone by now
        with suppress(OSError, ValueError):
            if (folder / POINTER).is_file():
                newest = read_pointer(folder / POINTER)
                if newest.is_file() or is_sharded(newest):
                    self.checkpoint = os.path.relpath(newest, folder)
        self.averages = dict[str, str]()
        if config is not None:
            for average in config.training.averaging:
                link = folder / Outputs(config).checkpoint_link(average.name)
                # the file that the link leads to has the step in its name
                with suppress(OSError):
                    link = link.parent / os.readlink(link)
                self.averages[average.name] = (
                    os.path.relpath(link, folder) if link.exists() else ""
                )

    def describe(self) -> str:
        """Return one line: ``training, step 240 of 2,000 (12 %)``."""
        text = f"{self.state} ({self.remark})" if self.remark else self.state
        if self.state == PREPARING:
            return text
        text += f", step {self.step:,}"
        if self.num_steps:
            text += f" of {self.num_steps:,} ({100 * self.step / self.num_steps:.0f} %)"
        return text

    def describe_best(self, weights: str) -> str:
        """Return the smallest error of some weights: ``F RMSE 44.4 meV/Å at step 200``."""
        row = self.best[weights]
        metric = self.metrics[weights]
        return f"{_describe_columns({metric: row[metric]})} at step {row['step']:,}"

    def text(self) -> str:
        """Return the status for people."""
        return "\n".join(
            render_facts(f"{self.folder}: {self.describe()}", self._rows())
        )

    def to_dict(self) -> dict[str, object]:
        """Return the status for programs.

        Times are in seconds, errors by column of the files; None is in place of nan.
        """
        values = {name: without_nan(getattr(self, name)) for name in _IN_JSON}
        return {
            "folder": str(self.folder),
            **values,
            "warnings": self.parts[-1].warnings if self.parts else [],
        }

    def _rows(self) -> Iterator[tuple[str, str]]:
        times = []
        if self.elapsed is not None:
            so_far = " so far" if self.state in (PREPARING, TRAINING) else ""
            times.append(f"{duration(self.elapsed)}{so_far}")
        if self.left is not None:
            end = datetime.now() + timedelta(seconds=self.left)
            times.append(f"{duration(self.left)} left, ends about {end:%Y-%m-%d %H:%M}")
        yield "time", ", ".join(times)
        if self.last_row:
            # by task and kind of batches: rmse_f_val_ice is rmse_f of "ice valid"
            batches: dict[str, dict[str, float]] = {}
            for column, value in self.last_row.items():
                match = re.fullmatch(r"(\w+?)_(trn|val)(?:_(.+))?", column)
                if match and value == value:  # no nan
                    kind = {"trn": "train", "val": "valid"}[match[2]]
                    batches.setdefault(f"{match[3] or ''} {kind}".lstrip(), {})[
                        match[1]
                    ] = value
            errors = {name: describe_values(batches[name]) for name in sorted(batches)}
            shown = [f"{name} {text}" for name, text in errors.items() if text]
            if "lr" in self.last_row:
                shown.append(f"lr {self.last_row['lr']:.1e}")
            units = ""
            if any(re.search(r"_[efv]_", column) for column in self.last_row):
                units = ", meV and Å"
            step = f"step {self.last_row['step']:,.0f}"
            yield "last row", f"{step}, single batches{units}: {'; '.join(shown)}"
        for weights, row in self.validation.items():
            least = (
                f"; least {self.describe_best(weights)}" if weights in self.best else ""
            )
            yield "validation", f"{weights}, {describe_row(row)}{least}"
        for weights, row in self.test.items():
            yield "test", f"{weights}, {describe_row(row)}"
        age = ""
        with suppress(OSError):
            if self.checkpoint:
                written = (self.folder / self.checkpoint).stat().st_mtime
                # clocks of file servers may be ahead
                age = (
                    f", {duration(max(0.0, datetime.now().timestamp() - written))} ago"
                )
        yield (
            "checkpoint",
            f"{self.checkpoint}{age}" if self.checkpoint else "the run names none",
        )
        part = self.parts[-1] if self.parts else Part()
        for name, file in self.averages.items():
            text = f"{name}: {file or 'no file yet'}"
            if counts := part.averages.get(name):
                text += f", {counted(counts['updates'], 'update')}"
                text += f", mean age {counts['mean_age']:,.1f} steps"
            yield "average", text
        for time, text in part.warnings[-_MAX_WARNINGS:]:
            yield "warning", f"{time[11:19]} {text}"


def describe_row(row: Mapping[str, float]) -> str:
    """Return a row of a validation log: its step, and its errors."""
    return f"step {row['step']:,.0f}: {_describe_columns(row)}"


def _describe_columns(errors: Mapping[str, float]) -> str:
    """Return errors of a validation log by column: ``E MAE 3.512, RMSE 4.205 meV/atom``."""
    shown: dict[tuple[str, str], list[str]] = {}
    for column, value in errors.items():
        # E_RMSE(meV/atom); the step has no kind
        name, _, unit = column.rstrip(")").partition("(")
        quantity, _, kind = name.partition("_")
        if kind and value == value:
            shown.setdefault((quantity, unit), []).append(
                f"{kind} {significant(value, _DIGITS)}"
            )
    return "; ".join(
        f"{quantity} {', '.join(texts)} {unit}".rstrip()
        for (quantity, unit), texts in shown.items()
    )


def run_folder(path: str | Path) -> Path:
    """Return the folder of a run.

    Raises:
        UserError: if there is no run in it; runs in folders below it are named.
    """
    folder = Path(path)
    where = "Give the folder in which `dp-ema train` was started."
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder. {where}")
    if _is_run(folder):
        return folder
    below = sorted(
        str(child) for child in folder.iterdir() if child.is_dir() and _is_run(child)
    )
    if below:
        number = counted(len(below), "run")
        raise UserError(
            f"{path}: no run here, but {number} in folders: {first_few(below)}. Give one of them."
        )
    raise UserError(f"{path}: no run here. {where}")


def _is_run(folder: Path) -> bool:
    names = (RECORD, POINTER, "lcurve.out", "val.log")
    return any((folder / name).is_file() for name in names) or (folder / LOCK).exists()


def _row(curve: Curve, index: int) -> dict[str, float]:
    return {
        "step": int(curve.steps[index]),
        **{name: float(values[index]) for name, values in curve.columns.items()},
    }
