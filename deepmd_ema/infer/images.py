"""Images of the atoms of a frame and the list of its neighbors, as compiled models take them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmd_ema.batch import NeighborLayout
from deepmd_ema.data.source import Frame
from deepmd_ema.geometry import Pairs, rank_in_group

# N atoms, E atoms and images, P pairs, L slots


class Images:
    """Images and neighbors of a frame, and of those after it for which its pairs hold.

    Args:
        frame: its elements and its cell.
        pairs: also those beyond the cutoff, which a compiled model leaves out.
        layout: of the neighbors of the model.
        close: angstrom; only pairs that are nearer than this can become nearer than those of the
            training data while the pairs hold.
        device: where the model computes.

    Attributes:
        pairs: the same object, by which :meth:`hold` recognizes them.
        tensors: types (E,), neighbors (N, L) and mapping (E,).
    """

    def __init__(
        self,
        frame: Frame,
        pairs: Pairs,
        layout: NeighborLayout,
        close: float,
        device: torch.device,
    ) -> None:
        self.pairs = pairs
        self._types = frame.atom_type
        self._layout = layout
        self._box = frame.box
        natoms = frame.num_atoms
        sections = len(layout.sel)
        # (P,) atom and section of the neighbor of each pair, as one number
        self._group = pairs.i * sections + (
            frame.atom_type[pairs.j] if layout.by_type else 0
        )
        distance = np.linalg.norm(pairs.vector(frame.coord, frame.box), axis=1)
        self._close = np.flatnonzero(distance < close)
        self._most = self._count(np.ones(len(distance), bool))
        self._start = frame.coord.copy()
        # angstrom; while no neighbor that is dropped can come inside the cutoff, none is counted
        self._crowded = self._nearest_dropped(distance)
        # each atom in another cell is one image, whichever atoms it is a neighbor of
        moved = pairs.shift.any(axis=1)
        images, place = np.unique(
            np.column_stack([pairs.j, pairs.shift])[moved], axis=0, return_inverse=True
        )
        target = pairs.j.copy()
        target[moved] = natoms + place.ravel()
        rank, counts = rank_in_group(pairs.i, natoms)
        nlist = np.full((natoms, max(1, counts.max(initial=0))), -1, np.int64)
        nlist[pairs.i, rank] = target
        mapping = np.concatenate([np.arange(natoms), images[:, 0]])
        # (E, 3) from an atom to its image, which stays the same while the cell does
        offset = np.zeros((len(mapping), 3))
        if frame.box is not None:
            offset[natoms:] = images[:, 1:] @ frame.box
        self._mapping = mapping
        self._offset = offset
        self._device = device
        self.tensors = tuple(
            torch.from_numpy(array).to(device)
            for array in (frame.atom_type[mapping].astype(np.int64), nlist, mapping)
        )

    def hold(self, frame: Frame, pairs: Pairs) -> bool:
        """Whether these are the images of ``frame``, whose pairs are ``pairs``."""
        return pairs is self.pairs and np.array_equal(frame.atom_type, self._types)

    def coord(self, coord: NDArray[np.float64]) -> Tensor:
        """Return the positions (E, 3) from those of the atoms (N, 3)."""
        return torch.from_numpy(coord[self._mapping] + self._offset).to(self._device)

    def most(self, coord: NDArray[np.float64]) -> tuple[int, ...]:
        """Return per section the most neighbors of an atom inside the cutoff, or a bound.

        A bound is at most ``sel``, so that it is no reason for a warning.
        """
        # no pair is shorter than it was by more than both of its atoms have moved
        moved = float(
            np.sqrt(np.square(coord - self._start).sum(axis=1).max(initial=0.0))
        )
        if self._layout.rcut + 2 * moved <= self._crowded:
            return tuple(
                min(most, sel) for most, sel in zip(self._most, self._layout.sel)
            )
        distance = np.linalg.norm(self.pairs.vector(coord, self._box), axis=1)
        return self._count(distance < self._layout.rcut)

    def nearest(self, coord: NDArray[np.float64]) -> float:
        """Return the shortest distance of two atoms, angstrom; infinity where it is not short."""
        near = self._close
        close_pairs = Pairs(
            self.pairs.i[near],
            self.pairs.j[near],
            self.pairs.shift[near],
            self.pairs.nearest,
        )
        vector = close_pairs.vector(coord, self._box)
        return float(np.linalg.norm(vector, axis=1).min(initial=np.inf))

    def _nearest_dropped(self, distance: NDArray[np.float64]) -> float:
        """Return the least distance of a neighbor that ``sel`` has no room for; inf without any."""
        if all(most <= sel for most, sel in zip(self._most, self._layout.sel)):
            return np.inf
        # pairs come by atom, then by distance
        order = np.argsort(self._group, kind="stable")
        sections = len(self._layout.sel)
        group = self._group[order]
        rank, _ = rank_in_group(group, len(self._types) * sections)
        dropped = rank >= np.array(self._layout.sel)[group % sections]
        return float(distance[order][dropped].min(initial=np.inf))

    def _count(self, inside: NDArray[np.bool_]) -> tuple[int, ...]:
        """Return per section the most neighbors of an atom, of the pairs that are inside (P,)."""
        sections = len(self._layout.sel)
        counts = np.bincount(self._group[inside], minlength=len(self._types) * sections)
        return tuple(counts.reshape(-1, sections).max(axis=0).tolist())
