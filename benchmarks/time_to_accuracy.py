"""Wall time to the accuracy that DeePMD-kit reaches with an input and its own schedule.

usage: python benchmarks/time_to_accuracy.py --peer DIR [--sets water] [--stage targets reach time]
                                             [--output PAGE]

The inputs are those of the examples, the recipe of dp-ema is in time_to_accuracy.json: the same
model, data and frames per batch, another optimizer, schedule and loss, an average, and fewer steps.
Optimizer, rates and numbers of steps were chosen with seeds from 11 on, which are not among those
that are measured. Stages, each of which keeps its results in --work:

- ``targets``: DeePMD-kit trains the input and tests its model on all validation frames. "own" has
  the learning rates of DeePMD-kit's examples (down to 3.51e-8), "example" those of the input here
  (down to 1e-4).
- ``reach``: dp-ema trains for its number of steps, and its averaged model is tested on the same
  frames; and it trains the inputs of DeePMD-kit as they are ("same"), whose errors should be those
  of DeePMD-kit.
- ``time``: both programs from the command to the end, in turns and with nothing beside. DeePMD-kit
  is stopped after some hundred steps, and the rest is counted at the time of those.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
from common import median_and_each
from speed_cases import with_options

RECIPES = common.ROOT / "benchmarks" / "time_to_accuracy.json"
STAGES = ("targets", "reach", "time")
TARGETS = ("own", "example")
UNITS = {"energy": "meV/atom", "force": "meV/angstrom"}
TIMES = {"seconds": "seconds", "start": "to the first row, s"}
PEER_STEPS, PEER_ROW = 300, 50  # that are timed: those after the first 100


def main() -> None:
    """Measure the chosen stages, and print the page of all results."""
    args = _arguments()
    recipes = json.loads(RECIPES.read_text())
    keys = [(name, seed) for name in args.sets for seed in args.seeds]
    found: dict[str, dict[tuple[Any, ...], dict[str, float]]] = {
        stage: {} for stage in STAGES
    }
    for name, seed in keys:
        for target in args.targets:
            config = _peer_input(name, seed, target, recipes)
            _note(found, "targets", (name, seed, target), args, config, _trained_peer)
            _note(
                found,
                "reach",
                (name, seed, f"same-{target}"),
                args,
                config,
                _trained_same,
            )
        for recipe in recipes["precisions"]:
            _note(
                found,
                "reach",
                (name, seed, recipe),
                args,
                _our_input(name, seed, recipe, recipes),
                _trained_here,
            )
    for turn, (name, seed) in enumerate(keys):
        jobs = [(("peer",), _peer_input(name, seed, "own", recipes), _timed_peer)]
        jobs += [
            ((recipe,), _our_input(name, seed, recipe, recipes), _timed_here)
            for recipe in recipes["precisions"]
        ]
        for key, config, measure in jobs[:: -1 if turn % 2 else 1]:
            _note(found, "time", (name, seed, *key), args, config, measure)
    common.publish(_page(found, recipes, args), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--sets", nargs="+", default=["water", "molecules"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument(
        "--targets",
        nargs="*",
        default=list(TARGETS),
        choices=TARGETS,
        help="trained by DeePMD-kit",
    )
    parser.add_argument(
        "--stage",
        nargs="*",
        default=list(STAGES),
        choices=STAGES,
        help="what is measured now",
    )
    return parser.parse_args()


def _note(
    found: Any,
    stage: str,
    key: tuple[Any, ...],
    args: argparse.Namespace,
    config: Any,
    measure: Any,
) -> None:
    """Enter the result of a run, which is made if its stage is chosen and it does not exist."""
    folder = (
        args.work.resolve() / "time_to_accuracy" / "-".join(map(str, (stage, *key)))
    )
    file = folder / "result.json"
    if file.exists() and json.loads((folder / "input.json").read_text()) == config:
        found[stage][key] = json.loads(file.read_text())
    elif stage in args.stage:
        common.write_input(folder, config)
        found[stage][key] = measure(folder, config, args)
        file.write_text(json.dumps(found[stage][key]))
        print(stage, *key, json.dumps(found[stage][key]), flush=True)


def _example(name: str, seed: int) -> dict[str, Any]:
    config = common.with_numeric_sel(
        common.read_input(common.ROOT / "examples" / name / "input.json", None)
    )
    return common.with_seed(common.bare(config), seed)


def _peer_input(
    name: str, seed: int, target: str, recipes: dict[str, Any]
) -> dict[str, Any]:
    config = _example(name, seed)
    config["training"]["disp_freq"] = PEER_ROW
    return with_options(config, recipes["own schedule"] if target == "own" else {})


def _our_input(
    name: str, seed: int, recipe: str, recipes: dict[str, Any]
) -> dict[str, Any]:
    return with_options(
        _example(name, seed),
        recipes["recipe"],
        recipes["sets"][name],
        recipes["precisions"][recipe],
    )


def _trained_peer(
    folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    return _train_and_test("peer", "model.ckpt.pt", folder, config, args)


def _trained_here(
    folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    return _train_and_test("ours", "model_ema.ckpt.pt", folder, config, args)


def _trained_same(
    folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    return _train_and_test("ours", "model.ckpt.pt", folder, config, args)


def _train_and_test(
    key: str, model: str, folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    """Return RMSEs on the validation frames of the example, in meV."""
    program, env = (
        common.programs(args.peer)[key],
        common.environment(args.threads, args.device),
    )
    common.train(program, folder, env, "--skip-neighbor-stat")
    (folder / "systems.txt").write_text("\n".join(_validation_systems(config)) + "\n")
    errors = common.read_errors(
        common.run_text(program, folder, env, "test", "-m", model, "-f", "systems.txt")
    )
    return {name: 1000 * value for name, value in errors.items()}


def _validation_systems(config: dict[str, Any]) -> list[str]:
    """Return those beside the training systems of an example."""
    data = Path(config["training"]["training_data"]["systems"][0]).parent
    return sorted(str(system) for system in data.glob("validation*"))


def _timed_here(
    folder: Path, _config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    program, env = (
        common.programs(None)["ours"],
        common.environment(args.threads, args.device),
    )
    watched = common.train(program, folder, env)
    return {
        "seconds": watched.end - watched.start,
        "start": min(watched.rows.values()) - watched.start,
    }


def _timed_peer(
    folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> dict[str, float]:
    program, env = (
        common.programs(args.peer)["peer"],
        common.environment(args.threads, args.device),
    )
    steps = config["training"]["numb_steps"]
    common.write_input(
        folder, with_options(config, {"training.numb_steps": PEER_STEPS})
    )
    # its statistics of neighbors take the atoms of open molecules for overlapping
    is_open = Path(config["training"]["training_data"]["systems"][0], "nopbc").exists()
    watched = common.train(program, folder, env, *["--skip-neighbor-stat"] * is_open)
    (folder / "input.json").write_text(
        json.dumps(config, indent=2)
    )  # by which a result is known
    per_step = (watched.rows[PEER_STEPS] - watched.rows[2 * PEER_ROW]) / (
        PEER_STEPS - 2 * PEER_ROW
    )
    start = min(watched.rows.values()) - watched.start
    return {
        "seconds": watched.end - watched.start + (steps - PEER_STEPS) * per_step,
        "start": start,
        "step": per_step,
    }


# --- page


def _page(
    found: dict[str, Any], recipes: dict[str, Any], args: argparse.Namespace
) -> str:
    parts = [
        f"# Wall time to the accuracy of DeePMD-kit's schedule, {common.today()}",
        "DeePMD-kit trains the input of the example, as it is (`example`) and with the learning "
        "rates of its own examples (`own`, down to 3.51e-8). dp-ema trains the same model on the "
        "same frames with another recipe, found with seeds from 11 on: "
        f"{json.dumps(recipes['recipe'])}, and what is named below. Errors are RMSEs on all "
        "validation frames by each program's test command, of the averaged model here; times are "
        "those from the command to the end, with all that a run does. Those of DeePMD-kit are of "
        f"{PEER_STEPS} steps, the rest at the time of its steps from {2 * PEER_ROW} on. Medians, "
        "and each seed.  \n"
        f"On {common.machine(common.programs(args.peer), args.threads, args.device)}.",
    ]
    for name in args.sets:
        rows = []
        for target in args.targets:
            numbers = [
                found["targets"].get((name, seed, target)) for seed in args.seeds
            ]
            seconds = [found["time"].get((name, seed, "peer")) for seed in args.seeds]
            steps = _example(name, 1)["training"]["numb_steps"]
            rows.append(
                [
                    f"dp --pt, {target}",
                    str(steps),
                    *_cells(numbers, UNITS),
                    *_cells(seconds, TIMES),
                    "",
                    "",
                ]
            )
            numbers = [
                found["reach"].get((name, seed, f"same-{target}"))
                for seed in args.seeds
            ]
            rows.append(
                [
                    f"dp-ema, {target}",
                    str(steps),
                    *_cells(numbers, UNITS),
                    *[""] * (len(TIMES) + 2),
                ]
            )
        for recipe in recipes["precisions"]:
            numbers = [found["reach"].get((name, seed, recipe)) for seed in args.seeds]
            seconds = [found["time"].get((name, seed, recipe)) for seed in args.seeds]
            steps = recipes["sets"][name]["training.numb_steps"]
            row = [
                f"dp-ema, {recipe}",
                str(steps),
                *_cells(numbers, UNITS),
                *_cells(seconds, TIMES),
            ]
            rows.append(
                [
                    *row,
                    _ratio(found, name, recipe, args),
                    _reached(found, name, recipe, args),
                ]
            )
        words = [
            *(f"{quantity}, {unit}" for quantity, unit in UNITS.items()),
            *TIMES.values(),
        ]
        header = ["run", "steps", *words, "dp --pt / dp-ema", "seeds that reach it"]
        parts += [
            f"## {name}",
            f"dp-ema: {json.dumps(recipes['sets'][name])}",
            common.table(header, rows),
        ]
    return "\n\n".join(parts)


def _cells(results: list[dict[str, float] | None], names: Any) -> list[str]:
    known = [result for result in results if result is not None]
    return [
        median_and_each([result[name] for result in known]) if known else ""
        for name in names
    ]


def _ratio(
    found: dict[str, Any], name: str, recipe: str, args: argparse.Namespace
) -> str:
    """Return by how much longer DeePMD-kit takes; the time of its steps does not depend on the
    target.
    """
    times = [
        [found["time"].get((name, seed, key)) for seed in args.seeds]
        for key in ("peer", recipe)
    ]
    pairs = [
        (theirs["seconds"], ours["seconds"])
        for theirs, ours in zip(*times)
        if theirs and ours
    ]
    return common.format_ratio(*zip(*pairs)) if pairs else ""


def _reached(
    found: dict[str, Any], name: str, recipe: str, args: argparse.Namespace
) -> str:
    """Return of how many seeds both errors are no larger than those of DeePMD-kit with the same
    seed.
    """
    words = []
    for target in args.targets:
        pairs = [
            (
                found["reach"].get((name, s, recipe)),
                found["targets"].get((name, s, target)),
            )
            for s in args.seeds
        ]
        known = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
        number = sum(
            all(ours[quantity] <= theirs[quantity] for quantity in UNITS)
            for ours, theirs in known
        )
        words.append(f"{target} {number} of {len(known)}")
    return ", ".join(words)


if __name__ == "__main__":
    main()
