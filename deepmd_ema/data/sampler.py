"""The frames of batch n as a pure function of (seed, n): a run is resumed from the number of a batch alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, count, pairwise
from typing import TypeAlias

import numpy as np

from deepmd_ema.config.schema.text_options import BatchSizeRule, SystemProbability
from deepmd_ema.errors import ConfigError, DataError, counted
from deepmd_ema.geometry import Array, stable_argsort

BatchRule: TypeAlias = "int | str | Sequence[int]"
Sizes: TypeAlias = "int | Array"  # atoms of each frame of a system, or one number if all have as many
Frames: TypeAlias = Sequence[tuple[int, int]]
"""System and number of each frame."""

_GRID = 1 << 40  # probabilities are multiples of 1 / _GRID per epoch
_GOLDEN = 679_535_556_991  # odd, next to _GRID / golden ratio: its multiples fill the grid most evenly
# streams of the seed: order of batches in an epoch, of frames in a system, of systems among the frames of an epoch
_BATCHES, _FRAMES, _SYSTEMS = 1, 2, 3
_TRIAL_SEED = 0  # of the orders in which batches are counted: their number must not depend on the seed of a run
_MAX_TRIES = 100  # orders of an epoch that are tried before a batch may have more atoms than it should


class Sampler:
    """The frames of each batch, in an endless sequence of epochs.

    A batch holds frames of one system, or of all systems with the rules ``mixed:N`` and ``mix:N``. An epoch is
    ``batches_per_epoch`` batches in an order of its own. With probabilities in proportion to the systems' sizes (the
    default) an epoch has every frame exactly once; with others a system's number of batches (frames, if they are mixed)
    differs by at most one between epochs, follows its probability in the long run, and its frames come in permutations
    one after the other, each frame once per permutation. The last batch of a permutation may be smaller.

    With ``world_size`` ranks, batch n of one rank is a share of a batch ``world_size`` times as large: the frames
    ``rank, rank + world_size, ...`` of batch n of a single process with that batch size; batches of ``mix:N`` are
    filled for each rank. A rank that would get none (of a last, smaller batch) repeats a frame of the batch, since
    every rank must run every step.

    Args:
        num_frames: frames of each system.
        natoms: atoms of each system: a number, or (frames,) numbers where frames differ in size.
        batch_size: a number, a number per system, or a rule, see ``batch_sizes``.
        auto_prob: ``prob_uniform``, ``prob_sys_size`` or ``prob_sys_size;start:stop:weight;...``.
        sys_probs: probability per system, which overrides ``auto_prob``; negative: a share of what is left in
            proportion to the system's number of batches, or of frames if they are mixed.
        seed: of all random orders.
        rank: which share of each batch.
        world_size: number of shares.

    Attributes:
        batch_size: frames per batch and rank, per system, of batches of that system alone; 0 for a system left out by
            ``filter``.
        frames: numbers of the frames of each system that take part.
        num_frames: how many they are.
        probabilities: of each system.
        batches_per_epoch: batches of an epoch, of all ranks together.
        frames_per_step: mean number of frames in a batch, over all ranks together.
        max_atoms: no batch of a rank has more.
        warnings: for the user, such as systems left out.

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
        self.batch_size, self.warnings = batch_sizes(batch_size, natoms)
        if not any(self.batch_size):
            raise DataError(f"batch_size = {batch_size}: every system has more atoms. Use a larger number.")
        rule = BatchSizeRule(batch_size) if isinstance(batch_size, str) else None
        sizes = [np.broadcast_to(n, count) for count, n in zip(num_frames, natoms)]
        self.frames = frames_taken(batch_size, sizes)
        self.num_frames = tuple(map(len, self.frames))
        largest = [int(n[own].max(initial=0)) for n, own in zip(sizes, self.frames)]
        # frames or batches of each system, of all ranks together, in an epoch that has every frame once
        self._units = self.num_frames
        if rule is None or not rule.is_mixed:
            of_systems = zip(self.num_frames, self.batch_size)
            self._units = tuple(-(-n // (size * world_size)) if size else 0 for n, size in of_systems)
        self._probabilities = system_probabilities(self._units, auto_prob, sys_probs)
        self.probabilities = tuple(map(float, self._probabilities))
        self._rank = rank
        self._batches: _MixedBatches | _BatchesOfOneSystem
        if rule is not None and rule.is_mixed:
            by_frames = rule.number if rule.kind == "mixed" else None
            self._batches = _MixedBatches(
                self.frames, sizes, self._probabilities, by_frames, rule.number, seed, world_size
            )
            self.frames_per_step = sum(self.num_frames) / self._batches.per_epoch
            self.max_atoms = max(largest) * rule.number if by_frames else max(rule.number, *largest)
        else:
            self._batches = _BatchesOfOneSystem(
                self.frames, self.batch_size, self._units, self._probabilities, seed, world_size
            )
            shares = zip(self.probabilities, self.num_frames, self._units)
            self.frames_per_step = sum(p * n / b for p, n, b in shares if b)
            self.max_atoms = max(size * n for size, n in zip(self.batch_size, largest))
        self.batches_per_epoch = self._batches.per_epoch

    def batch(self, n: int) -> Frames:
        """Return the frames of batch ``n`` (from 0) of this rank: system and number of each."""
        shares = self._batches.step(n)
        return shares[self._rank] if self._rank < len(shares) else shares[self._rank % len(shares)][:1]

    def is_repeat(self, n: int) -> bool:
        """Whether batch ``n`` of this rank repeats a frame of another rank, and is excluded from losses."""
        return len(self._batches.step(n)) <= self._rank

    def batches_for_epochs(self, num_epochs: float) -> int:
        """Return the batches after which even the rarest system has been seen ``num_epochs`` times, as DeePMD-kit."""
        drawn = math.ceil(max(Fraction(n) / p for n, p in zip(self._units, self._probabilities) if n and p > 0))
        return math.ceil(Fraction(num_epochs) * drawn * Fraction(self.batches_per_epoch, sum(self._units)))


@dataclass
class _BatchesOfOneSystem:
    """Batches that hold frames of one system each; see :class:`Sampler`.

    Args:
        frames: numbers of the frames of each system.
        batch_size: frames per batch and rank, per system.
        num_batches: of each system, in an epoch that has every frame once.
        probabilities: of each system.
        seed: of all random orders.
        world_size: number of ranks.
    """

    frames: Sequence[Array]
    batch_size: Sequence[int]
    num_batches: Sequence[int]
    probabilities: Sequence[Fraction]
    seed: int
    world_size: int

    def __post_init__(self) -> None:
        self.per_epoch = sum(self.num_batches)
        self._in_epoch = _EpochShares(self.per_epoch, self.probabilities).in_epoch
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)
        self._frame_order = lru_cache(maxsize=2 * len(self.frames) + 2)(
            lambda system, number: self.frames[system][
                permutation(len(self.frames[system]), self.seed, _FRAMES, system, number)
            ]
        )

    def step(self, n: int) -> list[Frames]:
        """Return the frames of each rank in step ``n``; the last ranks may be left out."""
        epoch, place = divmod(n, self.per_epoch)
        systems, numbers = self._epoch_order(epoch)
        system = int(systems[place])
        round_number, k = divmod(int(numbers[place]), self.num_batches[system])
        size = self.batch_size[system] * self.world_size
        together = self._frame_order(system, round_number)[k * size : (k + 1) * size].tolist()
        ranks = range(min(self.world_size, len(together)))
        return [[(system, frame) for frame in together[rank :: self.world_size]] for rank in ranks]

    def _make_epoch_order(self, epoch: int) -> tuple[Array, Array]:
        """Return for each place of an epoch the system and the number of the batch in the system's own sequence."""
        first, counts = self._in_epoch(epoch)
        order = permutation(self.per_epoch, self.seed, _BATCHES, epoch)
        systems = np.repeat(np.arange(len(counts)), counts)[order]
        by_system = np.argsort(systems, kind="stable")  # batches of one system come in the order of its own sequence
        numbers = np.empty(len(systems), np.int64)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        numbers[by_system] = np.arange(len(systems)) - starts + np.repeat(np.array(first), counts)
        return systems, numbers


@dataclass
class _MixedBatches:
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

    frames: Sequence[Array]
    natoms: Sequence[Array]
    probabilities: Sequence[Fraction]
    num_frames: int | None
    num_atoms: int
    seed: int
    world_size: int

    def __post_init__(self) -> None:
        self._total = sum(map(len, self.frames))
        self._in_epoch = _EpochShares(self._total, self.probabilities).in_epoch
        if self.num_frames is not None:
            self.per_epoch = -(-self._total // (self.num_frames * self.world_size))
        else:
            trials = max(4, min(64, (1 << 20) // self._total))  # the time is that of at least a million frames
            most = max(len(_fill(self._order(epoch, _TRIAL_SEED)[2], self.num_atoms)) for epoch in range(trials))
            self.per_epoch = -(-most // self.world_size)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def step(self, n: int) -> list[Frames]:
        """Return the frames of each rank in step ``n``; the last ranks may be left out."""
        epoch, place = divmod(n, self.per_epoch)
        order, starts = self._epoch(epoch)
        if self.num_frames is not None:
            together = list(zip(*order[:, starts[place] : starts[place + 1]].tolist()))
            return [together[rank :: self.world_size] for rank in range(min(self.world_size, len(together)))]
        edges = starts[place * self.world_size : (place + 1) * self.world_size + 1]
        return [list(zip(*order[:, first:last].tolist())) for first, last in pairwise(edges)]

    def _make_epoch(self, epoch: int) -> tuple[Array, list[int]]:
        """Return systems and numbers (2, draws) of an epoch, the first draw of each batch, and the end of the last."""
        order = self._order(epoch, self.seed)
        if self.num_frames is not None:
            starts = list(range(0, self._total, self.num_frames * self.world_size))
        else:
            # an order that has no more batches than an epoch
            wanted, limit, plain = self.per_epoch * self.world_size, self.num_atoms, order
            for attempt in count(1):
                starts = _fill(order[2], limit)
                if len(starts) <= wanted:
                    break
                order = plain[:, permutation(self._total, self.seed, _SYSTEMS, epoch, attempt)]
                if attempt > _MAX_TRIES:  # few frames of very different sizes, drawn with probabilities of their own
                    limit += limit // 50 + 1
            starts = _halve_largest(starts, order[2], wanted)
        return order[:2].copy(), [*starts, self._total]

    def _order(self, epoch: int, seed: int) -> Array:
        """Return system, number and atoms (3, draws) of the frames of an epoch in random order.

        Those of one system are in the order of its permutations.
        """
        first, counts = self._in_epoch(epoch)
        order = np.empty((3, self._total), np.int64)
        order[0] = np.repeat(np.arange(len(counts)), counts)[permutation(self._total, seed, _SYSTEMS, epoch)]
        drawn = [np.zeros((2, 0), np.int64)]
        for system, (start, number) in enumerate(zip(first, counts)):
            size = len(self.frames[system])
            if number:  # the draws start, start + 1, ... of a system
                rounds = range(start // size, (start + number - 1) // size + 1)
                places = np.concatenate([permutation(size, seed, _FRAMES, system, one) for one in rounds])
                places = places[start % size : start % size + number]
                drawn.append(np.stack([self.frames[system][places], self.natoms[system][places]]))
        order[1:, stable_argsort(order[0], len(counts))] = np.concatenate(drawn, axis=1)
        return order


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


def batch_sizes(rule: BatchRule, natoms: Sequence[Sizes]) -> tuple[tuple[int, ...], list[str]]:
    """Return the frames per batch of each system, and warnings; 0 is a system to leave out.

    A number; a list of numbers, one per system; ``auto:N`` = ceil(N / atoms), at least N atoms a batch (``auto`` is
    ``auto:32``); ``max:N`` = max(1, floor(N / atoms)), at most N atoms; ``filter:N`` = ``max:N`` without the systems
    of more than N atoms. Batches of one system alone have N frames with ``mixed:N``, and as many as ``max:N`` with
    ``mix:N``.

    Where the frames of a system differ in size, "atoms" is the mean in ``auto``, and the largest in ``max``;
    ``filter`` leaves out single frames and takes the largest that is left.

    Raises:
        ConfigError: if the rule is none of these.
    """
    if not isinstance(rule, str):
        sizes = tuple([rule] * len(natoms) if isinstance(rule, int) else rule)
        if len(sizes) != len(natoms):
            raise ConfigError(f"batch_size: a list of {len(sizes)} numbers, expected one per system: {len(natoms)}.")
        if any(s < 1 for s in sizes):
            raise ConfigError(f"batch_size = {rule}: expected numbers from 1.")
        return sizes, []
    read = BatchSizeRule(rule)
    atoms = read.number
    if read.kind == "mixed":
        return (atoms,) * len(natoms), []
    if read.kind == "auto":
        # N over the mean, in integers: the same as N / n where all frames have n atoms
        return tuple(-(-atoms * np.size(n) // int(np.sum(n))) for n in natoms), []
    every = [np.atleast_1d(n) for n in natoms]
    taken = [n[n <= atoms] if read.kind == "filter" else n for n in every]
    sizes = tuple(max(1, atoms // int(n.max())) if n.size else 0 for n in taken)
    warnings, larger = [], f"of more than {counted(atoms, 'atom')}"
    if left_out := sizes.count(0):
        systems = f"{left_out} of {counted(len(sizes), 'system')}"
        warnings.append(f'batch_size = "{read}": left out are {systems}, {larger} a frame.')
    if frames := sum(n.size - k.size for n, k in zip(every, taken) if k.size):
        warnings.append(f'batch_size = "{read}": left out: {counted(frames, "frame")} {larger}.')
    return sizes, warnings


def frames_taken(rule: BatchRule, natoms: Sequence[Array]) -> list[Array]:
    """Return the numbers of the frames of each system that a batch may have: all but those that ``filter`` leaves out.

    Args:
        rule: ``batch_size``.
        natoms: (frames,) atoms of each frame of a system.
    """
    read = BatchSizeRule(rule) if isinstance(rule, str) else None
    most = read.number if read is not None and read.kind == "filter" else math.inf
    return [np.flatnonzero(of_system <= most) for of_system in natoms]


def system_probabilities(
    batches: Sequence[int], auto_prob: str = "prob_sys_size", sys_probs: Sequence[float] | None = None
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
            raise ConfigError(f"sys_probs: {len(sys_probs)} numbers, expected one per system: {len(batches)}.")
        weights = [Fraction(p) if p >= 0 else Fraction(0) for p in sys_probs]
        rest = 1 - sum(weights)
        if rest < Fraction(-1, 10**8):
            said = f"the numbers that are not negative add up to {float(sum(weights)):g}"
            raise ConfigError(f"sys_probs: {said}, expected at most 1.")
        share = [Fraction(b) if p < 0 else Fraction(0) for b, p in zip(batches, sys_probs)]
        whole = sum(share)
        if whole and rest > 0:
            weights = [a + rest * s / whole for a, s in zip(weights, share)]
        weights = [a if b else Fraction(0) for a, b in zip(weights, batches)]
    elif rule.kind == "prob_uniform":
        weights = [Fraction(1 if b else 0) for b in batches]
    else:
        for start, stop, weight in rule.blocks or [(0, len(batches), Fraction(1))]:
            if stop > len(batches):
                systems = counted(len(batches), "system")
                raise ConfigError(
                    f'auto_prob = "{rule}": "{start}:{stop}:{float(weight)}" does not fit {systems}: expected '
                    f"0 <= start < stop <= {len(batches)} and a weight from 0."
                )
            in_block = sum(batches[start:stop]) or 1
            for k in range(start, stop):
                weights[k] += weight * Fraction(batches[k], in_block)
    total = sum(weights)
    if not total:
        raise ConfigError("sys_probs, auto_prob: all are 0. Give at least one system a chance.")
    return [weight / total for weight in weights]


class _EpochShares:
    """Numbers of units of each system, batches or frames, in an epoch.

    A number differs by at most one between epochs and follows the probability of the system in the long run.

    Args:
        num_units: of an epoch.
        probabilities: of the systems; they add up to 1.
    """

    def __init__(self, num_units: int, probabilities: Sequence[Fraction]) -> None:
        # place of each system's upper edge when the units of an epoch are laid out side by side, in grid steps
        self._edges = [0, *(math.floor(e * num_units * _GRID) for e in accumulate(probabilities))]

    def in_epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return for each system how many units come before ``epoch``, and how many are in it.

        In epoch e the edges move by u(e) = (e * GOLDEN mod GRID) / GRID and are rounded down; what lies between two
        edges is the share of a system, so that the shares add up to the units of the epoch.
        """
        before = []
        for end in (epoch, epoch + 1):
            # below each edge, sums over e < end of floor((edge + e * GOLDEN mod GRID) / GRID)
            parts = [divmod(edge, _GRID) for edge in self._edges]
            moved = _floor_sum(end, _GRID, _GOLDEN, 0)
            below = [end * whole + _floor_sum(end, _GRID, _GOLDEN, part) - moved for whole, part in parts]
            before.append([b - a for a, b in pairwise(below)])
        return before[0], [b - a for a, b in zip(*before)]


def permutation(size: int, *numbers: int) -> Array:
    """Return a permutation of ``size`` things that depends on ``numbers`` only, the same with every numpy."""
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
