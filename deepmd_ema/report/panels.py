"""Figures of one panel each, for a page whose width is that of its reader: learning curves, parity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.report.curves import VALIDATION, Curve
from deepmd_ema.report.plots import (
    INK,
    KEPT,
    LOSS,
    MAX_DOTS,
    QUANTITIES,
    Panel,
    curve_styles,
    draw_curve,
    draw_errors,
    draw_parity,
    fit_values,
    has_panel,
    picture,
)
from deepmd_ema.report.table import significant
from deepmd_ema.sorting import Array

MAX_POINTS = 1_500  # of an SVG: more make it larger than a PNG


@dataclass(frozen=True)
class Figure:
    """A figure of one panel.

    Attributes:
        file: SVG where it has few points, else PNG.
        words: what it shows, for those who do not see it.
    """

    file: Path
    words: str


@dataclass(frozen=True)
class Key:
    """The meaning of a kind of line in all panels.

    Attributes:
        label: whose errors it shows.
        color: of the line.
        width: in points.
        is_star: whether it is a star in place of a line.
    """

    label: str
    color: str
    width: float
    is_star: bool = False


def draw_curves(curves: Sequence[Curve], folder: Path) -> tuple[list[Figure], list[Key]]:
    """Return a figure of each quantity and one of the learning rate, and what their lines mean.

    Args:
        curves: of one run and one task.
        folder: where the files are written.
    """
    styles = curve_styles(curves)
    panels = [p for p in QUANTITIES.values() if any(has_panel(c, p) for c in curves)] or [LOSS]
    first, last = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
    margin = 0.03 * (last - first) or 1
    suffix = _suffix(sum(c.steps.size for c in curves if c.columns))
    figures, keys = list[Figure](), dict[str, Key]()
    for panel in panels:
        with picture(folder / f"{panel.title.split()[0]}{suffix}", 1) as (_, [axis]):
            for curve in curves:
                draw_curve(axis, curve, panel, styles)
            axis.set(title=panel.title, xlabel="Optimizer step", ylabel=f"RMSE ({panel.unit}), log scale")
            axis.set(xlim=(first - margin, last + margin), yscale="log")
            fit_values(axis)
            for line in axis.lines if not any(c.kind == VALIDATION for c in curves) else ():
                line.set(alpha=0.9, lw=1.4)  # there is nothing that it would hide
            keys |= {key.label: key for key in _keys(axis) if key.label not in keys}
        words = "; ".join(_last_values(curves, panel)) or "of single batches"
        figures.append(Figure(folder / f"{panel.title.split()[0]}{suffix}", f"{panel.title} over steps: {words}"))
    rates = next((c for c in curves if "lr" in c.columns), None)
    if rates is not None:
        with picture(folder / f"rate{suffix}", 1) as (_, [axis]):
            rate = rates.columns["lr"]
            axis.plot(rates.steps[rate > 0], rate[rate > 0], color=INK, lw=1.6)  # a warm-up begins at 0
            axis.set(title="Learning rate", xlabel="Optimizer step", ylabel="Learning rate, log scale", yscale="log")
            axis.set(xlim=(first - margin, last + margin))
        figures.append(Figure(folder / f"rate{suffix}", "Learning rate over steps"))
    # what matters most first
    return figures, sorted(keys.values(), key=lambda key: (key.is_star, -key.width))


def draw_parities(pairs: Mapping[str, tuple[Array, Array, str]], folder: Path) -> list[Figure]:
    """Return a figure of each quantity: predictions against labels, and below them how the errors are distributed.

    Args:
        pairs: quantity to (labels, predictions, unit); arrays of one shape. The unit starts with ``eV``.
        folder: where the files are written.
    """
    figures = []
    for name, (label, predicted, unit) in pairs.items():
        if not label.size:
            continue
        file = folder / f"parity_{name}{_suffix(label.size)}"
        with picture(file, 2, heights=(3.2, 1.0)) as (_, axes):
            draw_parity(axes[0], label, predicted)
            axes[0].set(title=name, xlabel=f"Reference ({unit})", ylabel=f"Predicted ({unit})")
            draw_errors(axes[1], 1000 * (predicted - label), f"m{unit}")
        error = 1000 * np.abs(predicted - label)
        density = ", density of points" * (label.size > MAX_DOTS)
        words = f"{name}: predictions against {label.size:,} reference values{density}"
        figures.append(Figure(file, f"{words}; mean absolute error {significant(float(error.mean()), 3)} m{unit}"))
    return figures


def _suffix(points: int) -> str:
    return ".svg" if points <= MAX_POINTS else ".png"


def _keys(axis: Any) -> Iterator[Key]:
    for handle, label in zip(*axis.get_legend_handles_labels()):
        if label == KEPT:
            yield Key("step of the best file", INK, handle.get_linewidth(), is_star=True)
        else:
            yield Key(label, handle.get_color(), handle.get_linewidth())


def _last_values(curves: Sequence[Curve], panel: Panel) -> Iterator[str]:
    """Yield the last error of each set of weights on the whole validation set."""
    for curve in curves:
        if curve.kind == VALIDATION and has_panel(curve, panel):
            yield f"{curve.weights} {significant(float(curve.columns[panel.full][-1]), 3)} {panel.unit} at the end"
