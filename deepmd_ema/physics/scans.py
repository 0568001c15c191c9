"""Scans of the energy along one distance: extrema of bonds, and smoothness at the cutoff."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmd_ema.physics.surface import Array, Surface, too_close

BOND_POINTS = 81
BOND_REACH = 1.25  # a bond is stretched to this times its length in the frame
MIN_BARRIER = 1e-3  # eV: lower ripples are not counted
# angstrom, on either side of the cutoff: over it the force along a stiff bond (50 eV/angstrom^2) changes by 1e-4
CUTOFF_GAP = 1e-6
# angstrom, of the difference quotient; its error, h^2 / 6 times the third derivative (300 eV/angstrom^3), is 2e-4
CUTOFF_STEP = 2e-3
CUTOFF_SEARCH = 0.5  # angstrom, beyond the cutoff


@dataclass(frozen=True)
class BondScan:
    """The energy while an atom is moved along the line to another one.

    Attributes:
        elements: names of the two.
        distance: (P,), angstrom.
        energy: (P,), eV.
    """

    elements: tuple[str, str]
    distance: Array
    energy: Array

    @property
    def extrema(self) -> int:
        """Number of extrema beyond the one minimum of a well."""
        minima, maxima = count_extrema(self.energy, MIN_BARRIER)
        return max(0, minima - 1) + maxima


@dataclass(frozen=True)
class CutoffScan:
    """The surface where one atom enters the cutoff of another.

    Attributes:
        elements: names of the two.
        energy_jump: eV.
        force_jump: largest change of the force on an atom, eV/angstrom.
        force_error: force of the moved atom plus the difference quotient of the energy over the cutoff, eV/angstrom.
    """

    elements: tuple[str, str]
    energy_jump: float
    force_jump: float
    force_error: float


def scan_bonds(surface: Surface, shortest: Array, fraction: float) -> list[BondScan]:
    """Return a scan of each pair of elements that are neighbors in the frame, after BSCT (arXiv:2602.04861).

    The nearest pair of these elements is taken. One of its atoms is moved along the line between them, from
    ``fraction`` of the shortest distance of these elements in the data to ``BOND_REACH`` times that of the pair; all
    others rest. The scan ends before another pair is closer than ``fraction`` of the shortest distance of its elements.

    Args:
        surface: model and frame.
        shortest: (T, T), shortest distances of the data by types, angstrom; inf without any.
        fraction: of the shortest distances.
    """
    i, j, vector, distance = surface.pairs(surface.coord, surface.rcut)
    movable = i != j  # an image of an atom moves with it
    kinds = np.sort(np.stack([surface.types[i], surface.types[j]], 1), axis=1)
    least = fraction * np.where(np.isfinite(shortest), shortest, 0.0)
    found = []
    for one, other in np.unique(kinds[movable], axis=0):
        of_pair = np.flatnonzero(movable & (kinds == (one, other)).all(1))
        nearest = of_pair[np.argmin(distance[of_pair])]
        length, axis = distance[nearest], vector[nearest] / distance[nearest]
        first = fraction * min(shortest[one, other], length)
        reach = np.linspace(first, BOND_REACH * length, BOND_POINTS)
        moved = _moved(surface, j[nearest], axis, reach - length)
        kept = _free_range(surface, moved, reach, float(length), least, (i[nearest], j[nearest]))
        names = (surface.elements[one], surface.elements[other])
        found.append(BondScan(names, reach[kept], surface.at(moved[kept]).energy))
    return found


def scan_cutoff(surface: Surface) -> CutoffScan | None:
    """Return jumps of the surface where the pair that is nearest to the cutoff passes it; None without a pair.

    E+ and E- are the energies ``CUTOFF_GAP`` outside and inside, and their jump is E+ - E- + 2 gap F, with F the force
    on the moved atom along the line. The force error is |F + (E(r + h) - E(r - h)) / (2 h)|, h = ``CUTOFF_STEP``.
    """
    i, j, vector, distance = surface.pairs(surface.coord, surface.rcut + CUTOFF_SEARCH)
    movable = np.flatnonzero(i != j)
    if not len(movable):
        return None
    pair = movable[np.argmin(np.abs(distance[movable] - surface.rcut))]
    axis, to_cutoff = vector[pair] / distance[pair], surface.rcut - distance[pair]
    shifts = to_cutoff + np.array([-CUTOFF_STEP, -CUTOFF_GAP, 0.0, CUTOFF_GAP, CUTOFF_STEP])
    at = surface.at(_moved(surface, j[pair], axis, shifts))
    along = float(at.force[2, j[pair]] @ axis)
    jump = float(at.energy[3] - at.energy[1]) + 2 * CUTOFF_GAP * along
    change = np.linalg.norm(at.force[3] - at.force[1], axis=1).max()
    slope = float(at.energy[4] - at.energy[0]) / (2 * CUTOFF_STEP)
    names = (surface.elements[surface.types[i[pair]]], surface.elements[surface.types[j[pair]]])
    return CutoffScan(names, abs(jump), float(change), abs(slope + along))


def count_extrema(energy: Array, barrier: float) -> tuple[int, int]:
    """Return the number of minima and of maxima, with the ends left out.

    Args:
        energy: (P,), along a line, eV.
        barrier: a turn counts where the energy changes by more than this on both sides, eV.
    """
    minima = maxima = trend = 0
    low = high = float(energy[0])
    for value in map(float, energy[1:]):
        low, high = min(low, value), max(high, value)
        if trend <= 0 and value - low > barrier:
            minima, trend, high = minima + (trend < 0), 1, value
        elif trend >= 0 and high - value > barrier:
            maxima, trend, low = maxima + (trend > 0), -1, value
    return minima, maxima


def _moved(surface: Surface, atom: int, axis: Array, shifts: Array) -> Array:
    """Return (P, N, 3) positions in which one atom is moved along ``axis`` by ``shifts`` (P,)."""
    coord = np.repeat(surface.coord[None], len(shifts), axis=0)
    coord[:, atom] += shifts[:, None] * axis
    return coord


def _free_range(
    surface: Surface, moved: Array, reach: Array, length: float, least: Array, pair: tuple[int, int]
) -> NDArray[np.bool_]:
    """Return (P,) flags of the points around ``length`` that can be reached with no other pair too close."""
    free = np.array([_others_are_free(surface, coord, least, pair) for coord in moved])
    start = int(np.argmin(np.abs(reach - length)))
    kept = np.zeros(len(reach), dtype=bool)
    kept[start] = True
    for points in (range(start + 1, len(reach)), range(start - 1, -1, -1)):
        for point in points:
            if not free[point]:
                break
            kept[point] = True
    return kept


def _others_are_free(surface: Surface, coord: Array, least: Array, pair: tuple[int, int]) -> bool:
    i, j, _ = too_close(surface, coord, least)
    return all({int(a), int(b)} == {int(k) for k in pair} for a, b in zip(i, j))
