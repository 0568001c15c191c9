"""Errors of averages of the weights: of a whole bank, and of lengths found after training.

usage: python benchmarks/averaging_worth.py --work DIR [--jobs 2] [--output PAGE] [--plot PNG]

Both examples are trained with the learning rate of their input and with a constant one, once per
seed, each run with one thread. A run tracks the whole bank below and validates all of it on all
validation frames at ten steps, the last one included; then `dp-ema posthoc` looks for the best
length in its snapshots. What is finished in --work is not done again, so that the benchmark can be
stopped and continued; with --no-train only what is finished is reported, and the page says which
runs are missing.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
from common import median_and_each

from deepmd_ema.report.curves import Curve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLUMNS = {
    "energy": "E_RMSE(meV/atom)",
    "force": "F_RMSE(meV/Å)",
    "stress": "S_RMSE(meV/Å³)",
}
UNITS = {"energy": "meV/atom", "force": "meV/angstrom", "stress": "meV/angstrom^3"}
EXAMPLES = ("water", "molecules")
SCHEDULES = ("decaying", "constant")
NUM_VALIDATIONS = 10
NUM_SNAPSHOTS = 40
LIVE, BEST = "live", "best length found after training"
LINES = {  # colors by kind, darker for a longer window, dashed without warm-up
    LIVE: {"color": "#000000", "lw": 2.2},
    "EMA 0.9": {"color": "#9ecae1"},
    "EMA 0.99": {"color": "#4292c6"},
    "EMA 0.999": {"color": "#08306b"},
    "EMA 0.99, no warm-up": {"color": "#4292c6", "ls": "--"},
    "EMA 0.999, no warm-up": {"color": "#08306b", "ls": "--"},
    "SWA, second half": {"color": "#009E73"},
    "power 0.05": {"color": "#E69F00"},
    "power 0.10": {"color": "#D55E00"},
}
STORED = (0.05, 0.10)  # sigma_rel of the snapshots
TRACKED = (0.07, 0.15)  # sigma_rel that are tracked beside them


def bank(num_steps: int) -> dict[str, dict[str, Any]]:
    """Return the averages of a run by the words that the tables have for them."""
    averages: dict[str, dict[str, Any]] = {}
    for decay in (0.9, 0.99, 0.999):
        averages[f"EMA {decay}"] = {"type": "ema", "decay": decay}
    for decay in (0.99, 0.999):
        averages[f"EMA {decay}, no warm-up"] = {
            "type": "ema",
            "decay": decay,
            "warmup": False,
        }
    averages["SWA, second half"] = {"type": "swa", "start_step": num_steps // 2}
    for sigma_rel in sorted((*STORED, *TRACKED)):
        averages[f"power {sigma_rel:.2f}"] = {"type": "power", "sigma_rel": sigma_rel}
        if sigma_rel in STORED:
            more = {
                "snapshots": True,
                "snapshot_freq": max(1, num_steps // NUM_SNAPSHOTS),
            }
            averages[f"power {sigma_rel:.2f}"] |= more
    for words, section in averages.items():
        section |= {
            "name": average_name(words),
            "full_validation": True,
            "ckpt_keep": 1,
        }
    return averages


def average_name(words: str) -> str:
    """Return the name in files: ``EMA 0.99, no warm-up`` is ``ema_0_99_no_warm-up``."""
    return words.lower().replace(",", "").replace(" ", "_").replace(".", "_")


@dataclass(frozen=True)
class Run:
    """One training: where it is and what it is of."""

    example: str
    schedule: str
    seed: int
    folder: Path
    config: dict[str, Any]

    @property
    def title(self) -> str:
        """Description."""
        return f"{self.example}, {self.schedule} learning rate, seed {self.seed}"

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.config["training"]["numb_steps"]

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a result if the run has it and it is of this config, wherever the data lay."""
        made_from, file = self.folder / "input.json", self.folder / name
        if not file.exists() or _without_places(
            json.loads(made_from.read_text())
        ) != _without_places(self.config):
            return None
        return json.loads(file.read_text())


def main() -> None:
    """Train, look for lengths, and print the page."""
    args = _arguments()
    program, env = (
        common.programs(None)["ours"],
        common.environment(args.threads, args.device),
    )
    runs = [
        _make_run(args, *what)
        for what in itertools.product(args.examples, args.schedules, args.seeds)
    ]
    if not args.no_train:
        _in_parallel(lambda run: _train(program, env, run), runs, args.jobs)
    finished = [run for run in runs if run.read("errors.json") is not None]
    if not args.no_train:
        _in_parallel(lambda run: _posthoc(program, env, run), finished, args.jobs)
    if not finished:
        raise SystemExit(f"{args.work}: no run is finished; leave out --no-train.")
    common.publish(_page(runs, finished, args), args.output)
    if args.plot is not None:
        _plot(finished, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work",
        type=Path,
        default=common.RUNS / "averaging_worth",
        help="folder of the runs",
    )
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="draw errors along the run here, and errors by length beside it (..._lengths)",
    )
    parser.add_argument("--examples", nargs="+", choices=EXAMPLES, default=EXAMPLES)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--steps", type=int, help="steps instead of those of the inputs, at least 20"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--no-train", action="store_true", help="only report what is finished"
    )
    args = parser.parse_args()
    if args.steps is not None and args.steps < 2 * NUM_VALIDATIONS:
        parser.error(f"--steps {args.steps}: at least {2 * NUM_VALIDATIONS}")
    return args


def _make_run(args: argparse.Namespace, example: str, schedule: str, seed: int) -> Run:
    config = common.with_seed(
        common.read_input(common.ROOT / "examples" / example / "input.json", None), seed
    )
    training, validating = config["training"], config["validating"]
    steps = training["numb_steps"] = args.steps or training["numb_steps"]
    for key in [key for key in training if "ema" in key]:
        training.pop(key)
    if schedule == "constant":
        config["learning_rate"]["stop_lr"] = config["learning_rate"]["start_lr"]
    training |= {
        "averaging": list(bank(steps).values()),
        "save_freq": steps,
        "max_ckpt_keep": 1,
    }
    every = steps // NUM_VALIDATIONS
    validating |= {
        "full_validation": True,
        "validation_freq": every,
        "save_best": False,
    }
    validating["full_val_start"] = (
        steps - (NUM_VALIDATIONS - 1) * every
    )  # so that the last step is validated
    validating.pop("ema_full_validation", None)
    return Run(
        example, schedule, seed, args.work / f"{example}-{schedule}-{seed}", config
    )


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that has only the last names of the systems."""
    config = copy.deepcopy(config)
    for section in ("training_data", "validation_data"):
        data = config["training"][section]
        data["systems"] = [Path(system).name for system in data["systems"]]
    return config


def _in_parallel(do, runs: Iterable[Run], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        for done in pool.map(do, runs):
            if done is not None:
                print(done, flush=True)


def _train(program: common.Program, env: dict[str, str], run: Run) -> str | None:
    """Train and note the errors of every set of weights at every validation; nothing if that is
    done.
    """
    if run.read("errors.json") is not None:
        return None
    common.write_input(run.folder, run.config)
    common.run_text(program, run.folder, env, "train", "input.json", "-l", "train.log")
    files = {LIVE: "val.log"} | {
        words: f"val_{section['name']}.log"
        for words, section in bank(run.steps).items()
    }
    curves = {words: Curve(run.folder / file) for words, file in files.items()}
    errors = {
        words: {
            name: curve.columns[column].tolist()
            for name, column in COLUMNS.items()
            if not any(
                value != value for value in curve.columns[column].tolist()
            )  # nan: no such label
        }
        for words, curve in curves.items()
    }
    result = {"step": curves[LIVE].steps.tolist(), "errors": errors}
    (run.folder / "errors.json").write_text(json.dumps(result))
    return f"{run.title}: trained"


def _posthoc(program: common.Program, env: dict[str, str], run: Run) -> str | None:
    """Note the errors by length of a run, and how lengths that were tracked come out; nothing if
    that is done.
    """
    if run.read("posthoc.json") is not None:
        return None
    common.run_text(program, run.folder, env, "posthoc", ".", "--shapes", "none")
    rows = _read_lengths(run.folder / "posthoc.csv")
    made = [row for row in rows if row["kind"] == "posthoc"]
    best = next(row for row in made if row["chosen"] == "1")
    result = {
        "curve": {
            "sigma_rel": [float(row["sigma_rel"]) for row in made],
            "errors": {
                name: [_errors_of(row)[name] for row in made]
                for name in _errors_of(best)
            },
        },
        "best": {"sigma_rel": float(best["sigma_rel"]), "errors": _errors_of(best)},
    }
    (run.folder / "posthoc.json").write_text(json.dumps(result))
    return f"{run.title}: lengths found"


def _read_lengths(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def _errors_of(row: dict[str, str]) -> dict[str, float]:
    """Return the errors of a row of the table of lengths, those that the data have labels for."""
    found = {
        name: next(v for k, v in row.items() if k.startswith(f"rmse_{name[0]}_"))
        for name in COLUMNS
    }
    return {name: float(value) for name, value in found.items() if value != "nan"}


def _page(
    runs: Sequence[Run], finished: Sequence[Run], args: argparse.Namespace
) -> str:
    missing = [run.title for run in runs if run not in finished]
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in finished:
        groups.setdefault((run.example, run.schedule), []).append(run)
    parts = [
        f"# Worth of averages, {common.today()}",
        "RMSE on all validation frames after the last step: the median over the seeds and, in "
        "brackets, each seed. `over live` is the median over the seeds of the ratio to the live "
        "weights of the same run. Power averages are named by their sigma_rel; an EMA without "
        "warm-up is DeePMD-kit's formula. The best length found after training is the one that "
        "`dp-ema posthoc` picks (mean of the ratios to live of energy, force and virial), by "
        "errors on the very frames that are shown here: it had a choice that the others did not "
        "have.  \n"
        "With a constant learning rate the weights of energy and force in the loss do not move "
        "either: they follow the rate and stay at their start.  \n"
        f"On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]
    if missing:
        parts.append(f"Not finished: {'; '.join(missing)}.")
    for (example, schedule), group in groups.items():
        seeds = ", ".join(str(run.seed) for run in group)
        parts.append(
            f"## {example}, {schedule} learning rate\n\n{group[0].steps} steps, seeds {seeds}."
        )
        parts += [_errors_table(group), _lowest(group)]
    parts += _lengths_part(finished)
    return "\n\n".join(parts)


def _final(run: Run) -> dict[str, dict[str, float]]:
    """Return the errors after the last step by weights and quantity, with the best length if it was
    looked for.
    """
    found = run.read("errors.json")["errors"]
    final = {
        words: {name: values[-1] for name, values in errors.items()}
        for words, errors in found.items()
    }
    lengths = run.read("posthoc.json")
    if lengths is not None:
        final[BEST] = lengths["best"]["errors"]
    return final


def _errors_table(group: Sequence[Run]) -> str:
    finals = [_final(run) for run in group]
    quantities = list(finals[0][LIVE])
    header = ["weights"]
    for name in quantities:
        header += [f"{name}, {UNITS[name]}", "over live"]
    rows = []
    for words in [LIVE, *bank(group[0].steps), BEST]:
        have = [final for final in finals if words in final]
        cells = [
            words
            if len(have) == len(finals)
            else f"{words} ({len(have)} of {len(finals)} runs)"
        ]
        for name in quantities if have else ():
            values = [final[words][name] for final in have]
            ratio = statistics.median(
                final[words][name] / final[LIVE][name] for final in have
            )
            cells += [median_and_each(values), f"{ratio:.3f}"]
        if have:
            rows.append(cells)
    return common.table(header, rows)


def _lowest(group: Sequence[Run]) -> str:
    """Return one line per quantity about the tracked average with the lowest median."""
    finals = [_final(run) for run in group]
    lines = []
    for name in finals[0][LIVE]:
        medians = {
            words: statistics.median(final[words][name] for final in finals)
            for words in (LIVE, *bank(group[0].steps))
        }
        best, worst = min(medians, key=medians.get), max(medians, key=medians.get)
        lines.append(
            f"- {name}: lowest {best} ({medians[best]:.4g}), highest {worst} "
            f"({medians[worst]:.4g}), live {medians[LIVE]:.4g} {UNITS[name]}"
        )
    return "\n".join(lines)


def _lengths_part(finished: Sequence[Run]) -> list[str]:
    """Return the best lengths of every run."""
    rows = []
    for run in finished:
        found = run.read("posthoc.json")
        if found is not None:
            lowest = {
                name: min(zip(values, found["curve"]["sigma_rel"]))
                for name, values in found["curve"]["errors"].items()
            }
            by_quantity = ", ".join(
                f"{name} {sigma:.3f} ({value:.4g})"
                for name, (value, sigma) in lowest.items()
            )
            rows.append(
                [
                    run.example,
                    run.schedule,
                    str(run.seed),
                    f"{found['best']['sigma_rel']:.3f}",
                    by_quantity,
                ]
            )
    if not rows:
        return []
    header = [
        "example",
        "learning rate",
        "seed",
        "sigma_rel picked",
        "lowest by quantity: sigma_rel (RMSE)",
    ]
    return ["## Lengths found after training", common.table(header, rows)]


def _plot(finished: Sequence[Run], picture: Path) -> None:
    """Draw errors along the run of the first seed, and in a second picture errors by length of
    every seed.
    """
    groups: dict[str, list[Run]] = {}
    for run in finished:
        groups.setdefault(f"{run.example}, {run.schedule} rate", []).append(run)
    _draw(groups, picture, _draw_run)
    if any(run.read("posthoc.json") is not None for run in finished):
        _draw(groups, picture.with_stem(f"{picture.stem}_lengths"), _draw_lengths)


def _draw(groups: dict[str, list[Run]], picture: Path, draw) -> None:
    """Draw a column per group, forces above energies, and one legend below."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    from deepmd_ema.report.plots import STYLE

    with plt.rc_context(fname=STYLE):
        size = (4.2 * len(groups), 7)
        figure, axes = plt.subplots(
            2, len(groups), figsize=size, squeeze=False, layout="constrained"
        )
        for column, (title, group) in zip(axes.T, groups.items()):
            column[0].set_title(title)
            for axis, name in zip(column, ("force", "energy")):
                draw(axis, group, name)
                axis.set(yscale="log", ylabel=f"{name} RMSE, {UNITS[name]}")
                axis.yaxis.set_major_formatter(LogFormatter())
                axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        lines = {
            label: line
            for axis in axes.flat
            for line, label in zip(*axis.get_legend_handles_labels())
        }
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=6)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)
        plt.close(figure)
    print(f"wrote {picture}")


def _draw_run(axis, group: Sequence[Run], name: str) -> None:
    found = group[0].read("errors.json")
    for words, style in LINES.items():
        axis.plot(found["step"], found["errors"][words][name], label=words, **style)
    axis.set(xlabel=f"step (seed {group[0].seed})")


def _draw_lengths(axis, group: Sequence[Run], name: str) -> None:
    from deepmd_ema.report.plots import RUN_COLORS

    for run, color in zip(group, itertools.cycle(RUN_COLORS)):
        final, found = _final(run), run.read("posthoc.json")
        if found is not None:
            curve = found["curve"]
            axis.plot(
                curve["sigma_rel"],
                curve["errors"][name],
                color=color,
                label=f"seed {run.seed}, of snapshots",
            )
        axis.axhline(
            final[LIVE][name], color=color, ls=":", lw=1, label=f"seed {run.seed}, live"
        )
        tracked = [
            (s["sigma_rel"], final[words][name])
            for words, s in bank(run.steps).items()
            if "sigma_rel" in s
        ]
        axis.plot(
            *zip(*tracked), "o", color=color, ms=4, label=f"seed {run.seed}, tracked"
        )
    axis.set(xlabel="sigma_rel")


if __name__ == "__main__":
    main()
