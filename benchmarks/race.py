"""Errors for the same labels and processor time: dp-ema, DeePMD-kit, MACE, NequIP and PET.

usage: python benchmarks/race.py --sources DIR --work DIR --peers DIR [--seconds 60 600]
                                 [--sets NAME ...] [--trainers NAME ...] [--seeds 1 2 3]
                                 [--kelvin T ...] [--recipes FILE ...] [--jobs 2]
                                 [--output PAGE] [--picture PNG]

--sources holds the clones that race_sets.py names, --peers the environments that race_peers.sh
makes. Each trainer gets the same frames, one thread, and the recipe of race_recipes.yaml, or of
another file like it, made as long as the budget allows: two short runs give the time of the start
and of an epoch (or step), and the run has as many as fit in. Seconds are those of the processor, of
the whole command. One script evaluates all models by their ASE calculators. What is in --work is
not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from ase.io import read, write
from common import environment, machine, programs, publish, table, today
from race_evaluate import DYNAMICS_STEPS, TIME_STEP
from race_sets import SETS

FOLDER = Path(__file__).resolve().parent
TEST_FRAMES = 200  # of each part, evenly spaced


def main() -> None:
    """Train what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("sources", "work", "peers"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[60], help="budgets (60)"
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--trainers", nargs="+", help="names of recipes (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--recipes",
        type=Path,
        nargs="+",
        default=[FOLDER / "race_recipes.yaml"],
        help="files",
    )
    parser.add_argument(
        "--kelvin", type=float, nargs="+", default=[], help="of dynamics"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time (1)")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--picture", type=Path, help="force errors by time, as PNG")
    args = parser.parse_args()
    args.work, args.peers = args.work.resolve(), args.peers.resolve()
    recipes = {
        k: v
        for file in args.recipes
        for k, v in yaml.safe_load(file.read_text()).items()
    }
    args.trainers = args.trainers or list(recipes)
    for name in args.sets:
        _write_set(args, name)
    runs = [
        Run(args.work / name, which, recipes[which], seconds, seed, args)
        for seed in args.seeds
        for seconds in args.seconds
        for name in args.sets
        for which in args.trainers
    ]
    # the short runs come first, one of each kind: others use their times
    short = {(run.folder, run.which): run for run in runs}.values()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(Run.probe, short))
        for run, text in zip(runs, pool.map(Run.race, runs)):
            if text:
                print(f"{run.folder.name}, {run}: {text}", flush=True)
    results = {
        run: json.loads(run.result.read_text()) for run in runs if run.result.exists()
    }
    publish(_page(args, recipes, results), args.output)
    if args.picture:
        _draw(args, results)


def _write_set(args: argparse.Namespace, name: str) -> None:
    """Write the frames of a set, unless that was done."""
    folder = args.work / name
    if (folder / "data").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for part, frames in SETS[name](args.sources).items():
        if part != "train":
            frames = frames[:: max(1, len(frames) // TEST_FRAMES)]
        for atoms in frames:
            # without what a file says beside: each reader would take another part of it
            atoms.info = {}
            atoms.arrays = {
                name: atoms.arrays[name] for name in ("numbers", "positions")
            }
        file = "train" if part == "train" else f"test_{part}"
        write(folder / f"{file}.extxyz", frames)
    words = [sys.executable, "-m", "deepmd_ema", "convert", "train.extxyz", "data"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True)


class Run:
    """A training of a recipe on a set, with its evaluation.

    Args:
        folder: of the set.
        which: name of the recipe.
        recipe: a section of race_recipes.yaml.
        seconds: of the processor.
        seed: of weights, batches and validation frames.
        args: of the command line: the folder of the environments, and temperatures of dynamics.

    Attributes:
        result: file of what was found.
    """

    def __init__(
        self,
        folder: Path,
        which: str,
        recipe: Mapping[str, Any],
        seconds: float,
        seed: int,
        args: argparse.Namespace,
    ) -> None:
        self.folder, self.which, self.recipe = folder, which, recipe
        self.seconds, self.seed = seconds, seed
        own = recipe.get("environment")
        self._python = (
            args.peers / own / "bin" / "python" if own else Path(sys.executable)
        )
        self._kelvin = [f"{kelvin:g}" for kelvin in args.kelvin]
        self._name = which.replace(" ", "_")
        self._probes = folder / f"{self._name}-probes.json"
        self.result = folder / f"{self._name}-{seconds:g}-{seed}.json"

    def __str__(self) -> str:
        return f"{self.which}, {self.seconds:g} s, seed {self.seed}"

    def probe(self) -> None:
        """Measure the time of two short runs, unless that was done."""
        if not self._probes.exists():
            times = [
                self._train("probe", length)[0] for length in self.recipe["probes"]
            ]
            self._probes.write_text(json.dumps(times))

    def race(self) -> str:
        """Train and evaluate, unless that was done; return what was found."""
        if self.result.exists():
            return ""
        try:
            return self._race()
        except SystemExit as error:  # others continue
            return f"failed: {error}"

    def _race(self) -> str:
        short, longer = json.loads(self._probes.read_text())
        first, second = self.recipe["probes"]
        length = first + int(
            (self.seconds - short) * (second - first) / (longer - short)
        )
        if length < 1:
            return "the start takes longer"
        seconds, memory = self._train(f"{self.seconds:g}-{self.seed}", length)
        place = self.folder / f"{self._name}-{self.seconds:g}-{self.seed}"
        tests = sorted(map(str, self.folder.glob("test_*.extxyz")))
        model = next(
            file for name in self.recipe["model"] if (file := place / name).exists()
        )
        words = [self.recipe["kind"], str(model), "--tests", *tests]
        if self._kelvin:
            words += ["--kelvin", *self._kelvin]
        found = self._call(
            [str(self._python), str(FOLDER / "race_evaluate.py"), *words], place
        )
        row = {
            "length": length,
            "cpu_s": seconds,
            "peak_mb": memory,
            **json.loads(found),
        }
        self.result.write_text(json.dumps(row, indent=1))
        return json.dumps(row)

    def _train(self, run: str, length: int) -> tuple[float, float]:
        """Train in a new folder; return seconds of the processor and the largest memory, MB."""
        folder = self.folder / f"{self._name}-{run}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        values = self._values(folder, length)
        for file, content in self.recipe.get("files", {}).items():
            filled = _filled(content, values)
            text = (
                json.dumps(filled) if file.endswith(".json") else yaml.safe_dump(filled)
            )
            (folder / file).write_text(text)
        for command in self.recipe.get("before", ()):
            self._call(shlex.split(_filled(command, values)), folder)
        words = shlex.split(_filled(self.recipe["train"], values))
        with (folder / "train.log").open("w") as log:
            process = subprocess.Popen(
                words, cwd=folder, stdout=log, stderr=log, env=self._env()
            )
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{folder}: {(folder / 'train.log').read_text()[-3000:]}")
        for command in self.recipe.get("after", ()) if run != "probe" else ():
            self._call(shlex.split(_filled(command, values)), folder)
        return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024

    def _values(self, folder: Path, length: int) -> dict[str, Any]:
        """Return the values of the words in angle brackets of a recipe."""
        frames = read(self.folder / "train.extxyz", ":")
        return {
            "length": length,
            "most": max(1, min(length - 1, round(0.8 * length))),
            "tenth": max(1, length // 10),
            "200th": max(1, length // 200),
            "seed": self.seed,
            "elements": sorted(
                {symbol for atoms in frames for symbol in atoms.symbols}
            ),
            "folder": str(folder),
            "stress": "stress" in frames[0].calc.results,
        }

    def _call(self, words: list[str], folder: Path) -> str:
        """Return the last line that a command prints."""
        done = subprocess.run(
            words,
            cwd=folder,
            env=self._env(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{folder}: {' '.join(words)}: {done.stderr[-3000:]}")
        return (done.stdout.splitlines() or [""])[-1]

    def _env(self) -> dict[str, str]:
        path = f"{self._python.parent}{os.pathsep}{os.environ['PATH']}"
        return environment(1, "cpu") | {"PATH": path}


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value of a recipe with the values of a run."""
    if isinstance(value, dict):
        return {key: _filled(one, values) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, values) for one in value]
    if not isinstance(value, str):
        return value
    for name, one in values.items():
        if value == f"<{name}>":
            return one
        value = value.replace(f"<{name}>", str(one))
    return value


def _page(
    args: argparse.Namespace,
    recipes: Mapping[str, Any],
    results: Mapping[Run, dict[str, Any]],
) -> str:
    """Return the page: a table per set and budget, medians over the seeds with their range."""
    parts = []
    for name in args.sets:
        for seconds in args.seconds:
            rows, tests = [], []
            for which in args.trainers:
                found = list(_of(results, name, which, seconds))
                if found:
                    tests = list(found[0]["errors"])
                    length = median(one["length"] for one in found)
                    unit = recipes[which]["unit"]
                    rows.append(
                        [which, f"{length:,.0f} {unit}", *_cells(found, args.kelvin)]
                    )
            temperatures = [f"{kelvin:g} K" for kelvin in args.kelvin]
            head = [
                "trainer",
                "length",
                "CPU s",
                *tests,
                "MD",
                "MB",
                "seeds",
                *temperatures,
            ]
            parts += [f"## {name}, {seconds:g} s", table(head, rows)] if rows else []
    return "\n\n".join(
        [
            f"# Errors for the same labels and time, {today()}",
            "Energies (meV/atom) / forces (meV/angstrom) / stresses (meV/angstrom^3), RMSE: median "
            "of the seeds (least to most force error). MD: microseconds per atom and step of 240 "
            "and of 2,000 atoms. MB: of training. K: mean length of dynamics of at most 2 ps, and "
            f"how many of the runs lasted. Machine: {machine(programs(None), 1, 'cpu')}.",
            *parts,
        ]
    )


def _of(
    results: Mapping[Run, dict[str, Any]], name: str, which: str, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield the results of a trainer, one per seed."""
    for run, result in results.items():
        if (run.folder.name, run.which, run.seconds) == (name, which, seconds):
            yield result


def _cells(results: list[dict[str, Any]], kelvin: list[float]) -> list[str]:
    """Return the cells of a trainer behind its length, the last ones for each temperature."""
    cells = [f"{median(one['cpu_s'] for one in results):.0f}"]
    for test, quantities in results[0]["errors"].items():
        text = " / ".join(
            f"{median(one['errors'][test][q] for one in results):.3g}"
            for q in quantities
        )
        forces = [one["errors"][test].get("force") for one in results]
        spread = (
            f" ({min(forces):.3g}-{max(forces):.3g})"
            if all(forces[1:]) and forces[1:]
            else ""
        )
        cells.append(text + spread)
    times = (
        median(one["md_us"][number] for one in results)
        for number in results[0]["md_us"]
    )
    cells.append(" / ".join(f"{time:,.0f}" for time in times))
    cells.append(f"{max(one['peak_mb'] for one in results):.0f}")
    cells.append(str(len(results)))
    longest = DYNAMICS_STEPS * TIME_STEP / 1000
    for temperature in kelvin:
        # a run of before may have been evaluated without dynamics
        every = [
            one.get("dynamics_ps", {}).get(str(temperature), []) for one in results
        ]
        lives = [life for run in every for life in run]
        held = sum(life >= longest for life in lives)
        mean = sum(lives) / max(1, len(lives))
        cells.append(f"{mean:.2g} ps ({held} of {len(lives)})" if lives else "-")
    return cells


def _draw(args: argparse.Namespace, results: Mapping[Run, dict[str, Any]]) -> None:
    """Draw the force errors of the last test of each set by the time that was spent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * len(args.sets), 4.0), layout="constrained")
    panels = figure.subplots(1, len(args.sets), squeeze=False)[0]
    for panel, name in zip(panels, args.sets):
        for which in args.trainers:
            points = []
            for seconds in args.seconds:
                found = list(_of(results, name, which, seconds))
                if found:
                    errors = found[0]["errors"]
                    test = [one for one in errors if "force" in errors[one]][-1]
                    error = median(one["errors"][test]["force"] for one in found)
                    points.append((median(one["cpu_s"] for one in found), error))
            if points:
                panel.loglog(*zip(*points), marker="o", label=which)
                panel.set_title(f"{name}, {test.removeprefix('test_')}")
        panel.set_xticks(args.seconds, [f"{seconds:g}" for seconds in args.seconds])
        panel.set_xticks([], minor=True)
        panel.set_xlabel("CPU s")
    panels[0].set_ylabel("force RMSE, meV/angstrom")
    # beside the panels, where no point is covered
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(args.picture, dpi=120)


if __name__ == "__main__":
    main()
