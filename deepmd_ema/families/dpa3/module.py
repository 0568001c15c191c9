"""DPA-3: layers of messages between atoms, pairs of atoms and pairs of neighbors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.families.dpa3.layers import Geometry, RepflowLayer
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics, add_normalisation, normalised
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import freeze, linear, module_list
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.model.ops.environment import environment_rows, exponential_switch, switch
from deepmd_ema.model.ops.reference import UsesOperations, with_vjp
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.dpa3.section import DPA3Config
    from deepmd_ema.model.interface import Vjp

# A atoms, K edges of an atom, J edges with angles, T types, N numbers of a node, E of an edge, G of an angle


class DPA3Descriptor(TypeEmbeddedDescriptor, UsesOperations):
    """Nodes of a network of nodes, edges and angles (DPA-3, Zhang et al., arXiv:2506.01686).

    Nodes and edges are the graph G(1) of its line graph series, edges and angles the graph G(2). Nodes begin with the
    embeddings of their elements, edges with distances, angles with cosines; `RepflowLayer` updates them. Empty slots
    have no effect but through the numbers that sums over neighbors are divided by, so a batch need not hold them.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    passes_messages = True
    mean: Tensor
    stddev: Tensor

    def __init__(self, config: DPA3Config, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, config.repflow.n_dim)
        flow = config.repflow
        self.flow, self.num_features = flow, flow.n_dim
        self.activation = activation(config.activation_function)
        generator = torch.Generator().manual_seed(seed_for("repflow", self.start))
        self.edge_embedding = linear(1, flow.e_dim, self.dtype, generator)
        self.angle_embedding = linear(1, flow.a_dim, self.dtype, generator, bias=False)
        to_come = range(flow.nlayers - 1, -1, -1)  # layers after each: an angle acts on edges, and these on nodes
        self.layers = module_list(
            RepflowLayer(
                flow,
                config.activation_function,
                dtype=self.dtype,
                seed=seed_for("repflow", self.start, index),
                edges_matter=flow.sequential_update or after >= 1,
                angles_matter=flow.sequential_update or after >= 2,
            )
            for index, after in enumerate(to_come)
        )
        self.has_angles = flow.update_angle and (flow.sequential_update or flow.nlayers >= 2)
        freeze(self, config.trainable)
        add_normalisation(self, (num_types, self.sel, 4), self.dtype, flow.fix_stat_std or 1.0)
        self.rcut, self.rcut_smth, self.protection = flow.e_rcut, flow.e_rcut_smth, config.env_protection
        measured = EnvironmentStatistics(self, config.exclude_types, zero_mean=True)
        self.environments = [] if flow.fix_stat_std else [measured]

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        return with_vjp(lambda vector: self._features(vector, table, batch), batch.vector)

    def _features(self, vector: Tensor, table: Tensor, batch: Batch) -> Tensor:
        # as far as the list reaches: in a hybrid an exponential switch is small, but not zero, beyond the cutoff
        neighborhood = batch.within()
        dropped = self.excluded(batch, neighborhood)
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        edge, weighted, edge_switch = self._edges(vector, mask, batch)
        angle, has_angles, angle_weight = self._angles(vector, mask, batch)
        geometry = Geometry(
            neighborhood.neighbor, neighborhood.reverse, weighted, edge_switch, angle_weight, has_angles
        )
        node = self.ops.activated(pick(table, batch.atom_type), self.activation)
        for layer in self.layers:
            node, edge, angle = layer(node, edge, angle, geometry)
        return node + self._nothing()

    def _edges(self, vector: Tensor, mask: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first edges (A, K, E), and weighted rows and switch of `Geometry`."""
        flow, cutoffs = self.flow, (self.rcut, self.rcut_smth, self.protection)
        distance = torch.linalg.vector_norm(vector, dim=-1)
        raw, weight = environment_rows(vector, distance, *cutoffs, flow.use_exp_switch)
        rows, weight = normalised(raw, self, batch.atom_type), torch.where(mask, weight, 0)
        first, angular = rows.split([1, 3], -1)
        if flow.edge_init_use_dist:
            first = distance[..., None]
        edge: Tensor = self.edge_embedding(first.to(self.dtype))
        weighted = (angular * (weight * (3 * flow.e_norm) ** -0.5)[..., None]).to(self.dtype)
        if not flow.edge_init_use_dist:
            edge = self.ops.activated(edge, self.activation)
        return edge, weighted, (weight / flow.e_norm).to(self.dtype)

    def _angles(self, vector: Tensor, mask: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first angles (A, J, J, G), which edges have some (A, J), and the weights of `Geometry`."""
        flow = self.flow
        near = batch.within(flow.a_rcut, int(flow.a_sel)).mask
        some = near.shape[1] if self.has_angles else 0
        has_angles = near[:, :some] & mask[:, :some]
        distance = torch.linalg.vector_norm(vector[:, :some], dim=-1)
        weight = (exponential_switch if flow.use_exp_switch else switch)(distance, flow.a_rcut, flow.a_rcut_smth)
        direction = vector[:, :some] / (distance[..., None] + 1e-6)  # DeePMD-kit's protection
        cosine = torch.bmm(direction, direction.transpose(1, 2)) * ((1 - 1e-6) / math.sqrt(math.pi))
        angle = self.angle_embedding(cosine[..., None].to(self.dtype))
        weight = torch.where(has_angles, weight, 0) * flow.a_norm**-0.25
        return angle, has_angles, (weight[:, :, None] * weight[:, None]).to(self.dtype)

    def _nothing(self) -> Tensor:
        """Return 0, to which parameters without effect are tied: every parameter has a gradient, on every rank."""
        idle = [p for layer in self.layers for p in layer.idle_parameters()]
        if not self.has_angles:
            idle += self.angle_embedding.parameters()
        if not idle:
            return self.mean.new_zeros(())
        return 0 * torch.cat([parameter.flatten() for parameter in idle]).sum()
