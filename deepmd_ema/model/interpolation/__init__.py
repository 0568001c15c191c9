"""Interpolated embedding nets: sums over neighbors whose cost does not grow with the size of a net (decision 0016)."""

from deepmd_ema.model.interpolation.interpolation import (
    HasInterpolation,
    InterpolatedNets,
    Interpolation,
    numbers_per_pair,
)
from deepmd_ema.model.interpolation.models import (
    interpolations_of,
    make_tables,
    min_table_distance,
    seal,
    tables_in,
    tabulate,
)
from deepmd_ema.model.interpolation.sums import NeighborSum

__all__ = [
    "HasInterpolation",
    "InterpolatedNets",
    "Interpolation",
    "NeighborSum",
    "interpolations_of",
    "make_tables",
    "min_table_distance",
    "numbers_per_pair",
    "seal",
    "tables_in",
    "tabulate",
]
