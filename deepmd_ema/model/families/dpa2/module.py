"""DPA-2: first features from the surroundings of an atom (repinit), then messages (repformer)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.by_type import joined
from deepmd_ema.model.descriptor.env_statistics import (
    EnvironmentMatrix,
    EnvironmentStatistics,
)
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor
from deepmd_ema.model.families.dpa2.layers import RepformerLayer, Surroundings
from deepmd_ema.model.families.se_atten.module import SeAttenBlock
from deepmd_ema.model.families.se_e3_tebd.module import SeTTebdBlock
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import freeze, linear, module_list
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.model.ops.environment import Radial, switch_and_vjp
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.model.ops.reference import vjp_of, with_vjp
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa2.section import DPA2Config
    from deepmd_ema.model.interface import Vjp

# added to the number of neighbors before division where it is counted; as in DeePMD-kit
COUNT_EPS = 1e-4

# A atoms, K neighbor slots, S slots up to nsel, T types, C channels of an atom, G of a pair


class Repformer(EnvironmentMatrix, UsesOperations):
    """Layers that change features of atoms (A, C), beginning with ``act(features)``, and of pairs.

    A pair begins with the channels ``act(s W + b)`` and its angular row as a vector, s its radial
    row; or with distance and vector, both over the cutoff (``direct_dist``).

    Args:
        config: the section ``model.descriptor``, with numbers of neighbors.
        num_types: T.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self, config: DPA2Config, num_types: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        options = self.options = config.repformer
        self.smooth = config.smooth
        self.protection = config.env_protection
        self.dtype = dtype
        self.rcut = options.rcut
        self.rcut_smth = options.rcut_smth
        self.sel = int(options.nsel)
        self.act = activation(options.activation_function).value
        self.pair_embedding = linear(
            1, options.g2_dim, dtype, seed_for("pair_embedding", seed)
        )
        self.layers = module_list(
            RepformerLayer(
                options,
                last=n == options.nlayers - 1,
                dtype=dtype,
                seed=seed_for("layer", seed, n),
            )
            for n in range(options.nlayers)
        )
        self.add_normalisation((num_types, self.sel, 4), dtype)

    def features_and_vjp(
        self,
        node: Tensor,
        neighborhood: Neighborhood,
        batch: Batch,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Return the features (A, C), and their vjp to ``node`` and the vectors (A, K, 3) float64.

        All are functions of the parameters and of ``node``.

        Args:
            node: (A, C) features.
            neighborhood: neighbors inside the cutoff.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        rows, rows_vjp, around = self._inputs(neighborhood, batch, dropped)
        # with the default options of attention off, layers have a vjp that is faster than autograd
        evaluated = (
            self._written_out if self.layers[0].is_written_out else self._evaluated
        )
        features, features_vjp = evaluated(node, rows, around)

        def vjp(grad: Tensor) -> tuple[Tensor, Tensor]:
            by_node, *by_inputs = features_vjp(grad)  # by rows and weights
            return by_node, rows_vjp(*by_inputs)

        return features, vjp

    def features_and_equivariants(
        self,
        node: Tensor,
        neighborhood: Neighborhood,
        batch: Batch,
        dropped: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the features (A, C), and moments of pairs ``sum_k q w_k h_k g_k^T`` (A, G, 3)."""
        rows, _, around = self._inputs(neighborhood, batch, dropped)
        node, pair, vectors = self._after_layers(node, rows, around)
        weighted = pair * around.weight[..., None]  # (A, K, G)
        return node, torch.bmm(weighted.transpose(1, 2), vectors * around.per_moment)

    def _inputs(
        self, neighborhood: Neighborhood, batch: Batch, dropped: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor, Tensor], Tensor], Surroundings]:
        """Return rows (A, K, 4), the vjp of rows and weights to the vectors, and the neighbors."""
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        vector = neighborhood.vector
        radial = Radial.of(vector, self.rcut, self.rcut_smth)
        if self.options.direct_dist:
            # (A, K, 1) in float64: a bool over a number would be float32
            scale = (mask.to(vector.dtype) / self.rcut)[..., None]
            distance = radial.distance.unsqueeze(-1)
            rows = (torch.cat([distance, vector], -1) * scale).to(self.dtype)
        else:
            rows, rows_vjp = self.environment_matrix(
                vector, dropped, batch.atom_type, radial=radial
            )
        # (A, K) float64; its vjp is used only if weights are smooth
        switch, switch_vjp = switch_and_vjp(vector, mask, radial)
        # the weight of each neighbor in sums (A, K), and the factors of the sums: one over the most
        # neighbors if smooth, because the number of neighbors jumps at the cutoff
        weight = switch.to(self.dtype) if self.smooth else mask.to(self.dtype)
        root = self.options.use_sqrt_nnei
        per_neighbor: Tensor | float = 1 / self.sel
        per_moment: Tensor | float = self.sel**-0.5 if root else 1 / self.sel
        if not self.smooth:
            count = weight.sum(1, keepdim=True)
            per_neighbor = 1 / (COUNT_EPS + count)
            per_moment = (1 / (COUNT_EPS + (count.sqrt() if root else count)))[
                ..., None
            ]
        around = Surroundings(
            neighborhood.neighbor,
            neighborhood.reverse,
            mask,
            weight,
            self.smooth,
            self.sel,
            per_neighbor,
            per_moment,
        )

        def vjp(by_rows: Tensor, by_weight: Tensor) -> Tensor:
            if self.options.direct_dist:
                by_vector = (
                    by_rows[..., 1:] + by_rows[..., :1] * vector / distance
                ) * scale
            else:
                by_vector = rows_vjp(by_rows)
            # weights that are not smooth do not depend on the vectors
            return by_vector + switch_vjp(by_weight) if self.smooth else by_vector

        return rows, vjp, around

    def _after_layers(
        self, node: Tensor, rows: Tensor, around: Surroundings
    ) -> tuple[Tensor, ...]:
        """Return features (A, C), channels (A, K, G) and vectors (A, K, 3) of pairs in the end."""
        pair, vectors = rows.split([1, 3], -1)
        node, pair = self.act(node), self.act(self.pair_embedding(pair))
        # channels (A, K, G) from the radial number, which the layers change like the features
        for layer in self.layers:
            node, pair, vectors = layer(node, pair, vectors, around)
        return node, pair, vectors

    def _evaluated(
        self, node: Tensor, rows: Tensor, around: Surroundings
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Return the features (A, C) after all layers, and their vjp to the inputs.

        Args:
            node: (A, C) features.
            rows: (A, K, 4), radial number and vector of each pair.
            around: the neighbors.

        Returns:
            The features, and the function to the gradients by node, rows and the weights of
            neighbors.
        """
        options = self.options

        def features(node: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
            node, pair, vectors = self._after_layers(
                node, rows, replace(around, weight=weight)
            )
            # channels and vectors that no atom takes are tied by 0: in training with several ranks
            # every parameter must have a gradient
            if not (options.update_g1_has_conv or options.update_g1_has_grrg):
                node = node + 0 * pair.sum()
            if not (options.update_g1_has_drrd or options.update_g1_has_grrg):
                node = node + 0 * vectors.sum()
            return node

        return vjp_of(features, node, rows, around.weight)

    def _written_out(
        self, node: Tensor, rows: Tensor, around: Surroundings
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Return the same of layers without attention, whose vjp is written out."""
        if self.ops.is_for_cpu and around.reverse.numel():
            # a part with a shorter cutoff has few of the slots of the list: the numbers of the
            # others are the largest, so that they are sorted to the end and cut off
            reverse = around.reverse.sort(1).values
            most = int((reverse < around.neighbor.numel()).any(0).sum())
            around = replace(around, reverse=reverse[:, : max(1, most)].contiguous())
        radial, vectors = rows.split([1, 3], -1)
        weight, slope = around.weight[..., None], torch.ops.aten.tanh_backward
        # q w / sqrt(3) and q w h / sqrt(3) of `RepformerLayer.with_vjp`, (A, K, 1) and (A, K, 3)
        side_factor = weight * (around.per_moment * 3**-0.5)
        sides = vectors * side_factor
        first_node, first_pair = node.tanh(), self.pair_embedding(radial).tanh()
        node = first_node
        pair = first_pair
        # the vjps of the layers, to be called in reverse order
        layer_vjps = []
        for layer in self.layers:
            node, pair, layer_vjp = layer.with_vjp(node, pair, sides, around)
            layer_vjps.append(layer_vjp)

        def vjp(grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # nothing reads the channels of pairs after the last layer
            by_pair: Tensor | None = None
            by_weight, by_sides = torch.zeros_like(weight), torch.zeros_like(sides)
            for layer_vjp in reversed(layer_vjps):
                grad, by_pair, more_by_weight, more_by_sides = layer_vjp(grad, by_pair)
                by_weight = by_weight + more_by_weight
                by_sides = by_sides + more_by_sides
            by_radial = slope(by_pair, first_pair) @ self.pair_embedding.weight.T
            # layers return the gradient by w with the sides fixed, of which w is a factor as well
            by_weight = by_weight + (
                by_sides * vectors * (around.per_moment * 3**-0.5)
            ).sum(-1, keepdim=True)
            return (
                slope(grad, first_node),
                torch.cat([by_radial, by_sides * side_factor], -1),
                by_weight.squeeze(-1),
            )

        return node, vjp


class FirstFeatures(NamedTuple):
    """Features of the blocks before the repformer, ``repinit`` and ``angles``.

    Attributes:
        blocks: (A, features) of each block.
        node: (A, C) inputs of the repformer, which are made of these and the elements.
        vjps: from the gradient by each of ``blocks`` to that by the vectors of its neighbors.
    """

    blocks: list[Tensor]
    node: Tensor
    vjps: list[Vjp]


class DPA2Descriptor(TypeEmbeddedDescriptor):
    """Features of an atom after messages between atoms (DPA-2, Zhang et al., arXiv:2312.15492).

    ``D = repformer(W [repinit, angles] + W' E)``, E the type embedding, which may stand beside D,
    too. ``repinit`` is the block of se_atten without attention, ``angles`` that of se_e3_tebd.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    passes_messages = True

    def __init__(self, config: DPA2Config, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, config.repinit.tebd_dim)
        # parts have sections of their own types, with the options of this one
        first = config.first_block
        later = config.repformer
        start = self.start
        self.num_features = later.g1_dim
        self.repinit = SeAttenBlock(
            first, self.sel, num_types, self.dtype, seed_for("repinit", start)
        )
        self.angles: SeTTebdBlock | None = None
        # the width of what the blocks before the repformer give together
        num_first = self.repinit.dim_out
        if config.repinit.use_three_body:
            most = int(config.repinit.three_body_sel)
            self.angles = SeTTebdBlock(
                config.angle_block,
                most,
                num_types,
                self.dtype,
                seed_for("angles", start),
            )
            num_first += self.angles.dim_out
        self.to_repformer = None
        if num_first != later.g1_dim:
            self.to_repformer = linear(
                num_first,
                later.g1_dim,
                self.dtype,
                seed_for("to_repformer", start),
                bias=False,
            )
            with torch.no_grad():
                # DeePMD-kit draws this map with another spread than those of layers
                self.to_repformer.weight.mul_(2**0.5)
        self.add_element = None
        if config.add_tebd_to_repinit_out:
            self.add_element = linear(
                first.tebd_dim,
                later.g1_dim,
                self.dtype,
                seed_for("add_element", start),
                bias=False,
            )
        self.repformer = Repformer(
            config, num_types, self.dtype, seed_for("repformer", start)
        )
        if not config.trainable:
            freeze(self, False)
        parts = (self.repinit, first), (self.repformer, later), (self.angles, first)
        # each part has an environment matrix of its own, which the data normalise
        zero_means = [
            (part, options.set_davg_zero) for part, options in parts if part is not None
        ]
        self.environments = [
            EnvironmentStatistics(part, config.exclude_types, zero)
            for part, zero in zero_means
        ]

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        if not torch.compiler.is_compiling():
            return self._by_blocks(table, batch)
        # one function of the vectors instead of one of each block: a compiled graph leaks tensors
        # of torch.func where functions follow each other (torch 2.13)
        return with_vjp(
            lambda vector: self._by_blocks(table, replace(batch, vector=vector))[0],
            batch.vector,
        )

    def _by_blocks(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        """Return the features (A, D) and their vjp, from those of the blocks."""
        first = self._first(table, batch)
        neighborhood = batch.within(self.repformer.rcut, self.repformer.sel)
        features, later_vjp = self.repformer.features_and_vjp(
            first.node, neighborhood, batch, self.excluded(batch, neighborhood)
        )

        def vjp(grad_features: Tensor) -> Tensor:
            by_node, by_vector = later_vjp(grad_features)
            if self.to_repformer is not None:
                by_node = by_node @ self.to_repformer.weight.T
            by_first = by_node.split([part.shape[1] for part in first.blocks], 1)
            by_blocks = [
                block_vjp(by)
                for block_vjp, by in zip(first.vjps, by_first, strict=True)
            ]
            # a block reads the first slots of the list, which is sorted by distance: (A, K of the
            # block, 3) is filled up with zeros
            width = batch.vector.shape[1]
            padded = [
                functional.pad(part, (0, 0, 0, width - part.shape[1]))
                for part in (by_vector, *by_blocks)
            ]
            return torch.stack(padded).sum(0)

        return features, vjp

    @property
    def dim_equivariants(self) -> int:
        """Number of equivariant vectors of an atom."""
        return self.repformer.options.g2_dim

    def _features_and_equivariants(
        self, table: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        neighborhood = batch.within(self.repformer.rcut, self.repformer.sel)
        node = self._first(table, batch).node
        return self.repformer.features_and_equivariants(
            node, neighborhood, batch, self.excluded(batch, neighborhood)
        )

    def _first(self, table: Tensor, batch: Batch) -> FirstFeatures:
        """Return the features of the blocks before the repformer."""
        blocks, vjps = [], []
        for block in (self.repinit, self.angles):
            if block is not None:
                neighborhood = batch.within(block.rcut, block.sel)
                features, block_vjp = block.features_and_vjp(
                    table, neighborhood, batch, self.excluded(batch, neighborhood)
                )
                blocks.append(features)
                vjps.append(block_vjp)
        node = joined(blocks, 1)
        if self.to_repformer is not None:
            node = self.to_repformer(node)
        if self.add_element is not None:
            node = node + pick(self.add_element(table), batch.atom_type)
        return FirstFeatures(blocks, node, vjps)
