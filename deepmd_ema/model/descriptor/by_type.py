"""Base of descriptors with one embedding network per element, or per pair of elements."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.model.descriptor.env_statistics import (
    EnvironmentDescriptor,
    EnvironmentMatrix,
    EnvironmentStatistics,
)
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.nn.layers import embedding_network, freeze, module_list
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import PerElementSection

# K neighbor slots, S slots up to sel, T types, M channels, C columns of the environment matrix


class ByTypeDescriptor(EnvironmentDescriptor, EnvironmentMatrix, UsesOperations):
    """Networks of one input on slots of neighbors in one section per type.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
        num_networks: how many networks there are.

    Attributes:
        dim_out: number of features of an atom.
        num_columns: C, 4 or, of a descriptor that is radial only, 1.
    """

    mixed_types = (
        False  # features do not distinguish elements: each has a fitting network
    )
    passes_messages = False
    num_columns: ClassVar[int] = 4

    def __init__(
        self, config: PerElementSection, num_types: int, seed: int, num_networks: int
    ) -> None:
        super().__init__()
        assert not isinstance(config.sel, str), "sel must be resolved to numbers"
        self.section = config
        self.rcut = config.rcut
        self.rcut_smth = config.rcut_smth
        self.protection = config.env_protection
        self.sel = tuple(config.sel)
        self.num_types = num_types
        self.num_channels = config.neuron[-1]
        self.dim_out = self.num_channels
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        # networks differ by their index: one seed gives each its own numbers
        start = seed if config.seed is None else config.seed
        self.embeddings = module_list(
            embedding_network(
                config, 1, self.dtype, seed_for("embedding", start, index)
            )
            for index in range(num_networks)
        )
        freeze(self, config.trainable)
        # (T, S, C): each slot has a mean and a spread, as in files of DeePMD-kit
        self.add_normalisation((num_types, sum(self.sel), self.num_columns), self.dtype)
        self.environments = [
            EnvironmentStatistics(self, config.exclude_types, config.set_davg_zero)
        ]

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return the layout of neighbors of this descriptor."""
        return NeighborLayout(
            self.rcut,
            self.sel,
            self.num_types,
            by_type=True,
            excluded_pairs=excluded_pairs,
        )

    def slots_of(self, batch: Batch) -> Tensor:
        """Return the places (K,) of the slots of a batch among those of all sections."""
        assert all(n <= sel for n, sel in zip(batch.slots, self.sel)), (
            f"slots {batch.slots} exceed sel {self.sel}"
        )
        # a batch has the first slots of each section
        starts = accumulate(self.sel, initial=0)
        sections = [
            torch.arange(n, device=self.mean.device) + start
            for start, n in zip(starts, batch.slots)
        ]
        return torch.cat(sections)


def joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    """Return the concatenation, or the only tensor itself, which is then not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
