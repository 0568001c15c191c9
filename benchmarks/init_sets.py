"""Training sets of different kinds for the benchmarks of ``dp-ema init``.

They are made from clones of public repositories, beside each other in one folder:

git clone https://github.com/davkovacs/BOTNet-datasets
git clone https://github.com/materialsvirtuallab/mlearn
git clone https://github.com/materialsvirtuallab/snap
git clone https://github.com/deepmodeling/deepmd-kit
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read, write
from ase.units import GPa
from common import ROOT

KBAR = 0.1 * GPa
FROM_VASP = [0, 1, 2, 4, 5, 3]  # ASE has xx, yy, zz, yz, xz, xy and VASP xx, yy, zz, xy, yz, zx
PAIRS = ("MoTa", "MoW", "NbMo", "NbTa", "NbW", "TaW")
METALS = ("Mo", "Nb", "Ta", "W")


@dataclass(frozen=True)
class TrainingSet:
    """One training set.

    Attributes:
        about: system and source of the labels.
        kind: what ``init`` is expected to find.
        frames: given the folder of the clones, the frames, or the path of data that are there
            already.
    """

    about: str
    kind: str
    frames: Callable[[Path], Sequence[Atoms] | Path]

    def write(self, sources: Path, folder: Path) -> str:
        """Return the path of the data, written into a folder where they are frames."""
        found = self.frames(sources)
        if isinstance(found, Path):
            return str(found)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / "data.extxyz", found)
        return str(folder / "data.extxyz")


def documents(file: Path) -> Iterator[Atoms]:
    """Yield frames of a file of mlearn or snap: pymatgen's structures; stresses in kbar, positive
    under compression.
    """
    for document in json.loads(file.read_text()):
        sites, outputs = document["structure"]["sites"], document["outputs"]
        atoms = Atoms(
            [site["species"][0]["element"] for site in sites],
            positions=[site["xyz"] for site in sites],
            cell=document["structure"]["lattice"]["matrix"],
            pbc=True,
        )
        pressure = np.array(outputs.get("stress", outputs.get("virial_stress")), dtype=float)
        labels = {
            "energy": outputs["energy"],
            "forces": outputs["forces"],
            "stress": -KBAR * pressure[FROM_VASP],
        }
        atoms.calc = SinglePointCalculator(atoms, **labels)
        yield atoms


def _alloys(sources: Path) -> list[Atoms]:
    folder = sources / "snap/NbMoTaW/training"
    pairs = [atoms for pair in PAIRS for atoms in list(documents(folder / f"{pair}_SS.json"))[::6]]
    return [*pairs, *documents(folder / "Multinary_Test.json")]


def _surfaces(sources: Path) -> list[Atoms]:
    files = [f"snap/NbMoTaW/training/{metal}_Surface.json" for metal in METALS]
    files += [f"snap/{metal}/training/Surface.json" for metal in ("Ni", "Cu")]
    return [atoms for file in files for atoms in documents(sources / file)]


def _slabs(_sources: Path) -> list[Atoms]:
    rng, frames = np.random.default_rng(1), []
    for k in range(300):
        atoms = fcc111(
            "Cu", [(2, 2, 4), (3, 3, 3), (2, 3, 5)][k % 3], a=3.8, vacuum=rng.uniform(5, 8)
        )
        atoms.pbc, atoms.info = True, {}
        atoms.symbols = rng.choice(["Cu", "Ni", "Au"], len(atoms))
        if k % 2:
            del atoms[int(rng.integers(len(atoms)))]
        strain = np.diag([*rng.uniform(0.97, 1.03, 2), 1.0])
        atoms.set_cell(atoms.cell @ strain, scale_atoms=True)
        atoms.rattle(0.12, rng=rng)
        atoms.calc = EMT()
        labels = {
            "energy": atoms.get_potential_energy(),
            "forces": atoms.get_forces(),
            "stress": atoms.get_stress(),
        }
        atoms.calc = SinglePointCalculator(atoms, **labels)
        frames.append(atoms)
    return frames


def _ten_elements(sources: Path) -> list[Atoms]:
    files = [f"mlearn/data/{element}/training.json" for element in ("Si", "Ge", "Li")]
    files += [f"snap/NbMoTaW/training/{metal}_AIMD.json" for metal in METALS]
    files += [
        f"snap/{name}.json"
        for name in ("Cu/training/AIMD", "Ni-Mo/training/Ni3Mo_Elastic", "Li3N/training/Elastic")
    ]
    frames = [list(documents(sources / file)) for file in files]
    return [atoms for some in frames for atoms in some[:: max(1, len(some) // 40)]]


def _one_frame(sources: Path) -> list[Atoms]:
    return list(documents(sources / "mlearn/data/Si/training.json"))[:1]


SETS = {
    "acac": TrainingSet(
        "acetylacetone, one molecule, DFT",
        "molecules",
        lambda sources: read(sources / "BOTNet-datasets/dataset_acac/train_300K.xyz", ":"),
    ),
    "molecules": TrainingSet(
        "eight molecules without a cell, GFN2-xTB",
        "molecules",
        lambda _: ROOT / "examples/molecules/data",
    ),
    "water": TrainingSet(
        "water without virials, 192 atoms, DFT",
        "liquid",
        lambda sources: sources / "deepmd-kit/examples/water/data/data_1",
    ),
    "water_virial": TrainingSet(
        "water with virials, 96 atoms, GFN1-xTB", "liquid", lambda _: ROOT / "examples/water/data"
    ),
    "Si": TrainingSet(
        "silicon: crystal, MD, vacancies, surfaces; DFT",
        "solid",
        lambda sources: list(documents(sources / "mlearn/data/Si/training.json")),
    ),
    "Mo": TrainingSet(
        "molybdenum: crystal, MD, vacancies, surfaces; DFT",
        "solid",
        lambda sources: list(documents(sources / "mlearn/data/Mo/training.json")),
    ),
    "alloys": TrainingSet("alloys of Nb, Mo, Ta, W; DFT", "solid", _alloys),
    "slabs": TrainingSet("slabs of Cu, Ni, Au with vacancies, EMT of ASE", "solid", _slabs),
    "surfaces": TrainingSet("relaxed surfaces of Nb, Mo, Ta, W, Ni, Cu; DFT", "solid", _surfaces),
    "one_frame": TrainingSet(
        "one frame of silicon; errors on this frame; DFT", "solid", _one_frame
    ),
    "ten_elements": TrainingSet(
        "Si, Ge, Li, Li3N, Ni3Mo, Nb, Mo, Ta, W, Cu; DFT", "solid", _ten_elements
    ),
}
