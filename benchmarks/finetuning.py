"""Errors of a model that is fine-tuned to labels of another method, on its new and on its old data.

A model of small molecules learns energies and forces of GFN2-xTB, which tblite gives here. Then it
is fine-tuned to acetylacetone with PBE labels, from a clone of
https://github.com/davkovacs/BOTNet-datasets: with all weights, with its fitting network alone, with
a lower rate of the descriptor, and with old frames in some of the steps; beside training from
scratch for as many steps. Inputs are those of ``dp-ema init``, without validation frames.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ase import Atoms, units
from ase.build import molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from common import publish, statistics

from deepmd_ema.cli import main as dp_ema
from deepmd_ema.infer.evaluate import measure

# those of ASE with C, H and O that are like parts of acetylacetone, or not
MOLECULES = (
    "CH3OH",
    "HCOOH",
    "CH3COOH",
    "CH3CH2OH",
    "CH3OCH3",
    "C3H8",
    "CH3CHO",
    "CH3COCH3",
    "H2CCO",
    "HCOOCH3",
    "C2H4",
    "C2H6",
    "C6H6",
    "C4H4O",
    "CH3CH2OCH3",
    "isobutene",
    "trans-butane",
    "H2CO",
    "OCHCHO",
)
TEMPERATURES = (400, 900)  # K
FRAMES, EQUILIBRATION, SPACING = (
    30,
    200,
    25,
)  # of each molecule and temperature; steps of 1 fs
NUM_OLD = 1020  # the others are the test of the old data
WAYS = ("scratch", "all", "fitting", "replay", "low")
SIZES, SEEDS = (10, 30, 100, 300), (0, 1, 2)


def label_old(folder: Path) -> None:
    """Write frames of molecules along dynamics with GFN2-xTB."""
    from tblite.ase import TBLite

    rng, frames = np.random.default_rng(7), list[Atoms]()
    for name in MOLECULES:
        for temperature in TEMPERATURES:
            atoms = molecule(name)
            atoms.calc = TBLite(method="GFN2-xTB", verbosity=0, accuracy=0.1)
            MaxwellBoltzmannDistribution(atoms, temperature_K=2 * temperature, rng=rng)
            dynamics = Langevin(
                atoms,
                units.fs,
                temperature_K=temperature,
                friction=0.02 / units.fs,
                rng=rng,
            )
            dynamics.run(EQUILIBRATION)
            for _ in range(FRAMES):
                dynamics.run(SPACING)
                labels = {
                    "energy": atoms.get_potential_energy(),
                    "forces": atoms.get_forces(),
                }
                frames.append(atoms.copy())
                frames[-1].calc = SinglePointCalculator(frames[-1], **labels)
    order = rng.permutation(len(frames))
    write(folder / "old.extxyz", [frames[k] for k in order[:NUM_OLD]])
    write(folder / "old_test.extxyz", [frames[k] for k in order[NUM_OLD:]])


def take_new(folder: Path, clone: Path) -> None:
    """Write training sets of several sizes and seeds, and a quarter of the test frames at 300 and
    at 600 K.
    """
    frames, rng = (
        read(clone / "dataset_acac/train_300K.xyz", ":"),
        np.random.default_rng(3),
    )
    for seed in SEEDS:
        order = rng.permutation(len(frames))
        for size in SIZES:
            write(
                folder / f"new_{size}_{seed}.extxyz", [frames[k] for k in order[:size]]
            )
    for temperature in (300, 600):
        tested = read(clone / f"dataset_acac/test_MD_{temperature}K.xyz", "::4")
        write(folder / f"test_{temperature}.extxyz", tested)


def run(
    folder: Path, words: list[str], start: list[str], seed: int, change: dict[str, Any]
) -> Path:
    """Train in a folder with the input of ``dp-ema init`` and return the averaged weights, which
    are kept.
    """
    if found := list(folder.glob("model_ema.ckpt-*.pt")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    target = str(folder / "proposed.yaml")
    Path(target).unlink(missing_ok=True)
    assert dp_ema(["init", *words, "-o", target]) == 0
    values = yaml.safe_load(Path(target).read_text())
    training = values["training"]
    for section in (training, *training.get("data_dict", {}).values()):
        section.pop("validation_fraction", None)
    values.pop("validating", None)
    training |= {
        "seed": seed,
        "save_freq": training["numb_steps"],
        "save_dir": str(folder),
    }
    training["disp_file"] = str(folder / "lcurve.out")
    values["optimizer"] |= change
    (folder / "input.yaml").write_text(yaml.safe_dump(values))
    assert (
        dp_ema(
            [
                "train",
                str(folder / "input.yaml"),
                *start,
                "-o",
                str(folder / "out.json"),
            ]
        )
        == 0
    )
    return next(folder.glob("model_ema.ckpt-*.pt"))


def errors(
    file: Path, data: Path, head: str | None, is_shifted: bool = False
) -> tuple[float, float]:
    """Return the RMSE of energies, meV/atom, and of forces, meV/angstrom.

    Args:
        file: the model.
        data: frames.
        head: which model of the file.
        is_shifted: whether the model has energies of another method, so that a shift of each
            element is no error.
    """
    frames = measure(file, [str(data)], head=head).frames
    energy = np.array(
        [(f.label["energy"] - f.prediction["energy"]) / f.num_atoms for f in frames]
    ).ravel()
    if is_shifted:
        every = [atoms.get_chemical_symbols() for atoms in read(data, ":")]
        shares = np.array(
            [
                [symbols.count(name) / len(symbols) for name in "HCO"]
                for symbols in every
            ]
        )
        energy = energy - shares @ np.linalg.lstsq(shares, energy, rcond=None)[0]
    force = np.concatenate(
        [np.ravel(f.label["force"] - f.prediction["force"]) for f in frames]
    )
    rms = [1000 * float(np.sqrt(np.mean(values**2))) for values in (energy, force)]
    return rms[0], rms[1]


def measure_way(
    work: Path, base: Path, way: str, size: int, seed: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Return the errors of one run by the data on which they are."""
    words = [str(work / f"new_{size}_{seed}.extxyz"), "--steps", str(steps)]
    start = [] if way == "scratch" else ["--finetune", str(base)]
    words += start or ["--model", "dpa4c"]
    words += ["--train", "fitting"] * (way == "fitting") + [
        "--replay",
        str(work / "old.extxyz"),
    ] * (way == "replay")
    change = (
        {"groups": [{"pattern": "*descriptor.*", "lr_scale": 0.1}]}
        if way == "low"
        else {}
    )
    model = run(work / f"{way}_{size}_{seed}_{steps}", words, start, seed + 1, change)
    is_replay = way == "replay"
    found = {
        f"{temperature} K": errors(
            model, work / f"test_{temperature}.extxyz", "new" if is_replay else None
        )
        for temperature in (300, 600)
    }
    old = errors(
        model, work / "old_test.extxyz", "old" if is_replay else None, is_shifted=True
    )
    return {**found, "old": old}


def main() -> None:
    """Print a table with the median of the seeds and their range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clone", type=Path, required=True, help="of BOTNet-datasets")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the runs, which are kept"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--output", type=Path, help="also write the page here")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "old.extxyz").exists():
        label_old(work)
    take_new(work, options.clone)
    words = [str(work / "old.extxyz"), "--model", "dpa4c", "--steps", "12000"]
    base = run(work / "base", words, [], 1, {})
    lines = ["| way | frames | 300 K | 600 K | old |", "|---|---|---|---|---|"]
    for way in options.ways:
        for size in SIZES:
            found = [
                measure_way(work, base, way, size, seed, options.steps)
                for seed in SEEDS
            ]
            cells = list[str]()
            for data in found[0]:
                parts = zip(*(one[data] for one in found))
                cells.append(
                    " / ".join(
                        f"{statistics.median(v):.3g} ({min(v):.3g}-{max(v):.3g})"
                        for v in parts
                    )
                )
            lines.append(f"| {way} | {size} | {' | '.join(cells)} |")
    publish("\n".join(lines), options.output)


if __name__ == "__main__":
    main()
