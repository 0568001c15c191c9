"""DPA-2: first features from the surroundings of an atom (repinit), then layers of messages (repformer)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch
from deepmd_ema.families.dpa2.repformer import Repformer
from deepmd_ema.families.se_atten.layers import SeAttenBlock
from deepmd_ema.families.se_e3_tebd.layers import SeTTebdBlock
from deepmd_ema.model.descriptor.by_type import joined
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor
from deepmd_ema.model.nn.layers import freeze, linear
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.dpa2.section import DPA2Config
    from deepmd_ema.model.interface import Vjp


class DPA2Descriptor(TypeEmbeddedDescriptor):
    """Features of an atom after messages between atoms (DPA-2, Zhang et al., arXiv:2312.15492).

    ``D = repformer(W [repinit, angles] + W' E)``, E the type embedding, which may stand beside D, too. ``repinit`` is
    the block of se_atten without attention, ``angles`` that of se_e3_tebd.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    passes_messages = True

    def __init__(self, config: DPA2Config, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, config.repinit.tebd_dim)
        first, later, start = config.first_block, config.repformer, self.start
        self.num_features = later.g1_dim
        self.repinit = SeAttenBlock(first, self.sel, num_types, self.dtype, seed_for("repinit", start))
        self.angles: SeTTebdBlock | None = None
        if config.repinit.use_three_body:
            most = int(config.repinit.three_body_sel)
            self.angles = SeTTebdBlock(config.angle_block, most, num_types, self.dtype, seed_for("angles", start))
        num_first = self.repinit.dim_out + (self.angles.dim_out if self.angles is not None else 0)
        self.to_repformer = None
        if num_first != later.g1_dim:
            self.to_repformer = linear(num_first, later.g1_dim, self.dtype, seed_for("to_repformer", start), bias=False)
            with torch.no_grad():
                self.to_repformer.weight.mul_(2**0.5)  # as wide as DeePMD-kit draws this one
        self.add_element = None
        if config.add_tebd_to_repinit_out:
            self.add_element = linear(
                first.tebd_dim, later.g1_dim, self.dtype, seed_for("add_element", start), bias=False
            )
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
        parts = (self.repinit, first), (self.repformer, later), (self.angles, first)
        zero_means = [(part, options.set_davg_zero) for part, options in parts if part is not None]
        self.environments = [EnvironmentStatistics(part, config.exclude_types, zero) for part, zero in zero_means]

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        repinit = self.section.repinit
        blocks: list[tuple[SeAttenBlock | SeTTebdBlock, float]] = [(self.repinit, repinit.rcut)]
        if self.angles is not None:
            blocks.append((self.angles, repinit.three_body_rcut))
        if not (self.repformer.is_written_out and all(block.is_written_out(batch) for block, _ in blocks)):
            return super()._features_and_vjp(table, batch)
        first, first_vjps = [], []
        for block, rcut in blocks:
            neighborhood = batch.within(rcut, block.sel)
            found, vjp_of_block = block.features_and_vjp(neighborhood, table, batch, self.excluded(batch, neighborhood))
            first.append(found)
            first_vjps.append(vjp_of_block)
        neighborhood = batch.within(self.section.repformer.rcut, self.repformer.sel)
        node = self._to_repformer(first, table, batch)
        features, later_vjp = self.repformer.features_and_vjp(
            neighborhood, node, batch, self.excluded(batch, neighborhood)
        )

        def vjp(grad_features: Tensor) -> Tensor:
            by_node, by_vector = later_vjp(grad_features)
            if self.to_repformer is not None:
                by_node = by_node @ self.to_repformer.weight.T
            by_first = by_node.split([part.shape[1] for part in first], 1)
            found = [by_vector, *(one(by) for one, by in zip(first_vjps, by_first, strict=True))]
            return _sum_of_prefixes(found, batch.vector.shape[1])

        return features, vjp

    def _features(self, vector: Tensor, table: Tensor, batch: Batch) -> Tensor:
        section = self.section
        neighborhood = batch.within(section.repinit.rcut, self.repinit.sel)
        first = [self._in_part(self.repinit, neighborhood, vector, table, batch)]
        if self.angles is not None:
            neighborhood = batch.within(section.repinit.three_body_rcut, self.angles.sel)
            first.append(self._in_part(self.angles, neighborhood, vector, table, batch))
        neighborhood = batch.within(section.repformer.rcut, self.repformer.sel)
        return self._in_part(self.repformer, neighborhood, vector, self._to_repformer(first, table, batch), batch)

    def _to_repformer(self, first: list[Tensor], table: Tensor, batch: Batch) -> Tensor:
        """Return the features (A, C) with which the repformer begins from the first ones."""
        node = joined(first, 1)
        if self.to_repformer is not None:
            node = self.to_repformer(node)
        if self.add_element is not None:
            node = node + pick(self.add_element(table), batch.atom_type)
        return node


def _sum_of_prefixes(parts: list[Tensor], width: int) -> Tensor:
    """Return the sum (A, K, 3) of parts (A, K', 3) of the first slots each; ``width`` is K."""
    padded = [functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts]
    return torch.stack(padded).sum(0)
