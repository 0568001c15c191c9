"""The frames of batch n as a pure function of (seed, n): a run is resumed from the number of a batch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from deepmd_ema.config.schema.text_options import BatchSizeRule, SystemProbability
from deepmd_ema.errors import ConfigError, DataError, counted
from deepmd_ema.sorting import Array

BatchRule: TypeAlias = "int | str | Sequence[int]"
Sizes: TypeAlias = "int | Array"  # atoms of each frame of a system, or one number if all have as many

_GRID = 1 << 40  # probabilities are multiples of 1 / _GRID per epoch
_GOLDEN = 679_535_556_991  # odd, next to _GRID / golden ratio: its multiples fill the grid most evenly
_ORDER, _FRAMES = 1, 2  # streams of the seed: order of systems in an epoch, order of frames in a system


class Sampler:
    """The frames of each batch, in an endless sequence of epochs.

    A batch holds frames of one system. An epoch is ``batches_per_epoch`` batches in an order of its own. With
    probabilities in proportion to the systems' sizes (the default) an epoch has every frame exactly once; with others
    a system's number of batches differs by at most one between epochs, follows its probability in the long run, and
    its frames come in permutations one after the other, each frame once per permutation. The last batch of a
    permutation may be smaller.

    With ``world_size`` ranks, batch n of one rank is a share of a batch ``world_size`` times as large: the frames
    ``rank, rank + world_size, ...`` of batch n of a single process with that batch size. A rank that would get none
    (of a last, smaller batch) repeats a frame of the batch, since every rank must run every step.

    Args:
        num_frames: frames of each system.
        natoms: atoms of each system: a number, or (frames,) numbers where frames differ in size.
        batch_size: a number, a number per system, or a rule, see ``batch_sizes``.
        auto_prob: ``prob_uniform``, ``prob_sys_size`` or ``prob_sys_size;start:stop:weight;...``.
        sys_probs: probability per system, which overrides ``auto_prob``; negative: a share of what is left in
            proportion to the system's number of batches.
        seed: of all random orders.
        rank: which share of each batch.
        world_size: number of shares.

    Attributes:
        batch_size: frames per batch and rank, per system; 0 for a system left out by ``filter``.
        frames: numbers of the frames of each system that take part.
        batches: batches of each system, of all ranks together, in an epoch that has every frame once.
        probabilities: of each system.
        batches_per_epoch: the sum of the batches.
        frames_per_step: mean number of frames in a batch, over all ranks together.
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
        most = rule.atoms if rule is not None and rule.kind == "filter" else math.inf
        sizes = zip(num_frames, natoms)
        self.frames = [np.flatnonzero(np.broadcast_to(np.less_equal(n, most), count)) for count, n in sizes]
        self.num_frames = tuple(map(len, self.frames))
        self._global_size = [b * world_size for b in self.batch_size]
        self.batches = tuple(-(-n // size) if size else 0 for n, size in zip(self.num_frames, self._global_size))
        self.batches_per_epoch = sum(self.batches)
        self._probabilities = system_probabilities(self.batches, auto_prob, sys_probs)
        self.probabilities = tuple(map(float, self._probabilities))
        self.frames_per_step = sum(p * n / b for p, n, b in zip(self.probabilities, self.num_frames, self.batches) if b)
        # place of each system's upper edge when the epoch's batches are laid out side by side, in grid steps
        edges = accumulate(self._probabilities)
        self._edges = [0, *(math.floor(e * self.batches_per_epoch * _GRID) for e in edges)]
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)
        self._frame_order = lru_cache(maxsize=2 * len(self.num_frames) + 2)(self._make_frame_order)

    def batch(self, n: int) -> tuple[int, tuple[int, ...]]:
        """Return the system and the frames of batch ``n`` (from 0) of this rank."""
        system, together = self._all_ranks(n)
        mine = together[self._rank :: self._world_size]
        if len(mine) == 0:
            mine = together[self._rank % len(together) :][:1]
        return system, tuple(int(f) for f in mine)

    def is_repeat(self, n: int) -> bool:
        """Whether batch ``n`` of this rank repeats a frame of another rank, and is excluded from losses."""
        return len(self._all_ranks(n)[1]) <= self._rank

    def steps_for_epochs(self, num_epochs: float) -> int:
        """Return the steps after which even the rarest system has been seen ``num_epochs`` times, as DeePMD-kit."""
        drawn = [Fraction(b) / p for b, p in zip(self.batches, self._probabilities) if b and p > 0]
        return math.ceil(Fraction(num_epochs) * math.ceil(max(drawn)))

    def _all_ranks(self, n: int) -> tuple[int, Array]:
        """Return the system and the frames of batch ``n`` of all ranks together."""
        epoch, place = divmod(n, self.batches_per_epoch)
        systems, numbers = self._epoch_order(epoch)
        system = int(systems[place])
        round_number, k = divmod(int(numbers[place]), self.batches[system])
        size = self._global_size[system]
        return system, self._frame_order(system, round_number)[k * size : (k + 1) * size]

    def _make_epoch_order(self, epoch: int) -> tuple[Array, Array]:
        """Return for each place of an epoch the system and the number of the batch in the system's own sequence."""
        first = self._batches_before(epoch)
        counts = np.array([b - a for a, b in zip(first, self._batches_before(epoch + 1))])
        order = permutation(self.batches_per_epoch, self._seed, _ORDER, epoch)
        systems = np.repeat(np.arange(len(counts)), counts)[order]
        by_system = np.argsort(systems, kind="stable")  # batches of one system come in the order of its own sequence
        numbers = np.empty(len(systems), np.int64)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        numbers[by_system] = np.arange(len(systems)) - starts + np.repeat(np.array(first), counts)
        return systems, numbers

    def _make_frame_order(self, system: int, round_number: int) -> Array:
        return self.frames[system][permutation(self.num_frames[system], self._seed, _FRAMES, system, round_number)]

    def _batches_before(self, epoch: int) -> list[int]:
        """Return the number of batches of each system before ``epoch``.

        In epoch e the edges move by u(e) = (e * GOLDEN mod GRID) / GRID and are rounded down; what lies between two
        edges is the number of batches of a system, so that these add up to ``batches_per_epoch``.
        """
        below = [_sum_of_moved_edges(edge, epoch) for edge in self._edges]
        return [b - a for a, b in pairwise(below)]


def batch_sizes(rule: BatchRule, natoms: Sequence[Sizes]) -> tuple[tuple[int, ...], list[str]]:
    """Return the frames per batch of each system, and warnings; 0 is a system to leave out.

    A number; a list of numbers, one per system; ``auto:N`` = ceil(N / atoms), at least N atoms a batch (``auto`` is
    ``auto:32``); ``max:N`` = max(1, floor(N / atoms)), at most N atoms; ``filter:N`` = ``max:N`` without the systems
    of more than N atoms.

    Where the frames of a system differ in size, "atoms" is the mean in ``auto``, and the largest in ``max``;
    ``filter`` leaves out single frames and takes the largest that is left.

    Raises:
        ConfigError: if the rule is none of these.
    """
    if isinstance(rule, str):
        return _sizes_by_rule(BatchSizeRule(rule), natoms)
    sizes = [rule] * len(natoms) if isinstance(rule, int) else list(rule)
    if len(sizes) != len(natoms):
        raise ConfigError(f"batch_size: a list of {len(sizes)} numbers, expected one per system: {len(natoms)}.")
    if any(s < 1 for s in sizes):
        raise ConfigError(f"batch_size = {rule}: expected numbers from 1.")
    return tuple(sizes), []


def system_probabilities(
    batches: Sequence[int], auto_prob: str = "prob_sys_size", sys_probs: Sequence[float] | None = None
) -> list[Fraction]:
    """Return the probability of each system; they add up to 1 exactly.

    Args:
        batches: number of batches of each system.
        auto_prob: see ``Sampler``.
        sys_probs: see ``Sampler``.

    Raises:
        ConfigError: if they cannot be understood or satisfied.
    """
    if sys_probs is not None:
        return _given_probabilities(batches, sys_probs)
    rule = SystemProbability(auto_prob)
    if rule.kind == "prob_uniform":
        return _normalized([Fraction(1 if b else 0) for b in batches])
    weights = [Fraction(0)] * len(batches)
    for start, stop, weight in rule.blocks or [(0, len(batches), Fraction(1))]:
        if stop > len(batches):
            systems = counted(len(batches), "system")
            raise ConfigError(
                f'auto_prob = "{rule}": "{start}:{stop}:{float(weight)}" does not fit {systems}: expected '
                f"0 <= start < stop <= {len(batches)} and a weight from 0."
            )
        total = sum(batches[start:stop]) or 1
        for k in range(start, stop):
            weights[k] += weight * Fraction(batches[k], total)
    return _normalized(weights)


def permutation(size: int, *numbers: int) -> Array:
    """Return a permutation of ``size`` things that depends on ``numbers`` only, the same with every numpy."""
    # raw output of a bit generator is stable by numpy's promise, Generator.permutation is not
    bits = np.random.PCG64(np.random.SeedSequence(numbers)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _sizes_by_rule(rule: BatchSizeRule, natoms: Sequence[Sizes]) -> tuple[tuple[int, ...], list[str]]:
    name, atoms = rule.kind, rule.atoms
    if name == "auto":
        # N over the mean, in integers: the same as N / n where all frames have n atoms
        return tuple(-(-atoms * np.size(n) // int(np.sum(n))) for n in natoms), []
    kept = [np.atleast_1d(n)[np.atleast_1d(n) <= atoms] if name == "filter" else np.atleast_1d(n) for n in natoms]
    sizes = tuple(max(1, atoms // int(k.max())) if k.size else 0 for k in kept)
    left_out = sizes.count(0)
    warnings = []
    if left_out:
        warnings.append(
            f'batch_size = "{rule}": left out are {left_out} of {counted(len(sizes), "system")}, of more than '
            f"{counted(atoms, 'atom')} a frame."
        )
    frames = sum(np.size(n) - k.size for n, k in zip(natoms, kept) if k.size)
    if frames:
        left = f"{counted(frames, 'frame')} of more than {counted(atoms, 'atom')}"
        warnings.append(f'batch_size = "{rule}": left out: {left}.')
    return sizes, warnings


def _given_probabilities(batches: Sequence[int], sys_probs: Sequence[float]) -> list[Fraction]:
    if len(sys_probs) != len(batches):
        raise ConfigError(f"sys_probs: {len(sys_probs)} numbers, expected one per system: {len(batches)}.")
    assigned = [Fraction(p) if p >= 0 else Fraction(0) for p in sys_probs]
    rest = 1 - sum(assigned)
    if rest < Fraction(-1, 10**8):
        raise ConfigError(
            f"sys_probs: the numbers that are not negative add up to {float(sum(assigned)):g}, expected at most 1."
        )
    share = [Fraction(b) if p < 0 else Fraction(0) for b, p in zip(batches, sys_probs)]
    if sum(share) and rest > 0:
        assigned = [a + rest * s / sum(share) for a, s in zip(assigned, share)]
    return _normalized([a if b else Fraction(0) for a, b in zip(assigned, batches)])


def _normalized(weights: Sequence[Fraction]) -> list[Fraction]:
    total = sum(weights)
    if not total:
        raise ConfigError("sys_probs, auto_prob: all are 0. Give at least one system a chance.")
    return [w / total for w in weights]


def _sum_of_moved_edges(edge: int, epochs: int) -> int:
    """Return the sum over e < epochs of floor((edge + e * GOLDEN mod GRID) / GRID)."""
    whole, part = divmod(edge, _GRID)
    carries = _floor_sum(epochs, _GRID, _GOLDEN, part) - _floor_sum(epochs, _GRID, _GOLDEN, 0)
    return epochs * whole + carries


def _floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Return the sum over i < n of floor((a * i + b) / m), in steps like Euclid's algorithm."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        n, b = divmod(a * n + b, m)
        a, m = m, a
    return total
