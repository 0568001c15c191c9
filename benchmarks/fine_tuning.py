"""What pretraining on water is worth for small molecules: errors by steps, fine-tuned and from the beginning.

usage: python benchmarks/fine_tuning.py [--seeds 1 2 3] [--steps 600] [--plot PNG] [--output PAGE]

A small DPA-1 model of O and H is trained on examples/water (GFN1-xTB, periodic). Then the input of examples/molecules
(C, H, N and O in vacuum, GFN2-xTB) is trained with the same descriptor and fitting net, once from new weights and once
with --finetune from that model, which gets the two new elements and energies per element from the molecules. Live and
averaged weights are validated on all validation frames on the way. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path

import common
from error_curves import TRAINED, UNITS, Panel, draw, errors_along, median_and_range, train_once

MODEL = {
    "descriptor": {"type": "se_atten", "sel": 60, "rcut": 4.5, "rcut_smth": 0.5, "neuron": [12, 24, 48], "tebd_dim": 8,
                   "axis_neuron": 8, "attn_layer": 0, "type_one_side": True},
    "fitting_net": {"neuron": [60, 60, 60], "resnet_dt": True},
}  # fmt: skip
NUM_VALIDATIONS = 10
STARTS = {"new weights": [], "fine-tuned": ["--finetune", f"../pretrained/{TRAINED}"]}
QUANTITIES = ("energy", "force")
WEIGHTS = ("live", "averaged")
COLORS = {"new weights": "#D55E00", "fine-tuned": "#0072B2"}

# by start, weights and quantity: one list of errors along the run for each seed
Errors = dict[tuple[str, str, str], list[list[float]]]


def main() -> None:
    """Train on water, then on the molecules, and print the table."""
    args = _arguments()
    program, env = common.programs(None)["ours"], common.environment(args.threads, args.device)
    base = args.work / "fine_tuning"
    water = _input("water", 1, args.pretraining_steps, args.precision)
    train_once(program, env, base / "pretrained", water)
    steps: list[int] = []
    errors: Errors = {}
    for seed in args.seeds:
        config = _input("molecules", seed, args.steps, args.precision)
        for start, options in STARTS.items():
            folder = base / f"{start}-{seed}".replace(" ", "_")
            train_once(program, env, folder, config, options)
            steps, along = errors_along(folder)
            for weights, quantity in itertools.product(WEIGHTS, QUANTITIES):
                errors.setdefault((start, weights, quantity), []).append(along[weights, quantity])
    common.publish(_page(steps, errors, base, args), args.output)
    if args.plot is not None:
        draw(
            [[_panel(steps, errors, quantity) for quantity in QUANTITIES]], COLORS, "steps on the molecules", args.plot
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=600, help="steps on the molecules")
    parser.add_argument("--pretraining-steps", type=int, default=1500, help="steps on water")
    parser.add_argument("--precision", default="float32", choices=("float32", "float64"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the errors along the run here")
    return parser.parse_args()


def _input(example: str, seed: int, num_steps: int, precision: str) -> dict:
    """Return the input of an example with the model of this benchmark, validated a few times on the way."""
    config = common.read_input(common.ROOT / "examples" / example / "input.json", None)
    config["model"] |= MODEL
    config["training"] |= {"numb_steps": num_steps, "save_freq": num_steps, "disp_freq": max(1, num_steps // 10)}
    config["learning_rate"]["decay_steps"] = max(1, num_steps // 20)
    config["validating"] |= {"validation_freq": max(1, num_steps // NUM_VALIDATIONS), "save_best": False}
    return common.with_seed(common.with_precision(config, precision), seed)


def _page(steps: list[int], errors: Errors, base: Path, args: argparse.Namespace) -> str:
    _, along = errors_along(base / "pretrained")
    water = {quantity: along["live", quantity][-1] for quantity in QUANTITIES}
    header = ["steps"] + [f"{start}, {weights}" for start in STARTS for weights in WEIGHTS]
    parts = [
        f"# Fine-tuning a model of water to molecules, {common.today()}",
        f"DPA-1 without attention, {args.precision}; pretrained for {args.pretraining_steps} steps on examples/water "
        f"(at its end {water['energy']:.1f} meV/atom and {water['force']:.0f} meV/angstrom), then {args.steps} steps "
        "of examples/molecules with the learning rate of its input, from new weights and with `--finetune`. RMSE on "
        f"all validation frames: median over the seeds {', '.join(map(str, args.seeds))}, least and most in "
        "brackets.  \n"
        f"On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]
    for quantity in QUANTITIES:
        rows = [
            [str(step)] + [median_and_range([run[row] for run in errors[start, weights, quantity]])
                           for start in STARTS for weights in WEIGHTS]
            for row, step in enumerate(steps)
        ]  # fmt: skip
        parts += [f"## {quantity.capitalize()}, {UNITS[quantity]}", common.table(header, rows)]
    parts += [_steps_saved(steps, errors, quantity) for quantity in QUANTITIES]
    return "\n\n".join(parts)


def _steps_saved(steps: list[int], errors: Errors, quantity: str) -> str:
    """Return after how many steps the fine-tuned weights are as good as new ones at the end, by medians."""
    medians = {start: [statistics.median(row) for row in zip(*errors[start, "live", quantity])] for start in STARTS}
    last = medians["new weights"][-1]
    reached = next((step for step, value in zip(steps, medians["fine-tuned"]) if value <= last), None)
    when = f"after {reached} steps" if reached is not None else "not at all"
    return f"The {quantity} error of new weights after {steps[-1]} steps, {last:.4g}, is reached by fine-tuning {when}."


def _panel(steps: list[int], errors: Errors, quantity: str) -> Panel:
    lines = {(start, weights): errors[start, weights, quantity] for start in STARTS for weights in WEIGHTS}
    return Panel("", f"{quantity} RMSE, {UNITS[quantity]}", lines, dict.fromkeys(STARTS, steps))


if __name__ == "__main__":
    main()
