"""One run at a constant learning rate, stopped at several budgets, beside runs whose rate decays within each budget.

usage: python benchmarks/anytime.py --work DIR [--quick] [--max-minutes M] [--output PAGE] [--plot PNG]

Three sets (both examples, and an alloy of Cu and Ni that ASE's EMT labels), small models in float32. For each budget
of steps a run of its own with the schedules exp, cosine and wsd; and one run at a constant rate that keeps snapshots of
two power averages, of which at each budget the average or decay is chosen that `dp-ema posthoc` ranks first. All have
the same weights of energy and force in the loss, constant ones; "exp, ramp" has those of the input, which follow the
learning rate. The frames that were set apart for validation are divided: half of them choose (of a decayed run one of
live weights and two averages), errors are those on the other half. What is finished in --work is not done again, so
that the benchmark can be stopped and continued; the page names what is missing. --cost prints what is left to do.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import median_and_each

SETS = ("water", "molecules", "alloy")
CONSTANT, RAMP = "constant", "exp, ramp"
DECAYED = ("exp", "cosine", "wsd", RAMP)
BUDGETS = (500, 1000, 2000, 4000, 8000)
QUICK = (500,)
AVERAGES = {"p05": 0.05, "p10": 0.10}
METRICS = {"energy": "E:RMSE", "force": "F:RMSE"}
UNITS = {"energy": "meV/atom", "force": "meV/angstrom"}
START_LR, EXP_STOP_LR, STOP_LR, WARMUP = 1e-3, 1e-4, 1e-5, 100
DECAY_PART = 0.2  # of wsd
CPU_S_PER_STEP = 0.015  # before anything was measured
FRAMES_PER_BATCH = {"water": 1, "molecules": 4, "alloy": 2}
SMALL = {"rcut": 4.5, "rcut_smth": 0.5, "neuron": [8, 16, 32], "axis_neuron": 8, "precision": "float32"}
SNAPSHOTS, CHECKPOINTS = 25, 100  # steps between two; the wsd runs continue from checkpoints
CHOSEN, LIVE = "chosen", "live"
AS_WSD = "linear, as wsd"  # the linear decay over the part of wsd, made of snapshots
STYLES = {
    "constant, chosen": {"color": "#D55E00", "marker": "o", "lw": 2.4},
    "constant, p05": {"color": "#E69F00", "marker": ".", "ls": "--"},
    "constant, live": {"color": "#9aa5b1", "marker": ".", "ls": ":"},
    "exp": {"color": "#0072B2", "marker": "s"},
    "cosine": {"color": "#009E73", "marker": "^"},
    "wsd": {"color": "#CC79A7", "marker": "v"},
    RAMP: {"color": "#000000", "marker": "x", "lw": 1},
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
        """Folder of the run: that of the constant one is for all budgets."""
        stem = self.recipe.replace(", ", "_")
        return self.place / (stem if self.recipe == CONSTANT else f"{stem}-{self.budget}")

    @property
    def file(self) -> Path:
        """Path of the result."""
        return self.place / f"{self.recipe.replace(', ', '_')}-{self.budget}.json"

    @property
    def config(self) -> dict[str, Any]:
        """The input; its systems are named relative to the folder of the run."""
        return make_input(self.name, self.seed, self.recipe, self.budget)

    def steps(self) -> int:
        """Steps that it takes when the result of the next smaller budget of the constant run is there."""
        if self.recipe == CONSTANT:
            return self.budget // 2  # budgets double
        return round(DECAY_PART * self.budget) if self.recipe == "wsd" else self.budget

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
            _do(job)
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
    parser.add_argument("--work", type=Path, default=common.RUNS / "anytime", help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw errors over the budget here")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="steps, multiples of 500")
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
    return args


def _in_order(args: argparse.Namespace) -> list[Job]:
    """Return all jobs: small budgets and the first seed come first, so that a page can be made early; the ramp last."""
    jobs = [
        Job(name, seed, recipe, budget, args.work)
        for seed in args.seeds
        for budget in sorted(args.budgets)
        for name in args.sets
        for recipe in (CONSTANT, *reversed(DECAYED))  # wsd, the shortest, first
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
    source = "water" if name == "alloy" else name
    config = common.with_seed(json.loads((common.ROOT / "examples" / source / "input.json").read_text()), seed)
    model, training = config["model"], config["training"]
    model["descriptor"] |= {**SMALL, "sel": "auto"}
    model["fitting_net"] |= {"neuron": [40, 40, 40], "precision": "float32"}
    if name == "alloy":
        model["type_map"] = ["Ni", "Cu"]
    loss = config["loss"]
    loss |= {"start_pref_v": 0, "limit_pref_v": 0}
    if recipe != RAMP:
        for term in ("e", "f"):
            # where the ramp of the input is after half of an exponential decay
            start, limit = loss[f"start_pref_{term}"], loss[f"limit_pref_{term}"]
            middle = limit + (start - limit) * math.sqrt(EXP_STOP_LR / START_LR)
            loss |= {f"start_pref_{term}": middle, f"limit_pref_{term}": middle}
    config["learning_rate"] = _schedule(recipe)
    data = f"../../data/{name}"
    systems = ["train"] if name != "water" else [f"train_{t}K" for t in (300, 350, 400, 450, 500)]
    systems = ["train_small", "train_large"] if name == "molecules" else systems
    systems = [f"train_{n}" for n in COPPER] if name == "alloy" else systems
    training["training_data"] = {"systems": [f"{data}/{s}" for s in systems], "batch_size": FRAMES_PER_BATCH[name]}
    for key in ("validation_data", "enable_ema", "ema_decay"):
        training.pop(key, None)
    kept = recipe == CONSTANT
    freq = {"snapshots": True, "snapshot_freq": SNAPSHOTS} if kept else {}
    training |= {
        "numb_steps": budget,
        "disp_freq": 1000,
        "save_freq": CHECKPOINTS if kept else budget,
        "max_ckpt_keep": 10**6 if kept else 1,
        "averaging": [
            {"name": average, "type": "power", "sigma_rel": s, "ckpt_keep": 1, **freq}
            for average, s in AVERAGES.items()
        ],
    }
    config.pop("validating", None)
    return config


def _schedule(recipe: str) -> dict[str, Any]:
    common_part = {"start_lr": START_LR, "warmup_steps": WARMUP}
    if recipe == CONSTANT:
        return {"type": "wsd", "decay_type": "linear", "stop_lr": START_LR, **common_part}
    if recipe == "wsd":
        return {
            "type": "wsd",
            "decay_type": "linear",
            "stop_lr": STOP_LR,
            "decay_phase_ratio": DECAY_PART,
            **common_part,
        }
    if recipe == "cosine":
        return {"type": "cosine", "stop_lr": STOP_LR, **common_part}
    return {"type": "exp", "stop_lr": EXP_STOP_LR, "decay_steps": 1, "smooth": True, **common_part}


def _do(job: Job) -> None:
    """Train and measure, and note the result."""
    data = job.work / "data" / job.name
    if not data.exists():
        part = data.with_name(f"{job.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        (_write_alloy if job.name == "alloy" else partial(_divide, job.name))(part)
        part.rename(data)
    began = time.process_time()
    _train(job)
    errors, details = (_of_constant if job.recipe == CONSTANT else _of_decayed)(job, data)
    seconds = time.process_time() - began
    result = {"config": job.config, "errors": errors, "details": details, "cpu_s": seconds}
    part = job.file.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.replace(job.file)
    if job.recipe != CONSTANT:
        shutil.rmtree(job.folder)
    print(f"{job.title}: {seconds:.0f} s of processor time", flush=True)


def _train(job: Job) -> None:
    """Train up to the budget: a constant run from where it is, a wsd run from where its decay begins."""
    from deepmd_ema.training.run import run_training

    start = None
    if job.recipe == CONSTANT and (job.folder / "checkpoint").exists():
        made_from = json.loads((job.folder / "input.json").read_text())
        made_from["training"]["numb_steps"] = job.budget
        if made_from == job.config:
            start = "."
    if job.recipe == "wsd":
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
        run_training("input.json", restart=start, device="cpu", allow_config_change=job.recipe == "wsd")


def _of_decayed(job: Job, data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the errors of the weights that are best by the choosing frames: live, or one of the averages."""
    from deepmd_ema.infer.load import load_model

    file = job.folder / f"model.ckpt-{job.budget}.pt"
    models = {LIVE: load_model(file).model} | {name: load_model(file, average=name).model for name in AVERAGES}
    choosing = {name: _measure(model, data / "choose") for name, model in models.items()}
    best = min(choosing, key=lambda name: _overall(choosing[name], choosing[LIVE]))
    errors = {name: _measure(models[name], data / "test") for name in {LIVE, best}}
    return {LIVE: errors[LIVE], CHOSEN: errors[best]}, {"chosen": best}


def _of_constant(job: Job, data: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the errors of live weights, tracked averages, and of the best of each kind that snapshots make."""
    import torch

    from deepmd_ema.config import config_from_dict
    from deepmd_ema.infer.evaluate import open_labelled
    from deepmd_ema.labels import ENERGY, FORCE
    from deepmd_ema.model.build import build_models
    from deepmd_ema.posthoc.run import find_requested, measure_combinations
    from deepmd_ema.posthoc.snapshots import find_snapshots

    run = find_snapshots(job.folder, job.budget)
    found, _, left_out = find_requested(run, [])
    config = config_from_dict(run.payload["config"])
    task = next(iter(config.tasks.values()))
    models, cpu = build_models({task.name: task.model}, config.links), torch.device("cpu")
    choose, test = (open_labelled([str(s) for s in sorted((data / part).iterdir())], task.model, (ENERGY, FORCE))
                    for part in ("choose", "test"))  # fmt: skip
    rows, best, _ = measure_combinations(run, found.combinations, models, task.name, choose, cpu)
    scores = {k: row.score("overall", rows[0].errors) for k, row in enumerate(rows) if row.combination is not None}
    kinds: dict[str, int] = {}
    for k in sorted(scores, key=scores.get):
        kinds.setdefault(rows[k].decay.shape if rows[k].decay else "length", k)
    wanted = dict(kinds)
    for k, row in enumerate(rows):
        if row.decay and row.decay.shape == "linear" and abs(row.decay.part - DECAY_PART) < 0.1 * DECAY_PART:
            wanted[AS_WSD] = k
    measured, _, _ = measure_combinations(
        run, [rows[k].combination for k in wanted.values()], models, task.name, test, cpu
    )
    errors = {row.name: _errors(row.errors) for row in measured if row.combination is None}
    made = {kind: _errors(row.errors) for kind, row in zip(wanted, measured[-len(wanted) :])}
    names = {kind: rows[k].name if rows[k].decay else f"sigma_rel {rows[k].sigma_rel:.3f}" for kind, k in kinds.items()}
    winner = next(kind for kind, k in kinds.items() if k == best)
    details = {"chosen": winner, "names": names, "errors": made, "left_out": left_out}
    return {**errors, CHOSEN: made[winner]}, details


def _measure(model: Any, folder: Path) -> dict[str, float]:
    """Return the RMSEs of a model on the systems in ``folder``."""
    import torch

    from deepmd_ema.data.collate import PairCache
    from deepmd_ema.data.loader import sequential_batches
    from deepmd_ema.data.source import ReadSpec
    from deepmd_ema.infer.evaluate import open_checked
    from deepmd_ema.labels import ENERGY, FORCE
    from deepmd_ema.metrics import evaluate

    labels = (ENERGY, FORCE)
    spec = ReadSpec(tuple(model.type_map), labels)
    systems = open_checked([str(system) for system in sorted(folder.iterdir())], spec, SMALL["rcut"])
    batches = sequential_batches(systems, model.layout, PairCache(), labels=labels)
    return _errors(evaluate(model, batches, torch.device("cpu")))


def _errors(errors: Any) -> dict[str, float]:
    return {name: 1000 * errors.metric(metric) for name, metric in METRICS.items()}


def _overall(errors: dict[str, float], live: dict[str, float]) -> float:
    return sum(errors[name] / live[name] for name in METRICS) / len(METRICS)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# ---- data


COPPER = (4, 10, 16, 22, 28)  # atoms of 32


def _divide(name: str, folder: Path) -> None:
    """Link the training systems of an example, and divide its validation frames: every second one is for choosing."""
    source = common.ROOT / "examples" / name / "data"
    folder.mkdir(parents=True)
    for system in sorted(source.iterdir()):
        if system.name.startswith("train"):
            (folder / system.name).symlink_to(system.resolve())
        elif system.is_dir():
            # six frames of water come from one trajectory, and go the same way
            run = 6 if name == "water" else 1
            for k, part in enumerate(("choose", "test")):
                shutil.copytree(system, folder / part / system.name)
                for file in (folder / part / system.name / "set.000").glob("*.npy"):
                    values = np.load(file)
                    np.save(file, values[np.arange(len(values)) // run % 2 == k])


def _write_alloy(folder: Path) -> None:
    """Write frames of 32 atoms of Cu and Ni on disordered fcc sites, displaced and strained, labelled by EMT."""
    from ase import Atoms
    from ase.build import bulk
    from ase.calculators.emt import EMT

    rng = np.random.default_rng(20251122)
    sites = bulk("Cu", cubic=True, a=1.0).repeat(2)
    for part, count in (("train", 60), ("choose", 10), ("test", 20)):
        for copper in COPPER:
            kinds = np.repeat([0, 1], [32 - copper, copper])
            constant = 3.52 + 0.09 * copper / 32  # angstrom, between Ni and Cu
            found: dict[str, list[Any]] = {"coord": [], "box": [], "energy": [], "force": []}
            for _ in range(count):
                cell = sites.cell.array * constant @ (np.eye(3) + rng.uniform(-0.03, 0.03, (3, 3)))
                coord = rng.permutation(sites.get_scaled_positions()) @ cell
                coord += rng.uniform(0.02, 0.18) * rng.normal(size=coord.shape)
                frame = Atoms([("Ni", "Cu")[kind] for kind in kinds], coord, cell=cell, pbc=True)
                frame.calc = EMT()
                labels = {"energy": frame.get_potential_energy(), "force": frame.get_forces()}
                for name, value in {"coord": coord, "box": cell, **labels}.items():
                    found[name].append(value)
            target = folder / (f"train_{copper}" if part == "train" else f"{part}/{copper}")
            common.write_system(target, kinds, ["Ni", "Cu"], {name: np.array(v) for name, v in found.items()})


# ---- page


def _page(jobs: Sequence[Job], done: dict[Job, dict[str, Any]], args: argparse.Namespace) -> str:
    parts = [
        f"# One run at a constant rate beside runs that decay, {common.today()}",
        f"RMSE on the frames that chose nothing: median over the seeds (each seed). Models of {SMALL['neuron']}, rcut "
        f"{SMALL['rcut']}, float32; learning rate {START_LR:g} after {WARMUP} steps of warm-up; exp to "
        f"{EXP_STOP_LR:g}, cosine and wsd (linear, last {100 * DECAY_PART:g} %) to {STOP_LR:g}, each in a run of the "
        f"budget. Constant weights of energy and force in the loss; `{RAMP}` has those of the input, which follow the "
        "rate. `constant` is one run per seed for all budgets: `live`; `p05`, an average that was tracked; `chosen`, "
        "what `dp-ema posthoc` ranks first. Of a decayed run the best of live weights and two averages is shown, "
        "chosen on the same frames. `ratio` is constant, chosen, over the best decayed one of the row: below 1 the "
        "constant run is better.  \n"
        f"On {common.machine(common.programs(None), args.threads, 'cpu')}.",
    ]
    for name in args.sets:
        for quantity in METRICS:
            rows = _rows(name, quantity, done, args)
            if rows:
                header = [
                    "steps",
                    *(f"constant, {w}" for w in (LIVE, "p05", CHOSEN)),
                    *DECAYED,
                    "best decayed",
                    "ratio",
                ]
                parts += [f"## {name}: {quantity}, {UNITS[quantity]}", common.table(header, rows)]
    parts += _choices(done)
    parts += _beside_wsd(done)
    if missing := _missing(jobs, done):
        parts += ["## Not finished", "\n".join(missing)]
    return "\n\n".join(parts)


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


def _rows(name: str, quantity: str, done: dict[Job, dict[str, Any]], args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for budget in sorted(args.budgets):
        # one row compares the same seeds: those of which every recipe is there, but for the ramp
        found = {
            recipe: {
                job.seed: result["errors"]
                for job, result in done.items()
                if (job.name, job.recipe, job.budget) == (name, recipe, budget)
            }
            for recipe in (CONSTANT, *DECAYED)
        }
        compared = [recipe for recipe in found if recipe != RAMP]
        seeds = [seed for seed in args.seeds if all(seed in found[recipe] for recipe in compared)]
        if not seeds:
            continue
        cells = [[found[CONSTANT][seed][w][quantity] for seed in seeds] for w in (LIVE, "p05", CHOSEN)]
        decayed = {
            recipe: [found[recipe][seed][CHOSEN][quantity] for seed in seeds]
            for recipe in DECAYED
            if all(seed in found[recipe] for seed in seeds)
        }
        best = min(decayed, key=lambda recipe: statistics.median(decayed[recipe]))
        ratio = statistics.median(cells[-1]) / statistics.median(decayed[best])
        numbers = [median_and_each(values) for values in cells]
        numbers += [median_and_each(decayed[recipe]) if recipe in decayed else "" for recipe in DECAYED]
        rows.append([str(budget), *numbers, best, f"{ratio:.2f}"])
    return rows


def _choices(done: dict[Job, dict[str, Any]]) -> list[str]:
    """Return rows of the choices of the constant runs, with the errors of the best length and decay of each shape."""
    rows = []
    for job, result in sorted(done.items(), key=lambda pair: (SETS.index(pair[0].name), pair[0].seed, pair[0].budget)):
        if job.recipe != CONSTANT:
            continue
        details = result["details"]
        cells = []
        for kind in ("length", "linear", "cosine", "1-sqrt"):
            if kind not in details["errors"]:
                cells.append("not resolved")
                continue
            energy, force = (details["errors"][kind][name] for name in METRICS)
            mark = "**" if kind == details["chosen"] else ""
            cells.append(f"{mark}{details['names'][kind]}{mark}: {energy:.3g}, {force:.4g}")
        rows.append([job.name, str(job.seed), str(job.budget), *cells])
    if not rows:
        return []
    header = ["set", "seed", "steps", "length", "linear", "cosine", "1-sqrt"]
    text = (
        "The best length and the best decay of each shape by the choosing frames, with their errors on the others: "
        "energy, meV/atom, and force, meV/angstrom. In bold what ranked first."
    )
    return ["## What was chosen of the constant runs", text, common.table(header, rows)]


def _beside_wsd(done: dict[Job, dict[str, Any]]) -> list[str]:
    """Return rows that compare a decay made of snapshots with the decay that it replaces."""
    rows = []
    for job, result in sorted(done.items(), key=lambda pair: (SETS.index(pair[0].name), pair[0].seed, pair[0].budget)):
        made = result["details"].get("errors", {}).get(AS_WSD)
        real = done.get(replace(job, recipe="wsd"))
        if made is None or real is None:
            continue
        rows.append([job.name, str(job.seed), str(job.budget)])
        for name in METRICS:
            values = (result["errors"][LIVE][name], made[name], real["errors"][LIVE][name])
            rows[-1] += [f"{value:.4g}" for value in values]
    if not rows:
        return []
    words = ("constant, live", f"linear {100 * DECAY_PART:g} % of snapshots", "wsd, live")
    header = ["set", "seed", "steps", *(f"{name}: {word}" for name in METRICS for word in words)]
    text = (
        f"The same decay made and run: live weights before it (of the constant run), the linear decay over the last "
        f"{100 * DECAY_PART:g} % made of its snapshots, and live weights of the wsd run, which is the same run up to "
        "where the decay begins. Energy in meV/atom, force in meV/angstrom."
    )
    return ["## A decay made of snapshots beside the same decay in the run", text, common.table(header, rows)]


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
                    recipe, _, weights = label.partition(", ") if label.startswith(CONSTANT) else (label, "", CHOSEN)
                    points: dict[int, list[float]] = {}
                    for job, result in done.items():
                        if (job.name, job.recipe) == (name, recipe):
                            points.setdefault(job.budget, []).append(result["errors"][weights][quantity])
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
