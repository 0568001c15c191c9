"""One layer of DPA-3: messages between nodes (atoms), edges (pairs of atoms) and angles (pairs of edges)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.descriptor.symmetrization import symmetrized
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import Layer, linear
from deepmd_ema.model.nn.update import Update
from deepmd_ema.model.ops.gather import gather_neighbors
from deepmd_ema.model.ops.reference import UsesOperations
from deepmd_ema.seeds import seed_for

if TYPE_CHECKING:
    from deepmd_ema.families.dpa3.section import RepflowConfig

# A atoms, K edges of an atom, J edges with angles (the first ones, J <= K; 0 where no layer looks at angles), N numbers
# of a node, E of an edge, G of an angle


@dataclass(frozen=True)
class Geometry:
    """Geometry of the neighborhood; the same for all layers.

    Attributes:
        neighbor: (A, K) as in a `deepmd_ema.batch.Neighborhood`.
        reverse: (A, M) as there.
        weighted: (A, K, 3) angular rows of the environment matrix times the switch; 0 where there is no edge.
        edge_switch: (A, K) the switch of edges; 0 where there is none.
        angle_switch: (A, J) the switch of angles; 0 where there are none.
        has_angles: (A, J) bool.
    """

    neighbor: Tensor
    reverse: Tensor
    weighted: Tensor
    edge_switch: Tensor
    angle_switch: Tensor
    has_angles: Tensor


class RepflowLayer(UsesOperations):
    """``n_i``, ``e_ij`` and ``a_ijk`` after messages between them (DPA-3, Zhang et al., arXiv:2506.01686).

    With ``w`` the switches, ``[,]`` for concatenation, sigma the activation function and f, g, ... linear maps::

        n_i   <- sigma(f n_i),  sigma(g [sym(e_i), sym(n)]),  sum_j w_ij sigma(h [n_i, n_j, e_ij]) / e_norm
        e_ij  <- sigma(p [n_i, n_j, e_ij]),  sigma(q sum_k w_ij w_ik sigma(r [a_ijk, n_i, e_ik, e_ij]) / sqrt(a_norm))
        a_ijk <- sigma(s [a_ijk, n_i, e_ik, e_ij])

    ``sym`` is `symmetrized` with the rows ``weighted``, divided by e_norm. Each linear map of a concatenation is the
    sum of maps of its parts, which are evaluated where they live: on nodes, not on every edge of a node.

    Args:
        options: the section ``repflow`` with numbers of neighbors.
        act: name of the activation function.
        dtype: precision of the parameters.
        seed: of the initial parameters.
        edges_matter: whether the edges after this layer have an effect; otherwise they are not updated.
        angles_matter: the same of the angles.
    """

    def __init__(
        self,
        options: RepflowConfig,
        act: str,
        *,
        dtype: torch.dtype,
        seed: int,
        edges_matter: bool = True,
        angles_matter: bool = True,
    ) -> None:
        super().__init__()
        self.options, self.activation = options, activation(act)
        self.edges_matter, self.angles_matter = edges_matter, angles_matter
        n, e, a = options.n_dim, options.e_dim, options.a_dim
        generator = torch.Generator().manual_seed(seed_for("layers", seed))

        heads = options.n_multi_edge_message
        self.node_self = linear(n, n, dtype, generator)
        self.node_sym = linear((n + e) * options.axis_neuron, n, dtype, generator)
        self.node_edge = linear(2 * n + e, heads * n, dtype, generator)
        self.edge_self = linear(2 * n + e, e, dtype, generator)
        self.node_update = Update(n, 2 + heads, options, dtype=dtype, seed=seed_for("node", seed))
        self.edge_update = Update(e, 1 + options.update_angle, options, dtype=dtype, seed=seed_for("edge", seed))
        if not options.update_angle:
            return
        n_part, e_part = options.n_angle_dim, options.e_angle_dim
        compressed = options.a_compress_rate > 0 and not options.a_compress_use_split
        self.compress_node = linear(n, n_part, dtype, generator, bias=False) if compressed else None
        self.compress_edge = linear(e, e_part, dtype, generator, bias=False) if compressed else None
        self.edge_angle = linear(a + n_part + 2 * e_part, e, dtype, generator)
        self.edge_angle_out = linear(e, e, dtype, generator)
        self.angle_self = linear(a + n_part + 2 * e_part, a, dtype, generator)
        self.angle_update = Update(a, 1, options, dtype=dtype, seed=seed_for("angle", seed))

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

    def forward(self, node: Tensor, edge: Tensor, angle: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Return nodes (A, N), edges (A, K, E) and angles (A, J, J, G) after the messages of this layer."""
        neighbors = self._neighbors(node, geometry)
        if self.options.sequential_update:
            edge = edge + self.edge_update.factors[0] * self._edge_message(node, neighbors, edge)
            seen = self._seen_by_angles(node, edge, geometry)
            angle = self.angle_update(angle, [self._angle_message(self.angle_self, angle, *seen)])
            edge = edge + self.edge_update.factors[1] * self._message_from_angles(angle, seen, edge, geometry)
            return self._updated_node(node, neighbors, edge, geometry), edge, angle
        new_node = self._updated_node(node, neighbors, edge, geometry)
        messages = [self._edge_message(node, neighbors, edge)] if self.edges_matter else []
        if self.options.update_angle and (self.edges_matter or self.angles_matter):
            seen = self._seen_by_angles(node, edge, geometry)
            if self.edges_matter:
                messages.append(self._message_from_angles(angle, seen, edge, geometry))
            if self.angles_matter:
                angle = self.angle_update(angle, [self._angle_message(self.angle_self, angle, *seen)])
        return new_node, self.edge_update(edge, messages) if self.edges_matter else edge, angle

    def _act(self, z: Tensor) -> Tensor:
        return self.ops.activated(z, self.activation)

    def _neighbors(self, node: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Return of each neighbor its node (A, K, N) and its parts of the messages to nodes and to edges."""
        n, heads = self.options.n_dim, self.options.n_multi_edge_message
        weights = [self.node_edge.weight[n : 2 * n], self.edge_self.weight[n : 2 * n]]
        if not self.edges_matter:
            weights.pop()
        sent = torch.cat([node, node @ torch.cat(weights, 1)], 1)
        gathered = gather_neighbors(sent, geometry.neighbor, geometry.reverse)
        own, to_node, to_edge = gathered.tensor_split([n, n + heads * n], -1)
        return own, to_node, to_edge

    def _updated_node(
        self, node: Tensor, neighbors: tuple[Tensor, Tensor, Tensor], edge: Tensor, geometry: Geometry
    ) -> Tensor:
        """Return the nodes (A, N) after their messages."""
        neighbor, to_node, _ = neighbors
        scale, axis = self.options.e_norm**-0.5, self.options.axis_neuron
        symmetric = torch.cat([symmetrized(x, geometry.weighted, scale, axis) for x in (edge, neighbor)], -1)
        pair = self._act(self._pair_sum(self.node_edge, node, to_node, edge))
        from_edges = torch.bmm(geometry.edge_switch[:, None], pair)[:, 0] / self.options.e_norm
        heads = from_edges.chunk(self.options.n_multi_edge_message, -1)
        return self.node_update(node, [self._act(self.node_self(node)), self._act(self.node_sym(symmetric)), *heads])

    def _edge_message(self, node: Tensor, neighbors: tuple[Tensor, Tensor, Tensor], edge: Tensor) -> Tensor:
        """Return the messages to edges from themselves and their ends (A, K, E)."""
        return self._act(self._pair_sum(self.edge_self, node, neighbors[2], edge))

    def _pair_sum(self, layer: Layer, node: Tensor, from_neighbor: Tensor, edge: Tensor) -> Tensor:
        """Return ``layer([n_i, n_j, e_ij])`` (A, K, C), the part of ``n_j`` being given."""
        n = self.options.n_dim
        assert layer.bias is not None
        own = torch.addmm(layer.bias, node, layer.weight[:n])
        return own[:, None] + from_neighbor + edge @ layer.weight[2 * n :]

    def _seen_by_angles(self, node: Tensor, edge: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return the inputs of angles from nodes (A, n_angle_dim) and from edges (A, J, e_angle_dim)."""
        edge = edge[:, : geometry.angle_switch.shape[1]]
        if self.compress_node is not None and self.compress_edge is not None:
            return self.compress_node(node), self.compress_edge(edge)
        return node[..., : self.options.n_angle_dim], edge[..., : self.options.e_angle_dim]

    def _angle_message(self, layer: Layer, angle: Tensor, node: Tensor, edge: Tensor) -> Tensor:
        """Return ``sigma(layer([a_ijk, n_i, e_ik, e_ij]))`` (A, J, J, C)."""
        assert layer.bias is not None
        widths = [angle.shape[-1], node.shape[-1], edge.shape[-1], edge.shape[-1]]
        of_angle, of_node, of_k, of_j = layer.weight.split(widths)
        own = torch.addmm(layer.bias, node, of_node)[:, None]
        return self._act(angle @ of_angle + (own + edge @ of_j)[:, :, None] + (edge @ of_k)[:, None])

    def _message_from_angles(
        self, angle: Tensor, seen: tuple[Tensor, Tensor], edge: Tensor, geometry: Geometry
    ) -> Tensor:
        """Return the messages to edges from their angles (A, K, E); ``edge`` is used for one without angles."""
        switch = geometry.angle_switch
        message = self._angle_message(self.edge_angle, angle, *seen)
        summed = torch.matmul(switch[:, None, None], message)[:, :, 0] * switch[..., None]
        absent = edge.shape[1] - switch.shape[1]
        summed = nn.functional.pad(summed / self.options.a_norm**0.5, (0, 0, 0, absent))
        if not self.options.smooth_edge_update:
            has_angles = nn.functional.pad(geometry.has_angles, (0, absent))
            summed = torch.where(has_angles[..., None], summed, edge)
        return self._act(self.edge_angle_out(summed))
