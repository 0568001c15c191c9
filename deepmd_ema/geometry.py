"""Cells, periodic images, neighbor lists and neighbor statistics as pure functions of numpy arrays."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
from vesin import NeighborList

from deepmd_ema.arrays import Array, stable_argsort

FrameGeometry: TypeAlias = tuple[Array, Array | None, Array]  # coord (N, 3), box (3, 3) or None, types (N,)

_FRAMES_AT_ONCE = 64  # frames handed to the threads at a time, so that a data set need not fit in memory


@dataclass(frozen=True)
class Pairs:
    """All neighbors of all atoms, sorted by ``i``, then by distance. A pair of atoms occurs twice, once from each end.

    Attributes:
        i: (P,) int64, the atom.
        j: (P,) int64, its neighbor.
        shift: (P, 3) int32, cell vectors to add to the neighbor's position as given (atoms may lie outside the cell).
    """

    i: Array
    j: Array
    shift: Array

    def vector(self, coord: Array, box: Array | None) -> Array:
        """Return (P, 3): the image of ``j`` minus ``i``, in the unit of ``coord``."""
        vector = coord[self.j] - coord[self.i]
        return vector if box is None else vector + self.shift @ box


@dataclass(frozen=True)
class NeighborStatistics:
    """Shortest distances and largest numbers of neighbors of a data set.

    Attributes:
        min_distance: shortest distance of two atoms, angstrom; infinite without pairs inside the cutoff.
        max_neighbors: most neighbors of each type that any atom has.
        max_total: most neighbors of all types that any atom has.
        nearest: (T, T) shortest distance per pair of types, symmetric.
        frame_min: (F,) shortest distance in each frame.
        frame_pair: (F, 2) the two atoms at that distance, -1 without any.
    """

    min_distance: float
    max_neighbors: tuple[int, ...]
    max_total: int
    nearest: Array
    frame_min: Array
    frame_pair: Array


def find_pairs(coord: Array, box: Array | None, rcut: float) -> Pairs:
    """Return all pairs closer than ``rcut``, images of an atom with itself included.

    Cells may be triclinic and smaller than the cutoff, and atoms may lie outside of them. Pairs of one atom at exactly
    one distance are sorted by neighbor, then by shift.

    Args:
        coord: (N, 3), angstrom.
        box: (3, 3), rows are cell vectors, or None for an open system.
        rcut: cutoff radius, angstrom.
    """
    pairs, shift, distance = _search(coord, box, rcut, "PSd")
    i, j = pairs[:, 0], pairs[:, 1]
    order = np.argsort(distance)
    order = order[stable_argsort(i[order], len(coord))]
    tied = (np.diff(distance[order]) == 0) & (np.diff(i[order]) == 0)
    if tied.any():  # as in a perfect crystal: the order must not depend on how the pairs were searched
        order = np.lexsort((*shift.T, j, distance, i))
    return Pairs(i[order], j[order], shift[order])


def neighbor_statistics(
    frames: Iterable[FrameGeometry], rcut: float, num_types: int, threads: int | None = None
) -> NeighborStatistics:
    """Return shortest distances and largest numbers of neighbors over ``frames``, searched in a few threads.

    Args:
        frames: (coord (N, 3), box (3, 3) or None, types (N,) from 0) of each frame, consumed in order.
        rcut: cutoff radius, angstrom.
        num_types: T, the number of types.
        threads: how many; None for the cores this process may use, four at most.
    """
    most = np.zeros(num_types, np.int64)
    most_total = 0
    nearest = np.full((num_types, num_types), np.inf)
    frame_min, frame_pair = [], []
    # of the cores that this process may use, which macOS does not tell
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remaining = iter(frames)
    with ThreadPoolExecutor(threads or min(4, cores)) as pool:
        while chunk := list(islice(remaining, _FRAMES_AT_ONCE)):
            for one in pool.map(lambda frame: _frame_statistics(frame, rcut, num_types), chunk):
                most = np.maximum(most, one.most)
                most_total = max(most_total, one.most_total)
                nearest = np.minimum(nearest, one.nearest)
                frame_min.append(one.distance)
                frame_pair.append(one.pair)
    return NeighborStatistics(
        min_distance=min(frame_min, default=math.inf),
        max_neighbors=tuple(int(n) for n in most),
        max_total=most_total,
        nearest=nearest,
        frame_min=np.array(frame_min, np.float64),
        frame_pair=np.array(frame_pair, np.int64).reshape(-1, 2),
    )


@dataclass(frozen=True)
class _FrameStatistics:
    most: Array
    most_total: int
    nearest: Array
    distance: float
    pair: tuple[int, int]


def _frame_statistics(frame: FrameGeometry, rcut: float, num_types: int) -> _FrameStatistics:
    coord, box, types = frame
    natoms = len(types)
    pairs, distance = _search(coord, box, rcut, "Pd", each_twice=False)
    if len(distance) == 0:
        none = np.full((num_types, num_types), np.inf)
        return _FrameStatistics(np.zeros(num_types, np.int64), 0, none, math.inf, (-1, -1))
    types = np.asarray(types, np.int64)
    i, j = pairs[:, 0], pairs[:, 1]
    type_i, type_j = types[i], types[j]
    counts = np.bincount(i * num_types + type_j, minlength=natoms * num_types)
    counts += np.bincount(j * num_types + type_i, minlength=natoms * num_types)
    counts = counts.reshape(natoms, num_types)
    nearest = np.full(num_types * num_types, np.inf)
    kind = type_i * num_types + type_j
    for one in np.flatnonzero(np.bincount(kind)):
        nearest[one] = distance[kind == one].min()
    by_types = nearest.reshape(num_types, num_types)
    shortest = int(distance.argmin())
    return _FrameStatistics(
        most=counts.max(axis=0),
        most_total=int(counts.sum(axis=1).max()),
        nearest=np.minimum(by_types, by_types.T),
        distance=float(distance[shortest]),
        pair=(int(i[shortest]), int(j[shortest])),
    )


def _search(
    coord: Array, box: Array | None, rcut: float, quantities: str, each_twice: bool = True
) -> tuple[Array, ...]:
    finder = NeighborList(cutoff=rcut, full_list=each_twice, sorted=each_twice, n_threads=1)
    found = finder.compute(
        points=np.ascontiguousarray(coord, np.float64),
        box=np.zeros((3, 3)) if box is None else np.ascontiguousarray(box, np.float64),
        periodic=box is not None,
        quantities=quantities,
    )
    return tuple(a if a.dtype.kind == "f" or a.dtype == np.int32 else a.astype(np.int64) for a in found)
