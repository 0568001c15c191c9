"""Errors of runs before and after `dp-ema posthoc --solve`: live weights and averages.

usage: python benchmarks/solve.py RUN ... [--part layer] [--output PAGE]

Each RUN is a folder in which `dp-ema train` has ended. The ridge is chosen by cross-validation on training frames; the
errors are those on the validation frames, which choose nothing. Two RUNs at a time are processed.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from common import environment, machine, programs, publish, table, today

COLUMNS = {"energy": "rmse_e_meV/atom", "force": "rmse_f_meV/A", "virial": "rmse_v_meV/atom"}


def main() -> None:
    """Fit, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--part", choices=("layer", "bias"), default="layer", help="what is fitted (layer)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (1)")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    with ThreadPoolExecutor(2) as pool:
        rows = [row for rows in pool.map(partial(_solve, args), args.runs) for row in rows]
    page = [
        f"# Output {args.part} fitted after training, {today()}",
        f"Command: `python benchmarks/solve.py RUN ... --part {args.part}`. Machine: "
        f"{machine(programs(None), args.threads, 'cpu')}.",
        table(["run", "weights", *(f"{name}, before -> after" for name in COLUMNS), "ridge", "s"], rows),
    ]
    publish("\n\n".join(page), args.output)


def _solve(args: argparse.Namespace, run: Path) -> list[list[str]]:
    """Return a row for each set of weights of a run, which stays as it is."""
    with tempfile.TemporaryDirectory() as scratch:
        words = ["posthoc", str(run), "--solve", args.part, "--metric", "F:RMSE"]
        words += [f"--{option}={scratch}/{name}" for option, name in
                  (("output", "m.pt"), ("table", "t.csv"), ("plot", "p.png"))]  # fmt: skip
        began = time.perf_counter()
        env = environment(args.threads, "cpu")
        done = subprocess.run([sys.executable, "-m", "deepmd_ema", *words], env=env, capture_output=True, text=True,
                              check=False)  # fmt: skip
        seconds = time.perf_counter() - began
        if done.returncode:
            return [[_name(run), "", *([done.stderr.strip().splitlines()[-1]] + [""] * 4)]]
        with Path(scratch, "t.csv").open() as file:
            found = {row["weights"]: row for row in csv.DictReader(file)}
    ridges = dict(re.findall(r"with the weights (\S+): .*ridge (\S+)", done.stdout))
    ends = f", {args.part} fitted"
    rows = []
    for name, before in found.items():
        if not name.endswith(ends):
            after = found.get(name + ends, before)
            pairs = [(float(before[column]), float(after[column])) for column in COLUMNS.values()]
            errors = ["-" if math.isnan(old) else f"{old:.3g} -> {new:.3g}" for old, new in pairs]
            rows.append([_name(run), name, *errors, ridges.get(name, "none"), f"{seconds:.0f}"])
    return rows


def _name(run: Path) -> str:
    return "/".join(run.resolve().parts[-2:])


if __name__ == "__main__":
    main()
