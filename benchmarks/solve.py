"""Errors of runs before and after `dp-ema posthoc --solve`: live weights, averages, and the best one made of snapshots.

usage: python benchmarks/solve.py RUN[=SYSTEMS] ... [--part layer] [--output PAGE]

Each RUN is a folder in which `dp-ema train` has ended; those whose paths differ in a number after a hyphen only
(`water-1/constant`, `water-2/constant`) are seeds, and share their rows. The ridge is chosen by cross-validation on
training frames; the errors are those on the frames in the folder SYSTEMS, or else on the validation frames of the run:
neither chooses anything but which of the averages made of snapshots is solved for. Two RUNs at a time are processed.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from common import environment, machine, median_and_each, programs, publish, table, today

COLUMNS = {"energy": "rmse_e_meV/atom", "force": "rmse_f_meV/A", "virial": "rmse_v_meV/atom"}
TRACKED = ("live", "p05", "p10", "ema")
BEST = "best of snapshots"


def main() -> None:
    """Fit, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN[=SYSTEMS]", nargs="+", help="folders of runs, and of frames to report")
    parser.add_argument("--part", choices=("layer", "bias"), default="layer", help="what is fitted (layer)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (1)")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    seeds: dict[str, list[str]] = {}
    for run in args.runs:
        seeds.setdefault(_name(Path(run.partition("=")[0])), []).append(run)
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(args.runs, pool.map(partial(_solve, args), args.runs)))
    rows = [row for name, runs in seeds.items() for row in _rows(name, [found[run] for run in runs])]
    page = [
        f"# Output {args.part} fitted after training, {today()}",
        f"Command: `python benchmarks/solve.py RUN ... --part {args.part}`. Medians of the runs (each), before -> "
        "after; ratios of energies, forces, virials; seconds of the fit alone. "
        f"Machine: {machine(programs(None), args.threads, 'cpu')}.",
        table(
            ["run", "weights", *(f"{name}, {unit}" for name, unit in _units()), "after / before", "ridge", "s"], rows
        ),
    ]
    publish("\n\n".join(page), args.output)


def _units() -> list[tuple[str, str]]:
    return [("energy", "meV/atom"), ("force", "meV/angstrom"), ("virial", "meV/atom")]


def _solve(args: argparse.Namespace, run: str) -> dict[str, dict[str, Any]]:
    """Return errors before and after, ridge and seconds by weights; the run stays as it is."""
    folder, _, systems = run.partition("=")
    with tempfile.TemporaryDirectory() as scratch:
        words = ["posthoc", folder, "--solve", args.part, "--metric", "F:RMSE"]
        words += ["-s", *map(str, sorted(Path(systems).iterdir()))] if systems else []
        words += [f"--{option}={scratch}/{name}" for option, name in
                  (("output", "m.pt"), ("table", "t.csv"), ("plot", "p.png"))]  # fmt: skip
        env = environment(args.threads, "cpu")
        done = subprocess.run([sys.executable, "-m", "deepmd_ema", *words], env=env, capture_output=True, text=True,
                              check=False)  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{run}: {done.stderr}")
        with Path(scratch, "t.csv").open() as file:
            rows = list(csv.DictReader(file))
    fits = {}
    pattern = r"with the weights (.+?): .*?, ([\d.]+) s: .*?(?:ridge (\S+))?$"
    for name, seconds, ridge in re.findall(pattern, done.stdout, re.MULTILINE):
        after = [row for row in rows if row["weights"] == f"{name}, {args.part} fitted"]
        # averages made of snapshots have one name, and differ in their width; without a change there is no second row
        before = [row for row in rows if row["weights"] == name and row["sigma_rel"] in (a["sigma_rel"] for a in after)]
        before = before or [row for row in rows if row["weights"] == name]
        fits[name if name in TRACKED else BEST] = {
            "ridge": float(ridge or math.nan),
            "s": float(seconds),
            **{quantity: (float(before[0][c]), float((after or before)[0][c])) for quantity, c in COLUMNS.items()},
        }
    return fits


def _rows(name: str, found: Sequence[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """Return a row for each set of weights."""
    rows = []
    for weights in found[0]:
        fits = [run[weights] for run in found if weights in run]
        cells, ratios = [], []
        for quantity in COLUMNS:
            before, after = zip(*(fit[quantity] for fit in fits))
            if math.isnan(before[0]):
                cells.append("-")
                continue
            cells.append(f"{median_and_each(before)} -> {median_and_each(after)}")
            ratios.append(f"{statistics.median(a / b for a, b in zip(after, before)):.2f}")
        ridges = ", ".join(f"{fit['ridge']:.1g}" for fit in fits)
        seconds = statistics.median(fit["s"] for fit in fits)
        rows.append([name, weights, *cells, ", ".join(ratios), ridges, f"{seconds:.2g}"])
    return rows


def _name(run: Path) -> str:
    """Return the last two parts of a path without numbers after hyphens, as of seeds."""
    return re.sub(r"-\d+", "", "/".join(run.resolve().parts[-2:]))


if __name__ == "__main__":
    main()
