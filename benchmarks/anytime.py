"""Runs without a planned end, stopped at several budgets, beside runs whose rate decays within each budget.

usage: python benchmarks/anytime.py --sources DIR --work DIR [--quick] [--max-minutes M] [--leave-out RECIPE ...]
                                    [--output PAGE] [--plot PNG]

Five sets (divided_sets.py; --sources holds the clones of public repositories), small models in float32. For each budget
of steps a run of its own with the schedules exp, cosine and wsd. And four runs that serve all budgets: at a constant
rate and at one that falls as the inverse square root, with snapshots of two power averages, of which at each budget the
average or decay is chosen that `dp-ema posthoc` ranks first; and AdamWScheduleFree with its averaged point, as it is
and with options that weigh later points more. All have the same weights of energy and force in the loss, constant ones;
"exp, ramp" has those of the input, which follow the learning rate. Frames that are not trained on are divided: half of
them choose (of a decayed run one of live weights and two averages), errors are those on the other half. What is
finished in --work is not done again, so that the benchmark can be stopped and continued; the page names what is
missing. --cost prints what is left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from common import median_and_each
from divided_sets import CHOOSE, SETS, TEST, loss_and_model, systems_in

CONSTANT, INVSQRT, FREE, LATE = "constant", "invsqrt", "schedule-free", "schedule-free, late"
WITHOUT_END = (CONSTANT, INVSQRT, FREE, LATE)
# options of AdamWScheduleFree: its defaults; and of sixteen, with seed 4, those that serve all sets
OPTIONS: dict[str, dict[str, float]] = {FREE: {}, LATE: {"adam_beta1": 0.98, "r": 4}}
WSD, RAMP = "wsd", "exp, ramp"
DECAYED = ("exp", "cosine", WSD, RAMP)
BUDGETS = (500, 1000, 2000, 4000, 8000)
QUICK = (500,)
NAMES = ("water", "molecules", "alloy", "acac", "alloys")
AVERAGES = {"p05": 0.05, "p10": 0.10}
METRICS = {"energy": "E:RMSE", "force": "F:RMSE"}
UNITS = {"energy": "meV/atom", "force": "meV/angstrom"}
# the best rate of 0.001, 0.003, 0.01 and 0.03 for wsd and exp on most of three sets, with a seed that is not measured
START_LR, EXP_STOP_LR, STOP_LR, WARMUP = 1e-2, 1e-3, 1e-4, 100
INVSQRT_STEPS = 1000  # after which its rate is START_LR / sqrt(2); the default
DECAY_PART = 0.2  # of wsd
CPU_S_PER_STEP = 0.015  # before anything was measured
SMALL = {"rcut": 4.5, "rcut_smth": 0.5, "neuron": [8, 16, 32], "axis_neuron": 8, "precision": "float32"}
SNAPSHOTS, CHECKPOINTS = 25, 100  # steps between two; the wsd runs continue from checkpoints
CHOSEN, LIVE = "chosen", "live"
AVERAGED_POINT = "schedule_free"
STYLES = {
    CONSTANT: {"color": "#D55E00", "marker": "o", "lw": 2.2},
    INVSQRT: {"color": "#E69F00", "marker": "o", "lw": 2.2},
    FREE: {"color": "#56B4E9", "marker": "o", "lw": 1.2},
    LATE: {"color": "#7B3294", "marker": "o", "lw": 2.2},
    "exp": {"color": "#0072B2", "marker": "s", "ls": "--"},
    "cosine": {"color": "#009E73", "marker": "^", "ls": "--"},
    WSD: {"color": "#CC79A7", "marker": "v", "ls": "--"},
    RAMP: {"color": "#000000", "marker": "x", "lw": 1, "ls": "--"},
}


@dataclass(frozen=True)
class Job:
    """One result: the errors of one recipe after one budget."""

    name: str
    seed: int
    recipe: str
    budget: int
    work: Path

    @property
    def title(self) -> str:
        """Description."""
        return f"{self.name}, {self.recipe}, {self.budget} steps, seed {self.seed}"

    @property
    def place(self) -> Path:
        """Folder of all runs of a set and seed."""
        return self.work / f"{self.name}-{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run; one without end is for all budgets."""
        stem = self.recipe.replace(", ", "_")
        return self.place / (stem if self.recipe in WITHOUT_END else f"{stem}-{self.budget}")

    @property
    def kept(self) -> Path:
        """Training checkpoint of a decayed run, whose other files are removed."""
        return self.place / "models" / f"{self.folder.name}.pt"

    @property
    def file(self) -> Path:
        """Path of the result."""
        return self.place / f"{self.recipe.replace(', ', '_')}-{self.budget}.json"

    @property
    def config(self) -> dict[str, Any]:
        """The input; its systems are named relative to the folder of the run."""
        return make_input(self.name, self.seed, self.recipe, self.budget)

    def steps(self) -> int:
        """Steps that it takes when the result of the next smaller budget of the same run is there."""
        if self.recipe in WITHOUT_END:
            return self.budget // 2  # budgets double
        return round(DECAY_PART * self.budget) if self.recipe == WSD else self.budget

    def result(self) -> dict[str, Any] | None:
        """Return the result if it is there and of this input."""
        if not self.file.exists():
            return None
        found = json.loads(self.file.read_text())
        return found if found["config"] == json.loads(json.dumps(self.config)) else None


def main() -> None:
    """Train what is missing, and print the page."""
    args = _arguments()
    jobs = _in_order(args)
    left = [job for job in jobs if job.result() is None]
    _print_cost(jobs, left)
    if args.cost:
        return
    args.work = args.work.resolve()
    end = time.monotonic() + 60 * args.max_minutes
    if left and args.max_minutes > 0:
        import torch

        torch.set_num_threads(args.threads)
        logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
        for job in left:
            if time.monotonic() > end:
                break
            do(job, args.sources)
    _report(args, jobs)


def _report(args: argparse.Namespace, jobs: Sequence[Job]) -> None:
    done = {job: found for job in jobs if (found := job.result()) is not None}
    if not done:
        raise SystemExit(f"{args.work}: no run is finished.")
    common.publish(_page(jobs, done, args), args.output)
    if args.plot is not None:
        _plot(done, args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True, help="folder with the clones of init_sets.py")
    parser.add_argument("--work", type=Path, default=common.RUNS / "anytime", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the errors here")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=NAMES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="steps, multiples of 500")
    recipes = [*WITHOUT_END, *DECAYED]
    parser.add_argument("--leave-out", nargs="+", choices=recipes, default=[], metavar="RECIPE", help="not these runs")
    parser.add_argument("--quick", action="store_true", help="one seed, a budget of 500 steps")
    parser.add_argument("--max-minutes", type=float, default=math.inf, help="start no further run after this time")
    parser.add_argument("--cost", action="store_true", help="only print what is left to do")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.budgets = args.seeds[:1], QUICK
    elif any(budget % 500 for budget in args.budgets):
        parser.error("--budgets: expected multiples of 500")
    args.work = args.work.resolve()
    args.without_end, args.decayed = (
        [recipe for recipe in kind if recipe not in args.leave_out] for kind in (WITHOUT_END, DECAYED)
    )
    if not args.without_end or not args.decayed:
        parser.error("--leave-out: expected one run without an end and one that decays, or more, to be left")
    return args


def _in_order(args: argparse.Namespace) -> list[Job]:
    """Return all jobs: small budgets and the first seed come first, so that a page can be made early; the ramp last."""
    jobs = [
        Job(name, seed, recipe, budget, args.work)
        for seed in args.seeds
        for budget in sorted(args.budgets)
        for name in args.sets
        for recipe in (*args.without_end, *reversed(args.decayed))  # wsd, the shortest, first
    ]
    large = {budget: max(0, k - 2) for k, budget in enumerate(sorted(args.budgets))}
    turn = {job: args.seeds.index(job.seed) + large[job.budget] + (job.recipe == RAMP) for job in jobs}
    return sorted(jobs, key=lambda job: (turn[job], args.seeds.index(job.seed)))


def _print_cost(jobs: Sequence[Job], left: Sequence[Job]) -> None:
    measured = [(found["cpu_s"], job.steps()) for job in jobs if (found := job.result()) is not None]
    per_step = sum(s for s, _ in measured) / sum(n for _, n in measured) if measured else CPU_S_PER_STEP
    steps = sum(job.steps() for job in left)
    basis = "as those that are done" if measured else "assumed"
    print(
        f"{len(jobs) - len(left)} of {len(jobs)} results are there; {steps:,} steps are left: "
        f"{steps * per_step / 60:.0f} minutes of processor time ({1000 * per_step:.0f} ms per step, {basis})",
        flush=True,
    )


def make_input(name: str, seed: int, recipe: str, budget: int) -> dict[str, Any]:
    """Return the input of a run."""
    config = common.with_seed(loss_and_model(name), seed)
    model, training = config["model"], config["training"]
    model["descriptor"] |= {**SMALL, "sel": "auto"}
    model["fitting_net"] |= {"neuron": [40, 40, 40], "precision": "float32"}
    loss = config["loss"]
    loss |= {"start_pref_v": 0, "limit_pref_v": 0}
    if recipe != RAMP:
        for term in ("e", "f"):
            # where the ramp of the input is after half of an exponential decay
            start, limit = loss[f"start_pref_{term}"], loss[f"limit_pref_{term}"]
            middle = limit + (start - limit) * math.sqrt(EXP_STOP_LR / START_LR)
            loss |= {f"start_pref_{term}": middle, f"limit_pref_{term}": middle}
    config["learning_rate"] = _schedule(recipe)
    names = SETS[name].train
    systems = [f"../../data/{name}/train/{system}" for system in names]
    training["training_data"] = {"systems": systems, "batch_size": SETS[name].batch_size}
    for key in ("validation_data", "enable_ema", "ema_decay"):
        training.pop(key, None)
    if recipe in OPTIONS:
        config["optimizer"] = {"type": "AdamWScheduleFree", "weight_decay": 0, **OPTIONS[recipe]}
    has_end, with_snapshots = recipe not in WITHOUT_END, recipe in (CONSTANT, INVSQRT)
    freq = {"snapshots": True, "snapshot_freq": SNAPSHOTS} if with_snapshots else {}
    power = [{"name": n, "type": "power", "sigma_rel": s, "ckpt_keep": 1, **freq} for n, s in AVERAGES.items()]
    training |= {
        "numb_steps": budget,
        "disp_freq": 1000,
        "save_freq": budget if has_end else CHECKPOINTS,
        "max_ckpt_keep": 1 if has_end else 10**6,
        "averaging": [{"name": AVERAGED_POINT, "type": AVERAGED_POINT, "ckpt_keep": 1}] if recipe in OPTIONS else power,
    }
    config.pop("validating", None)
    return config


def _schedule(recipe: str) -> dict[str, Any]:
    common_part = {"start_lr": START_LR, "warmup_steps": WARMUP}
    if recipe == CONSTANT or recipe in OPTIONS:
        return {"type": "wsd", "decay_type": "linear", "stop_lr": START_LR, **common_part}
    if recipe == INVSQRT:
        return {"type": "invsqrt", "a": INVSQRT_STEPS, **common_part}
    if recipe == WSD:
        decay = {"decay_type": "linear", "decay_phase_ratio": DECAY_PART}
        return {"type": "wsd", "stop_lr": STOP_LR, **decay, **common_part}
    if recipe == "cosine":
        return {"type": "cosine", "stop_lr": STOP_LR, **common_part}
    return {"type": "exp", "stop_lr": EXP_STOP_LR, "decay_steps": 1, "smooth": True, **common_part}


def do(job: Job, sources: Path) -> None:
    """Train and measure, and note the result."""
    data = job.work / "data" / job.name
    data.parent.mkdir(parents=True, exist_ok=True)
    SETS[job.name].make(sources, data)
    began = time.process_time()
    _train(job)
    trained = time.process_time()
    errors, details = (_of_snapshots if job.recipe in (CONSTANT, INVSQRT) else _of_checkpoint)(job, data)
    result = {"config": job.config, "errors": errors, "details": details, "cpu_s": time.process_time() - began}
    part = job.file.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(job.file)
    if job.recipe not in WITHOUT_END:
        job.kept.parent.mkdir(exist_ok=True)
        (job.folder / f"model.ckpt-{job.budget}.pt").replace(job.kept)
        shutil.rmtree(job.folder)
    print(
        f"{job.title}: {trained - began:.0f} s of processor time, errors {time.process_time() - trained:.0f} s",
        flush=True,
    )


def _train(job: Job) -> None:
    """Train up to the budget: a run without end from where it is, a wsd run from where its decay begins."""
    from deepmd_ema.training.run import run_training

    start = None
    if job.recipe in WITHOUT_END and (job.folder / "checkpoint").exists():
        made_from = json.loads((job.folder / "input.json").read_text())
        made_from["training"]["numb_steps"] = job.budget
        if made_from == job.config:
            start = "."
    if job.recipe == WSD:
        before = job.budget - int(DECAY_PART * job.budget)
        constant = job.place / CONSTANT / f"model.ckpt-{before}.pt"
        start = str(constant) if constant.exists() else None
    if start != ".":
        shutil.rmtree(job.folder, ignore_errors=True)
        job.folder.mkdir(parents=True)
    (job.folder / "input.json").write_text(json.dumps(job.config))
    with inside(job.folder):
        if start == "." and (job.folder / f"model.ckpt-{job.budget}.pt").exists():
            return
        run_training("input.json", restart=start, device="cpu", allow_config_change=job.recipe == WSD)


def _of_checkpoint(job: Job, data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the errors of the weights that are best by the choosing frames: live, or one of the averages."""
    from deepmd_ema.config import config_from_dict
    from deepmd_ema.infer.load import load_model

    file = job.folder / f"model.ckpt-{job.budget}.pt"
    averages = (AVERAGED_POINT,) if job.recipe in OPTIONS else tuple(AVERAGES)
    models = {LIVE: load_model(file).model} | {name: load_model(file, average=name).model for name in averages}
    task = next(iter(config_from_dict(job.config).tasks.values()))
    choosing, test = (Frames.open(data / part, task.model) for part in (CHOOSE, TEST))
    found = {name: choosing.errors(model) for name, model in models.items()}
    best = min(found, key=lambda name: _overall(found[name], found[LIVE]))
    return {LIVE: test.errors(models[LIVE]), CHOSEN: test.errors(models[best])}, {"chosen": best}


def _of_snapshots(job: Job, data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the errors of live weights, tracked averages, and of the best of what snapshots make."""
    import torch

    from deepmd_ema.config import config_from_dict
    from deepmd_ema.model.build import build_models
    from deepmd_ema.posthoc.run import find_requested, measure_combinations
    from deepmd_ema.posthoc.snapshots import find_snapshots

    run = find_snapshots(job.folder, job.budget)
    found, _, left_out = find_requested(run, [])
    config = config_from_dict(run.payload["config"])
    task = next(iter(config.tasks.values()))
    models, cpu = build_models({task.name: task.model}, config.links), torch.device("cpu")
    choosing, test = (Frames.open(data / part, task.model) for part in (CHOOSE, TEST))
    rows, best, weights = measure_combinations(run, found.combinations, models, task.name, choosing.systems, cpu)
    measured, _, _ = measure_combinations(run, [], models, task.name, test.systems, cpu)
    errors = {row.name: _errors(row.errors) for row in measured}
    models.load_state_dict(weights)
    errors[CHOSEN] = test.errors(models.by_task[task.name])
    chosen = rows[best].name if rows[best].decay else f"sigma_rel {rows[best].sigma_rel:.3f}"
    return errors, {"chosen": chosen, "left_out": left_out}


@dataclass(frozen=True)
class Frames:
    """Labelled frames of a part of a set.

    Attributes:
        systems: with energies and forces.
        cache: their neighbors.
    """

    systems: Sequence[Any]
    cache: Any

    @classmethod
    def open(cls, folder: Path, model: Any) -> Frames:
        """Read the systems in a folder for a model of this section."""
        from deepmd_ema.data.collate import PairCache
        from deepmd_ema.infer.evaluate import open_labelled
        from deepmd_ema.labels import ENERGY, FORCE

        return cls(open_labelled(systems_in(folder), model, (ENERGY, FORCE)), PairCache())

    def errors(self, model: Any) -> dict[str, float]:
        """Return the RMSEs of a model."""
        import torch

        from deepmd_ema.data.loader import sequential_batches
        from deepmd_ema.labels import ENERGY, FORCE
        from deepmd_ema.metrics import evaluate

        batches = sequential_batches(self.systems, model.layout, self.cache, labels=(ENERGY, FORCE))
        return _errors(evaluate(model, batches, torch.device("cpu")))


def _errors(errors: Any) -> dict[str, float]:
    return {name: 1000 * errors.metric(metric) for name, metric in METRICS.items()}


def _overall(errors: dict[str, float], live: dict[str, float]) -> float:
    return sum(errors[name] / live[name] for name in METRICS) / len(METRICS)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in ``folder`` until the end of the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- page


def _page(jobs: Sequence[Job], done: dict[Job, dict[str, Any]], args: argparse.Namespace) -> str:
    words = "; ".join(f"{name}: {SETS[name].about}" for name in args.sets)
    parts = [
        f"# Runs without a planned end beside runs that decay, {common.today()}",
        f"RMSE on the frames that chose nothing: median over the seeds (each seed). Sets: {words}. Models of "
        f"{SMALL['neuron']}, rcut {SMALL['rcut']}, float32, Adam; learning rate {START_LR:g} after {WARMUP} steps of "
        f"warm-up; exp to {EXP_STOP_LR:g}, cosine and wsd (linear, last {100 * DECAY_PART:g} %) to {STOP_LR:g}, each "
        f"in a run of the budget. Constant weights of energy and force in the loss; `{RAMP}` has those of the input, "
        f"which follow the rate. `{CONSTANT}`, `{INVSQRT}` (a = {INVSQRT_STEPS}), `{FREE}` and `{LATE}` are one run "
        "per seed for all budgets: of the first two what `dp-ema posthoc` ranks first, of the last two their averaged "
        f"point; `{LATE}` has the options {OPTIONS[LATE]}. "
        "Of a decayed run the best of live weights and two averages is shown, chosen on the same frames. `ratio` is "
        "the best run without end over the best decayed one, of the medians: below 1 that without end is better.  \n"
        f"On {common.machine(common.programs(None), args.threads, 'cpu')}.",
        "## Best without end over best decayed",
        "Ratios of the tables below: each without end, then the best of each kind.",
        _ratios(done, args),
    ]
    for name in args.sets:
        for quantity in METRICS:
            if rows := _rows(name, quantity, CHOSEN, done, args):
                header = ["steps", *args.without_end, *args.decayed, "best without end", "best decayed", "ratio"]
                parts += [f"## {name}: {quantity}, {UNITS[quantity]}", common.table(header, rows)]
    if missing := _missing(jobs, done):
        parts += ["## Not finished", "\n".join(missing)]
    return "\n\n".join(parts)


def _ratios(done: dict[Job, dict[str, Any]], args: argparse.Namespace) -> str:
    rows = []
    for name in args.sets:
        for quantity in METRICS:
            for budget in sorted(args.budgets):
                medians, seeds = _medians(name, quantity, CHOSEN, budget, done, args)
                if not seeds:
                    continue
                lowest = min(medians[recipe] for recipe in args.decayed if recipe in medians)
                each = [medians[recipe] / lowest for recipe in args.without_end]
                ratios = [*(f"{ratio:.2f}" for ratio in each), f"**{min(each):.2f}**"]
                rows.append([name, quantity, str(budget), *ratios, str(len(seeds))])
    return common.table(["set", "quantity", "steps", *args.without_end, "best", "seeds"], rows)


def _missing(jobs: Sequence[Job], done: dict[Job, dict[str, Any]]) -> list[str]:
    """Return a line for each seed and budget of which something is missing."""
    lines: dict[tuple[int, int], list[str]] = {}
    for seed, budget, name in dict.fromkeys((job.seed, job.budget, job.name) for job in jobs):
        of_set = [job for job in jobs if (job.seed, job.budget, job.name) == (seed, budget, name)]
        left = [job.recipe for job in of_set if job not in done]
        if left:
            words = name if len(left) == len(of_set) else f"{name} ({'; '.join(left)})"
            lines.setdefault((seed, budget), []).append(words)
    return [f"- seed {seed}, {budget} steps: {', '.join(words)}" for (seed, budget), words in sorted(lines.items())]


def _found(
    name: str, quantity: str, weights: str, budget: int, done: dict[Job, dict[str, Any]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the errors by recipe, of those seeds of which every recipe is there, but for the ramp."""
    errors = {
        recipe: {
            job.seed: result["errors"][weights][quantity]
            for job, result in done.items()
            if (job.name, job.recipe, job.budget) == (name, recipe, budget)
        }
        for recipe in (*args.without_end, *args.decayed)
    }
    compared = [recipe for recipe in errors if recipe != RAMP]
    seeds = [seed for seed in args.seeds if all(seed in errors[recipe] for recipe in compared)]
    return {
        recipe: [of_seed[seed] for seed in seeds]
        for recipe, of_seed in errors.items()
        if seeds and all(seed in of_seed for seed in seeds)
    }


def _medians(*args: Any) -> tuple[dict[str, float], list[float]]:
    """Return the medians by recipe, and the errors of a run of each seed."""
    found = _found(*args)
    return {recipe: statistics.median(values) for recipe, values in found.items()}, found.get(CONSTANT, [])


def _rows(
    name: str, quantity: str, weights: str, done: dict[Job, dict[str, Any]], args: argparse.Namespace
) -> list[list[str]]:
    rows = []
    for budget in sorted(args.budgets):
        found = _found(name, quantity, weights, budget, done, args)
        if not found:
            continue
        medians = {recipe: statistics.median(values) for recipe, values in found.items()}
        without, decayed = (
            min((recipe for recipe in kind if recipe in medians), key=medians.get)
            for kind in (args.without_end, args.decayed)
        )
        recipes = (*args.without_end, *args.decayed)
        numbers = [median_and_each(found[recipe]) if recipe in found else "" for recipe in recipes]
        rows.append([str(budget), *numbers, without, decayed, f"{medians[without] / medians[decayed]:.2f}"])
    return rows


def _plot(done: dict[Job, dict[str, Any]], picture: Path) -> None:
    """Draw errors over the budget: a column per set, forces above energies."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter, NullFormatter, ScalarFormatter

    from deepmd_ema.report.plots import STYLE

    sets = [name for name in SETS if any(job.name == name for job in done)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(sets), figsize=(4.2 * len(sets), 7), squeeze=False, layout="constrained")
        for column, name in zip(axes.T, sets):
            seeds = len({job.seed for job in done if job.name == name})
            column[0].set_title(f"{name}, {seeds} seed{'s' * (seeds > 1)}")
            for axis, quantity in zip(column, ("force", "energy")):
                for label, style in STYLES.items():
                    points: dict[int, list[float]] = {}
                    for job, result in done.items():
                        if (job.name, job.recipe) == (name, label):
                            points.setdefault(job.budget, []).append(result["errors"][CHOSEN][quantity])
                    medians = [(budget, statistics.median(values)) for budget, values in sorted(points.items())]
                    if medians:
                        axis.plot(*zip(*medians), label=label, **style)
                axis.set(xscale="log", yscale="log", ylabel=f"{quantity} RMSE, {UNITS[quantity]}")
                axis.xaxis.set_major_formatter(ScalarFormatter())
                axis.xaxis.set_minor_formatter(NullFormatter())
                axis.set_xticks(sorted({job.budget for job in done if job.name == name}))
                axis.yaxis.set_major_formatter(LogFormatter())
                axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            column[-1].set_xlabel("steps")
        lines = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=len(lines))
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)
        plt.close(figure)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
