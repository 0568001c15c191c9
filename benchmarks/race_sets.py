"""Sets of frames for race.py, with frames to test on that are not near copies of them.

They are made from clones of public repositories, beside each other in one folder:

git clone https://github.com/davkovacs/BOTNet-datasets
git clone https://github.com/materialsvirtuallab/mlearn
git clone https://github.com/materialsvirtuallab/snap
git clone https://github.com/deepmodeling/deepmd-kit
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from ase import Atoms
from ase.build import fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read
from ase.stress import full_3x3_to_voigt_6_stress
from ase.units import GPa
from common import ROOT

Parts: TypeAlias = dict[str, list[Atoms]]
"""Frames by the name of the part: ``train``, and the parts that models are tested on."""

KBAR = 0.1 * GPa
FROM_VASP = [
    0,
    1,
    2,
    4,
    5,
    3,
]  # ASE has xx, yy, zz, yz, xz, xy and VASP xx, yy, zz, xy, yz, zx
PAIRS = ("MoTa", "MoW", "NbMo", "NbTa", "NbW", "TaW")
METALS = ("Mo", "Nb", "Ta", "W")


def _acac(sources: Path) -> Parts:
    """Return acetylacetone by DFT at 300 K; tests: 300 K, 600 K, and a bond that is turned."""
    folder = sources / "BOTNet-datasets" / "dataset_acac"
    files = {"train": "train_300K", "300K": "test_MD_300K", "600K": "test_MD_600K"}
    files["dihedral"] = "test_dihedral"
    return {part: read(folder / f"{name}.xyz", ":") for part, name in files.items()}


def _bpa(sources: Path) -> Parts:
    """Return 3BPA by DFT at 300 K; tests: 300, 600 and 1200 K.

    The tests are the frames of the other training set of the publication (Kovacs et al., J. Chem.
    Theory Comput. 17, 7696, 2021), its parts in the order of their temperatures.
    """
    folder = sources / "BOTNet-datasets" / "dataset_3BPA"
    train = read(folder / "train_300K.xyz", ":")
    mixed = read(folder / "train_mixedT.xyz", ":")
    energies = {atoms.get_potential_energy() for atoms in train}
    cold = [a for a in mixed[:167] if a.get_potential_energy() not in energies]
    hotter = {"600K": mixed[167:334], "1200K": mixed[334:]}
    return {"train": train, "300K": cold, **hotter}


def _molecules(_sources: Path) -> Parts:
    """Return eight molecules by GFN2-xTB at 300 to 600 K; test: other trajectories of them."""
    data = ROOT / "examples" / "molecules" / "data"
    return {part: _systems(data.glob(f"{part}_*")) for part in ("train", "validation")}


def _water(_sources: Path) -> Parts:
    """Return water by GFN1-xTB, 96 atoms, 300 to 400 K; tests: 450 and 500 K, and all."""
    data = ROOT / "examples" / "water" / "data"
    train = [data / f"train_{kelvin}K" for kelvin in (300, 350, 400)]
    hotter = [data / f"train_{kelvin}K" for kelvin in (450, 500)]
    return {
        "train": _systems(train),
        "all": _systems([data / "validation"]),
        "hotter": _systems(hotter),
    }


def _water_dft(sources: Path) -> Parts:
    """Return water by DFT, 192 atoms, without virials; test: the last of its four systems."""
    data = sources / "deepmd-kit" / "examples" / "water" / "data"
    return {
        "train": _systems([data / f"data_{k}" for k in range(3)]),
        "test": _systems([data / "data_3"]),
    }


def _mlearn(sources: Path, element: str) -> Parts:
    """Return crystals, vacancies, surfaces and melts by DFT; test: that of the publication."""
    folder = sources / "mlearn" / "data" / element
    files = {"train": "training", "test": "test"}
    return {
        part: list(documents(folder / f"{name}.json")) for part, name in files.items()
    }


def _alloys(sources: Path) -> Parts:
    """Return Nb, Mo, Ta, W and their pairs by DFT; tests: pairs, and alloys of all four."""
    folder = sources / "snap" / "NbMoTaW" / "training"
    train = [f"{pair}_SS" for pair in PAIRS] + [f"{metal}_AIMD" for metal in METALS]
    return {
        "train": [
            atoms
            for name in train
            for atoms in list(documents(folder / f"{name}.json"))[::6]
        ],
        "pairs": [
            atoms for pair in PAIRS for atoms in documents(folder / f"{pair}_Test.json")
        ],
        "four": list(documents(folder / "Multinary_Test.json")),
    }


def _slabs(_sources: Path) -> Parts:
    """Return slabs of Cu, Ni and Au with vacancies by EMT; test: larger displacements."""
    rng = np.random.default_rng(1)
    return {
        "train": [_slab(rng, k, 0.12) for k in range(300)],
        "same": [_slab(rng, k, 0.12) for k in range(60)],
        "larger": [_slab(rng, k, 0.24) for k in range(60)],
    }


def _slab(rng: np.random.Generator, k: int, displacement: float) -> Atoms:
    """Return one slab with atoms that are displaced by this standard deviation, angstrom."""
    size = [(2, 2, 4), (3, 3, 3), (2, 3, 5)][k % 3]
    atoms = fcc111("Cu", size, a=3.8, vacuum=rng.uniform(5, 8))
    atoms.pbc, atoms.info = True, {}
    atoms.symbols = rng.choice(["Cu", "Ni", "Au"], len(atoms))
    if k % 2:
        del atoms[int(rng.integers(len(atoms)))]
    strain = np.diag([*rng.uniform(0.97, 1.03, 2), 1.0])
    atoms.set_cell(atoms.cell @ strain, scale_atoms=True)
    atoms.rattle(displacement, rng=rng)
    atoms.calc = EMT()
    labels = {
        "energy": atoms.get_potential_energy(),
        "forces": atoms.get_forces(),
        "stress": atoms.get_stress(),
    }
    atoms.calc = SinglePointCalculator(atoms, **labels)
    return atoms


def _systems(folders: Iterable[Path]) -> list[Atoms]:
    """Return the frames of systems of DeePMD-kit."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "frames.extxyz"
        words = [
            sys.executable,
            "-m",
            "deepmd_ema",
            "convert",
            *map(str, sorted(folders)),
        ]
        subprocess.run([*words, str(file)], check=True, capture_output=True)
        frames = read(file, ":")
    for atoms in frames:
        if "virial" in atoms.info:
            stress = -np.array(atoms.info["virial"]) / atoms.get_volume()
            atoms.calc.results["stress"] = full_3x3_to_voigt_6_stress(stress)
    return frames


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
        pressure = np.array(
            outputs.get("stress", outputs.get("virial_stress")), dtype=float
        )
        labels = {
            "energy": outputs["energy"],
            "forces": outputs["forces"],
            "stress": -KBAR * pressure[FROM_VASP],
        }
        atoms.calc = SinglePointCalculator(atoms, **labels)
        yield atoms


SETS: dict[str, Callable[[Path], Parts]] = {
    "acac": _acac,
    "3BPA": _bpa,
    "molecules": _molecules,
    "water": _water,
    "water_dft": _water_dft,
    "Si": lambda sources: _mlearn(sources, "Si"),
    "Mo": lambda sources: _mlearn(sources, "Mo"),
    "alloys": _alloys,
    "slabs": _slabs,
}
"""Functions that return a set, given the folder of the clones."""
