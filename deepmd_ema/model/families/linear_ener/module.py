"""Parts side by side whose energies are added up with weights (``linear_ener``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.build import build_networks
from deepmd_ema.model.families.hybrid.module import HybridDescriptor
from deepmd_ema.model.families.linear_ener.layers import (
    PairTableDescriptor,
    PairTableFitting,
)
from deepmd_ema.model.families.linear_ener.section import PairTableConfig
from deepmd_ema.model.interface import Block, Fitting, Sums
from deepmd_ema.model.nn.layers import module_list
from deepmd_ema.model.pair_table import PairTable
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.linear_ener.section import (
        LinearConfig,
        PartDescriptors,
    )
    from deepmd_ema.model.interface import Descriptor

# A atoms, D features of all parts together


def linear_parts(config: LinearConfig, seed: int) -> tuple[Descriptor, Fitting, None]:
    """Return all parts side by side; each starts from random numbers of its own."""
    descriptors: list[Descriptor] = []
    fittings: list[Fitting] = []
    for index, part in enumerate(config.models):
        if isinstance(part, PairTableConfig):
            assert part.neighbors is not None, "sel is resolved"
            # the table has the elements of the model in their order, whatever its own are
            table = PairTable(part.rows_for(config.type_map), part.rcut)
            descriptors.append(PairTableDescriptor(table, sum(part.neighbors)))
            fittings.append(PairTableFitting())
        else:
            descriptor, fitting = build_networks(
                config, part.descriptor, part.fitting_net, seed_for("part", seed, index)
            )
            descriptors.append(descriptor)
            fittings.append(fitting)
    # no pair energies beside the network (None): tables are parts here
    widths = [part.dim_out for part in descriptors]
    section = cast("PartDescriptors", config.descriptor)
    return (
        LinearDescriptor(section, descriptors),
        LinearFitting(fittings, config.part_weights, widths),
        None,
    )


class LinearDescriptor(HybridDescriptor):
    """The features of all parts; each part sees the neighbors inside its own cutoff only."""

    knows_cutoffs: ClassVar[bool] = True

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return a layout in which every part finds its neighbors.

        Neighbors inside of shorter cutoffs are counted.
        """
        whole = super().layout(excluded_pairs)
        if whole.by_type:
            return whole
        # batches hold the number of neighbors inside of these cutoffs, so that views of short
        # cutoffs are trimmed without waiting for a device
        layouts = (part.layout(frozenset()) for part in self.parts)
        inner = [
            (part.rcut, sum(part.sel))
            for part in layouts
            if not part.by_type and part.rcut < whole.rcut
        ]
        return replace(whole, inner=tuple(dict.fromkeys([*whole.inner, *inner])))


class LinearFitting(Fitting):
    """The weighted sum of the energies of all parts.

    Args:
        parts: what turns the features of each part into energies.
        weights: of each part.
        widths: number of features of each part.
    """

    def __init__(
        self, parts: Sequence[Fitting], weights: Sequence[float], widths: Sequence[int]
    ) -> None:
        super().__init__()
        # numbers, not buffers: weights are not trained, and a checkpoint has them in its section
        self.parts = module_list(parts)
        self._weights = weights
        self._widths = list(widths)

    def forward(self, features: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the energies (A,) float64, eV, and their gradient by the features (A, D)."""
        # a list of gradients, (A, D_k) of part k
        energy = torch.zeros(len(features), dtype=torch.float64, device=features.device)
        grads = []
        split = features.split(self._widths, 1)
        for part, weight, part_features in zip(
            self.parts, self._weights, split, strict=True
        ):
            part_energy, grad = part(part_features, batch)
            energy = energy + weight * part_energy
            grads.append(weight * grad)
        return energy, torch.cat(grads, 1)

    def share_networks(self, other: LinearFitting, whose: str) -> None:
        """Refuse: the networks of parts are not shared by tasks.

        Raises:
            ConfigError: in any case.
        """
        raise ConfigError(
            f"{whose} share fitting networks, which a model of type linear_ener cannot."
        )

    @property
    def case(self) -> int:
        """The index of the task, as in the parts that distinguish tasks."""
        # a table has case 0; networks of one model have the same
        return max(part.case for part in self.parts)

    def set_case(self, index: int) -> None:
        """Set the index of the task in every part."""
        for part in self.parts:
            part.set_case(index)

    def apply_statistics(self, sums: Sums, protect: float) -> None:
        """Hand the sums to all parts."""
        for part in self.parts:
            part.apply_statistics(sums, protect)

    def blocks(self) -> list[Block]:
        """Return the blocks of the parts."""
        return [block for part in self.parts for block in part.blocks()]
