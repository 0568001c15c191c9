"""DPA-3: messages between nodes (atoms), edges (pairs of atoms) and angles (pairs of edges)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, Neighborhood
from deepmd_ema.model.descriptor.env_statistics import (
    EnvironmentMatrix,
    EnvironmentStatistics,
)
from deepmd_ema.model.descriptor.type_embedded import TypeEmbeddedDescriptor
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import Layer, freeze, linear, module_list
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.model.nn.update import Update
from deepmd_ema.model.ops.environment import (
    exponential_switch_and_derivative,
    switch_and_derivative,
)
from deepmd_ema.model.ops.gather import gather_neighbors
from deepmd_ema.model.ops.operations import UsesOperations
from deepmd_ema.model.ops.reference import vjp_of
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa3.section import DPA3Config
    from deepmd_ema.model.interface import Vjp

# A atoms, K edges of an atom, J edges with angles (the first ones, J <= K; 0 where no layer looks
# at angles), N numbers of a node, E of an edge, G of an angle


@dataclass(frozen=True)
class Geometry:
    """Geometry of the neighborhood; the same for all layers.

    Attributes:
        neighbor: (A, K) as in a `deepmd_ema.batch.Neighborhood`.
        reverse: (A, M) as there.
        weighted: (A, K, 3) angular rows of the environment matrix times the switch, over ``sqrt(3
            e_norm)``; 0 where there is no edge.
        edge_switch: (A, K) the switch of edges over e_norm; 0 where there is none.
        angle_weight: (A, J, J) the product of both switches of an angle, over ``sqrt(a_norm)``; 0
            where there is none.
        has_angles: (A, J) bool.
    """

    neighbor: Tensor
    reverse: Tensor
    weighted: Tensor
    edge_switch: Tensor
    angle_weight: Tensor
    has_angles: Tensor


class RepflowLayer(UsesOperations):
    """``n_i``, ``e_ij`` and ``a_ijk`` after messages (DPA-3, Zhang et al., arXiv:2506.01686).

    With ``w`` the switches, ``[,]`` for concatenation, sigma the activation function and f, g, ...
    linear maps::

        n_i   <- sigma(f n_i),
                 sigma(g [sym(e_i), sym(n)]),
                 sum_j w_ij sigma(h [n_i, n_j, e_ij]) / e_norm
        e_ij  <- sigma(p [n_i, n_j, e_ij]),
                 sigma(q sum_k w_ij w_ik sigma(r [a_ijk, n_i, e_ik, e_ij]) / sqrt(a_norm))
        a_ijk <- sigma(s [a_ijk, n_i, e_ik, e_ij])

    ``sym`` is `deepmd_ema.model.ops.reference.symmetrized` with the rows ``weighted``. Each linear
    map of a concatenation is the sum of maps of its parts, which are evaluated where they live: on
    nodes, not on every edge of a node.

    Args:
        config: the section ``model.descriptor`` with numbers of neighbors.
        index: number of the layer.
        dtype: precision of the parameters.
        seed: of the initial parameters.

    Attributes:
        edges_matter: whether the edges after this layer have an effect; otherwise they are not
            updated.
        angles_matter: the same of the angles.
    """

    def __init__(
        self, config: DPA3Config, index: int, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        options = config.repflow
        self.options = options
        self.activation = activation(config.activation_function)
        # an angle acts on edges in the next layer, and these on nodes in the one after it
        self.edges_matter = options.sequential_update or index + 1 < options.nlayers
        self.angles_matter = options.sequential_update or index + 2 < options.nlayers
        n = options.n_dim
        e = options.e_dim
        a = options.a_dim
        # one stream of random numbers for all maps of the layer, drawn in the order below
        generator = torch.Generator().manual_seed(seed_for("layers", seed))

        heads = options.n_multi_edge_message
        self.node_self = linear(n, n, dtype, generator)
        self.node_sym = linear((n + e) * options.axis_neuron, n, dtype, generator)
        self.node_edge = linear(2 * n + e, heads * n, dtype, generator)
        self.edge_self = linear(2 * n + e, e, dtype, generator)
        self.node_update = Update(
            n, 2 + heads, options, dtype=dtype, seed=seed_for("node", seed)
        )
        # updates by the edge itself, and by its angles
        self.edge_update = Update(
            e,
            1 + options.update_angle,
            options,
            dtype=dtype,
            seed=seed_for("edge", seed),
        )
        # a layer without angles has no parameters for them, as in DeePMD-kit
        if not options.update_angle:
            return
        n_part, e_part = options.n_angle_dim, options.e_angle_dim
        compressed = options.a_compress_rate > 0 and not options.a_compress_use_split
        self.compress_node = (
            linear(n, n_part, dtype, generator, bias=False) if compressed else None
        )
        self.compress_edge = (
            linear(e, e_part, dtype, generator, bias=False) if compressed else None
        )
        # inputs a_ijk, n_i, e_ik and e_ij
        self.edge_angle = linear(a + n_part + 2 * e_part, e, dtype, generator)
        self.edge_angle_out = linear(e, e, dtype, generator)
        self.angle_self = linear(a + n_part + 2 * e_part, a, dtype, generator)
        self.angle_update = Update(
            a, 1, options, dtype=dtype, seed=seed_for("angle", seed)
        )

    def idle_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of updates that have no effect."""
        idle: list[nn.Module | None] = []
        if not self.edges_matter:
            idle += [self.edge_self, self.edge_update]
        if self.options.update_angle and not self.edges_matter:
            idle += [self.edge_angle, self.edge_angle_out]
        if self.options.update_angle and not self.angles_matter:
            idle += [self.angle_self, self.angle_update]
        if self.options.update_angle and not (self.edges_matter or self.angles_matter):
            idle += [self.compress_node, self.compress_edge]
        for part in idle:
            if part is not None:
                yield from part.parameters()

    def forward(
        self, node: Tensor, edge: Tensor, angle: Tensor, geometry: Geometry
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes (A, N), edges (A, K, E) and angles (A, J, J, G) after this layer."""
        neighbor, ends, edge_weight = self._ends(node, geometry)
        # messages to nodes, of all heads, and to edges, side by side
        widths = [self.node_edge.weight.shape[1], edge.shape[-1]]
        if self.options.sequential_update:
            # each update is applied before the next message, in this order: edges, angles, edges by
            # angles, nodes
            to_node, to_edge = ends.split(widths, -1)
            for_node, for_edge = edge_weight.split(widths, 1)
            edge = edge + self.edge_update.factors[0] * self._act(
                to_edge + edge @ for_edge
            )
            seen = self._seen_by_angles(node, edge, geometry)
            angle = self.angle_update(
                angle, self._angle_messages([self.angle_self], angle, *seen)
            )
            (message,) = self._angle_messages([self.edge_angle], angle, *seen)
            edge = edge + self.edge_update.factors[1] * self._from_angles(
                message, edge, geometry
            )
            message = self._act(to_node + edge @ for_node)
            return (
                self._updated_node(node, neighbor, edge, message, geometry),
                edge,
                angle,
            )
        # all messages see the nodes, edges and angles of the layer before: one product for both
        messages = self._act(ends + edge @ edge_weight).split(
            widths[: 1 + self.edges_matter], -1
        )
        to_node, *edge_messages = messages
        new_node = self._updated_node(node, neighbor, edge, to_node, geometry)
        if self.options.update_angle and (self.edges_matter or self.angles_matter):
            layers = [self.edge_angle] * self.edges_matter + [
                self.angle_self
            ] * self.angles_matter
            seen = self._seen_by_angles(node, edge, geometry)
            angle_messages = self._angle_messages(layers, angle, *seen)
            if self.edges_matter:
                edge_messages.append(
                    self._from_angles(angle_messages[0], edge, geometry)
                )
            if self.angles_matter:
                angle = self.angle_update(angle, angle_messages[-1:])
        if self.edges_matter:
            edge = self.edge_update(edge, edge_messages)
        return new_node, edge, angle

    def _act(self, z: Tensor) -> Tensor:
        return self.ops.activated(z, self.activation)

    def _ends(self, node: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the messages of edges that nodes give.

        Returns:
            The nodes of the neighbors (A, K, N). Then, of the maps to nodes and to edges side by
            side, the sums over both ends of each edge (A, K, C), and the weights of the edge itself
            (E, C).
        """
        options = self.options
        weight, bias = _joined([self.node_edge] + [self.edge_self] * self.edges_matter)
        centre_weight, neighbor_weight, edge_weight = weight.split(
            [options.n_dim, options.n_dim, options.e_dim]
        )
        # a node and its part of the messages are gathered at once
        sent = torch.cat([node, node @ neighbor_weight], 1)
        gathered = gather_neighbors(sent, geometry.neighbor, geometry.reverse)
        neighbor, from_neighbor = gathered.split([options.n_dim, len(bias)], -1)
        ends = torch.addmm(bias, node, centre_weight)[:, None] + from_neighbor
        return neighbor, ends, edge_weight

    def _updated_node(
        self,
        node: Tensor,
        neighbor: Tensor,
        edge: Tensor,
        message: Tensor,
        geometry: Geometry,
    ) -> Tensor:
        """Return the nodes (A, N) after their messages; ``message`` (A, K, C) is that of edges."""
        options = self.options
        symmetric = [
            self.ops.symmetrized(x, geometry.weighted, options.axis_neuron)
            for x in (edge, neighbor)
        ]
        # (A, 2 N), two messages that are activated at once
        from_node = torch.cat(
            [self.node_self(node), self.node_sym(torch.cat(symmetric, -1))], 1
        )
        # the switch over e_norm is the weight of an edge
        from_edges = torch.bmm(geometry.edge_switch[:, None], message).squeeze(1)
        messages = [
            *self._act(from_node).chunk(2, 1),
            *from_edges.chunk(options.n_multi_edge_message, 1),
        ]
        return self.node_update(node, messages)

    def _seen_by_angles(
        self, node: Tensor, edge: Tensor, geometry: Geometry
    ) -> tuple[Tensor, Tensor]:
        """Return the inputs of angles from nodes (A, n_angle_dim), edges (A, J, e_angle_dim)."""
        # neighbors are sorted by distance: those with angles are the first
        edge = edge[:, : geometry.has_angles.shape[1]]
        if self.compress_node is not None and self.compress_edge is not None:
            return self.compress_node(node), self.compress_edge(edge)
        return node[..., : self.options.n_angle_dim], edge[
            ..., : self.options.e_angle_dim
        ]

    def _angle_messages(
        self, layers: Sequence[Layer], angle: Tensor, node: Tensor, edge: Tensor
    ) -> tuple[Tensor, ...]:
        """Return ``sigma(layer([a_ijk, n_i, e_ik, e_ij]))`` (A, J, J, C) of each layer."""
        weight, bias = _joined(layers)
        widths = [angle.shape[-1], node.shape[-1], edge.shape[-1], edge.shape[-1]]
        angle_weight, node_weight, k_weight, j_weight = weight.split(widths)
        # a sum of parts that are evaluated on nodes (A, 1, C), edges (A, J, C), angles (A, J, J, C)
        from_node = torch.addmm(bias, node, node_weight)[:, None]
        from_j = (from_node + edge @ j_weight)[:, :, None]
        from_k = (edge @ k_weight)[:, None]
        messages = self._act(angle @ angle_weight + from_j + from_k)
        return messages.split([layer.weight.shape[1] for layer in layers], -1)

    def _from_angles(self, message: Tensor, edge: Tensor, geometry: Geometry) -> Tensor:
        """Return the messages to edges (A, K, E) from those of angles (A, J, J, E).

        An edge without angles takes ``edge`` (A, K, E) instead, unless the update is smooth.
        """
        # sums over k with the weights of the angles of j: (A, J, 1, J) times (A, J, J, E)
        summed = torch.matmul(geometry.angle_weight[:, :, None], message).squeeze(2)
        absent = edge.shape[1] - summed.shape[1]
        summed = nn.functional.pad(summed, (0, 0, 0, absent))
        # as DeePMD-kit does, although the energy jumps where a neighbor crosses a_rcut
        if not self.options.smooth_edge_update:
            has_angles = nn.functional.pad(geometry.has_angles, (0, absent))
            summed = torch.where(has_angles[..., None], summed, edge)
        return self._act(self.edge_angle_out(summed))


def _joined(layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
    """Return weights and biases of layers of the same inputs, side by side.

    One product then evaluates all of them.
    """
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return weights[0], biases[0]
    return torch.cat(weights, 1), torch.cat(biases)


# A atoms, K edges of an atom, J edges with angles, T types, N numbers of a node, E of an edge, G of
# an angle


class EdgeNumbers(NamedTuple):
    """Numbers of each edge that the layers see, all of them functions of its vector.

    Attributes:
        values: five tensors (A, K, 1 or 3) float64: the number that edges begin with, 3 weighted
            angular numbers and the switch as in `Geometry`, 3 of the direction, the square root of
            the weight of an angle with itself.
        vjp: from the gradients by these to that by the vectors (A, K, 3).
        neighborhood: the edges.
        has_angles: (A, J) bool.
    """

    values: list[Tensor]
    vjp: Callable[..., Tensor]
    neighborhood: Neighborhood
    has_angles: Tensor


class DPA3Descriptor(TypeEmbeddedDescriptor, EnvironmentMatrix, UsesOperations):
    """Nodes of a network of nodes, edges and angles (DPA-3, Zhang et al., arXiv:2506.01686).

    Nodes and edges are the graph G(1) of its line graph series, edges and angles the graph G(2).
    Nodes begin with the embeddings of their elements, edges with distances, angles with cosines;
    `RepflowLayer` updates them. Empty slots have no effect but through the numbers that sums over
    neighbors are divided by, so a batch need not hold them.

    Args:
        config: the section ``model.descriptor``; numbers of neighbors must be numbers.
        num_types: number of elements.
        seed: of the initial parameters when the section has none.
    """

    passes_messages = True

    def __init__(self, config: DPA3Config, num_types: int, seed: int) -> None:
        super().__init__(config, num_types, seed, config.repflow.n_dim)
        flow = config.repflow
        self.flow = flow
        self.num_features = flow.n_dim
        self.activation = activation(config.activation_function)
        generator = torch.Generator().manual_seed(seed_for("repflow", self.start))
        self.edge_embedding = linear(1, flow.e_dim, self.dtype, generator)
        self.angle_embedding = linear(1, flow.a_dim, self.dtype, generator, bias=False)
        self.layers = module_list(
            RepflowLayer(
                config, index, self.dtype, seed_for("repflow", self.start, index)
            )
            for index in range(flow.nlayers)
        )
        # the first angles act on nodes in the second layer, or at once if updates are sequential
        self.has_angles = flow.update_angle and (
            flow.sequential_update or flow.nlayers >= 2
        )
        freeze(self, config.trainable)
        # fix_stat_std is the spread of all columns; 0 measures them
        self.add_normalisation(
            (num_types, self.sel, 4), self.dtype, flow.fix_stat_std or 1.0
        )
        self.rcut = flow.e_rcut
        self.rcut_smth = flow.e_rcut_smth
        self.protection = config.env_protection
        measured = EnvironmentStatistics(self, config.exclude_types, zero_mean=True)
        self.environments = [] if flow.fix_stat_std else [measured]

    def _features_and_vjp(self, table: Tensor, batch: Batch) -> tuple[Tensor, Vjp]:
        numbers = self._numbers(batch)

        def nodes(*values: Tensor) -> Tensor:
            return self._nodes_and_edges(values, numbers, table, batch)[0]

        features, features_vjp = vjp_of(nodes, *numbers.values)
        return features, lambda grad_features: numbers.vjp(*features_vjp(grad_features))

    @property
    def dim_equivariants(self) -> int:
        """Number of equivariant vectors of an atom."""
        return self.flow.e_dim

    def _features_and_equivariants(
        self, table: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        # equivariant vectors are made of the last edges, so that those of all layers are updated
        for number, layer in enumerate(self.layers, 1):
            layer.edges_matter = True
            layer.angles_matter |= number < len(self.layers)
        self.has_angles = self.flow.update_angle
        numbers = self._numbers(batch)
        node, edge, weighted = self._nodes_and_edges(
            numbers.values, numbers, table, batch
        )
        # weighted rows have the factor 3^-1/2 of symmetrised products, which vectors do not have
        return node, torch.bmm(edge.transpose(1, 2), weighted) * 3**0.5

    def _nodes_and_edges(
        self,
        values: Sequence[Tensor],
        numbers: EdgeNumbers,
        table: Tensor,
        batch: Batch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes (A, N), edges (A, K, E), and weighted rows (A, K, 3) of the edges.

        Args:
            values: those of ``numbers``, by which the result is differentiated.
            numbers: edges, and which of them have angles.
            table: (T, N) type embeddings.
            batch: frames with their neighbors.
        """
        flow, has_angles = self.flow, numbers.has_angles
        first, weighted, edge_switch, direction, angle_switch = values
        edge: Tensor = self.edge_embedding(first.to(self.dtype))
        if not flow.edge_init_use_dist:
            edge = self.ops.activated(edge, self.activation)
        # float64 up to here: the cosine of a small angle would lose half of its digits
        num_with_angles = has_angles.shape[1]
        direction = direction[:, :num_with_angles]
        angle_switch = angle_switch[:, :num_with_angles]
        cosine = torch.bmm(direction, direction.transpose(1, 2))
        angle = self.angle_embedding(cosine[..., None].to(self.dtype))
        geometry = Geometry(
            numbers.neighborhood.neighbor,
            numbers.neighborhood.reverse,
            weighted.to(self.dtype),
            edge_switch.squeeze(-1).to(self.dtype),
            (angle_switch * angle_switch.transpose(1, 2)).to(self.dtype),
            has_angles,
        )
        node = self.ops.activated(pick(table, batch.atom_type), self.activation)
        for layer in self.layers:
            node, edge, angle = layer(node, edge, angle, geometry)
        # parameters without effect are tied by 0: each must have a gradient on every rank
        idle = [p for layer in self.layers for p in layer.idle_parameters()]
        if not self.has_angles:
            idle += self.angle_embedding.parameters()
        if idle:
            # they are multiplied by 0 before the sum: the gradients are then parts of one tensor,
            # without a copy of each
            node = node + (0 * torch.cat([p.flatten() for p in idle])).sum()
        return node, edge, geometry.weighted

    def _numbers(self, batch: Batch) -> EdgeNumbers:
        """Return the numbers of each edge that the layers see."""
        flow, vector = self.flow, batch.vector
        # edges are as far as the list reaches, not within e_rcut: in a hybrid, DeePMD-kit sees
        # them, and an exponential switch is small, but not zero, beyond the cutoff
        neighborhood = batch.within()
        dropped = self.excluded(batch, neighborhood)
        mask = neighborhood.mask if dropped is None else neighborhood.mask & ~dropped
        # (A, J), the first slots within a_rcut; without layers that look at angles J is 0
        near = batch.within(flow.a_rcut, int(flow.a_sel)).mask
        num_with_angles = near.shape[1] if self.has_angles else 0
        has_angles = near[:, :num_with_angles] & mask[:, :num_with_angles]
        is_angle = nn.functional.pad(has_angles, (0, mask.shape[1] - num_with_angles))

        distance = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        switch = (
            exponential_switch_and_derivative
            if flow.use_exp_switch
            else switch_and_derivative
        )
        weight, dweight = switch(distance, self.rcut, self.rcut_smth)
        inverse = (distance + self.protection).reciprocal()
        # the environment matrix (s, c x, c y, c z) and derivatives by the distance, each (A, K, 1)
        s = weight * inverse
        c = s * inverse
        ds = (dweight - s) * inverse
        dc = (ds - c) * inverse
        mean, spread = self.normalisation(vector.shape[1], batch.atom_type)
        mean_s, mean_angular = mean.split([1, 3], -1)
        spread_s, spread_angular = spread.split([1, 3], -1)
        if flow.edge_init_use_dist:
            first, dfirst = distance, torch.ones_like(distance)
        else:
            first, dfirst = (s - mean_s) / spread_s, ds / spread_s
        is_edge = mask.unsqueeze(-1)
        weight, dweight = weight * is_edge, dweight * is_edge
        over_spread = (3 * flow.e_norm) ** -0.5 / spread_angular
        angular = (c * vector - mean_angular) * over_spread
        # angular times the switch is this factor times the vector, without the mean
        weighted_factor = c * weight * over_spread
        dweighted = angular * dweight + (dc * weight) * over_spread * vector

        # DeePMD-kit's protection of distances and of the arc cosine: angles begin with the cosine
        # times (1 - 1e-6) / pi^(1/2), of which each of two directions has the root
        inverse = (distance + 1e-6).reciprocal()
        direction_factor = inverse * ((1 - 1e-6) / math.sqrt(math.pi)) ** 0.5
        direction = vector * direction_factor
        # a bool times a number would be float32, so that it is float64 before. The weight of an
        # angle is the product of two factors, hence a_norm^-1/4
        factor = is_angle.unsqueeze(-1).double() * flow.a_norm**-0.25
        angle_switch, dangle_switch = (
            value * factor for value in switch(distance, flow.a_rcut, flow.a_rcut_smth)
        )

        values = [
            first,
            angular * weight,
            weight / flow.e_norm,
            direction,
            angle_switch,
        ]
        # derivatives of these along the distance (A, K, 8), but that of the edge switch
        slopes = torch.cat([dfirst, dweighted, -direction * inverse, dangle_switch], -1)
        dedge_switch = dweight / flow.e_norm
        unit = vector / distance

        def vjp(*grads: Tensor) -> Tensor:
            by_first, by_weighted, by_switch, by_direction, by_angle_switch = grads
            by_values = torch.cat(
                [by_first, by_weighted, by_direction, by_angle_switch], -1
            )
            # products of whole rows: a part of a row would be multiplied, in the derivative, one
            # atom at a time on a CPU
            along = (by_values * slopes).sum(-1, keepdim=True)
            along = torch.addcmul(along, by_switch, dedge_switch)
            by_vector = torch.addcmul(
                by_weighted * weighted_factor, by_direction, direction_factor
            )
            return torch.addcmul(by_vector, along, unit)

        return EdgeNumbers(values, vjp, neighborhood, has_angles)
