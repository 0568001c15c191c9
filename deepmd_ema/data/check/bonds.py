"""Distances of nearest neighbors in covalent radii, and types in another order than positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from deepmd_ema.config.labels import FORCE
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import Array, find_pairs_once
from deepmd_ema.text import first_few
from deepmd_ema.utils import even_places

SHORT, LONG = (
    0.65,
    1.8,
)  # bounds of the distance of nearest neighbors, in sums of covalent radii
REACH = 2.6  # sums of covalent radii within which neighbors are searched: beyond bonds in bohr
# least median distance of nearest neighbors, in sums of covalent radii: it is 0.77 in N2, 0.79 in
# CO and acetylene; bonds of metals may be shorter: U=O has 0.67, Cr2 0.60
_MIN_BOND = 0.76
# largest ratio of the quartiles of lengths of bonds: it is 1.03 to 1.1 from 300 to 3,000 K
_BOND_SPREAD = 1.15
_REPULSION = (
    15.0  # eV/angstrom; median force on atoms that are pressed together beyond any bond
)
_NONMETALS = {
    "H",
    "B",
    "C",
    "N",
    "O",
    "F",
    "Si",
    "P",
    "S",
    "Cl",
    "Ge",
    "As",
    "Se",
    "Br",
    "Te",
    "I",
}
# angstrom; bonds of H have 0.74 (H2), 0.92 (HF), 0.97 (water), 1.02 (ammonia) and 1.09 (methane),
# and one that moves from a molecule of water to another is 1.2 from both
_REACH_OF_HYDROGEN = 1.12
_MAX_BRIDGES = 0.05  # share of the hydrogen atoms of a median frame that have two bonds
# Frames with positions in another order, where the median frame has none with two bonds: larger
# share, and the number of pairs over that of the median frame. It is 1 in
# another order, and 2 in ice under pressure, whose hydrogen atoms are between two others.
_ODD_BRIDGES = 0.2
_SAME_PAIRS = 1.1
_NUM_SEARCHED = 8  # frames in which nearest neighbors are searched
_NOBLE = {"He", "Ne", "Ar", "Kr", "Xe", "Rn"}  # they have no bonds
MAX_SEARCHED = 15_000  # atoms of a frame whose nearest neighbors are searched
# pairs of such a frame: the cutoff is lowered to find about this number, which is more than twice
# the distance of neighbors in any unit
_MAX_PAIRS = 3e5
_MIN_FRAMES = 3  # frames that are judged together
# pm, Cordero et al. 2008 (carbon sp3, high spin), as in ASE
_RADII = """
H 31 He 28 Li 128 Be 96 B 84 C 76 N 71 O 66 F 57 Ne 58 Na 166 Mg 141 Al 121 Si 111 P 107 S 105 Cl
102 Ar 106 K 203 Ca 176 Sc 170 Ti 160 V 153 Cr 139 Mn 139 Fe 132 Co 126 Ni 124 Cu 132 Zn 122 Ga 122
Ge 120 As 119 Se 120 Br 120 Kr 116 Rb 220 Sr 195 Y 190 Zr 175 Nb 164 Mo 154 Tc 147 Ru 146 Rh 142 Pd
139 Ag 145 Cd 144 In 142 Sn 139 Sb 139 Te 138 I 139 Xe 140 Cs 244 Ba 215 La 207 Ce 204 Pr 203 Nd
201 Pm 199 Sm 198 Eu 198 Gd 196 Tb 194 Dy 192 Ho 192 Er 189 Tm 190 Yb 187 Lu 187 Hf 175 Ta 170 W
162 Re 151 Os 144 Ir 141 Pt 136 Au 136 Hg 132 Tl 145 Pb 146 Bi 148 Po 140 At 150 Rn 150 Fr 260 Ra
221 Ac 215 Th 206 Pa 200 U 196 Np 190 Pu 187 Am 180 Cm 169
"""
COVALENT_RADII = {
    name: int(r) / 100 for name, r in zip(_RADII.split()[::2], _RADII.split()[1::2])
}


class Neighbor(NamedTuple):
    """Nearest neighbor of an atom.

    Attributes:
        ratio: distance in sums of covalent radii.
        distance: in the unit of the positions, angstrom if it is right.
        i: the atom.
        j: its neighbor.
        vector: (3,) from the atom to its neighbor.
    """

    ratio: float
    distance: float
    i: int
    j: int
    vector: Array


class Bond(NamedTuple):
    """Nearest neighbor of an atom in a frame."""

    ratio: float
    distance: float
    i: int
    j: int
    vector: Array
    frame: Frame

    def describe(self, type_map: Sequence[str]) -> str:
        """Return both atoms and the frame, for messages."""
        atoms = [self.frame.describe_atom(atom, type_map) for atom in (self.i, self.j)]
        name, number = self.frame.source
        return f"atoms {' and '.join(atoms)} in {name} frame {number}"


def misplaced_types(frames: Sequence[Frame], type_map: Sequence[str]) -> list[str]:
    """Return texts about distances that no bonds of their elements have, in most frames.

    Where types are in another order than positions, bonds are between atoms of any elements.
    """
    several = [f for f in frames if f.num_atoms > 2 and np.ptp(f.atom_type) > 0]
    if len(several) < _MIN_FRAMES:
        return []
    searched = [several[k] for k in even_places(len(several), _NUM_SEARCHED)]
    texts = list[str]()
    for types, bonds in bonds_by_elements(nearest_bonds(searched, type_map)).items():
        names = [type_map[t] for t in types]
        middle = bonds[len(bonds) // 2]
        if not 0 < middle.ratio < _MIN_BOND or not _NONMETALS.issuperset(names):
            continue
        number = len({bond.frame.source for bond in bonds})
        lowest = bonds[len(bonds) // 4].ratio
        highest = bonds[3 * len(bonds) // 4].ratio
        forces = [
            float(np.linalg.norm(bond.frame.labels[FORCE].reshape(-1, 3)[bond.i]))
            for bond in bonds
            if FORCE in bond.frame.labels
        ]
        # atoms that were moved at random have distances of any length, which are no bonds
        is_bond = (
            highest < _BOND_SPREAD * lowest and np.median(forces or [0.0]) < _REPULSION
        )
        if is_bond and 2 * number > len(searched):
            texts.append(
                f"nearest neighbors {' and '.join(names)} are {middle.distance:.3g} angstrom apart "
                f"in {number} of {len(searched)} frames ({middle.describe(type_map)}), expected at "
                f"least {_MIN_BOND * middle.distance / middle.ratio:.2f}"
            )
    # types in another order also give hydrogen atoms the places of heavier ones, which have several
    # neighbors
    bridges = list[tuple[Frame, Array, int]]()  # with the number of pairs
    for frame in several:
        symbols = np.array(type_map)[frame.atom_type]
        if (
            "H" in symbols
            and _NONMETALS.issuperset(symbols)
            and frame.num_atoms <= MAX_SEARCHED
        ):
            near = find_pairs_once(frame.coord, frame.box, _REACH_OF_HYDROGEN)
            num_near = np.bincount(
                np.concatenate([near.i, near.j]), minlength=len(symbols)
            )
            bridges.append((frame, num_near[symbols == "H"] > 1, len(near.i)))
    if not bridges:
        return texts
    share, usual = np.median([[b.mean(), n] for _, b, n in bridges], axis=0)
    odd = [
        str(frame.source[1])
        for frame, is_bridge, number in bridges
        if is_bridge.mean() > _ODD_BRIDGES and number < _SAME_PAIRS * usual
    ]
    which = f"{100 * share:.0f} % of the hydrogen atoms of a frame (the median of {len(bridges)})"
    if odd and not share:
        which = (
            f"of {len(bridges)} frames {len(odd)} ({first_few(odd, 3)}) have hydrogen atoms, more "
            f"than {100 * _ODD_BRIDGES:.0f} % of them, which"
        )
    # the same atoms in all frames: each has the place of another
    elif share <= _MAX_BRIDGES and (
        len(bridges) < _NUM_SEARCHED
        or not set.intersection(*({*np.flatnonzero(b).tolist()} for _, b, _ in bridges))
    ):
        return texts
    reach = f"have two or more neighbors within {_REACH_OF_HYDROGEN} angstrom, expected one bond"
    return [*texts, f"{which} {reach}"]


def nearest_bonds(frames: Sequence[Frame], type_map: Sequence[str]) -> list[Bond]:
    """Return the nearest neighbors of the atoms of frames, in the order of their ratios."""
    radii = bond_radii(type_map)
    bonds = list[Bond]()
    for frame in frames:
        neighbors = nearest_neighbors(frame.coord, frame.box, radii[frame.atom_type])
        bonds += [Bond(*neighbor, frame) for neighbor in neighbors]
    return sorted(bonds, key=attrgetter("ratio"))


def bonds_by_elements(bonds: Sequence[Bond]) -> dict[tuple[int, int], list[Bond]]:
    """Return bonds in their order, by the types of both atoms."""
    groups: dict[tuple[int, int], list[Bond]] = {}
    for bond in bonds:
        first, second = sorted(bond.frame.atom_type[[bond.i, bond.j]].tolist())
        groups.setdefault((first, second), []).append(bond)
    return groups


def bond_radii(symbols: Sequence[str]) -> Array:
    """Return covalent radii, angstrom; NaN of noble gases and of names that are no elements."""
    return np.array(
        [
            math.nan if name in _NOBLE else COVALENT_RADII.get(name, math.nan)
            for name in symbols
        ]
    )


def nearest_neighbors(coord: Array, box: Array | None, radii: Array) -> list[Neighbor]:
    """Return the nearest neighbor of each atom that has one within ``REACH``.

    Args:
        coord: (N, 3) angstrom.
        box: (3, 3) angstrom, or None.
        radii: (N,) angstrom, NaN of atoms that have no bonds.
    """
    if not np.isfinite(radii).any() or not 1 < len(coord) <= MAX_SEARCHED:
        return []
    # at most the cutoff that gives about _MAX_PAIRS pairs at the density of the frame: if lengths
    # are in nm, all pairs are within REACH
    size = (
        np.ptp(coord, axis=0) + 1.0
        if box is None
        else np.linalg.svd(box, compute_uv=False)
    )
    most = (1.5 / math.pi * _MAX_PAIRS * float(size.prod())) ** (1 / 3) / len(
        coord
    ) ** (2 / 3)
    try:
        rcut = min(REACH * 2 * float(np.nanmax(radii)), most)
        pairs = find_pairs_once(coord, box, rcut)
    except DataError:
        return []
    ratio = pairs.distance / (radii[pairs.i] + radii[pairs.j])
    # a dimer without a bond, in any unit
    if len(coord) == 2 and len(ratio) == 1 and ratio[0] > LONG:
        return []
    # both directions of each pair
    i = np.concatenate([pairs.i, pairs.j])
    j = np.concatenate([pairs.j, pairs.i])
    distance = np.tile(pairs.distance, 2)
    vector = np.concatenate([pairs.vector, -pairs.vector])
    ratio = np.tile(ratio, 2)
    # pairs of an atom and its own image are no bonds
    order = np.lexsort((ratio, i))
    order = order[np.isfinite(ratio[order]) & (i[order] != j[order])]
    first = order[np.unique(i[order], return_index=True)[1]]
    return [
        Neighbor(float(ratio[k]), float(distance[k]), int(i[k]), int(j[k]), vector[k])
        for k in first
    ]
