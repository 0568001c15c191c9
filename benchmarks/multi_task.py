"""Two levels of theory in one run: errors per task of two multi-task models and of models of each task alone.

usage: python benchmarks/multi_task.py [--seeds 1 2 3] [--steps 3000] [--plot PNG] [--output PAGE]

examples/water (O and H, periodic, GFN1-xTB) and examples/molecules (C, H, N and O in vacuum, GFN2-xTB), all with one
map of four elements and the same small DPA-1. Trained are: each set alone; both in one run that shares the descriptor,
with fitting nets of their own; both with a shared fitting net that is told the task (dim_case_embd); and each alone
for twice the steps. A run of two tasks has twice the steps of one and draws each task with probability 1/2, so that
each task gets as many steps as alone: equal are the steps of a task in the first three, and the steps of a run in the
last three. Learning rate, loss weights and the length of the average follow the share of the run that is done. Live
and averaged weights are validated on all validation frames on the way. Of the first seed the gradients of the two
losses in what is shared are compared, with the first and the last weights. What is finished in --work is not done
again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common
from error_curves import TRAINED, UNITS, Panel, draw, errors_along, median_and_each, train_once

from deepmd_ema.checkpoint import load

TASKS = {"water": "water, GFN1-xTB", "molecules": "molecules, GFN2-xTB"}
MODEL = {
    "type_map": ["C", "H", "N", "O"],
    "descriptor": {"type": "se_atten", "sel": 60, "rcut": 4.5, "rcut_smth": 0.5, "neuron": [12, 24, 48], "tebd_dim": 8,
                   "tebd_input_mode": "strip", "axis_neuron": 8, "attn_layer": 0, "type_one_side": True},
    "fitting_net": {"neuron": [60, 60, 60], "resnet_dt": True},
}  # fmt: skip
START_LR = 0.002
NUM_VALIDATIONS = 12
AVERAGES_PER_RUN = 30  # lengths of the average, 1 / (1 - decay) steps, in a run
ALONE, TWICE = "alone", "alone, twice the steps"
OWN, SHARED = "together, own fitting nets", "together, shared fitting net"
COLORS = {ALONE: "#000000", TWICE: "#999999", OWN: "#0072B2", SHARED: "#D55E00"}
QUANTITIES = ("energy", "force")
WEIGHTS = ("live", "averaged")
GRADIENT_BATCHES = 20  # of each task


@dataclass
class Errors:
    """Errors of one task.

    Attributes:
        steps: where they were measured, in steps of the task, by what was trained.
        along: one list of errors for each seed, by what was trained, weights and quantity.
        drawn: number of steps of the task in each run of two tasks.
    """

    steps: dict[str, list[float]]
    along: dict[tuple[str, str, str], list[list[float]]]
    drawn: list[int]


def main() -> None:
    """Train, and print the page."""
    args = _arguments()
    program, env = common.programs(None)["ours"], common.environment(args.threads, args.device)
    found = {task: Errors({}, {}, []) for task in TASKS}
    for seed in args.seeds:
        for what in COLORS:
            for folder, config in _runs(what, seed, args).items():
                train_once(program, env, folder, config)
                _read(found, what, folder, config)
    common.publish(_page(found, args), args.output)
    if args.plot is not None:
        panels = [[_panel(errors, task, quantity) for quantity in QUANTITIES] for task, errors in found.items()]
        draw(panels, COLORS, "steps of the task", args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=3000, help="steps of a task")
    parser.add_argument("--precision", default="float32", choices=("float32", "float64"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the errors along the run here")
    args = parser.parse_args()
    if args.steps < 2 * AVERAGES_PER_RUN:
        parser.error(f"--steps {args.steps}: at least {2 * AVERAGES_PER_RUN}")
    return args


def _runs(what: str, seed: int, args: argparse.Namespace) -> dict[Path, dict]:
    """Return the inputs of what is trained, by their folders."""
    num_steps = args.steps if what == ALONE else 2 * args.steps
    alone = {task: _input(task, seed, num_steps, args.precision) for task in TASKS}
    stem = f"{what}-{seed}".replace(", ", "_").replace(" ", "_")
    base = args.work / "multi_task"
    if what in (ALONE, TWICE):
        return {base / f"{task}-{stem}": config for task, config in alone.items()}
    return {base / stem: _joined(alone, share_fitting=what == SHARED)}


def _input(task: str, seed: int, num_steps: int, precision: str) -> dict:
    """Return the input of an example with the model and the schedules of this benchmark."""
    config = common.read_input(common.ROOT / "examples" / task / "input.json", None)
    config["model"] = {key: dict(part) if isinstance(part, dict) else part for key, part in MODEL.items()}
    every = max(1, num_steps // NUM_VALIDATIONS)
    config["training"] |= {"numb_steps": num_steps, "save_freq": num_steps, "disp_freq": every}
    config["training"]["ema_decay"] = 1 - AVERAGES_PER_RUN / num_steps
    config["learning_rate"] |= {"start_lr": START_LR, "decay_steps": max(1, num_steps // 40)}
    config["validating"] |= {"validation_freq": every, "save_best": False}
    return common.with_seed(common.with_precision(config, precision), seed)


def _joined(alone: dict[str, dict], share_fitting: bool) -> dict:
    """Return one input of several tasks out of those of one."""
    first = next(iter(alone.values()))
    parts = dict(first["model"])
    own = {} if share_fitting else {"fitting_net": parts.pop("fitting_net")}
    if share_fitting:
        parts["fitting_net"] = {**parts["fitting_net"], "dim_case_embd": len(alone)}
    data_keys = ("training_data", "validation_data")
    training = {key: value for key, value in first["training"].items() if key not in data_keys}
    data = {task: {key: config["training"][key] for key in data_keys} for task, config in alone.items()}
    model = {**own, **{part: part for part in parts}}  # a shared part has the name of its place
    return {
        "model": {"shared_dict": parts, "model_dict": dict.fromkeys(alone, model)},
        "learning_rate": first["learning_rate"],
        "loss_dict": {task: config["loss"] for task, config in alone.items()},
        "training": {**training, "data_dict": data, "model_prob": {task: 1 / len(alone) for task in alone}},
        "validating": first["validating"],
    }


def _read(found: dict[str, Errors], what: str, folder: Path, config: dict) -> None:
    """Add the errors of a run to those of its tasks."""
    together = what in (OWN, SHARED)
    drawn = load(folder / TRAINED)["streams"] if together else {}
    for task, errors in found.items():
        if together or folder.name.startswith(task):
            steps, along = errors_along(folder, task if together else "")
            errors.steps[what] = [step / len(TASKS) if together else step for step in steps]
            for quantity in QUANTITIES:
                for weights in WEIGHTS:
                    errors.along.setdefault((what, weights, quantity), []).append(along[weights, quantity])
            if together:
                errors.drawn.append(drawn[task]["frames"])


def _page(found: dict[str, Errors], args: argparse.Namespace) -> str:
    drawn = [number for errors in found.values() for number in errors.drawn]
    parts = [
        f"# Two levels of theory in one run, {common.today()}",
        f"DPA-1 without attention, {args.precision}, elements {' '.join(MODEL['type_map'])}, the same in all runs. "
        f"Alone: {args.steps} steps of each task, and {2 * args.steps}. Together: {2 * args.steps} steps, of which "
        f"each task gets half by chance ({min(drawn)} to {max(drawn)}). Learning rate {START_LR:g} to 0.0001; the "
        f"average has a length of a {AVERAGES_PER_RUN}th of the run. RMSE on all validation frames of the task after "
        f"the last step: median over the seeds {', '.join(map(str, args.seeds))} and, in brackets, each. `ratio` is "
        "the median of the ratios to the run of the same seed alone, same steps of the task, same weights; in "
        "brackets each.  \n"
        f"On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]
    for task, errors in found.items():
        for quantity in QUANTITIES:
            parts += [f"## {TASKS[task]}: {quantity}, {UNITS[quantity]}", _table(errors, quantity)]
    parts += [
        "## Gradients in what is shared",
        f"Seed {args.seeds[0]}, {GRADIENT_BATCHES} batches of each task: the median norm of the gradient of the loss "
        "of water over that of molecules, and the cosine between the two mean gradients. Adam divides by the size of "
        "past gradients of both: the one that is larger decides how long a step is.",
        common.table(["trained", "weights", "part", "norm, water over molecules", "cosine"], _gradient_rows(args)),
    ]
    return "\n\n".join(parts)


def _table(errors: Errors, quantity: str) -> str:
    header = ["trained"] + [column for weights in WEIGHTS for column in (weights, "ratio")]
    rows = []
    for what in COLORS:
        cells = [what]
        for weights in WEIGHTS:
            last = [run[-1] for run in errors.along[what, weights, quantity]]
            base = [run[-1] for run in errors.along[ALONE, weights, quantity]]
            ratios = [value / alone for value, alone in zip(last, base)]
            each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            cells += [median_and_each(last), "1" if what == ALONE else f"{statistics.median(ratios):.3f} ({each})"]
        rows.append(cells)
    return common.table(header, rows)


def _gradient_rows(args: argparse.Namespace) -> list[list[str]]:
    rows = []
    for what, parts in ((OWN, ("descriptor",)), (SHARED, ("descriptor", "fitting"))):
        (folder,) = _runs(what, args.seeds[0], args)
        for when, start in (("first", None), ("last", str(folder / TRAINED))):
            found = _gradients(folder / "input.json", start, parts)
            for part, (one, other) in found.items():
                ratio = one.norm(dim=1).median() / other.norm(dim=1).median()
                a, b = one.mean(0), other.mean(0)
                rows.append([what, when, part, f"{ratio:.2g}", f"{a @ b / a.norm() / b.norm():.2f}"])
    return rows


def _gradients(input_file: Path, start: str | None, parts: tuple[str, ...]) -> dict[str, list]:
    """Return the gradients of each task, (batches, parameters), by the part of its model.

    Args:
        input_file: of a run of the two tasks.
        start: checkpoint at its end; None for the weights and the prefactors that it starts with.
        parts: that the tasks share.
    """
    import torch

    from deepmd_ema.config import load_config
    from deepmd_ema.dist.world import World
    from deepmd_ema.optim.schedule import build_schedule
    from deepmd_ema.train.assembly.assemble import assemble
    from deepmd_ema.train.start.new_run import Start
    from deepmd_ema.train.start.prepare import prepare
    from deepmd_ema.train.start.start_file import load_weights

    weights = Start() if start is None else load_weights(start)
    world, found = World(), {part: [] for part in parts}
    config = weights.adopt_from_checkpoint(load_config(input_file))
    steps = config.training.numb_steps
    rate = build_schedule(config.learning_rate, steps)(1 if start is None else steps)
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        prepared = prepare(config, weights, world, skip_neighbor_stat=True)
        trainer = assemble(prepared, weights, world)
        for task in trainer.tasks:
            model, gradients = prepared.models.by_task[task.name], {part: [] for part in parts}
            for _ in range(GRADIENT_BATCHES):
                batch = next(task.train_loader)
                prepared.models.zero_grad()
                prediction = task.models(task.name, batch, **task.loss.needs(batch))
                task.loss(prediction, batch, rate)[0].backward()
                for part, rows in gradients.items():
                    own = [p.grad.flatten() for p in getattr(model, part).parameters() if p.grad is not None]
                    rows.append(torch.cat(own))
            for part, rows in gradients.items():
                found[part].append(torch.stack(rows))
        trainer.tasks.close()
        os.chdir(here)
    return found


def _panel(errors: Errors, task: str, quantity: str) -> Panel:
    lines = {(what, weights): errors.along[what, weights, quantity] for what in COLORS for weights in WEIGHTS}
    return Panel(TASKS[task], f"{quantity} RMSE, {UNITS[quantity]}", lines, errors.steps)


if __name__ == "__main__":
    main()
