"""Three-body angular information with one network per pair of elements (se_e3)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.ops.reference import with_vjp

if TYPE_CHECKING:
    from deepmd_ema.model.families.se_e3.section import SeE3Config
    from deepmd_ema.model.interface import Vjp

# A atoms, J and K slots of two sections, M channels, T types


class SeE3Descriptor(ByTypeDescriptor):
    """``D = sum over types a <= b of sum_jk c_jk G_ab(c_jk) / (S_a S_b)``.

    ``c_jk = R_j . R_k`` with j of type a and k of type b, R the normalised angular rows of the
    environment matrix. Three-body embedding: Wang et al., Nucl. Fusion 62, 126013 (2022). An empty
    slot has ``R = 0`` and adds nothing: angular columns have no mean, which would depend on the
    orientation.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
    """

    def __init__(self, config: SeE3Config, num_types: int, seed: int) -> None:
        # pairs of types of the neighbors, one for each network; exchanged, they are the same sum
        self.pairs = [(a, b) for b in range(num_types) for a in range(b + 1)]
        super().__init__(config, num_types, seed, len(self.pairs))

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, M) and their vector-Jacobian product."""
        slots = self.slots_of(batch)
        matrix, matrix_vjp = self.environment_matrix(
            batch.vector, self.excluded(batch), batch.atom_type, slots
        )
        # without the radial column: (A, K, 3)
        features, features_vjp = with_vjp(
            lambda rows: self._features(rows, batch), matrix[..., 1:]
        )
        return features, lambda grad_features: matrix_vjp(
            functional.pad(features_vjp(grad_features), (1, 0))
        )

    def _features(self, rows: Tensor, batch: Batch) -> Tensor:
        by_type = rows.split(batch.slots, 1)
        parts = []
        for (a, b), net in zip(self.pairs, self.embeddings, strict=True):
            products = torch.bmm(by_type[a], by_type[b].transpose(1, 2))
            products = products.unsqueeze(-1)  # (A, J, K, 1)
            # slots up to sel, of which the batch holds J and K; 1 for types without slots
            parts.append(
                (products * net(products)).sum((1, 2))
                / max(self.sel[a] * self.sel[b], 1)
            )
        return reduce(torch.add, parts)
