"""Figures: learning curves of runs, errors over widths of averages, predictions against labels."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepmd_ema.config.labels import METRICS
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.errors import UserError
from deepmd_ema.files import PICTURE, atomic_write, check_output
from deepmd_ema.geometry import Array
from deepmd_ema.report.curves import LCURVE, VALIDATION, Curve, read_curves
from deepmd_ema.report.facts import CURVE_NAMES
from deepmd_ema.report.table import significant
from deepmd_ema.text import first_few
from deepmd_ema.utils import LIVE

# blue for the live weights and orange for averaged ones, everywhere; the palette of Okabe and Ito
LIVE_COLOR = "#0072B2"
AVERAGE_COLOR = "#E69F00"
TRAIN_COLOR = "#9aa5b1"
LIVE_BATCHES = "#74aed3"  # a light LIVE_COLOR
RUN_COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#000000",
)
OTHER_COLORS = tuple(
    color for color in RUN_COLORS if color not in (LIVE_COLOR, AVERAGE_COLOR)
)
LINES = ("-", "--", ":", "-.")
TRAIN_LEVEL = 2  # z-order; lines of training batches lie below all other lines
MAX_DOTS = 5_000  # more dots would hide each other: a density is drawn in their place
MAX_POINTS = 1_500  # an SVG with more points is larger than a PNG
MAX_MARKED_AVERAGES = (
    2  # averages whose rows are marked by dots; more lines would hide each other
)
KEPT = "kept as best"
NORMAL, SMALL = 11.0, 9.5  # points; legends and the errors below a panel are small
# inches; small, so that the type is still read where a figure is scaled to one column of a page
PANEL = (3.7, 2.9)
INK = "#28323c"
STYLE = Path(__file__).with_name("plots.mplstyle")


class Panel(NamedTuple):
    """Content of one panel of the learning curves.

    Attributes:
        title: quantity.
        unit: unit on its axis; empty for a number.
        batch: column of lcurve.out without ``_trn`` and ``_val``; empty if there is none.
        full: column of val.log, in ``unit``; empty if there is none.
        factor: numbers of ``batch`` times this are in ``unit``.
    """

    title: str
    unit: str
    batch: str
    full: str = ""
    factor: float = 1.0

    @property
    def label(self) -> str:
        """Label of the axis of values."""
        return f"{self.title.split()[-1]} ({self.unit})" if self.unit else self.title


def _panel(metric: Metric, batch: str) -> Panel:
    factor = METRICS[metric.quantity].display_factor
    return Panel(metric.full_name, metric.unit, batch, metric.column, factor)


QUANTITIES = {
    q: _panel(Metric(f"{q}:RMSE"), f"rmse_{CURVE_NAMES.get(q, q.lower())}")
    for q in METRICS
}
LOSS, RATE = Panel("Loss", "weighted RMSE", "rmse"), Panel("Learning rate", "", "lr")


class Figure(NamedTuple):
    """A figure of one panel, for a page whose width is that of its reader.

    Attributes:
        file: SVG where it has few points, else PNG.
        description: of what it shows, for readers who do not see it.
    """

    file: Path
    description: str


class Key(NamedTuple):
    """The meaning of a kind of line in all figures; a width of 0: it is a star."""

    label: str
    color: str
    width: float


class _Style(NamedTuple):
    """Style of the curves of one task in one file.

    Attributes:
        color: of the whole validation set.
        line: dashes, which distinguish weights where colors distinguish runs.
        run: name of the run, where there are several.
        weights: name of the weights with these errors.
        marker: of each row; none where they would hide dashes, or other lines.
    """

    color: str
    line: str
    run: str
    weights: str
    marker: str = ""


class CurvePlot:
    """Learning curves, panel by panel.

    In one run each set of weights has its color; of several runs, each run has.

    Args:
        curves: of one or several runs and tasks.

    Attributes:
        panels: quantities that the curves hold, and the learning rate.
        styles: by file and task.
    """

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves = curves
        # a file without errors of any quantity has the loss alone
        self.panels = [
            panel
            for panel in QUANTITIES.values()
            if any(_series(curve, panel) for curve in curves)
        ] or [LOSS]
        if any("lr" in curve.columns for curve in curves):
            self.panels.append(RATE)
        # limits of the axes of steps, linear and logarithmic
        first = min(curve.steps[0] for curve in curves)
        last = max(curve.steps[-1] for curve in curves)
        margin = 0.03 * (last - first) or 1
        self.ends = (first - margin, last + margin)
        self.log_ends = (0.9 * max(1, first), 1.1 * last)
        groups = list(
            dict.fromkeys((c.path.parent, c.task) for c in curves)
        )  # each has a color
        folders = list(dict.fromkeys(folder for folder, _ in groups))
        self.has_several = len(groups) > 1
        self._has_several_runs = len(folders) > 1
        # a run is called by the name of its folder, or by the path if names are the same
        names = [folder.resolve().name for folder in folders]
        titles = {}
        if self._has_several_runs:
            for folder, name in zip(folders, names):
                titles[folder] = name if names.count(name) == 1 else str(folder)
        # the average called ema comes first, so that it has its color whatever is beside it
        averages = sorted(
            dict.fromkeys(c.weights for c in curves if c.weights != LIVE),
            key=lambda name: name != "ema",
        )
        names_of_weights = [LIVE, *averages]
        colors = (AVERAGE_COLOR, *OTHER_COLORS)
        marker = "o" if len(averages) <= MAX_MARKED_AVERAGES else ""
        self.styles: dict[tuple[Path, str], _Style] = {}
        for curve in curves:
            folder = curve.path.parent
            index = names_of_weights.index(curve.weights)  # 0: live
            label = curve.weights if index else "live weights"
            if self.has_several:
                color = RUN_COLORS[groups.index((folder, curve.task)) % len(RUN_COLORS)]
                title = ", ".join(filter(None, (titles.get(folder, ""), curve.task)))
                title = title or folder.resolve().name
                style = _Style(color, LINES[index % len(LINES)], title, label)
            else:
                color = colors[(index - 1) % len(colors)] if index else LIVE_COLOR
                style = _Style(color, "-", "", label, marker)
            self.styles[curve.path, curve.task] = style

    def draw(self, axis: Any, panel: Panel, log_steps: bool = False) -> None:
        """Draw one quantity of all curves.

        Of several runs, errors on single batches are drawn only where there are no better ones.
        """
        validated = {
            (curve.path.parent, curve.task)
            for curve in self.curves
            if curve.kind == VALIDATION and _series(curve, panel)
        }
        for curve in self.curves:
            style = self.styles[curve.path, curve.task]
            series = _series(curve, panel)
            is_of_batches = curve.kind == LCURVE
            if (
                self.has_several
                and is_of_batches
                and (curve.path.parent, curve.task) in validated
            ):
                continue
            if panel is RATE:
                for _, rate in series:
                    color = style.color if self._has_several_runs else INK
                    # a warm-up begins at 0, which the logarithmic axis does not have
                    axis.plot(
                        curve.steps[rate > 0], rate[rate > 0], color=color, lw=1.6
                    )
            elif curve.kind == VALIDATION:
                for _, values in series:
                    axis.plot(
                        curve.steps,
                        values,
                        color=style.color,
                        lw=2.0,
                        ls=style.line,
                        marker=style.marker,
                        ms=3.2,
                        zorder=4,
                        label=f"validation set, {style.weights}",
                    )
                    # a star at the step of the best file, the last one that was written
                    is_best = np.isin(curve.steps, list(curve.best_steps)[-1:])
                    axis.plot(
                        curve.steps[is_best],
                        values[is_best],
                        "*",
                        color=style.color,
                        ms=13,
                        mec="white",
                        mew=0.8,
                        zorder=5,
                        label=KEPT if is_best.any() else None,
                    )
            elif style.run:  # several runs: faint lines, and their running mean
                # batches of validation data if there are any
                for _, values in [
                    column for column in series if "_val" in column[0]
                ] or series:
                    shown = panel.factor * values
                    axis.plot(
                        curve.steps,
                        shown,
                        color=style.color,
                        lw=0.7,
                        alpha=0.2,
                        zorder=TRAIN_LEVEL,
                    )
                    axis.plot(
                        curve.steps,
                        _running_mean(shown),
                        color=style.color,
                        lw=2.0,
                        ls=style.line,
                        zorder=4,
                    )
            else:
                for name, values in series:
                    is_train = name.startswith(f"{panel.batch}_trn")
                    kind = "training batch" if is_train else "validation batches"
                    # thin and faint, so that lines of the validation set are seen, if there are any
                    width = 0.9 if validated else 1.4
                    alpha = 0.9
                    if validated:
                        alpha = 0.45 if is_train else 0.8
                    color = TRAIN_COLOR if is_train else LIVE_BATCHES
                    if curve.weights != LIVE:
                        color = style.color
                    axis.plot(
                        curve.steps,
                        panel.factor * values,
                        color=color,
                        lw=width,
                        ls=style.line,
                        alpha=alpha,
                        zorder=TRAIN_LEVEL + (not is_train),
                        label=f"{kind}, {style.weights}",
                    )
        axis.set(
            title=panel.title, xlabel="Optimizer step", ylabel=panel.label, yscale="log"
        )
        axis.set(
            xscale="log" if log_steps else "linear",
            xlim=self.log_ends if log_steps else self.ends,
        )
        _fit_values(axis)


def _series(curve: Curve, panel: Panel) -> list[tuple[str, Array]]:
    """Return name and values of the columns that a panel shows, without those that are all nan."""
    starts = (f"{panel.batch}_trn", f"{panel.batch}_val")
    is_full = curve.kind == VALIDATION
    series = []
    for name, values in curve.columns.items():
        # a learning curve has a column for each task, whose name is after _trn or _val
        is_batch = name == panel.batch or name.startswith(starts)
        if (name == panel.full if is_full else is_batch) and np.isfinite(values).any():
            series.append((name, values))
    return series


def _running_mean(values: Array) -> Array:
    """Return the geometric mean over a twentieth of the rows around each.

    Rows without a number are left out.
    """
    has_number = np.isfinite(values) & (values > 0)
    window = np.ones(max(1, len(values) // 20))
    # the logarithm of 1 adds nothing to the sum
    sums = np.convolve(np.log(np.where(has_number, values, 1.0)), window, mode="same")
    numbers = np.convolve(has_number.astype(float), window, mode="same")
    return np.where(numbers > 0, np.exp(sums / np.maximum(numbers, 1)), np.nan)


def plot_curves(
    files: Sequence[str | Path], output: str | Path, log_steps: bool = False
) -> Path:
    """Draw the learning curves in ``files`` together and return the path of the figure.

    Live and averaged weights have their own colors; with files of several runs, or tasks, each of
    these has one. A file without rows is left out with a warning.

    Args:
        files: lcurve.out, val.log, val_ema.log of one or several runs, also DeePMD-kit's; or
            folders of runs.
        output: picture to write; the suffix says which format.
        log_steps: a logarithmic axis of steps.

    Raises:
        UserError: if a file is not one of these, none has rows, or the picture cannot be written.
    """
    from matplotlib.lines import Line2D

    output = picture_file(output)
    plot = CurvePlot(read_curves(files))
    if not any(_series(curve, panel) for curve in plot.curves for panel in plot.panels):
        raise UserError(
            f"{first_few([str(file) for file in files])}: nothing to draw, no number of an error "
            "is finite."
        )
    # the legend of several runs: the color of each run, the dashes of each set of weights
    keys: dict[str, Any] = {}
    if plot.has_several:
        styles = plot.styles.values()
        keys = {s.run: Line2D([], [], color=s.color, lw=2.0) for s in styles}
        weights = {
            s.weights: Line2D([], [], color=INK, lw=2.0, ls=s.line) for s in styles
        }
        keys |= weights if len(weights) > 1 else {}
    with _picture(output, len(plot.panels)) as (figure, axes):
        for axis, panel in zip(axes, plot.panels):
            plot.draw(axis, panel, log_steps)
        _legend(figure, axes, keys=keys)
    return output


def curve_figures(
    curves: Sequence[Curve], folder: Path, volume: float = 0.0
) -> tuple[list[Figure], list[Key]]:
    """Return a figure of each quantity and one of the learning rate, and what their lines mean.

    Args:
        curves: of one run and one task.
        folder: where the files are written.
        volume: mean per atom of validation frames of like volume, angstrom^3: errors of stresses in
            ``val.log`` are drawn as errors of virials, which are larger by this factor. 0: as they
            are.
    """
    if volume:
        for curve in curves:
            # meV/angstrom^3 times angstrom^3 per atom
            stress = curve.columns.pop(QUANTITIES["S"].full, None)
            if stress is not None:
                curve.columns[QUANTITIES["V"].full] = volume * stress
    plot = CurvePlot(curves)
    figures = list[Figure]()
    keys = dict[str, Key]()
    suffix = _suffix(sum(c.steps.size for c in curves if c.columns))
    for panel in plot.panels:
        file = folder / f"{panel.title.split()[0]}{suffix}"
        with _picture(file, 1) as (_, [axis]):
            plot.draw(axis, panel)
            for handle, label in zip(*axis.get_legend_handles_labels()):
                keys[label] = Key(label, handle.get_color(), handle.get_linewidth())
        description = f"{panel.title} over steps"
        if panel is not RATE:
            last = [
                f"{curve.weights} {significant(float(values[-1]), 3)} {panel.unit} at the end"
                for curve in curves
                if curve.kind == VALIDATION
                for _, values in _series(curve, panel)
            ]
            description += f": {'; '.join(last) or 'of single batches'}"
        figures.append(Figure(file, description))
    # thick lines matter most and come first; the stars of all colors are one key
    has_star = keys.pop(KEPT, None) is not None
    sorted_keys = sorted(keys.values(), key=lambda key: -key.width)
    if has_star:
        sorted_keys.append(Key("step of the best file", INK, 0.0))
    return figures, sorted_keys


def plot_parity(
    pairs: Mapping[str, tuple[Array, Array, str]], output: str | Path, title: str
) -> Path:
    """Draw predictions against labels and the distribution of the errors; return the path.

    Args:
        pairs: quantity to (labels, predictions, unit); arrays of one shape.
        output: picture to write.
        title: what was tested.

    Raises:
        UserError: if there is nothing to draw, or the picture cannot be written.
    """
    output = picture_file(output, "--plot")
    shown = {name: pair for name, pair in pairs.items() if np.size(pair[0])}
    if not shown:
        raise UserError(
            f"{output}: nothing to draw: the frames have no label of what is predicted."
        )
    with _picture(output, 2 * len(shown), title, heights=(3.2, 1.0)) as (_, axes):
        for (name, pair), upper, lower in zip(shown.items(), axes, axes[len(shown) :]):
            _draw_parity(upper, lower, name, *pair)
    return output


def parity_figures(
    pairs: Mapping[str, tuple[Array, Array, str]], folder: Path
) -> list[Figure]:
    """Return the figures of :func:`plot_parity` one by one, as files in a folder."""
    figures = []
    for name, (label, predicted, unit) in pairs.items():
        if not label.size:
            continue
        file = folder / f"parity_{name.replace(' ', '_')}{_suffix(label.size)}"
        with _picture(file, 2, heights=(3.2, 1.0)) as (_, axes):
            _draw_parity(axes[0], axes[1], name, label, predicted, unit)
        factor, small = _unit_of_errors(unit)
        error = significant(factor * float(np.abs(predicted - label).mean()), 3)
        points = f"{label.size:,} reference values"
        if label.size > MAX_DOTS:
            points += ", density of points"
        description = (
            f"{name}: predictions against {points}; mean absolute error {error} {small}"
        )
        figures.append(Figure(file, description))
    return figures


def _unit_of_errors(unit: str) -> tuple[float, str]:
    """Return factor and unit in which errors are shown: thousandths of units that begin with e."""
    return (1000.0, f"m{unit}") if unit.startswith("e") else (1.0, unit)


def _draw_parity(
    axis: Any, below: Any, name: str, label: Array, predicted: Array, unit: str
) -> None:
    """Draw predictions against labels, and the distribution of the errors below them."""
    label = np.ravel(label)
    predicted = np.ravel(predicted)
    # both axes have the same limits; equal values have some room as well
    low = min(label.min(), predicted.min())
    high = max(label.max(), predicted.max())
    margin = 0.04 * (high - low) or 1e-3 * max(1.0, abs(high))
    ends = (low - margin, high + margin)
    axis.plot(ends, ends, color=INK, lw=0.9, zorder=3)
    if label.size > MAX_DOTS:
        axis.hexbin(
            label,
            predicted,
            gridsize=120,
            extent=(*ends, *ends),
            bins="log",
            mincnt=1,
            cmap="viridis",
            linewidths=0.1,
        )
    else:
        axis.plot(
            label,
            predicted,
            ".",
            color=LIVE_COLOR,
            ms=9 if label.size < 500 else 4,
            mew=0,
            alpha=max(0.15, min(0.7, 800 / label.size)),
            rasterized=True,
        )
    axis.set(
        xlim=ends,
        ylim=ends,
        title=name,
        xlabel=f"Reference ({unit})",
        ylabel=f"Predicted ({unit})",
    )
    axis.set_box_aspect(1)
    axis.ticklabel_format(useOffset=False)
    axis.locator_params(nbins=4)
    # below it the distribution of the errors; those beyond four RMSEs are in the last bins
    factor, small = _unit_of_errors(unit)
    error = factor * (predicted - label)
    mae = np.abs(error).mean()
    rmse = np.sqrt(np.square(error).mean())
    # a mean below a hundredth of the RMSE is noise, not a shift
    mean = error.mean() if abs(error.mean()) > 1e-2 * rmse else 0.0
    limit = 4 * rmse or 1.0
    below.hist(
        np.clip(error, -limit, limit),
        bins=61,
        range=(-limit, limit),
        color=LIVE_COLOR,
        alpha=0.85,
    )
    below.axvline(0, color=INK, lw=0.9)
    below.set(xlabel=f"Predicted − reference ({small})", yticks=[])
    text = f"MAE {mae:.3g}, RMSE {rmse:.3g}\nmean {f'{mean:+.2g}' if mean else '0'} {small}"
    below.set_title(text, fontsize=SMALL, fontweight="normal")
    below.spines["left"].set_visible(False)
    below.grid(False)


def plot_sigma_rels(
    curves: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]],
    other_weights: Mapping[str, tuple[float | None, Mapping[str, float]]],
    chosen: tuple[float, Mapping[str, float]],
    output: str | Path,
    title: str,
) -> Path:
    """Draw errors over the width of an average and return the path of the figure.

    Args:
        curves: by label, widths and their RMSEs (``E``, ``F``, ``V``: meV/atom, meV/angstrom,
            meV/atom; nan without a label); averages of one kind, by rising width.
        other_weights: name of other weights to their width (None: they have none) and their RMSEs;
            the live ones first.
        chosen: width and RMSEs of what was chosen.
        output: picture to write.
        title: what was measured.

    Raises:
        UserError: if the picture cannot be written.
    """
    output = picture_file(output, "--plot")
    every = [values for curve in curves.values() for _, values in curve]
    measured = {
        name for values in every for name, value in values.items() if np.isfinite(value)
    }
    panels = [(name, panel) for name, panel in QUANTITIES.items() if name in measured]
    with _picture(output, len(panels), title) as (figure, axes):
        for axis, (name, panel) in zip(axes, panels):
            for number, (label, points) in enumerate(curves.items()):
                axis.plot(
                    [width for width, _ in points],
                    [values[name] for _, values in points],
                    color=INK if number else AVERAGE_COLOR,
                    lw=1.2 if number else 2.0,
                    ls=LINES[number % len(LINES)],
                    marker="s" if number else "o",
                    ms=3.2,
                    zorder=4,
                    label=label,
                )
            axis.plot(
                chosen[0],
                chosen[1][name],
                "*",
                color=AVERAGE_COLOR,
                ms=14,
                mec="white",
                mew=0.8,
                zorder=6,
                label="chosen",
            )
            # Other weights are a point if they have a width, and a horizontal line if not. They are
            # left out where they would flatten the curves; the live weights, which are the first,
            # count as a curve.
            _, live_errors = next(iter(other_weights.values()))
            drawn = [*(values[name] for values in every), live_errors[name]]
            low = min(drawn)
            high = max(drawn)
            span = high - low or 0.1 * high
            for k, (label, (at, errors)) in enumerate(other_weights.items()):
                color = (LIVE_COLOR, *OTHER_COLORS)[k % (1 + len(OTHER_COLORS))]
                if not low - 2 * span <= errors[name] <= high + 2 * span:
                    continue
                if at is None:
                    axis.axhline(
                        errors[name],
                        color=color,
                        lw=1.4,
                        ls="--" if k else "-",
                        label=label,
                    )
                else:
                    axis.plot(
                        at,
                        errors[name],
                        "D",
                        color=color,
                        ms=5.5,
                        mec="white",
                        mew=0.6,
                        zorder=5,
                        label=label,
                    )
            axis.set(
                title=panel.title,
                xlabel="Width of the average, sigma_rel",
                ylabel=panel.label,
            )
            axis.set_xscale("log")
            _plain_numbers(axis.xaxis, (1, 2, 5))
        _legend(figure, axes, "lower")
    return output


def picture_file(output: str | Path, option: str = "-o") -> Path:
    """Return the file of a picture, a PNG where no suffix says another format.

    Raises:
        UserError: if a file is there that is no picture.
    """
    file = Path(output)
    file = file if file.suffix else file.with_name(f"{file.name}.png")
    check_output(file, option, PICTURE)
    return file


def _suffix(points: int) -> str:
    return ".svg" if points <= MAX_POINTS else ".png"


@contextmanager
def _picture(
    output: Path, panels: int, title: str = "", heights: Sequence[float] | None = None
) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a figure without a window, and its axes row by row; write it after the block."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Drawing

    if heights is None:
        rows = 1 if panels < 4 else 2
        height = PANEL[1] * rows + 0.4  # with the legend
    else:
        rows = len(heights)
        height = 1.3 * sum(heights)
    columns = -(-panels // rows)  # rounded up
    width = PANEL[0] * columns
    # the title is over all panels, in as many lines as it needs: a letter is 0.55 of the size wide
    lines = textwrap.wrap(title, int(72 * width / (0.55 * NORMAL)))
    with mpl.rc_context(fname=STYLE):
        figure = Drawing(
            figsize=(width, height + len(lines) * 1.3 * NORMAL / 72),
            layout="constrained",
        )
        axes = list(
            figure.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
        )
        for axis in axes[panels:]:
            axis.set_axis_off()
        if lines:
            figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=NORMAL)
        yield figure, axes[:panels]
        try:
            with atomic_write(output) as part:
                figure.savefig(part)
        except ValueError as error:
            raise UserError(
                f"{Path(output)}: the picture cannot be written: {error}"
            ) from error


def _fit_values(axis: Any) -> None:
    """Fit the axis of values to the validation lines, if there are any.

    One lucky batch would stretch it by decades. An axis that is not about tiny numbers gets plain
    ones at its ticks.
    """
    shown = [line.get_ydata() for line in axis.lines if line.get_zorder() > TRAIN_LEVEL]
    values = np.concatenate([np.zeros(0), *shown])
    values = values[np.isfinite(values) & (values > 0)]
    # of equal values the limits would be one number
    if len(values) and values.max() > values.min():
        margin = (values.max() / values.min()) ** 0.06
        axis.set_ylim(values.min() / margin, values.max() * margin)
    low, high = axis.get_ylim()
    if low > 1e-2 and high < 3 * low:
        _plain_numbers(axis.yaxis)
    elif low > 1e-2 and high < 1e5:
        # ticks in each decade, the fewer the more decades there are
        ticks: tuple[float, ...] = (1,)
        if high < 12 * low:
            ticks = (1, 1.5, 2, 3, 5, 7)
        elif high < 100 * low:
            ticks = (1, 2, 5)
        _plain_numbers(axis.yaxis, ticks)


def _plain_numbers(axis: Any, parts: Sequence[float] = ()) -> None:
    """Write plain numbers at the ticks of a logarithmic axis.

    Ticks are at ``parts`` of each decade, or as on a linear axis.
    """
    from matplotlib.ticker import (
        LogLocator,
        MaxNLocator,
        NullFormatter,
        StrMethodFormatter,
    )

    axis.set_major_locator(LogLocator(subs=parts) if parts else MaxNLocator(5))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend(
    figure: Any,
    axes: Sequence[Any],
    side: str = "upper",
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Put one legend into a free place of the grid, or beside all panels.

    Args:
        figure: of the panels.
        axes: the panels.
        side: of the panels where it is put.
        keys: its entries, where they are not one for each kind of line.
    """
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    star = entries.pop(KEPT, None)
    # thick lines matter most and come first; lines of one width are in the order of the files
    by_width = sorted(entries.items(), key=lambda entry: -entry[1].get_linewidth())
    entries = dict(keys or by_width)
    if star is not None:  # stars of all colors have one entry
        entries[KEPT] = Line2D([], [], color=INK, ls="", marker="*", ms=11)
    if not entries:
        return
    free = [axis for axis in figure.axes if axis not in axes]
    # In points, with handle and space: a letter is about half as wide as the type is high. A legend
    # that is too wide would be cut at the edges of the figure.
    width = 0.53 * SMALL * max(map(len, entries)) + 60
    if free and len(entries) < 9 and width < 72 * PANEL[0]:
        free[0].legend(
            entries.values(), entries.keys(), loc="center left", labelspacing=0.9
        )
    else:
        columns = max(1, min(len(entries), int(72 * figure.get_figwidth() / width)))
        figure.legend(
            entries.values(),
            entries.keys(),
            loc=f"outside {side} center",
            ncols=columns,
        )
