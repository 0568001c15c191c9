"""Pairs of atoms and their frames, in which coefficients are mixed between degrees by distance and elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.layers import Source
from deepmd_ema.families.dpa4.rotations import degrees, num_coefficients, orders

# A atoms, S neighbor slots, E = A S pairs, L largest degree, M largest order, D coefficients of an atom, R of a pair,
# W channels


@dataclass(frozen=True)
class Edges:
    """Pairs of atoms; the same for all blocks.

    Attributes:
        neighbor: (A, S) as in a `deepmd_ema.batch.Neighborhood`.
        reverse: (A, M) as there.
        envelope: (A, S) goes to 0 at the cutoff with three derivatives; 0 where there is no neighbor.
        weight: (A, S) the envelope times the factor of all that a neighbor sends.
        scale: (A,) ``(sum envelope^2 + floor)^-1/2``.
        rotation: (E, 2 M + 1, D) of `rotations.FrameRotations`.
        radial: (E, L + 1, C) numbers of the distance and both elements for each degree.
    """

    neighbor: Tensor
    reverse: Tensor
    envelope: Tensor
    weight: Tensor
    scale: Tensor
    rotation: Tensor
    radial: Tensor


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

    def rows(self, edges: Edges) -> list[Tensor]:
        """Return for each |m| the rows of the Wigner matrices (E, 2 (L + 1 - m), D), or (E, L + 1, D) of 0."""
        return [
            (self.of_order(edges, m)[:, :, None] * self._is_of_degree[m:]).flatten(1, 2) for m in range(self.mmax + 1)
        ]

    def scaled(self, sent: Tensor, radial: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return for each |m| the coefficients (E, rows, W) in the frames times the radial numbers of their degrees.

        Args:
            sent: (E, D, W) coefficients of neighbors.
            radial: (E, L + 1, W).
            rows: of `rows`.
        """
        turned = torch.bmm(torch.cat(list(rows), 1), sent).split(self.sizes, 1)
        return [
            (part.unflatten(1, (-1, self.lmax + 1 - m)) * radial[:, None, m:]).flatten(1, 2)
            for m, part in enumerate(turned)
        ]


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

    def forward(self, sent: Tensor, radial: Tensor, rows: Sequence[Tensor], edges: Edges) -> list[Tensor]:
        """Return for each |m| the coefficients (E, rows, W) in the frames, mixed between the degrees.

        Args:
            sent: (E, D, W) coefficients of neighbors.
            radial: (E, L + 1, W).
            rows: of `Frames.rows`.
            edges: pairs.
        """
        if self.is_full:
            turned = torch.bmm(torch.cat(list(rows), 1), sent).split(self.frames.sizes, 1)
            return [
                torch.einsum("eioc,esic->esoc", kernel, part.unflatten(1, (-1, kernel.shape[1]))).flatten(1, 2)
                for part, kernel in zip(turned, self._kernels(radial))
            ]
        # all channels share a matrix, or each of few: it is multiplied with the rotation, which has fewer numbers
        matrices = []
        for m, kernel in enumerate(self._kernels(radial)):
            columns = torch.cat(
                [part.expand(-1, 2 * degree + 1, -1, -1) for degree, part in enumerate(kernel.split(1, 1), m)], 1
            )
            turn = self.frames.of_order(edges, m)[:, :, m * m :]
            both = torch.einsum("esd,edor->ersod", turn, columns).flatten(2, 3)
            matrices.append(nn.functional.pad(both, (m * m, 0)))
        whole = torch.cat(matrices, 2)  # E, rank, R, D
        if self.channel_basis is None:
            mixed = torch.bmm(whole[:, 0], sent)
        else:
            mixed = torch.einsum("erod,edc,rc->eoc", whole, sent, self.channel_basis)
        return list(mixed.split(self.frames.sizes, 1))

    def _kernels(self, radial: Tensor) -> list[Tensor]:
        """Return for each |m| (E, L + 1 - m, L + 1 - m, rank), from the degrees of a neighbor to those of the pair."""
        kernel = (radial.flatten(1) @ self.weight).unflatten(1, (-1, self.rank))
        parts = kernel.split([count**2 for count in self.counts], 1)
        return [part.unflatten(1, (count, count)) for part, count in zip(parts, self.counts)]
