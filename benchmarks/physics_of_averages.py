"""Dynamics and bonds of averaged weights beside weights at the end of a decay.

usage: python benchmarks/physics_of_averages.py --sources DIR --work DIR [--train-only] [--output PAGE]

Small models of seven sets (divided_sets.py), three seeds, as in anytime.py and in the same --work. Of each seed three
sets of weights after the same number of steps:

- ``live``: live weights of a run at a constant learning rate;
- ``average``: the power average p05 of this run;
- ``decayed``: live weights of the run that continues from the first 80 % of it with a rate that decays to a hundredth.

``average`` and ``decayed`` have nearly the same force error, so that what differs is something else. Each is measured
with the functions of `dp-ema test --physics` from several frames that were not trained on, with velocities of their
own. Differences are paired by seed: the mean over the frames of a seed is one number.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anytime
import common
import numpy as np
from divided_sets import SETS, TEST, systems_in

WEIGHTS = LIVE, AVERAGE, DECAYED = "live", "average", "decayed"
PAIRS = ((AVERAGE, DECAYED), (AVERAGE, LIVE))
NAMES = ("water", "acac", "molecules", "alloy", "alloys", "Mo", "Si")
# K, of the run without thermostat: half of that of the other one
TEMPERATURES = {"water": 400, "acac": 600, "molecules": 600, "alloy": 1000, "alloys": 1500, "Mo": 1500, "Si": 1000}
T_QUANTILE = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}  # of Student's t, 97.5 %, by the number of seeds
FRAMES, MD_STEPS = 3, 1000
MAX_FORCE_OF_CRYSTAL = 0.05  # eV/angstrom: relaxed frames are left out
QUANTITIES = {
    "force": "force RMSE, meV/angstrom",
    "energy": "energy RMSE, meV/atom",
    "drift": "NVE drift, absolute, meV/atom/ps",
    "spread": "NVE spread, meV/atom",
    "cold": "NVE runs that failed",
    "time": "part of the hot run until failure",
    "hot": "hot runs that failed",
    "extrema": "spurious extrema of bonds",
}


@dataclass(frozen=True)
class Case:
    """One set and seed."""

    name: str
    seed: int
    steps: int
    work: Path

    def jobs(self) -> list[anytime.Job]:
        """The two runs; the second continues from a checkpoint of the first."""
        return [anytime.Job(self.name, self.seed, recipe, self.steps, self.work) for recipe in ("constant", "wsd")]

    def file(self, weights: str) -> Path:
        """Path of the results of some weights."""
        return self.work / f"{self.name}-{self.seed}" / f"physics-{self.steps}-{weights.replace(' ', '_')}.json"


def main() -> None:
    """Train and measure what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the clones of init_sets.py")
    parser.add_argument("--work", type=Path, default=common.RUNS / "anytime", help="folder of the runs")
    parser.add_argument("--sets", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000, help="of each run (2000)")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--page-only", action="store_true")
    parser.add_argument("--output", type=Path, help="also write the page here")
    args = parser.parse_args()
    args.work = args.work.resolve()
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    cases = [Case(name, seed, args.steps, args.work) for seed in args.seeds for name in args.sets]
    if not args.page_only:
        import torch

        torch.set_num_threads(1)
        for case in cases:
            for job in case.jobs():
                if job.result() is None:
                    anytime.do(job, args.sources)
        for case in cases if not args.train_only else ():
            _measure(case)
    common.publish(_page(cases, args), args.output)


def _measure(case: Case) -> None:
    """Measure all weights of a seed that are not measured yet."""
    from deepmd_ema.infer.evaluate import open_labelled
    from deepmd_ema.infer.potential import Potential
    from deepmd_ema.labels import ENERGY, FORCE
    from deepmd_ema.physics.report import PhysicsOptions, physics_of

    data = case.work / "data" / case.name
    constant, decayed = case.jobs()
    files = {LIVE: constant.folder / f"model.ckpt-{case.steps}.pt", DECAYED: decayed.kept}
    files[AVERAGE] = files[LIVE]
    for weights in WEIGHTS:
        if case.file(weights).exists():
            continue
        loaded = _load(files[weights], weights)
        systems = open_labelled(systems_in(data / TEST), loaded.config, (ENERGY, FORCE))
        frames = [system.frame(n) for system in systems for n in range(system.num_frames)]
        frames = [frame for frame in frames if np.abs(frame.labels[FORCE]).max() > MAX_FORCE_OF_CRYSTAL]
        potential, found = Potential(loaded, "cpu"), []
        for k in range(FRAMES):
            first = len(frames) * k // FRAMES
            options = PhysicsOptions(TEMPERATURES[case.name], md_steps=MD_STEPS, seed=k + 1)
            found.append(physics_of(potential, [*frames[first:], *frames[:first]], options))
        result = {
            "errors": anytime.Frames.open(data / TEST, loaded.config).errors(loaded.model),
            "reports": [_numbers(report) for report in found],
        }
        case.file(weights).write_text(json.dumps(result))
        print(f"{case.name}, seed {case.seed}, {weights}: {result}", flush=True)


def _load(file: Path, weights: str) -> Any:
    from deepmd_ema.infer.load import load_model

    return load_model(file) if weights in (LIVE, DECAYED) else load_model(file, average="p05")


def _numbers(report: Any) -> dict[str, float]:
    nve, hot, whole = report.conservation, report.stability, 1e-3 * report.run.time_step * report.run.steps
    return {
        "drift": math.nan if nve.failure else 1e3 * abs(nve.drift),
        "spread": math.nan if nve.failure else 1e3 * nve.spread,
        "cold": float(bool(nve.failure)),
        "time": hot.time / whole,
        "hot": float(bool(hot.failure)),
        "extrema": float(sum(bond.extrema for bond in report.bonds)),
    }


def _values(case: Case, weights: str) -> dict[str, float]:
    """Return the mean over the frames of each quantity."""
    found = json.loads(case.file(weights).read_text())
    names = list(dict.fromkeys(name for report in found["reports"] for name in report))
    return found["errors"] | {
        name: _mean([report.get(name, math.nan) for report in found["reports"]]) for name in names
    }


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _page(cases: Sequence[Case], args: argparse.Namespace) -> str:
    done = [case for case in cases if all(case.file(weights).exists() for weights in WEIGHTS)]
    parts = [
        f"# Physics of averages and decays, {common.today()}",
        f"Models of {anytime.SMALL['neuron']}, rcut {anytime.SMALL['rcut']}, float32, {args.steps:,} steps of Adam, "
        f"rate {anytime.START_LR:g}. From {FRAMES} frames that were not trained on, {MD_STEPS:,} steps each without "
        "thermostat, and with one at twice the temperature; numbers are means of these. Failures are those of "
        "`dp-ema test --physics`: a distance below 0.75 of the shortest one of the data, a force above 100 "
        "eV/angstrom, a temperature far above that of the thermostat. Runs without thermostat that failed have no "
        "drift.  \n"
        f"On {common.machine(common.programs(None), 1, 'cpu')}.",
    ]
    for name in args.sets:
        of_set = [case for case in done if case.name == name]
        if not of_set:
            continue
        values = {weights: [_values(case, weights) for case in of_set] for weights in WEIGHTS}
        rows = [
            [label, *(_cell([v.get(q, math.nan) for v in values[w]]) for w in WEIGHTS)]
            for q, label in QUANTITIES.items()
        ]
        about = f"{SETS[name].about}; {TEMPERATURES[name]} and {2 * TEMPERATURES[name]} K"
        parts += [f"## {name}", f"{about}. Median over the seeds (each seed).", common.table(["", *WEIGHTS], rows)]
    parts += [
        "## Failed runs of all sets and seeds",
        common.table(
            ["", *WEIGHTS], [[QUANTITIES[q], *(_count(done, w, q) for w in WEIGHTS)] for q in ("cold", "hot")]
        ),
        "## Paired differences",
        "Mean over the seeds of the difference of the two, with the interval of 95 % by Student's t of these pairs; in "
        "bold where it does not contain zero. With so few seeds only large differences are seen, and of so many "
        "intervals one in twenty excludes zero by chance.",
        *_differences(done, args.sets),
    ]
    return "\n\n".join(parts)


def _count(cases: Sequence[Case], weights: str, quantity: str) -> str:
    """Return the number of runs that failed, and that of all."""
    reports = [report for case in cases for report in json.loads(case.file(weights).read_text())["reports"]]
    return f"{sum(report[quantity] for report in reports):.0f} of {len(reports)}"


def _differences(done: Sequence[Case], names: Sequence[str]) -> Iterator[str]:
    for one, other in PAIRS:
        rows = []
        for name in names:
            of_set = [case for case in done if case.name == name]
            if len(of_set) < 2:
                continue
            pairs = [(_values(case, one), _values(case, other)) for case in of_set]
            rows.append([name, *(_interval([a[q] - b[q] for a, b in pairs]) for q in QUANTITIES)])
        yield f"### {one} less {other}"
        yield common.table(["set", *QUANTITIES.values()], rows)


def _interval(differences: Sequence[float]) -> str:
    known = np.array([value for value in differences if not math.isnan(value)])
    if len(known) < 2:
        return "-"
    mean, half = known.mean(), T_QUANTILE[len(known)] * known.std(ddof=1) / math.sqrt(len(known))
    text = f"{mean:.2g} ± {half:.2g}"
    return f"**{text}**" if abs(mean) > half else text


def _cell(values: Sequence[float]) -> str:
    return common.median_and_each(list(values))


if __name__ == "__main__":
    main()
