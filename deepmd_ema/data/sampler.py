"""The frames of batch n as a pure function of (seed, n): a run is resumed from the number of a batch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from deepmd_ema.config.schema.text_options import BatchSizeRule, SystemProbability
from deepmd_ema.data.epochs import BATCHES, FRAMES, EpochShares, permutation
from deepmd_ema.data.mixing import Frames, MixedBatches
from deepmd_ema.errors import ConfigError, DataError, counted
from deepmd_ema.sorting import Array

BatchRule: TypeAlias = "int | str | Sequence[int]"
Sizes: TypeAlias = "int | Array"  # atoms of each frame of a system, or one number if all have as many


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
        is_mixed = rule is not None and rule.is_mixed
        # an epoch shares these out to the systems
        self._units = self.num_frames if is_mixed else self._num_batches(world_size)
        self._probabilities = system_probabilities(self._units, auto_prob, sys_probs)
        self.probabilities = tuple(map(float, self._probabilities))
        self._batches: MixedBatches | _BatchesOfOneSystem
        if rule is not None and is_mixed:
            by_frames = rule.number if rule.kind == "mixed" else None
            self._batches = MixedBatches(
                self.frames, sizes, self._probabilities, by_frames, rule.number, seed, world_size
            )
            self.frames_per_step = sum(self.num_frames) / self._batches.per_epoch
            self.max_atoms = max(largest) * rule.number if by_frames else max(rule.number, *largest)
        else:
            self._batches = _BatchesOfOneSystem(
                self.frames, self.batch_size, self._units, self._probabilities, seed, world_size
            )
            of_systems = zip(self.probabilities, self.num_frames, self._units)
            self.frames_per_step = sum(p * n / b for p, n, b in of_systems if b)
            self.max_atoms = max(size * n for size, n in zip(self.batch_size, largest))
        self.batches_per_epoch = self._batches.per_epoch
        self._rank = rank

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

    def _num_batches(self, world_size: int) -> tuple[int, ...]:
        """Return the batches of each system, of all ranks together, in an epoch that has every frame once."""
        of_systems = zip(self.num_frames, self.batch_size)
        return tuple(-(-n // (size * world_size)) if size else 0 for n, size in of_systems)


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

    def __init__(
        self,
        frames: Sequence[Array],
        batch_size: Sequence[int],
        num_batches: Sequence[int],
        probabilities: Sequence[Fraction],
        seed: int,
        world_size: int,
    ) -> None:
        self.per_epoch = sum(num_batches)
        self._frames, self._num_batches = frames, num_batches
        self._sizes = [size * world_size for size in batch_size]
        self._in_epoch = EpochShares(self.per_epoch, probabilities).in_epoch
        self._seed, self._world_size = seed, world_size
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)
        self._frame_order = lru_cache(maxsize=2 * len(frames) + 2)(self._make_frame_order)

    def step(self, n: int) -> list[Frames]:
        """Return the frames of each rank in step ``n``; the last ranks may be left out."""
        epoch, place = divmod(n, self.per_epoch)
        systems, numbers = self._epoch_order(epoch)
        system = int(systems[place])
        round_number, k = divmod(int(numbers[place]), self._num_batches[system])
        size = self._sizes[system]
        together = self._frame_order(system, round_number)[k * size : (k + 1) * size].tolist()
        ranks = range(min(self._world_size, len(together)))
        return [[(system, frame) for frame in together[rank :: self._world_size]] for rank in ranks]

    def _make_epoch_order(self, epoch: int) -> tuple[Array, Array]:
        """Return for each place of an epoch the system and the number of the batch in the system's own sequence."""
        first, counts = self._in_epoch(epoch)
        order = permutation(self.per_epoch, self._seed, BATCHES, epoch)
        systems = np.repeat(np.arange(len(counts)), counts)[order]
        by_system = np.argsort(systems, kind="stable")  # batches of one system come in the order of its own sequence
        numbers = np.empty(len(systems), np.int64)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        numbers[by_system] = np.arange(len(systems)) - starts + np.repeat(np.array(first), counts)
        return systems, numbers

    def _make_frame_order(self, system: int, round_number: int) -> Array:
        own = self._frames[system]
        return own[permutation(len(own), self._seed, FRAMES, system, round_number)]


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
    if isinstance(rule, str):
        return _sizes_by_rule(BatchSizeRule(rule), natoms)
    sizes = [rule] * len(natoms) if isinstance(rule, int) else list(rule)
    if len(sizes) != len(natoms):
        raise ConfigError(f"batch_size: a list of {len(sizes)} numbers, expected one per system: {len(natoms)}.")
    if any(s < 1 for s in sizes):
        raise ConfigError(f"batch_size = {rule}: expected numbers from 1.")
    return tuple(sizes), []


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


def _sizes_by_rule(rule: BatchSizeRule, natoms: Sequence[Sizes]) -> tuple[tuple[int, ...], list[str]]:
    name, atoms = rule.kind, rule.number
    if name == "mixed":
        return (rule.number,) * len(natoms), []
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
