"""Errors of averages of several widths and decays: the table, its file, the figure."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepmd_ema.commands.posthoc.combination import (
    SHAPES,
    Combination,
    Combinations,
    Decay,
    percent,
)
from deepmd_ema.commands.posthoc.snapshots import SnapshotRun
from deepmd_ema.config.labels import METRICS
from deepmd_ema.files import atomic_write
from deepmd_ema.model.metrics import Errors
from deepmd_ema.report.facts import METRICS_IN_ORDER, displayed, labelled
from deepmd_ema.report.table import Column, Table, render
from deepmd_ema.text import counted
from deepmd_ema.utils import POSTHOC

# quantities of the table, and in their place those of models without energies; all are in `overall`
RANKED = "EFV"
OTHERS = METRICS_IN_ORDER.partition("V")[2]
# kinds of rows, beside those of live weights and of lengths made of snapshots
TRACKED, SHAPE = "tracked", "shape"
# mean of the RMSEs of energy, force and virial, each as a part of that of the live weights
OVERALL = "overall"


@dataclass(frozen=True)
class Row:
    """One set of weights and its errors.

    Attributes:
        kind: ``live``, ``tracked``, or made of snapshots (``posthoc`` a length, ``shape`` a decay).
        name: of the weights.
        sigma_rel: width of the profile, or None.
        gamma: exponent of a power profile, or None.
        mean_age: mean number of steps between the weights in it and its last update.
        combination: how it was made of snapshots, or None.
        errors: on the validation frames.
    """

    kind: str
    name: str
    sigma_rel: float | None = None
    gamma: float | None = None
    mean_age: float = 0.0
    combination: Combination | None = None
    errors: Errors = field(default_factory=Errors)

    @property
    def decay(self) -> Decay | None:
        """The decay that it replaces, if it does."""
        target = None if self.combination is None else self.combination.target
        return target if isinstance(target, Decay) else None

    def score(self, metric: str, live: Errors) -> float:
        """Return the value of ``metric``: ``overall`` (relative to ``live``), or as ``F:RMSE``."""
        if metric != OVERALL:
            return self.errors.metric(metric)
        pairs = [
            (self.errors.metric(f"{name}:RMSE"), live.metric(f"{name}:RMSE"))
            for name in RANKED + OTHERS
        ]
        # Quantities without labels are NaN and do not count. Live weights without an error cannot
        # be improved upon: any other error is infinitely larger.
        parts = [
            error / live_error if live_error else math.inf
            for error, live_error in pairs
            if not math.isnan(live_error)
        ]
        return sum(parts) / len(parts) if parts else math.nan

    def describe(self) -> str:
        """Return one line about weights that were made of snapshots."""
        back = f"looks back {self.mean_age:,.0f} steps on average"
        if self.decay is None:
            return f"sigma_rel {self.sigma_rel:.4g}, gamma {self.gamma:.4g}, {back}"
        length = (
            f"the last {percent(self.decay.part)} ({counted(self.decay.steps, 'step')})"
        )
        return f"{self.decay.shape} decay over {length}, {back}"


@dataclass(frozen=True)
class PosthocReport:
    """Errors of the live weights, of tracked averages and of those made of snapshots.

    Attributes:
        run: whose snapshots.
        combinations: the averages that were made of snapshots.
        rows: the live weights first.
        metric: what best means.
        best: index of the chosen row.
        num_frames: of the validation data.
        num_systems: of the validation data.
    """

    run: SnapshotRun
    combinations: Combinations
    rows: Sequence[Row]
    metric: str
    best: int
    num_frames: int
    num_systems: int

    @property
    def chosen(self) -> Row:
        """The best of the weights that were made of snapshots."""
        return self.rows[self.best]

    def scores(self) -> list[float]:
        """Return the value of the metric for each row."""
        return [row.score(self.metric, self.rows[0].errors) for row in self.rows]

    def text(self) -> str:
        """Return the table with what it was made of, and what it says."""
        run = self.run
        combined = self.combinations
        ends = combined.resolvable
        scores = self.scores()
        names = dict.fromkeys(
            (s.profile, f"{s.track.sigma_rel:.4g}") for s in run.snapshots
        )
        profiles = ", ".join(f"{name} (sigma_rel {width})" for name, width in names)
        number = combined.dropped
        dropped = f", {number} directions below rounding dropped" if number else ""
        widths = (
            "those that were tracked"
            if ends is None
            else f"{ends[0]:.3g} to {ends[1]:.3g}"
        )
        lines = [
            f"{run.folder}: step {run.step:,}, {counted(len(run.snapshots), 'snapshot')} of "
            f"{profiles}",
            f"combined: condition {combined.condition:.2g}{dropped}; sigma_rel that the snapshots "
            f"can give: {widths}",
            *(
                f"left out, {reason}: {', '.join(names)}"
                for reason, names in combined.left_out.items()
            ),
            f"errors on {counted(self.num_frames, 'frame')} of "
            f"{counted(self.num_systems, 'system')}",
            "",
            *render(self.table()),
            "* the best of its column",
            "",
            f"chosen by {self.metric}: {self.chosen.describe()}",
        ]
        # NaN compares with nothing: such rows come last
        order = sorted(
            range(len(scores)), key=lambda k: (math.isnan(scores[k]), scores[k])
        )
        # text by "posthoc" (the lengths) and by shape of the decays, the best first
        best: dict[str, str] = {}
        for k, row in (
            (k, self.rows[k]) for k in order if self.rows[k].combination is not None
        ):
            name = row.name if row.decay else f"sigma_rel {row.sigma_rel:.4g}"
            best.setdefault(
                row.decay.shape if row.decay else row.kind,
                f"{name} ({scores[k] / scores[0]:.4g} of live)",
            )
        if best.keys() & SHAPES.keys():
            lines.append(
                f"best length, and best decay of each shape: {', '.join(best.values())}"
            )
        # live or tracked weights may be better than all that was made of snapshots
        if order[0] != self.best:
            better = 1 - scores[order[0]] / scores[self.best]
            lines.append(
                f"{self.rows[order[0]].name} is better still, by {100 * better:.2g} %"
            )
        # rows of lengths are in rising order of sigma_rel; with one or two each is at an end
        lengths = [row for row in self.rows if row.kind == POSTHOC]
        at_ends = (
            (lengths[0].sigma_rel, lengths[-1].sigma_rel) if len(lengths) > 2 else ()
        )
        if self.chosen.sigma_rel in at_ends:
            lines.append(
                "the chosen one is at an end of the range: a sigma_rel beyond it may be better "
                "still"
            )
            if ends and any(
                math.isclose(self.chosen.sigma_rel or 0, end) for end in ends
            ):
                lines.append(
                    "more frequent snapshots (a smaller snapshot_freq) widen the resolvable range"
                )
        return "\n".join(lines)

    @property
    def _ranked(self) -> str:
        """Letters of the quantities of the table."""
        # a model without energies predicts others, e.g. dipoles, and has no labels of E, F and V
        predicted = "".join(q for q in labelled(self.rows[0].errors) if q in OTHERS)
        return predicted or RANKED

    def table(self) -> Table:
        """Return one row per set of weights, with a star at the best of each column of errors."""
        errors = [
            [displayed(row.errors, f"{name}:RMSE") for row in self.rows]
            for name in self._ranked
        ]
        scores = self.scores()
        unit = "of live"
        if self.metric != OVERALL:
            # a metric such as F:RMSE begins with the letter of its quantity
            quantity = METRICS[self.metric[0]]
            scores = [quantity.display_factor * score for score in scores]
            unit = quantity.display_unit
        # a star where no other is smaller
        best = [
            min((value for value in column if not math.isnan(value)), default=math.nan)
            for column in (*errors, scores)
        ]
        rows = []
        for k, row in enumerate(self.rows):
            # each value with the least of its column
            cells = zip((column[k] for column in (*errors, scores)), best)
            # a space in place of the star keeps the numbers in line
            starred = [
                None
                if math.isnan(value)
                else f"{value:.4g}{'*' if value == least else ' '}"
                for value, least in cells
            ]
            solution = row.combination
            solved = (
                (f"{100 * solution.residual:.2g} %", solution.amplification)
                if solution
                else (None, None)
            )
            mark = "<- chosen" if k == self.best else ""
            rows.append(
                (
                    row.name,
                    row.sigma_rel,
                    row.gamma,
                    row.mean_age,
                    *starred,
                    *solved,
                    mark,
                )
            )
        heads = [
            Column("weights"),
            Column("sigma_rel", "", ".4f"),
            Column("gamma", "", ".4g"),
            Column("looks back", "steps", ",.0f"),
            *(
                Column(f"{q} RMSE", METRICS[q].display_unit, ".4g")
                for q in self._ranked
            ),
            Column(self.metric, unit, ".4g"),
            Column("residual", "", ".2g"),
            Column("rounding", "x", ".2g"),
            Column(),
        ]
        return Table("", heads, rows)

    def write_table(self, path: str | Path) -> Path:
        """Write every number as comma-separated values and return the file."""
        errors = [(q, kind) for q in METRICS.values() for kind in ("RMSE", "MAE")]
        columns = ["weights", "kind", "sigma_rel", "gamma", "mean_age_steps"]
        # the unit is part of the name, e.g. rmse_f_meV/A: numbers are in thousandths
        columns += [
            f"{kind.lower()}_{q.metric.lower()}_m{q.unit.replace('angstrom', 'A')}"
            for q, kind in errors
        ]
        columns += [
            f"score_{self.metric}",
            "residual",
            "amplification",
            "condition",
            "chosen",
            "shape",
            "part",
        ]
        path = Path(path)
        advice = "Choose another --table."
        with (
            atomic_write(path, advice) as part,
            part.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(columns)
            for k, (row, score) in enumerate(zip(self.rows, self.scores())):
                values = [
                    1000 * row.errors.metric(f"{q.metric}:{kind}") for q, kind in errors
                ]
                solution = row.combination
                # live and tracked weights have empty cells here
                solved = (
                    [
                        solution.residual,
                        solution.amplification,
                        self.combinations.condition,
                    ]
                    if solution
                    else [None] * 3
                )
                shape = [row.decay.shape, row.decay.part] if row.decay else [None] * 2
                writer.writerow(
                    [
                        row.name,
                        row.kind,
                        row.sigma_rel,
                        row.gamma,
                        row.mean_age,
                        *values,
                        score,
                        *solved,
                        int(k == self.best),
                        *shape,
                    ]
                )
        return path

    def plot(self, path: str | Path) -> Path:
        """Draw the errors over sigma_rel and return the path of the figure."""
        from deepmd_ema.report.plots import plot_sigma_rels

        values = [
            {name: displayed(row.errors, f"{name}:RMSE") for name in self._ranked}
            for row in self.rows
        ]
        # a curve for lengths and one for each shape, points for live and tracked weights
        curves: dict[str, list[tuple[float, Mapping[str, float]]]] = {}
        for row, errors in zip(self.rows, values):
            if row.combination is not None:
                label = f"{row.decay.shape} decay" if row.decay else "made of snapshots"
                curves.setdefault(label, []).append((row.sigma_rel or 0.0, errors))
        return plot_sigma_rels(
            curves,
            {
                row.name: (row.sigma_rel, values[k])
                for k, row in enumerate(self.rows)
                if row.combination is None
            },
            (self.chosen.sigma_rel or 0.0, values[self.best]),
            path,
            f"{self.run.folder.resolve().name}, step {self.run.step:,}: averages of "
            f"{len(self.run.snapshots)} snapshots; {self.num_frames} validation frames",
        )
