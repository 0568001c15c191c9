"""Pairs of types that do not see each other in a descriptor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood, both_orders


class ExcludedPairs(nn.Module):
    """Finds the pairs of a batch that do not see each other; without parameters.

    Args:
        pairs: of types; both orders are excluded.
        num_types: number of elements.
    """

    def __init__(self, pairs: Sequence[Sequence[int]], num_types: int) -> None:
        super().__init__()
        excluded = both_orders(pairs)
        # a number on the host: without pairs nothing is computed
        self.any = len(excluded) > 0
        # (T, T), by type of the atom and of the neighbor
        table = torch.tensor(
            [[(i, j) in excluded for j in range(num_types)] for i in range(num_types)]
        )
        self._table = nn.Buffer(table, persistent=False)

    def forward(
        self, batch: Batch, neighborhood: Neighborhood | None = None
    ) -> Tensor | None:
        """Return (A, K) bool, pairs that are excluded at any distance, or None without such pairs.

        They are those of a neighborhood; without one, of the whole list of the batch.
        """
        if not self.any:
            return None
        mask = (neighborhood or batch.within()).mask
        return (
            self._table[
                batch.atom_type[:, None], batch.neighbor_type[:, : mask.shape[1]]
            ]
            & mask
        )
