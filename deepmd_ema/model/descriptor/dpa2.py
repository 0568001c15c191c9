"""DPA-2: first features from the surroundings of an atom (repinit), then layers of messages (repformer)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.descriptor.repformer import Repformer
from deepmd_ema.model.descriptor.repformer_attention import linear
from deepmd_ema.model.descriptor.se_atten_block import SeAttenBlock
from deepmd_ema.model.descriptor.se_t_tebd_block import SeTTebdBlock
from deepmd_ema.model.kernels.vjp import with_vjp
from deepmd_ema.model.nn.layers import freeze
from deepmd_ema.model.nn.type_embedding import TypeEmbedding, pick
from deepmd_ema.model.statistics import folder_of
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.config.schema.dpa2 import DPA2Config
    from deepmd_ema.model.interface import Block, Vjp

# A atoms, K neighbor slots, D features, C features of an atom in the repformer


@dataclass(frozen=True)
class _Part:
    """A part that normalises an environment matrix of its own.

    Attributes:
        module: with the buffers ``mean`` and ``stddev``.
        zero_mean: whether its mean stays zero.
        rcut: its cutoff radius, angstrom.
        most: neighbors that it keeps.
        statistics: of its environment matrix.
    """

    module: Any
    zero_mean: bool
    rcut: float
    most: int
    statistics: EnvironmentStatistics

    @property
    def folder(self) -> str:
        """Where DeePMD-kit keeps the sums in a stat file."""
        return folder_of(self.statistics.identity())


class DPA2Descriptor(nn.Module):
    """Features of an atom after messages between atoms (DPA-2, Zhang et al., arXiv:2312.15492).

    ``D = repformer(W [repinit, angles] + W' E)``, E the type embedding, which may stand beside D, too. ``repinit`` is
    the block of se_atten without attention, ``angles`` that of se_e3_tebd.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    mixed_types = True
    passes_messages = True

    def __init__(self, config: DPA2Config, num_types: int, seed: int) -> None:
        super().__init__()
        assert config.neighbors is not None, "numbers of neighbors must be resolved"
        self.section, self.num_types = config, num_types
        self.dtype = precision(config.precision)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        start = seed if config.seed is None else config.seed
        first, later = config.first_block, config.repformer
        self.type_embedding = TypeEmbedding(
            num_types,
            first.tebd_dim,
            bias=config.use_tebd_bias,
            trainable=config.trainable,
            dtype=self.dtype,
            seed=seed_for("type_embedding", start),
            electrons=config.use_econf_tebd,
        )
        self.repinit = SeAttenBlock(first, config.neighbors[0], num_types, self.dtype, seed_for("repinit", start))
        self.angles: SeTTebdBlock | None = None
        if config.repinit.use_three_body:
            most = int(config.repinit.three_body_sel)
            self.angles = SeTTebdBlock(config.angle_block, most, num_types, self.dtype, seed_for("angles", start))
        num_first = self.repinit.dim_out + (self.angles.dim_out if self.angles is not None else 0)
        self.to_repformer = None
        if num_first != later.g1_dim:
            self.to_repformer = linear(num_first, later.g1_dim, "to_repformer", start, self.dtype, bias=False)
            with torch.no_grad():
                self.to_repformer.weight.mul_(2**0.5)  # as wide as DeePMD-kit draws this one
        self.add_element = None
        if config.add_tebd_to_repinit_out:
            self.add_element = linear(first.tebd_dim, later.g1_dim, "add_element", start, self.dtype, bias=False)
        self.repformer = Repformer(
            later,
            num_types,
            smooth=config.smooth,
            protection=config.env_protection,
            dtype=self.dtype,
            seed=seed_for("repformer", start),
        )
        if not config.trainable:
            freeze(self, False)
        self._parts = self._list_parts()

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        tebd_dim = self.section.repinit.tebd_dim if self.section.concat_output_tebd else 0
        return self.section.repformer.g1_dim + tebd_dim

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return how this descriptor wants its neighbors."""
        most = self.section.neighbors
        assert most is not None
        later = tuple((part.rcut, part.most) for part in self._parts[1:])
        return NeighborLayout(
            self.section.cutoff, most, self.num_types, by_type=False, excluded_pairs=excluded_pairs, inner=later
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums of each part by type of centre, in its folder of a stat file of DeePMD-kit."""
        return tuple({f"{part.folder}/{name}": 0 for part in self._parts for name in part.statistics.sum_names})

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrix of each part by type of centre."""
        sums: dict[str, np.ndarray] = {}
        for part in self._parts:
            hood = batch.within(part.rcut, part.most)
            found = part.statistics.measure(replace(batch, vector=hood.vector), self.excluded(batch, hood))
            sums |= {f"{part.folder}/{name}": values for name, values in found.items()}
        return sums

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set mean and spread of the environment matrix of each part, equal for all slots of a type of centre."""
        for part in self._parts:
            own = {name: sums[f"{part.folder}/{name}"] for name in part.statistics.sum_names}
            mean, spread = part.statistics.mean_and_spread(own, part.zero_mean)
            part.module.mean.copy_(mean)
            part.module.stddev.copy_(spread)

    def stat_identity(self) -> dict[str, Any]:
        """Return what DeePMD-kit hashes for the names of the folders, by part."""
        return {str(n): part.statistics.identity() for n, part in enumerate(self._parts)}

    def stat_settings(self) -> dict[str, Any]:
        """Return what DeePMD-kit's hashes round or leave out, by part."""
        return {str(n): part.statistics.settings() for n, part in enumerate(self._parts)}

    def blocks(self) -> list[Block]:
        """Return none: the parameters of all layers are needed at once, forward and backward."""
        return []

    def forward(self, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vector-Jacobian product."""
        table: Tensor = self.type_embedding()
        features, vjp = with_vjp(lambda vector: self._features(vector, batch, table), batch.vector)
        if not self.section.concat_output_tebd:
            return features, vjp
        width = features.shape[1]
        return torch.cat([features, pick(table, batch.atom_type)], 1), lambda grad: vjp(grad[:, :width])

    def _features(self, vector: Tensor, batch: Batch, table: Tensor) -> Tensor:
        """Return the features of the repformer (A, C)."""
        section = self.section
        hood = batch.within(section.repinit.rcut, self.repinit.sel)
        node: Tensor = self._in_part(self.repinit, hood, vector, batch, table)
        if self.angles is not None:
            hood = batch.within(section.repinit.three_body_rcut, self.angles.sel)
            node = torch.cat([node, self._in_part(self.angles, hood, vector, batch, table)], 1)
        if self.to_repformer is not None:
            node = self.to_repformer(node)
        if self.add_element is not None:
            node = node + pick(self.add_element(table), batch.atom_type)
        hood = batch.within(section.repformer.rcut, self.repformer.sel)
        return self._in_part(self.repformer, hood, vector, batch, node)

    def _in_part(self, part: nn.Module, hood: Neighborhood, vector: Tensor, batch: Batch, features: Tensor) -> Tensor:
        """Return the features that a part computes with the vectors of its own neighbors."""
        inside = vector[:, : hood.neighbor.shape[1]]
        out: Tensor = part(inside, hood, features, batch, self.excluded(batch, hood))
        return out

    def _list_parts(self) -> list[_Part]:
        section, first, later = self.section, self.section.repinit, self.section.repformer

        def part(module: Any, zero_mean: bool, rcut: float, rcut_smth: float) -> _Part:
            statistics = EnvironmentStatistics(
                self.num_types,
                rcut,
                rcut_smth,
                section.env_protection,
                (module.sel,),
                by_type=False,
                exclude_types=section.exclude_types,
            )
            return _Part(module, zero_mean, rcut, module.sel, statistics)

        parts = [
            part(self.repinit, first.set_davg_zero, first.rcut, first.rcut_smth),
            part(self.repformer, later.set_davg_zero, later.rcut, later.rcut_smth),
        ]
        if self.angles is not None:
            parts.append(part(self.angles, first.set_davg_zero, first.three_body_rcut, first.three_body_rcut_smth))
        return parts
