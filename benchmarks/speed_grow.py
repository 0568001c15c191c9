"""How the time of a step grows with atoms, batch, neighbors, types and ranks: runs, the fitted exponent, a plot."""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
import speed_cases
from speed_cases import Case, Runner

CELLS = {96: (1, 1, 1), 192: (2, 1, 1), 384: (2, 2, 1), 768: (2, 2, 2), 1536: (4, 2, 2), 3072: (4, 4, 2)}
AXES: dict[str, list[Any]] = {
    "atoms": list(CELLS),
    "batch": [1, 2, 4, 8, 16, 32, 64],
    "neighbors": [3.0, 4.0, 5.0, 6.0, 7.0],  # cutoffs, angstrom
    "types": [1, 2, 8],
    "ranks": [1, 2],
}
ROWS = 6  # that a run shows
LEAST_S = 3.0  # of measured steps
NOTE = (
    "Seconds of a step at the least and the largest number, and the exponent p of a fit t ~ n^p to all of them and, in "
    "brackets, between the last two; with several ranks each has as many frames as one alone has, and both have the "
    "threads that several leave to each."
)
Point = tuple[float, float]


def measure(case: Case, runners: list[Runner], args: argparse.Namespace) -> dict[str, Any]:
    """Return by name of the runner and by axis the points (number, seconds per step)."""
    points: dict[str, dict[str, list[Point]]] = {}
    failed: dict[str, str] = {}
    for axis in args.axes:
        values = AXES[axis][:2] if args.quick else AXES[axis]
        own = copy.copy(args)
        if axis == "ranks":
            own.threads = max(1, args.threads // max(values))
        for runner, value in itertools.product(runners, values):
            if not runner.ours and axis == "ranks":
                continue
            number, config, ranks = _point(case, axis, value, own)
            try:
                seconds = _seconds(case, runner, config, ranks, own, f"{axis}-{value}")
            except (RuntimeError, TimeoutError) as error:
                failed[f"{runner.name}, {axis} {value}"] = str(error) or "no row in time"
                continue
            points.setdefault(runner.name, {}).setdefault(axis, []).append((number, seconds))
            print(case.name, runner.name, axis, value, number, seconds, flush=True)
    return {"points": points, "failed": failed}


def _point(case: Case, axis: str, value: Any, args: argparse.Namespace) -> tuple[float, dict[str, Any], int]:
    """Return the number of a point, its input, and its ranks."""
    times = CELLS[value] if axis == "atoms" else (1, 1, 1)
    batch = value if axis == "batch" else 1
    config = speed_cases.input_of(replace(case, times=times, batch=batch), args, disp_freq=1)
    config["model"]["data_stat_nbatch"] = 1
    if axis == "types":
        source = common.read_input(args.input, args.data)["training"]["training_data"]["systems"][0]
        system = speed_cases.system_of(source, (2, 1, 1), args.work, value)
        config["training"]["training_data"]["systems"] = [str(system)]
        config["model"]["type_map"] = common.ELEMENTS[:value]
        _resize(config, "sel", None)
    elif axis == "neighbors":
        neighbors = _resize(config, "rcut", value)
        return neighbors, config, 1
    return value, config, value if axis == "ranks" else 1


def _resize(config: dict[str, Any], option: str, value: float | None) -> float:
    """Give the descriptor a cutoff and room for the neighbors in it; return their number."""
    descriptor = config["model"]["descriptor"]
    if "rcut" not in descriptor:
        raise RuntimeError("the cutoffs of this descriptor are not changed here")
    if option == "rcut":
        descriptor["rcut"] = value
    by_type = isinstance(descriptor["sel"], list)
    probe = copy.deepcopy(config)
    probe["model"]["descriptor"]["sel"] = "auto"
    sel = common.with_numeric_sel(probe)["model"]["descriptor"]["sel"]
    descriptor["sel"] = sel if by_type else sum(sel)
    return sum(sel) / common.SEL_RATIO


def _seconds(
    case: Case, runner: Runner, config: dict[str, Any], ranks: int, args: argparse.Namespace, name: str
) -> float:
    """Return the median seconds of a step in a run of its own."""
    command = runner.command(common.programs(args.peer))
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                   "-m", "deepmd_ema"]  # fmt: skip
    env = speed_cases.runner_environment(args, runner, args.caches)
    config = speed_cases.runner_input(config, case, runner, args.caches)
    run = common.HaltedRun.start(command, args.folder / f"{runner.name}-{name}", config, env)
    try:
        until, step = time.perf_counter() + args.wait, 0
        first = run.wait_for(2, until)
        while len(run.rows) < ROWS + 2 or run.rows[step] < run.rows[first] + (0 if args.quick else LEAST_S):
            step = run.wait_for(max(run.rows), until)
    finally:
        if ranks > 1:  # the launcher ends its ranks, which are in sessions of their own
            run.process.terminate()
            run.process.wait(args.wait)
        run.end()
    steps = sorted(step for step in run.rows if step >= first)
    return statistics.median((run.rows[b] - run.rows[a]) / (b - a) for a, b in itertools.pairwise(steps))


def exponent(points: list[Point]) -> float:
    """Return p of a fit ``t ~ n^p`` to the points."""
    numbers, seconds = np.array(points).T
    return float(np.polyfit(np.log(numbers), np.log(seconds), 1)[0])


def rows(found: dict[tuple[str, Case], dict[str, Any]], runners: list[Runner]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of the table."""
    lines = []
    for (stage, case), result in found.items():
        for runner in runners if stage == "grow" else ():
            for axis, points in result["points"].get(runner.name, {}).items():
                if len(points) > 1:
                    (least, fast), (most, slow) = points[0], points[-1]
                    fit = f"{exponent(points):.2f} ({exponent(points[-2:]):.2f})"
                    span = [f"{least:.0f} to {most:.0f}", f"{1000 * fast:.1f}", f"{1000 * slow:.1f}"]
                    lines.append([case.name, runner.title, axis, *span, fit])
    return ["model", "", "against", "from, to", "ms", "ms", "exponent"], lines


def plot(found: dict[Case, dict[str, Any]], axes: list[str], path: Path) -> None:
    """Draw the points of all runs, one panel for each of ``axes``, on logarithmic scales."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    size = (3.4 * len(axes), 3.4)
    figure, panels = plt.subplots(1, len(axes), figsize=size, constrained_layout=True, squeeze=False)
    for panel, axis in zip(panels[0], axes):
        ticks: set[float] = set()
        for case, result in found.items():
            for name, by_axis in result["points"].items():
                points = by_axis.get(axis, [])
                if len(points) > 1:
                    label = f"{case.name}, {name}: {exponent(points):.2f}"
                    panel.plot(*zip(*points), "o-", markersize=3, linewidth=1, label=label)
                    ticks |= {round(number) for number, _ in points}
        panel.set(xscale="log", yscale="log", xlabel=axis, title=f"against {axis}")
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xticks(sorted(ticks))
        if panel.lines:
            panel.legend(fontsize=6, frameon=False)
    panels[0, 0].set_ylabel("seconds of a step")
    figure.savefig(path, dpi=150)
    plt.close(figure)
