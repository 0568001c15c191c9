"""One layer of DPA-3: messages between nodes (atoms), edges (pairs of atoms) and angles (pairs of edges)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        weighted: (A, K, 3) angular rows of the environment matrix times the switch, over ``sqrt(3 e_norm)``; 0 where
            there is no edge.
        edge_switch: (A, K) the switch of edges over e_norm; 0 where there is none.
        angle_weight: (A, J, J) the product of both switches of an angle, over ``sqrt(a_norm)``; 0 where there is none.
        has_angles: (A, J) bool.
    """

    neighbor: Tensor
    reverse: Tensor
    weighted: Tensor
    edge_switch: Tensor
    angle_weight: Tensor
    has_angles: Tensor


class RepflowLayer(UsesOperations):
    """``n_i``, ``e_ij`` and ``a_ijk`` after messages between them (DPA-3, Zhang et al., arXiv:2506.01686).

    With ``w`` the switches, ``[,]`` for concatenation, sigma the activation function and f, g, ... linear maps::

        n_i   <- sigma(f n_i),  sigma(g [sym(e_i), sym(n)]),  sum_j w_ij sigma(h [n_i, n_j, e_ij]) / e_norm
        e_ij  <- sigma(p [n_i, n_j, e_ij]),  sigma(q sum_k w_ij w_ik sigma(r [a_ijk, n_i, e_ik, e_ij]) / sqrt(a_norm))
        a_ijk <- sigma(s [a_ijk, n_i, e_ik, e_ij])

    ``sym`` is `symmetrized` with the rows ``weighted``. Each linear map of a concatenation is the
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
        neighbor, ends, of_edge = self._ends(node, geometry)
        widths = [self.node_edge.weight.shape[1], edge.shape[-1]]
        if self.options.sequential_update:
            (to_node, to_edge), (for_node, for_edge) = ends.split(widths, -1), of_edge.split(widths, 1)
            edge = edge + self.edge_update.factors[0] * self._act(to_edge + edge @ for_edge)
            seen = self._seen_by_angles(node, edge, geometry)
            angle = self.angle_update(angle, self._angle_messages([self.angle_self], angle, *seen))
            (message,) = self._angle_messages([self.edge_angle], angle, *seen)
            edge = edge + self.edge_update.factors[1] * self._from_angles(message, edge, geometry)
            message = self._act(to_node + edge @ for_node)
            return self._updated_node(node, neighbor, edge, message, geometry), edge, angle
        to_node, *messages = self._act(ends + edge @ of_edge).split(widths[: 1 + self.edges_matter], -1)
        new_node = self._updated_node(node, neighbor, edge, to_node, geometry)
        if self.options.update_angle and (self.edges_matter or self.angles_matter):
            layers = [self.edge_angle] * self.edges_matter + [self.angle_self] * self.angles_matter
            found = self._angle_messages(layers, angle, *self._seen_by_angles(node, edge, geometry))
            if self.edges_matter:
                messages.append(self._from_angles(found[0], edge, geometry))
            if self.angles_matter:
                angle = self.angle_update(angle, found[-1:])
        return new_node, self.edge_update(edge, messages) if self.edges_matter else edge, angle

    def _act(self, z: Tensor) -> Tensor:
        return self.ops.activated(z, self.activation)

    def _ends(self, node: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes of the neighbors (A, K, N), and of the maps to nodes and to edges, one beside the other:
        the sums over both ends of each edge (A, K, C), and the weights of the edge (E, C).
        """  # noqa: D205
        options = self.options
        weight, bias = _joined([self.node_edge] + [self.edge_self] * self.edges_matter)
        of_own, of_neighbor, of_edge = weight.split([options.n_dim, options.n_dim, options.e_dim])
        sent = torch.cat([node, node @ of_neighbor], 1)
        gathered = gather_neighbors(sent, geometry.neighbor, geometry.reverse)
        neighbor, from_neighbor = gathered.split([options.n_dim, len(bias)], -1)
        return neighbor, torch.addmm(bias, node, of_own)[:, None] + from_neighbor, of_edge

    def _updated_node(
        self, node: Tensor, neighbor: Tensor, edge: Tensor, message: Tensor, geometry: Geometry
    ) -> Tensor:
        """Return the nodes (A, N) after their messages, of which those from edges (A, K, C) are given."""
        options = self.options
        symmetric = [symmetrized(x, geometry.weighted, options.axis_neuron) for x in (edge, neighbor)]
        of_atoms = torch.cat([self.node_self(node), self.node_sym(torch.cat(symmetric, -1))], 1)
        from_edges = torch.bmm(geometry.edge_switch[:, None], message).squeeze(1)
        messages = [*self._act(of_atoms).chunk(2, 1), *from_edges.chunk(options.n_multi_edge_message, 1)]
        return self.node_update(node, messages)

    def _seen_by_angles(self, node: Tensor, edge: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Return the inputs of angles from nodes (A, n_angle_dim) and from edges (A, J, e_angle_dim)."""
        edge = edge[:, : geometry.has_angles.shape[1]]
        if self.compress_node is not None and self.compress_edge is not None:
            return self.compress_node(node), self.compress_edge(edge)
        return node[..., : self.options.n_angle_dim], edge[..., : self.options.e_angle_dim]

    def _angle_messages(self, layers: Sequence[Layer], angle: Tensor, node: Tensor, edge: Tensor) -> tuple[Tensor, ...]:
        """Return ``sigma(layer([a_ijk, n_i, e_ik, e_ij]))`` (A, J, J, C) of each layer."""
        weight, bias = _joined(layers)
        widths = [angle.shape[-1], node.shape[-1], edge.shape[-1], edge.shape[-1]]
        of_angle, of_node, of_k, of_j = weight.split(widths)
        own = torch.addmm(bias, node, of_node)[:, None]
        found = self._act(angle @ of_angle + (own + edge @ of_j)[:, :, None] + (edge @ of_k)[:, None])
        return found.split([layer.weight.shape[1] for layer in layers], -1)

    def _from_angles(self, message: Tensor, edge: Tensor, geometry: Geometry) -> Tensor:
        """Return the messages to edges (A, K, E) from those of angles; ``edge`` is used for one without angles."""
        summed = torch.matmul(geometry.angle_weight[:, :, None], message).squeeze(2)
        absent = edge.shape[1] - summed.shape[1]
        summed = nn.functional.pad(summed, (0, 0, 0, absent))
        if not self.options.smooth_edge_update:
            has_angles = nn.functional.pad(geometry.has_angles, (0, absent))
            summed = torch.where(has_angles[..., None], summed, edge)
        return self._act(self.edge_angle_out(summed))


def _joined(layers: Sequence[Layer]) -> tuple[Tensor, Tensor]:
    """Return weights and biases of layers of the same inputs, side by side."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if len(layers) == 1:
        return weights[0], biases[0]
    return torch.cat(weights, 1), torch.cat(biases)
