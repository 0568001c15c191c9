"""Numbers out of ``lcurve.out`` and ``val.log``, of this program and of DeePMD-kit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.errors import UserError

LCURVE, VALIDATION, LIVE = "lcurve", "validation", "live"
_BEST = re.compile(r"# saved best checkpoint: (?:\S*/)?best(?:_(\S+))?\.ckpt-(\d+)\.t-\d+\.pt")


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
    """

    path: Path
    kind: str
    weights: str
    steps: NDArray[np.int64]
    columns: Mapping[str, NDArray[np.float64]]
    best_steps: Sequence[int] = field(default=())


def read_curve(path: str | Path) -> Curve:
    """Return the content of a learning curve or validation log.

    A header that stands again after a restart is skipped, and of a step that was done twice the last row counts.

    Raises:
        UserError: if the file is missing, empty, or neither of the two.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(f"{path}: cannot be read: {reason}. Give lcurve.out, val.log or val_ema.log.") from error
    header = next((line.lstrip("# ").split() for line in lines if re.match(r"#\s*step\s", line)), None)
    if header is None:
        raise UserError(f"{path}: has no header line '# step ...'. Give lcurve.out, val.log or val_ema.log.")
    rows: dict[int, list[float]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            values = _row(line, len(header), path, number)
            rows = {step: row for step, row in rows.items() if step < values[0]} if _goes_back(rows, values) else rows
            rows[int(values[0])] = values[1:]
    if not rows:
        raise UserError(f"{path}: has a header but no rows yet.")
    table = np.array(list(rows.values()), np.float64)
    return Curve(
        path=path,
        kind=VALIDATION if any("(" in name for name in header) else LCURVE,
        weights=_weights(path, lines),
        steps=np.array(list(rows), np.int64),
        columns={name: table[:, k] for k, name in enumerate(header[1:])},
        best_steps=[int(found[2]) for line in lines if (found := _BEST.match(line))],
    )


def _weights(path: Path, lines: Sequence[str]) -> str:
    """Return whose errors a file holds: ``live``, the name of an average, or the file's own where nothing tells.

    A line of a best file tells it. Otherwise the name of the file does: a run puts ``_<name of the average>`` before
    the suffix of ``training.disp_file`` and ``validating.full_val_file``, which the normalized input beside it holds.
    """
    for line in lines:
        if best := _BEST.match(line):
            return best[1] or LIVE
    stems = {"lcurve", "val"}
    with suppress(OSError, ValueError, AttributeError):  # no input there, or one of another program
        config = json.loads(path.with_name("out.json").read_text(encoding="utf-8"))
        names = (config.get("training", {}).get("disp_file"), config.get("validating", {}).get("full_val_file"))
        stems |= {Path(name).stem for name in names if name}
    if path.stem in stems:
        return LIVE
    # the longest: of run.out and run_ice.out, run_ice_ema.out belongs to the second
    start = max((stem for stem in stems if path.stem.startswith(f"{stem}_")), key=len, default=None)
    return path.stem if start is None else path.stem.removeprefix(f"{start}_")


def _goes_back(rows: Mapping[int, list[float]], values: Sequence[float]) -> bool:
    return bool(rows) and values[0] <= next(reversed(list(rows)))


def _row(line: str, columns: int, path: Path, number: int) -> list[float]:
    words = line.split()
    try:
        values = [float(word) for word in words]
    except ValueError as error:
        raise UserError(f"{path}, line {number}: {error}. Expected {columns} numbers.") from error
    if len(values) != columns:
        raise UserError(f"{path}, line {number}: {len(values)} numbers, expected {columns} as in the header.")
    return values
