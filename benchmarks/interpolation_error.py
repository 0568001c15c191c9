"""Is the error of interpolated embedding nets bounded in each step, and is val.log the same as `dp-ema test`.

usage: python benchmarks/interpolation_error.py [--source CHECKOUT] [--steps 99] [--cases pair ...]

Runs of the water example that interpolation finds hard: a dilute and a dense system in turns, rates of 0.03 and 0.05,
and a close contact among the validation frames, in float32. Before each step the forces of its batch are compared with
those of nets evaluated at each pair. --source measures another checkout of this repository, from before a change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "water"
TRAINING = [str(EXAMPLE / "data" / f"train_{kelvin}K") for kelvin in (300, 350, 400, 450, 500)]
VALIDATION = str(EXAMPLE / "data" / "validation")
CASES = {  # rate, precision; the systems are made by `systems_of`
    "pair": (0.001, "float64"),
    "rate 0.03": (0.03, "float64"),
    "rate 0.05": (0.05, "float64"),
    "contact": (0.01, "float32"),
}
SPACINGS = {"dilute": 1.25, "dense": 0.85}
CONTACT = 0.4  # angstrom, of an O and an H
METRICS = ("E:MAE", "E:RMSE", "F:MAE", "F:RMSE")


def main() -> None:
    """Train each case, and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=ROOT)
    parser.add_argument("--steps", type=int, default=99)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    sys.path.insert(0, str(args.source))  # before the first import of the package, which is inside functions
    logging.disable(logging.WARNING)
    print("| case | largest error of forces | median | weights | val.log: E MAE, RMSE, F MAE, RMSE | test |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases:
            for row in rows_of(Path(folder) / case.replace(" ", "_"), case, args.steps):
                print(f"| {' | '.join(row)} |", flush=True)


def rows_of(folder: Path, case: str, steps: int) -> list[list[str]]:
    """Return a row for the live weights and one for the averaged ones after a run in ``folder``."""
    import torch

    from deepmd_ema.infer.evaluate import measure
    from deepmd_ema.train.run import run_training

    torch.set_num_threads(1)
    rate, precision = CASES[case]
    folder.mkdir()
    training, validation = systems_of(case, folder)
    config = json.loads((EXAMPLE / "input.json").read_text())
    config["model"]["descriptor"] |= {"precision": precision, "interpolate": "always"}
    config["model"]["fitting_net"]["precision"] = precision
    config["learning_rate"] = {"type": "exp", "start_lr": rate, "stop_lr": 0.999 * rate, "decay_steps": steps}
    config["training"]["training_data"]["systems"] = training
    config["training"]["validation_data"]["systems"] = [validation]
    config["training"] |= {"numb_steps": steps, "disp_freq": steps, "save_freq": steps, "ema_decay": 0.9,
                           "gradient_max_norm": 1.0}  # fmt: skip
    config["validating"]["validation_freq"] = steps
    errors: list[float] = []
    with _within(folder):
        Path("input.json").write_text(json.dumps(config))
        with _compared(errors):
            run_training("input.json", device="cpu")
        rows = []
        for weights, log, model in (("live", "val.log", "model"), ("ema", "val_ema.log", "model_ema")):
            logged = next(line.split() for line in reversed(Path(log).read_text().splitlines()) if line[0] != "#")
            total = measure(f"{model}.ckpt-{steps}.pt", [validation]).total
            tested = [f"{1000 * total.metric(name):.5g}" for name in METRICS]
            shown = [case, f"{max(errors):.1e}", f"{np.median(errors):.1e}"]
            rows.append([*shown, weights, ", ".join(logged[1:5]), ", ".join(tested)])
    return rows


@contextlib.contextmanager
def _compared(errors: list[float]):
    """Add to ``errors``, before each step, the largest difference of the forces over the largest force."""
    from deepmd_ema.model.interpolation import interpolations_of
    from deepmd_ema.train.step import GradientStep

    take_step = GradientStep.__call__

    def compared(self, task, batch, step):
        models = self._parallel_module
        splines = list(interpolations_of(models.by_task[task.name]).values())
        terms = [spline.terms for spline in splines]
        forces = models(task.name, batch, create_graph=True)["force"].detach()
        for spline in splines:
            spline.terms = 0
        direct = models(task.name, batch, create_graph=False)["force"]
        for spline, number in zip(splines, terms, strict=True):
            spline.terms = number
        errors.append(float((forces - direct).abs().max() / direct.abs().max()))
        return take_step(self, task, batch, step)

    GradientStep.__call__ = compared
    try:
        yield
    finally:
        GradientStep.__call__ = take_step


def systems_of(case: str, folder: Path) -> tuple[list[str], str]:
    """Return the training systems and the validation system of a case, made in ``folder`` where they are special."""
    if case == "pair":
        for name, factor in SPACINGS.items():
            arrays = shutil.copytree(TRAINING[0], folder / name) / "set.000"
            for array in ("coord", "box"):
                np.save(arrays / f"{array}.npy", factor * np.load(arrays / f"{array}.npy"))
        return [str(folder / name) for name in SPACINGS], VALIDATION
    if case != "contact":
        return TRAINING, VALIDATION
    system = shutil.copytree(VALIDATION, folder / "contact")
    types = np.loadtxt(system / "type.raw", dtype=int)
    coord = np.load(system / "set.000" / "coord.npy")
    atoms = coord[0].reshape(-1, 3)
    oxygen = int(np.flatnonzero(types == 0)[0])
    hydrogens = np.flatnonzero(types == 1)
    nearest = hydrogens[np.linalg.norm(atoms[hydrogens] - atoms[oxygen], axis=1).argmin()]
    bond = atoms[nearest] - atoms[oxygen]
    atoms[nearest] = atoms[oxygen] + CONTACT * bond / np.linalg.norm(bond)
    np.save(system / "set.000" / "coord.npy", coord)
    return TRAINING, str(system)


@contextlib.contextmanager
def _within(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    main()
