"""Frames to batches: neighbor matrices are made once for each frame and joined by offsets."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import APARAM, FPARAM, LABELS
from deepmd_ema.data.source import Frame, FrameSource
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import (
    NEAR_ORIGIN,
    Array,
    Pairs,
    find_pairs,
    find_pairs_of_molecules,
    rank_in_group,
    small_int,
    stable_argsort,
)

# N atoms of a frame, K slots of a frame, M reverse slots, T types, S images; A, F, K of a batch as
# in batch.py

MAX_CACHE_BYTES = (
    4 << 30
)  # a 192-atom frame with 120 slots takes 150 kB: 28,000 of them
# atoms of an open frame whose pairs are found together with those of other frames of a batch
MAX_ATOMS_TOGETHER = 64
# images in the smallest block of cells around all that are needed: up to this number a table of the
# block finds these, which is faster than to sort
_MAX_TABLE_IMAGES = 1 << 20
ROUND_TO = 4  # slots come in multiples of this, so that batches have few shapes


@dataclass(frozen=True, eq=False)
class PairedFrame:
    """A frame with its neighbors in slots, which do not depend on the other frames of a batch.

    Atoms are sorted by type ("rows"). The neighbor of an empty slot is the atom itself, and
    its image is row 0 of ``table``: ``coord[neighbor] + table[image] - coord`` is the vector of
    every slot, empty or not.

    Attributes:
        frame: as it was read.
        order: (N,) the atom of the frame in each row.
        counts: (T,) atoms of each type.
        slots: slots per section, rounded up.
        type_slots: slots per type, where the layout has a ``type_sel``.
        inner: the same of each inner neighborhood of the layout.
        coord: (N, 3) positions by row.
        neighbor: (N, K) row of the neighbor, small integers.
        image: (N, K) place of the neighbor's image in ``table``, small integers.
        table: (S, 3) cartesian shifts of the images, angstrom.
        reverse: (N, M) int32 slots ``row * K + k`` whose neighbor is the row; ``N * K`` is none.
        most: per section the most neighbors inside the cutoff that an atom has, with those beyond
            ``sel``, which have no slots.
        nearest: shortest distance of two atoms, angstrom; infinite without pairs inside the cutoff.
    """

    frame: Frame
    order: Array
    counts: Array
    slots: tuple[int, ...]
    type_slots: tuple[int, ...]
    inner: tuple[int, ...]
    coord: Array
    neighbor: Array
    image: Array
    table: Array
    reverse: Array
    most: tuple[int, ...]
    nearest: float

    @property
    def nbytes(self) -> int:
        """Memory in use, approximately."""
        arrays = (
            self.order,
            self.coord,
            self.neighbor,
            self.image,
            self.table,
            self.reverse,
            self.frame.coord,
        )
        return sum(a.nbytes for a in (*arrays, *self.frame.labels.values())) + 2048


def pair_frame(
    frame: Frame,
    layout: NeighborLayout,
    find: Callable[[Array, Array | None, float], Pairs] = find_pairs,
    round_to: int = ROUND_TO,
) -> PairedFrame:
    """Return ``frame`` with its neighbors in slots.

    Args:
        frame: as it was read.
        layout: how the model wants its neighbors.
        find: gives the pairs of positions and a cell within a cutoff.
        round_to: slots per section are rounded up to a multiple of this, but never above ``sel``.

    Raises:
        DataError: if the pairs of the frame cannot be searched.
    """
    try:
        pairs = find(frame.coord, frame.box, layout.rcut)
    except DataError as error:
        source = "{} frame {}: ".format(*frame.source) if frame.source[0] else ""
        raise DataError([source + problem for problem in error.problems]) from None
    natoms, atom_type = frame.num_atoms, frame.atom_type
    order = stable_argsort(atom_type, layout.num_types)
    row_of_atom = np.empty(natoms, np.int64)
    row_of_atom[order] = np.arange(natoms)
    # the nearest neighbors in each section, or in one section of all types
    sections = layout.num_types if layout.by_type else 1
    section = atom_type[pairs.j] if layout.by_type else np.zeros(len(pairs.j), np.int64)
    key = pairs.i * sections + section
    # pairs come by distance, and a stable sort leaves each group in this order
    sorter = stable_argsort(key, natoms * sections)
    key = key[sorter]
    i = pairs.i[sorter]
    j = pairs.j[sorter]
    rank, counts = rank_in_group(key, natoms * sections)
    most = tuple(counts.reshape(natoms, sections).max(axis=0).tolist())
    keep = rank < np.array(layout.sel)[section[sorter]]
    # also by type, neighbors must be among the nearest sum(sel) of all types, which DeePMD-kit
    # chooses before it looks at types
    nearest, _ = rank_in_group(pairs.i, natoms)
    keep &= (nearest < sum(layout.sel))[sorter]
    if layout.excluded_pairs:
        excluded = np.zeros((layout.num_types, layout.num_types), bool)
        for a, b in layout.excluded_pairs:
            excluded[a, b] = excluded[b, a] = True
        keep &= ~excluded[atom_type[i], atom_type[j]]
    if not keep.all():
        key = key[keep]
        i = i[keep]
        j = j[keep]
        sorter = sorter[keep]
        rank, counts = rank_in_group(key, natoms * sections)
    slots = _rounded(counts.reshape(natoms, sections).max(axis=0), layout.sel, round_to)
    row = row_of_atom[i]
    column = row_of_atom[j]
    place = rank + (np.cumsum(slots) - slots)[section[sorter]]
    table, image_of_pair = _images(
        np.take(pairs.shift, sorter, axis=0), frame.box, layout.rcut
    )
    total = sum(slots)
    flat = row * total + place
    neighbor = np.repeat(np.arange(natoms, dtype=small_int(natoms)), total)
    neighbor[flat] = column
    image = np.zeros(natoms * total, small_int(len(table)))
    image[flat] = image_of_pair
    coord = np.ascontiguousarray(frame.coord[order])
    inner, type_slots = [], tuple[int, ...]()
    for rcut, limit in layout.inner:
        distance = np.linalg.norm(
            coord[column] - coord[row] + table[image_of_pair], axis=1
        )
        # a neighbor at the cutoff itself may be inside of it in other arithmetic
        used = place[distance < rcut + 1e-6].max(initial=-1) + 1
        inner.append(min(*_rounded([used], [limit], round_to), total))
    if layout.type_sel:
        kind = row * layout.num_types + atom_type[order][column]
        counts = np.bincount(kind, minlength=natoms * layout.num_types).reshape(
            natoms, layout.num_types
        )
        type_slots = _rounded(counts.max(axis=0), layout.type_sel, round_to)
    # in the order of the slots: sums over reverse slots are then bitwise the same, however the
    # pairs were found
    by_slot = np.flatnonzero(image)
    center = neighbor[by_slot].astype(np.int64)
    sorter = stable_argsort(center, natoms)
    rank, counts = rank_in_group(center[sorter], natoms)
    reverse = np.full(
        (natoms, -(-int(counts.max(initial=0)) // round_to) * round_to),
        natoms * total,
        np.int32,
    )
    reverse[center[sorter], rank] = by_slot[sorter]
    shape = (natoms, total)
    counts = np.bincount(atom_type, minlength=layout.num_types)
    return PairedFrame(
        frame,
        order,
        counts,
        slots,
        type_slots,
        tuple(inner),
        coord,
        neighbor.reshape(shape),
        image.reshape(shape),
        table,
        reverse,
        most,
        pairs.nearest,
    )


class PairCache:
    """Frames with their neighbors in slots, computed once and stored up to ``max_bytes``.

    Molecules, whose pairs are found faster together (:func:`collate`), are returned as they were
    read, and stored only if reading them takes long.

    Nothing is evicted when it is full: frames are drawn in permutations, so that no frame is more
    likely to come next than another. All tasks of a run, their loaders and statistics share one
    cache. May be used by several threads.

    Args:
        max_bytes: by default a quarter of the machine's memory over the processes on it, at most 4
            GiB.
        local_size: processes of the run on this machine.
    """

    def __init__(self, max_bytes: int | None = None, local_size: int = 1) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.max_bytes = (
            min(MAX_CACHE_BYTES, memory // (4 * local_size))
            if max_bytes is None
            else max_bytes
        )
        self.num_bytes = 0
        self._frames: dict[
            tuple[FrameSource, int, NeighborLayout | None], PairedFrame | Frame
        ] = {}
        self._lock = threading.Lock()

    def get(
        self, system: FrameSource, index: int, layout: NeighborLayout
    ) -> PairedFrame | Frame:
        """Return frame ``index`` of ``system``, with its neighbors unless it is a molecule."""
        for key_layout in (layout, None):  # molecules are stored without a layout
            if (stored := self._frames.get((system, index, key_layout))) is not None:
                return stored
        frame = system.frame(index)
        entry: PairedFrame | Frame = frame
        if not is_molecule(frame):
            entry = paired = pair_frame(frame, layout)
            num_bytes = paired.nbytes
        elif system.is_slow:
            num_bytes = (
                frame.coord.nbytes + sum(a.nbytes for a in frame.labels.values()) + 1024
            )
        else:
            return frame
        key = system, index, layout if isinstance(entry, PairedFrame) else None
        with self._lock:
            if key not in self._frames and self.num_bytes + num_bytes <= self.max_bytes:
                self._frames[key] = entry
                self.num_bytes += num_bytes
        return entry

    def __len__(self) -> int:
        return len(self._frames)


def collate(
    frames: Sequence[Frame | PairedFrame],
    layout: NeighborLayout,
    labels: Sequence[str] = (),
) -> Batch:
    """Return ``frames`` as one batch.

    A label that some frames lack is zero in these frames, and its ``has_label`` is 0.

    Args:
        frames: at least one; prepared by ``pair_frame`` with the same layout, or not. The pairs of
            molecules that are not prepared are found together, if the batch has nothing else.
        layout: how the model wants its neighbors.
        labels: names of labels that the batch has even if no frame has them, unless they are of
            pairs of atoms.
    """
    raw = [f.frame if isinstance(f, PairedFrame) else f for f in frames]
    num_atoms = np.array([f.num_atoms for f in raw])
    if not any(isinstance(f, PairedFrame) for f in frames) and all(
        map(is_molecule, raw)
    ):
        # all molecules as one frame, in which no pair has atoms of two of them
        joined = Frame(
            np.concatenate([f.coord for f in raw]),
            np.concatenate([f.atom_type for f in raw]),
        )
        paired = [
            pair_frame(
                joined,
                layout,
                lambda coord, box, rcut: find_pairs_of_molecules(
                    coord, num_atoms, rcut
                ),
            )
        ]
    else:
        paired = [
            f if isinstance(f, PairedFrame) else pair_frame(f, layout) for f in frames
        ]
    # rows of the batch that the rows of each frame become: by type, then by frame
    counts = np.stack([p.counts for p in paired])  # (F, T)
    start = (
        np.cumsum(counts.T.ravel()).reshape(counts.T.shape)
        - counts.T
        - (np.cumsum(counts, axis=1) - counts).T
    )
    rows = [
        np.arange(c.sum()) + np.repeat(start[:, k], c) for k, c in enumerate(counts)
    ]
    slots = tuple(max(widths) for widths in zip(*(p.slots for p in paired)))
    if len(paired) == 1:
        only = paired[0]
        neighbor = only.neighbor.astype(np.int64)
        vector = _vectors(only)
        reverse = only.reverse.astype(np.int64)
    else:
        all_atoms, total = int(num_atoms.sum()), sum(slots)
        neighbor = np.repeat(np.arange(all_atoms), total).reshape(all_atoms, total)
        vector = np.zeros((all_atoms, total, 3))
        vector[:, :, 0] = 2 * layout.rcut
        reverse = np.full(
            (all_atoms, max(p.reverse.shape[1] for p in paired)),
            all_atoms * total,
            np.int64,
        )
        for part, row in zip(paired, rows):
            # columns of the batch for those of the frame, whose sections may have fewer slots
            columns = np.concatenate(
                [
                    np.arange(n) + first
                    for n, first in zip(part.slots, np.cumsum(slots) - slots)
                ]
            )
            to_flat = np.append(
                (row[:, None] * total + columns).ravel(), all_atoms * total
            )
            reverse[row, : part.reverse.shape[1]] = to_flat[part.reverse]
            where = row if len(columns) == total else np.ix_(row, columns)
            neighbor[where], vector[where] = row[part.neighbor], _vectors(part)
    before = np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    order = _by_row([p.order + b for p, b in zip(paired, before)], rows)
    label_values = dict[str, torch.Tensor]()
    has_label = dict[str, torch.Tensor]()
    for name in dict.fromkeys((*labels, *(name for f in raw for name in f.labels))):
        label, has = LABELS[name], [name in f.labels for f in raw]
        if label.per_pair and not any(has):
            # zeros carry no information, and without them nothing is computed to compare with
            continue
        has_label[name] = _tensor(np.array(has, np.float64))
        parts = [
            f.labels[name]
            if name in f.labels
            else np.zeros(label.shape_in_frame(f.num_atoms))
            for f in raw
        ]
        # pairs of atoms stay in the order of the files
        values = (
            np.concatenate(parts)
            if label.per_atom or label.per_pair
            else np.stack(parts)
        )
        label_values[name] = _tensor(
            np.take(values, order, axis=0) if label.per_atom else values
        )
    return Batch(
        type_counts=tuple(counts.sum(axis=0).tolist()),
        slots=slots,
        type_slots=tuple(
            max(widths) for widths in zip(*(p.type_slots for p in paired))
        ),
        inner=tuple(
            (*limits, max(p.inner[k] for p in paired))
            for k, limits in enumerate(layout.inner)
        ),
        atom_type=_tensor(np.take(np.concatenate([f.atom_type for f in raw]), order)),
        atom_frame=_tensor(np.repeat(np.arange(len(raw)), num_atoms)[order]),
        atom_order=_tensor(order),
        num_atoms=_tensor(num_atoms),
        coord=_tensor(_by_row([p.coord for p in paired], rows)),
        box=_tensor(
            np.stack([np.zeros((3, 3)) if f.box is None else f.box for f in raw])
        ),
        periodic=_tensor(np.array([f.box is not None for f in raw])),
        neighbor=_tensor(neighbor),
        vector=_tensor(vector),
        reverse=_tensor(reverse),
        labels=label_values,
        has_label=has_label,
        conditions=conditions_of(raw, order),
        frames=tuple(f.source for f in raw),
        most=tuple(max(numbers) for numbers in zip(*(p.most for p in paired))),
        sizes=tuple(f.num_atoms for f in raw),
    )


def is_molecule(frame: Frame) -> bool:
    """Whether a frame is open and so small that its pairs may be found by measuring all of them."""
    if frame.box is not None or frame.num_atoms > MAX_ATOMS_TOGETHER:
        return False
    # positions that are NaN are not <= the bound: pair_frame refuses such a frame
    return bool(np.abs(frame.coord).max(initial=0.0) <= NEAR_ORIGIN)


def _rounded(
    used: Iterable[int], limits: Iterable[int], round_to: int
) -> tuple[int, ...]:
    return tuple(
        min(limit, -(-int(n) // round_to) * round_to) for n, limit in zip(used, limits)
    )


def _images(shift: Array, box: Array | None, rcut: float) -> tuple[Array, Array]:
    """Return the table of cartesian shifts, and the place of each pair's image in it.

    The first shift is that of empty slots.
    """
    # twice the cutoff: the switching function of an empty slot is 0
    empty = np.array([[2.0 * rcut, 0.0, 0.0]])
    if box is None or len(shift) == 0:
        return np.concatenate([empty, np.zeros((1, 3))]), np.ones(len(shift), np.int64)
    columns = np.ascontiguousarray(shift.T)  # (3, pairs)
    low = columns.min(axis=1)
    span = columns.max(axis=1) - low + 1.0  # a product of floats does not overflow
    if (
        span.prod() > _MAX_TABLE_IMAGES
    ):  # atoms far outside of the cell, which need not be wrapped
        images, image_of_pair = np.unique(shift, axis=0, return_inverse=True)
        return np.concatenate([empty, images @ box]), image_of_pair.ravel() + 1
    span = span.astype(np.int64)
    # number of each image in its block of cells, x slowest
    cell = columns - low[:, None]
    code = (cell[0] * span[1] + cell[1]) * span[2] + cell[2]
    present = np.bincount(code, minlength=int(span.prod())) > 0
    codes = np.flatnonzero(present)
    images = np.stack(np.unravel_index(codes, span), axis=1) + low
    return np.concatenate([empty, images @ box]), np.cumsum(present)[code]


def _by_row(parts: Sequence[Array], rows: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[
            0
        ].copy()  # the frame stays in the cache, and a batch may be changed or pinned
    out = np.empty((sum(len(p) for p in parts), *parts[0].shape[1:]), parts[0].dtype)
    for part, row in zip(parts, rows):
        out[row] = part
    return out


def _vectors(paired: PairedFrame) -> Array:
    # in this order: in an empty slot coord - coord is exactly zero, so that its vector is exactly
    # the first row of the table
    vector = np.take(paired.coord, paired.neighbor, axis=0)  # (N, K, 3)
    vector -= paired.coord[:, None]
    vector += np.take(paired.table, paired.image, axis=0)
    return vector


def conditions_of(frames: Sequence[Frame], order: Array) -> dict[str, torch.Tensor]:
    """Return the frame and atom parameters of frames, the latter in the ``order`` of a batch."""
    out = {}
    for name in (FPARAM, APARAM):
        parts = [getattr(f, name) for f in frames if getattr(f, name) is not None]
        assert len(parts) in (0, len(frames)), (
            f"frames with and without {name} in one batch"
        )
        if parts:
            out[name] = _tensor(
                np.stack(parts)
                if name == FPARAM
                else np.take(np.concatenate(parts), order, axis=0)
            )
    return out


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
