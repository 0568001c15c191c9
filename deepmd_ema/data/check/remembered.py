"""What a check has found in data whose files have not changed since: a small file, so that a start need not read them.

A result belongs to the paths, sizes, inodes and times (of the last change of content and of anything else) of all files
of the data, to every option that the check depends on, and to the version of the program. It is remembered only of data
without problems.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema import __version__
from deepmd_ema.data.source import FrameSource
from deepmd_ema.files import atomic_write
from deepmd_ema.geometry import NeighborStatistics

_MOST_RESULTS = 16  # in one file, which runs on other data or with other options may share
_UNSURE_S = 2.0  # a file younger than this may change again without another time; some file systems count in 2 s


@dataclass(frozen=True)
class CheckResult:
    """What a run needs of a check without problems.

    Attributes:
        notes: how sources of other formats are read.
        warnings: what a user should look at.
        neighbors: over all usable frames, or over a sample, without numbers of single frames.
        date: when the data were read.
        problems: of options that were checked again.
    """

    notes: Sequence[str]
    warnings: Sequence[str]
    neighbors: NeighborStatistics
    date: str = ""
    problems: Sequence[str] = ()


def identify(sources: Sequence[FrameSource], options: Mapping[str, Any], now: float) -> str | None:
    """Return what identifies the data and the options of a check, None of data that cannot be identified.

    Args:
        sources: opened at ``now`` or later.
        options: everything that the result depends on beside the data and the program.
        now: seconds since the epoch.
    """
    digest = hashlib.sha256(json.dumps([__version__, options], sort_keys=True).encode())
    for source in sources:
        files = source.files()
        if files is None:
            return None
        about: list[object] = [source.name, source.num_frames, list(source.unread)]
        for file in files:
            try:
                found = os.stat(file)
            except OSError:
                return None
            if max(found.st_mtime, found.st_ctime) > now - _UNSURE_S:
                return None
            about.append([str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns])
        digest.update(json.dumps(about).encode())
    return digest.hexdigest()


def recall(path: Path, key: str) -> CheckResult | None:
    """Return the result of ``key`` in the file at ``path``; None if there is none."""
    stored = _read(path).get(key)
    try:
        return None if stored is None else _result(stored)
    except (KeyError, TypeError, ValueError):  # of a file that something else has written
        return None


def remember(path: Path, key: str, result: CheckResult) -> None:
    """Add a result to the file at ``path``, which keeps the newest ones.

    Raises:
        WriteError: if the system refuses to write.
    """
    neighbors = {name: np.asarray(value).tolist() for name, value in asdict(_of_all(result.neighbors)).items()}
    date = time.strftime("%Y-%m-%d %H:%M:%S")
    new: dict[str, Any] = {
        "notes": list(result.notes),
        "warnings": list(result.warnings),
        "neighbors": neighbors,
        "date": date,
    }
    kept = {name: stored for name, stored in _read(path).items() if name != key}
    kept = dict([*kept.items(), (key, new)][-_MOST_RESULTS:])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        part.write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _result(stored: Mapping[str, Any]) -> CheckResult:
    neighbors = dict(stored["neighbors"])
    for name in ("by_rank", "nearest", "frame_min", "frame_pair"):
        neighbors[name] = np.array(neighbors[name], np.float64)
    neighbors["max_neighbors"] = tuple(neighbors["max_neighbors"])
    return CheckResult(
        notes=[str(line) for line in stored["notes"]],
        warnings=[str(line) for line in stored["warnings"]],
        neighbors=_of_all(NeighborStatistics(**neighbors)),
        date=str(stored["date"]),
    )


def _of_all(neighbors: NeighborStatistics) -> NeighborStatistics:
    """Return statistics without numbers of single frames."""
    return replace(neighbors, frame_min=np.empty(0), frame_pair=np.empty((0, 2), np.int64))
