"""What descriptors of one block that serves all elements share: type embedding, statistics, excluded pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.kernels.vjp import with_vjp
from deepmd_ema.model.nn.type_embedding import TypeEmbedding
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Block, Vjp

# A atoms, K neighbor slots, S slots up to sel, T types, D features, E numbers of a type embedding


class EmbeddedBlock(Protocol):
    """Features of an atom from its neighbors and the type embeddings.

    Attributes:
        mean: (T, S, 4) subtracted from the environment matrix.
        stddev: (T, S, 4) the environment matrix is divided by it.
    """

    mean: Tensor
    stddev: Tensor

    @property
    def dim_out(self) -> int:
        """Return D, the number of features of an atom."""

    def __call__(
        self, vector: Tensor, hood: Neighborhood, table: Tensor, batch: Batch, dropped: Tensor | None
    ) -> Tensor:
        """Return the features (A, D), which can be differentiated by ``vector``."""


class TypeEmbeddedDescriptor(nn.Module):
    """The features of a block and, beside them, the type embedding of the atom.

    Args:
        config: the section ``model.descriptor``; ``sel`` must be a number.
        num_types: T.
        seed: of the initial parameters when the section has none.
        make_block: called with the section, S, T, the precision and the seed.
    """

    mixed_types = True
    passes_messages = False

    def __init__(self, config: Any, num_types: int, seed: int, make_block: Callable[..., EmbeddedBlock]) -> None:
        super().__init__()
        assert config.neighbors is not None, "sel must be resolved to a number"
        self.section = config
        self.sel, self.num_types = config.neighbors[0], num_types
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        start = seed if config.seed is None else config.seed
        self.type_embedding = TypeEmbedding(
            num_types,
            config.tebd_dim,
            bias=config.use_tebd_bias,
            trainable=config.trainable,
            dtype=self.dtype,
            seed=seed_for("type_embedding", start),
            electrons=config.use_econf_tebd,
        )
        self.block: Any = make_block(config, self.sel, num_types, self.dtype, start)
        self._statistics = EnvironmentStatistics(
            num_types,
            config.rcut,
            config.rcut_smth,
            config.env_protection,
            (self.sel,),
            by_type=False,
            exclude_types=config.exclude_types,
        )

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        width: int = self.block.dim_out
        return width + (self.section.tebd_dim if self.section.concat_output_tebd else 0)

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return how this descriptor wants its neighbors."""
        return NeighborLayout(
            self.section.rcut, (self.sel,), self.num_types, by_type=False, excluded_pairs=excluded_pairs
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums by type of centre, as DeePMD-kit names them in a stat file."""
        return self._statistics.sum_names

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrix by type of centre."""
        return self._statistics.measure(batch, self.excluded(batch, batch.within()))

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the columns of the environment matrix, equal for all slots of a type of centre."""
        mean, spread = self._statistics.mean_and_spread(sums, self.section.set_davg_zero)
        self.block.mean.copy_(mean)
        self.block.stddev.copy_(spread)

    def stat_identity(self) -> dict[str, Any]:
        """Return what DeePMD-kit hashes for the name of the folder."""
        return self._statistics.identity()

    def stat_settings(self) -> dict[str, Any]:
        """Return what DeePMD-kit's hash rounds or leaves out."""
        return self._statistics.settings()

    def blocks(self) -> list[Block]:
        """Return none: all networks are small, and all of them are used in every step."""
        return []

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vector-Jacobian product."""
        hood = batch.within()  # as far as the list reaches: beyond the cutoff, rows are those of empty slots
        dropped = self.excluded(batch, hood)
        table: Tensor = self.type_embedding()
        features, vjp = with_vjp(lambda vector: self.block(vector, hood, table, batch, dropped), batch.vector)
        if not self.section.concat_output_tebd:
            return features, vjp
        width = features.shape[1]
        return torch.cat([features, table[batch.atom_type]], 1), lambda grad: vjp(grad[:, :width])
