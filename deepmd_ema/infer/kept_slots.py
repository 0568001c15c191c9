"""Batches of a frame whose atoms move: slots are filled from earlier pairs, without sorting."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.data.collate import ROUND_TO, collate, conditions_of, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.geometry import Pairs, rank_in_group, stable_argsort

# N atoms, P pairs, K slots, S sections


class FilledSlots(NamedTuple):
    """A frame with its neighbors in slots.

    Attributes:
        batch: of this frame.
        most: per section, the most neighbors of an atom inside the cutoff.
        nearest: shortest distance of two atoms, angstrom.
    """

    batch: Batch
    most: list[int]
    nearest: float


class MovingFrame:
    """Slots of a frame, and of those after it for which its pairs hold.

    Neighbors come in the order of their distances when the pairs were searched, not in that of
    their present distances, as in ``pair_frame``: results differ by the rounding of sums.

    Args:
        frame: its elements and its cell.
        pairs: also those beyond the cutoff.
        layout: of the neighbors of the model, for which :meth:`serves` is true.

    Attributes:
        pairs: the same object, by which :meth:`holds` recognizes them.
    """

    def __init__(self, frame: Frame, pairs: Pairs, layout: NeighborLayout) -> None:
        self.pairs = pairs
        self._types = frame.atom_type
        self._layout = layout
        self._sections = layout.num_types if layout.by_type else 1
        # a batch without neighbors, which gives all that does not change when atoms move
        nothing = Pairs(pairs.i[:0], pairs.j[:0], pairs.shift[:0], np.inf)
        self._empty = collate([pair_frame(frame, layout, lambda *_: nothing)], layout)
        self._order = self._empty.atom_order.numpy()
        row_of_atom = np.argsort(self._order)
        section = (
            frame.atom_type[pairs.j]
            if layout.by_type
            else np.zeros(len(pairs.j), np.int64)
        )
        group = row_of_atom[pairs.i] * self._sections + section
        # pairs come by distance: each group stays sorted by it
        sorter = stable_argsort(group, frame.num_atoms * self._sections)
        # (P,) by atom and section, and then by distance
        self._group = group[sorter]
        self._neighbor = row_of_atom[pairs.j][sorter]
        self._per_row = np.bincount(
            self._group // self._sections, minlength=frame.num_atoms
        )
        self._by_neighbor = stable_argsort(self._neighbor, frame.num_atoms)
        self._offset = 0.0 if frame.box is None else pairs.shift[sorter] @ frame.box

    @staticmethod
    def serves(layout: NeighborLayout) -> bool:
        """Whether a model neither uses the order of its neighbors nor leaves pairs out."""
        return not (
            layout.inner
            or layout.type_sel
            or layout.excluded_pairs
            or layout.nearest_first
        )

    def holds(self, frame: Frame, pairs: Pairs) -> bool:
        """Whether these are the slots of ``frame``, whose pairs are ``pairs``."""
        return pairs is self.pairs and np.array_equal(frame.atom_type, self._types)

    def at(self, frame: Frame) -> FilledSlots | None:
        """Return ``frame`` with its neighbors in slots; None if an atom has more than ``sel``."""
        natoms = frame.num_atoms
        layout = self._layout
        coord = frame.coord[self._order]
        vector = np.take(coord, self._neighbor, axis=0)
        vector -= np.repeat(coord, self._per_row, axis=0)
        vector += self._offset
        square = np.einsum("pk,pk->p", vector, vector)
        inside = square < layout.rcut**2
        near = np.flatnonzero(inside)
        counts = np.bincount(self._group[near], minlength=natoms * self._sections)
        most = counts.reshape(natoms, self._sections).max(axis=0)
        if (most > layout.sel).any():  # the farthest are dropped, which takes sorting
            return None
        slots = np.minimum(-(-most // ROUND_TO) * ROUND_TO, layout.sel)
        total = int(slots.sum())
        # The first slot of each group, minus the place of its first pair: added to the place of a
        # pair it gives its slot.
        first_slot = (
            np.arange(natoms)[:, None] * total + np.cumsum(slots) - slots
        ).ravel()
        first = first_slot - (np.cumsum(counts) - counts)
        slot = np.arange(len(near)) + np.repeat(first, counts)
        neighbor = np.repeat(np.arange(natoms), total)
        neighbor[slot] = self._neighbor[near]
        # empty slots have the atom itself as neighbor, beyond the cutoff, where nothing counts
        in_slots = np.zeros((natoms * total, 3))
        in_slots[:, 0] = 2 * layout.rcut
        in_slots[slot] = np.take(vector, near, axis=0)
        slot_of_pair = np.empty(len(square), np.int64)
        slot_of_pair[near] = slot
        # (N, most) the slots in which an atom is a neighbor, by which forces are summed; in the
        # order of the slots, as in `pair_frame`
        seen = self._by_neighbor[inside[self._by_neighbor]]
        rank, counts = rank_in_group(self._neighbor[seen], natoms)
        reverse = np.full(
            (natoms, -(-int(counts.max()) // ROUND_TO) * ROUND_TO), natoms * total
        )
        reverse[self._neighbor[seen], rank] = slot_of_pair[seen]
        batch = replace(
            self._empty,
            slots=tuple(slots.tolist()),
            coord=torch.from_numpy(coord),
            neighbor=torch.from_numpy(neighbor).view(natoms, total),
            vector=torch.from_numpy(in_slots).view(natoms, total, 3),
            reverse=torch.from_numpy(reverse),
            conditions=conditions_of([frame], self._order),
        )
        return FilledSlots(batch, most.tolist(), math.sqrt(square.min(initial=np.inf)))
