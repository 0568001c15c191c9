"""Errors and seconds of optimizers with their learning rate schedules after trainings of several
lengths.

usage: python benchmarks/optimizers.py [--sets water molecules ...] [--sources DIR] [--recipes FILE]
                                       [--output PAGE]

A recipe is an optimizer with a schedule. Small models in float32 with constant prefactors of the
loss are trained on the sets below; frames that are not trained on are in two halves. Runs of
TUNING_STEPS steps with a seed that is not measured choose by the first half which rate a recipe has
on a set, and which weights are taken of it: live ones or an average. Errors are those of these
weights on the other half. A recipe without a planned end is one run for all lengths, whose seconds
are divided in proportion to the steps; the others have a run for each. FILE adds recipes: a JSON
object like RECIPES, by names. What is finished in --work is not done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np

BUDGETS = (500, 1000, 2000)
TUNING_SEED, TUNING_STEPS = 11, 400
AVERAGES = [
    {"name": "p05", "type": "power", "sigma_rel": 0.05},
    {"name": "p10", "type": "power", "sigma_rel": 0.1},
]
POINT = [{"name": "schedule_free", "type": "schedule_free"}]
HALF = {
    "type": "wsd",
    "decay_type": "linear",
    "decay_phase_ratio": 0.5,
    "stop_lr_ratio": 0.01,
}
CONSTANT = {"type": "wsd", "decay_type": "linear", "stop_lr_ratio": 1.0}
ADAM, MUON = (
    {"type": "Adam"},
    {"type": "HybridMuon", "weight_decay": 0, "lr_adjust": 30},
)
FREE = {"type": "AdamWScheduleFree", "weight_decay": 0}
RATES = [0.003, 0.01, 0.03]
RECIPES: dict[str, dict[str, Any]] = {
    "Adam, wsd": {"optimizer": ADAM, "learning_rate": HALF, "rates": RATES},
    "Adam, cosine": {
        "optimizer": ADAM,
        "learning_rate": {"type": "cosine", "stop_lr_ratio": 0.01},
        "rates": RATES,
    },
    "Adam, exp": {
        "optimizer": ADAM,
        "learning_rate": {
            "type": "exp",
            "stop_lr_ratio": 0.1,
            "decay_steps": 1,
            "smooth": True,
        },
        "rates": RATES,
    },
    "SOAP, wsd": {
        "optimizer": {"type": "SOAP", "weight_decay": 0},
        "learning_rate": HALF,
        "rates": [0.01, 0.03, 0.1],
    },
    "HybridMuon, wsd": {
        "optimizer": MUON,
        "learning_rate": HALF,
        "rates": [0.05, 0.1, 0.2],
    },
    "Adam, constant": {
        "optimizer": ADAM,
        "learning_rate": CONSTANT,
        "rates": RATES,
        "without_end": True,
    },
    "Adam, invsqrt": {
        "optimizer": ADAM,
        "learning_rate": {"type": "invsqrt", "a": 1000},
        "rates": RATES,
        "without_end": True,
    },
    "AdamWScheduleFree": {
        "optimizer": FREE,
        "learning_rate": CONSTANT,
        "rates": RATES,
        "without_end": True,
        "averaging": POINT,
    },
    "AdamWScheduleFree, r 4": {
        "optimizer": {**FREE, "adam_beta1": 0.98, "r": 4},
        "learning_rate": CONSTANT,
        "rates": RATES,
        "without_end": True,
        "averaging": POINT,
    },
}
SMALL = {
    "rcut": 4.5,
    "rcut_smth": 0.5,
    "neuron": [8, 16, 32],
    "axis_neuron": 8,
    "precision": "float32",
    "sel": "auto",
}
# the constant prefactors are those that the ramp of an example has in the middle of a decay by ten
MIDDLE = math.sqrt(0.1)
WARMUP = {"warmup_steps": 20}
QUANTITIES = ("energy, meV/atom", "force, meV/angstrom")
COPPER = (4, 10, 16, 22, 28)  # atoms of 32


class Data(NamedTuple):
    """One set: the example whose loss it has, its elements, frames per batch, and a function that
    writes it.

    ``write`` gets the folder of the clones of race_sets.py and the folder in which it makes
    ``train``, ``choose`` and ``test``, each with systems.
    """

    example: str
    elements: list[str]
    batch_size: int
    write: Callable[[Path, Path], None]


class Measured(NamedTuple):
    """Seconds of the processor, and the errors of the chosen weights in the order of QUANTITIES."""

    seconds: float
    errors: Sequence[float]


def main() -> None:
    """Train what is missing, and print the page."""
    args = _arguments()
    import torch

    torch.set_num_threads(1)
    logging.getLogger("deepmd_ema").addHandler(logging.NullHandler())
    parts = [
        f"# Optimizers and schedules, {common.today()}",
        f"Models of {SMALL['neuron']}, rcut {SMALL['rcut']}, float32. Rates and weights chosen in "
        f"runs of {args.tuning} steps with seed {TUNING_SEED}, by other frames. Median over the "
        "seeds (each); the lowest median of a length is bold. Seconds are those of the processor, "
        "of the whole run with its start.  \n"
        f"On {common.machine(common.programs(None), 1, 'cpu')}.",
    ]
    for name in args.sets:
        folder = args.work / "data" / name
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            SETS[name].write(args.sources, part)
            part.rename(folder)
        parts += _part_of_set(name, args)
        common.publish("\n\n".join(parts), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sources",
        type=Path,
        help="folder with the clones of race_sets.py, for acac and alloys",
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=["water", "molecules", "nicu"]
    )
    parser.add_argument(
        "--recipes", type=Path, metavar="FILE", help="JSON file with more recipes"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="RECIPE",
        help="names of the recipes that are measured",
    )
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=int,
        default=BUDGETS,
        help="steps, multiples of the first",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--work",
        type=Path,
        default=common.RUNS / "optimizers",
        help="folder of the runs",
    )
    parser.add_argument("--output", type=Path, help="also write the page here")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one set, seed and rate, 30 and 60 steps: tries the program",
    )
    args = parser.parse_args()
    recipes = RECIPES | (json.loads(args.recipes.read_text()) if args.recipes else {})
    if unknown := set(args.only or ()) - recipes.keys():
        parser.error(
            f"--only: {'; '.join(sorted(unknown))} unknown. Known: {'; '.join(recipes)}."
        )
    args.recipes = {
        name: recipe
        for name, recipe in recipes.items()
        if name in (args.only or recipes)
    }
    args.tuning = TUNING_STEPS
    if args.quick:
        args.sets, args.seeds, args.budgets, args.tuning = (
            args.sets[:1],
            [1],
            [30, 60],
            30,
        )
        args.recipes = {
            name: recipe | {"rates": recipe["rates"][:1]}
            for name, recipe in args.recipes.items()
        }
    if any(budget % args.budgets[0] for budget in args.budgets):
        parser.error("--budgets: expected multiples of the first.")
    if args.sources is None and {"acac", "alloys"} & set(args.sets):
        parser.error("--sources: needed for the sets acac and alloys.")
    args.work, args.output = args.work.resolve(), args.output and args.output.resolve()
    return args


def _part_of_set(name: str, args: argparse.Namespace) -> list[str]:
    """Return the part of the page of one set."""
    tuning, measured = [], {}
    for title, recipe in args.recipes.items():
        errors = {}
        for rate in recipe["rates"]:
            found = _result(
                name, title, recipe, rate, TUNING_SEED, args.tuning, args, "choose"
            )
            errors |= {
                (rate, weights): rows[-1][1:]
                for weights, rows in found["errors"].items()
            }
        rate, weights = min(
            errors,
            key=lambda key: (
                math.prod(errors[key]) if all(np.isfinite(errors[key])) else math.inf
            ),
        )
        best = {
            rate: min((errors[key] for key in errors if key[0] == rate), key=math.prod)
            for rate in recipe["rates"]
        }
        tuning.append(
            [
                title,
                *(f"{r:g}: {e:.3g} / {f:.4g}" for r, (e, f) in best.items()),
                f"{rate:g}, {weights}",
            ]
        )
        measured[title] = _measure(
            name, title, recipe | {"rate": rate, "weights": weights}, args
        )
    width = max(map(len, tuning))
    tuning = [[*row[:-1], *[""] * (width - len(row)), row[-1]] for row in tuning]
    lowest = {
        (b, k): min(_median(of[b], k) for of in measured.values())
        for b in args.budgets
        for k in range(2)
    }
    rows = [
        [
            title,
            f"{budget:,}",
            f"{statistics.median(one.seconds for one in of[budget]):.0f}",
            *(_cell(of[budget], k, lowest[budget, k]) for k in range(2)),
        ]
        for title, of in measured.items()
        for budget in args.budgets
    ]
    first = next(iter(measured))
    header = [
        "recipe",
        *(
            f"{quantity.split(',')[0]}: {unit}"
            for quantity in QUANTITIES
            for unit in ("steps", "s")
        ),
    ]
    return [
        f"## {name}",
        "Choice of the rate, energy meV/atom / force meV/angstrom of the best weights:",
        common.table(["recipe", *[""] * (width - 2), "chosen"], tuning),
        common.table(["recipe", "steps", "s", *QUANTITIES], rows),
        f"Steps and seconds to the errors of the longest run of {first}, between lengths on a "
        "line of the logarithms:",
        common.table(
            header,
            [
                [title, *_to_targets(of, measured[first])]
                for title, of in measured.items()
            ],
        ),
    ]


def _measure(
    name: str, title: str, recipe: dict[str, Any], args: argparse.Namespace
) -> dict[int, list[Measured]]:
    """Return seconds and errors of a recipe with its chosen rate, by length, one entry for each
    seed.
    """
    found: dict[int, list[Measured]] = {budget: [] for budget in args.budgets}
    for seed in args.seeds:
        for steps in args.budgets[-1:] if recipe.get("without_end") else args.budgets:
            result = _result(
                name, title, recipe, recipe["rate"], seed, steps, args, "test"
            )
            for step, *errors in result["errors"][recipe["weights"]]:
                if step == steps or (recipe.get("without_end") and step in found):
                    found[step].append(Measured(result["cpu_s"] * step / steps, errors))
    return found


def _result(
    name: str,
    title: str,
    recipe: dict[str, Any],
    rate: float,
    seed: int,
    steps: int,
    args: argparse.Namespace,
    part: str,
) -> dict[str, Any]:
    """Return the config, seconds and errors of a run, which is made if it is not there.

    Errors are rows of step, energy and force for ``live`` and each average, on one ``part`` of the
    set.
    """
    config = _make_input(name, recipe, rate, seed, args.work / "data" / name, part)
    freq = args.budgets[0] if recipe.get("without_end") and part == "test" else steps
    config["training"] |= {"numb_steps": steps, "save_freq": steps, "disp_freq": steps}
    config["validating"] = {
        "full_validation": True,
        "validation_freq": freq,
        "full_val_start": 0.0,
        "max_best_ckpt": 1,
    }
    folder = (
        args.work
        / name
        / f"{title}-{rate:g}-{seed}-{steps}".replace(", ", "-").replace(" ", "_")
    )
    done = folder / "done.json"
    if done.exists() and (found := json.loads(done.read_text()))["config"] == config:
        return found
    from deepmd_ema import train

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    began = time.process_time()
    train(json.loads(json.dumps(config)), device="cpu")
    seconds, errors = time.process_time() - began, {}
    for file in folder.glob("val*.log"):
        rows = np.loadtxt(
            file, ndmin=2
        )  # step, energy MAE and RMSE, force MAE and RMSE, ...
        errors[file.stem.removeprefix("val").removeprefix("_") or "live"] = rows[
            :, [0, 2, 4]
        ].tolist()
    for file in folder.glob("*.pt"):
        file.unlink()
    done.write_text(json.dumps({"config": config, "cpu_s": seconds, "errors": errors}))
    print(f"{name}, {folder.name}: {seconds:.0f} s", flush=True)
    return json.loads(done.read_text())


def _make_input(
    name: str, recipe: dict[str, Any], rate: float, seed: int, data: Path, part: str
) -> dict[str, Any]:
    given = SETS[name]
    config = json.loads(
        (common.ROOT / "examples" / given.example / "input.json").read_text()
    )
    config["model"]["type_map"] = given.elements
    config["model"]["descriptor"] |= SMALL
    config["model"]["fitting_net"] |= {"neuron": [40, 40, 40], "precision": "float32"}
    loss = config["loss"] | {"start_pref_v": 0, "limit_pref_v": 0}
    for term in ("e", "f"):
        start, limit = loss[f"start_pref_{term}"], loss[f"limit_pref_{term}"]
        loss |= dict.fromkeys(
            (f"start_pref_{term}", f"limit_pref_{term}"),
            limit + (start - limit) * MIDDLE,
        )
    config |= {"loss": loss, "optimizer": recipe["optimizer"]}
    config["learning_rate"] = {"start_lr": rate, **WARMUP, **recipe["learning_rate"]}
    config["training"] = {
        "training_data": {
            "systems": sorted(map(str, (data / "train").iterdir())),
            "batch_size": given.batch_size,
        },
        "validation_data": {
            "systems": sorted(map(str, (data / part).iterdir())),
            "batch_size": given.batch_size,
        },
        "averaging": [
            one | {"full_validation": True} for one in recipe.get("averaging", AVERAGES)
        ],
    }
    return common.with_seed(config, seed)


def _median(runs: Sequence[Measured], quantity: int) -> float:
    return statistics.median(run.errors[quantity] for run in runs)


def _cell(runs: Sequence[Measured], quantity: int, lowest: float) -> str:
    cell = common.median_and_each([run.errors[quantity] for run in runs])
    return f"**{cell}**" if _median(runs, quantity) == lowest else cell


def _to_targets(
    measured: dict[int, list[Measured]], first: dict[int, list[Measured]]
) -> list[str]:
    """Return steps and seconds after which the errors of the longest run of the first recipe are
    reached.
    """
    cells = []
    for quantity in range(2):
        target = _median(first[max(first)], quantity)
        errors = [_median(runs, quantity) for runs in measured.values()]
        seconds = [
            statistics.median(run.seconds for run in runs) for runs in measured.values()
        ]
        cells += [
            _reached(values, errors, target) for values in (list(measured), seconds)
        ]
    return cells


def _reached(values: Sequence[float], errors: Sequence[float], target: float) -> str:
    """Return the place among growing values where an error falls to a target."""
    if errors[0] <= target:
        return f"< {values[0]:.0f}"
    for k in range(1, len(values)):
        if errors[k] <= target:
            part = math.log(errors[k - 1] / target) / math.log(
                errors[k - 1] / errors[k]
            )
            return f"{values[k - 1] * (values[k] / values[k - 1]) ** part:.0f}"
    return f"> {values[-1]:.0f}"


def _write_example(name: str, in_row: int, folder: Path) -> None:
    """Link the training systems of an example, and halve its validation frames; ``in_row`` frames
    stay together.
    """
    (folder / "train").mkdir()
    for system in (common.ROOT / "examples" / name / "data").iterdir():
        if system.name.startswith("train"):
            (folder / "train" / system.name).symlink_to(system)
        elif system.is_dir():
            for k, part in enumerate(("choose", "test")):
                shutil.copytree(system, folder / part / system.name)
                for file in (folder / part / system.name / "set.000").glob("*.npy"):
                    values = np.load(file)
                    np.save(file, values[np.arange(len(values)) // in_row % 2 == k])


def _write_nicu(folder: Path) -> None:
    """Write frames of 32 atoms of Ni and Cu on disordered fcc sites, displaced and strained,
    labelled by EMT.
    """
    from ase import Atoms
    from ase.build import bulk
    from ase.calculators.emt import EMT

    rng = np.random.default_rng(20251122)
    sites = bulk("Cu", cubic=True, a=1.0).repeat(2)
    for part, count in (("train", 60), ("choose", 10), ("test", 20)):
        for copper in COPPER:
            kinds, arrays = (
                np.repeat([0, 1], [32 - copper, copper]),
                {"coord": [], "box": [], "energy": [], "force": []},
            )
            constant = 3.52 + 0.09 * copper / 32  # angstrom, between Ni and Cu
            for _ in range(count):
                cell = (
                    sites.cell.array
                    * constant
                    @ (np.eye(3) + rng.uniform(-0.03, 0.03, (3, 3)))
                )
                coord = rng.permutation(sites.get_scaled_positions()) @ cell
                coord += rng.uniform(0.02, 0.18) * rng.normal(size=coord.shape)
                frame = Atoms(
                    [("Ni", "Cu")[kind] for kind in kinds],
                    coord,
                    cell=cell,
                    pbc=True,
                    calculator=EMT(),
                )
                for key, value in zip(
                    arrays,
                    (coord, cell, frame.get_potential_energy(), frame.get_forces()),
                ):
                    arrays[key].append(value)
            found = {key: np.array(values) for key, values in arrays.items()}
            common.write_system(folder / part / str(copper), kinds, ["Ni", "Cu"], found)


def _write_acac(sources: Path, folder: Path) -> None:
    """Write the training frames, at 300 K, and halves of the dynamics at 300 K; 50 frames of it
    stay together.
    """
    from ase.io import read

    data = sources / "BOTNet-datasets/dataset_acac"
    dynamics = read(data / "test_MD_300K.xyz", ":")
    halves = (
        [atoms for n, atoms in enumerate(dynamics) if n // 50 % 2 == k] for k in (0, 1)
    )
    _write_frames(folder, read(data / "train_300K.xyz", ":"), *halves)


def _write_alloys(sources: Path, folder: Path) -> None:
    """Write the alloys of race_sets.py; of five frames, four are trained on."""
    from race_sets import SETS as PUBLIC

    frames = PUBLIC["alloys"](sources)["train"]
    others = frames[::5]
    _write_frames(
        folder,
        [frame for n, frame in enumerate(frames) if n % 5],
        others[::2],
        others[1::2],
    )


def _write_frames(folder: Path, *parts: list[Any]) -> None:
    from ase.io import write

    for part, frames in zip(("train", "choose", "test"), parts):
        (folder / part).mkdir()
        write(folder / part / "data.extxyz", frames)


SETS = {
    "water": Data(
        "water", ["O", "H"], 1, lambda _, folder: _write_example("water", 6, folder)
    ),
    "molecules": Data(
        "molecules",
        ["C", "H", "N", "O"],
        4,
        lambda _, folder: _write_example("molecules", 1, folder),
    ),
    "nicu": Data("water", ["Ni", "Cu"], 2, lambda _, folder: _write_nicu(folder)),
    "acac": Data("molecules", ["H", "C", "O"], 4, _write_acac),
    "alloys": Data("water", ["Nb", "Mo", "Ta", "W"], 2, _write_alloys),
}


if __name__ == "__main__":
    main()
