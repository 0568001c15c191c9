"""Figures: learning curves of one or several runs, errors over widths of averages, predictions against labels."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from deepmd_ema.errors import UserError, collect_problems
from deepmd_ema.files import PICTURE, atomic_write, check_output
from deepmd_ema.labels import METRICS
from deepmd_ema.report.curves import LCURVE, VALIDATION, Curve, NoRowsError, curve_files, read_curve
from deepmd_ema.sorting import Array
from deepmd_ema.weight_names import LIVE

logger = logging.getLogger(__name__)

# blue for the live weights and orange for averaged ones, everywhere; the palette of Okabe and Ito
LIVE_COLOR, AVERAGE_COLOR, TRAIN_COLOR = "#0072B2", "#E69F00", "#9aa5b1"
LIVE_BATCHES = "#74aed3"  # a light LIVE_COLOR
RUN_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
OTHER_COLORS = tuple(color for color in RUN_COLORS if color not in (LIVE_COLOR, AVERAGE_COLOR))
LINES = ("-", "--", ":", "-.")
TRAIN_LEVEL = 2  # lines of training batches lie below all others
MAX_DOTS = 5_000  # beyond it a density says more than dots
MAX_MARKED_AVERAGES = 2  # averages whose rows are marked by dots; more lines would hide each other
KEPT = "kept as best"
NORMAL, SMALL = 11.0, 9.5  # points; legends and the errors below a panel are small
PANEL = (3.7, 2.9)  # inches; small, so that the type is still read where a figure is scaled to one column of a page
INK = "#28323c"
STYLE = {
    "font.size": NORMAL, "axes.titlesize": NORMAL, "axes.labelsize": NORMAL, "legend.fontsize": SMALL,
    "legend.handlelength": 2.8,
    "axes.edgecolor": "#8a949e", "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "axes.grid.which": "major", "grid.color": "#e3e7eb", "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    "axes.titleweight": "bold", "legend.frameon": False, "figure.dpi": 150.0, "lines.solid_capstyle": "round",
}  # fmt: skip


@dataclass(frozen=True)
class CurveStyle:
    """Style of the curves of one file.

    Attributes:
        color: of the whole validation set.
        batches: colors of training and validation batches.
        line: dashes, which distinguish weights where colors distinguish runs.
        run: name of the run, where there are several.
        weights: name of the weights with these errors.
        marker: of each row; none where they would hide dashes, or other lines.
    """

    color: str
    batches: tuple[str, str]
    line: str
    run: str
    weights: str
    marker: str = ""

    def label(self, frames: str) -> str:
        """Return the entry of the legend for errors on ``frames``."""
        return f"{frames}, {self.weights}"


Styles: TypeAlias = Mapping[tuple[Path, str], CurveStyle]
"""How the curves of a task in a file are drawn."""


@dataclass(frozen=True)
class Panel:
    """Content of one panel of the learning curves.

    Attributes:
        title: quantity.
        unit: unit on its axis.
        batch: column of lcurve.out without ``_trn`` and ``_val``; empty if there is none.
        full: column of val.log, in ``unit``; empty if there is none.
        factor: numbers of ``batch`` times this are in ``unit``.
    """

    title: str
    unit: str
    batch: str
    full: str
    factor: float = 1.0

    @classmethod
    def of(cls, metric: str, symbol: str) -> Panel:
        """Return the panel of a metric; ``symbol`` of its label ends the name of its column in lcurve.out."""
        quantity, unit = METRICS[metric], METRICS[metric].display_unit
        batch = f"rmse_{symbol}" if symbol else ""
        return cls(f"{quantity.title} RMSE", unit, batch, f"{metric}_RMSE({unit})", quantity.display_factor)


QUANTITIES = {"E": Panel.of("E", "e"), "F": Panel.of("F", "f"), "V": Panel.of("V", "v"), "S": Panel.of("S", "")}
LOSS = Panel("Loss", "weighted RMSE", "rmse", "")


def plot_curves(files: Sequence[str | Path], output: str | Path, log_steps: bool = False) -> Path:
    """Draw the learning curves in ``files`` together and return the path of the figure.

    Live and averaged weights have their own colors; with files of several runs, or tasks, each of these has one. A
    file without rows is left out with a warning.

    Args:
        files: lcurve.out, val.log, val_ema.log of one or several runs, also DeePMD-kit's; or folders of runs.
        output: picture to write; the suffix says which format.
        log_steps: a logarithmic axis of steps.

    Raises:
        UserError: if a file is not one of these, none has rows, or the picture cannot be written.
    """
    output = picture_file(output)
    curves = read_curves(files)
    styles = curve_styles(curves)
    panels = [p for p in QUANTITIES.values() if any(has_panel(c, p) for c in curves)] or [LOSS]
    rates = list({c.path: c for c in curves if "lr" in c.columns}.values())
    several = len({_group(c) for c in curves}) > 1
    several_runs = len({c.path.parent for c in curves}) > 1
    with picture(output, len(panels) + bool(rates)) as (figure, axes):
        for axis, panel in zip(axes, panels):
            for curve in _readable(curves, panel) if several else curves:
                draw_curve(axis, curve, panel, styles)
            axis.set(title=panel.title, ylabel=f"{panel.title.split()[-1]} ({panel.unit})")
        for curve in rates:
            color = styles[curve_key(curve)].color if several_runs else INK
            axes[-1].plot(curve.steps, curve.columns["lr"], color=color, lw=1.6)
            axes[-1].set(title="Learning rate", ylabel="Learning rate")
        first, last = min(c.steps[0] for c in curves), max(c.steps[-1] for c in curves)
        margin = 0.03 * (last - first) or 1
        for axis in axes:
            axis.set(xlabel="Optimizer step", xlim=(first - margin, last + margin))
            axis.set_yscale("log")
            fit_values(axis)
            if log_steps:
                axis.set(xscale="log", xlim=(0.9 * max(1, first), 1.1 * last))
        _legend(figure, axes, keys=_keys(curves, styles) if several else {})
    return output


def read_curves(files: Sequence[str | Path]) -> list[Curve]:
    """Return the curves of files, or of folders of runs, one for each task; files without rows are named in the log.

    Raises:
        NoRowsError: if none has rows.
        UserError: if a file is not one of these.
    """
    curves, without_rows = list[Curve](), list[str]()
    for file in (file for path in files for file in curve_files(path)):
        with collect_problems(without_rows, kind=NoRowsError):
            curves += read_curve(file).of_tasks()
    if not curves:
        raise NoRowsError(without_rows)
    for problem in without_rows:
        logger.warning("not drawn: %s", problem)
    return curves


def _readable(curves: Sequence[Curve], panel: Panel) -> list[Curve]:
    """Return the curves of one panel for several runs: errors on single batches only of runs without better ones."""
    validated = {_group(c) for c in curves if c.kind == VALIDATION and has_panel(c, panel)}
    return [c for c in curves if c.kind == VALIDATION or _group(c) not in validated]


def _group(curve: Curve) -> tuple[Path, str]:
    """Return the group of curves that share one color: the folder of a run, and the task."""
    return curve.path.parent, curve.task


def curve_key(curve: Curve) -> tuple[Path, str]:
    """Return the key of a curve in its styles."""
    return curve.path, curve.task


def _keys(curves: Sequence[Curve], styles: Styles) -> dict[str, Any]:
    """Return the entries of the legend of several runs: the color of each run, the dashes of each set of weights."""
    from matplotlib.lines import Line2D

    chosen = [styles[curve_key(c)] for c in curves]
    runs = {s.run: Line2D([], [], color=s.color, lw=2.0) for s in chosen}
    weights = {s.weights: Line2D([], [], color=INK, lw=2.0, ls=s.line) for s in chosen}
    return runs | (weights if len(weights) > 1 else {})


def plot_parity(pairs: Mapping[str, tuple[Array, Array, str]], output: str | Path, title: str) -> Path:
    """Draw predictions against labels, and below them how the errors are distributed; return the path of the figure.

    Args:
        pairs: quantity to (labels, predictions, unit); arrays of one shape. The unit starts with ``eV``.
        output: picture to write.
        title: what was tested.

    Raises:
        UserError: if there is nothing to draw, or the picture cannot be written.
    """
    output = picture_file(output, "--plot")
    shown = {name: (np.ravel(a), np.ravel(b), unit) for name, (a, b, unit) in pairs.items() if np.size(a)}
    if not shown:
        raise UserError(f"{output}: nothing to draw: the frames have no energy, force or virial.")
    with picture(output, 2 * len(shown), title, heights=(3.2, 1.0)) as (_, axes):
        for k, (name, (label, predicted, unit)) in enumerate(shown.items()):
            draw_parity(axes[k], label, predicted)
            axes[k].set(title=name, xlabel=f"Reference ({unit})", ylabel=f"Predicted ({unit})")
            draw_errors(axes[len(shown) + k], 1000 * (predicted - label), f"m{unit}")
    return output


def plot_sigma_rels(
    curves: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]],
    others: Mapping[str, tuple[float | None, Mapping[str, float]]],
    chosen: tuple[float, Mapping[str, float]],
    output: str | Path,
    title: str,
) -> Path:
    """Draw errors over the width of an average and return the path of the figure.

    Args:
        curves: by label, widths and their RMSEs (``E``, ``F``, ``V``: meV/atom, meV/angstrom, meV/atom; nan without a
            label); averages of one kind, by rising width.
        others: name of other weights to their width (None: they have none) and their RMSEs; the live ones first.
        chosen: width and RMSEs of what was chosen.
        output: picture to write.
        title: what was measured.

    Raises:
        UserError: if the picture cannot be written.
    """
    output = picture_file(output, "--plot")
    every = [values for curve in curves.values() for _, values in curve]
    known = {name for values in every for name, value in values.items() if np.isfinite(value)}
    panels = [(name, panel) for name, panel in QUANTITIES.items() if name in known]
    with picture(output, len(panels), title) as (figure, axes):
        for axis, (name, panel) in zip(axes, panels):
            for curve, (label, points) in enumerate(curves.items()):
                widths, values = [width for width, _ in points], [values[name] for _, values in points]
                color, width, marker = (INK, 1.2, "s") if curve else (AVERAGE_COLOR, 2.0, "o")
                axis.plot(widths, values, color=color, lw=width, ls=LINES[curve % len(LINES)], marker=marker, ms=3.2,
                          zorder=4, label=label)  # fmt: skip
            axis.plot(chosen[0], chosen[1][name], "*", color=AVERAGE_COLOR, ms=14, mec="white", mew=0.8, zorder=6,
                      label="chosen")  # fmt: skip
            _draw_others(axis, name, others, np.array([values[name] for values in every]))
            axis.set(title=panel.title, xlabel="Width of the average, sigma_rel", ylabel=f"RMSE ({panel.unit})")
            axis.set_xscale("log")
            _plain_numbers(axis.xaxis, (1, 2, 5))
        _legend(figure, axes, "lower")
    return output


def _draw_others(
    axis: Any, name: str, others: Mapping[str, tuple[float | None, Mapping[str, float]]], drawn: Array
) -> None:
    """Draw weights that have a width as a point, others as a horizontal line; distant ones would flatten the curves."""
    colors = (LIVE_COLOR, *OTHER_COLORS)
    live = next(iter(others.values()))[1][name]
    low, high = min(live, drawn.min()), max(live, drawn.max())
    span = high - low or 0.1 * high
    for k, (label, (width, values)) in enumerate(others.items()):
        color = colors[k % len(colors)]
        if not low - 2 * span <= values[name] <= high + 2 * span:
            continue
        if width is None:
            axis.axhline(values[name], color=color, lw=1.4, ls="-" if k == 0 else "--", label=label)
        else:
            axis.plot(width, values[name], "D", color=color, ms=5.5, mec="white", mew=0.6, zorder=5, label=label)


def draw_parity(axis: Any, label: Array, predicted: Array) -> None:
    """Draw predictions against labels; where dots would hide each other, their number in each place."""
    low, high = min(label.min(), predicted.min()), max(label.max(), predicted.max())
    margin = 0.04 * (high - low) or 1e-3 * max(1.0, abs(high))
    ends = (low - margin, high + margin)
    axis.plot(ends, ends, color=INK, lw=0.9, zorder=3)
    if label.size > MAX_DOTS:
        axis.hexbin(label, predicted, gridsize=120, extent=(*ends, *ends), bins="log", mincnt=1, cmap="viridis",
                    linewidths=0.1)  # fmt: skip
    else:
        axis.plot(label, predicted, ".", color=LIVE_COLOR, ms=9 if label.size < 500 else 4, mew=0,
                  alpha=max(0.15, min(0.7, 800 / label.size)),
                  rasterized=True)  # fmt: skip
    axis.set(xlim=ends, ylim=ends)
    axis.set_box_aspect(1)
    axis.ticklabel_format(useOffset=False)
    axis.locator_params(nbins=4)


def draw_errors(axis: Any, error: Array, unit: str) -> None:
    """Draw the distribution of errors."""
    mae, rmse = np.abs(error).mean(), np.sqrt(np.square(error).mean())
    mean = error.mean() if abs(error.mean()) > 1e-9 * rmse else 0.0  # forces add up to zero but for rounding
    limit = 4 * rmse or 1.0
    axis.hist(np.clip(error, -limit, limit), bins=61, range=(-limit, limit), color=LIVE_COLOR, alpha=0.85)
    axis.axvline(0, color=INK, lw=0.9)
    axis.set(xlabel=f"Predicted − reference ({unit})", yticks=[])
    shift = f"{mean:+.2g}" if mean else "0"
    text = f"MAE {mae:.3g}, RMSE {rmse:.3g}\nmean {shift} {unit}"
    axis.set_title(text, fontsize=SMALL, fontweight="normal")
    axis.spines["left"].set_visible(False)
    axis.grid(False)


def draw_curve(axis: Any, curve: Curve, panel: Panel, styles: Styles) -> None:
    """Draw what a file holds of one quantity."""
    style = styles[curve_key(curve)]
    if curve.kind == VALIDATION:
        if has_panel(curve, panel):
            values = curve.columns[panel.full]
            axis.plot(curve.steps, values, color=style.color, lw=2.0, ls=style.line, marker=style.marker, ms=3.2,
                      zorder=4, label=style.label("validation set"))  # fmt: skip
            kept = np.isin(curve.steps, list(curve.best_steps)[-1:])
            axis.plot(curve.steps[kept], values[kept], "*", color=style.color, ms=13, mec="white", mew=0.8, zorder=5,
                      label=KEPT if kept.any() else None)  # fmt: skip
        return
    columns = _batch_columns(curve, panel)
    if style.run:
        _draw_trend(axis, curve, panel, style, columns)
        return
    for name, values in columns:
        train = name.startswith(f"{panel.batch}_trn")
        label = style.label("training batch" if train else "validation batches")
        axis.plot(curve.steps, panel.factor * values, color=style.batches[not train], lw=0.9, ls=style.line,
                  alpha=0.45 if train else 0.8, zorder=TRAIN_LEVEL + (not train), label=label)  # fmt: skip


def _draw_trend(axis: Any, curve: Curve, panel: Panel, style: CurveStyle, columns: list[tuple[str, Array]]) -> None:
    """Draw errors on single batches of one of several runs: faint lines, and their running mean."""
    validation = [column for column in columns if column[0].startswith(f"{panel.batch}_val")]
    for _, values in validation or columns:
        shown = panel.factor * values
        axis.plot(curve.steps, shown, color=style.color, lw=0.7, alpha=0.2, zorder=TRAIN_LEVEL)
        axis.plot(curve.steps, _running_mean(shown), color=style.color, lw=2.0, ls=style.line, zorder=4)


def _running_mean(values: Array) -> Array:
    """Return the geometric mean over a twentieth of the rows around each; rows without a number are left out."""
    known = np.isfinite(values) & (values > 0)
    window = np.ones(max(1, len(values) // 20))
    sums = np.convolve(np.log(np.where(known, values, 1.0)), window, mode="same")
    numbers = np.convolve(known.astype(float), window, mode="same")
    return np.where(numbers > 0, np.exp(sums / np.maximum(numbers, 1)), np.nan)


def curve_styles(curves: Sequence[Curve]) -> Styles:
    """Return file and task to style: in one run each set of weights has its color, of several runs each run has."""
    groups = list(dict.fromkeys(_group(c) for c in curves))
    folders = list(dict.fromkeys(folder for folder, _ in groups))
    names = [folder.resolve().name for folder in folders]
    titles = {f: n if names.count(n) == 1 else str(f) for f, n in zip(folders, names)} if len(folders) > 1 else {}
    # the average called ema comes first, so that it has its color whatever is beside it
    weights = sorted(dict.fromkeys(c.weights for c in curves if c.weights != LIVE), key=lambda name: name != "ema")
    averages, marker = (AVERAGE_COLOR, *OTHER_COLORS), "o" if len(weights) <= MAX_MARKED_AVERAGES else ""
    styles = {}
    for curve in curves:
        own, live = _group(curve), curve.weights == LIVE
        place = 0 if live else 1 + weights.index(curve.weights)
        words = "live weights" if live else curve.weights
        if len(groups) > 1:
            color = RUN_COLORS[groups.index(own) % len(RUN_COLORS)]
            title = ", ".join(filter(None, (titles.get(own[0], ""), own[1]))) or own[0].resolve().name
            style = CurveStyle(color, (color, color), LINES[place % len(LINES)], title, words)
        elif live:
            style = CurveStyle(LIVE_COLOR, (TRAIN_COLOR, LIVE_BATCHES), "-", "", words, marker)
        else:
            color = averages[(place - 1) % len(averages)]
            style = CurveStyle(color, (color, color), "-", "", words, marker)
        styles[curve_key(curve)] = style
    return styles


def _batch_columns(curve: Curve, panel: Panel) -> list[tuple[str, Array]]:
    """Return the columns of a learning curve that a panel shows, of every task, without those that are all nan."""
    if curve.kind != LCURVE or not panel.batch:
        return []
    starts = (f"{panel.batch}_trn", f"{panel.batch}_val")
    return [(n, v) for n, v in curve.columns.items() if n.startswith(starts) and np.isfinite(v).any()]


def has_panel(curve: Curve, panel: Panel) -> bool:
    """Whether a file holds anything of one quantity."""
    if curve.kind == VALIDATION:
        return panel.full in curve.columns and bool(np.isfinite(curve.columns[panel.full]).any())
    return bool(_batch_columns(curve, panel))


def picture_file(output: str | Path, option: str = "-o") -> Path:
    """Return the file of a picture, a PNG where no suffix says another format.

    Raises:
        UserError: if a file is there that is no picture.
    """
    file = Path(output)
    file = file if file.suffix else file.with_name(f"{file.name}.png")
    check_output(file, option, PICTURE)
    return file


@contextmanager
def picture(
    output: Path, panels: int, title: str = "", heights: Sequence[float] | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure that belongs to no window, and its axes row by row; it is written after the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = len(heights) if heights is not None else 1 if panels < 4 else 2
    columns = -(-panels // rows)
    width, height = PANEL[0] * columns, PANEL[1] * rows + 0.4 if heights is None else 1.3 * sum(heights)
    # over all panels, in as many lines as their width needs
    lines = textwrap.wrap(title, int(72 * width / (0.55 * NORMAL)))
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height + len(lines) * 1.3 * NORMAL / 72), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel())
        for axis in axes[panels:]:
            axis.set_axis_off()
        if lines:
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=NORMAL)
        yield figure, axes[:panels]
        try:
            with atomic_write(output) as part:
                figure.savefig(part)
        except ValueError as error:
            raise UserError(f"{Path(output)}: the picture cannot be written: {error}") from error


def fit_values(axis: Any) -> None:
    """Fit the axis of values to the validation lines, if there are any: one lucky batch would stretch it by decades.

    An axis that is not about tiny numbers gets plain ones at its ticks.
    """
    shown = [line.get_ydata() for line in axis.lines if line.get_zorder() > TRAIN_LEVEL]
    values = np.concatenate([np.zeros(0), *shown])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values) > 1:
        margin = (values.max() / values.min()) ** 0.06
        axis.set_ylim(values.min() / margin, values.max() * margin)
    low, high = axis.get_ylim()
    if low > 1e-2 and high < 3 * low:
        _plain_numbers(axis.yaxis)
    elif low > 1e-2 and high < 1e5:
        _plain_numbers(axis.yaxis, (1, 1.5, 2, 3, 5, 7) if high < 12 * low else (1, 2, 5) if high < 100 * low else (1,))


def _plain_numbers(axis: Any, parts: Sequence[float] = ()) -> None:
    """Write plain numbers at the ticks of a logarithmic axis: ``parts`` of each decade, or as on a linear one."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=parts) if parts else MaxNLocator(5))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, axes: Sequence[Any], side: str = "upper", keys: Mapping[str, Any] | None = None) -> None:
    """Put one legend into a free place of the grid, or beside all panels: a line means the same in each.

    Args:
        figure: of the panels.
        axes: the panels.
        side: of the panels where it is put.
        keys: its entries, where they are not one for each kind of line.
    """
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels) if label not in entries}
    if keys:
        entries = {**keys, **{label: handle for label, handle in entries.items() if label == KEPT}}
    if not entries:
        return
    if KEPT in entries:  # there is one of each color
        entries[KEPT] = Line2D([], [], color=INK, ls="", marker="*", ms=11)
    # what matters most first, and of equals in the order of the files
    labels = list(entries)
    if not keys:
        labels.sort(key=lambda label: (label == KEPT, -entries[label].get_linewidth()))
    handles = [entries[label] for label in labels]
    free = [axis for axis in figure.axes if axis not in axes]
    # a letter is about half as wide as the type is high; a wider legend would be cut at the edges of the figure
    width = 0.53 * SMALL * max(map(len, labels)) + 60  # points, with handle and space
    if free and len(labels) < 9 and width < 72 * PANEL[0]:
        free[0].legend(handles, labels, loc="center left", labelspacing=0.9)
    else:
        columns = max(1, min(len(entries), int(72 * figure.get_figwidth() / width)))
        figure.legend(handles, labels, loc=f"outside {side} center", ncols=columns)
