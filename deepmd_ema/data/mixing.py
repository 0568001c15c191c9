"""Batches of frames of all systems: a fixed number of frames, or as many as fit into a number of atoms."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from deepmd_ema.data.epochs import FRAMES, SYSTEMS, EpochShares, permutation
from deepmd_ema.sorting import Array, stable_argsort

Frames = Sequence[tuple[int, int]]
"""System and number of each frame."""

_TRIAL_SEED = 0  # of the orders in which batches are counted: their number must not depend on the seed of a run
_MAX_TRIES = 100  # orders of an epoch that are tried before a batch may have more atoms than it should


class MixedBatches:
    """Batches whose frames are drawn from all systems.

    An epoch is as many draws as there are frames. In proportion to the number of frames, every frame is drawn
    once; with other probabilities each system's frames come in permutations one after the other. The shuffled frames
    are cut into batches: those of a single system are the batches of one system of that size.

    Batches of ``num_frames`` frames are shared by the ranks: each has every ``world_size``-th frame of a batch that is
    ``world_size`` times as large. Batches of ``num_atoms`` atoms are filled for each rank: a batch ends where the next
    frame would exceed ``num_atoms``, and a larger frame is alone. An epoch always has the same number of them, the
    largest that orders tried beforehand need: where an order needs fewer, the largest batches are halved; where it
    needs more, another order is taken.

    Args:
        frames: numbers of the frames of each system.
        natoms: atoms of each of these frames.
        probabilities: of a frame to be one of each system.
        num_frames: frames per batch and rank, or None.
        num_atoms: atoms per batch and rank, if ``num_frames`` is None.
        seed: of all random orders.
        world_size: number of ranks.

    Attributes:
        per_epoch: steps of an epoch.
    """

    def __init__(
        self,
        frames: Sequence[Array],
        natoms: Sequence[Array],
        probabilities: Sequence[Fraction],
        num_frames: int | None,
        num_atoms: int,
        seed: int,
        world_size: int,
    ) -> None:
        self._frames, self._natoms = frames, natoms
        self._total = sum(map(len, frames))
        self._in_epoch = EpochShares(self._total, probabilities).in_epoch
        self._num_frames, self._num_atoms = num_frames, num_atoms
        self._seed, self._world_size = seed, world_size
        if num_frames is not None:
            self.per_epoch = -(-self._total // (num_frames * world_size))
        else:
            trials = max(4, min(64, (1 << 20) // self._total))  # the time is that of at least a million frames
            orders = (self._order(epoch, _TRIAL_SEED) for epoch in range(trials))
            most = max(len(_fill(order.natoms, num_atoms)) for order in orders)
            self.per_epoch = -(-most // world_size)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def step(self, n: int) -> list[Frames]:
        """Return the frames of each rank in step ``n``; the last ranks may be left out."""
        epoch, place = divmod(n, self.per_epoch)
        order, starts = self._epoch(epoch)
        if self._num_frames is not None:
            together = order.part(starts[place], starts[place + 1])
            return [together[rank :: self._world_size] for rank in range(min(self._world_size, len(together)))]
        edges = starts[place * self._world_size : (place + 1) * self._world_size + 1]
        return [order.part(first, last) for first, last in pairwise(edges)]

    def _make_epoch(self, epoch: int) -> tuple[_Order, Array]:
        """Return the frames of an epoch, without their atoms, the first of each batch, and the end of the last."""
        order = self._order(epoch, self._seed)
        if self._num_frames is not None:
            starts = list(range(0, self._total, self._num_frames * self._world_size))
        else:
            order, starts = self._filled(order, epoch)
        return order._replace(natoms=order.natoms[:0].copy()), np.array([*starts, self._total])

    def _filled(self, order: _Order, epoch: int) -> tuple[_Order, list[int]]:
        """Return an order that has no more batches than an epoch, with as many where frames suffice."""
        wanted = self.per_epoch * self._world_size
        tried, limit = order, self._num_atoms
        for attempt in count(1):
            starts = _fill(tried.natoms, limit)
            if len(starts) <= wanted:
                return tried, _halve_largest(starts, tried.natoms, wanted)
            tried = order.shuffled(permutation(self._total, self._seed, SYSTEMS, epoch, attempt))
            if attempt > _MAX_TRIES:  # few frames of very different sizes, drawn with probabilities of their own
                limit += limit // 50 + 1
        raise AssertionError

    def _order(self, epoch: int, seed: int) -> _Order:
        """Return the frames of an epoch in random order; those of one system are in the order of its permutations."""
        first, counts = self._in_epoch(epoch)
        parts = [self._drawn(system, *of, seed) for system, of in enumerate(zip(first, counts))]
        systems = np.repeat(np.arange(len(counts)), counts)[permutation(self._total, seed, SYSTEMS, epoch)]
        by_system = stable_argsort(systems, len(counts))
        frames, natoms = np.empty((2, self._total), np.int64)
        frames[by_system] = np.concatenate([own[part] for own, part in zip(self._frames, parts)])
        natoms[by_system] = np.concatenate([own[part] for own, part in zip(self._natoms, parts)])
        return _Order(systems, frames, natoms)

    def _drawn(self, system: int, first: int, count: int, seed: int) -> Array:
        """Return the places, among its frames, of the draws ``first``, ``first + 1``, ... of a system."""
        size = len(self._frames[system])
        if count == 0:
            return np.zeros(0, np.int64)
        rounds = range(first // size, (first + count - 1) // size + 1)
        drawn = np.concatenate([permutation(size, seed, FRAMES, system, number) for number in rounds])
        return drawn[first % size : first % size + count]


class _Order(NamedTuple):
    """The frames of an epoch in their order: system, number and atoms of each."""

    systems: Array
    frames: Array
    natoms: Array

    def part(self, first: int, last: int) -> Frames:
        return list(zip(self.systems[first:last].tolist(), self.frames[first:last].tolist()))

    def shuffled(self, order: Array) -> _Order:
        return _Order(self.systems[order], self.frames[order], self.natoms[order])


def _fill(natoms: Array, limit: int) -> list[int]:
    """Return the first frames of batches with as many frames as have at most ``limit`` atoms, at least one."""
    ends = np.cumsum(natoms)
    after = np.searchsorted(ends, ends - natoms + limit, side="right")  # of a batch that begins there
    following = np.maximum(after, np.arange(1, len(ends) + 1)).tolist()
    starts = [0]
    while following[starts[-1]] < len(following):
        starts.append(following[starts[-1]])
    return starts


def _halve_largest(starts: Sequence[int], natoms: Array, number: int) -> list[int]:
    """Return the first frames of ``number`` batches, or as many as there can be: those of most atoms are halved."""
    ends = np.concatenate([[0], np.cumsum(natoms)])
    edges = [*starts, len(natoms)]
    largest = [(int(ends[a] - ends[b]), a, b) for a, b in pairwise(edges) if b - a > 1]
    heapq.heapify(largest)
    more = list[int]()
    while largest and len(starts) + len(more) < number:
        _, first, last = heapq.heappop(largest)
        middle = (first + last) // 2
        more.append(middle)
        for a, b in ((first, middle), (middle, last)):
            if b - a > 1:
                heapq.heappush(largest, (int(ends[a] - ends[b]), a, b))
    return sorted([*starts, *more])
