"""Products of functions of directions or rotations, on grids where their coefficients are exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.layers import (
    ALMOST_NONE,
    SMALL,
    Source,
    StreamLinear,
    swiglu,
)
from deepmd_ema.model.families.dpa4.rotations import degrees, rotation_grid, sphere_grid

# J coefficients, K orders of frames (1 on a sphere), N atoms or pairs, F streams, C channels, G
# points, B branches


@dataclass(frozen=True)
class GridOptions:
    """The functions that are multiplied, and the kind of product.

    Attributes:
        lmax: largest degree.
        mmax: largest order of the coefficients.
        kmax: largest order of the frames of functions of rotations; None for functions of
            directions.
        places: numbers of the J coefficients among those of all degrees and orders.
        operation: ``glu``, ``mlp`` or ``branch``.
        branches: B.
    """

    lmax: int
    mmax: int
    kmax: int | None
    places: Sequence[int]
    operation: str
    branches: int = 1

    @property
    def num_frames(self) -> int:
        """Return K."""
        return 1 if self.kmax is None else 2 * self.kmax + 1

    @property
    def degrees(self) -> list[int]:
        """Return the degrees of the J coefficients."""
        return [degrees(self.lmax)[place] for place in self.places]

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the matrices from coefficients to values on a grid (G, J K), and back (J K, G)."""
        if self.kmax is None:
            return sphere_grid(self.lmax, self.mmax, self.places)
        to_grid, from_grid = rotation_grid(self.lmax, self.kmax)
        # coefficient j of frame k is column j K + k of all
        columns = (
            np.array(self.places)[:, None] * self.num_frames
            + np.arange(self.num_frames)
        ).ravel()
        return to_grid[:, columns], from_grid[columns]


class GridProduct(nn.Module):
    """The product of two functions, itself or between linear maps of channels.

    Args:
        channels: C.
        options: grid and operation.
        is_cross: whether both functions come from different places, not from one layer.
        source: of the initial parameters.
    """

    def __init__(
        self, channels: int, options: GridOptions, is_cross: bool, source: Source
    ) -> None:
        super().__init__()
        self.operation = options.operation
        self.branches = options.branches
        self.is_cross = is_cross
        self._to_grid: Tensor
        self._from_grid: Tensor
        # buffers follow from the options, and are not saved
        for name, matrix in zip(("_to_grid", "_from_grid"), options.matrices()):
            self.register_buffer(
                name,
                torch.tensor(matrix, dtype=source.dtype).contiguous(),
                persistent=False,
            )
        # "glu" has no parameters: it is the product itself
        if options.operation == "mlp":
            # functions from one layer are concatenated, so that each factor sees both
            width = channels if is_cross else 2 * channels
            self.left_proj = StreamLinear(width, 2 * channels, source.part("left"))
            self.right_proj = StreamLinear(width, 2 * channels, source.part("right"))
            self.out_proj = StreamLinear(2 * channels, channels, source.part("out"))
        elif options.operation == "branch":
            self.left_proj = StreamLinear(
                channels, options.branches * channels, source.part("left")
            )
            self.right_proj = StreamLinear(
                channels, options.branches * channels, source.part("right")
            )
            self.router = StreamLinear(
                2 * channels, options.branches, source.part("router")
            )
            self.out_proj = StreamLinear(channels, channels, source.part("out"))

    def forward(self, left: Tensor, right: Tensor, scalars: Tensor) -> Tensor:
        """Return (J K, N, F, C) from two functions of this shape.

        Args:
            left: (J K, N, F, C).
            right: (J K, N, F, C).
            scalars: (N, F, 2 C), degree 0 of both, side by side.
        """
        if self.operation == "glu":
            return self._product(left, right)
        if self.operation == "mlp" and not self.is_cross:
            left = right = torch.cat([left, right], -1)
        left, right = self.left_proj(left), self.right_proj(right)
        if self.operation == "mlp":
            return self.out_proj(self._product(left, right))
        # weights of the branches (N, F, B, 1) by the scalars: they do not change under rotation
        share = torch.softmax(self.router(scalars), -1)[..., None]
        left = (left.unflatten(-1, (self.branches, -1)) * share).flatten(-2)
        return self.out_proj(
            self._product(left, right).unflatten(-1, (self.branches, -1)).sum(-2)
        )

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        # pointwise on the grid, (G, N F C)
        values = (self._to_grid @ left.flatten(1)) * (self._to_grid @ right.flatten(1))
        return (self._from_grid @ values).view(len(self._from_grid), *left.shape[1:])


class DegreeMaps(nn.Module):
    """Linear maps between channels and those of all frames, one for each degree.

    Args:
        degrees: degree of each of the J coefficients.
        num_in: inputs.
        num_out: outputs.
        source: of the initial parameters.
    """

    def __init__(
        self, degrees: Sequence[int], num_in: int, num_out: int, source: Source
    ) -> None:
        super().__init__()
        self.weight = source.uniform(
            "weight", (max(degrees) + 1, num_in, num_out), num_in**-0.5
        )
        # (J, L + 1): a product instead of an index, whose derivative adds in any order on a GPU
        one_hot = nn.functional.one_hot(torch.tensor(degrees), max(degrees) + 1).to(
            source.dtype
        )
        self._degrees = nn.Buffer(one_hot, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (J, N, F, O) from (J, N, F, I)."""
        # (J, I, O), the map of the degree of each coefficient
        weight = (self._degrees @ self.weight.flatten(1)).view(
            -1, *self.weight.shape[1:]
        )
        return torch.bmm(x.flatten(1, 2), weight).view(*x.shape[:3], -1)


class GridNet(nn.Module):
    """The product of two functions, gated by their scalars.

    A function of the scalars (SwiGLU) is added to degree 0.

    Args:
        channels: C.
        options: functions and operation.
        source: of the initial parameters.
        streams: F.
        bias: whether the gate has one.
        is_cross: whether both functions come from different places. They then have no frames: those
            are made of the channels before, and go back into them afterwards.
    """

    def __init__(
        self,
        channels: int,
        options: GridOptions,
        source: Source,
        *,
        streams: int = 1,
        bias: bool,
        is_cross: bool = False,
    ) -> None:
        super().__init__()
        self.num_frames = options.num_frames
        # small weights: gates begin near sigmoid(0) = 1/2
        self.scalar_gate = StreamLinear(
            2 * channels,
            channels,
            source.part("gate"),
            streams=streams,
            bias=bias,
            spread=SMALL,
        )
        self.grid_op = GridProduct(channels, options, is_cross, source.part("product"))
        # a product of different places is added to what there is, and small at the start
        self.residual_scale = (
            source.filled((streams, channels), ALMOST_NONE) if is_cross else None
        )
        self.makes_frames = is_cross and options.kmax is not None
        if self.makes_frames:
            # frames are made of channels, and go back into them, by a map of each degree
            wide = options.num_frames * channels
            self.frame_expand = DegreeMaps(
                options.degrees, channels, wide, source.part("expand")
            )
            self.frame_contract = DegreeMaps(
                options.degrees, wide, channels, source.part("contract")
            )

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return (J, N, F, K C) from two of that shape; (J, N, F, C) from different places."""
        channels = left.shape[-1] // (1 if self.makes_frames else self.num_frames)
        # degree 0 in frame 0, which is the first
        scalars = torch.cat([left[0, ..., :channels], right[0, ..., :channels]], -1)
        if self.makes_frames:
            left, right = self.frame_expand(left), self.frame_expand(right)
        product = self.grid_op(
            self._frames_outside(left), self._frames_outside(right), scalars
        )
        product = product * torch.sigmoid(self.scalar_gate(scalars))
        product = torch.cat([product[:1] + swiglu(scalars), product[1:]])
        # (J K, N, F, C) to (J, N, F, K C)
        out = product.unflatten(0, (-1, self.num_frames)).movedim(1, 3).flatten(3)
        if self.makes_frames:
            out = self.frame_contract(out)
        return out if self.residual_scale is None else out * self.residual_scale

    def _frames_outside(self, x: Tensor) -> Tensor:
        """Return (J K, N, F, C) from (J, N, F, K C)."""
        return x.unflatten(-1, (self.num_frames, -1)).movedim(3, 1).flatten(0, 1)
