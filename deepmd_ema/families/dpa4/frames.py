"""Pairs of atoms and their frames, in which coefficients are mixed between degrees by distance and elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.layers import Source
from deepmd_ema.families.dpa4.rotations import degrees, num_coefficients, orders
from deepmd_ema.model.ops.gather import gather_neighbors

# A atoms, S neighbor slots, E = A S pairs, L largest degree, M largest order, D coefficients of an atom, R of a pair,
# W channels


@dataclass(frozen=True)
class Radial:
    """Numbers of the distance and of both elements of a pair for each degree, (E, L + 1, C).

    They are a linear map of ``hidden`` plus the embeddings of both elements, and only linear maps of them are used, so
    that they are not computed themselves.

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
        """Return (E, O), the sum over degrees of products with ``weight`` (L' + 1, C, O), L' at most L."""
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
        place: (A, S) the flat place ``j * N + n`` of each slot in ``reverse``; ``A * N`` is none. None in a batch made
            inside of a graph, whose ``reverse`` has no columns.
        envelope: (A, S) goes to 0 at the cutoff with three derivatives; 0 where there is no neighbor.
        weight: (A, S) the envelope times the factor of all that a neighbor sends.
        scale: (A,) ``(sum envelope^2 + floor)^-1/2``.
        rotation: (E, 2 M + 1, D) of `rotations.FrameRotations`.
        radial: numbers of the distance and both elements.
    """

    neighbor: Tensor
    reverse: Tensor
    place: Tensor | None
    envelope: Tensor
    weight: Tensor
    scale: Tensor
    rotation: Tensor
    radial: Radial

    def sent(self, values: Tensor) -> Tensor:
        """Return the values of neighbors (A, S, ...) from those of atoms (A, ...)."""
        return gather_neighbors(values.flatten(1), self.neighbor, self.reverse).unflatten(-1, values.shape[1:])

    def turned(self, matrices: Tensor, x: Tensor) -> Tensor:
        """Return (E, R, W), the products of the matrices of pairs (E, R, D) with those of neighbors (A, D, W)."""
        if self.place is None:
            return torch.bmm(matrices, self.sent(x).flatten(0, 1))
        # pairs of one neighbor together: one product of matrices for each atom, instead of a small one for each pair
        (num_atoms, most), (rows, columns), width = self.reverse.shape, matrices.shape[1:], x.shape[2]
        by_neighbor = gather_neighbors(matrices.flatten(1), self.reverse, self.place.view(-1, 1))  # A, N, R D
        found = torch.bmm(by_neighbor.view(num_atoms, most * rows, columns), x)
        found = found.view(num_atoms * most, rows * width)
        back = gather_neighbors(found, self.place, self.reverse.reshape(-1, 1))
        return back.view(matrices.shape[0], rows, width)


def places(neighbor: Tensor, reverse: Tensor) -> Tensor | None:
    """Return the place of each slot (A, S) in ``reverse`` (A, N), as `Edges` has it."""
    if not reverse.shape[1]:
        return None
    # the last entry, written by what is none, is thrown away
    found = torch.full((neighbor.numel() + 1,), reverse.numel(), device=reverse.device)
    numbers = torch.arange(reverse.numel(), device=reverse.device)
    return found.index_put((reverse.flatten(),), numbers)[:-1].view(neighbor.shape)


def pair_degrees(lmax: int, mmax: int) -> list[int]:
    """Return the degrees of the R coefficients in a frame: those with m = 0, then for each m those of -m and of m."""
    return [degree for m in range(mmax + 1) for _ in range(2 if m else 1) for degree in range(m, lmax + 1)]


def pair_places(lmax: int, mmax: int) -> list[int]:
    """Return the numbers of the R coefficients among all D."""
    return [degree * (degree + 1) + m for m in orders(mmax) for degree in range(abs(m), lmax + 1)]


class Frames(nn.Module):
    """Rotations of coefficients into the frames of pairs; without parameters.

    In a frame, the coefficients of each |m| are together: those of -m, then those of m, by degree from m on.

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
        self._is_of_degree: Tensor  # (L + 1, D)
        self.register_buffer("_is_of_degree", is_of.to(dtype), persistent=False)

    def of_order(self, edges: Edges, m: int) -> Tensor:
        """Return the elements of the Wigner matrices in the rows of -m and m, (E, 2, D), or (E, 1, D) of 0."""
        return edges.rotation[:, max(0, 2 * m - 1) : 2 * m + 1, : num_coefficients(self.lmax)]

    def rows(self, edges: Edges) -> Tensor:
        """Return the rows of the Wigner matrices (E, R, D) that turn coefficients into the frames."""
        found = [
            (self.of_order(edges, m)[:, :, None] * self._is_of_degree[m:]).flatten(1, 2) for m in range(self.mmax + 1)
        ]
        return torch.cat(found, 1)

    def of_rows(self, values: Tensor, dim: int = 0) -> Tensor:
        """Return the values of degrees, in a dimension of L + 1, for each of the R coefficients."""
        return torch.cat([values.narrow(dim, abs(m), self.lmax + 1 - abs(m)) for m in orders(self.mmax)], dim)

    def scaled(self, x: Tensor, radial: Tensor, rows: Tensor, edges: Edges) -> Tensor:
        """Return the coefficients (E, R, W) in the frames times the radial numbers of their degrees.

        Args:
            x: (A, D, W) coefficients of atoms.
            radial: (E, L + 1, W).
            rows: of `rows`.
            edges: pairs.
        """
        return edges.turned(rows, x) * self.of_rows(radial, 1)


class RadialMixer(nn.Module):
    """Matrices between the degrees, for each |m|, that follow from the distance and the elements of a pair.

    Args:
        frames: of the pairs.
        channels: W.
        mode: ``degree`` for one matrix for all channels, ``degree_channel`` for one for each channel.
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
            "weight", (self.counts[0] * channels, sum(count**2 for count in self.counts) * self.rank)
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
        kernels = self._kernels(edges.radial.map(weight if project is None else project @ weight))
        if self.is_full:
            turned = edges.turned(rows, x).split(self.frames.sizes, 1)
            found = [
                torch.einsum("eioc,esic->esoc", kernel, part.unflatten(1, (-1, kernel.shape[1]))).flatten(1, 2)
                for part, kernel in zip(turned, kernels)
            ]
            return torch.cat(found, 1)
        # all channels share a matrix, or each of few: it is multiplied with the rotation, which has fewer numbers
        whole = torch.cat([self._turning(kernel, m, edges) for m, kernel in enumerate(kernels)], 2)  # E, rank, R, D
        if self.channel_basis is None:
            return edges.turned(whole[:, 0], x)
        of_ranks = [edges.turned(whole[:, rank], x * basis) for rank, basis in enumerate(self.channel_basis)]
        return torch.stack(of_ranks).sum(0) if self.rank > 1 else of_ranks[0]

    def _turning(self, kernel: Tensor, m: int, edges: Edges) -> Tensor:
        """Return (E, rank, 2 (L + 1 - m), D), matrices between degrees times the rotation into the frames."""
        columns = torch.cat(
            [part.expand(-1, 2 * degree + 1, -1, -1) for degree, part in enumerate(kernel.split(1, 1), m)], 1
        ).permute(0, 3, 2, 1)  # E, rank, L + 1 - m, columns from degree m on
        turn = self.frames.of_order(edges, m)[:, None, :, None, m * m :]
        return nn.functional.pad((turn * columns[:, :, None]).flatten(2, 3), (m * m, 0))

    def _kernels(self, flat: Tensor) -> list[Tensor]:
        """Return for each |m| (E, L + 1 - m, L + 1 - m, rank), from the degrees of a neighbor to those of the pair."""
        parts = flat.unflatten(1, (-1, self.rank)).split([count**2 for count in self.counts], 1)
        return [part.unflatten(1, (count, count)) for part, count in zip(parts, self.counts)]
