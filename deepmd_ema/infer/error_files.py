"""Files that ``dp-ema test`` writes: tables of labels beside predictions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.config.labels import QUANTITIES, Label, Quantity
from deepmd_ema.data.formats.extxyz import XYZ_SUFFIXES
from deepmd_ema.distributed.files import TABLE, atomic_write, check_output
from deepmd_ema.errors import UserError
from deepmd_ema.model.metrics import FrameResult


def refuse_details(prefix: str | Path) -> None:
    """Check that ``ErrorReport.write_details`` would write over nothing but its own files.

    Raises:
        UserError: if a file of another kind is there.
    """
    for name in QUANTITIES:
        check_output(f"{prefix}.{name}.out", "-d", TABLE)


def refuse_frames(path: str) -> None:
    """Check that ``ErrorReport.write_frames`` can write a new file.

    Raises:
        UserError: if the name is of another kind of file, or a file is there, which may be data.
    """
    if Path(path).suffix.lower() not in XYZ_SUFFIXES:
        raise UserError(f"-o {path}: expected a file that ends in {' or '.join(XYZ_SUFFIXES)}.")
    if os.path.lexists(path):
        raise UserError(f"-o {path}: exists, and may be data. Name another file, or remove it.")
    check_output(path, "-o", None)


def write_table(path: Path, frames: Sequence[FrameResult], label: Label, quantity: Quantity) -> Path:
    """Write the values of one label and those of the model, a row for each of its rows, and return the path."""
    per_volume, axes = quantity.per == "volume", axes_of(label)
    symbol, unit = ("s", f" ({quantity.unit_symbol})") if per_volume else (label.symbol or quantity.name, "")
    columns = " ".join(f"{kind}_{symbol}{axis}" for kind in ("data", "pred") for axis in axes)
    blocks: dict[str, list[NDArray[Any]]] = {}
    for frame in frames:
        # stress is the opposite of the virial per volume
        scale = {"atom": frame.size, "volume": -(frame.volume or 0.0)}.get(quantity.per, 1)
        predicted = (frame.prediction[label.name] / scale).reshape(-1, len(axes))
        known = np.full_like(predicted, np.nan)
        if label.name in frame.label:
            known = (frame.label[label.name] / scale).reshape(-1, len(axes))
        blocks.setdefault(frame.source[0], []).append(np.hstack([known, predicted]))
    with atomic_write(path, "Choose another -d.") as part, part.open("w", encoding="utf-8", errors="replace") as file:
        for system, rows in blocks.items():
            np.savetxt(file, np.vstack(rows), header=f"{system}{unit}: {columns}")
    return path


def axes_of(label: Label) -> list[str]:
    """Return the names of the components of a label; of properties and densities of states numbers."""
    known = {(): [""], (3,): [*"xyz"], (9,): [a + b for a in "xyz" for b in "xyz"]}
    return [str(k) for k in range(label.shape[0])] if label.name.endswith("]") else known[label.shape]
