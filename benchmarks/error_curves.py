"""What benchmarks of validation errors share: runs that are done once, their errors along the way, and the picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import common

from deepmd_ema.report.curves import read_curve

COLUMNS = {"energy": "E_RMSE(meV/atom)", "force": "F_RMSE(meV/Å)", "stress": "S_RMSE(meV/Å³)"}
UNITS = {"energy": "meV/atom", "force": "meV/angstrom", "stress": "meV/angstrom^3"}
STYLES = {"live": "-", "averaged": "--"}
TRAINED = "model.ckpt.pt"


@dataclass
class Panel:
    """One quantity in a picture.

    Attributes:
        title: above it.
        label: what is drawn, with its unit.
        lines: the errors of each seed along the run, by what was trained and by weights.
        steps: where these errors were measured, by what was trained.
    """

    title: str
    label: str
    lines: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)
    steps: dict[str, list[float]] = field(default_factory=dict)


def validation_files(task: str = "") -> dict[str, str]:
    """Return the logs of full validation of live and averaged weights, of one task of several if it has a name."""
    stem = f"val_{task}" if task else "val"
    return {"live": f"{stem}.log", "averaged": f"{stem}_ema.log"}


def train_once(
    program: common.Program, env: dict[str, str], folder: Path, config: dict, options: Sequence[str] = ()
) -> None:
    """Train in ``folder``, unless that was done with the same input."""
    made_from = folder / "input.json"
    if (folder / TRAINED).exists() and json.loads(made_from.read_text()) == config:
        return
    common.write_input(folder, config)
    common.run_text(program, folder, env, "train", "input.json", "--skip-neighbor-stat", *options, "-l", "train.log")
    print(folder.name, flush=True)


def errors_along(folder: Path, task: str = "") -> tuple[list[int], dict[tuple[str, str], list[float]]]:
    """Return the steps of the validations of a run, and the errors by weights and quantity."""
    found: dict[tuple[str, str], list[float]] = {}
    steps: list[int] = []
    for weights, file in validation_files(task).items():
        curve = read_curve(folder / file)
        steps = curve.steps.tolist()
        found |= {(weights, quantity): curve.columns[column].tolist() for quantity, column in COLUMNS.items()}
    return steps, found


def median_and_range(values: Sequence[float]) -> str:
    """Return a cell with the median, least and most."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def median_and_each(values: Sequence[float]) -> str:
    """Return a cell with the median and each value."""
    return f"{statistics.median(values):.4g} ({', '.join(f'{value:.4g}' for value in values)})"


def draw(rows: Sequence[Sequence[Panel]], colors: Mapping[str, str], steps: str, output: Path) -> None:
    """Draw medians of live and averaged weights along the run, for the live ones with the range of the seeds.

    Args:
        rows: panels from above, each row from the left.
        colors: of what was trained.
        steps: what the steps are.
        output: a PNG.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    size = (5.2 * len(rows[0]), 0.6 + 3.4 * len(rows))
    figure, axes = plt.subplots(len(rows), len(rows[0]), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes.flat, (panel for row in rows for panel in row)):
        for (what, weights), runs in panel.lines.items():
            at, color, medians = panel.steps[what], colors[what], [statistics.median(row) for row in zip(*runs)]
            axis.plot(at, medians, STYLES[weights], color=color, label=f"{what}, {weights}")
            if weights == "live":
                spread = ((min(row), max(row)) for row in zip(*runs))
                axis.fill_between(at, *zip(*spread), color=color, alpha=0.15, lw=0)
        axis.set(xlabel=steps, ylabel=panel.label, yscale="log", title=panel.title)
        for which in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            which(LogFormatter(minor_thresholds=(2, 0.7)))
        axis.grid(alpha=0.3, which="both")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(colors)), fontsize="small")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    plt.close(figure)
