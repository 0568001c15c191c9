"""Numpy helpers: sorting of small integers, ranks in groups, small integer types."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray


def stable_argsort(keys: Array, bound: int) -> Array:
    """Return the stable order of integers from 0 to ``bound - 1``, by radix sort where they fit 16 bits."""
    # numpy sorts 16-bit integers by radix: about 5 times faster than the merge sort of 64-bit ones
    return np.argsort(keys.astype(np.uint16) if bound <= 1 << 16 else keys, kind="stable")


def rank_in_group(key: Array, num_groups: int) -> tuple[Array, Array]:
    """Return for sorted ``key`` the place of each element in its group, and the sizes of the groups."""
    counts = np.bincount(key, minlength=num_groups)
    return np.arange(len(key)) - np.repeat(np.cumsum(counts) - counts, counts), counts


def small_int(bound: int) -> type[np.integer]:
    """Return the smallest integer type for numbers from 0 to ``bound - 1``."""
    return np.uint8 if bound <= 1 << 8 else np.uint16 if bound <= 1 << 16 else np.int32
