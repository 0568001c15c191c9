"""What interpolating embedding nets does to a trained model: errors by number of terms, and curves of training.

usage: python benchmarks/splines.py [--seeds 1 2 3] [--steps 1000] [--plot PNG] [--output PAGE]

The water example is trained with `embedding_eval` = direct and = spline from the same seeds, and a model of every other
descriptor that has the option with = spline. Then energies, forces, virials and the gradient by the parameters of each
trained model are compared, on validation frames, with those of direct evaluation, for 24 to 96 terms. What is
finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import common
from error_curves import TRAINED, UNITS, Panel, draw, errors_along, median_and_each, train_once

EVALUATIONS = ("direct", "spline")
TERMS = (24, 32, 40, 48, 64, 96)
QUANTITIES = ("energy", "force")
WEIGHTS = ("live", "averaged")
COLORS = {"direct": "#D55E00", "spline": "#0072B2"}
NUM_VALIDATIONS = 10
ATTEN = {"type": "se_atten", "sel": 120, "rcut": 6.0, "rcut_smth": 0.5, "neuron": [25, 50, 100], "axis_neuron": 16,
         "attn_layer": 0}  # fmt: skip
OTHERS = {
    "se_e2_r": {"type": "se_e2_r", "sel": [46, 92], "rcut": 6.0, "rcut_smth": 0.5, "neuron": [25, 50, 100]},
    "se_atten, concat": ATTEN,
    "se_atten, strip": ATTEN | {"tebd_input_mode": "strip", "smooth_type_embedding": True},
}


def main() -> None:
    """Train, compare, and print the page."""
    args = _arguments()
    program, env = common.programs(None)["ours"], common.environment(args.threads, args.device)
    base = args.work / "splines" / args.precision
    runs: dict[str, list[Path]] = {}
    for evaluation, seed in itertools.product(EVALUATIONS, args.seeds):
        folder = base / f"{evaluation}-{seed}"
        train_once(program, env, folder, _input({}, evaluation, seed, args.steps, args.precision))
        runs.setdefault(evaluation, []).append(folder)
    trained = {"se_e2_a": runs["spline"][0]}
    for kind, descriptor in OTHERS.items():
        trained[kind] = base / kind.replace(", ", "-")
        train_once(program, env, trained[kind], _input(descriptor, "spline", 1, args.steps // 2, args.precision))
    errors = {kind: errors_by_terms(folder / TRAINED, args) for kind, folder in trained.items()}
    along = {name: [errors_along(folder) for folder in folders] for name, folders in runs.items()}
    common.publish(_page(errors, along, args), args.output)
    if args.plot is not None:
        steps = dict.fromkeys(EVALUATIONS, along["direct"][0][0])
        draw([[_panel(along, quantity, steps) for quantity in QUANTITIES]], COLORS, "steps", args.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--precision", default="float64", choices=("float32", "float64"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", type=Path, default=common.RUNS, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the errors along the runs here")
    return parser.parse_args()


def _input(descriptor: dict, evaluation: str, seed: int, num_steps: int, precision: str) -> dict:
    """Return the input of the water example, with another descriptor if one is given."""
    config = common.read_input(common.EXAMPLE / "input.json", None)
    config = common.with_numeric_sel(config)
    config["model"]["descriptor"] = (descriptor or config["model"]["descriptor"]) | {"interpolate": evaluation}
    config["training"] |= {"numb_steps": num_steps, "save_freq": num_steps, "disp_freq": max(1, num_steps // 10)}
    config["learning_rate"]["decay_steps"] = max(1, num_steps // 20)
    config["validating"] |= {"validation_freq": max(1, num_steps // NUM_VALIDATIONS), "save_best": False}
    return common.with_seed(common.with_precision(config, precision), seed)


def errors_by_terms(path: Path, args: argparse.Namespace) -> dict:
    """Return the terms that the run ended with, and by terms the differences from direct evaluation."""
    import torch

    from deepmd_ema.data.collate import collate
    from deepmd_ema.infer.load import load_model
    from deepmd_ema.model.interpolation import interpolations_of

    torch.set_num_threads(args.threads)
    model, _ = load_model(path).on(args.device)
    model.train()
    batch = collate(_frames(4), model.layout)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def evaluated(terms: int) -> dict:
        for spline in interpolations_of(model).values():
            spline.use(terms)
            spline.max_error = 1e9  # also a series that a run would extend
        out = model(batch)
        loss = out["energy"].square().mean() + 1000 * out["force"].square().mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        found = {name: out[name].detach() for name in ("energy", "force", "virial")}
        return found | {"gradient": torch.cat([g.flatten() for g in gradients])}

    exact = evaluated(0)
    rows = {}
    for terms in TERMS:
        found = evaluated(terms)
        rows[terms] = {name: float((found[name] - value).abs().max() / value.abs().max())
                           for name, value in exact.items()}  # fmt: skip
    chosen = torch.load(path, weights_only=True)["interpolation"]["terms"]
    return {"chosen": list(chosen.values()), "rows": rows}


def _frames(count: int) -> list:
    import numpy as np

    from deepmd_ema.data.source import Frame

    system = common.EXAMPLE / "data" / "validation"
    types = np.loadtxt(system / "type.raw", dtype=np.int64)
    coords, boxes = (np.load(system / "set.000" / f"{name}.npy") for name in ("coord", "box"))
    return [Frame(coords[k].reshape(-1, 3), types, boxes[k].reshape(3, 3)) for k in range(count)]


def _page(errors: dict, along: dict, args: argparse.Namespace) -> str:
    parts = [
        f"# Interpolated embedding nets: errors, {common.today()}",
        f"Models of the water example after training ({args.steps} steps for se_e2_a, half of it for the others), "
        f"{args.precision}, nets of 25, 50 and 100 neurons. Largest difference from direct evaluation over the largest "
        "value, on 4 frames of 96 atoms. In bold the number of terms with which the run ended.",
        common.table(["", "terms", "energy", "force", "virial", "gradient by the parameters"],
                     list(_error_rows(errors))),
        "## Training",
        f"RMSE on the validation frames after {args.steps} steps, median over seeds {args.seeds} and each of them.",
        common.table(["weights", "quantity", *EVALUATIONS], list(_end_rows(along))),
        f"On {common.machine(common.programs(None), args.threads, args.device)}.",
    ]  # fmt: skip
    return "\n\n".join(parts)


def _error_rows(errors: dict) -> Iterator[list[str]]:
    for kind, found in errors.items():
        for terms, row in found["rows"].items():
            shown = f"**{terms}**" if terms in found["chosen"] else str(terms)
            values = [f"{row[name]:.1e}" for name in ("energy", "force", "virial", "gradient")]
            yield [kind, shown, *values]


def _end_rows(along: dict) -> Iterator[list[str]]:
    for weights, quantity in itertools.product(WEIGHTS, QUANTITIES):
        cells = [median_and_each([run[weights, quantity][-1] for _, run in along[name]]) for name in EVALUATIONS]
        yield [weights, f"{quantity}, {UNITS[quantity]}", *cells]


def _panel(along: dict, quantity: str, steps: dict) -> Panel:
    lines = {(name, weights): [run[weights, quantity] for _, run in along[name]]
             for name in EVALUATIONS for weights in WEIGHTS}  # fmt: skip
    return Panel("", f"{quantity} RMSE, {UNITS[quantity]}", lines, steps)


if __name__ == "__main__":
    main()
