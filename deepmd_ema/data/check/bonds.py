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
# eV/angstrom; median force that moves atoms apart that are nearer than any bond
_REPULSION = 15.0
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
# Frames with positions in another order, where the median frame has no such atoms: their least
# number and share of the hydrogen atoms. Distances, and so pairs per atom, are those of the others
# but for a tenth; atoms that were moved at random have other ones.
_MIN_BRIDGES = 3
_ODD_BRIDGES = 0.2
_SAME_PAIRS = 0.1
_NUM_SEARCHED = 8  # frames in which nearest neighbors are searched
_NOBLE = {"He", "Ne", "Ar", "Kr", "Xe", "Rn"}  # they have no bonds
MAX_SEARCHED = 15_000  # atoms of a frame whose nearest neighbors are searched
# pairs of such a frame: the cutoff is lowered to find about this number, which is more than twice
# the distance of neighbors in any unit
_MAX_PAIRS = 3e5
_MIN_FRAMES = 3  # frames that are judged together
# angstrom, for atoms in one place, so that ratios of distances are finite
MIN_CONTACT = 1e-3
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


class Bond(NamedTuple):
    """An atom and its nearest neighbor in a frame.

    Attributes:
        ratio: distance in sums of covalent radii.
        distance: in the unit of the positions, angstrom if it is right.
        i: the atom.
        j: its neighbor.
        vector: (3,) from the atom to its neighbor.
        push: half of the force that moves both atoms apart, eV/angstrom; NaN without forces.
        frame: in which they are.
    """

    ratio: float
    distance: float
    i: int
    j: int
    vector: Array
    push: float
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
        forces = [bond.push for bond in bonds if FORCE in bond.frame.labels]
        # atoms that were moved at random have distances of any length, which are no bonds
        if (
            highest < _BOND_SPREAD * lowest
            and np.median(forces or [0.0]) < _REPULSION
            and 2 * number > len(searched)
        ):
            texts.append(
                f"nearest neighbors {' and '.join(names)} are {middle.distance:.3g} angstrom apart "
                f"in {number} of {len(searched)} frames ({middle.describe(type_map)}), expected at "
                f"least {_MIN_BOND * middle.distance / middle.ratio:.2f}"
            )
    # Types in another order also give hydrogen atoms the places of heavier ones, which have several
    # neighbors. In single frames, or of single atoms, one of these is hydrogen, too: an atom that
    # moves between molecules, or is in ice under pressure, has heavier neighbors only.
    places = list[str]()  # frames
    densities = list[float]()  # pairs per atom
    shares = list[float]()  # hydrogen atoms with two neighbors
    bridges = list[Array]()  # which of the hydrogen atoms have another as one of them
    for frame in several:
        symbols = np.array(type_map)[frame.atom_type]
        is_hydrogen = symbols == "H"
        if (
            is_hydrogen.any()
            and _NONMETALS.issuperset(symbols)
            and frame.num_atoms <= MAX_SEARCHED
        ):
            near = find_pairs_once(frame.coord, frame.box, _REACH_OF_HYDROGEN)
            ends = np.concatenate([near.i, near.j])
            partners = np.concatenate([near.j, near.i])
            num_near = np.bincount(ends, minlength=len(symbols))[is_hydrogen]
            num_hydrogen = np.bincount(
                ends, is_hydrogen[partners], minlength=len(symbols)
            )[is_hydrogen]
            places.append(" frame ".join(map(str, frame.source)))
            densities.append(len(near.i) / len(symbols))
            shares.append((num_near > 1).mean())
            bridges.append((num_near > 1) & (num_hydrogen > 0))
    if not shares:
        return texts
    share = np.median(shares)
    usual = np.median(densities)
    odd = [
        place
        for place, density, is_bridge in zip(places, densities, bridges)
        if is_bridge.sum() >= _MIN_BRIDGES
        and is_bridge.mean() > _ODD_BRIDGES
        and abs(density - usual) < _SAME_PAIRS * usual
    ]
    which = f"{100 * share:.0f} % of the hydrogen atoms of a frame (the median of {len(shares)})"
    if odd and not share:
        which = (
            f"in {len(odd)} of {len(shares)} frames ({first_few(odd, 3)}) more than "
            f"{100 * _ODD_BRIDGES:.0f} % of the hydrogen atoms"
        )
    # the same atoms in all frames: each has the place of another
    elif share <= _MAX_BRIDGES and (
        len(shares) < _NUM_SEARCHED
        or not set.intersection(*(set(np.flatnonzero(b)) for b in bridges))
    ):
        return texts
    return [
        *texts,
        f"{which} have two or more neighbors within {_REACH_OF_HYDROGEN} angstrom, expected one "
        "bond",
    ]


def nearest_bonds(frames: Sequence[Frame], type_map: Sequence[str]) -> list[Bond]:
    """Return the nearest neighbors of the atoms of frames, in the order of their ratios."""
    by_type = bond_radii(type_map)
    bonds = list[Bond]()
    for frame in frames:
        coord = frame.coord
        box = frame.box
        radii = by_type[frame.atom_type]
        if not np.isfinite(radii).any() or not 1 < len(coord) <= MAX_SEARCHED:
            continue
        # at most the cutoff that gives about _MAX_PAIRS pairs at the density of the frame: if
        # lengths are in nm, all pairs are within REACH
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
            continue
        ratio = pairs.distance / (radii[pairs.i] + radii[pairs.j])
        # a dimer without a bond, in any unit
        if len(coord) == 2 and len(ratio) == 1 and ratio[0] > LONG:
            continue
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
        force = frame.labels.get(FORCE, np.full(coord.size, np.nan)).reshape(-1, 3)
        work = ((force[j] - force[i]) * vector).sum(axis=1)
        push = work / np.maximum(distance, MIN_CONTACT) / 2
        columns = [array[first] for array in (ratio, distance, i, j, vector, push)]
        bonds += [Bond._make((*row, frame)) for row in zip(*columns)]
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
