"""Pairs of atoms that are so close that a model has no energy for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from deepmd_ema.data.source import Frame
from deepmd_ema.geometry import find_pairs
from deepmd_ema.model.pair_table import PairTable

SAME_PLACE = 1e-3  # angstrom; two atoms this close leave no direction between them


def describe_short_pair(frame: Frame, model: nn.Module, type_map: Sequence[str], rcut: float) -> str | None:
    """Describe the shortest pair of a frame if a model has no energy for it, else return None.

    Args:
        frame: atoms are numbered as in its file.
        model: may have tables of pair energies.
        type_map: names of the elements.
        rcut: cutoff radius of the model, angstrom.
    """
    tables = [part for part in model.modules() if isinstance(part, PairTable)]
    first = max((table.first for table in tables), default=0.0)
    pairs = find_pairs(frame.coord, frame.box, rcut)
    if not pairs.nearest < max(first, SAME_PLACE):
        return None
    distance = np.linalg.norm(pairs.vector(frame.coord, frame.box), axis=1)
    one, other = (frame.describe_atom(side[distance.argmin()], type_map) for side in (pairs.i, pairs.j))
    who = f"atoms {one} and {other} are" if one != other else f"atom {one} and an image of it are"
    if pairs.nearest < first:
        last = max(table.rcut for table in tables)
        why = f"the table of pair energies of the model covers {first:g} to {last:g} angstrom"
    else:
        why = "the model has no direction between them"
    return f"{who} {pairs.nearest:.4g} angstrom apart, and {why}. Move them apart."
