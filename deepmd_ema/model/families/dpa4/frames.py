"""Pairs of atoms and their frames, in which coefficients are mixed.

They are mixed between degrees, and by linear maps with gates between. The linear maps commute with
rotations about the axis of the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.grids import GridNet, GridOptions
from deepmd_ema.model.families.dpa4.layers import (
    ALMOST_NONE,
    SMALL,
    DegreeGate,
    OrderedNorm,
    ScalarNorm,
    Source,
)
from deepmd_ema.model.families.dpa4.rotations import degrees, num_coefficients, orders
from deepmd_ema.model.nn.layers import module_list
from deepmd_ema.model.ops.gather import gather_neighbors

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.section import DPA4Config

# A atoms, S neighbor slots, E = A S pairs, L largest degree, M largest order, D coefficients of an
# atom, R of a pair, F streams, C channels of a stream, W = F C channels of all

# part of the weights that all streams share evenly, so that none is switched off; as in DeePMD-kit
FOCUS_SMOOTHING = 0.02


@dataclass(frozen=True)
class Radial:
    """Numbers of the distance and of both elements of a pair for each degree, (E, L + 1, C).

    They are a linear map of ``hidden`` plus the embeddings of both elements, and only linear maps
    of them are used, so that they are not computed themselves.

    Attributes:
        hidden: (E, H).
        last: (H, L + 1, C).
        table: (T, C) embeddings of the elements.
        atom_type: (A, T) 1 in the column of the element of the atom.
        neighbor_type: (A, S, T) the same of the neighbor.
    """

    hidden: Tensor
    last: Tensor
    table: Tensor
    atom_type: Tensor
    neighbor_type: Tensor

    def map(self, weight: Tensor) -> Tensor:
        """Return (E, O), products with ``weight`` (L' + 1, C, O), L' <= L, summed over degrees."""
        # maps are multiplied first: H and T are small, and E is the number of all pairs
        hidden_map = torch.einsum(
            "hlc,lco->ho", self.last[:, : len(weight)], weight
        )  # (H, O)
        # the embeddings are added to the numbers of every degree
        type_map = self.table @ weight.sum(0)  # (T, O)
        element_terms = (self.atom_type @ type_map)[
            :, None
        ] + self.neighbor_type @ type_map
        return torch.addmm(element_terms.flatten(0, 1), self.hidden, hidden_map)

    def values(self, lmax: int) -> Tensor:
        """Return the numbers of the degrees up to ``lmax`` (E, lmax + 1, C)."""
        table = self.table
        element_terms = (self.atom_type @ table)[
            :, None
        ] + self.neighbor_type @ table  # (A, S, C)
        hidden_terms = torch.einsum(
            "eh,hlc->elc", self.hidden, self.last[:, : lmax + 1]
        )
        return hidden_terms + element_terms.flatten(0, 1)[:, None]


@dataclass(frozen=True)
class Edges:
    """Pairs of atoms; the same for all blocks.

    Attributes:
        neighbor: (A, S) as in a `deepmd_ema.batch.Neighborhood`.
        reverse: (A, N) as there.
        place: (A, S) the flat place ``j * N + n`` of each slot in ``reverse``; ``A * N`` is none.
        envelope: (A, S) goes to 0 at the cutoff with three derivatives; 0 where there is no
            neighbor.
        weight: (A, S) the envelope times the factor of all that a neighbor sends.
        scale: (A,) ``(sum envelope^2 + floor)^-1/2``.
        rotation: (E, 2 M + 1, D) of `rotations.FrameRotations`.
        radial: numbers of the distance and both elements.
    """

    neighbor: Tensor
    reverse: Tensor
    place: Tensor
    envelope: Tensor
    weight: Tensor
    scale: Tensor
    rotation: Tensor
    radial: Radial

    def sent(self, values: Tensor) -> Tensor:
        """Return the values of neighbors (A, S, ...) from those of atoms (A, ...)."""
        return gather_neighbors(
            values.flatten(1), self.neighbor, self.reverse
        ).unflatten(-1, values.shape[1:])

    def turned(self, matrices: Tensor, x: Tensor) -> Tensor:
        """Return (E, R, W), matrices of pairs (E, R, D) times those of neighbors (A, D, W)."""
        if not self.reverse.shape[
            1
        ]:  # a batch from inside of an exported graph has no reverse
            return torch.bmm(matrices, self.sent(x).flatten(0, 1))
        # pairs are sorted by their neighbor, so that there is one product of matrices for each atom
        # instead of a small one for each pair
        num_atoms, most = self.reverse.shape
        rows, columns = matrices.shape[1:]
        width = x.shape[2]
        by_neighbor = gather_neighbors(
            matrices.flatten(1), self.reverse, self.place.view(-1, 1)
        )  # A, N, R D
        products = torch.bmm(by_neighbor.view(num_atoms, most * rows, columns), x)
        # the order of pairs is that of the slots again
        back = gather_neighbors(
            products.view(num_atoms * most, rows * width),
            self.place,
            self.reverse.reshape(-1, 1),
        )
        return back.view(matrices.shape[0], rows, width)


def pair_degrees(lmax: int, mmax: int) -> list[int]:
    """Return the degrees of the R coefficients in a frame.

    Those with m = 0 are first, then for each m those of -m and of m.
    """
    return [
        degree
        for m in range(mmax + 1)
        for _ in range(2 if m else 1)
        for degree in range(m, lmax + 1)
    ]


def pair_places(lmax: int, mmax: int) -> list[int]:
    """Return the numbers of the R coefficients among all D."""
    return [
        degree * (degree + 1) + m
        for m in orders(mmax)
        for degree in range(abs(m), lmax + 1)
    ]


class Frames(nn.Module):
    """Rotations of coefficients into the frames of pairs; without parameters.

    In a frame, the coefficients of each |m| are together: those of -m, then those of m, by degree
    from m on.

    Args:
        lmax: L.
        mmax: M.
        dtype: of the coefficients.
    """

    def __init__(self, lmax: int, mmax: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lmax = lmax
        self.mmax = mmax
        self.sizes = [(2 if m else 1) * (lmax + 1 - m) for m in range(mmax + 1)]
        # (L + 1, D), 1 in the columns of a degree
        is_degree = torch.arange(lmax + 1)[:, None] == torch.tensor(degrees(lmax))
        self._is_degree = nn.Buffer(is_degree.to(dtype), persistent=False)

    def of_order(self, edges: Edges, m: int) -> Tensor:
        """Return the elements of the Wigner matrices in rows -m and m (E, 2, D); (E, 1, D) of 0."""
        # rows are 0, -1, 1, ...; a block may have a smaller degree than the largest of all blocks
        return edges.rotation[
            :, max(0, 2 * m - 1) : 2 * m + 1, : num_coefficients(self.lmax)
        ]

    def rows(self, edges: Edges) -> Tensor:
        """Return the rows of the Wigner matrices (E, R, D) that turn coefficients into frames."""
        # the rows of an order in all degrees (E, 1 or 2, 1, D) are separated by the degree
        blocks = [
            (self.of_order(edges, m)[:, :, None] * self._is_degree[m:]).flatten(1, 2)
            for m in range(self.mmax + 1)
        ]
        return torch.cat(blocks, 1)

    def of_rows(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return the values of degrees, in a dimension of L + 1, for each of the R coefficients."""
        # order m has the degrees from |m| on
        parts = [
            values.narrow(dim, abs(m), self.lmax + 1 - abs(m))
            for m in orders(self.mmax)
        ]
        return torch.cat(parts, dim)


class RadialMixer(nn.Module):
    """Matrices between the degrees, for each |m|, by the distance and the elements of a pair.

    Args:
        frames: of the pairs.
        channels: W.
        mode: ``degree`` for one matrix for all channels, ``degree_channel`` for one for each
            channel.
        rank: of the latter, as sums of products of a matrix and a vector of the channels; 0: any.
        source: of the initial parameters.
    """

    def __init__(
        self, frames: Frames, channels: int, mode: str, rank: int, source: Source
    ) -> None:
        super().__init__()
        self.frames = frames
        self.counts = [frames.lmax + 1 - m for m in range(frames.mmax + 1)]
        self.is_full = mode == "degree_channel" and not rank
        self.rank = 1 if mode == "degree" else rank or channels
        # map from the radial numbers of all degrees to the elements of the matrices of all |m|
        self.weight = source.truncated(
            "weight",
            (
                self.counts[0] * channels,
                sum(count**2 for count in self.counts) * self.rank,
            ),
        )
        has_basis = mode == "degree_channel" and rank > 0
        self.channel_basis = (
            source.truncated("basis", (rank, channels)) if has_basis else None
        )

    def forward(
        self, x: Tensor, project: Tensor | None, rows: Tensor, edges: Edges
    ) -> Tensor:
        """Return the coefficients (E, R, W) in the frames, mixed between the degrees.

        Args:
            x: (A, D, W) coefficients of atoms.
            project: (C, W) map of radial numbers, if W is not C.
            rows: of `Frames.rows`.
            edges: pairs.
        """
        weight = self.weight.unflatten(0, (self.counts[0], -1))
        flat = edges.radial.map(
            weight if project is None else project @ weight
        ).unflatten(1, (-1, self.rank))
        # for each |m| (E, L + 1 - m, L + 1 - m, rank), from the degrees of a neighbor to those of
        # the pair
        parts = flat.split([count**2 for count in self.counts], 1)
        kernels = [
            part.unflatten(1, (count, count)) for part, count in zip(parts, self.counts)
        ]
        if self.is_full:
            turned = edges.turned(rows, x).split(self.frames.sizes, 1)
            mixed = []
            for part, kernel in zip(turned, kernels):
                signs = part.unflatten(
                    1, (-1, kernel.shape[1])
                )  # (E, orders -m and m, degrees, W)
                mixed.append(
                    torch.einsum("eioc,esic->esoc", kernel, signs).flatten(1, 2)
                )
            return torch.cat(mixed, 1)
        # all channels share a matrix, or a few of them: these are multiplied with the rotation,
        # which has fewer numbers than the coefficients of W channels
        turnings = [self._turning(kernel, m, edges) for m, kernel in enumerate(kernels)]
        whole = torch.cat(turnings, 2)  # (E, rank, R, D)
        if self.channel_basis is None:
            return edges.turned(whole[:, 0], x)
        terms = [
            edges.turned(whole[:, rank], x * basis)
            for rank, basis in enumerate(self.channel_basis)
        ]
        return torch.stack(terms).sum(0) if self.rank > 1 else terms[0]

    def _turning(self, kernel: Tensor, m: int, edges: Edges) -> Tensor:
        """Return (E, rank, 2 (L + 1 - m), D), matrices between degrees times the rotations."""
        # a column of the rotation belongs to one degree of the neighbor: its factors are repeated
        by_degree = [
            part.expand(-1, 2 * degree + 1, -1, -1)
            for degree, part in enumerate(kernel.split(1, 1), m)
        ]
        # (E, rank, L + 1 - m, columns from degree m on)
        columns = torch.cat(by_degree, 1).permute(0, 3, 2, 1)
        # degrees below m have no row of this order: their m^2 columns are 0
        turn = self.frames.of_order(edges, m)[:, None, :, None, m * m :]
        return nn.functional.pad((turn * columns[:, :, None]).flatten(2, 3), (m * m, 0))


class OrderLinear(nn.Module):
    """A linear map in the frames of pairs that commutes with rotations about the z axis.

    Args:
        lmax: L.
        mmax: M.
        num_in: channels of a stream.
        num_out: channels of a stream after it.
        streams: F.
        bias: whether something is added to degree 0.
        source: of the initial parameters.
    """

    def __init__(
        self,
        lmax: int,
        mmax: int,
        num_in: int,
        num_out: int,
        streams: int,
        bias: bool,
        source: Source,
    ) -> None:
        super().__init__()
        self.streams = streams
        wide = (lmax + 1) * num_in, (lmax + 1) * num_out
        self.weight_m0 = _stream_columns(source.truncated("m0", (streams, *wide)))
        # 2^-1/2, because two products add up for each order m > 0
        parts = []
        for m in range(1, mmax + 1):
            shape = (streams, (lmax + 1 - m) * num_in, 2 * (lmax + 1 - m) * num_out)
            parts.append(_stream_columns(source.truncated(f"m{m}", shape, 2**-0.5)))
        self.weight_m = nn.ParameterList(parts)
        self.bias0 = source.filled((streams * num_out,), 0.0) if bias else None

    def matrices(self) -> list[Tensor]:
        """Return (F, I, O) for each |m|; coefficients of -m and of m are side by side."""
        matrices = [self.weight_m0.unflatten(1, (self.streams, -1)).transpose(0, 1)]
        for weight in self.weight_m:
            # the product of complex numbers (u + i v) (x_-m + i x_m), which commutes with rotations
            u, v = weight.unflatten(1, (self.streams, -1)).transpose(0, 1).chunk(2, -1)
            matrices.append(
                torch.cat([torch.cat([u, v], -1), torch.cat([-v, u], -1)], 1)
            )
        return matrices


def _stream_columns(drawn: nn.Parameter) -> nn.Parameter:
    """Return a parameter (I, F O), as files of DeePMD-kit have it, from (F, I, O)."""
    return nn.Parameter(drawn.detach().transpose(0, 1).flatten(1).contiguous())


class Mixing(nn.Module):
    """Layers in the frames of pairs, and the weights of the streams.

    Args:
        config: the section ``model.descriptor``.
        frames: of the pairs.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, frames: Frames, source: Source) -> None:
        super().__init__()
        lmax, mmax = frames.lmax, frames.mmax
        self.streams = config.n_focus
        self.width = config.focus_dim or config.channels
        self.sizes = frames.sizes
        self.has_bias = config.mlp_bias
        layers = range(config.mixing_layers)
        coefficient_degrees = pair_degrees(lmax, mmax)
        # the last layer has no function behind it, and no norm before it
        on_grid, last = config.s2_activation[0], config.mixing_layers - 1
        act = "silu" if on_grid else config.activation_function
        self.so2_linears = module_list(
            # twice the channels for both factors of a product on a grid
            OrderLinear(
                lmax,
                mmax,
                self.width,
                (2 if on_grid and k < last else 1) * self.width,
                self.streams,
                config.mlp_bias,
                source.part("linear", k),
            )
            for k in layers
        )
        self.so2_inter_norms = nn.ModuleList(
            OrderedNorm(coefficient_degrees, self.width, self.streams, source)
            if config.so2_norm and k < last
            else nn.Identity()
            for k in layers
        )
        sphere = GridOptions(lmax, mmax, None, pair_places(lmax, mmax), "glu")
        self.non_linearities = nn.ModuleList()
        for k in layers:
            part: nn.Module = nn.Identity()
            if k < last and on_grid:
                part = GridNet(
                    self.width,
                    sphere,
                    source.part("grid", k),
                    streams=self.streams,
                    bias=config.mlp_bias,
                )
            elif k < last:
                part = DegreeGate(
                    lmax,
                    self.width,
                    act,
                    source.part("gate", k),
                    streams=self.streams,
                    bias=config.mlp_bias,
                )
            self.non_linearities.append(part)
        self.adam_so2_layer_scales: nn.ParameterList | None = None
        if config.layer_scale:
            self.adam_so2_layer_scales = nn.ParameterList(
                source.filled((self.streams, self.width), ALMOST_NONE) for _ in layers
            )

        if self.streams > 1:
            self.focus_compete_norm = (
                ScalarNorm((self.streams, self.width), config.eps, source)
                if config.edge_norm
                else nn.Identity()
            )
            self.adamw_focus_compete_w = source.normal(
                "focus", (self.width, self.streams), SMALL
            )
            self.focus_compete_bias = (
                source.filled((self.streams,), 0.0) if config.mlp_bias else None
            )

    def forward(self, x: Tensor, project: Tensor | None, edges: Edges) -> Tensor:
        """Return the coefficients (E, R, W) after all layers.

        Args:
            x: (E, R, W) before.
            project: (C, W) map of radial numbers, if W is not C.
            edges: pairs.
        """
        near: Tensor | None = None
        if self.has_bias:
            # the first bias is multiplied by the radial numbers of degree 0 and the envelope: it
            # goes to 0 at the cutoff like the coefficients that it is added to
            eye = torch.eye(edges.radial.table.shape[1], dtype=x.dtype, device=x.device)
            radial = edges.radial.map((eye if project is None else project)[None])
            near = (
                (radial * edges.envelope.view(-1, 1))
                .unflatten(-1, (self.streams, -1))
                .transpose(0, 1)
            )
        out = self._evaluated(x, near)
        if self.streams == 1:
            return out
        # the weights of the streams follow from the scalars before the layers
        shares = self.competition(x[:, 0])[:, None, :, None]
        return (out.unflatten(-1, (self.streams, -1)) * shares).flatten(2)

    def _evaluated(self, x: Tensor, near: Tensor | None) -> Tensor:
        """Return the coefficients (E, R, W) after all layers.

        Args:
            x: (E, R, W) before.
            near: (F, E, C) factor of the first bias, or None.
        """
        by_stream = x.unflatten(-1, (self.streams, -1)).movedim(2, 0)  # (F, E, R, C)
        # (F, E, rows C) for each |m|: a layer is one batched product for each of them
        parts: Sequence[Tensor] = [
            part.flatten(2) for part in by_stream.split(self.sizes, 2)
        ]
        layers = zip(self.so2_linears, self.so2_inter_norms, self.non_linearities)
        for index, (linear, norm, act) in enumerate(layers):
            scales = self.adam_so2_layer_scales
            scale = None if scales is None else scales[index]
            parts = self._layer(
                parts, linear, norm, act, scale, near if index == 0 else None
            )
        return (
            torch.cat(list(parts), -1)
            .unflatten(-1, (-1, self.width))
            .movedim(0, 2)
            .flatten(2)
        )

    def competition(self, scalars: Tensor) -> Tensor:
        """Return the weights of the streams (E, F) by their scalars (E, W)."""
        normed = self.focus_compete_norm(
            scalars.unflatten(-1, (self.streams, -1))
        )  # (E, F, C)
        logits = (normed * self.adamw_focus_compete_w.T).sum(-1)
        if self.focus_compete_bias is not None:
            logits = logits + self.focus_compete_bias
        return (
            logits.softmax(-1) * (1 - FOCUS_SMOOTHING) + FOCUS_SMOOTHING / self.streams
        )

    def _layer(
        self,
        parts: Sequence[Tensor],
        linear: OrderLinear,
        norm: nn.Module,
        act: nn.Module,
        scale: Tensor | None,
        near: Tensor | None,
    ) -> list[Tensor]:
        """Return the coefficients of each |m| (F, E, rows C) after one layer."""
        inputs = parts
        if not isinstance(norm, nn.Identity):
            whole: Tensor = norm(
                torch.cat(list(parts), -1).unflatten(-1, (-1, self.width))
            )
            inputs = whole.flatten(2).split([part.shape[-1] for part in parts], -1)
        outputs = [
            torch.bmm(part, matrix) for part, matrix in zip(inputs, linear.matrices())
        ]
        if linear.bias0 is not None:
            bias = linear.bias0.view(self.streams, 1, -1)
            if near is not None:
                bias = bias * torch.cat([near] * (bias.shape[-1] // self.width), -1)
            # degree 0 is the first of the rows with m = 0
            outputs[0] = outputs[0] + nn.functional.pad(
                bias, (0, outputs[0].shape[-1] - bias.shape[-1])
            )
        outputs = self._activated(outputs, act)
        if scale is not None:
            outputs = [
                (part.unflatten(-1, (-1, self.width)) * scale[:, None, None]).flatten(2)
                for part in outputs
            ]
        # every layer is added to what it gets
        return [part + more for part, more in zip(parts, outputs)]

    def _activated(self, parts: Sequence[Tensor], act: nn.Module) -> list[Tensor]:
        """Return the coefficients of each order after the function between two layers."""
        if isinstance(act, DegreeGate):
            scalar, higher = parts[0].split(
                [self.width, parts[0].shape[-1] - self.width], -1
            )
            factors = act.gates(scalar)  # (F, E, L, C), of the degrees from 1 on
            first = torch.cat(
                [act.activation.value(scalar), higher * factors.flatten(2)], -1
            )
            # order m + 1 has the degrees from m + 1 on, twice: for -(m + 1) and m + 1
            rest = [
                (
                    part.unflatten(-1, (2, -1))
                    * factors[:, :, m:].flatten(2)[:, :, None]
                ).flatten(2)
                for m, part in enumerate(parts[1:])
            ]
            return [first, *rest]
        if isinstance(act, GridNet):
            rows = [part.unflatten(-1, (-1, 2 * self.width)) for part in parts]
            whole = torch.cat(rows, 2).movedim(2, 0)  # (R, F, E, 2 C)
            left, right = whole.transpose(1, 2).chunk(2, -1)
            product: Tensor = act(left, right).transpose(1, 2).movedim(0, 2).flatten(2)
            return list(product.split([part.shape[-1] // 2 for part in parts], -1))
        return list(parts)
