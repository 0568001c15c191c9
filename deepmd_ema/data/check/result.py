"""Results of a check without problems, in a form that can be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deepmd_ema.geometry import NeighborStatistics


@dataclass(frozen=True)
class CheckResult:
    """Results of a check without problems that a run needs.

    Attributes:
        notes: how sources of other formats are read.
        warnings: what a user should look at.
        neighbors: over all usable frames, or over a sample; without numbers of single frames.
        date: when the data were read.
        problems: of options that were checked again.
    """

    notes: Sequence[str]
    warnings: Sequence[str]
    neighbors: NeighborStatistics
    date: str = ""
    problems: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        found = asdict(self.neighbors)
        neighbors = {n: np.asarray(value).tolist() for n, value in found.items() if not n.startswith("frame_")}
        return {"notes": list(self.notes), "warnings": list(self.warnings), "neighbors": neighbors}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any] | None) -> CheckResult | None:
        """Return the result that was remembered; None if ``stored`` is none."""
        if stored is None:
            return None
        try:
            given = dict(stored["neighbors"])
            given |= {name: np.array(given[name], np.float64) for name in ("by_rank", "nearest")}
            given["max_neighbors"] = tuple(given["max_neighbors"])
            neighbors = NeighborStatistics(**given, frame_min=np.empty(0), frame_pair=np.empty((0, 2), np.int64))
            notes, warnings = (list(map(str, stored[name])) for name in ("notes", "warnings"))
            return cls(notes, warnings, neighbors, str(stored["date"]))
        except (KeyError, TypeError, ValueError):  # something else has written it
            return None
