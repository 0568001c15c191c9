"""Errors and speed of a model by its ASE calculator; runs in the environment of its trainer.

usage: PYTHON race_evaluate.py KIND MODEL [--tests FILE ...] [--steps 20] [--kelvin T ...]
                                [--output FILE]

It writes one JSON document: RMSE of energies (meV/atom), forces (meV/angstrom) and stresses
(meV/angstrom^3) on each file of frames, and microseconds per atom and step of 240 and of 2,000
atoms that move at random by 0.01 angstrom between steps, as in dynamics. With --kelvin also how
long dynamics at these temperatures lasts, in picoseconds, from twelve frames of the first file
(three, if they are periodic).
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from ase import Atoms, units
from ase.io import read

NUM_ATOMS = (240, 2_000)  # at least, in cells and molecules that are repeated
WARM_UP = 5  # steps before the clock starts: neighbor lists, compilation
SPACING = 15.0  # angstrom, between copies of a molecule, beyond every cutoff
STEP = 0.01  # angstrom
STARTS = 12  # runs of dynamics
PERIODIC_STARTS = 3
TIME_STEP = 1.0  # fs
DYNAMICS_STEPS = 2_000  # 2 ps
FRICTION = 0.01  # 1/fs
WRONG_FORCE = 100.0  # eV/angstrom
WRONG_SPREAD = (
    3.0  # of the largest distance from the center, as a factor: the molecule is gone
)


def deepmd_ema(model):
    """Return the calculator of a checkpoint of this program."""
    from deepmd_ema.calculator import DP

    return DP(model)


def deepmd(model):
    """Return the calculator of a frozen model of DeePMD-kit."""
    from deepmd.calculator import DP

    return DP(model=model)


def mace(model):
    """Return the calculator of a model of MACE."""
    from mace.calculators import MACECalculator

    return MACECalculator(model_paths=model, device="cpu")


def nequip(model):
    """Return the calculator of a compiled model of NequIP."""
    from nequip.integrations.ase import NequIPCalculator

    return NequIPCalculator.from_compiled_model(model, device="cpu")


def pet(model):
    """Return the calculator of a model that metatrain has exported."""
    from metatomic_ase import MetatomicCalculator

    return MetatomicCalculator(model, device="cpu")


def main():
    """Print the errors on each file, and the speed on frames of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "kind", choices=("deepmd_ema", "deepmd", "mace", "nequip", "pet")
    )
    parser.add_argument("model")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="files of frames with labels"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="steps of the smaller number of atoms that are timed; of the larger a fourth (20)",
    )
    parser.add_argument(
        "--kelvin", type=float, nargs="+", default=[], help="of dynamics"
    )
    parser.add_argument(
        "--output", type=Path, help="the document (default: standard output)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    output, sys.stdout = sys.stdout, sys.stderr  # some calculators print
    calculator = globals()[args.kind](args.model)
    frames = {Path(file).stem: read(file, ":") for file in args.tests}
    starts = next(iter(frames.values()))
    few, many = NUM_ATOMS
    result = {
        "errors": {name: errors(calculator, some) for name, some in frames.items()},
        "md_us": {
            few: seconds_per_step(calculator, starts[0], few, args.steps),
            many: seconds_per_step(
                calculator, starts[0], many, max(1, args.steps // 4)
            ),
        },
    }
    if args.kelvin:
        result["dynamics_ps"] = {
            t: dynamics(calculator, starts, t) for t in args.kelvin
        }
    if args.output is None:
        print(json.dumps(result), file=output)
    else:
        args.output.write_text(json.dumps(result))


def errors(calculator, frames):
    """Return the RMSE of each quantity that the frames have, by its name."""
    squares = {"energy": [], "force": [], "stress": []}
    for frame in frames:
        labels = frame.calc.results
        atoms = Atoms(frame.symbols, frame.positions, cell=frame.cell, pbc=frame.pbc)
        atoms.calc = calculator
        difference = atoms.get_potential_energy() - labels["energy"]
        squares["energy"].append((difference / len(atoms)) ** 2)
        if "forces" in labels:
            squares["force"].extend(
                ((atoms.get_forces() - labels["forces"]) ** 2).ravel()
            )
        if "stress" in labels:
            squares["stress"].extend((atoms.get_stress() - labels["stress"]) ** 2)
    return {
        name: 1000 * float(np.sqrt(np.mean(rows)))
        for name, rows in squares.items()
        if len(rows)
    }


def seconds_per_step(calculator, frame, num_atoms, steps):
    """Return microseconds per atom of energies and forces of about ``num_atoms`` atoms."""
    copies = max(1, round(num_atoms / len(frame)))
    atoms = Atoms(frame.symbols, frame.positions, cell=frame.cell, pbc=frame.pbc)
    if frame.pbc.all():
        # along the shortest vector each time, so that the cell stays compact
        while len(atoms) < num_atoms:
            axis = int(np.argmin(atoms.cell.lengths()))
            atoms = atoms.repeat([2 if k == axis else 1 for k in range(3)])
    else:
        width = int(np.ceil(copies ** (1 / 3)))
        places = [np.unravel_index(k, (width,) * 3) for k in range(copies)]
        one, atoms = atoms, Atoms()
        for place in places:
            copy = one.copy()
            copy.positions += SPACING * np.array(place)
            atoms += copy
    atoms.calc = calculator
    rng = np.random.default_rng(1)
    for k in range(WARM_UP + steps):
        if k == WARM_UP:
            began = time.process_time()
        atoms.positions += rng.normal(size=atoms.positions.shape) * STEP
        atoms.get_forces()
    return 1e6 * (time.process_time() - began) / steps / len(atoms)


def dynamics(calculator, frames, kelvin):
    """Return the lengths of several runs of dynamics, in picoseconds.

    A run ends where a force, or the size of a molecule, is impossible. Copies of a molecule move
    beside each other, beyond every cutoff; periodic frames one after another.
    """
    # those of one molecule, if the file has several
    frames = [
        atoms for atoms in frames if list(atoms.symbols) == list(frames[0].symbols)
    ]
    starts = [frames[k] for k in np.linspace(0, len(frames) - 1, STARTS).astype(int)]
    if starts[0].pbc.any():
        return [
            life
            for start in starts[:PERIODIC_STARTS]
            for life in _lives(calculator, [start], kelvin)
        ]
    return _lives(calculator, starts, kelvin)


def _lives(calculator, starts, kelvin):
    """Return the length of dynamics of frames with the same atoms, which do not see each other."""
    first, number = starts[0], len(starts)
    x = np.stack([atoms.positions for atoms in starts])
    if number > 1:
        x -= x.mean(axis=1, keepdims=True)
        x[:, :, 0] += 2 * SPACING * np.arange(number)[:, None]
    began = x.copy()
    atoms = Atoms(
        list(first.symbols) * number, x.reshape(-1, 3), cell=first.cell, pbc=first.pbc
    )
    atoms.calc = calculator
    masses = first.get_masses()[:, None]
    largest = np.inf if first.pbc.any() else WRONG_SPREAD * np.abs(_centred(x)).max()
    step = TIME_STEP * units.fs
    keep = np.exp(-FRICTION * TIME_STEP)
    width = np.sqrt(kelvin * units.kB / masses)
    rng = np.random.default_rng(1)
    v = rng.normal(size=x.shape) * width
    lives = np.full(number, DYNAMICS_STEPS * TIME_STEP / 1000)
    is_running = np.ones(number, dtype=bool)

    def acceleration():
        atoms.positions = x.reshape(-1, 3)
        force = atoms.get_forces().reshape(x.shape)
        size = np.abs(_centred(x)).max(axis=(1, 2))
        # a comparison with nan is false, so that nan ends a run too
        is_right = (np.abs(force).max(axis=(1, 2)) < WRONG_FORCE) & (size < largest)
        return np.where(is_right[:, None, None], force, 0) / masses, is_right

    a, _ = acceleration()
    # half a kick, half a drift, noise, and the halves in reverse (BAOAB)
    for k in range(DYNAMICS_STEPS):
        v += 0.5 * step * a
        x += 0.5 * step * v
        v = keep * v + np.sqrt(1 - keep**2) * width * rng.normal(size=x.shape)
        x += 0.5 * step * v
        x[~is_running] = began[
            ~is_running
        ]  # a copy that has ended stays where it began
        a, is_right = acceleration()
        v += 0.5 * step * a
        ended = is_running & ~is_right
        lives[ended] = k * TIME_STEP / 1000
        is_running &= is_right
        if not is_running.any():
            break
    return lives.tolist()


def _centred(x):
    return x - x.mean(axis=1, keepdims=True)


if __name__ == "__main__":
    main()
