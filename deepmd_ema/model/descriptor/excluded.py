"""Pairs of elements that do not see each other in a descriptor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood, both_orders

# A atoms, K neighbor slots, T types


class ExcludedPairs(nn.Module):
    """Tells which neighbors an atom does not see.

    Args:
        num_types: T.
        pairs: of types; both orders are excluded.
    """

    def __init__(self, num_types: int, pairs: Iterable[Sequence[int]]) -> None:
        super().__init__()
        excluded = both_orders(pairs)
        self._any = bool(excluded)
        table = torch.tensor([[(i, j) in excluded for j in range(num_types)] for i in range(num_types)])
        self._table: Tensor
        self.register_buffer("_table", table, persistent=False)

    def forward(self, batch: Batch, hood: Neighborhood) -> Tensor | None:
        """Return (A, K) bool, the neighbors in ``hood`` that are excluded, or None where none can be."""
        if not self._any:
            return None
        neighbor_type = batch.atom_type[hood.neighbor.clamp(max=len(batch.atom_type) - 1)]
        return self._table[batch.atom_type[:, None], neighbor_type] & hood.mask
