"""Evidence of frames about their units: energies along paths, a fitted pair potential, stiffness, bond lengths.

Between near frames energies change by the work of forces and virials, which is exact: along a path on which atoms move
by u and the cell by a strain e the energy changes by -F u - W e, with the mean of both ends (trapezoidal rule). The
rule has no error in a harmonic potential: frames of a crystal far apart in time serve as well as those of a trajectory,
whatever the bonds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np

from deepmd_ema.config.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.data.check.scan import traceless
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import Array, find_pairs_once

BOHR = 0.52917721  # angstrom
_COULOMB = 14.39964  # eV angstrom, square of the elementary charge over 4 pi epsilon_0
# lengths are in sums of covalent radii
_REACH = 2.7  # of the pair potential: hydrogen bonds (1.9) and the first shells of every crystal
_FIRST = 0.7  # center of the innermost function; the shortest bonds of data that were tried have 0.76
_NUM_GAUSSIANS = 12  # a width of 0.18, that of a shell of neighbors
_NUM_FINE = 540  # bins of distances, of which energies and virials are sums: 0.005, much less than a width
_NUM_BINS = 54  # of distances, to see shells
_MAX_PAIRS = 5e5  # of a frame; 12 frames of 4,000 atoms of copper, with half of that, take 2 s and 75 MB
_MAX_FITTED = 200  # atoms of a frame whose forces are fitted: 600 equations, for at most 250 unknowns
_MAX_UNKNOWNS = 250  # 5 elements; with more pairs of elements they share one function of the scaled distance
_RIDGE = 1e-4  # of the mean of the diagonal; for functions that no pair reaches
_NEIGHBOR = 1.15  # a neighbor is nearest if at most this much farther than the nearest one; in bcc others have 1.155
_CLEAR = 4.0  # Student's t of a correlation; unrelated numbers reach it once in 10,000 times
_MIDDLING = 0.5  # least correlation of a ratio: the two regressions of one on the other then give it to a factor of 4
_SLOPE = 0.3  # least correlation of forces along bonds with their length: other bonds pull as well
_MIN_BONDS = 60  # unrelated numbers have _SLOPE once in 50 times
_MIN_EXPLAINED = 0.6  # of the squares of forces by the fit; 0.78 to 0.99 in AIMD of mlearn, 0 to 0.54 in relaxed cells
_MIN_FRAMES = 4  # to judge stiffness; forces of two relaxed surfaces are explained by chance
_MIN_FREE_FRAMES = 8  # frames beyond those that the composition explains: t is _CLEAR at a correlation of 0.82
_SEARCHED = 15.0  # angstrom, farthest that pairs are searched; francium has 14.0
LONG_BONDS = 1.4  # nine of ten atoms of the sets have a neighbor nearer than 1.16; 1.43 to 2.2 if in bohr
NO_BONDS = 2.6  # farther than bonds in bohr
# largest displacement of an atom (angstrom) and strain of two frames; nearer ones are compared first
_LEVELS = ((0.3, 0.03), (0.6, 0.06), (1.0, 0.1))
_MIN_STRAIN = 1e-6  # of rounding
_MIN_WORK = 1e-6  # eV, RMS; forces that are zero by symmetry do less
# Smallest partial correlations. Of the right data in benchmarks/results/2026-11-23-units.md, the ratios with them are
# 0.85 to 1.2 and 0.84 to 1.14; ratios of liquids and molecules farther apart fall with the correlation.
_MIN_WORK_CORRELATION, _MIN_STRAIN_CORRELATION = 0.95, 0.9
_MIN_NEAR_FRAMES = 8  # in the pairs; unrelated numbers of so many frames reach 0.9 once in 500 times
_NOBLE = {"He", "Ne", "Ar", "Kr", "Xe", "Rn"}
# pm, Cordero et al. 2008 (carbon sp3, high spin), as in ASE
_RADII = """
H 31 He 28 Li 128 Be 96 B 84 C 76 N 71 O 66 F 57 Ne 58 Na 166 Mg 141 Al 121 Si 111 P 107 S 105 Cl 102 Ar 106 K
203 Ca 176 Sc 170 Ti 160 V 153 Cr 139 Mn 139 Fe 132 Co 126 Ni 124 Cu 132 Zn 122 Ga 122 Ge 120 As 119 Se 120 Br
120 Kr 116 Rb 220 Sr 195 Y 190 Zr 175 Nb 164 Mo 154 Tc 147 Ru 146 Rh 142 Pd 139 Ag 145 Cd 144 In 142 Sn 139 Sb
139 Te 138 I 139 Xe 140 Cs 244 Ba 215 La 207 Ce 204 Pr 203 Nd 201 Pm 199 Sm 198 Eu 198 Gd 196 Tb 194 Dy 192 Ho
192 Er 189 Tm 190 Yb 187 Lu 187 Hf 175 Ta 170 W 162 Re 151 Os 144 Ir 141 Pt 136 Au 136 Hg 132 Tl 145 Pb 146 Bi
148 Po 140 At 150 Rn 150 Fr 260 Ra 221 Ac 215 Th 206 Pa 200 U 196 Np 190 Pu 187 Am 180 Cm 169
"""
COVALENT_RADII = {name: int(r) / 100 for name, r in zip(_RADII.split()[::2], _RADII.split()[1::2])}


class PathRatios(NamedTuple):
    """Ratios that are 1 where units and signs are right; None without near frames.

    Attributes:
        energy: energy differences over the work of the forces.
        virial: virials over those that the energies of strained cells give.
    """

    energy: float | None = None
    virial: float | None = None


class Ratio(NamedTuple):
    """Ratio of two quantities that should be equal, with the sign of their correlation."""

    value: float
    correlation: float
    num_free: int

    @property
    def is_clear(self) -> bool:
        """Whether the correlation is far from that of unrelated numbers."""
        free = max(self.num_free, 1)
        size = min(abs(self.correlation), 1 - 1e-12)
        return size > _MIDDLING and size * math.sqrt(free / (1 - size**2)) > _CLEAR


@dataclass(frozen=True)
class Evidence:
    """Evidence of frames about their units; None where there is none.

    Attributes:
        num_frames: how many were looked at.
        bond: the nearest neighbor of an atom in sums of covalent radii (of ten atoms nine have it farther).
        stiffness: by how much the force along a bond falls with its length, in units of e^2 / r^3: 0.5 to 15 for
            covalent, ionic and metallic bonds in eV and angstrom.
        energy: energies over those of the pair potential that the forces give.
        virial: virials, without their trace, over those of that pair potential.
        volume: mean volume of the cells, angstrom^3.
        paths: what near frames say.
    """

    num_frames: int
    bond: float | None = None
    stiffness: float | None = None
    energy: Ratio | None = None
    virial: Ratio | None = None
    volume: float | None = None
    paths: PathRatios = field(default_factory=PathRatios)


def judge(frames: Sequence[Frame], type_map: Sequence[str]) -> Evidence:
    """Return the evidence about units of frames with forces, all with or all without a cell.

    Between near frames energies change by the work of forces and virials, which is exact. Where no frames are near, a
    pair potential is fitted to the forces alone. It gives differences of energies between frames of one composition,
    and virials, to within tens of percent in liquids, molecules, metals and salts, but energies of covalent solids
    several times too small, however well they correlate.

    Forces are fitted on at most 200 atoms of a frame, evenly spaced. Of frames with more than about 500,000 pairs the
    nearest are used; energies and virials of such frames may then not be judged.
    """
    types = np.unique(np.concatenate([frame.atom_type for frame in frames]))
    radii = np.array([COVALENT_RADII.get(name, math.nan) for name in type_map])
    noble = np.array([name in _NOBLE for name in type_map])
    known = not np.isnan(radii[types]).any()
    # of other names than those of elements: all alike
    used = radii if known else np.full(len(type_map), 0.5)
    # the unit of length that makes bonds about as long as the sum of their radii: an angstrom, or that of a bohr
    first, stretch = _search(frames[0], used, 1.5), 1.5
    if first is not None:
        stretch = float(np.median(first.nearest[np.isfinite(first.nearest)]))
        if known:
            stretch = 1.0 if stretch <= LONG_BONDS else 1 / BOHR
    fit = _Fit(types, len(type_map))
    looked: list[Frame] = []
    bonds: list[tuple[Array, Array, Array, Array]] = []
    for frame in frames:  # the pairs of one frame at a time are in memory
        pairs = _search(frame, used, stretch)
        if pairs is not None:
            fit.add(frame, pairs)
            bonds.append(_bond_forces(frame, pairs, noble))
            looked.append(frame)
    if not looked:
        return Evidence(len(frames))
    weights, explained = fit.solve()
    is_explained = explained > _MIN_EXPLAINED  # else forces are zero by symmetry, or noise of a relaxation
    boxes = [frame.box for frame in looked if frame.box is not None]
    kind, length, pull, nearest = (np.concatenate(parts) for parts in zip(*bonds))
    nearest = nearest[np.isfinite(nearest)]
    same, volume = _undetermined(looked, np.array(fit.histograms))
    energies = np.array([[float(frame.labels.get(ENERGY, math.nan))] for frame in looked])
    virials = np.array([np.reshape(frame.labels.get(VIRIAL, np.full(9, math.nan)), 9) for frame in looked])
    fitted_energies, fitted_virials = (np.array(fit.energies) @ weights)[:, None], np.array(fit.virials) @ weights
    return Evidence(
        len(looked),
        float(np.quantile(nearest, 0.1)) if known and len(nearest) >= _MIN_FREE_FRAMES else None,
        _stiffness(kind, length, pull) if is_explained and len(looked) >= _MIN_FRAMES else None,
        _ratio(energies, fitted_energies, np.concatenate([same, volume], axis=1)) if is_explained else None,
        _ratio(traceless(virials), traceless(fitted_virials), same) if is_explained and boxes else None,
        float(np.mean(volume)) if boxes else None,
        path_ratios(looked),
    )


class _Bonds(NamedTuple):
    """Pairs of a frame; each occurs once."""

    i: Array
    j: Array
    unit: Array  # (P, 3) direction from i to j
    distance: Array  # angstrom
    scaled: Array  # in sums of covalent radii, after the unit of length is mended
    nearest: Array  # (N,) least scaled distance of each atom, in units of the file


def _search(frame: Frame, radii: Array, stretch: float) -> _Bonds | None:
    """Return the pairs within reach, None if they cannot be searched; ``stretch`` is an angstrom in the file's unit."""
    own = radii[frame.atom_type]
    size = np.ptp(frame.coord, axis=0) + 1.0 if frame.box is None else np.linalg.svd(frame.box, compute_uv=False)
    most = (1.5 / math.pi * _MAX_PAIRS * float(size.prod())) ** (1 / 3) / frame.num_atoms ** (2 / 3)
    try:
        reach = min(2 * float(own.max()) * _REACH * stretch, _SEARCHED, most)
        i, j, vector, distance = find_pairs_once(frame.coord, frame.box, reach)
    except DataError:
        return None
    if not len(distance) or distance.min() <= 0:
        return None
    scaled = distance / (own[i] + own[j])
    nearest = np.full(frame.num_atoms, np.inf)
    for atoms in (i, j):
        np.minimum.at(nearest, atoms, scaled)
    near = scaled < _REACH * stretch
    unit = vector[near] / distance[near, None]
    return _Bonds(i[near], j[near], unit, distance[near], scaled[near] / stretch, nearest)


class _Fit:
    """A pair potential, a sum of Gaussians of the scaled distance for each pair of elements, fitted to forces."""

    def __init__(self, types: Array, num_types: int) -> None:
        place = np.zeros(num_types, np.int64)
        count = len(types) if len(types) * (len(types) + 1) // 2 * _NUM_GAUSSIANS <= _MAX_UNKNOWNS else 1
        place[types] = np.arange(len(types)) if count > 1 else 0
        low, high = np.minimum.outer(place, place), np.maximum.outer(place, place)
        self._column = low * count - low * (low - 1) // 2 + high - low
        self._num_columns = count * (count + 1) // 2
        self._centers, self._width = np.linspace(_FIRST, _REACH, _NUM_GAUSSIANS, retstep=True)
        self._fine = self._functions((np.arange(_NUM_FINE) + 0.5) * _REACH / _NUM_FINE)
        unknowns = self._num_columns * _NUM_GAUSSIANS
        self._normal, self._right = np.zeros((unknowns, unknowns)), np.zeros(unknowns)
        self._squares = 0.0  # of the forces
        self.energies: list[Array] = []  # of each frame, for each unknown
        self.virials: list[Array] = []
        self.histograms: list[Array] = []  # of each frame, (pairs of elements, bins)

    def add(self, frame: Frame, bonds: _Bonds) -> None:
        """Add the equations of the forces of a frame, and keep what gives its energy and virial."""
        num = self._num_columns
        chosen = np.unique(np.linspace(0, frame.num_atoms - 1, min(frame.num_atoms, _MAX_FITTED)).astype(np.int64))
        column = self._column[frame.atom_type[bonds.i], frame.atom_type[bonds.j]]
        # forces on the chosen atoms that each function gives: sums over the pairs of one place, which stand together,
        # much faster than adding pair by pair
        row = np.full(frame.num_atoms, -1)
        row[chosen] = np.arange(len(chosen))
        ends, pair = row[np.concatenate([bonds.i, bonds.j])], np.tile(np.arange(len(bonds.i)), 2)
        place = ends * num + column[pair]
        order = np.argsort(place, kind="stable")[np.count_nonzero(ends < 0) :]
        place, pair, sign = place[order], pair[order], np.where(order < len(bonds.i), 1.0, -1.0)
        first = np.flatnonzero(np.diff(place, prepend=-1))
        along = bonds.unit[pair] * (sign * bonds.scaled[pair] / bonds.distance[pair])[:, None]
        by_place = np.zeros((len(chosen) * num, 3, _NUM_GAUSSIANS))
        slope = self._functions(bonds.scaled[pair])[1]
        by_place[place[first]] = np.add.reduceat(along[:, :, None] * slope[:, None, :], first, axis=0)
        by_axis = by_place.reshape(len(chosen), num, 3, _NUM_GAUSSIANS).transpose(0, 2, 1, 3)
        rows, force = by_axis.reshape(3 * len(chosen), -1), frame.labels[FORCE].reshape(-1, 3)[chosen].reshape(-1)
        self._normal += rows.T @ rows
        self._right += rows.T @ force
        self._squares += float(force @ force)
        # energy and virial are sums over pairs: those of one distance together
        fine = np.minimum((bonds.scaled / _REACH * _NUM_FINE).astype(np.int64), _NUM_FINE - 1)
        place, size = column * _NUM_FINE + fine, num * _NUM_FINE
        value, slope = self._fine
        count = np.bincount(place, minlength=size).reshape(num, _NUM_FINE)
        self.energies.append((count @ value).ravel())
        self.histograms.append(count.reshape(num, -1, _NUM_FINE // _NUM_BINS).sum(axis=2))
        virial = np.zeros((3, 3, num, _NUM_GAUSSIANS))
        for a, b in combinations_with_replacement(range(3), 2) if frame.box is not None else ():
            weight = bonds.scaled * bonds.unit[:, a] * bonds.unit[:, b]
            virial[a, b] = virial[b, a] = -np.bincount(place, weight, size).reshape(num, _NUM_FINE) @ slope
        self.virials.append(virial.reshape(9, -1))

    def solve(self) -> tuple[Array, float]:
        """Return the weight of each function, and the share of the squares of the forces that they explain."""
        ridge = _RIDGE * float(np.trace(self._normal)) / len(self._normal) + 1e-300
        weights = np.linalg.solve(self._normal + ridge * np.eye(len(self._normal)), self._right)
        return weights, float(weights @ self._right) / self._squares if self._squares > 0 else 0.0

    def _functions(self, scaled: Array) -> tuple[Array, Array]:
        """Return (distances, functions) values and derivatives by the distance, which end smoothly at the reach."""
        x = scaled / _REACH
        inner = np.maximum(1 - x**2, 0.0)
        z = (scaled[:, None] - self._centers) / self._width
        gauss = np.exp(-z * z)
        slope = -2 * z / self._width * (inner**2)[:, None] - (4 * x * inner / _REACH)[:, None]
        return gauss * (inner**2)[:, None], gauss * slope


def _undetermined(frames: Sequence[Frame], pairs: Array) -> tuple[Array, Array]:
    """Return numbers (frames, ...) that explain what forces do not determine, and volumes (frames, 1) of cells.

    That is the composition and, of a pair of elements, how many pairs are on this and on that side of a distance that
    never occurs: no force says by how much the potential rises there. So isomers and arrangements of an alloy are held
    against their like.

    Args:
        frames: the frames.
        pairs: (frames, pairs of elements, bins) how many pairs are at each distance.
    """
    kinds = [tuple(zip(*(a.tolist() for a in np.unique(f.atom_type, return_counts=True)))) for f in frames]
    same = np.array([[one == kind for kind in dict.fromkeys(kinds)] for one in kinds], np.float64)
    seen = pairs.sum(axis=0)
    rare = seen <= 0.02 * seen.max(axis=1, keepdims=True)
    # two bins in turn without pairs: beyond them another shell begins
    gap = rare & np.roll(rare, 1, axis=1)
    shell = np.cumsum(gap & ~np.roll(gap, -1, axis=1), axis=1)
    shells = [pairs[:, a, shell[a] == k].sum(axis=1) for a in range(len(shell)) for k in range(shell[a].max() + 1)]
    volume = np.array([abs(np.linalg.det(f.box)) for f in frames if f.box is not None])
    return np.concatenate([same, np.array(shells).T], axis=1), volume.reshape(len(frames), -1)


def _ratio(values: Array, fitted: Array, known: Array) -> Ratio | None:
    """Return the ratio of what ``known`` (frames, ...) does not explain in values (frames, numbers) and fitted ones."""
    use = np.isfinite(values).all(axis=1) & np.isfinite(fitted).all(axis=1)
    known = known[use]
    known = known / np.maximum(np.abs(known).max(axis=0, initial=0.0), 1e-300)
    num_free = int(use.sum()) - int(np.linalg.matrix_rank(known, 1e-9 * len(known)))
    a, b = (of[use] - known @ np.linalg.lstsq(known, of[use], rcond=1e-9)[0] for of in (values, fitted))
    size_a, size_b = float((a**2).sum()), float((b**2).sum())
    if num_free < _MIN_FREE_FRAMES or size_a <= 0 or size_b <= 0:
        return None
    common = float((a * b).sum())
    correlation = common / math.sqrt(size_a * size_b)
    return Ratio(math.copysign(math.sqrt(size_a / size_b), common), correlation, num_free)


def _bond_forces(frame: Frame, bonds: _Bonds, noble: Array) -> tuple[Array, Array, Array, Array]:
    """Return pairs of elements, lengths, and forces along the bonds of a frame; nearest neighbors of its atoms.

    Forces are positive if they make the bond longer; nearest neighbors are in sums of covalent radii.
    """
    nearest = np.full(frame.num_atoms, np.inf)
    for atoms in (bonds.i, bonds.j):
        np.minimum.at(nearest, atoms, bonds.scaled)
    close = (bonds.scaled <= _NEIGHBOR * np.minimum(nearest[bonds.i], nearest[bonds.j])) & (bonds.i != bonds.j)
    is_noble = noble[frame.atom_type]  # they have no bonds
    close &= ~(is_noble[bonds.i] | is_noble[bonds.j])
    i, j = bonds.i[close], bonds.j[close]
    force = frame.labels[FORCE].reshape(-1, 3)
    low, high = np.sort(np.stack([frame.atom_type[i], frame.atom_type[j]]), axis=0)
    pull = 0.5 * ((force[j] - force[i]) * bonds.unit[close]).sum(axis=1)
    return low + high * (high + 1) // 2, bonds.distance[close], pull, bonds.nearest[~is_noble]


def _stiffness(kind: Array, length: Array, pull: Array) -> float | None:
    """Return the slope of the force along the nearest bonds over their length, within each pair of elements."""
    if len(kind) < _MIN_BONDS:
        return None
    counts = np.maximum(np.bincount(kind), 1)
    x = length - (np.bincount(kind, length) / counts)[kind]
    y = pull - (np.bincount(kind, pull) / counts)[kind]
    spread = float((x**2).sum())
    correlation = float((x * y).sum()) / math.sqrt(spread * float((y**2).sum()) + 1e-300)
    if spread <= 1e-8 * len(x) or abs(correlation) < _SLOPE:
        return None
    return -float((x * y * length**3).sum()) / spread / _COULOMB


def path_ratios(frames: Sequence[Frame]) -> PathRatios:
    """Return ratios from all pairs of near frames with the same atoms in the same order.

    Args:
        frames: with forces; those without an energy say nothing.
    """
    groups: dict[tuple[bytes, bool], list[Frame]] = {}
    for frame in frames:
        if ENERGY in frame.labels:
            groups.setdefault((frame.atom_type.tobytes(), frame.box is None), []).append(frame)
    found = [_pairs(group) for group in groups.values() if len(group) > 1]
    if not found:
        return PathRatios()
    shift = np.cumsum([0, *(len(group) for group in groups.values() if len(group) > 1)])
    pairs = np.concatenate([one + np.array([k, k, 0, 0, 0, 0, 0]) for one, k in zip(found, shift)])
    energy = virial = None
    best_energy, best_virial = _MIN_WORK_CORRELATION, _MIN_STRAIN_CORRELATION
    for max_step, max_strain in _LEVELS:
        use = (pairs[:, 5] < max_step) & (pairs[:, 6] < max_strain) & np.isfinite(pairs[:, 2:5]).all(axis=1)
        if len(np.unique(pairs[use, :2])) < _MIN_NEAR_FRAMES:
            continue
        rise, by_force, by_strain = pairs[use, 2:5].T
        slope, correlation = _partial(rise, by_force, by_strain)
        if abs(correlation) > best_energy:
            energy, best_energy = slope, abs(correlation)
        slope, correlation = _partial(rise, by_strain, by_force)
        if abs(correlation) > best_virial:
            virial, best_virial = 1 / slope, abs(correlation)
    return PathRatios(energy, virial)


def _pairs(frames: Sequence[Frame]) -> Array:
    """Return (pairs, 7): two frames, energy difference, work of forces and virials, displacement, strain; eV, angstrom.

    Works of frames without virials in different cells are NaN.
    """
    coord = np.stack([frame.coord for frame in frames])
    force = np.stack([frame.labels[FORCE].reshape(-1, 3) for frame in frames])
    energy = np.array([float(frame.labels[ENERGY]) for frame in frames])
    virial = np.stack([np.reshape(frame.labels.get(VIRIAL, np.full(9, np.nan)), (3, 3)) for frame in frames])
    box = np.stack([frame.box for frame in frames if frame.box is not None]) if frames[0].box is not None else None
    rows = []
    for k in range(len(frames) - 1):
        if box is None:
            start, ends = coord[k] - coord[k].mean(axis=0), coord[k + 1 :] - coord[k + 1 :].mean(axis=1, keepdims=True)
            left, _, right = np.linalg.svd(ends.transpose(0, 2, 1) @ start)  # Kabsch 1976
            left[:, :, 2] *= np.linalg.det(left @ right)[:, None]  # a rotation, no reflection
            turn = left @ right
            step, strain = ends @ turn - start, np.zeros_like(turn)
        else:
            # A turned or mirrored frame has the same energy. What is left of the change of its cell is symmetric and
            # positive definite, so that the mean cell is not singular.
            left, _, right = np.linalg.svd(np.linalg.solve(box[k], box[k + 1 :]))
            turn = (left @ right).transpose(0, 2, 1)  # of the polar decomposition
            other = box[k + 1 :] @ turn
            middle = 0.5 * (box[k] + other)
            step = coord[k + 1 :] @ np.linalg.inv(box[k + 1 :]) - coord[k] @ np.linalg.inv(box[k])
            step -= np.round(step)
            step -= np.round(step - step[:, :1])  # a shift of all atoms by half a cell rounds either way
            step -= step.mean(axis=1, keepdims=True)
            step, strain = step @ middle, np.linalg.solve(middle, other - box[k])
        by_force = -0.5 * ((force[k] + force[k + 1 :] @ turn) * step).sum(axis=(1, 2))
        size = np.abs(strain).max(axis=(1, 2))
        turned = turn.transpose(0, 2, 1) @ virial[k + 1 :] @ turn
        by_strain = -0.5 * ((virial[k] + turned) * strain).sum(axis=(1, 2))
        by_strain[size < _MIN_STRAIN] = 0.0
        rise = energy[k + 1 :] - energy[k]
        first, second = np.full(len(rise), k), np.arange(k + 1, len(frames))
        longest = np.linalg.norm(step, axis=2).max(axis=1)
        rows.append(np.stack([first, second, rise, by_force, by_strain, longest, size], axis=1))
    return np.concatenate(rows)


def _partial(rise: Array, one: Array, other: Array) -> tuple[float, float]:
    """Return slope and correlation of ``rise`` with ``one``, after what ``other`` explains is taken out of both."""
    scale = float(other @ other)
    if scale > 0:
        rise, one = (values - other * float(values @ other) / scale for values in (rise, one))
    size = float(one @ one) * float(rise @ rise)
    if float(one @ one) < _MIN_WORK**2 * len(one) or size <= 0:
        return 0.0, 0.0
    common = float(one @ rise)
    return common / float(one @ one), common / math.sqrt(size)
