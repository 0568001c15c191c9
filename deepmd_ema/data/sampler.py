"""The frames of batch n as a pure function of (seed, n).

A run is resumed from the number of a batch alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from deepmd_ema.config.schema.text_options import BatchSizeRule, SystemProbability
from deepmd_ema.errors import ConfigError, DataError
from deepmd_ema.findings import Finding, warning
from deepmd_ema.geometry import Array, stable_argsort
from deepmd_ema.text import counted

BatchRule: TypeAlias = "int | str | Sequence[int]"
Sizes: TypeAlias = "int | Array"
"""Atoms of each frame of a system, or one number if all have as many."""
Frames: TypeAlias = Sequence[tuple[int, int]]
"""System and number of each frame."""

_GRID = 1 << 40  # probabilities are multiples of 1 / _GRID per epoch
# odd, next to _GRID / golden ratio: its multiples modulo _GRID fill the grid most evenly
_GOLDEN = 679_535_556_991
# streams of the seed: order of batches in an epoch, of frames in a system, of systems among the
# frames of an epoch
_BATCHES = 1
_FRAMES = 2
_SYSTEMS = 3
# seed of the orders in which batches of mix:N are counted before the run: the number of batches in
# an epoch, and with it the number of steps, must not depend on the seed of a run
_TRIAL_SEED = 0
# orders of an epoch that are tried before a batch may have more atoms than it should
_MAX_TRIES = 100


class Sampler:
    """The frames of each batch, in an endless sequence of epochs.

    A batch holds frames of one system, or of all systems with the rules ``mixed:N`` and ``mix:N``.
    An epoch is ``batches_per_epoch`` batches in an order of its own. With probabilities in
    proportion to the systems' sizes (the default) an epoch has every frame exactly once; with
    others a system's number of batches (frames, if they are mixed) differs by at most one between
    epochs, follows its probability in the long run, and its frames come in permutations one after
    the other, each frame once per permutation. The last batch of a permutation may be smaller.
    Mixed frames are shuffled and then cut into batches: those of a single system are the batches of
    one system of that size.

    With ``world_size`` ranks, batch n of one rank is a share of a batch ``world_size`` times as
    large: the frames ``rank, rank + world_size, ...`` of batch n of a single process with that
    batch size; batches of ``mix:N`` are filled for each rank. A rank that would get none (of a
    last, smaller batch) repeats a frame of the batch, since every rank must run every step.

    Args:
        num_frames: frames of each system.
        natoms: atoms of each system: a number, or (frames,) numbers where frames differ in size.
        batch_size: a number, a number per system, or a rule, see ``batch_sizes``.
        auto_prob: ``prob_uniform``, ``prob_sys_size`` or ``prob_sys_size;start:stop:weight;...``.
        sys_probs: probability per system, which overrides ``auto_prob``; negative: a share of what
            is left in proportion to the system's number of batches, or of frames if they are mixed.
        seed: of all random orders.
        rank: which share of each batch.
        world_size: number of shares.

    Attributes:
        batch_size: frames per batch and rank, per system, of batches of that system alone; 0 for a
            system left out by ``filter``.
        frames: numbers of the frames of each system that take part.
        num_frames: how many they are.
        probabilities: of each system.
        batches_per_epoch: batches of an epoch, of all ranks together.
        frames_per_step: mean number of frames in a batch, over all ranks together.
        max_atoms: no batch of a rank has more.
        findings: warnings about frames and systems that ``filter`` leaves out.

    Raises:
        ConfigError: if an option cannot be understood, or does not fit the number of systems.
        DataError: if no system is left.
    """

    def __init__(
        self,
        num_frames: Sequence[int],
        natoms: Sequence[Sizes],
        batch_size: BatchRule = "auto",
        auto_prob: str = "prob_sys_size",
        sys_probs: Sequence[float] | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        sizes = [np.broadcast_to(n, count) for count, n in zip(num_frames, natoms)]
        chosen = batch_sizes(batch_size, sizes)
        self.batch_size = chosen.sizes
        self.frames = chosen.frames
        self.findings = chosen.findings
        if not any(self.batch_size):
            raise DataError(
                f"batch_size = {batch_size}: every system has more atoms. Use a larger number."
            )
        rule = BatchSizeRule(batch_size) if isinstance(batch_size, str) else None
        self._is_mixed = rule is not None and rule.is_mixed
        # largest number of atoms in a batch of mix:N
        self._most_atoms = (
            rule.number if rule is not None and rule.kind == "mix" else None
        )
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._natoms = [n[indices] for n, indices in zip(sizes, self.frames)]
        self.num_frames = tuple(map(len, self.frames))
        # frames or batches of each system, of all ranks together, in an epoch that has every frame
        # once
        self._units = self.num_frames
        if not self._is_mixed:
            frames_and_sizes = zip(self.num_frames, self.batch_size)
            self._units = tuple(
                -(-n // (size * world_size)) if size else 0
                for n, size in frames_and_sizes
            )
        exact = self._probabilities = system_probabilities(
            self._units, auto_prob, sys_probs
        )
        self.probabilities = tuple(map(float, exact))
        self._total = sum(self._units)
        # place of each system's upper edge when the units of an epoch are laid out side by side, in
        # grid steps
        self._edges = [
            0,
            *(math.floor(edge * self._total * _GRID) for edge in accumulate(exact)),
        ]
        # two epochs: batches that are made ahead may be of the next one
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._frame_order = lru_cache(maxsize=2 * len(self.frames) + 2)(
            lambda system, number: self.frames[system][
                permutation(self.num_frames[system], seed, _FRAMES, system, number)
            ]
        )
        largest = [int(n.max(initial=0)) for n in self._natoms]
        self.max_atoms = max(size * n for size, n in zip(self.batch_size, largest))
        self.batches_per_epoch = self._total
        shares = zip(self.probabilities, self.num_frames, self._units)
        self.frames_per_step = sum(p * n / b for p, n, b in shares if b)
        if self._most_atoms is not None:
            # as many orders as have a million frames together, but 4 to 64
            trials = max(4, min(64, (1 << 20) // self._total))
            orders = (self._order(epoch, _TRIAL_SEED) for epoch in range(trials))
            most = (
                max(len(batch_edges(order[2], self._most_atoms)) for order in orders)
                - 1
            )
            self.batches_per_epoch = -(-most // world_size)
            self.max_atoms = max(self._most_atoms, *largest)
        elif self._is_mixed:
            self.batches_per_epoch = -(
                -self._total // (self.batch_size[0] * world_size)
            )
        if self._is_mixed:
            self.frames_per_step = self._total / self.batches_per_epoch

    def batch(self, n: int) -> Frames:
        """Return the frames of batch ``n`` (from 0) of this rank: system and number of each."""
        shares = self._shares(n)
        return (
            shares[self._rank]
            if self._rank < len(shares)
            else shares[self._rank % len(shares)][:1]
        )

    def is_repeat(self, n: int) -> bool:
        """Whether batch ``n`` of this rank repeats a frame of another rank: no loss counts it."""
        return len(self._shares(n)) <= self._rank

    def batches_for_epochs(self, num_epochs: float) -> int:
        """Return the batches after which the rarest system has been seen ``num_epochs`` times.

        DeePMD-kit counts the steps of epochs in the same way.
        """
        drawn = math.ceil(
            max(
                Fraction(n) / p
                for n, p in zip(self._units, self._probabilities)
                if n and p > 0
            )
        )
        return math.ceil(
            Fraction(num_epochs) * drawn * Fraction(self.batches_per_epoch, self._total)
        )

    def _shares(self, n: int) -> list[Frames]:
        """Return the frames of each rank in step ``n``; the last ranks may be left out."""
        epoch, place = divmod(n, self.batches_per_epoch)
        (order, edges), world_size = self._epoch(epoch), self._world_size
        if self._most_atoms is not None:
            # one batch for each rank, as each has its own limit of atoms
            step_edges = edges[place * world_size : (place + 1) * world_size + 1]
            return [
                list(zip(*order[:, first:last].tolist()))
                for first, last in pairwise(step_edges)
            ]
        if self._is_mixed:
            size = self.batch_size[0] * world_size
            together = list(zip(*order[:, place * size : (place + 1) * size].tolist()))
        else:
            system, number = order[:, place].tolist()
            round_number, k = divmod(number, self._units[system])
            size = self.batch_size[system] * world_size
            frames = self._frame_order(system, round_number)[
                k * size : (k + 1) * size
            ].tolist()
            together = [(system, frame) for frame in frames]
        return [
            together[rank::world_size] for rank in range(min(world_size, len(together)))
        ]

    def _make_epoch(self, epoch: int) -> tuple[Array, list[int]]:
        """Return systems and numbers (2, units) of an epoch, and with ``mix:N`` the batch edges.

        An epoch always has the same number of them, the largest that orders tried beforehand need:
        where an order needs fewer, the largest batches are halved; where it needs more, another
        order is taken.
        """
        order = self._order(epoch, self._seed)
        edges = list[int]()
        if self._most_atoms is not None:
            wanted = self.batches_per_epoch * self._world_size
            limit = self._most_atoms
            plain = order
            for attempt in count(1):
                edges = batch_edges(order[2], limit)
                if len(edges) - 1 <= wanted:
                    break
                order = plain[
                    :, permutation(self._total, self._seed, _SYSTEMS, epoch, attempt)
                ]
                # few frames of very different sizes, drawn with probabilities of their own, may fit
                # in no order: 2 % more atoms at each further attempt ends the search
                if attempt > _MAX_TRIES:
                    limit += limit // 50 + 1
            # the batches of most atoms are halved until there are as many as wanted, or as can be
            ends = np.concatenate([[0], np.cumsum(order[2])])
            # a heap gives the smallest first: numbers of atoms are negative
            largest = [
                (int(ends[a] - ends[b]), a, b) for a, b in pairwise(edges) if b - a > 1
            ]
            heapq.heapify(largest)
            more = list[int]()
            while largest and len(edges) - 1 + len(more) < wanted:
                first, last = heapq.heappop(largest)[1:]
                middle = (first + last) // 2
                more.append(middle)
                for a, b in ((first, middle), (middle, last)):
                    if b - a > 1:
                        heapq.heappush(largest, (int(ends[a] - ends[b]), a, b))
            edges = sorted([*edges, *more])
        return order[:2].copy(), edges

    def _order(self, epoch: int, seed: int) -> Array:
        """Return the units of an epoch in random order.

        Units of one system are in the order of its own sequence.

        Rows are the system and the number of a batch in the sequence of the system; of mixed
        frames, which come in permutations one after the other, the system, the number of the frame
        in it, and its atoms.

        The number of units of a system differs by at most one between epochs and follows its
        probability in the long run. In epoch e the edges move by u(e) = (e * GOLDEN mod GRID) /
        GRID and are rounded down; what lies between two edges is the share of a system, so that the
        shares add up to the units of the epoch.
        """
        before = []  # units of each system before this epoch, and before the next one
        for end in (epoch, epoch + 1):
            # below each edge, sums over e < end of floor((edge + e * GOLDEN mod GRID) / GRID)
            parts = [divmod(edge, _GRID) for edge in self._edges]
            moved = _floor_sum(end, _GRID, _GOLDEN, 0)
            below = [
                end * whole + _floor_sum(end, _GRID, _GOLDEN, part) - moved
                for whole, part in parts
            ]
            before.append([b - a for a, b in pairwise(below)])
        first, counts = before[0], [b - a for a, b in zip(*before)]
        stream = _SYSTEMS if self._is_mixed else _BATCHES
        systems = np.repeat(np.arange(len(counts)), counts)[
            permutation(self._total, seed, stream, epoch)
        ]
        if self._is_mixed:
            draws = []  # of each system: (2, number), frame numbers and their atoms
            for system, (start, number) in enumerate(zip(first, counts)):
                if number:
                    # draw n of a system is frame n % size of its permutation n // size
                    size = self.num_frames[system]
                    rounds = range(start // size, (start + number - 1) // size + 1)
                    places = np.concatenate(
                        [permutation(size, seed, _FRAMES, system, k) for k in rounds]
                    )
                    places = places[start % size : start % size + number]
                    draws.append(
                        np.stack(
                            [self.frames[system][places], self._natoms[system][places]]
                        )
                    )
            drawn = np.concatenate(draws, axis=1)
        else:
            # systems one after the other, each from the number of its batches before this epoch
            offsets = np.cumsum(counts) - counts - first
            drawn = (np.arange(self._total) - np.repeat(offsets, counts))[None]
        # a stable sort lists the places of each system in turn, which take its draws in order
        order = np.concatenate([systems[None], np.empty_like(drawn)])
        order[1:, stable_argsort(systems, len(counts))] = drawn
        return order


def batch_edges(natoms: Array, limit: int) -> list[int]:
    """Return the first frame of each batch, and the end of the last.

    A batch ends where the next frame would exceed ``limit`` atoms, and a larger frame is alone.
    """
    ends = np.cumsum(natoms)
    # end of the batch that begins at each frame, which has that frame in any case
    after = np.searchsorted(ends, ends - natoms + limit, side="right")
    following = np.maximum(after, np.arange(1, len(ends) + 1)).tolist()
    edges = [0]
    while edges[-1] < len(following):
        edges.append(following[edges[-1]])
    return edges


class BatchSizes(NamedTuple):
    """Sizes of batches of each system, as a rule gives them.

    Attributes:
        sizes: frames per batch; 0 for a system left out.
        frames: numbers of the frames that take part.
        findings: warnings about frames and systems that are left out.
    """

    sizes: tuple[int, ...]
    frames: list[Array]
    findings: list[Finding]


def batch_sizes(rule: BatchRule, natoms: Sequence[Sizes]) -> BatchSizes:
    """Return the sizes of batches of each system.

    A number; a list of numbers, one per system; ``auto:N`` = ceil(N / atoms), at least N atoms a
    batch (``auto`` is ``auto:32``); ``max:N`` = max(1, floor(N / atoms)), at most N atoms;
    ``filter:N`` = ``max:N`` without the frames of more than N atoms, 0 for a system of such frames
    alone. Batches of one system alone have N frames with ``mixed:N``, and as many as ``max:N`` with
    ``mix:N``.

    Where the frames of a system differ in size, "atoms" is the mean in ``auto``, and the largest
    that takes part in ``max`` and ``filter``.

    Raises:
        ConfigError: if the rule is none of these.
    """
    every = [np.atleast_1d(n) for n in natoms]
    findings = list[Finding]()
    parsed = BatchSizeRule(rule) if isinstance(rule, str) else None
    kind, number = ("", 0) if parsed is None else (parsed.kind, parsed.number)
    most = number if kind == "filter" else math.inf
    taken = [np.flatnonzero(n <= most) for n in every]
    sizes: tuple[int, ...]
    if not isinstance(rule, str):
        sizes = tuple([rule] * len(natoms) if isinstance(rule, int) else rule)
        if len(sizes) != len(natoms):
            raise ConfigError(
                f"batch_size: a list of {len(sizes)} numbers, expected one per system: "
                f"{len(natoms)}."
            )
    elif kind == "mixed":
        sizes = (number,) * len(natoms)
    elif kind == "auto":
        # N over the mean, in integers: the same as N / n where all frames have n atoms
        sizes = tuple(-(-number * n.size // int(n.sum())) for n in every)
    else:
        sizes = tuple(
            max(1, number // int(n[k].max())) if k.size else 0
            for n, k in zip(every, taken)
        )
        larger = f"of more than {counted(number, 'atom')}"
        num_systems = sizes.count(0)
        if num_systems:
            text = (
                f"left out are {num_systems} of {counted(len(sizes), 'system')}, "
                f"{larger} a frame."
            )
            findings.append(warning("batch_size", f' = "{rule}": {text}'))
        num_frames = sum(n.size - k.size for n, k in zip(every, taken) if k.size)
        if num_frames:
            text = f"left out: {counted(num_frames, 'frame')} {larger}."
            findings.append(warning("batch_size", f' = "{rule}": {text}'))
    return BatchSizes(sizes, taken, findings)


def system_probabilities(
    batches: Sequence[int],
    auto_prob: str = "prob_sys_size",
    sys_probs: Sequence[float] | None = None,
) -> list[Fraction]:
    """Return the probability of each system; they add up to 1 exactly.

    Args:
        batches: number of batches of each system, or of frames if they are mixed.
        auto_prob: see ``Sampler``.
        sys_probs: see ``Sampler``.

    Raises:
        ConfigError: if they cannot be understood or satisfied.
    """
    rule, weights = SystemProbability(auto_prob), [Fraction(0)] * len(batches)
    if sys_probs is not None:
        if len(sys_probs) != len(batches):
            raise ConfigError(
                f"sys_probs: {len(sys_probs)} numbers, expected one per system: {len(batches)}."
            )
        # negative numbers share what the others leave, in proportion to batches
        fixed = sum((Fraction(p) for p in sys_probs if p >= 0), Fraction(0))
        whole = sum(b for b, p in zip(batches, sys_probs) if p < 0) or 1
        rest = max(1 - fixed, Fraction(0)) / whole
        weights = [
            (Fraction(p) if p >= 0 else rest * b) if b else Fraction(0)
            for b, p in zip(batches, sys_probs)
        ]
    elif rule.kind == "prob_uniform":
        weights = [Fraction(1 if b else 0) for b in batches]
    else:
        for start, stop, weight in rule.blocks or [(0, len(batches), Fraction(1))]:
            if stop > len(batches):
                systems = counted(len(batches), "system")
                raise ConfigError(
                    f'auto_prob = "{rule}": "{start}:{stop}:{float(weight)}" does not fit '
                    f"{systems}: expected "
                    f"0 <= start < stop <= {len(batches)} and a weight from 0."
                )
            # "or 1": a block of systems without frames has weights of 0
            in_block = sum(batches[start:stop]) or 1
            for k in range(start, stop):
                weights[k] += weight * Fraction(batches[k], in_block)
    total = sum(weights)
    if not total:
        raise ConfigError(
            "sys_probs, auto_prob: all are 0. Give at least one system a chance."
        )
    return [weight / total for weight in weights]


def permutation(size: int, *numbers: int) -> Array:
    """Return a permutation of ``size`` numbers, a function of ``numbers`` with any numpy."""
    # raw output of a bit generator is stable by numpy's promise, Generator.permutation is not
    bits = np.random.PCG64(np.random.SeedSequence(numbers)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum over i < n of floor((a * i + b) / m), in steps like Euclid's algorithm."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b = divmod(a * n + b, m)
        a, m = m, a
    return total
