"""Errors on the validation frames after the same training here and with DeePMD-kit, for several seeds.

usage: python benchmarks/accuracy.py --peer DIR [--seeds 1 2 3] [--steps N] [--output PAGE]

Each program trains the input (its averages included) once per seed and then tests its live and its averaged weights
on the validation systems: `dp --pt test` and `dp-ema test`, whose lines are read. A run that has its result in --work
is not repeated, so that the benchmark can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import TYPE_CHECKING

import common

if TYPE_CHECKING:
    from pathlib import Path

FILES = {"live": "model.ckpt.pt", "averaged": "model_ema.ckpt.pt"}


def main() -> None:
    """Train, test and print the table."""
    args = _arguments()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    config = common.with_numeric_sel(common.read_input(args.input, args.data))
    systems = config["training"]["validation_data"]["systems"]
    config.pop("validating", None)  # full validation chooses a best file but changes no weight
    if args.steps:
        config["training"]["numb_steps"] = args.steps
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in args.seeds:
        for key, program in found.items():
            folder = args.work / "accuracy" / f"{key}-{seed}"
            errors = _train_and_test(program, folder, env, _seeded(config, seed, key), systems)
            for weights, values in errors.items():
                results.setdefault((key, weights), []).append(values)
            print(key, seed, json.dumps(errors), flush=True)
    header = ["weights", "energy RMSE, meV/atom", "median", "force RMSE, meV/angstrom", "median"]
    rows = [[f"{found[key].name}, {weights}", *_cells(values)] for (key, weights), values in results.items()]
    page = "\n\n".join(
        [
            f"# Accuracy after {config['training']['numb_steps']} steps, {common.today()}",
            f"{config['model']['descriptor']['type']}, seeds {', '.join(map(str, args.seeds))}, validation frames of "
            f"the input, each program's own test command.  \nOn {common.machine(found, args.threads, args.device)}.",
            common.table(header, rows),
            *_ratios(results),
        ]
    )
    common.publish(page, args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="steps instead of those of the input")
    return parser.parse_args()


def _seeded(config: dict, seed: int, key: str) -> dict:
    config = common.with_seed(config, seed)
    if key == "peer":
        config["training"].pop("ema_warmup", None)
    return config


def _train_and_test(
    program: common.Program, folder: Path, env: dict, config: dict, systems: list[str]
) -> dict[str, dict[str, float]]:
    done = folder / "errors.json"
    if done.exists() and json.loads((folder / "input.json").read_text()) == config:
        return json.loads(done.read_text())
    common.write_input(folder, config)
    common.train(program, folder, env)
    (folder / "systems.txt").write_text("\n".join(systems) + "\n")
    errors = {}
    for weights, file in FILES.items():
        if (folder / file).exists():
            text = common.run_text(program, folder, env, "test", "-m", file, "-f", "systems.txt")
            (folder / f"test_{weights}.log").write_text(text)
            errors[weights] = common.read_errors(text)
    done.write_text(json.dumps(errors))
    return errors


def _cells(values: list[dict[str, float]]) -> list[str]:
    cells = []
    for name in common.ERROR_LINES:
        numbers = [1000 * value[name] for value in values]
        cells += [", ".join(f"{n:.3f}" for n in numbers), f"{statistics.median(numbers):.3f}"]
    return cells


def _ratios(results: dict[tuple[str, str], list[dict[str, float]]]) -> list[str]:
    lines = []
    for weights in FILES:
        if ("peer", weights) in results and ("ours", weights) in results:
            medians = {
                key: [statistics.median(value[name] for value in results[key, weights]) for name in common.ERROR_LINES]
                for key in ("ours", "peer")
            }
            energy, force = (ours / peer for ours, peer in zip(medians["ours"], medians["peer"]))
            lines.append(f"Ours over the peer's, medians, {weights}: energy {energy:.3f}, force {force:.3f}.")
    return lines


if __name__ == "__main__":
    main()
