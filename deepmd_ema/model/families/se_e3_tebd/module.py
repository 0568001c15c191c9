"""Three-body descriptor with type embeddings (se_e3_tebd): sums over pairs of neighbors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.type_embedded import ElementBlock, OneBlockDescriptor
from deepmd_ema.model.nn.layers import freeze
from deepmd_ema.model.nn.type_embedding import one_hot
from deepmd_ema.model.ops.environment import Radial, switch_and_vjp
from deepmd_ema.model.ops.reference import vjp_of

if TYPE_CHECKING:
    from deepmd_ema.model.families.se_e3_tebd.section import SeE3TebdConfig
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots (J and K of the two neighbors), S slots up to sel, T types, E numbers of
# a type embedding, M channels


class SeTTebdBlock(ElementBlock):
    """``D = sum_jk c_jk G_jk / S^2``, c_jk the product of the angular rows of two neighbors.

    ``c_jk = R_j . R_k``, R_j the normalised angular row of neighbor j.

    ``G_jk`` is a network of ``c_jk`` and the elements of j and k (``concat``), or ``G(c_jk) (1 +
    w_j w_k E(elements))`` with two networks (``strip``, w_j the switch if smooth). Three-body
    embedding: Wang et al., Nucl. Fusion 62, 126013 (2022); with elements as in DPA-2,
    arXiv:2312.15492.

    An empty slot has ``R_j = 0`` and adds nothing: angular columns have no mean, which would depend
    on the orientation.

    Args:
        options: of the block, with the names that they have in the section se_e3_tebd.
        sel: S, most neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        options: SeE3TebdConfig,
        sel: int,
        num_types: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__(options, sel, num_types, dtype, seed)
        self.dim_out = self.num_channels
        freeze(self, options.trainable)

    def features_and_vjp(
        self,
        table: Tensor,
        neighborhood: Neighborhood,
        batch: Batch,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Vjp]:
        """Return the features (A, M), and their vjp to the vectors (A, K, 3) float64.

        Both are functions of the parameters.

        Args:
            table: (T, E) type embeddings.
            neighborhood: neighbors inside the cutoff.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        vector = neighborhood.vector
        radial = Radial.of(vector, self.rcut, self.rcut_smth)
        matrix, matrix_vjp = self.environment_matrix(
            vector, dropped, batch.atom_type, radial=radial
        )
        # angular rows (A, K, 3); the neighborhood holds the first slots of the batch
        rows, neighbor_type = matrix[..., 1:], batch.neighbor_type[:, : mask.shape[1]]
        products = torch.bmm(rows, rows.transpose(1, 2))  # (A, J, K)
        sums_vjp: Callable[[Tensor], tuple[Tensor, ...]]
        if self.pair_embedding is None:
            summed, sums_vjp = self.ops.triple_sums_and_vjp(
                products, neighbor_type, mask, table, self.embedding
            )
        else:
            # (A, K, T): a row times the switch sums neighbors by element in `_gated_by_elements`
            elements = one_hot(neighbor_type, len(table), self.dtype)
            switch, switch_vjp = switch_and_vjp(vector, mask, radial)
            switch = (
                switch.to(self.dtype) if self.smooth else torch.ones_like(rows[..., 0])
            )
            summed, sums_vjp = vjp_of(
                lambda products, switch: self._gated_by_elements(
                    products, elements * switch[..., None], table
                ),
                products,
                switch,
            )

        def vjp(grad_features: Tensor) -> Tensor:
            by_products, *by_switch = sums_vjp(grad_features / self.sel**2)
            # c_jk depends on row j and on row k
            by_rows = torch.bmm(by_products + by_products.transpose(1, 2), rows)
            # the radial column is not used: its gradient is 0
            by_vector = matrix_vjp(functional.pad(by_rows, (1, 0)))
            return (
                by_vector + switch_vjp(by_switch[0])
                if by_switch and self.smooth
                else by_vector
            )

        return summed / self.sel**2, vjp

    def _gated_by_elements(
        self, products: Tensor, elements: Tensor, table: Tensor
    ) -> Tensor:
        """Return the sums (A, M) from ``products`` (A, J, K) and ``elements`` (A, K, T).

        A neighbor has its switch, or 1, in the column of its element. Neighbors are added up by
        element before the gate is applied, so that no gate is read for each pair of them.
        """
        assert self.pair_embedding is not None
        num_types = len(table)
        pairs = torch.cat(
            [table.repeat_interleave(num_types, 0), table.repeat(num_types, 1)], -1
        )
        # (T, T, M), by the elements of j and of k
        gate = self.pair_embedding(pairs).view(num_types, num_types, self.num_channels)
        embedded = cast("Tensor", self.embedding(products[..., None]))
        values = products[..., None] * embedded  # (A, J, K, M)
        # summed over j by element (A, T, K, M), and the gates of all elements with k (A, K, T, M)
        by_first = torch.bmm(elements.transpose(1, 2), values.flatten(2)).view(
            products.shape[0], num_types, *values.shape[2:]
        )
        gates = (elements @ gate.transpose(0, 1).flatten(1)).view(
            *elements.shape, self.num_channels
        )
        gated = (by_first.transpose(1, 2) * gates).sum((1, 2))
        return values.sum((1, 2)) + gated


class SeE3TebdDescriptor(OneBlockDescriptor):
    """Sums over pairs of neighbors."""

    block: SeTTebdBlock
    make_block = SeTTebdBlock
