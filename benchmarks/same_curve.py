"""Training from the same weights on the same frames, here and with DeePMD-kit: how far apart the last weights are.

usage: python benchmarks/same_curve.py --peer DIR [--steps 30] [--output PAGE]

DeePMD-kit makes the first weights of each model of beside_peer.json, with its statistics, and both programs start from
that checkpoint (--init-model); first weights of ours are compared with it in size. The data are --frames frames, all of
them in every batch, so that the order of frames does not matter. Everything in float64. What remains is the training
itself: loss, prefactors, learning rate, optimizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

import common
import numpy as np
from beside_peer import FITTING, LEARNING_RATE, LOSS, MODELS, train_all_command

NUM_DECAYS = 10  # the learning rate falls several times in a short run


def main() -> None:
    """Train from the same weights and print the table."""
    args = _arguments()
    found = common.programs(args.peer)
    models = json.loads(MODELS.read_text())
    base = args.work / "same_curve"
    first = {kind: _folder(base, kind, "start") / "model.ckpt-0.pt" for kind in models}
    if not args.no_train:
        _train_both(found, models, first, base, args)
    rows = [_row(kind, first[kind], _folder(base, kind, "ours"), _folder(base, kind, "peer")) for kind in models]
    header = ["model", "first matrices", "first vectors", "way", "apart", "apart over way", "loss, dp-ema", "dp --pt"]
    page = "\n\n".join(
        [
            f"# The same training from the same weights, {common.today()}",
            f"{args.steps} steps, float64, {args.frames} frames of the input in every batch. `way`: from the first "
            "weights to the last of DeePMD-kit, norm over all parameters; `apart`: between the last weights of both. "
            "`first matrices` and `first vectors`: root mean square in a new model here over that in DeePMD-kit's; "
            "other random numbers of the same distributions, so near 1 and not 1.  \n"
            f"On {common.machine(found, args.threads, args.device)}.",
            common.table(header, rows),
        ]
    )
    common.publish(page, args.output)


def _train_both(found: dict, models: dict, first: dict[str, Path], base: Path, args: argparse.Namespace) -> None:
    env = common.environment(args.threads, args.device)
    source = common.read_input(args.input, args.data)["training"]["training_data"]["systems"][0]
    system = _few_frames(Path(source), base / "data", args.frames)
    for kind, model in models.items():
        common.write_input(first[kind].parent, _config(model, system, args.frames, 0))
    _train(found["peer"], "peer", [str(file.parent) for file in first.values()], env, base)
    for key in ("peer", "ours"):
        for kind, model in models.items():
            common.write_input(_folder(base, kind, key), _config(model, system, args.frames, args.steps))
        runs = [f"{_folder(base, kind, key)}|--init-model|{first[kind]}" for kind in models]
        _train(found[key], key, runs, env, base)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.set_defaults(threads=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--frames", type=int, default=2)
    parser.add_argument("--no-train", action="store_true", help="only compare what is there")
    return parser.parse_args()


def _folder(base: Path, kind: str, key: str) -> Path:
    return base / f"{kind}-{key}".replace(", ", "_").replace(" ", "_")


def _config(model: dict, system: Path, frames: int, num_steps: int) -> dict:
    config = {
        "model": {"type_map": ["O", "H"], "descriptor": model["descriptor"], "fitting_net": FITTING},
        "learning_rate": LEARNING_RATE | {"decay_steps": max(1, num_steps // NUM_DECAYS)},
        "loss": LOSS,
        "training": {
            "training_data": {"systems": [str(system)], "batch_size": frames},
            "numb_steps": num_steps,
            "disp_freq": 1,
            "save_freq": 10**8,
        },
    }
    return common.with_seed(common.with_precision(config, "float64"), 1)


def _few_frames(source: Path, target: Path, num_frames: int) -> Path:
    """Write the first frames of a system of one set as a system of its own."""
    shutil.rmtree(target, ignore_errors=True)
    (target / "set.000").mkdir(parents=True)
    for file in source.glob("*.raw"):
        shutil.copy(file, target)
    for file in (source / "set.000").glob("*.npy"):
        np.save(target / "set.000" / file.name, np.load(file)[:num_frames])
    return target


def _train(program: common.Program, key: str, runs: list[str], env: dict[str, str], base: Path) -> None:
    log = base / f"{key}.log"
    with log.open("w") as out:
        done = subprocess.run(train_all_command(key, program, runs), env=env, stdout=out, stderr=out, check=False)
    if done.returncode:
        raise SystemExit(f"{program.name} failed:\n{log.read_text()[-3000:]}")


def _row(kind: str, first: Path, ours: Path, peer: Path) -> list[str]:
    """Return the cells of one model: norms of differences of all parameters, and the last losses."""
    start, mine, theirs = (_weights(path) for path in (first, ours / "model.ckpt.pt", peer / "model.ckpt.pt"))
    way, apart = (float(np.sqrt(sum(((theirs[n] - other[n]) ** 2).sum() for n in theirs))) for other in (start, mine))
    losses = [(folder / "lcurve.out").read_text().splitlines()[-1].split()[1] for folder in (ours, peer)]
    return [kind, *_first_sizes(first, start), f"{way:.2g}", f"{apart:.1e}", f"{apart / way:.1e}", *losses]


def _first_sizes(first: Path, theirs: dict[str, np.ndarray]) -> list[str]:
    """Return the root mean square of matrices and of vectors in new models of this input, ours over theirs."""
    from deepmd_ema.config import model_config_from_dict
    from deepmd_ema.model.build import build_model

    config = model_config_from_dict(json.loads((first.parent / "input.json").read_text())["model"], str(first))
    mine = {name: value.detach().numpy() for name, value in build_model(config).named_parameters()}
    cells = []
    for num_dims in (2, 1):
        names = [name for name, value in theirs.items() if value.ndim == num_dims]
        squares = [sum((weights[name] ** 2).sum() for name in names) for weights in (mine, theirs)]
        cells.append(f"{np.sqrt(squares[0] / squares[1]):.3f}")
    return cells


def _weights(path: Path) -> dict[str, np.ndarray]:
    from deepmd_ema.infer.load import load_model

    return {name: value.detach().numpy() for name, value in load_model(path).model.named_parameters()}


if __name__ == "__main__":
    main()
