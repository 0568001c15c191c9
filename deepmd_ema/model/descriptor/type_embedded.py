"""Base of descriptors with networks for all elements, which distinguish them by embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.distributed.tensors import precision
from deepmd_ema.model.descriptor.env_statistics import (
    EnvironmentDescriptor,
    EnvironmentMatrix,
    EnvironmentStatistics,
)
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.nn.layers import Network, embedding_network
from deepmd_ema.model.nn.type_embedding import TypeEmbedding, pick
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.config.schema.descriptor_bases import OneListSection
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, S slots up to sel, T types, D features, E numbers of a type embedding


class TypeEmbeddedDescriptor(EnvironmentDescriptor):
    """Features from the neighbors and the type embeddings.

    If requested, the embedding of the atom itself is among the features.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: T.
        seed: of the initial parameters when the section has none.
        width: E.

    Attributes:
        sel: S, of the list of the largest cutoff.
        num_features: features without the embedding of the atom.
        start: seed of the parts.
    """

    mixed_types = True
    passes_messages = False
    num_features: int

    def __init__(self, config: Any, num_types: int, seed: int, width: int) -> None:
        super().__init__()
        assert config.neighbors is not None, "numbers of neighbors must be resolved"
        self.section = config
        self.num_types = num_types
        self.sel = int(config.neighbors[0])
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        self.start = seed if config.seed is None else config.seed
        self._width = width
        # one table for all blocks of the descriptor
        seed = seed_for("type_embedding", self.start)
        self.type_embedding = TypeEmbedding(config, num_types, width, self.dtype, seed)

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.num_features + self._width * self.section.concat_output_tebd

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vector-Jacobian product."""
        table: Tensor = self.type_embedding()
        features, vjp = self._features_and_vjp(table, batch)
        if not self.section.concat_output_tebd:
            return features, vjp
        # the embedding of the atom does not depend on positions: the vjp leaves it out
        width = features.shape[1]
        whole = torch.cat([features, pick(table, batch.atom_type)], 1)  # (A, D)
        return whole, lambda grad: vjp(grad[:, :width])

    def features_and_equivariants(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the features (A, D) and equivariant vectors (A, M, 3)."""
        table: Tensor = self.type_embedding()
        features, vectors = self._features_and_equivariants(table, batch)
        if self.section.concat_output_tebd:
            features = torch.cat([features, pick(table, batch.atom_type)], 1)
        return features, vectors

    def _features_and_equivariants(
        self, table: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return features of the neighbors (A, num_features) and equivariant vectors (A, M, 3)."""
        raise NotImplementedError

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features of the neighbors (A, num_features) and their vector-Jacobian product.

        Args:
            table: (T, E) type embeddings.
            batch: frames with their neighbors.
        """
        raise NotImplementedError


class ElementBlock(EnvironmentMatrix, UsesOperations):
    """Networks of neighbors and of elements, and the environment matrix that they see.

    Args:
        options: of the block, with the names that they have in the section of its descriptor.
        sel: S, most neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self,
        options: OneListSection,
        sel: int,
        num_types: int,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.rcut = options.rcut
        self.rcut_smth = options.rcut_smth
        self.protection = options.env_protection
        self.sel = sel
        self.dtype = dtype
        self.smooth = options.smooth
        # type embeddings that a network sees at once: that of the neighbor alone, or of two atoms
        width = options.tebd_dim * (
            1 if getattr(options, "type_one_side", False) else 2
        )
        self.num_channels = options.neuron[-1]
        # strip: one network of s and one of the elements, whose outputs are multiplied
        strip = options.tebd_input_mode == "strip"
        self.embedding = embedding_network(
            options, 1 if strip else 1 + width, dtype, seed_for("embedding", seed)
        )
        # the embedding of a pair of elements does not depend on s: T^2 rows serve all pairs of
        # atoms
        self.pair_embedding: Network | None = None
        if strip:
            self.pair_embedding = embedding_network(
                options, width, dtype, seed_for("pair_embedding", seed)
            )
        # one mean and spread for each type of centre; slots do not distinguish neighbors
        self.add_normalisation((num_types, sel, 4), dtype)


class OneBlockDescriptor(TypeEmbeddedDescriptor):
    """The features of a block and, beside them, the type embedding of the atom.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be a number.
        num_types: T.
        seed: of the initial parameters when the section has none.

    Attributes:
        make_block: called with the section, S, T, the precision and the seed.
    """

    make_block: ClassVar[Any]

    def __init__(self, config: Any, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, config.tebd_dim)
        self.block: Any = self.make_block(
            config, self.sel, num_types, self.dtype, self.start
        )
        self.num_features = self.block.dim_out
        self.environments = [
            EnvironmentStatistics(
                self.block, config.exclude_types, config.set_davg_zero
            )
        ]

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        # as far as the list reaches: beyond the cutoff, rows are those of empty slots
        neighborhood = batch.within()
        features, vjp = self.block.features_and_vjp(
            table, neighborhood, batch, self.excluded(batch, neighborhood)
        )
        return features, cast("Vjp", vjp)
