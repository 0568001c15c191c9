"""The repformer of DPA-2: layers in which messages pass between atoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.families.dpa2.repformer_attention import Surroundings
from deepmd_ema.families.dpa2.repformer_layer import RepformerLayer
from deepmd_ema.model.descriptor.env_statistics import add_normalisation, environment, normalised
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import linear, module_list
from deepmd_ema.model.ops.cpu.repformer_layer import LayerOptions, LayerWeights
from deepmd_ema.model.ops.environment import environment_rows, switch_and_derivative
from deepmd_ema.model.ops.reference import UsesOperations
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.dpa2.section import RepformerConfig

COUNT_EPS = 1e-4  # added to the number of neighbors before division where it is counted; as DeePMD-kit

# A atoms, K neighbor slots, S slots up to nsel, T types, C channels of an atom, G of a pair


class Repformer(UsesOperations):
    """Layers that change features of atoms (A, C), beginning with ``act(features)``, and of pairs.

    A pair begins with the channels ``act(s W + b)`` and its angular row as a vector, s its radial row; or with distance
    and vector, both over the cutoff (``direct_dist``).

    Args:
        options: the section ``repformer``, with ``nsel`` a number.
        num_types: T.
        smooth: whether messages vanish smoothly at the cutoff.
        protection: added to distances before division, angstrom.
        dtype: precision of the parameters.
        seed: of the initial parameters.

    Attributes:
        is_fused: whether a CPU evaluates all layers as one function.
    """

    mean: Tensor
    stddev: Tensor

    def __init__(
        self,
        options: RepformerConfig,
        num_types: int,
        *,
        smooth: bool,
        protection: float,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        self.options, self.smooth, self.protection, self.dtype = options, smooth, protection, dtype
        self.rcut, self.rcut_smth, self.sel = options.rcut, options.rcut_smth, int(options.nsel)
        self.act = activation(options.activation_function).value
        self.pair_embedding = linear(1, options.g2_dim, dtype, seed_for("pair_embedding", seed))
        self.layers = module_list(
            RepformerLayer(options, last=n == options.nlayers - 1, dtype=dtype, seed=seed_for("layer", seed, n))
            for n in range(options.nlayers)
        )
        self.is_fused = all(layer.can_be_fused for layer in self.layers)
        add_normalisation(self, (num_types, self.sel, 4), dtype)

    def forward(
        self, vector: Tensor, neighborhood: Neighborhood, node: Tensor, batch: Batch, dropped: Tensor | None
    ) -> Tensor:
        """Return the features (A, C) after all layers, which can be differentiated by ``vector`` and ``node``.

        Args:
            vector: (A, K, 3) those of ``neighborhood``.
            neighborhood: neighbors inside the cutoff.
            node: (A, C) features.
            batch: the batch that the neighbors are of.
            dropped: (A, K) bool, pairs that do not see each other here, or None.
        """
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        distance = torch.linalg.vector_norm(vector, dim=-1)
        raw, switch = environment_rows(vector, distance, self.rcut, self.rcut_smth, self.protection)
        if self.options.direct_dist:
            rows = torch.where(mask[..., None], torch.cat([distance[..., None], vector], -1), 0) / self.rcut
        else:
            rows = normalised(torch.where(mask[..., None], raw, 0), self, batch.atom_type)
        around = self._surroundings(neighborhood, mask, torch.where(mask, switch, 0).to(self.dtype))
        return self.ops.repformer_layers(self, node, rows.to(self.dtype), around)

    @property
    def is_written_out(self) -> bool:
        """Whether :meth:`features_and_vjp` serves."""
        return self.ops.is_for_cpu and self.is_fused and not self.options.direct_dist

    def features_and_vjp(
        self, neighborhood: Neighborhood, node: Tensor, batch: Batch, dropped: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Return the features (A, C), and the function from their gradient to those by ``node`` and the vectors.

        Arguments are those of :meth:`forward`. The gradient by vectors is (A, K, 3) float64. All are functions of the
        parameters and of ``node``, from operations whose gradient is written out.
        """
        mask, vector = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped, neighborhood.vector
        distance = torch.linalg.vector_norm(vector, dim=-1)
        rows, rows_vjp = environment(self, vector, dropped, batch.atom_type)
        switch, slope = switch_and_derivative(distance, self.rcut, self.rcut_smth)
        around = self._surroundings(neighborhood, mask, torch.where(mask, switch, 0).to(self.dtype))
        features, by_features = self.ops.repformer_layers_and_vjp(self, node, rows, around)
        along = torch.where(mask, slope / distance, 0)[..., None] * vector  # gradient of the switch

        def vjp(grad: Tensor) -> tuple[Tensor, Tensor]:
            by_node, by_rows, by_weight = by_features(grad)
            by_vector = rows_vjp(by_rows)
            if self.smooth:
                by_vector = torch.addcmul(by_vector, by_weight.double()[..., None], along)
            return by_node, by_vector

        return features, vjp

    def evaluate(self, node: Tensor, rows: Tensor, around: Surroundings) -> Tensor:
        """Return the features (A, C) after all layers.

        Args:
            node: (A, C) features.
            rows: (A, K, 4), radial number and vector of each pair.
            around: the neighbors.
        """
        pair, vectors = rows.split([1, 3], -1)
        node, pair = self.act(node), self.act(self.pair_embedding(pair))
        for layer in self.layers:
            node, pair, vectors = layer(node, pair, vectors, around)
        return node + self._nothing(pair, vectors)

    def weights(self) -> tuple[Tensor, Tensor, list[LayerWeights]]:
        """Return the parameters of the embedding of pairs and of the layers."""
        embedding = self.pair_embedding
        assert embedding.bias is not None
        return embedding.weight, embedding.bias, [layer.weights() for layer in self.layers]

    def layer_options(self, around: Surroundings) -> LayerOptions:
        """Return the options that the fused layers have in common, between these neighbors."""
        first = self.layers[0]
        return LayerOptions(
            num_axis=self.options.axis_neuron,
            node_scale=first.node_update.scale,
            pair_scale=1.0 if first.last else first.pair_update.scale,
            per_neighbor=around.per_neighbor,
            per_moment=around.per_moment * 3**-0.5,
        )

    def _nothing(self, pair: Tensor, vectors: Tensor) -> Tensor:
        """Return 0, which ties what no atom takes: every parameter has a gradient."""
        options = self.options
        nothing = pair.new_zeros(())
        if not (options.update_g1_has_conv or options.update_g1_has_grrg):
            nothing = nothing + 0 * pair.sum()
        if not (options.update_g1_has_drrd or options.update_g1_has_grrg):
            nothing = nothing + 0 * vectors.sum()
        return nothing

    def _surroundings(self, neighborhood: Neighborhood, mask: Tensor, switch: Tensor) -> Surroundings:
        """Return the neighbors with the factors of sums over them."""
        weight = switch if self.smooth else mask.to(switch)
        root = self.options.use_sqrt_nnei
        per_neighbor: Tensor | float = 1 / self.sel
        per_moment: Tensor | float = self.sel**-0.5 if root else 1 / self.sel
        if not self.smooth:
            count = weight.sum(1, keepdim=True)
            per_neighbor = 1 / (COUNT_EPS + count)
            per_moment = (1 / (COUNT_EPS + (count.sqrt() if root else count)))[..., None]
        return Surroundings(
            neighborhood.neighbor, neighborhood.reverse, mask, weight, self.smooth, self.sel, per_neighbor, per_moment
        )
