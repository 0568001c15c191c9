"""Batches filled up with dummy atoms, in frames of their own, so that few graphs are compiled.

torch makes a graph for each size, or, where sizes are symbols, one more for sizes 0 and 1 and for
sizes that were equal in the first batch (doc/decisions.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.config.labels import APARAM, LABELS

# F frames, A atoms, K neighbor slots, M reverse slots of the batch; F', A', K', M' of the filled
# one

MIN_SIZE = 2  # holds for every size: torch.compile makes other graphs for 0 and 1

Round = Callable[[int], int]


def at_least_two(number: int) -> int:
    """Return ``number``, or 2: for graphs that take sizes as symbols."""
    return max(MIN_SIZE, number)


def to_half_octave(number: int) -> int:
    """Return the next of 2, 3, 4, 6, 8, 12, 16, 24 and so on: for graphs of one size each.

    Two sizes for each power of two make few graphs, and a batch at most half as large again.
    """
    return _to_part(number, 4)


def to_eighth(number: int) -> int:
    """Return the next of 2, 3, ..., 16, 18, ..., 32, 36, ...: at most an eighth more.

    For graphs that cost little.
    """
    return _to_part(number, 16)


def _to_part(number: int, parts: int) -> int:
    """Return the next multiple of a part of the next power of two."""
    # the next power of two, in `parts` equal steps; numbers up to `parts` stay as they are
    step = max(1, (1 << (max(number, MIN_SIZE) - 1).bit_length()) // parts)
    return max(MIN_SIZE, -(-number // step) * step)


def to_prime(taken: Collection[int]) -> Round:
    """Return a function to the next prime from 5 on that is neither ``taken`` nor returned before.

    No two of its results are equal: torch takes sizes that are equal once for equal always.
    """
    used = set(taken)

    def next_prime(number: int) -> int:
        candidate = max(number, 5)
        while candidate in used or any(
            candidate % k == 0 for k in range(2, math.isqrt(candidate) + 1)
        ):
            candidate += 1
        used.add(candidate)
        return candidate

    return next_prime


@dataclass(frozen=True)
class Filled:
    """A batch filled up to chosen numbers of atoms, slots and frames, and the way back.

    The atoms added are in frames of their own, after those of the batch, without neighbors and
    labels. What a model predicts for the frames of the batch, its derivatives, and the loss are
    then those of the batch itself.

    Attributes:
        batch: filled up; labels of pairs of atoms are left out.
        rows: (A,) the atoms of the batch among those of the filled one.
        num_frames: of the batch.
    """

    batch: Batch
    rows: Tensor
    num_frames: int

    def take(self, prediction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of a prediction for the filled batch that belongs to the batch itself."""
        return {
            name: value.index_select(0, self.rows)
            if LABELS[name].per_atom
            else value[: self.num_frames].clone()
            for name, value in prediction.items()
        }


def pad(batch: Batch, layout: NeighborLayout, up: Round = at_least_two) -> Batch:
    """Return ``batch`` filled up, with its labels, for a loss in the place of ``batch``.

    A batch with labels of pairs of atoms is returned as it is: second derivatives are evaluated
    frame by frame.
    """
    if any(LABELS[name].per_pair for name in batch.labels):
        return batch
    return fill(batch, layout, up).batch


def fill(batch: Batch, layout: NeighborLayout, up: Round = at_least_two) -> Filled:
    """Return ``batch`` with the numbers that ``up`` gives for atoms, slots and frames.

    Atoms are counted by type, slots by section.

    Args:
        batch: on any device, where the work is done.
        layout: of the batch, whose ``sel`` is not exceeded.
        up: returns the next of the numbers that are wanted, at least 2.
    """
    device, num_atoms = batch.neighbor.device, len(batch.atom_type)
    more_frames = up(batch.num_frames + 1) - batch.num_frames
    # each added frame has one of the added atoms, and the last has all the others: there must be at
    # least as many atoms as frames
    counts = [up(n) for n in batch.type_counts]
    missing = more_frames - sum(counts) + num_atoms
    # too few: more atoms of the type for which `up` then adds fewest
    if missing > 0:
        larger = [up(n + missing) for n in counts]
        kind = min(range(len(counts)), key=lambda t: larger[t] - counts[t])
        counts[kind] = larger[kind]
    inner = [min(most, up(n)) for _, most, n in batch.inner]
    # a layout of one section has views of its first slots; a view of some slots is of another kind
    # than one of all, so that there is at least one slot more than in the largest view
    used = [max(batch.slots[0], *(n + 1 for n in inner))] if inner else batch.slots
    slots = tuple(min(most, up(n)) for n, most in zip(used, layout.sel, strict=True))
    total = sum(slots)
    rows = _places(batch.type_counts, tuple(counts), device)  # (A,)
    # (A') whether an atom is a dummy
    added = torch.ones(sum(counts), dtype=torch.bool, device=device).index_fill(
        0, rows, False
    )
    number = added.cumsum(0) - 1  # (A') place of each added atom among the added ones
    types = torch.cat(
        [batch.atom_type.new_full((n,), t) for t, n in enumerate(counts)]
    )  # (A')

    def per_atom(values: Tensor, rest: Tensor | None = None) -> Tensor:
        # (A, ...) to (A', ...): dummies have 0, or what `rest` has in their rows
        if rest is None:
            rest = values.new_zeros(len(added), *values.shape[1:])
        return rest.index_copy(0, rows, values)

    def per_frame(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(more_frames, *values.shape[1:])])

    labels = {
        name: value for name, value in batch.labels.items() if not LABELS[name].per_pair
    }
    sizes = batch.num_atoms.new_ones(more_frames)  # (F' - F,) atoms of each added frame
    sizes[-1] += sum(counts) - num_atoms - more_frames
    # the place of each slot of the batch among the flat slots (A' K'). An empty slot holds the atom
    # itself, beyond the cutoff, where every switching function is 0
    shape = (len(added), total)
    none = len(added) * total
    num_reverse = batch.reverse.shape[1]
    place = (rows[:, None] * total + _places(batch.slots, slots, device)).flatten()
    neighbor = torch.arange(len(added), device=device).repeat_interleave(total)
    vector = batch.vector.new_zeros(none, 3)
    vector[:, 0] = 2 * layout.rcut
    # (A', M'): numbers of flat slots are translated, and A K, which is none, to A' K'
    reverse = torch.full((len(added), up(num_reverse)), none, device=device)
    new_place = torch.cat([place, place.new_full((1,), none)])
    reverse[:, :num_reverse].index_copy_(0, rows, new_place[batch.reverse])
    filled = replace(
        batch,
        type_counts=tuple(counts),
        slots=slots,
        type_slots=tuple(
            min(most, up(n))
            for n, most in zip(batch.type_slots, layout.type_sel, strict=True)
        ),
        inner=tuple(
            (rcut, most, min(n, total))
            for (rcut, most, _), n in zip(batch.inner, inner, strict=True)
        ),
        atom_type=types,
        atom_frame=per_atom(
            batch.atom_frame, batch.num_frames + number.clamp(max=more_frames - 1)
        ),
        atom_order=per_atom(batch.atom_order, num_atoms + number),
        num_atoms=torch.cat([batch.num_atoms, sizes]),
        coord=per_atom(batch.coord),
        box=per_frame(batch.box),
        periodic=per_frame(batch.periodic),
        neighbor=neighbor.index_copy_(0, place, rows[batch.neighbor].flatten()).view(
            shape
        ),
        vector=vector.index_copy_(0, place, batch.vector.flatten(0, 1)).view(*shape, 3),
        reverse=reverse,
        labels={
            name: per_atom(v) if LABELS[name].per_atom else per_frame(v)
            for name, v in labels.items()
        },
        has_label={name: per_frame(batch.has_label[name]) for name in labels},
        conditions={
            name: per_atom(value) if name == APARAM else per_frame(value)
            for name, value in batch.conditions.items()
        },
        sizes=(),
        num_dummies=(more_frames, len(added) - num_atoms),
    )
    return Filled(filled, rows, batch.num_frames)


def _places(
    used: tuple[int, ...], filled: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return the places of elements of groups of ``used`` sizes in groups of ``filled`` sizes."""
    starts = accumulate(filled, initial=0)
    # made on the device: a copy from the host would wait for it
    return torch.cat(
        [
            torch.arange(start, start + n, device=device)
            for n, start in zip(used, starts)
        ]
    )
