"""DPA-3: layers of messages between atoms, pairs of atoms and pairs of neighbors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.descriptor.env_statistics import EnvironmentStatistics
from deepmd_ema.model.descriptor.excluded import ExcludedPairs
from deepmd_ema.model.descriptor.repflow_layer import Geometry, RepflowLayer
from deepmd_ema.model.kernels.env_mat import environment_rows
from deepmd_ema.model.kernels.vjp import with_vjp
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import Layer, freeze
from deepmd_ema.model.nn.type_embedding import TypeEmbedding, pick
from deepmd_ema.seeds import seed_for
from deepmd_ema.tensors import precision

if TYPE_CHECKING:
    from deepmd_ema.config.schema.dpa3 import DPA3Config
    from deepmd_ema.model.interface import Block, Vjp

# A atoms, K edges of an atom, J edges with angles, T types, S slots up to e_sel, D features


class DPA3Descriptor(nn.Module):
    """Nodes of a network of nodes, edges and angles (DPA-3, Zhang et al., arXiv:2506.01686).

    Nodes and edges are the graph G(1) of its line graph series, edges and angles the graph G(2). Nodes begin with the
    embeddings of their elements, edges with distances, angles with cosines; `RepflowLayer` updates them. Empty slots
    have no effect but through the numbers that sums over neighbors are divided by, so a batch need not hold them.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    mixed_types = True
    passes_messages = True

    def __init__(self, config: DPA3Config, num_types: int, seed: int) -> None:
        super().__init__()
        assert config.neighbors is not None, "sel must be resolved to a number"
        flow = config.repflow
        self.section, self.flow = config, flow
        self.sel, self.num_types = config.neighbors[0], num_types
        self.dtype = precision(config.precision)
        self.act = activation(config.activation_function).value
        start = seed if config.seed is None else config.seed
        generator = torch.Generator().manual_seed(seed_for("repflow", start))

        def linear(width: int, bias: bool) -> Layer:
            return Layer(
                1, width, "none", residual=False, timestep=False, dtype=self.dtype, generator=generator, bias=bias
            )

        self.type_embedding = TypeEmbedding(
            num_types,
            flow.n_dim,
            bias=config.use_tebd_bias,
            trainable=config.trainable,
            dtype=self.dtype,
            seed=seed_for("type_embedding", start),
            electrons=config.use_econf_tebd,
        )
        self.edge_embedding, self.angle_embedding = linear(flow.e_dim, bias=True), linear(flow.a_dim, bias=False)
        to_come = range(flow.nlayers - 1, -1, -1)  # layers after each: an angle acts on edges, and these on nodes
        self.layers = nn.ModuleList(
            RepflowLayer(
                flow,
                config.activation_function,
                dtype=self.dtype,
                seed=seed_for("repflow", start, index),
                edges_matter=flow.sequential_update or after >= 1,
                angles_matter=flow.sequential_update or after >= 2,
            )
            for index, after in enumerate(to_come)
        )
        self.has_angles = flow.update_angle and (flow.sequential_update or flow.nlayers >= 2)
        freeze(self, config.trainable)
        self.excluded = ExcludedPairs(config.exclude_types, num_types)
        self._statistics = EnvironmentStatistics(
            num_types,
            flow.e_rcut,
            flow.e_rcut_smth,
            config.env_protection,
            (self.sel,),
            by_type=False,
            exclude_types=config.exclude_types,
        )
        self.mean: Tensor
        self.stddev: Tensor
        self.register_buffer("mean", torch.zeros(num_types, self.sel, 4, dtype=self.dtype))
        spread = flow.fix_stat_std or 1.0
        self.register_buffer("stddev", torch.full((num_types, self.sel, 4), spread, dtype=self.dtype))

    @property
    def repflow_layers(self) -> list[RepflowLayer]:
        """The layers, first to last."""
        return cast("list[RepflowLayer]", list(self.layers))

    @property
    def dim_out(self) -> int:
        """Number of features of an atom."""
        return self.flow.n_dim * (2 if self.section.concat_output_tebd else 1)

    def layout(self, excluded_pairs: frozenset[tuple[int, int]]) -> NeighborLayout:
        """Return how this descriptor wants its neighbors."""
        flow = self.flow
        return NeighborLayout(
            flow.e_rcut,
            (self.sel,),
            self.num_types,
            by_type=False,
            excluded_pairs=excluded_pairs,
            inner=((flow.a_rcut, int(flow.a_sel)),),
        )

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Radial and angular sums by type of centre, as DeePMD-kit names them; none with ``fix_stat_std``."""
        return () if self.flow.fix_stat_std else self._statistics.sum_names

    def measure(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return sums over the environment matrix by type of centre."""
        if self.flow.fix_stat_std:
            return {}
        return self._statistics.measure(batch, self.excluded(batch, batch.within()))

    def apply_statistics(self, sums: Mapping[str, np.ndarray]) -> None:
        """Set the spread of the columns of the environment matrix; their mean stays zero."""
        if not self.flow.fix_stat_std:
            self.stddev.copy_(self._statistics.mean_and_spread(sums, zero_mean=True)[1])

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
        table: Tensor = self.type_embedding()
        node = pick(table, batch.atom_type)
        features, vjp = with_vjp(lambda vector: self._nodes(vector, node, batch), batch.vector)
        if not self.section.concat_output_tebd:
            return features, vjp
        width = features.shape[1]
        return torch.cat([features, node], 1), lambda grad: vjp(grad[:, :width])

    def _nodes(self, vector: Tensor, node: Tensor, batch: Batch) -> Tensor:
        """Return the nodes after all layers (A, N), which can be differentiated by ``vector``."""
        edge, angle, geometry = self._beginning(vector, batch)
        node = self.act(node)
        for layer in self.repflow_layers:
            node, edge, angle = layer(node, edge, angle, geometry)
        return node + self._nothing()

    def _beginning(self, vector: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Geometry]:
        """Return the first edges (A, K, E) and angles (A, J, J, G), and what the layers know of the positions."""
        flow, protection, dtype = self.flow, self.section.env_protection, self.dtype
        # as far as the list reaches: in a hybrid an exponential switch is small, but not zero, beyond the cutoff
        hood, near = batch.within(), batch.within(flow.a_rcut, int(flow.a_sel))
        dropped = self.excluded(batch, hood)
        edges = hood.mask if dropped is None else hood.mask & ~dropped
        some = near.vector.shape[1]
        has_angles = near.mask & edges[:, :some]
        distance = torch.linalg.vector_norm(vector, dim=-1)
        raw, switch = environment_rows(vector, distance, flow.e_rcut, flow.e_rcut_smth, protection, flow.use_exp_switch)
        mean, stddev = (t[:, : vector.shape[1]].double()[batch.atom_type] for t in (self.mean, self.stddev))
        rows = (raw - mean) / stddev
        switch = torch.where(edges, switch, 0)
        first = distance[..., None] if flow.edge_init_use_dist else rows[..., :1]
        edge: Tensor = self.edge_embedding(first.to(dtype))
        some_vector, some_distance = vector[:, :some], distance[:, :some, None]
        _, angle_switch = environment_rows(
            some_vector, some_distance[..., 0], flow.a_rcut, flow.a_rcut_smth, protection, flow.use_exp_switch
        )
        direction = some_vector / (some_distance + 1e-6)  # DeePMD-kit's protection
        cosine = torch.bmm(direction, direction.transpose(1, 2)) * ((1 - 1e-6) / math.sqrt(math.pi))
        geometry = Geometry(
            neighbor=hood.neighbor,
            reverse=hood.reverse,
            weighted=(rows[..., 1:] * switch[..., None]).to(dtype),
            edge_switch=switch.to(dtype),
            angle_switch=torch.where(has_angles, angle_switch, 0).to(dtype),
            has_angles=has_angles,
        )
        angle = self.angle_embedding(cosine[..., None].to(dtype))
        return edge if flow.edge_init_use_dist else self.act(edge), angle, geometry

    def _nothing(self) -> Tensor:
        """Return 0, to which parameters without effect are tied: every parameter has a gradient, on every rank."""
        idle = [p for layer in self.repflow_layers for p in layer.idle_parameters()]
        if not self.has_angles:
            idle += self.angle_embedding.parameters()
        return sum((0 * p.sum() for p in idle), torch.zeros((), dtype=self.dtype, device=self.mean.device))
