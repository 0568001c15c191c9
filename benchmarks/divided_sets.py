"""Training sets with the rest of their frames in two halves: one half chooses, the other one reports.

Sets that are not examples of this project are made of clones of public repositories; ``init_sets.py`` says which.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from init_sets import SETS as PUBLIC

CHOOSE, TEST = "choose", "test"
COPPER = (4, 10, 16, 22, 28)  # atoms of 32
SAME_TRAJECTORY = {"water": 6, "acac": 50}  # frames that follow each other go to the same half
ONE_IN = 5  # frames of the public sets of crystals that are not trained on


@dataclass(frozen=True)
class DividedSet:
    """One set.

    Attributes:
        about: system and source of the labels.
        elements: the type map.
        input: whose loss and batches are taken, an example of this project.
        batch_size: frames per batch.
        train: names of the training systems.
        write: given the folder of the clones and a folder, writes ``train``, ``choose`` and ``test`` into it, each a
            folder of systems.
    """

    about: str
    elements: tuple[str, ...]
    input: str
    batch_size: int
    train: tuple[str, ...]
    write: Callable[[Path, Path], None]

    def make(self, sources: Path, folder: Path) -> None:
        """Write the systems into a folder if they are not there."""
        if folder.exists():
            return
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        self.write(sources, part)
        part.rename(folder)


def systems_in(folder: Path) -> list[str]:
    """Return the systems of a part of a set."""
    return sorted(str(system) for system in folder.iterdir())


def _divide_example(name: str, folder: Path) -> None:
    """Link the training systems of an example, and divide its validation frames."""
    source = common.ROOT / "examples" / name / "data"
    (folder / "train").mkdir()
    for system in sorted(path for path in source.iterdir() if path.is_dir()):
        if system.name.startswith("train"):
            (folder / "train" / system.name).symlink_to(system.resolve())
            continue
        for k, part in enumerate((CHOOSE, TEST)):
            shutil.copytree(system, folder / part / system.name)
            for file in (folder / part / system.name / "set.000").glob("*.npy"):
                values = np.load(file)
                np.save(file, values[np.arange(len(values)) // SAME_TRAJECTORY.get(name, 1) % 2 == k])


def _write_alloy(_sources: Path, folder: Path) -> None:
    """Write frames of 32 atoms of Cu and Ni on disordered fcc sites, displaced and strained, labelled by EMT."""
    from ase import Atoms
    from ase.build import bulk
    from ase.calculators.emt import EMT

    rng = np.random.default_rng(20251122)
    sites = bulk("Cu", cubic=True, a=1.0).repeat(2)
    for part, count in (("train", 60), (CHOOSE, 10), (TEST, 20)):
        for copper in COPPER:
            kinds = np.repeat([0, 1], [32 - copper, copper])
            constant = 3.52 + 0.09 * copper / 32  # angstrom, between Ni and Cu
            found: dict[str, list[Any]] = {"coord": [], "box": [], "energy": [], "force": []}
            for _ in range(count):
                cell = sites.cell.array * constant @ (np.eye(3) + rng.uniform(-0.03, 0.03, (3, 3)))
                coord = rng.permutation(sites.get_scaled_positions()) @ cell
                coord += rng.uniform(0.02, 0.18) * rng.normal(size=coord.shape)
                frame = Atoms([("Ni", "Cu")[kind] for kind in kinds], coord, cell=cell, pbc=True)
                frame.calc = EMT()
                labels = {"energy": frame.get_potential_energy(), "force": frame.get_forces()}
                for name, value in {"coord": coord, "box": cell, **labels}.items():
                    found[name].append(value)
            arrays = {name: np.array(v) for name, v in found.items()}
            common.write_system(folder / part / str(copper), kinds, ["Ni", "Cu"], arrays)


def _write_acac(sources: Path, folder: Path) -> None:
    """Write the training frames, at 300 K, and halves of the dynamics at 300 K."""
    from ase.io import read

    data = sources / "BOTNet-datasets/dataset_acac"
    dynamics = read(data / "test_MD_300K.xyz", ":")
    halves = [[atoms for n, atoms in enumerate(dynamics) if n // SAME_TRAJECTORY["acac"] % 2 == k] for k in (0, 1)]
    _write_frames(folder, read(data / "train_300K.xyz", ":"), *halves)


def _divide_public(name: str, sources: Path, folder: Path) -> None:
    """Divide a set of ``init_sets.py``; of five frames, four are trained on."""
    frames = PUBLIC[name].frames(sources)
    kept = [n for n in range(len(frames)) if n % ONE_IN]
    others = [n for n in range(len(frames)) if not n % ONE_IN]
    _write_frames(folder, *([frames[n] for n in numbers] for numbers in (kept, others[::2], others[1::2])))


def _write_frames(folder: Path, train: list[Any], choose: list[Any], test: list[Any]) -> None:
    from ase.io import write

    for part, frames in (("train", train), (CHOOSE, choose), (TEST, test)):
        (folder / part).mkdir()
        write(folder / part / "data.extxyz", frames)


def loss_and_model(name: str) -> dict[str, Any]:
    """Return the input whose loss a set has, an example of this project, with the elements of the set."""
    given = SETS[name]
    config = json.loads((common.ROOT / "examples" / given.input / "input.json").read_text())
    config["model"]["type_map"] = list(given.elements)
    return config


SETS = {
    "water": DividedSet(
        about="water, GFN1-xTB",
        elements=("O", "H"),
        input="water",
        batch_size=1,
        train=tuple(f"train_{temperature}K" for temperature in (300, 350, 400, 450, 500)),
        write=lambda _, folder: _divide_example("water", folder),
    ),
    "molecules": DividedSet(
        about="eight molecules, GFN2-xTB",
        elements=("C", "H", "N", "O"),
        input="molecules",
        batch_size=4,
        train=("train_small", "train_large"),
        write=lambda _, folder: _divide_example("molecules", folder),
    ),
    "alloy": DividedSet(
        about="Ni and Cu, EMT of ASE",
        elements=("Ni", "Cu"),
        input="water",
        batch_size=2,
        train=tuple(map(str, COPPER)),
        write=_write_alloy,
    ),
    "acac": DividedSet(
        about="acetylacetone, DFT",
        elements=("H", "C", "O"),
        input="molecules",
        batch_size=4,
        train=("data.extxyz",),
        write=_write_acac,
    ),
    "alloys": DividedSet(
        about="alloys of Nb, Mo, Ta, W, DFT",
        elements=("Nb", "Mo", "Ta", "W"),
        input="water",
        batch_size=2,
        train=("data.extxyz",),
        write=partial(_divide_public, "alloys"),
    ),
    "Mo": DividedSet(
        about="molybdenum, DFT",
        elements=("Mo",),
        input="water",
        batch_size=1,
        train=("data.extxyz",),
        write=partial(_divide_public, "Mo"),
    ),
    "Si": DividedSet(
        about="silicon, DFT",
        elements=("Si",),
        input="water",
        batch_size=1,
        train=("data.extxyz",),
        write=partial(_divide_public, "Si"),
    ),
}
