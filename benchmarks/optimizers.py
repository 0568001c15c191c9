"""Errors along training with Adam and with the Muon optimizers: the same model, loss, frames and shape of the rate.

usage: python benchmarks/optimizers.py [--sets water] [--seeds 1 2 3] [--steps 2000] [--plot PNG] [--output PAGE]

The models of the examples in float32, one constant weight of energies and one of forces, the rate goes up over the
first 20 steps, stays, and goes down to a hundredth over the second half. Rates were chosen with seed 11 in runs of 100
to 500 steps of water. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import common
from error_curves import UNITS, Panel, draw, errors_along, median_and_each, train_once

RECIPES: dict[str, tuple[dict[str, Any], float]] = {
    "Adam, 1e-3": ({"type": "Adam"}, 1e-3),
    "Adam, 4e-3": ({"type": "Adam"}, 4e-3),
    "HybridMuon, as set by default, 1e-3": ({"type": "HybridMuon"}, 1e-3),
    "HybridMuon, lr_adjust 30, 0.03": ({"type": "HybridMuon", "weight_decay": 0.0, "lr_adjust": 30.0}, 0.03),
    "HybridMuon, lr_adjust 100, 0.1": ({"type": "HybridMuon", "weight_decay": 0.0, "lr_adjust": 100.0}, 0.1),
}
COLORS = dict(zip(RECIPES, ("#0072B2", "#56B4E9", "#999999", "#D55E00", "#009E73")))
WEIGHTS = {"water": (1, 500), "molecules": (100, 100)}  # of energies and forces
WARMUP, STOP = 20, 0.01
EMA_DECAY = 0.98
NUM_VALIDATIONS = 20
QUANTITIES = ("energy", "force")


def main() -> None:
    """Train, and print the page."""
    args = _arguments()
    program, env = common.programs(None)["ours"], common.environment(args.threads, args.device)
    along: dict[str, dict[str, list[Any]]] = {name: {} for name in args.sets}
    for seed, name, recipe in itertools.product(args.seeds, args.sets, args.recipes):
        words = recipe.replace(", ", "-").replace(" ", "_")
        folder = args.work / "optimizers" / f"{name}-{words}-{args.steps}-{seed}"
        train_once(program, env, folder, _input(name, recipe, seed, args.steps))
        along[name].setdefault(recipe, []).append(errors_along(folder))
    common.publish(_page(along, args), args.output)
    if args.plot is not None:
        draw(
            [[_panel(name, found, q) for q in QUANTITIES] for name, found in along.items()], COLORS, "steps", args.plot
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the errors along the runs here")
    return parser.parse_args()


def _input(name: str, recipe: str, seed: int, num_steps: int) -> dict[str, Any]:
    config = common.with_numeric_sel(common.read_input(common.ROOT / "examples" / name / "input.json", None))
    config = common.with_seed(common.with_precision(config, "float32"), seed)
    optimizer, rate = RECIPES[recipe]
    energy, force = WEIGHTS[name]
    config["optimizer"] = optimizer
    config["learning_rate"] = {"type": "wsd", "start_lr": rate, "stop_lr": STOP * rate, "warmup_steps": WARMUP,
                               "decay_type": "linear", "decay_phase_ratio": 0.5}  # fmt: skip
    config["loss"] = {"type": "ener", "start_pref_e": energy, "limit_pref_e": energy, "start_pref_f": force,
                      "limit_pref_f": force}  # fmt: skip
    often = max(1, num_steps // NUM_VALIDATIONS)
    config["training"] |= {"numb_steps": num_steps, "save_freq": num_steps, "disp_freq": often, "ema_decay": EMA_DECAY}
    config["validating"] |= {"validation_freq": often, "save_best": False}
    return config


def _page(along: dict[str, dict[str, list[Any]]], args: argparse.Namespace) -> str:
    parts = [
        f"# Optimizers, {common.today()}",
        f"RMSE on the validation frames of the examples after {args.steps} steps, median over the seeds and each. The "
        f"models of the examples in float32; weights of energies and forces in the loss {WEIGHTS}, constant; the rate "
        f"that is named after {WARMUP} steps, down to a hundredth of it over the last half (wsd, linear); averages of "
        "decay "
        f"{EMA_DECAY}. On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]
    for name, found in along.items():
        rows = []
        for recipe, runs in found.items():
            cells = [
                median_and_each([run[weights, quantity][-1] for _, run in runs])
                for quantity, weights in itertools.product(QUANTITIES, ("live", "averaged"))
            ]
            rows.append([recipe, *cells, _steps_to(found, recipe)])
        words = [f"{q}, {w}, {UNITS[q]}" for q, w in itertools.product(QUANTITIES, ("live", "averaged"))]
        header = ["optimizer and rate", *words, "steps to the last force error of the first row"]
        parts += [f"## {name}", common.table(header, rows)]
    return "\n\n".join(parts)


def _steps_to(found: dict[str, list[Any]], recipe: str) -> str:
    """Return at which validation the averaged force error is first that of the first recipe at its end, per seed."""
    words = []
    for (_, first), (steps, run) in zip(next(iter(found.values())), found[recipe]):
        wanted = first["averaged", "force"][-1]
        reached = [step for step, error in zip(steps, run["averaged", "force"]) if error <= wanted]
        words.append(f"{reached[0]}" if reached else "never")
    return ", ".join(words)


def _panel(name: str, found: dict[str, list[Any]], quantity: str) -> Panel:
    lines = {(recipe, w): [run[w, quantity] for _, run in runs] for recipe, runs in found.items()
             for w in ("live", "averaged")}  # fmt: skip
    steps = {recipe: runs[0][0] for recipe, runs in found.items()}
    return Panel(name, f"{quantity} RMSE, {UNITS[quantity]}", lines, steps)


if __name__ == "__main__":
    main()
