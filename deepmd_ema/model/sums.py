"""Sums over data: by element, and the means and spreads that follow."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from torch import Tensor

from deepmd_ema.batch import Batch

# A atoms, T types
Array: TypeAlias = np.ndarray


def mean_and_spread(sums: Array, smallest: float) -> tuple[Array, Array]:
    """Return mean and standard deviation (N,), at least ``smallest``, from (N, 3) count, sum and sum of squares."""
    count = np.maximum(sums[:, 0], 1)
    mean = sums[:, 1] / count
    variance = np.maximum(sums[:, 2] / count - mean**2, 0)
    return mean, np.maximum(np.sqrt(variance), smallest)


def sum_by_type(per_atom: Tensor, batch: Batch) -> Array:
    """Return the sums (T, ...) over the atoms of each type of (A, ...)."""
    return np.stack([part.sum(0).numpy() for part in per_atom.split(batch.type_counts)])
