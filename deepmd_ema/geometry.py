"""Cells, periodic images, neighbor lists and their statistics: pure functions of numpy arrays.

N atoms of a frame, A atoms of several frames, F frames, P pairs, T types. Lengths are in angstrom.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import numpy as np
from vesin import NeighborList

from deepmd_ema.errors import DataError

Array: TypeAlias = np.ndarray


def stable_argsort(keys: Array, bound: int) -> Array:
    """Return the stable order of integers from 0 to ``bound - 1``."""
    # numpy sorts 16-bit integers by radix: about 5 times faster than the merge sort of 64-bit ones
    return np.argsort(
        keys.astype(np.uint16) if bound <= 1 << 16 else keys, kind="stable"
    )


def rank_in_group(key: Array, num_groups: int) -> tuple[Array, Array]:
    """Return the place of each element in its group, and the sizes of the groups.

    Args:
        key: (n,) group of each element, sorted.
        num_groups: number of groups, empty ones included.
    """
    counts = np.bincount(key, minlength=num_groups)
    return np.arange(len(key)) - np.repeat(np.cumsum(counts) - counts, counts), counts


def traceless(tensors: Array) -> Array:
    """Return tensors (..., 3, 3) without the part that is a multiple of the identity."""
    trace = np.trace(tensors, axis1=-2, axis2=-1)
    return tensors - trace[..., None, None] / 3 * np.eye(3)


def small_int(bound: int) -> type[np.integer]:
    """Return the smallest integer type for numbers from 0 to ``bound - 1``."""
    if bound <= 1 << 8:
        return np.uint8
    return np.uint16 if bound <= 1 << 16 else np.int32


FrameGeometry: TypeAlias = tuple[Array, Array | None, Array]
"""coord (N, 3), box (3, 3) or None, types (N,)."""

# Positions and cells beyond it are no atoms, and the grid of the search overflows.
MAX_POSITION = 1e6
# Open frames within it have no faults: they are not wider than _MAX_EXTENT either.
NEAR_ORIGIN = 1e4
# extent of an open frame and of an edge of a cell, for the reason of MAX_POSITION
_MAX_EXTENT = 1e5
# volume over the product of the lengths of the edges: less is a plane, often a cell with a zero
_FLAT_CELL = 1e-6
# images of a cell within the cutoff; a primitive cell at 12 angstrom has 5,000
_MAX_IMAGES = 1e5
# neighbors of an atom; diamond, the densest solid, has so many within 24 angstrom
_MAX_NEIGHBORS = 1e4
# distances of atoms to images near the cell, up to which computing all of them is faster than
# vesin; 96 atoms of water at 6 angstrom have 1e5
_MAX_DENSE_DISTANCES = 1.5e5
# multiplications that OpenBLAS leaves to one thread; its others would spin beside those of torch
_MAX_SINGLE_THREAD_PRODUCTS = 1 << 18
# relative margin of bounds that may include a little too much: pairs are measured again
_ROUNDING = 1e-9
# a thread that has many frames seldom waits for the lock of Python
_FRAMES_PER_THREAD = 16
# frames handed to the threads at a time, so that a data set need not fit in memory
_FRAMES_AT_ONCE = 64
_TOO_FAR = "a position of {value:.3g} angstrom, expected less than {most:g}. Is the file damaged?"
_TOO_WIDE = (
    "the atoms of this open system are {value:.3g} angstrom apart, expected less than {most:g}. "
    "Is the file damaged?"
)
_TOO_LONG = "an edge of the cell is {value:.3g} angstrom long ({cell}), expected at most {most:g}."
_TOO_THIN = (
    "the cell is {height:.3g} angstrom thin ({cell}): {value:.2g} images of it lie within the "
    "cutoff of {rcut:g} angstrom, expected at most {most:g}. Lengths are in angstrom; use a less "
    "skewed cell of the same crystal, or a smaller cutoff."
)
_TOO_DENSE = (
    "the cell of {volume:.3g} angstrom^3 ({cell}) is so small that an atom has {value:.2g} "
    "neighbors within the cutoff of {rcut:g} angstrom, expected at most {most:g}. Lengths are in "
    "angstrom; are they given in nm?"
)
_FLAT = (
    "the cell has no volume ({cell}). For open boundaries add an empty file "
    "nopbc to the system."
)


@dataclass(frozen=True)
class Pairs:
    """All neighbors of all atoms, sorted by ``i``, then by distance.

    A pair of atoms occurs twice, once from each end.

    Attributes:
        i: (P,) int64, the atom.
        j: (P,) int64, its neighbor.
        shift: (P, 3) int32, numbers of cell vectors to add to the neighbor's position in the frame,
            which may be outside the cell.
        nearest: shortest distance, angstrom; infinite without pairs.
    """

    i: Array
    j: Array
    shift: Array
    nearest: float

    def vector(self, coord: Array, box: Array | None) -> Array:
        """Return (P, 3): the image of ``j`` minus ``i``, in the unit of ``coord``."""
        vector = coord[self.j] - coord[self.i]
        return vector if box is None else vector + self.shift @ box


@dataclass(frozen=True)
class NeighborStatistics:
    """Shortest distances and largest numbers of neighbors of a data set.

    Attributes:
        max_neighbors: most neighbors of each type that any atom has.
        by_rank: (max_total,) the shortest distance at which any atom has its first, second, ...
            neighbor, angstrom: it increases, and its length is the most neighbors of any atom.
        nearest: (T, T) shortest distance per pair of types, symmetric.
        frame_min: (F,) shortest distance in each frame.
        frame_pair: (F, 2) the two atoms at that distance, -1 without any.
    """

    max_neighbors: tuple[int, ...]
    by_rank: Array
    nearest: Array
    frame_min: Array
    frame_pair: Array

    @property
    def min_distance(self) -> float:
        """Shortest distance of two atoms, angstrom; infinite without pairs inside the cutoff."""
        return float(self.nearest.min(initial=math.inf))

    @property
    def max_total(self) -> int:
        """Most neighbors of all types that any atom has."""
        return len(self.by_rank)

    def max_within(self, rcut: float) -> int:
        """Return the most neighbors of any atom nearer than ``rcut``, at most the search cutoff."""
        return int(np.searchsorted(self.by_rank, rcut))

    def with_counts_of(self, other: NeighborStatistics) -> NeighborStatistics:
        """Return these statistics with the larger numbers of neighbors of two data sets.

        Both have the same types.
        """
        # beyond the most neighbors of one data set only the other has distances
        few, many = sorted((self.by_rank, other.by_rank), key=len)
        by_rank = np.concatenate([np.minimum(few, many[: len(few)]), many[len(few) :]])
        return replace(
            self,
            max_neighbors=tuple(map(max, self.max_neighbors, other.max_neighbors)),
            by_rank=by_rank,
        )

    def within(self, rcut: float) -> NeighborStatistics:
        """Return the numbers of neighbors nearer than ``rcut``.

        Numbers of single types are upper bounds where it is shorter than the cutoff of the search:
        distances are known by rank among all types only.
        """
        total = self.max_within(rcut)
        most = tuple(min(n, total) for n in self.max_neighbors)
        return replace(self, max_neighbors=most, by_rank=self.by_rank[:total])


def find_pairs(coord: Array, box: Array | None, rcut: float) -> Pairs:
    """Return all pairs closer than ``rcut``, images of an atom with itself included.

    Cells may be triclinic and smaller than the cutoff, and atoms may lie outside of them. Pairs of
    one atom at exactly one distance are sorted by neighbor, then by shift.

    Args:
        coord: (N, 3), angstrom.
        box: (3, 3), rows are cell vectors, or None for an open system.
        rcut: cutoff radius, angstrom.

    Raises:
        DataError: if the search would overflow or not end (see ``frame_faults``).
    """
    _refuse_faults(coord, box, rcut)
    arrays = _search(coord, box, rcut, "PSd")
    near_first = np.argsort(arrays["d"])
    # (P, 3) and (P, 2): each pair once, nearest first; below both ends follow each other
    shift = np.take(arrays["S"], near_first, axis=0)
    ends = np.take(arrays["P"], near_first, axis=0)
    return _by_atom(
        ends.ravel(),
        ends[:, ::-1].ravel(),
        np.stack([shift, -shift], 1).reshape(-1, 3),
        np.repeat(arrays["d"][near_first], 2),
        len(coord),
    )


def find_pairs_of_molecules(coord: Array, sizes: Array, rcut: float) -> Pairs:
    """Return the pairs closer than ``rcut`` in each of many open frames, searched together.

    The result is that of ``find_pairs`` of each frame, with the atoms counted through all frames.
    All pairs of a frame are measured: meant for molecules.

    Args:
        coord: (A, 3) positions of the frames one after the other, angstrom, none farther out than
            ``NEAR_ORIGIN``.
        sizes: (F,) atoms of each frame.
        rcut: cutoff radius, angstrom.
    """
    # every atom with every atom of its frame, itself included: P is the sum of sizes**2
    first = np.cumsum(sizes) - sizes  # (F,) first atom of each frame
    frame_size = np.repeat(sizes, sizes)  # (A,) atoms of the frame of each atom
    i = np.repeat(np.arange(len(coord)), frame_size)
    # (A,) first pair of each atom minus the first atom of its frame: j counts up from the latter
    offset = np.cumsum(frame_size) - frame_size - np.repeat(first, sizes)
    j = np.arange(len(i)) - np.repeat(offset, frame_size)
    vector = np.take(coord, j, axis=0) - np.take(coord, i, axis=0)
    distance = np.sqrt(np.einsum("pk,pk->p", vector, vector))
    near = np.flatnonzero((distance < rcut) & (i != j))
    return _sorted_pairs(
        i[near], j[near], np.zeros((len(near), 3), np.int32), distance[near], len(coord)
    )


class _LastSearch(NamedTuple):
    """Positions (N, 3), cell (3, 3) or None, and cutoff of a search, angstrom."""

    coord: Array
    box: Array | None
    rcut: float


class KeptPairs:
    """Pairs of frames that follow each other, as in molecular dynamics, with few searches.

    A search reaches a skin beyond the cutoff. While no atom has moved more than half the skin since
    then and the cell is the same, every pair inside the cutoff is among the pairs of that search,
    whose distances are computed again.

    Args:
        skin: angstrom.
    """

    def __init__(self, skin: float) -> None:
        self.skin = skin
        self._last: _LastSearch | None = None
        self._pairs: Pairs | None = None
        self._offset: Array | float = 0.0  # (P, 3) shifts of the pairs in angstrom

    def find(self, coord: Array, box: Array | None, rcut: float) -> Pairs:
        """Return the pairs as ``find_pairs`` does; arguments and errors are the same."""
        pairs = self.reaching(coord, box, rcut)
        vector = coord[pairs.j] - coord[pairs.i] + self._offset
        distance = np.sqrt(np.einsum("pk,pk->p", vector, vector))
        near = np.flatnonzero(distance < rcut)
        return _sorted_pairs(
            pairs.i[near], pairs.j[near], pairs.shift[near], distance[near], len(coord)
        )

    def reaching(self, coord: Array, box: Array | None, rcut: float) -> Pairs:
        """Return the pairs of the last search, which reach at most the skin beyond the cutoff.

        It is the same object until the next search.
        """
        if self._pairs is not None and self._last is not None:
            last = self._last
            is_same_cell = last.box is box or (
                last.box is not None
                and box is not None
                and np.array_equal(last.box, box)
            )
            if last.rcut == rcut and last.coord.shape == coord.shape and is_same_cell:
                # two atoms that approach each other move half the skin each
                moved = np.square(coord - last.coord).sum(axis=1).max(initial=0.0)
                if (
                    moved <= (0.5 * self.skin) ** 2
                ):  # false for nan, which the search reports
                    return self._pairs
        # a search that raises an error must not leave the pairs of the frame before
        self._pairs = None
        self._pairs = pairs = find_pairs(coord, box, rcut + self.skin)
        self._offset = 0.0 if box is None else pairs.shift @ box
        # copies, because programs of dynamics move atoms in place
        self._last = _LastSearch(
            coord.copy(), None if box is None else box.copy(), rcut
        )
        return pairs


class UniquePairs(NamedTuple):
    """P pairs of atoms, each once, in any order.

    Attributes:
        i: (P,) first atoms.
        j: (P,) second atoms.
        vector: (P, 3), from i to the image of j, angstrom.
        distance: (P,), angstrom.
    """

    i: Array
    j: Array
    vector: Array
    distance: Array


def find_pairs_once(coord: Array, box: Array | None, rcut: float) -> UniquePairs:
    """Return the pairs closer than ``rcut``; arguments and errors are those of ``find_pairs``."""
    _refuse_faults(coord, box, rcut)
    arrays = _search(coord, box, rcut, "PDd")
    return UniquePairs(arrays["P"][:, 0], arrays["P"][:, 1], arrays["D"], arrays["d"])


def frame_faults(
    coord: Array, box: Array | None, num_atoms: Array, rcut: float
) -> dict[int, str]:
    """Return the reasons why frames cannot be searched, by number of the frame.

    Sound data have none.

    Args:
        coord: (F, N, 3), angstrom; rows of atoms that do not exist are zero.
        box: (F, 3, 3), or None for open systems.
        num_atoms: (F,) atoms that exist.
        rcut: cutoff radius, angstrom.
    """
    faults: dict[int, str] = {}
    with np.errstate(all="ignore"):  # numbers that overflow here are faults
        checks = []  # (F,) values of the frames, the largest one expected, and the message
        if box is not None:
            edges = np.linalg.norm(box, axis=2)  # (F, 3)
            volume = np.abs(np.linalg.det(box))  # (F,)
            # (F, 3) areas of the faces, and distances between opposite faces
            areas = np.linalg.norm(
                np.cross(box[:, [1, 2, 0]], box[:, [2, 0, 1]]), axis=2
            )
            heights = volume[:, None] / areas
            # (F,) atoms in a sphere of the mean density, and cells that reach into the cutoff
            neighbors = num_atoms * (4 / 3 * math.pi * rcut**3) / volume
            images = (2 * np.ceil(rcut / heights) + 1).prod(axis=1)
            is_flat = ~((volume > _FLAT_CELL * edges.prod(axis=1)) & (volume > 0))
            checks += [
                (neighbors, _MAX_NEIGHBORS, _TOO_DENSE),
                (images, _MAX_IMAGES, _TOO_THIN),
            ]
            checks += [(edges.max(axis=1), _MAX_EXTENT, _TOO_LONG), (is_flat, 0, _FLAT)]
        elif coord.shape[1]:
            checks.append(
                (np.ptp(coord, axis=1).max(axis=1, initial=0.0), _MAX_EXTENT, _TOO_WIDE)
            )
        checks.append(
            (np.abs(coord).max(axis=(1, 2), initial=0.0), MAX_POSITION, _TOO_FAR)
        )
        # the last of several faults of a frame is reported: a flat cell is also thin and dense
        for values, most, text in checks:
            # not `values > most`, which is false for nan
            for k in np.flatnonzero(~(values <= most)).tolist():
                fields = {"value": values[k], "most": most, "rcut": rcut}
                if box is not None:
                    cell = " ".join(f"{v:g}" for v in box[k].ravel())
                    fields |= {
                        "cell": cell,
                        "volume": volume[k],
                        "height": heights[k].min(),
                    }
                faults[k] = text.format(**fields)
    return dict(sorted(faults.items()))


def _refuse_faults(coord: Array, box: Array | None, rcut: float) -> None:
    faults = frame_faults(
        coord[None], None if box is None else box[None], np.array([len(coord)]), rcut
    )
    if faults:
        raise DataError(faults[0])


def neighbor_statistics(
    frames: Iterable[FrameGeometry],
    rcut: float,
    num_types: int,
    threads: int | None = None,
) -> NeighborStatistics:
    """Return shortest distances and largest numbers of neighbors over ``frames``.

    A few threads search.

    Args:
        frames: (coord (N, 3), box (3, 3) or None, types (N,) from 0) of each frame, consumed in
            order.
        rcut: cutoff radius, angstrom.
        num_types: T, the number of types.
        threads: number of threads; None: one for each core of this process, four at most.
    """
    whole: NeighborStatistics | None = None
    frame_min = list[float]()
    frame_pair = list[Array]()
    cores = os.cpu_count() or 1
    if hasattr(
        os, "sched_getaffinity"
    ):  # the cores that this process may use; not on macOS
        cores = len(os.sched_getaffinity(0))
    remaining = iter(frames)
    with ThreadPoolExecutor(threads or min(4, cores)) as pool:
        while chunk := list(islice(remaining, _FRAMES_AT_ONCE)):
            parts = [
                chunk[k : k + _FRAMES_PER_THREAD]
                for k in range(0, len(chunk), _FRAMES_PER_THREAD)
            ]
            results = pool.map(
                lambda part: [
                    _frame_statistics(frame, rcut, num_types) for frame in part
                ],
                parts,
            )
            for statistics in chain.from_iterable(results):
                frame_min.append(statistics.frame_min[0])
                frame_pair.append(statistics.frame_pair[0])
                if whole is not None:
                    nearest = np.minimum(whole.nearest, statistics.nearest)
                    statistics = replace(
                        statistics.with_counts_of(whole), nearest=nearest
                    )
                whole = statistics
    pairs = np.array(frame_pair, np.int64).reshape(-1, 2)
    whole = whole or _statistics_without_pairs(num_types)
    return replace(whole, frame_min=np.array(frame_min, np.float64), frame_pair=pairs)


def _sorted_pairs(
    i: Array, j: Array, shift: Array, distance: Array, natoms: int
) -> Pairs:
    near_first = np.argsort(distance)
    return _by_atom(
        i[near_first], j[near_first], shift[near_first], distance[near_first], natoms
    )


def _by_atom(i: Array, j: Array, shift: Array, distance: Array, natoms: int) -> Pairs:
    """Return pairs that are sorted by distance, by atom and then by distance.

    Args:
        i: (P,) atom.
        j: (P,) its neighbor.
        shift: (P, 3), see ``Pairs``.
        distance: (P,) angstrom.
        natoms: number of atoms.
    """
    order = stable_argsort(i, natoms)
    # Equal distances, as in a perfect crystal, are in the order of the search, which differs
    # between algorithms. The result must not: neighbors beyond `sel` are cut off by this order.
    tied = (np.diff(distance[order]) == 0) & (np.diff(i[order]) == 0)
    if tied.any():
        order = np.lexsort((*shift.T, j, distance, i))
    return Pairs(
        i[order],
        j[order],
        np.take(shift, order, axis=0),
        nearest=float(distance.min(initial=np.inf)),
    )


def _statistics_without_pairs(num_types: int) -> NeighborStatistics:
    """Return the statistics of one frame in which no pair is inside the cutoff."""
    nearest = np.full((num_types, num_types), np.inf)
    return NeighborStatistics(
        (0,) * num_types, np.empty(0), nearest, np.array([np.inf]), np.array([[-1, -1]])
    )


def _frame_statistics(
    frame: FrameGeometry, rcut: float, num_types: int
) -> NeighborStatistics:
    coord, box = frame[:2]
    types = np.asarray(frame[2], np.int64)
    natoms = len(types)
    arrays = _search(coord, box, rcut, "Pd")
    pairs = arrays["P"]  # (P, 2), each pair once
    distance = arrays["d"]  # (P,)
    if len(distance) == 0:
        return _statistics_without_pairs(num_types)
    i, j = pairs[:, 0], pairs[:, 1]
    type_i, type_j = types[i], types[j]
    # (N * T,) neighbors of each atom by type, counted from both ends of a pair
    counts = np.bincount(i * num_types + type_j, minlength=natoms * num_types)
    counts += np.bincount(j * num_types + type_i, minlength=natoms * num_types)
    nearest = np.full(num_types * num_types, np.inf)
    type_pair = type_i * num_types + type_j  # (P,)
    for k in np.flatnonzero(np.bincount(type_pair)):
        nearest[k] = distance[type_pair == k].min()
    by_types = nearest.reshape(
        num_types, num_types
    )  # symmetric after the minimum below
    shortest = int(distance.argmin())
    # (N, most neighbors) distance of each atom to its first, second, ... neighbor; infinite where
    # it has fewer
    near_first = np.argsort(distance)
    atom = np.stack([i[near_first], j[near_first]], 1).ravel()
    order = stable_argsort(atom, natoms)
    rank, numbers = rank_in_group(atom[order], natoms)
    ranked = np.full((natoms, numbers.max()), np.inf)
    ranked[atom[order], rank] = np.repeat(distance[near_first], 2)[order]
    return NeighborStatistics(
        max_neighbors=tuple(counts.reshape(natoms, num_types).max(axis=0).tolist()),
        by_rank=ranked.min(0),
        nearest=np.minimum(by_types, by_types.T),
        frame_min=distance[[shortest]],
        frame_pair=pairs[[shortest]],
    )


def _search(
    coord: Array, box: Array | None, rcut: float, quantities: str
) -> dict[str, Array]:
    """Return quantities of each pair once, in any order, by their letters in vesin.

    Args:
        coord: (N, 3), angstrom.
        box: (3, 3), or None for an open system.
        rcut: cutoff radius, angstrom.
        quantities: letters: ``P`` (P, 2) atoms, ``S`` (P, 3) shifts, ``D`` (P, 3) vectors, ``d``
            (P,) distances.
    """
    if box is not None and 0 < len(coord) <= _MAX_DENSE_DISTANCES**0.5:
        heights = 1 / np.linalg.norm(np.linalg.inv(box), axis=0)  # (3,)
        # atoms times atoms and images in the cell widened by the cutoff; in a cell with a height
        # of more than two cutoffs most of these distances are beyond it
        num_distances = len(coord) ** 2 * (1 + 2 * rcut / heights).prod()
        if heights.max() < 2 * rcut and num_distances < _MAX_DENSE_DISTANCES:
            return _search_dense(coord, box, rcut, heights)
    # The time of vesin grows with the cutoff. A cutoff far beyond an open system is shortened to
    # the diagonal of the system, which gives the same pairs.
    if box is None and len(coord):
        rcut = min(rcut, 1.0 + float(np.linalg.norm(np.ptp(coord, axis=0))))
    finder = NeighborList(cutoff=rcut, full_list=False, sorted=False, n_threads=1)
    arrays = finder.compute(
        points=np.ascontiguousarray(coord, np.float64),
        box=np.zeros((3, 3)) if box is None else np.ascontiguousarray(box, np.float64),
        periodic=box is not None,
        quantities=quantities,
    )
    # vesin counts atoms in unsigned numbers, whose differences would not be negative
    return {
        letter: a if a.dtype.kind == "f" or a.dtype == np.int32 else a.astype(np.int64)
        for letter, a in zip(quantities, arrays)
    }


def _search_dense(
    coord: Array, box: Array, rcut: float, heights: Array
) -> dict[str, Array]:
    """Return the quantities of ``_search`` from distances of all atoms to all images near the cell.

    For few atoms in a cell not larger than the cutoff it is faster than vesin, and several threads
    search at once: numpy gives up the lock of Python, vesin holds one of its own.
    """
    place = np.linalg.solve(box.T, coord.T).T  # (N, 3) in cell vectors
    cell = np.floor(
        place
    )  # (N, 3) the cell of each atom, which may be outside the first one
    place -= cell
    # how far the cutoff reaches along each cell vector
    reach = rcut / heights + _ROUNDING
    ranges = (np.arange(-most, most + 1.0) for most in np.ceil(reach))
    images = np.stack(np.meshgrid(*ranges, indexing="ij"), -1).reshape(-1, 3)
    # the cell itself, and one of each two opposite images: each pair is measured once
    images = images[len(images) // 2 :]
    # (images, N, 3): atoms of images that are within the cutoff of the box around the atoms
    moved = place + images[:, None]
    inside = (moved >= place.min(0) - reach) & (moved <= place.max(0) + reach)
    image, other = np.nonzero(inside.all(-1))
    start = place @ box  # (N, 3), angstrom
    end = (
        moved[image, other] @ box
    )  # (E, 3), angstrom; the first N are the atoms themselves
    # One product gives |start|^2 - 2 start . end + |end|^2. It is not exact, so that pairs are
    # measured again.
    unit = np.ones((len(end), 1))
    left = np.concatenate(
        [-2 * start, (start**2).sum(1, keepdims=True), unit[: len(start)]], 1
    )
    right = np.concatenate([end, unit, (end**2).sum(1, keepdims=True)], 1)
    # (N, E), a few rows at a time, as many as one thread multiplies
    square = np.empty((len(start), len(end)))
    rows = max(1, _MAX_SINGLE_THREAD_PRODUCTS // max(1, right.size))
    for first in range(0, len(start), rows):
        np.matmul(left[first : first + rows], right.T, out=square[first : first + rows])
    # in the cell itself each pair occurs twice, and each atom is at no distance of itself
    square[:, : len(coord)][np.tri(len(coord), dtype=bool)] = math.inf
    i, k = np.divmod(np.flatnonzero(square < rcut**2 * (1 + _ROUNDING)), len(end))
    j = other[k]
    # from positions as in the frame, and not as wrapped into the cell
    shift = (images[image] - cell[other])[k] + cell[i]
    vector = coord[j] - coord[i] + shift @ box
    distance = np.sqrt(np.einsum("pk,pk->p", vector, vector))
    arrays = {
        "P": np.stack([i, j], 1),
        "S": shift.astype(np.int32),
        "D": vector,
        "d": distance,
    }
    near = distance < rcut
    if not near.all():
        arrays = {letter: array[near] for letter, array in arrays.items()}
    return arrays
