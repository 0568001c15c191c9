"""Sums over pairs of neighbors of an atom, embedded by their angle and elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.env_statistics import environment, normalised
from deepmd_ema.model.descriptor.type_embedded import ElementBlock
from deepmd_ema.model.nn.layers import freeze
from deepmd_ema.model.nn.type_embedding import one_hot
from deepmd_ema.model.ops.environment import environment_rows

if TYPE_CHECKING:
    from deepmd_ema.families.se_e3_tebd.section import SeE3TebdConfig

# A atoms, K neighbor slots (J and K of the two neighbors), S slots up to sel, T types, E numbers of a type embedding,
# M channels


class SeTTebdBlock(ElementBlock):
    """``D = sum_jk c_jk G_jk / S^2`` with ``c_jk = R_j . R_k``, R_j the normalised angular row of neighbor j.

    ``G_jk`` is a network of ``c_jk`` and the elements of j and k (``concat``), or ``G(c_jk) (1 + w_j w_k E(elements))``
    with two networks (``strip``, w_j the switch if smooth). Three-body embedding: Wang et al., Nucl. Fusion 62, 126013
    (2022); with elements as in DPA-2, arXiv:2312.15492.

    An empty slot has ``R_j = 0`` and adds nothing: angular columns have no mean, which would depend on the orientation.

    Args:
        options: of the block, with the names that they have in the section se_e3_tebd.
        sel: S, most neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(self, options: SeE3TebdConfig, sel: int, num_types: int, dtype: torch.dtype, seed: int) -> None:
        super().__init__(options, sel, num_types, dtype, seed, num_elements=2)
        freeze(self, options.trainable)

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_channels

    def forward(
        self, vector: Tensor, neighborhood: Neighborhood, table: Tensor, batch: Batch, dropped: Tensor | None
    ) -> Tensor:
        """Return the features (A, M), which can be differentiated by ``vector``.

        Args:
            vector: (A, K, 3) those of ``neighborhood``.
            neighborhood: neighbors inside the cutoff.
            table: (T, E) type embeddings.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        neighbor_type = batch.neighbor_type[:, : neighborhood.neighbor.shape[1]]
        distance = torch.linalg.vector_norm(vector, dim=-1)
        raw, switch = environment_rows(vector, distance, self.rcut, self.rcut_smth, self.protection)
        rows = normalised(torch.where(mask[..., None], raw, 0), self, batch.atom_type)[..., 1:].to(self.dtype)
        products = torch.bmm(rows, rows.transpose(1, 2))
        if self.pair_embedding is None:
            summed = self.ops.triple_sums(products, neighbor_type, mask, table, self.embedding)
        else:
            elements = one_hot(neighbor_type, len(table), self.dtype)
            if self.smooth:
                elements = elements * torch.where(mask, switch, 0).to(self.dtype)[..., None]
            summed = self._gated_by_elements(products, elements, table)
        return summed / self.sel**2

    def is_written_out(self, batch: Batch) -> bool:
        """Whether :meth:`features_and_vjp` serves a batch."""
        return self.ops.is_for_cpu and self.pair_embedding is None and self.embedding.is_tanh

    def features_and_vjp(
        self, neighborhood: Neighborhood, table: Tensor, batch: Batch, dropped: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the features (A, M), and the function from their gradient to that by the vectors (A, K, 3) float64.

        Arguments are those of :meth:`forward`. Both are functions of the parameters alone, from operations whose
        gradient is written out.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        matrix, matrix_vjp = environment(self, neighborhood.vector, dropped, batch.atom_type)
        rows, neighbor_type = matrix[..., 1:], batch.neighbor_type[:, : mask.shape[1]]
        products = torch.bmm(rows, rows.transpose(1, 2))
        summed, by_summed = self.ops.triple_sums_and_vjp(products, neighbor_type, mask, table, self.embedding)

        def vjp(grad: Tensor) -> Tensor:
            by_products = by_summed(grad / self.sel**2)
            by_rows = torch.bmm(by_products + by_products.transpose(1, 2), rows)
            return matrix_vjp(functional.pad(by_rows, (1, 0)))

        return summed / self.sel**2, vjp

    def _gated_by_elements(self, products: Tensor, elements: Tensor, table: Tensor) -> Tensor:
        """Return the sums (A, M) from ``products`` (A, J, K) and ``elements`` (A, K, T).

        A neighbor has its switch, or 1, in the column of its element. Neighbors are added up by element before the gate
        is applied, so that no gate is read for each pair of them.
        """
        assert self.pair_embedding is not None
        num_types = len(table)
        pairs = torch.cat([table.repeat_interleave(num_types, 0), table.repeat(num_types, 1)], -1)
        gate = self.pair_embedding(pairs).view(num_types, num_types, self.num_channels)  # of (j, k)
        values = products[..., None] * cast("Tensor", self.embedding(products[..., None]))  # (A, J, K, M)
        by_first = torch.bmm(elements.transpose(1, 2), values.flatten(2)).view(
            products.shape[0], num_types, *values.shape[2:]
        )
        of_second = (elements @ gate.transpose(0, 1).flatten(1)).view(*elements.shape, self.num_channels)
        gated = (by_first.transpose(1, 2) * of_second).sum((1, 2))
        return values.sum((1, 2)) + gated
