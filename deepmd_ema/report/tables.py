"""The tables that a run writes row by row: ``lcurve.out`` and ``val.log``, in the bytes of DeePMD-kit's."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from deepmd_ema.config.outputs import BEST
from deepmd_ema.files import append, atomic_write, sync, writing
from deepmd_ema.labels import METRICS
from deepmd_ema.report.table import Cell, Column, Table

if TYPE_CHECKING:
    from deepmd_ema.metrics import Errors

ValuesByTask: TypeAlias = Mapping[str, Mapping[str, float]]
"""Errors of a displayed step by name of the task, which is empty in a run of one, and by column of lcurve.out."""

logger = logging.getLogger(__name__)

# the line of a best file: whose weights it holds (None: the live ones), and its step
BEST_LINE = re.compile(rf"# saved best checkpoint: (?:.*/)?{BEST}(?:_([^/]+))?\.ckpt-(\d+)\.t-\d+\.(?:pt|dcp) ")
_DIGITS = 5  # significant ones of an error in val.log
METRICS_IN_ORDER = "EFSV"
SYNC_S = 10.0  # a power cut loses at most the rows of this time, all of them after the last checkpoint


class RowTable:
    """A text file with one header, to which rows are added; each is in the file at once.

    The file starts anew with the first row, unless :meth:`cut_after` was called before. Rows are flushed to the disk,
    which takes milliseconds, when :meth:`sync` is called, and now and then by themselves.
    """

    def __init__(self, path: str | Path, header: str) -> None:
        self._path, self._header = Path(path), header
        self._begun, self._is_synced, self._synced_at = False, True, -math.inf

    def cut_after(self, step: int) -> None:
        """Continue the file as it was after ``step``: later rows and an incomplete last line are removed.

        A second header with the same columns is removed as well; if the columns have changed, the new header follows
        the old rows.
        """
        old = self._path.read_text(encoding="utf-8", errors="replace") if self._path.is_file() else ""
        lines = [line for line in old.splitlines(keepends=True) if line.endswith("\n")]
        header = self._header.splitlines(keepends=True)
        same = lines[: len(header)] == header
        rows = [line for line in lines if line not in header and _is_kept(line, step)]
        if same or not rows:
            text = self._header + "".join(rows)
        else:
            logger.warning("%s: the columns have changed, a second header follows the old rows", self._path)
            text = "".join(line for line in lines if _is_kept(line, step)) + self._header
        with atomic_write(self._path, "The last checkpoint is usable.") as part:
            part.write_text(text, encoding="utf-8")
        self._begun = True

    def sync(self) -> None:
        """Bring all rows to the disk: call it before a checkpoint, because a restart does not write them again."""
        if not self._is_synced and self._path.is_file():  # a device or a pipe has nothing to flush
            # set before: another thread may add a row meanwhile, which counts as not flushed
            self._is_synced, self._synced_at = True, time.monotonic()
            with writing(self._path):
                sync(self._path)

    def _add(self, line: str) -> None:
        append(self._path, line if self._begun else self._header + line, anew=not self._begun)
        self._begun, self._is_synced = True, False
        if time.monotonic() - self._synced_at > SYNC_S:
            self.sync()


class LcurveFile(RowTable):
    """The learning curve: one row per displayed step, columns sorted by name, validation before training.

    Args:
        path: ``training.disp_file``.
        names: task to what is shown of it, such as ``rmse``, ``rmse_e``; the name of a single task is empty.
        validated: tasks with a column of validation values before each of training.
    """

    def __init__(self, path: str | Path, names: Mapping[str, Sequence[str]], validated: Collection[str]) -> None:
        self._tasks = {task: sorted(columns) for task, columns in names.items()}
        self._validated = validated
        line = "# step "
        for task, columns in self._tasks.items():
            ending = f"_{task}" if task else ""
            kinds = ["val", "trn"] if task in validated else ["trn"]
            for name in columns:
                line += "  " + "".join(f" {f'{name}_{kind}{ending}':>11}" for kind in kinds)
        note = "# If there is no available reference data, rmse_*_{val,trn} will print nan\n"
        super().__init__(path, f"{line}   {'lr':8}\n{note}")

    def write(self, step: int, lr: float, training: ValuesByTask, validation: ValuesByTask) -> None:
        """Add the row of ``step``; a value that is not given is nan.

        Args:
            step: optimizer steps so far.
            lr: learning rate that the step used.
            training: task to the values by name.
            validation: the same, for validation frames.
        """
        row = f"{step:7d}"
        for task, names in self._tasks.items():
            kinds = (validation, training) if task in self._validated else (training,)
            for name in names:
                row += "  " + "".join(f" {values.get(task, {}).get(name, math.nan):11.2e}" for values in kinds)
        self._add(f"{row}   {lr:8.1e}\n")


class ValidationLog(RowTable):
    """Errors over the whole validation set: one row per full validation, and a line for each best file.

    Args:
        path: ``validating.full_val_file``.
        num_steps: steps of the run; they set the width of the first column.
        metric: ``validating.validation_metric``; V shows virials per atom in the last columns, else stress is shown.
    """

    def __init__(self, path: str | Path, num_steps: int, metric: str = "E:MAE") -> None:
        last = "V" if metric.upper().startswith("V") else "S"
        self._columns = [f"{quantity}:{kind}" for quantity in ("E", "F", last) for kind in ("MAE", "RMSE")]
        labels = [f"{c.replace(':', '_')}({METRICS[c[0]].display_unit})" for c in self._columns]
        self._widths = [max(4, len(str(num_steps)))] + [max(10, len(label)) for label in labels]
        super().__init__(path, self._row("# ", ["step", *labels]) + _VALIDATION_NOTE)

    def write(self, step: int, errors: Errors) -> None:
        """Add the row of ``step``."""
        values = (METRICS[column[0]].display_factor * errors.metric(column) for column in self._columns)
        self._add(self._row("  ", [str(step), *map(significant, values)]))

    def write_best(self, file: str | Path, metric: str, value: float) -> None:
        """Note that ``file`` was written as one of the best, here and in the log."""
        metric, shown = metric.upper(), show_metric(metric, value)
        self._add(f"# saved best checkpoint: {file} ({metric} = {shown})\n")
        logger.info("Saved best model to %s with %s = %s", file, metric, shown)

    def _row(self, prefix: str, cells: Sequence[str]) -> str:
        return prefix + " ".join(f"{cell:^{width}}" for cell, width in zip(cells, self._widths)) + "\n"


_VALIDATION_NOTE = (
    "# E uses per-atom energy, F uses component-wise force errors, and the second-rank column is S, stress as the "
    "negated virial divided by the cell volume, or V, virial normalized by natoms, following `validation_metric`.\n"
)


def table_of_errors(title: str, errors: Mapping[str, Errors]) -> Table:
    """Return MAE and RMSE of each quantity by task; the only task of a run has no name."""
    quantities = [q for q in METRICS_IN_ORDER if any(q in labelled(of_task) for of_task in errors.values())]
    columns = [Column("task"), Column("frames", "", ",.0f")]
    columns += [Column(METRICS[q].title, METRICS[q].display_unit, "s") for q in quantities]
    rows: list[Sequence[Cell]] = [
        (task, of_task.summary()["num_frames"], *(mae_rmse(of_task, q) for q in quantities))
        for task, of_task in errors.items()
    ]
    first = 1 if "" in errors else 0
    return Table(title, columns[first:], [row[first:] for row in rows])


def labelled(errors: Errors) -> str:
    """Return the letters of the quantities that some frame has a label of."""
    return "".join(q for q in METRICS_IN_ORDER if not math.isnan(errors.metric(f"{q}:MAE")))


def mae_rmse(errors: Errors, quantity: str) -> str:
    """Return both errors of a quantity as ``94.363 / 120.02``, in its unit of tables."""
    factor = METRICS[quantity].display_factor
    return " / ".join(significant(factor * errors.metric(f"{quantity}:{kind}")) for kind in ("MAE", "RMSE"))


def show_metric(metric: str, value: float) -> str:
    """Return a metric such as ``E:MAE`` with its unit: eV to ``94.363 meV/atom``."""
    quantity = METRICS[metric[0].upper()]
    return f"{significant(quantity.display_factor * value)} {quantity.display_unit}"


def significant(value: float, digits: int = _DIGITS) -> str:
    """Return ``value`` with so many significant digits and without an exponent."""
    if not math.isfinite(value):
        return str(value)
    magnitude = int(f"{value:.{digits - 1}e}".partition("e")[2])
    decimals = digits - 1 - magnitude
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def _is_kept(line: str, step: int) -> bool:
    if best := BEST_LINE.match(line):
        return int(best[2]) <= step
    if line.startswith("#"):
        return True
    first = line.split(maxsplit=1)[:1]
    return bool(first) and first[0].isdigit() and int(first[0]) <= step
