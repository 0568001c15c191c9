"""Recipes of sets that were made after the check of units: data that it was not made with.

Salts and noble gases have pair potentials with published parameters; the rest is EMT and Tersoff of ASE, and xTB.
"""

# ruff: noqa: TID253 (imported where sets are made, which needs ASE)

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from ase import Atoms
from ase.build import add_adsorbate, bulk, fcc111, molecule
from ase.calculators.calculator import Calculator, all_changes
from ase.calculators.emt import EMT
from ase.calculators.lj import LennardJones
from ase.calculators.tersoff import Tersoff, TersoffParameters
from ase.data.s22 import create_s22_system

from deepmd_ema.geometry import find_pairs

COULOMB = 14.39964  # eV angstrom
# eV and angstrom, of A exp((sigma - r) / rho) - C / r^6 - D / r^8 + q q' / r for ++, +- and --
# NaCl: Tosi and Fumi 1964, MgO: Lewis and Catlow 1985
SALTS: dict[str, tuple[tuple[str, str, float], tuple[tuple[float, ...], ...]]] = {
    "NaCl": (
        ("Na", "Cl", 1.0),
        (
            (0.2637, 2.340, 0.317, 1.05, 0.499),
            (0.2110, 2.755, 0.317, 6.99, 8.676),
            (0.1582, 3.170, 0.317, 72.4, 145.4),
        ),
    ),
    "MgO": (("Mg", "O", 2.0), ((0, 0, 1, 0, 0), (1428.5, 0, 0.2945, 0, 0), (22764.0, 0, 0.149, 27.88, 0))),
}
# Tersoff 1988, Si(C)
TERSOFF = TersoffParameters(
    3, 1, 0, 1.0039e5, 16.217, -0.59825, 0.78734, 1.1e-6, 1.73222, 471.18, 2.85, 0.15, 2.4799, 1830.8
)


class Salt(Calculator):
    """A Born-Mayer-Huggins potential with the damped, shifted Coulomb sum of Fennell and Gezelter (2006)."""

    implemented_properties = ["energy", "forces", "stress"]  # noqa: RUF012 (of the base class)

    def __init__(self, name: str, rcut: float = 9.0, damping: float = 0.25) -> None:
        super().__init__()
        (self._cation, _, self._charge), self._table = SALTS[name]
        self._rcut, self._damping = rcut, damping

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        """Fill in energy, forces and stress."""
        super().calculate(atoms, properties, system_changes)
        is_anion = np.array([symbol != self._cation for symbol in atoms.symbols]).astype(int)
        coord, box = atoms.get_positions(), atoms.cell.array
        pairs = find_pairs(coord, box, self._rcut)
        vector = pairs.vector(coord, box)
        r = np.linalg.norm(vector, axis=1)
        kind = is_anion[pairs.i] + is_anion[pairs.j]
        a, sigma, rho, c, d = np.array(self._table)[kind].T
        born = a * np.exp((sigma - r) / rho)
        charges = COULOMB * self._charge**2 * np.where(kind == 1, -1, 1)

        def coulomb(x: Any) -> tuple[Any, Any]:
            value = np.vectorize(math.erfc)(self._damping * x) / x
            return value, -value / x - 2 * self._damping / np.sqrt(np.pi) * np.exp(-((self._damping * x) ** 2)) / x

        (value, slope), (end, end_slope) = coulomb(r), coulomb(self._rcut)
        energy = born - c / r**6 - d / r**8 + charges * (value - end - end_slope * (r - self._rcut))
        slope = -born / rho + 6 * c / r**7 + 8 * d / r**9 + charges * (slope - end_slope)
        pull = (slope / r)[:, None] * vector
        forces = np.zeros_like(coord)
        np.add.at(forces, pairs.i, pull)
        stress = 0.5 * (vector.T @ pull) / atoms.get_volume()
        self.results = {
            "energy": 0.5 * energy.sum(),
            "forces": forces,
            "stress": stress[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]],
        }


class Recipe(NamedTuple):
    """How a set is made; in independent frames atoms are off their sites, unless ``independent`` says otherwise."""

    atoms: Callable[[], Any]
    calculator: Callable[[], Any]
    temperature: float
    step: float = 1.0  # fs
    independent: Callable[[Any, float, int], Iterator[Any]] | None = None


def fluid(name: str, num: int, spacing: float) -> Any:
    """Return molecules on a cubic grid, turned at random."""
    rng = np.random.default_rng(11)
    one = molecule(name)
    side = round(num ** (1 / 3) + 0.49)
    parts = Atoms(cell=[side * spacing] * 3, pbc=True)
    for place in list(np.ndindex(side, side, side))[:num]:
        part = one.copy()
        part.euler_rotate(*rng.uniform(0, 360, 3), center="COM")
        part.translate(np.array(place) * spacing - part.get_center_of_mass())
        parts += part
    parts.set_array("molecule", np.repeat(np.arange(num), len(one)))
    return parts


def turned(atoms: Any, temperature: float, seed: int, num: int = 30) -> Iterator[Any]:
    """Yield molecules of a fluid, each turned anew in every frame and its atoms off their places."""
    rng = np.random.default_rng(seed)
    start, owner = atoms.get_positions(), atoms.get_array("molecule")
    for _ in range(num):
        coord = start.copy()
        for k in range(owner.max() + 1):
            middle = start[owner == k].mean(axis=0)
            turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            coord[owner == k] = (start[owner == k] - middle) @ turn + middle + rng.normal(0, 0.15, 3)
        atoms.set_positions(coord + rng.normal(0, 0.04, coord.shape))
        yield atoms


def exchange(atoms: Any, temperature: float, seed: int, num: int = 30) -> Iterator[Any]:
    """Yield CH3Cl with a fluorine on its other side, both carbon-halogen bonds from short to broken."""
    rng = np.random.default_rng(seed)
    start = atoms.get_positions()
    carbon, chlorine, fluorine = (atoms.symbols.search(name)[0] for name in ("C", "Cl", "F"))
    for _ in range(num):
        coord = start + rng.normal(0, 0.05, start.shape)
        for k, length in ((chlorine, rng.uniform(1.6, 3.5)), (fluorine, rng.uniform(1.3, 3.5))):
            unit = start[k] - start[carbon]
            coord[k] = coord[carbon] + unit / np.linalg.norm(unit) * length + rng.normal(0, 0.05, 3)
        atoms.set_positions(coord)
        yield atoms


def new_sets() -> dict[str, Recipe]:
    """Return the recipes by name."""

    def xtb(method: str, **more: Any) -> Callable[[], Any]:
        def calculator() -> Any:
            from tblite.ase import TBLite  # not needed by the other sets

            return TBLite(method=method, verbosity=0, electronic_temperature=1000, **more)

        return calculator

    def alloy(a: str, b: str, share: float) -> Any:
        atoms = bulk(a, cubic=True) * (2, 2, 2)
        num = round(share * len(atoms))
        atoms.set_chemical_symbols(np.random.default_rng(9).permutation([b] * num + [a] * (len(atoms) - num)).tolist())
        return atoms

    def surface() -> Any:
        slab = fcc111("Pt", (3, 3, 3), vacuum=8.0, periodic=True)
        for offset, height in ((0, 1.2), (1, 1.5)):
            add_adsorbate(slab, "O", height, "fcc", offset=(offset, offset))
        return slab

    def reactants() -> Any:
        atoms = molecule("CH3Cl")
        carbon, chlorine = atoms.positions[atoms.symbols.search("C")[0]], atoms.positions[atoms.symbols.search("Cl")[0]]
        return atoms + Atoms("F", [carbon - 2.2 * (chlorine - carbon) / np.linalg.norm(chlorine - carbon)])

    def noble(element: str, epsilon: float, sigma: float) -> Callable[[], Any]:
        return partial(LennardJones, epsilon=epsilon, sigma=sigma, rc=2.7 * sigma, smooth=True)

    salt = {
        n: (lambda n=n, a=a: bulk(n, "rocksalt", a=a, cubic=True) * (2, 2, 2))
        for n, a in (("NaCl", 5.64), ("MgO", 4.21))
    }
    return {
        "NaCl (Fumi-Tosi)": Recipe(salt["NaCl"], partial(Salt, "NaCl"), 700, 3.0),
        "NaCl 2,500 K (Fumi-Tosi)": Recipe(salt["NaCl"], partial(Salt, "NaCl"), 2500, 3.0),
        "MgO (Lewis-Catlow)": Recipe(salt["MgO"], partial(Salt, "MgO"), 1200, 2.0),
        "Si 3,000 K (Tersoff)": Recipe(
            lambda: bulk("Si", "diamond", a=5.43, cubic=True) * (2, 2, 2),
            lambda: Tersoff({("Si", "Si", "Si"): TERSOFF}),
            3000,
            2.0,
        ),
        "Ar (Lennard-Jones)": Recipe(
            lambda: bulk("Ar", cubic=True, a=5.4) * (2, 2, 2), noble("Ar", 0.01032, 3.405), 90, 5.0
        ),
        "He (Lennard-Jones)": Recipe(
            lambda: bulk("He", "fcc", cubic=True, a=4.4) * (2, 2, 2), noble("He", 0.000881, 2.556), 30, 3.0
        ),
        "Ni3Al (EMT)": Recipe(lambda: alloy("Ni", "Al", 0.25), EMT, 800, 2.0),
        "PtCu 2,000 K (EMT)": Recipe(lambda: alloy("Pt", "Cu", 0.5), EMT, 2000, 3.0),
        "O on Pt(111) (EMT)": Recipe(surface, EMT, 400),
        "H2 fluid": Recipe(lambda: fluid("H2", 8, 3.0), xtb("GFN1-xTB"), 600, 1.0, turned),
        "ammonia": Recipe(lambda: fluid("NH3", 8, 3.5), xtb("GFN1-xTB"), 300, 1.0, turned),
        "amide dimer": Recipe(lambda: create_s22_system("Methyl_amide_dimer_alpha"), xtb("GFN2-xTB"), 400),
        "CH3Cl + F-": Recipe(reactants, xtb("GFN2-xTB", charge=-1), 800, 1.0, exchange),
    }
