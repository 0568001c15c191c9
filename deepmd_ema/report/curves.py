"""Writing and reading of the files of rows of a run, ``lcurve.out`` and ``val.log``."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config import load_config
from deepmd_ema.config.outputs import BEST, Outputs, weights_of_rows
from deepmd_ema.errors import UserError, collect_problems
from deepmd_ema.files import append, atomic_write, sync, writing
from deepmd_ema.report.facts import displayed, metrics_of, show_metric
from deepmd_ema.report.table import significant
from deepmd_ema.utils import LIVE

if TYPE_CHECKING:
    from deepmd_ema.model.metrics import Errors
    from deepmd_ema.report.log import ValuesByTask

logger = logging.getLogger(__name__)

LCURVE, VALIDATION = "lcurve", "validation"
MAX_STEP = 10**18  # steps are 64-bit integers; a larger number is a mistake in the file
# a power cut loses at most the rows of this time, all of them after the last checkpoint
SYNC_S = 10.0
# the line of a best file: whose weights it holds (None: the live ones), and its step
_BEST_LINE = re.compile(
    rf"# saved best checkpoint: (?:.*/)?{BEST}(?:_([^/]+))?\.ckpt-(\d+)\.t-\d+\.(?:pt|dcp) "
)
_HEADER = re.compile(r"#\s*step\s")
_LCURVE_NOTE = (
    "# If there is no available reference data, rmse_*_{val,trn} will print nan\n"
)
_VALIDATION_NOTE = (
    "# E uses per-atom energy, F uses component-wise force errors, and the second-rank column is "
    "S, stress as the negated virial divided by the cell volume, or V, virial normalized by "
    "natoms, following `validation_metric`.\n"
)


class RowTable:
    """A text file with one header, to which rows are added; each is in the file at once.

    The file starts anew with the first row, unless :meth:`cut_after` was called before. Rows are
    flushed to the disk, which takes milliseconds, when :meth:`sync` is called, and with a row that
    is added :data:`SYNC_S` or more after the last time.

    Attributes:
        path: the file.
        header: its first lines.
    """

    path: Path
    header: str
    _begun = False
    _is_synced = True
    _synced_at = -math.inf

    def cut_after(self, step: int) -> None:
        """Continue the file as it was after ``step``.

        Later rows and an incomplete last line are removed. A second header with the same columns is
        removed as well; if the columns have changed, the new header follows the old rows.
        """
        old = (
            self.path.read_text(encoding="utf-8", errors="replace")
            if self.path.is_file()
            else ""
        )
        lines = []
        for line in old.splitlines(keepends=True):
            # lines of best files have a step as rows do; other comments are headers
            best = _BEST_LINE.match(line)
            number = best[2] if best else (line.split() or [""])[0]
            is_row = number.isdigit() and int(number) <= step
            if line.endswith("\n") and (is_row or (line.startswith("#") and not best)):
                lines.append(line)
        header = self.header.splitlines(keepends=True)
        rows = [line for line in lines if line not in header]
        columns = [line for line in lines if _HEADER.match(line)]
        if set(columns) == {header[0]} or not rows:
            text = self.header + "".join(rows)
        elif columns[-1:] == header[:1]:  # they changed at a restart before this one
            text = "".join(lines)
        else:
            logger.warning(
                "%s: the columns have changed, a second header follows the old rows",
                self.path,
            )
            text = "".join(lines) + self.header
        with atomic_write(self.path, "The last checkpoint is usable.") as part:
            part.write_text(text, encoding="utf-8")
        self._begun = True

    def sync(self) -> None:
        """Bring all rows to the disk.

        It must be called before a checkpoint, because a restart does not write them again.
        """
        if (
            not self._is_synced and self.path.is_file()
        ):  # a device or a pipe has nothing to flush
            # set before: another thread may add a row meanwhile, which counts as not flushed
            self._is_synced = True
            self._synced_at = time.monotonic()
            with writing(self.path):
                sync(self.path)

    def _add(self, line: str) -> None:
        append(
            self.path, line if self._begun else self.header + line, anew=not self._begun
        )
        self._begun = True
        self._is_synced = False
        if time.monotonic() - self._synced_at > SYNC_S:
            self.sync()


class LcurveFile(RowTable):
    """The learning curve: one row per displayed step.

    Args:
        path: ``training.disp_file``.
        columns: task (empty if there is one only), name of a value such as ``rmse_e``, and the
            frames of which the row has it: ``val`` and ``trn``, or one of them.
    """

    def __init__(
        self, path: str | Path, columns: Sequence[tuple[str, str, tuple[str, ...]]]
    ) -> None:
        self._columns = columns
        line = "# step "
        for task, name, kinds in self._columns:
            ending = f"_{task}" if task else ""
            line += "  " + "".join(f" {f'{name}_{kind}{ending}':>11}" for kind in kinds)
        self.path = Path(path)
        self.header = f"{line}   {'lr':8}\n{_LCURVE_NOTE}"

    def write(
        self, step: int, lr: float, training: ValuesByTask, validation: ValuesByTask
    ) -> None:
        """Add the row of ``step``; a value that is not given is nan.

        Args:
            step: optimizer steps so far.
            lr: learning rate that the step used.
            training: task to the values by name.
            validation: the same, for validation frames.
        """
        values = {"val": validation, "trn": training}
        row = f"{step:7d}"
        for task, name, kinds in self._columns:
            row += "  " + "".join(
                f" {values[kind].get(task, {}).get(name, math.nan):11.2e}"
                for kind in kinds
            )
        self._add(f"{row}   {lr:8.1e}\n")


class ValidationLog(RowTable):
    """Errors over the whole validation set.

    It has one row per full validation, and a line for each best file.

    Args:
        path: ``validating.full_val_file``.
        num_steps: steps of the run; they set the width of the first column.
        metric: ``validating.validation_metric``; V shows virials per atom in the last columns, else
            stress is shown.
        quantities: letters of what the model predicts.
    """

    def __init__(
        self,
        path: str | Path,
        num_steps: int,
        metric: str = "E:MAE",
        quantities: Sequence[str] = "EFVS",
    ) -> None:
        left_out = "S" if metric.upper().startswith("V") else "V"
        self._metrics = metrics_of(
            quantity for quantity in quantities if quantity != left_out
        )
        labels = [metric.column for metric in self._metrics]
        self._widths = [max(4, len(str(num_steps)))] + [
            max(10, len(label)) for label in labels
        ]
        self.path = Path(path)
        self.header = self._row("# ", ["step", *labels])
        if "E" in quantities:  # the note is about potentials
            self.header += _VALIDATION_NOTE

    def write(self, step: int, errors: Errors) -> None:
        """Add the row of ``step``."""
        values = (significant(displayed(errors, metric)) for metric in self._metrics)
        self._add(self._row("  ", [str(step), *values]))

    def write_best(self, file: str | Path, metric: str, value: float) -> None:
        """Note that ``file`` was written as one of the best, here and in the log."""
        metric = metric.upper()
        shown = show_metric(metric, value)
        self._add(f"# saved best checkpoint: {file} ({metric} = {shown})\n")
        logger.debug("saved best model to %s with %s = %s", file, metric, shown)

    def _row(self, prefix: str, cells: Sequence[str]) -> str:
        return (
            prefix
            + " ".join(f"{cell:^{width}}" for cell, width in zip(cells, self._widths))
            + "\n"
        )


class NoRowsError(UserError):
    """A file of rows does not exist, or has no rows: perhaps nothing was due yet."""


class Curve:
    """Content of one file of rows: what was measured at which steps.

    A header that is repeated after a restart is skipped; after one with other columns, values of
    columns that rows do not have are nan. If a step was done twice, its last row counts.

    Args:
        path: a learning curve or validation log.

    Attributes:
        path: the file.
        kind: ``lcurve`` (single batches, while it trains) or ``validation`` (the whole validation
            set).
        weights: ``live``, or the name of the average whose errors these are.
        steps: (R,) int64, rising.
        columns: column name to (R,) float64, in the units of the file.
        best_steps: steps whose weights were kept as the best.
        task: whose errors these are; empty in a run of one task, and of a learning curve of all
            tasks.

    Raises:
        NoRowsError: if the file is missing or has no rows.
        UserError: if it is neither of the two.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raised = NoRowsError if isinstance(error, FileNotFoundError) else UserError
            raise raised(
                f"{path}: cannot be read: {reason}. Give lcurve.out, val.log or val_ema.log."
            ) from error
        lines = text.splitlines()
        if not any(map(_HEADER.match, lines)):
            raise UserError(
                f"{path}: has no header line '# step ...'. Give lcurve.out, val.log or val_ema.log."
            )
        header = list[str]()
        # by step, rising: names and values; names change where a restart has other columns
        rows: dict[int, tuple[list[str], list[float]]] = {}
        for number, line in enumerate(lines, 1):
            if _HEADER.match(line) and (names := line.lstrip("# ").split()) != header:
                header = names
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                step, *values = map(float, line.split())
                if len(values) != len(header) - 1:
                    raise ValueError(
                        f"{len(values) + 1} numbers, expected {len(header)} as in the header"
                    )
                if not (0 <= step < MAX_STEP and step == int(step)):
                    raise ValueError(f"step {step:g}, expected a whole number")
            except ValueError as error:
                if number == len(lines) and not text.endswith("\n"):
                    break  # a run is writing it
                raise UserError(f"{path}, line {number}: {error}.") from error
            # a restart did these steps again and did not cut the file
            if rows and step <= next(reversed(rows)):
                rows = {earlier: row for earlier, row in rows.items() if earlier < step}
            rows[int(step)] = header, values
        if not rows:
            raise NoRowsError(f"{path}: has a header but no rows yet.")
        self.steps = np.array(list(rows), np.int64)
        self.columns: dict[str, NDArray[np.float64]] = {}
        end = 0
        # rows under one header at once
        for _, group in groupby(rows.values(), key=lambda row: id(row[0])):
            same = list(group)
            start, end = end, end + len(same)
            table = np.array([values for _, values in same], np.float64)
            for name, values in zip(same[0][0][1:], table.T):
                column = self.columns.setdefault(name, np.full(len(rows), np.nan))
                column[start:end] = values
        self.kind = VALIDATION if any("(" in name for name in header) else LCURVE
        best = [match for line in lines if (match := _BEST_LINE.match(line))]
        self.best_steps = [int(match[2]) for match in best]
        # Task and weights are not in the rows. A line about a best file names the weights;
        # otherwise the name of the file does, as the normalized input beside it says.
        self.task = ""
        tasks = list[str]()
        name = ""
        # there may be no input, or one of another program
        with suppress(OSError, ValueError, AttributeError):
            values = json.loads(path.with_name("out.json").read_text(encoding="utf-8"))
            tasks = list(values.get("model", {}).get("model_dict", {}))
            name = weights_of_rows(path, values)
        self.weights = (
            (best[0][1] or LIVE) if best else name or weights_of_rows(path, {})
        )
        # long names first: ice_ih_ema belongs to the task ice_ih, not to ice
        for task in sorted(tasks, key=len, reverse=True):
            if self.weights == task or self.weights.startswith(f"{task}_"):
                self.task = task if self.kind == VALIDATION else ""
                self.weights = self.weights[len(task) + 1 :] or LIVE
                break

    def of_tasks(self) -> list[Curve]:
        """Return the learning curve of each task, or the curve itself if it has no tasks."""
        columns_by_task: dict[str, dict[str, NDArray[np.float64]]] = {}
        shared: dict[str, NDArray[np.float64]] = {}  # such as the learning rate
        for name, values in self.columns.items():
            # rmse_f_trn_ice: column rmse_f_trn of the task ice
            match = re.fullmatch(r"(\w+?_(?:val|trn))_([\w+-]+)", name)
            if self.kind == LCURVE and match:
                columns_by_task.setdefault(match[2], {})[match[1]] = values
            else:
                shared[name] = values
        curves = list[Curve]()
        for task, columns in columns_by_task.items():
            curve = copy(self)
            curve.task = task
            curve.columns = shared | columns
            curves.append(curve)
        return curves or [self]


def curve_files(path: str | Path) -> list[Path]:
    """Return the files of rows in the folder of a run, those of the live weights first.

    Files that its input names are returned whether they exist or not, if one of them does. A path
    that is no folder is returned itself.

    Raises:
        UserError: if the folder has none.
    """
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    with suppress(UserError):  # no normalized input there, or one of another program
        outputs = Outputs(load_config(folder / "out.json"))
        files = [folder / output.path for output in outputs if output.has_rows]
        if any(file.is_file() for file in files):
            return files
    patterns = ("lcurve.out", "lcurve_*.out", "val.log", "val_*.log")
    files = [
        file
        for pattern in patterns
        for file in sorted(folder.glob(pattern))
        if file.is_file()
    ]
    if not files:
        raise UserError(
            f"{path}: no lcurve.out or val.log in this folder. Give the folder of a run, or its "
            "files."
        )
    return files


def read_curves(files: Sequence[str | Path]) -> list[Curve]:
    """Return the curves of files, or of folders of runs, one for each task.

    Files without rows are named in the log.

    Raises:
        NoRowsError: if none has rows.
        UserError: if a file is not one of these.
    """
    curves = list[Curve]()
    without_rows = list[str]()
    for file in (file for path in files for file in curve_files(path)):
        with collect_problems(without_rows, kind=NoRowsError):
            curves += Curve(file).of_tasks()
    if not curves:
        raise NoRowsError(without_rows)
    for problem in without_rows:
        logger.warning("not drawn: %s", problem)
    return curves
