"""DeepPot-SE with radial and angular information (se_e2_a)."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor, joined
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.ops.reference import axis_features, axis_features_vjp

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig
    from deepmd_ema.model.families.se_e2_r.section import SeE2RConfig
    from deepmd_ema.model.interface import Vjp
    from deepmd_ema.model.nn.layers import Network

# A atoms, K neighbor slots, S slots up to sel, T types, M channels, X axis channels, C columns of R


class SeE2ADescriptor(ByTypeDescriptor):
    """``D = g^T g[:X]`` with ``g = sum_k R_k G(s_k) / S`` over all S slots.

    R is the normalised environment matrix of the slots, s its first column, and G a network for
    each type of the neighbor, or for each pair of types (DeepPot-SE, Zhang et al.,
    arXiv:1805.09003).

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.

    Attributes:
        interpolation: of the networks.
    """

    def __init__(
        self, config: SeE2AConfig | SeE2RConfig, num_types: int, seed: int
    ) -> None:
        super().__init__(
            config, num_types, seed, num_types if config.type_one_side else num_types**2
        )
        self.one_side = config.type_one_side
        self.num_axis = getattr(config, "axis_neuron", 1)
        self.dim_out = self.num_channels * self.num_axis
        self.interpolation = Interpolation(
            config.interpolate, self.dtype, sum(config.neuron)
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, M X) and their vector-Jacobian product."""
        sums, vjp = self._sums(batch)
        num_slots, axis = sum(self.sel), self.num_axis
        # divided by all slots, not by the number of neighbors: no jump where a neighbor enters
        moments = sums / num_slots
        return axis_features(moments, axis), lambda grad: vjp(
            axis_features_vjp(grad, moments, axis) / num_slots
        )

    @property
    def dim_equivariants(self) -> int:
        """M, number of equivariant vectors of an atom."""
        return self.num_channels

    def features_and_equivariants(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the features (A, M X), and the equivariant columns x, y, z of g (A, M, 3)."""
        moments = self._sums(batch)[0] / sum(self.sel)
        return axis_features(moments, self.num_axis), moments[:, 1:].transpose(1, 2)

    def _sums(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return ``sum_k R_k G(s_k)`` (A, C, M) over all S slots, and its vjp to the vectors."""
        dropped, slots = self.excluded(batch), self.slots_of(batch)
        rows, rows_vjp = self.environment_matrix(
            batch.vector, dropped, batch.atom_type, slots
        )
        # an empty slot has the row -mean / stddev of its type of centre: slots that the batch left
        # out are constants per type, whose embedding is evaluated once
        empty = -(self.mean.double() / self.stddev.double()).to(self.dtype)  # (T, S, C)
        # atoms, and types of the centre, that have networks in common; split, not sliced: a slice
        # compares its ends with the size, on which a compiled graph would depend
        atoms, types = (
            ([rows.shape[0]], self.num_types)
            if self.one_side
            else (list(batch.type_counts), 1)
        )
        neighbors = zip(
            rows.split(batch.slots, 1),
            empty.split(self.sel, 1),
            self.sel,
            batch.slots,
            strict=True,
        )
        nets = list(self.embeddings)  # at neighbor, or at neighbor * T + centre
        sums: list[Tensor] = []  # of each type of the neighbor
        vjps: list[list[Callable[[Tensor], Tensor]]] = []
        beyond: list[Tensor] = []
        for neighbor, (section, padding, sel, used) in enumerate(neighbors):
            vacant = [s.flatten() for s in padding[..., 0].split(types)]
            # one network for all centres, or one for each type of the centre
            section_nets = nets[neighbor * len(atoms) : (neighbor + 1) * len(atoms)]
            parts = [
                self._sum(batch, *part)
                for part in zip(section.split(atoms), section_nets, vacant, strict=True)
            ]
            sums.append(joined([value for value, _, _ in parts]))
            vjps.append([vjp for _, vjp, _ in parts])
            embedded = joined([values for _, _, values in parts]).view(
                self.num_types, sel, self.num_channels
            )
            # slots that the batch holds have weight 0; a shorter slice would make a compiled graph
            # depend on whether it is empty
            weight = (torch.arange(sel, device=rows.device) >= used).to(self.dtype)[
                :, None
            ]
            left = padding if self.num_columns > 1 else torch.ones_like(padding)
            beyond.append(torch.bmm((left * weight).transpose(1, 2), embedded))
        # each atom takes the sum of its type (1, C, M) by expanding, because atoms are in the order
        # of their types: an index has a derivative that adds in any order on a GPU
        type_sums = reduce(torch.add, beyond).split(1)
        atom_sums = torch.cat(
            [
                type_sum.expand(n, -1, -1)
                for type_sum, n in zip(type_sums, batch.type_counts)
            ]
        )

        def vjp(grad: Tensor) -> Tensor:
            shares = grad.split(atoms)
            by_section = [
                joined(
                    [part_vjp(share) for part_vjp, share in zip(section_vjps, shares)]
                )
                for section_vjps in vjps
            ]
            return rows_vjp(joined(by_section, 1))

        return reduce(torch.add, sums) + atom_sums, vjp

    def _sum(
        self, batch: Batch, rows: Tensor, net: Network, vacant: Tensor
    ) -> tuple[Tensor, Vjp, Tensor]:
        """Return ``sum_k R_k G(s_k)`` (A, C, M), its vjp to the rows (A, K, C), and G (B, M).

        Args:
            batch: the batch that the rows are of.
            rows: (A, K, C), of one type of the neighbor.
            net: G.
            vacant: (B,) numbers s of vacant slots, at which G is returned.
        """
        if self.interpolation.serves(batch):
            summed = self.interpolation(
                rows, rows[..., 0], net, further=vacant, in_place=self.ops.is_for_cpu
            )
            assert summed.beyond is not None
            return summed.value, summed.rows_vjp, summed.beyond
        moments = self.ops.moments(rows, net)
        return moments.value, moments.vjp, net(vacant[:, None])
