"""Tabulated pair energies that take over from the network where atoms come close (DP-ZBL).

Wang et al., Appl. Phys. Lett. 114, 244101 (2019). The energy of an atom is ``w E_table + (1 - w)
E_network`` with ``E_table = 1/2 sum_k V(r_k)``. The weight w goes smoothly from 1 to 0 where the
soft minimum of the distances to its neighbors, ``sigma = sum_k r_k exp(-r_k / alpha) / sum_k
exp(-r_k / alpha)``, goes from the inner to the outer radius.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.model.ops.environment import switch_and_derivative

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Network
    from deepmd_ema.model.pair_table import PairTable

# A atoms, K neighbor slots, T types


class TabulatedShortRange(nn.Module):
    """Energies of a table, blended with those of a network; without parameters.

    Args:
        table: pair energies.
        alpha: decay length of the soft minimum, angstrom.
        inner: the table alone counts below, angstrom.
        outer: the network alone counts beyond, angstrom.
    """

    def __init__(
        self, table: PairTable, alpha: float, inner: float, outer: float
    ) -> None:
        super().__init__()
        self.table = table
        self.alpha = alpha
        self.inner = inner
        self.outer = outer

    def forward(
        self, batch: Batch, network: Network, counted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the energies (A,), eV, and their gradient by ``batch.vector`` (A, K, 3).

        Args:
            batch: frames with their neighbors.
            network: the rest of the model.
            counted: (T,) 0 for types whose atoms have no energy of their own, else 1.
        """
        energies = network(batch)
        energy = energies.atom_energy
        distance = torch.linalg.vector_norm(batch.vector, dim=-1)
        near = distance < self.table.rcut  # empty slots are at 2 * rcut
        pair, pair_slope = self.table(batch, distance, near)
        weight, weight_slope = self._weight(distance, near)
        counted = counted[batch.atom_type]
        tabulated = 0.5 * pair.sum(1) * counted
        keep = 1 - weight
        # d/dr_k of w E_table + (1 - w) E_network, but for what the features have of r_k
        by_weight = (tabulated - energy)[:, None] * weight_slope
        slope = (0.5 * weight * counted)[:, None] * pair_slope + by_weight  # (A, K)
        unit = batch.vector / distance.unsqueeze(-1)
        # features are in the precision of the descriptor
        grad_features = energies.grad_features
        blended = energies.vjp(keep[:, None].to(grad_features) * grad_features)
        return keep * energy + weight * tabulated, blended + slope.unsqueeze(-1) * unit

    def _weight(self, distance: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight (A,) of the table and its derivatives (A, K) by the distances."""
        # measured from the nearest neighbor, so that the sums do not vanish where it is far away;
        # there may be no slot at all, and no neighbor within the cutoff
        limit = distance.new_full((distance.shape[0], 1), self.table.rcut)
        candidates = torch.cat([torch.where(near, distance, torch.inf), limit], 1)
        nearest = candidates.amin(1, keepdim=True)
        # (A, K) the weights of the soft minimum
        share = torch.where(near, torch.exp((nearest - distance) / self.alpha), 0.0)
        share = share / share.sum(1, keepdim=True).clamp(min=1)
        soft = (share * distance).sum(1)
        weight, derivative = switch_and_derivative(soft, self.outer, self.inner)
        # an atom without neighbors has no distance, and the network alone counts
        alone = ~near.any(1)
        weight = weight.masked_fill(alone, 0)
        derivative = derivative.masked_fill(alone, 0)
        return weight, derivative[:, None] * share * (
            1 + (soft[:, None] - distance) / self.alpha
        )
