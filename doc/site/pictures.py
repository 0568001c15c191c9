"""Draws the curves on the pages, as SVG for light and dark pages:
`python doc/site/pictures.py RUN`.

RUN is the folder of a run of examples/water, whose validation errors README.md shows.
"""

import io
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from deepmd_ema.report.curves import Curve
from deepmd_ema.report.plots import AVERAGE_COLOR, INK, LIVE_COLOR, QUANTITIES, STYLE

DOC = Path(__file__).parents[1]
SOFT = "#8a949e"
# color in light mode to that in dark mode
DARK = {
    "#ffffff": "#14181c",
    INK: "#d9dfe4",
    SOFT: "#8b959f",
    "#e3e7eb": "#2c343b",
    LIVE_COLOR.lower(): "#4da3dc",
}


def draw(name, draw_on):
    """Write a picture of three panels, drawn by a function that takes them."""
    with (
        mpl.rc_context(fname=STYLE),
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}),
    ):
        figure = Figure(figsize=(9.0, 2.7), layout="constrained")
        draw_on(*figure.subplots(1, 3))
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg, names = text.getvalue(), {light: f"--c{k}" for k, light in enumerate(DARK)}
    for light, variable in names.items():
        svg = svg.replace(light, f"var({variable})")
    light, dark = (
        "; ".join(f"{names[c]}: {of[c]}" for c in DARK)
        for of in ({c: c for c in DARK}, DARK)
    )
    style = (
        f"<style>svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} "
        f"}}</style>\n "
    )
    (DOC / name).write_text(
        svg.replace("<defs>", f"{style}<defs>", 1), encoding="utf-8"
    )


def errors(*axes):
    """Draw validation errors of a run, of its weights and of their average."""
    for axis, quantity in zip(axes, "EFS"):
        panel = QUANTITIES[quantity]
        for file, color, label in (
            ("val.log", LIVE_COLOR, "weights"),
            ("val_ema.log", AVERAGE_COLOR, "their average"),
        ):
            curve = Curve(Path(sys.argv[1]) / file)
            axis.plot(
                curve.steps,
                curve.columns[panel.full],
                color=color,
                lw=2,
                marker="o",
                ms=3.5,
                label=label,
            )
        axis.set(
            title=panel.title, ylabel=panel.unit, xlabel="Optimizer step", yscale="log"
        )
        axis.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if quantity == "E" else (1, 1.5, 2, 3, 5, 7))
        )
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    axes[0].legend()


def average(*axes):
    """Draw what an average does, by descent with noise in a valley of 40 dimensions, of which two
    are shown.
    """
    rng, steps, decay = np.random.default_rng(1), 300, 0.97
    curvature = np.geomspace(0.5, 4, 40)
    live, mean = np.empty((steps, 40)), np.empty((steps, 40))
    live[0] = mean[0] = np.where(np.arange(40) < 20, -2.4, 1.0)
    for k in range(1, steps):
        live[k] = live[k - 1] - 0.06 * (
            curvature * live[k - 1] + 0.9 * curvature**0.5 * rng.normal(size=40)
        )
        mean[k] = mean[k - 1] + (1 - min(decay, (1 + k) / (10 + k))) * (
            live[k] - mean[k - 1]
        )
    x, y = np.meshgrid(np.linspace(-2.6, 1.2, 40), np.linspace(-0.8, 1.2, 40))
    axes[0].contour(
        x, y, curvature[0] * x**2 + curvature[-1] * y**2, 7, colors=SOFT, linewidths=0.5
    )
    for path, color, width, name in (
        (live, LIVE_COLOR, 0.9, "weights"),
        (mean, AVERAGE_COLOR, 2.2, "their average"),
    ):
        axes[0].plot(path[:, 0], path[:, -1], color=color, lw=width, label=name)
        axes[2].plot((curvature * path**2).mean(1), color=color, lw=width)
    axes[0].set(title="Two of the weights", xticks=[], yticks=[])
    axes[0].legend(loc="upper right", handlelength=1.5)
    age = np.arange(150)
    axes[1].fill_between(age, (1 - decay) * decay**age, color=AVERAGE_COLOR, lw=0)
    axes[1].set(
        title="Share of past steps",
        xlabel="Steps ago",
        yticks=[],
        xlim=(150, 0),
        ylim=(0, None),
    )
    axes[2].set(title="Error", xlabel="Optimizer step", yscale="log", yticks=[])
    axes[2].minorticks_off()


if __name__ == "__main__":
    draw("water_errors.svg", errors)
    draw("average.svg", average)
