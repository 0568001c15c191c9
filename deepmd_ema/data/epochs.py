"""Random orders as pure functions of a seed and numbers, and the share of each system in each epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np

from deepmd_ema.sorting import Array

_GRID = 1 << 40  # probabilities are multiples of 1 / _GRID per epoch
_GOLDEN = 679_535_556_991  # odd, next to _GRID / golden ratio: its multiples fill the grid most evenly
# streams of the seed: order of batches in an epoch, of frames in a system, of systems among the frames of an epoch
BATCHES, FRAMES, SYSTEMS = 1, 2, 3


class EpochShares:
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
