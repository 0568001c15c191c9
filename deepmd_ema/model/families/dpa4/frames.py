"""Pairs of atoms and their frames: coefficients are mixed there between degrees, and by linear maps
with gates between.

The linear maps commute with rotations about the axis of the pair.
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

FOCUS_SMOOTHING = 0.02  # least weight of all streams together


@dataclass(frozen=True)
class Radial:
    """Numbers of the distance and of both elements of a pair for each degree, (E, L + 1, C).

    They are a linear map of ``hidden`` plus the embeddings of both elements, and only linear maps
    of them are used, so that they are not computed themselves.

    Attributes:
        hidden: (E, H).
        last: (H, L + 1, C).
        table: (T, C) embeddings of the elements.
        own: (A, T) which element an atom is.
        neighbor: (A, S, T) which element the neighbor is.
    """

    hidden: Tensor
    last: Tensor
    table: Tensor
    own: Tensor
    neighbor: Tensor

    def map(self, weight: Tensor) -> Tensor:
        """Return (E, O), the sum over degrees of products with ``weight`` (L' + 1, C, O), L' at
        most L.
        """
        of_hidden = torch.einsum("hlc,lco->ho", self.last[:, : len(weight)], weight)
        of_type = self.table @ weight.sum(0)
        of_elements = (self.own @ of_type)[:, None] + self.neighbor @ of_type
        return torch.addmm(of_elements.flatten(0, 1), self.hidden, of_hidden)

    def values(self, lmax: int) -> Tensor:
        """Return the numbers of the degrees up to ``lmax`` (E, lmax + 1, C)."""
        of_elements = (self.own @ self.table)[:, None] + self.neighbor @ self.table
        of_hidden = torch.einsum("eh,hlc->elc", self.hidden, self.last[:, : lmax + 1])
        return of_hidden + of_elements.flatten(0, 1)[:, None]


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
        return gather_neighbors(values.flatten(1), self.neighbor, self.reverse).unflatten(
            -1, values.shape[1:]
        )

    def turned(self, matrices: Tensor, x: Tensor) -> Tensor:
        """Return (E, R, W), the products of the matrices of pairs (E, R, D) with those of neighbors
        (A, D, W).
        """
        if not self.reverse.shape[1]:  # a batch made inside of an exported graph
            return torch.bmm(matrices, self.sent(x).flatten(0, 1))
        # pairs of one neighbor together: one product of matrices for each atom, instead of a small
        # one for each pair
        (num_atoms, most) = self.reverse.shape
        (rows, columns) = matrices.shape[1:]
        width = x.shape[2]
        by_neighbor = gather_neighbors(
            matrices.flatten(1), self.reverse, self.place.view(-1, 1)
        )  # A, N, R D
        found = torch.bmm(by_neighbor.view(num_atoms, most * rows, columns), x)
        back = gather_neighbors(
            found.view(num_atoms * most, rows * width), self.place, self.reverse.reshape(-1, 1)
        )
        return back.view(matrices.shape[0], rows, width)


def pair_degrees(lmax: int, mmax: int) -> list[int]:
    """Return the degrees of the R coefficients in a frame: those with m = 0, then for each m those
    of -m and of m.
    """
    return [
        degree
        for m in range(mmax + 1)
        for _ in range(2 if m else 1)
        for degree in range(m, lmax + 1)
    ]


def pair_places(lmax: int, mmax: int) -> list[int]:
    """Return the numbers of the R coefficients among all D."""
    return [degree * (degree + 1) + m for m in orders(mmax) for degree in range(abs(m), lmax + 1)]


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
        self.lmax, self.mmax = lmax, mmax
        self.sizes = [(2 if m else 1) * (lmax + 1 - m) for m in range(mmax + 1)]
        is_of = torch.arange(lmax + 1)[:, None] == torch.tensor(degrees(lmax))
        self._is_of_degree = nn.Buffer(is_of.to(dtype), persistent=False)

    def of_order(self, edges: Edges, m: int) -> Tensor:
        """Return the elements of the Wigner matrices in the rows of -m and m, (E, 2, D), or (E, 1,
        D) of 0.
        """
        return edges.rotation[:, max(0, 2 * m - 1) : 2 * m + 1, : num_coefficients(self.lmax)]

    def rows(self, edges: Edges) -> Tensor:
        """Return the rows of the Wigner matrices (E, R, D) that turn coefficients into the
        frames.
        """
        found = [
            (self.of_order(edges, m)[:, :, None] * self._is_of_degree[m:]).flatten(1, 2)
            for m in range(self.mmax + 1)
        ]
        return torch.cat(found, 1)

    def of_rows(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return the values of degrees, in a dimension of L + 1, for each of the R coefficients."""
        return torch.cat(
            [values.narrow(dim, abs(m), self.lmax + 1 - abs(m)) for m in orders(self.mmax)], dim
        )


class RadialMixer(nn.Module):
    """Matrices between the degrees, for each |m|, that follow from the distance and the elements of
    a pair.

    Args:
        frames: of the pairs.
        channels: W.
        mode: ``degree`` for one matrix for all channels, ``degree_channel`` for one for each
            channel.
        rank: of the latter, as sums of products of a matrix and a vector of the channels; 0: any.
        source: of the initial parameters.
    """

    def __init__(self, frames: Frames, channels: int, mode: str, rank: int, source: Source) -> None:
        super().__init__()
        self.frames = frames
        self.counts = [frames.lmax + 1 - m for m in range(frames.mmax + 1)]
        self.is_full = mode == "degree_channel" and not rank
        self.rank = 1 if mode == "degree" else rank or channels
        self.weight = source.truncated(
            "weight",
            (self.counts[0] * channels, sum(count**2 for count in self.counts) * self.rank),
        )
        has_basis = mode == "degree_channel" and rank > 0
        self.channel_basis = source.truncated("basis", (rank, channels)) if has_basis else None

    def forward(self, x: Tensor, project: Tensor | None, rows: Tensor, edges: Edges) -> Tensor:
        """Return the coefficients (E, R, W) in the frames, mixed between the degrees.

        Args:
            x: (A, D, W) coefficients of atoms.
            project: (C, W) map of radial numbers, if W is not C.
            rows: of `Frames.rows`.
            edges: pairs.
        """
        weight = self.weight.unflatten(0, (self.counts[0], -1))
        flat = edges.radial.map(weight if project is None else project @ weight).unflatten(
            1, (-1, self.rank)
        )
        # for each |m| (E, L + 1 - m, L + 1 - m, rank), from the degrees of a neighbor to those of
        # the pair
        parts = flat.split([count**2 for count in self.counts], 1)
        kernels = [part.unflatten(1, (count, count)) for part, count in zip(parts, self.counts)]
        if self.is_full:
            turned = edges.turned(rows, x).split(self.frames.sizes, 1)
            found = [
                torch.einsum(
                    "eioc,esic->esoc", kernel, part.unflatten(1, (-1, kernel.shape[1]))
                ).flatten(1, 2)
                for part, kernel in zip(turned, kernels)
            ]
            return torch.cat(found, 1)
        # all channels share a matrix, or each of few: it is multiplied with the rotation, which has
        # fewer numbers
        whole = torch.cat(
            [self._turning(kernel, m, edges) for m, kernel in enumerate(kernels)], 2
        )  # E, rank, R, D
        if self.channel_basis is None:
            return edges.turned(whole[:, 0], x)
        of_ranks = [
            edges.turned(whole[:, rank], x * basis) for rank, basis in enumerate(self.channel_basis)
        ]
        return torch.stack(of_ranks).sum(0) if self.rank > 1 else of_ranks[0]

    def _turning(self, kernel: Tensor, m: int, edges: Edges) -> Tensor:
        """Return (E, rank, 2 (L + 1 - m), D), matrices between degrees times the rotation into the
        frames.
        """
        columns = torch.cat(
            [
                part.expand(-1, 2 * degree + 1, -1, -1)
                for degree, part in enumerate(kernel.split(1, 1), m)
            ],
            1,
        ).permute(0, 3, 2, 1)  # E, rank, L + 1 - m, columns from degree m on
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
        self.weight_m0 = _of_streams(source.truncated("m0", (streams, *wide)))
        parts = []
        for m in range(1, mmax + 1):
            shape = (streams, (lmax + 1 - m) * num_in, 2 * (lmax + 1 - m) * num_out)
            parts.append(_of_streams(source.truncated(f"m{m}", shape, 2**-0.5)))
        self.weight_m = nn.ParameterList(parts)
        self.bias0 = source.filled((streams * num_out,), 0.0) if bias else None

    def matrices(self) -> list[Tensor]:
        """Return (F, I, O) for each order: of the coefficients of -m and of m together, where m is
        not 0.
        """
        found = [self.weight_m0.unflatten(1, (self.streams, -1)).transpose(0, 1)]
        for weight in self.weight_m:
            u, v = weight.unflatten(1, (self.streams, -1)).transpose(0, 1).chunk(2, -1)
            found.append(torch.cat([torch.cat([u, v], -1), torch.cat([-v, u], -1)], 1))
        return found


def _of_streams(drawn: nn.Parameter) -> nn.Parameter:
    """Return a parameter (I, F O) from (F, I, O)."""
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
        self.streams, self.width = config.n_focus, config.focus_dim or config.channels
        self.sizes, self.has_bias = frames.sizes, config.mlp_bias
        layers, found = range(config.mixing_layers), pair_degrees(lmax, mmax)
        on_grid, last = config.s2_activation[0], config.mixing_layers - 1
        act = "silu" if on_grid else config.activation_function
        self.so2_linears = module_list(
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
        normed = [config.so2_norm and k < last for k in layers]
        self.so2_inter_norms = nn.ModuleList(
            OrderedNorm(found, self.width, self.streams, source) if one else nn.Identity()
            for one in normed
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
            self.adamw_focus_compete_w = source.normal("focus", (self.width, self.streams), SMALL)
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
        if self.has_bias:  # in the first layer it goes to 0 at the cutoff, with what it is added to
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
        # times the weights of the streams, by the scalars before the layers
        return (
            out.unflatten(-1, (self.streams, -1)) * self.competition(x[:, 0])[:, None, :, None]
        ).flatten(2)

    def _evaluated(self, x: Tensor, near: Tensor | None) -> Tensor:
        """Return the coefficients (E, R, W) after all layers; ``near`` (F, E, C) is a factor of the
        first bias.
        """
        of_streams = x.unflatten(-1, (self.streams, -1)).movedim(2, 0)
        parts: Sequence[Tensor] = [part.flatten(2) for part in of_streams.split(self.sizes, 2)]
        layers = zip(self.so2_linears, self.so2_inter_norms, self.non_linearities)
        for index, (linear, norm, act) in enumerate(layers):
            scale = (
                None if self.adam_so2_layer_scales is None else self.adam_so2_layer_scales[index]
            )
            parts = self._layer(parts, linear, norm, act, scale, near if index == 0 else None)
        return torch.cat(list(parts), -1).unflatten(-1, (-1, self.width)).movedim(0, 2).flatten(2)

    def competition(self, scalars: Tensor) -> Tensor:
        """Return the weights of the streams (E, F) by their scalars (E, W)."""
        of_streams = self.focus_compete_norm(scalars.unflatten(-1, (self.streams, -1)))
        logits = (of_streams * self.adamw_focus_compete_w.T).sum(-1)
        if self.focus_compete_bias is not None:
            logits = logits + self.focus_compete_bias
        return logits.softmax(-1) * (1 - FOCUS_SMOOTHING) + FOCUS_SMOOTHING / self.streams

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
            whole: Tensor = norm(torch.cat(list(parts), -1).unflatten(-1, (-1, self.width)))
            inputs = whole.flatten(2).split([part.shape[-1] for part in parts], -1)
        outputs = [torch.bmm(part, matrix) for part, matrix in zip(inputs, linear.matrices())]
        if linear.bias0 is not None:
            bias = linear.bias0.view(self.streams, 1, -1)
            if near is not None:
                bias = bias * torch.cat([near] * (bias.shape[-1] // self.width), -1)
            outputs[0] = outputs[0] + nn.functional.pad(
                bias, (0, outputs[0].shape[-1] - bias.shape[-1])
            )
        outputs = self._activated(outputs, act)
        if scale is not None:
            outputs = [
                (part.unflatten(-1, (-1, self.width)) * scale[:, None, None]).flatten(2)
                for part in outputs
            ]
        return [part + more for part, more in zip(parts, outputs)]

    def _activated(self, parts: Sequence[Tensor], act: nn.Module) -> list[Tensor]:
        """Return the coefficients of each order after the function between two layers."""
        if isinstance(act, DegreeGate):
            scalar, others = parts[0].split([self.width, parts[0].shape[-1] - self.width], -1)
            factors = act.gates(scalar)  # F, E, L, C
            first = torch.cat([act.activation.value(scalar), others * factors.flatten(2)], -1)
            rest = [
                (part.unflatten(-1, (2, -1)) * factors[:, :, m:].flatten(2)[:, :, None]).flatten(2)
                for m, part in enumerate(parts[1:])
            ]
            return [first, *rest]
        if isinstance(act, GridNet):
            whole = torch.cat(
                [part.unflatten(-1, (-1, 2 * self.width)) for part in parts], 2
            ).movedim(2, 0)
            left, right = whole.transpose(1, 2).chunk(2, -1)
            product: Tensor = act(left, right).transpose(1, 2).movedim(0, 2).flatten(2)
            return list(product.split([part.shape[-1] // 2 for part in parts], -1))
        return list(parts)
