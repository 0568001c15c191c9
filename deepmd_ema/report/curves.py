"""Numbers out of ``lcurve.out`` and ``val.log``, of this program and of DeePMD-kit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config import load_config
from deepmd_ema.config.outputs import Outputs, weights_of_rows
from deepmd_ema.errors import UserError
from deepmd_ema.report.tables import BEST_LINE
from deepmd_ema.weight_names import LIVE

LCURVE, VALIDATION = "lcurve", "validation"
MAX_STEP = 10**18


class NoRowsError(UserError):
    """A file of rows does not exist, or has no rows: perhaps nothing was due yet."""


@dataclass(frozen=True)
class Curve:
    """One file of a run: what was measured at which steps.

    Attributes:
        path: the file.
        kind: ``lcurve`` (single batches, while it trains) or ``validation`` (the whole validation set).
        weights: ``live``, or the name of the average whose errors these are.
        steps: (R,) int64, rising.
        columns: column name to (R,) float64, in the units of the file.
        best_steps: steps whose weights were kept as the best.
        task: whose errors these are; empty in a run of one task, and of a learning curve of all tasks.
    """

    path: Path
    kind: str
    weights: str
    steps: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]
    best_steps: Sequence[int] = field(default=())
    task: str = ""

    def of_tasks(self) -> list[Curve]:
        """Return the learning curve of each task; of another file, or of one task, the curve itself."""
        if self.kind != LCURVE:
            return [self]
        named = {name: re.fullmatch(r"(\w+?_(?:val|trn))_([\w+-]+)", name) for name in self.columns}
        tasks = dict.fromkeys(found[2] for found in named.values() if found)
        whole = {name: self.columns[name] for name, found in named.items() if not found}
        return [
            replace(self, task=task, columns=whole | {
                found[1]: self.columns[name] for name, found in named.items() if found and found[2] == task
            })
            for task in tasks
        ] or [self]  # fmt: skip


def curve_files(path: str | Path) -> list[Path]:
    """Return the files of rows in the folder of a run, those of the live weights first; a file is itself one.

    Those that its input names are returned whether they exist or not, if one of them does.

    Raises:
        UserError: if the folder has none.
    """
    folder = Path(path)
    if not folder.is_dir():
        return [folder]
    with suppress(UserError):  # no normalized input there, or one of another program
        outputs = Outputs(load_config(folder / "out.json"))
        found = [folder / output.path for output in outputs if output.has_rows]
        if any(file.is_file() for file in found):
            return found
    patterns = ("lcurve.out", "lcurve_*.out", "val.log", "val_*.log")
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()]
    if not found:
        raise UserError(f"{path}: no lcurve.out or val.log in this folder. Give the folder of a run, or its files.")
    return found


def read_curve(path: str | Path) -> Curve:
    """Return the content of a learning curve or validation log.

    A header that is repeated after a restart is skipped, and of a step that was done twice the last row counts.

    Raises:
        NoRowsError: if the file is missing or has no rows.
        UserError: if it is neither of the two.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raised = NoRowsError if isinstance(error, FileNotFoundError) else UserError
        raise raised(f"{path}: cannot be read: {reason}. Give lcurve.out, val.log or val_ema.log.") from error
    lines = text.splitlines()
    header = next((line.lstrip("# ").split() for line in lines if re.match(r"#\s*step\s", line)), None)
    if header is None:
        raise UserError(f"{path}: has no header line '# step ...'. Give lcurve.out, val.log or val_ema.log.")
    rows: dict[int, list[float]] = {}  # in the order of their steps
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                step, values = _row(line, len(header), f"{path}, line {number}")
            except UserError:
                if number == len(lines) and not text.endswith("\n"):
                    break  # a run is writing it
                raise
            if rows and step <= next(reversed(rows)):
                rows = {earlier: row for earlier, row in rows.items() if earlier < step}
            rows[step] = values
    if not rows:
        raise NoRowsError(f"{path}: has a header but no rows yet.")
    table = np.array(list(rows.values()), np.float64)
    kind = VALIDATION if any("(" in name for name in header) else LCURVE
    task, weights = _task_and_weights(path, lines)
    return Curve(
        path=path,
        kind=kind,
        weights=weights,
        steps=np.array(list(rows), np.int64),
        columns={name: table[:, k] for k, name in enumerate(header[1:])},
        best_steps=[int(found[2]) for line in lines if (found := BEST_LINE.match(line))],
        task=task if kind == VALIDATION else "",
    )


def _task_and_weights(path: Path, lines: Sequence[str]) -> tuple[str, str]:
    """Return the weights whose errors a file holds: from a line of a best file, otherwise from its name."""
    values: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        values = json.loads(path.with_name("out.json").read_text(encoding="utf-8"))
    name, tasks = "", []
    with suppress(AttributeError):  # an input of another program
        tasks = list(values.get("model", {}).get("model_dict", {}))
        name = weights_of_rows(path, values)
    best = next((found[1] or LIVE for line in lines if (found := BEST_LINE.match(line))), None)
    name = best or name or weights_of_rows(path, {})
    for task in sorted(tasks, key=len, reverse=True):  # of ice and ice_ih, ice_ih_ema belongs to the second
        if name == task or name.startswith(f"{task}_"):
            return task, name[len(task) + 1 :] or LIVE
    return "", name


def _row(line: str, columns: int, place: str) -> tuple[int, list[float]]:
    """Return the step and the values of a row."""
    try:
        step, *values = map(float, line.split())
    except ValueError as error:
        raise UserError(f"{place}: {error}. Expected {columns} numbers.") from error
    if len(values) != columns - 1:
        raise UserError(f"{place}: {len(values) + 1} numbers, expected {columns} as in the header.")
    if not (0 <= step < MAX_STEP and step == int(step)):
        raise UserError(f"{place}: step {step:g}, expected a whole number.")
    return int(step), values
