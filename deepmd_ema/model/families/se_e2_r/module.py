"""DeepPot-SE with radial information only (se_e2_r)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.families.se_e2_a.module import SeE2ADescriptor
from deepmd_ema.model.interpolation.sums import DirectSum

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp
    from deepmd_ema.model.nn.layers import Network

# A atoms, K neighbor slots, S slots up to sel, M channels

# factor of the features (res_rescale in DeePMD-kit), which networks in its files expect
SCALE = 1 / 5


class SeE2RDescriptor(SeE2ADescriptor):
    """``D = sum_k G(s_k) / (5 S)`` over all S slots, s the normalised radial column.

    DeepPot-SE (Zhang et al., arXiv:1805.09003), the radial part: ones in the place of R_k of
    se_e2_a. An empty slot has ``s = -mean / spread``; a pair of ``exclude_types`` has ``s = 0`` and
    still adds ``G(0)``.
    """

    num_columns: ClassVar[int] = 1

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, M) and their vector-Jacobian product."""
        (sums, vjp), scale = self._sums(batch), SCALE / sum(self.sel)
        return sums[:, 0] * scale, lambda grad: vjp(grad[:, None] * scale)

    def _sum(
        self, batch: Batch, rows: Tensor, net: Network, vacant: Tensor
    ) -> tuple[Tensor, Vjp, Tensor]:
        """Return ``sum_k G(s_k)`` (A, 1, M), its vjp to the rows (A, K, 1), and G (B, M).

        Arguments are those of the base, with one column of the rows.
        """
        s = rows[..., 0]
        # the factor of G in the sum, which are the rows themselves in se_e2_a
        unit_rows = torch.ones_like(rows)
        if self.interpolation.serves(batch):
            summed = self.interpolation(
                unit_rows, s, net, further=vacant, in_place=self.ops.is_for_cpu
            )
        else:
            summed = DirectSum(unit_rows, s, net, None, net(vacant[:, None]))
        # the gradient by the factors is not used, because they are constants
        assert summed.beyond is not None
        return (
            summed.value,
            lambda grad: summed.vjp(grad)[1].unsqueeze(-1),
            summed.beyond,
        )
