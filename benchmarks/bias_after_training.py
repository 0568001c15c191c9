"""Mean residual per atom after `change_bias_after_training`, of live and averaged files, beside the peer.

A model is trained on the molecules of the examples, and trained further with --init-model on the same frames with
another energy zero: some eV more for each atom of one element. What is left of the shift in the networks at the end is
what the bias has to take, and it is another amount in the live and in the averaged weights.

usage: python benchmarks/bias_after_training.py --peer DIR --output benchmarks/results/DATE-bias.md
"""

import argparse
import shutil
from pathlib import Path

import common
import numpy as np

FILES = {"live": "model.ckpt-{}.pt", "averaged": "model_ema.ckpt-{}.pt"}
SKIP = "--skip-neighbor-stat"  # the peer's takes virtual atoms for atoms in one place
FREEZE = """
import sys
from deepmd.main import main

for name in sys.argv[1:]:
    main(["--pt", "freeze", "-c", name, "-o", name + ".pth"])
    main(["convert-backend", name + ".pth", name + ".dp"])
"""


def main() -> None:
    """Train, fit the bias again, and print one row per file."""
    args = _arguments()
    found = common.programs(args.peer)
    env = common.environment(args.threads, args.device)
    work = (args.work / "bias").resolve()
    config = _config(common.with_numeric_sel(common.read_input(args.input, args.data)), args)
    shifted = [_shifted(Path(s), work / "data", args) for s in config["training"]["training_data"]["systems"]]
    rows = []
    for key, program in found.items():
        first, second = work / key / "first", work / key / "second"
        common.write_input(first, config)
        common.train(program, first, env, SKIP)
        common.write_input(second, _continued(config, shifted, key))
        common.train(program, second, env, SKIP, "--init-model", str(first / f"model.ckpt-{args.steps}.pt"))
        for weights, (mean, rms, bias) in _evaluated(program, second, env, shifted, args).items():
            numbers = (f"{round(1000 * value, 4) + 0.0:.4f}" for value in (mean, rms))
            rows.append([program.name, weights, *numbers, f"{bias:.6f}"])
    page = [
        f"# Bias fitted after training: mean residual per atom, {common.today()}",
        "",
        f"`{args.input.parent.name}` example, {args.steps} steps, then --init-model and {args.steps} steps with "
        f"{args.shift:g} eV more for each {args.element} atom; average with decay {args.decay:g} without warm-up, "
        "`change_bias_after_training`.",
        f"{common.machine(found, args.threads, args.device).rpartition('; load')[0]}.",
        "",
        common.table(["program", "file", "mean, meV/atom", "RMSE, meV/atom", f"bias of {args.element}, eV"], rows),
        "",
        "Label minus prediction over all training frames, both programs' files evaluated by dp-ema. The peer writes "
        "one bias into both files; it fits total energies, so that with frames of different sizes the mean of its live "
        "file is not zero either.",
    ]
    common.publish("\n".join(page), args.output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_common_options(parser)
    parser.set_defaults(input=common.ROOT / "examples" / "molecules" / "input.json")
    parser.add_argument("--steps", type=int, default=200, help="steps of each of the two runs")
    parser.add_argument("--element", default="C", help="whose energy zero moves")
    parser.add_argument("--shift", type=float, default=3.0, help="by how much, eV")
    parser.add_argument("--decay", type=float, default=0.99, help="of the average")
    return parser.parse_args()


def _config(config: dict, args: argparse.Namespace) -> dict:
    """Return a small model, which sees all frames when the bias is fitted."""
    config = common.bare(config)
    config["model"]["descriptor"] |= {"neuron": [8, 16], "axis_neuron": 4}
    config["model"]["fitting_net"]["neuron"] = [32, 32]
    config["model"]["data_stat_nbatch"] = common.count_frames(config)
    config["training"] |= {"numb_steps": args.steps, "enable_ema": True, "ema_decay": args.decay}
    return config


def _continued(config: dict, systems: list[str], key: str) -> dict:
    training = {**config["training"], "change_bias_after_training": True}
    training["training_data"] = {**training["training_data"], "systems": systems}
    if key == "ours":
        training["ema_warmup"] = False  # the peer's formula
    return {**config, "training": training}


def _shifted(system: Path, folder: Path, args: argparse.Namespace) -> str:
    """Copy a system with another energy zero, and return the copy's path."""
    copy = folder / system.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(system, copy)
    kind = (system / "type_map.raw").read_text().split().index(args.element)
    same = np.loadtxt(system / "type.raw", dtype=int, ndmin=1)
    for part in copy.glob("set.*"):
        mixed = part / "real_atom_types.npy"
        types = np.load(mixed) if mixed.exists() else same[None]
        energies = np.load(part / "energy.npy")
        np.save(part / "energy.npy", energies + args.shift * (types == kind).sum(1).astype(energies.dtype))
    return str(copy)


def _evaluated(
    program: common.Program, folder: Path, env: dict, systems: list[str], args: argparse.Namespace
) -> dict[str, tuple[float, float, float]]:
    """Return mean and root mean square of the residual per atom, and the bias, of both files of a run, eV."""
    from deepmd_ema.infer.evaluate import measure
    from deepmd_ema.infer.load import load_model

    names = {weights: name.format(args.steps) for weights, name in FILES.items()}
    if program.name != "dp-ema":
        script = folder / "freeze.py"
        script.write_text(FREEZE)
        freezer = common.Program("freeze", (program.python, str(script)), program.python)
        common.run_text(freezer, folder, env, *names.values())
        names = {weights: f"{name}.dp" for weights, name in names.items()}
    found = {}
    for weights, name in names.items():
        frames = measure(folder / name, systems, device="cpu").frames
        residual = np.array([(f.label["energy"] - f.prediction["energy"]) / f.num_atoms for f in frames])
        model = load_model(folder / name).model
        bias = float(model.out_bias[0, model.type_map.index(args.element), 0])
        found[weights] = (float(residual.mean()), float(np.sqrt(np.mean(residual**2))), bias)
    return found


if __name__ == "__main__":
    main()
