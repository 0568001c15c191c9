"""What was found about averages of several lengths: the table, its file, the picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepmd_ema.errors import UserError
from deepmd_ema.files import atomic_write
from deepmd_ema.metrics import METRICS

if TYPE_CHECKING:
    from deepmd_ema.posthoc.combination import Combination, Combinations
    from deepmd_ema.posthoc.snapshots import SnapshotRun
    from deepmd_ema.metrics import Errors

RANKED = ("E", "F", "V")  # quantities of the table and of `overall`
_UNITS = {"E": "meV/atom", "F": "meV/Å", "V": "meV/atom"}


@dataclass(frozen=True)
class Row:
    """One set of weights and its errors.

    Attributes:
        kind: ``live``, ``tracked`` or ``posthoc``.
        name: of the weights.
        sigma_rel: width of a power profile, or None.
        gamma: its exponent, or None.
        mean_age: steps between the weights in it, on average, and its last update.
        combination: how it was combined, or None.
        errors: on the validation frames.
    """

    kind: str
    name: str
    sigma_rel: float | None
    gamma: float | None
    mean_age: float
    combination: Combination | None
    errors: Errors

    def score(self, metric: str, live: Errors) -> float:
        """Return the value of ``metric``: ``overall`` (relative to ``live``), or one such as ``F:RMSE``."""
        if metric != "overall":
            return self.errors.metric(metric)
        pairs = [(self.errors.metric(f"{name}:RMSE"), live.metric(f"{name}:RMSE")) for name in RANKED]
        parts = [own / other if other else math.inf for own, other in pairs if not math.isnan(other)]
        return sum(parts) / len(parts)

    def words(self) -> str:
        """Return one line about an average that was made of snapshots."""
        assert self.combination is not None
        return f"sigma_rel {self.sigma_rel:.4g}, gamma {self.gamma:.4g}, mean age {self.mean_age:,.0f} steps"


@dataclass(frozen=True)
class PosthocReport:
    """Errors of the live weights, of tracked averages and of those made of snapshots.

    Attributes:
        run: whose snapshots.
        found: how the averages were combined.
        reach: shortest and longest sigma_rel that the snapshots can tell, or None.
        rows: the live weights first.
        metric: what best means.
        best: place of the chosen row.
        num_frames: of the validation data.
        num_systems: of the validation data.
    """

    run: SnapshotRun
    found: Combinations
    reach: tuple[float, float] | None
    rows: Sequence[Row]
    metric: str
    best: int
    num_frames: int
    num_systems: int

    @property
    def chosen(self) -> Row:
        """The best average that was made of snapshots."""
        return self.rows[self.best]

    def scores(self) -> list[float]:
        """Return the value of the metric for each row."""
        return [row.score(self.metric, self.rows[0].errors) for row in self.rows]

    def text(self) -> str:
        """Return the table with what it was made of, and what it says."""
        lines = [*self._head(), "", *self._table(), ""]
        scores = self.scores()
        winner = min(range(len(scores)), key=lambda k: scores[k] if not math.isnan(scores[k]) else math.inf)
        lines.append(f"chosen by {self.metric}: {self.chosen.words()}")
        if winner != self.best:
            other = self.rows[winner]
            better = 1 - scores[winner] / scores[self.best]
            lines.append(f"{other.name} is better still, by {100 * better:.2g} %")
        made = [row for row in self.rows if row.kind == "posthoc"]
        if len(made) > 2 and self.chosen in (made[0], made[-1]):
            lines.append("the chosen one is at an end of the range: a length beyond it may be better still")
            if self.reach is not None and any(math.isclose(self.chosen.sigma_rel or 0, end) for end in self.reach):
                lines.append("more frequent snapshots (a smaller snapshot_freq) reach further")
        return "\n".join(lines)

    def write_table(self, path: str | Path) -> Path:
        """Write every number as comma-separated values and return the file."""
        columns = ["weights", "kind", "sigma_rel", "gamma", "mean_age_steps"]
        columns += [f"{kind.lower()}_{name.lower()}_m{unit}" for name in METRICS for kind in ("RMSE", "MAE")
                    for unit in [{"S": "eV/A^3", "F": "eV/A"}.get(name, "eV/atom")]]  # fmt: skip
        columns += [f"score_{self.metric}", "residual", "amplification", "condition", "chosen"]
        path = Path(path)
        try:
            with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                for k, (row, score) in enumerate(zip(self.rows, self.scores())):
                    errors = [1000 * row.errors.metric(f"{n}:{kind}") for n in METRICS for kind in ("RMSE", "MAE")]
                    combination = [row.combination.residual, row.combination.amplification, self.found.condition] if row.combination else [None] * 3
                    writer.writerow([row.name, row.kind, row.sigma_rel, row.gamma, row.mean_age, *errors, score, *combination,
                                     int(k == self.best)])  # fmt: skip
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}. Choose another --table.") from error
        return path

    def plot(self, path: str | Path) -> Path:
        """Draw the errors over the length and return the picture's path."""
        from deepmd_ema.report.plots import plot_sigma_rels

        made = [k for k, row in enumerate(self.rows) if row.kind == "posthoc"]
        values = {name: [1000 * row.errors.metric(f"{name}:RMSE") for row in self.rows] for name in RANKED}
        return plot_sigma_rels(
            [self.rows[k].sigma_rel or 0.0 for k in made],
            {name: [column[k] for k in made] for name, column in values.items()},
            {row.name: (row.sigma_rel, {name: values[name][k] for name in RANKED})
             for k, row in enumerate(self.rows) if row.kind != "posthoc"},
            made.index(self.best),
            path,
            f"{self.run.folder.resolve().name}, step {self.run.step:,}: averages of {len(self.run.kept)} snapshots; "
            f"{self.num_frames} validation frames",
        )  # fmt: skip

    def _head(self) -> list[str]:
        run, found = self.run, self.found
        names = dict.fromkeys((kept.profile, f"{kept.track.sigma_rel:.4g}") for kept in run.kept)
        profiles = ", ".join(f"{name} (sigma_rel {width})" for name, width in names)
        reach = "those that were tracked" if self.reach is None else f"{self.reach[0]:.3g} to {self.reach[1]:.3g}"
        dropped = f", {found.dropped} directions below rounding dropped" if found.dropped else ""
        return [
            f"{run.folder}: step {run.step:,}, {len(run.kept)} snapshots of {profiles}",
            f"solve: condition {found.condition:.2g}{dropped}; sigma_rel that can be told: {reach}",
            f"errors on {self.num_frames} frames of {self.num_systems} system{'s' * (self.num_systems > 1)}",
        ]

    def _table(self) -> list[str]:
        scores = self.scores()
        columns = [[1000 * row.errors.metric(f"{name}:RMSE") for row in self.rows] for name in RANKED]
        overall = self.metric == "overall"
        head = ["weights", "sigma_rel", "gamma", "mean age", *(f"{name} RMSE" for name in RANKED), self.metric,
                "residual", "rounding"]  # fmt: skip
        units = ["", "", "", "steps", *(_UNITS[name] for name in RANKED), "of live" if overall else "meV", "", "x"]
        scale = 1 if overall else 1000
        cells = [head, units]
        for k, row in enumerate(self.rows):
            cells.append([
                row.name,
                "-" if row.sigma_rel is None else f"{row.sigma_rel:.4f}",
                "-" if row.gamma is None else f"{row.gamma:.4g}",
                f"{row.mean_age:,.0f}",
                *(_marked(column, k, 4) for column in columns),
                _marked([scale * score for score in scores], k, 4),
                "-" if row.combination is None else f"{100 * row.combination.residual:.2g} %",
                "-" if row.combination is None else f"{row.combination.amplification:.2g}",
            ])  # fmt: skip
        widths = [max(len(line[c]) for line in cells) for c in range(len(head))]
        out = ["  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:]))])
               for line in cells]  # fmt: skip
        out[2 + self.best] += "  <- chosen"
        return [line.rstrip() for line in [*out, "* the best of its column"]]


def _marked(column: Sequence[float], k: int, digits: int) -> str:
    """Return entry ``k`` of a column of errors, with a star if no other is smaller."""
    if math.isnan(column[k]):
        return "- "
    best = min(value for value in column if not math.isnan(value))
    return f"{column[k]:.{digits}g}{'*' if column[k] == best else ' '}"
