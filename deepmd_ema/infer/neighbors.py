"""Shortest distances and largest numbers of neighbors of data: ``dp-ema neighbor-stat``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deepmd_ema.data.formats.discover import stored_type_map
from deepmd_ema.data.source import ReadSpec
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import neighbor_statistics
from deepmd_ema.infer.evaluate import open_checked


def describe_neighbors(
    systems: Sequence[str | Path],
    rcut: float,
    type_map: Sequence[str] | None = None,
    mixed_type: bool = False,
    rglob_patterns: Sequence[str] | None = None,
) -> str:
    """Return the lines of ``dp neighbor-stat``: shortest distance and most neighbors over all frames of systems.

    Args:
        systems: systems, or folders searched for systems.
        rcut: cutoff radius, angstrom.
        type_map: the elements; by default those of the systems' type_map.raw, in a line of their own.
        mixed_type: whether neighbors of all types are counted together.
        rglob_patterns: names of systems to search for in folders.

    Raises:
        DataError: if the data cannot be read, or two atoms are in one place.
    """
    paths = [str(path) for path in systems]
    names = list(type_map) if type_map else stored_type_map(paths, rglob_patterns)
    opened = open_checked(paths, ReadSpec(names), rcut, rglob_patterns)
    places = [(system, k) for system in opened for k in range(system.num_frames)]
    frames = (system.frame(k) for system, k in places)
    found = neighbor_statistics(((f.coord, f.box, f.atom_type) for f in frames), rcut, len(names))
    if found.min_distance == 0:
        number = int(np.argmin(found.frame_min))
        system, k = places[number]
        place, (a, b) = system.where(k), found.frame_pair[number]
        raise DataError(f"{place.file}: frame {place.frame} (from 0): atoms {a} and {b} are in one place.")
    lines = [] if type_map else [f"type_map: {names}"]
    most = np.array([found.max_total] if mixed_type else found.max_neighbors)
    numbers = np.array2string(most, max_line_width=10**6, threshold=10**6)
    return "\n".join([*lines, f"min_nbor_dist: {found.min_distance:f}", f"max_nbor_size: {numbers}"])
