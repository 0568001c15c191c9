"""Layers of DPA-4 that act on coefficients of spherical harmonics degree by degree, and on scalars.

Coefficients are the first dimension of a tensor, in the order of
`deepmd_ema.model.families.dpa4.rotations`, so that those of one degree are a slice, and a layer is
one product of matrices for each degree. Parameters have the names and shapes that they have in
files of DeePMD-kit; optimizers choose by these names, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.activation import activation
from deepmd_ema.utils import seed_for

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.section import AllNeighborsSection

# D coefficients of the degrees 0..L, N atoms or pairs (or functions of the distance), F streams, C
# channels of each, I inputs and O outputs of a linear map

SMALL = 0.01  # spread of the first weights of gates and logits
ALMOST_NONE = 1e-3  # first factor of what is added by layers that are to grow
NORM_EPS = 1e-5  # added to mean squares in norms of coefficients, as in DeePMD-kit


class Source:
    """Initial parameters of a part of the model: each drawn with a seed of its own, in float64.

    Both precisions then start from the same numbers, and a further parameter changes no other.

    Args:
        seed: of the part.
        dtype: precision of the parameters.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.seed = seed
        self.dtype = dtype

    def part(self, *names: str | int) -> Source:
        """Return the source of a part of this part."""
        return Source(seed_for("/".join(map(str, names)), self.seed), self.dtype)

    def normal(self, name: str, shape: Sequence[int], spread: float) -> nn.Parameter:
        """Return a parameter drawn from a normal distribution."""
        return self._parameter(
            torch.randn(*shape, dtype=torch.float64, generator=self._generator(name))
            * spread
        )

    def uniform(self, name: str, shape: Sequence[int], bound: float) -> nn.Parameter:
        """Return a parameter drawn evenly from -bound to bound."""
        drawn = torch.rand(*shape, dtype=torch.float64, generator=self._generator(name))
        return self._parameter((2 * drawn - 1) * bound)

    def truncated(
        self, name: str, shape: Sequence[int], factor: float = 1.0
    ) -> nn.Parameter:
        """Return matrices with a spread of ``(rows + columns)^-1/2``, cut at three times of it."""
        spread = (shape[-2] + shape[-1]) ** -0.5
        # drawn in float64, as all numbers here
        drawn = nn.init.trunc_normal_(
            torch.empty(*shape, dtype=torch.float64),
            std=spread,
            a=-3 * spread,
            b=3 * spread,
            generator=self._generator(name),
        )
        return self._parameter(drawn * factor)

    def filled(self, shape: Sequence[int], value: float) -> nn.Parameter:
        """Return a parameter of equal numbers."""
        return nn.Parameter(torch.full(tuple(shape), value, dtype=self.dtype))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(seed_for(name, self.seed))

    def _parameter(self, values: Tensor) -> nn.Parameter:
        return nn.Parameter(values.to(self.dtype))


class DistanceFunctions(nn.Module):
    """``sin(w r) / r`` or gaussians, functions of the distance of a pair.

    Args:
        config: the section ``model.descriptor``.
        dtype: precision of the parameters.
    """

    def __init__(self, config: AllNeighborsSection, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_bessel, count = config.basis_type == "bessel", config.n_radial
        # gaussians as wide as the distance of two centres, rcut / (count - 1)
        self.coefficient = -0.5 * (max(count - 1, 1) / config.rcut) ** 2
        # w of sin(w r) / r, which is 0 at the cutoff, or centres in even steps; both are trained
        start = (
            torch.arange(1, count + 1, dtype=torch.float64) * (math.pi / config.rcut)
            if self.is_bessel
            else torch.linspace(0, config.rcut, count, dtype=torch.float64)
        )
        self.adam_freqs = nn.Parameter(start[None].to(dtype))

    def functions(self, distance: Tensor) -> Tensor:
        """Return (..., N) from distances (..., 1), angstrom, in their precision."""
        freqs = self.adam_freqs.to(distance)  # (1, N)
        if self.is_bessel:
            return torch.sin(distance * freqs) / distance
        return torch.exp((distance - freqs).square() * self.coefficient)


def by_degree(values: Tensor, dim: int = 0) -> Tensor:
    """Return the values of degrees, in a dimension of L + 1, for each coefficient."""
    parts = [
        part.expand(*part.shape[:dim], 2 * degree + 1, *part.shape[dim + 1 :])
        for degree, part in enumerate(values.split(1, dim))
    ]
    return torch.cat(parts, dim)


class Dense(nn.Module):
    """``act(x W + b)``, as layers of DeePMD-kit name their parameters.

    Args:
        num_in: inputs.
        num_out: outputs.
        source: of the initial parameters.
        act: name of the activation function.
        bias: whether there is a ``b``.
        zero: whether W begins with zeros.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        source: Source,
        act: str = "none",
        bias: bool = False,
        zero: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation(act)
        # zeros for layers whose output is added to something and is to grow
        self.matrix = source.normal(
            "matrix", (num_in, num_out), 0.0 if zero else (num_in + num_out) ** -0.5
        )
        self.bias = source.normal("bias", (num_out,), 1.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., O) from (..., I)."""
        products = x @ self.matrix
        return self.activation.value(
            products if self.bias is None else products + self.bias
        )


class TypeTable(nn.Module):
    """A vector of each element.

    Args:
        num_types: T.
        width: numbers of a vector.
        source: of the initial parameters.
    """

    def __init__(self, num_types: int, width: int, source: Source) -> None:
        super().__init__()
        self.num_types = num_types
        self.adam_type_embedding = source.normal(
            "table", (num_types + 1, width), (num_types + width) ** -0.5
        )
        # files of DeePMD-kit have a last row for atoms that are none
        with torch.no_grad():
            self.adam_type_embedding[num_types] = 0

    def forward(self) -> Tensor:
        """Return (T, width)."""
        return self.adam_type_embedding[: self.num_types]


def with_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Return coefficients (D, N, C) with a bias (..., C) added to degree 0."""
    # the bias is filled up with zeros: to split x and join it again would take four operations for
    # each derivative
    return x + nn.functional.pad(bias.view(1, 1, -1), (0, 0, 0, 0, 0, x.shape[0] - 1))


class DegreeLinear(nn.Module):
    """A linear map of the channels, one for each degree.

    Args:
        lmax: L.
        num_in: channels of a stream.
        num_out: channels of a stream after it.
        source: of the initial parameters.
        streams: F.
        bias: whether something is added to degree 0.
        zero: whether the maps begin with zeros.
    """

    def __init__(
        self,
        lmax: int,
        num_in: int,
        num_out: int,
        source: Source,
        *,
        streams: int = 1,
        bias: bool = False,
        zero: bool = False,
    ) -> None:
        super().__init__()
        self.streams = streams
        shape = (lmax + 1, num_in, streams * num_out)
        # streams are side by side, as in files of DeePMD-kit; degrees above 0 have no bias, because
        # a constant would not rotate with the atoms
        self.weight = (
            source.filled(shape, 0.0) if zero else source.truncated("weight", shape)
        )
        self.bias = source.filled((streams * num_out,), 0.0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (D, N, F O) from (D, N, F I)."""
        # a product for each degree (2 l + 1, N, I) (I, O); several streams in one batched product,
        # whose maps are repeated for each coefficient
        if self.streams == 1:
            degree_parts = x.split([2 * n + 1 for n in range(len(self.weight))])
            parts = [part @ weight for part, weight in zip(degree_parts, self.weight)]
            out = torch.cat(parts) if len(parts) > 1 else parts[0]
        else:
            streams = x.unflatten(-1, (self.streams, -1)).movedim(2, 1)  # D, F, N, I
            maps = self.weight.unflatten(-1, (self.streams, -1)).transpose(
                1, 2
            )  # L + 1, F, I, O
            out = (streams @ by_degree(maps)).movedim(1, 2).flatten(2)
        return out if self.bias is None else with_bias(out, self.bias)


class StreamLinear(nn.Module):
    """A linear map of the channels of each stream.

    Args:
        num_in: channels of a stream.
        num_out: channels of a stream after it.
        source: of the initial parameters.
        streams: F.
        bias: whether there is one.
        spread: of the first weights; None draws them evenly up to ``num_in^-1/2``.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        source: Source,
        *,
        streams: int = 1,
        bias: bool = False,
        spread: float | None = None,
    ) -> None:
        super().__init__()
        self.streams = streams
        shape = (num_in, streams * num_out)
        uniform = spread is None
        self.weight = (
            source.uniform("weight", shape, num_in**-0.5)
            if uniform
            else source.normal("weight", shape, spread or 0.0)
        )
        self.bias = source.filled((streams * num_out,), 0.0) if bias else None

    def matrices(self) -> Tensor:
        """Return (F, I, O)."""
        return self.weight.unflatten(-1, (self.streams, -1)).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, F, O) from (N, F, I)."""
        if self.streams == 1:
            # all rows in one dimension: with (N, 1, I), torch would multiply each row alone
            out = (x.flatten(0, -2) @ self.weight).view(
                *x.shape[:-1], self.weight.shape[1]
            )
        else:
            out = torch.einsum("nfi,fio->nfo", x, self.matrices())
        return out if self.bias is None else out + self.bias.view(self.streams, -1)


class ScalarNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the channels of a stream.

    Zhang and Sennrich, arXiv:1910.07467.

    Args:
        shape: of the scale, ``(F, C)`` or ``(C,)``.
        eps: added to the mean.
        source: of the initial parameters.
    """

    def __init__(self, shape: Sequence[int], eps: float, source: Source) -> None:
        super().__init__()
        self.eps = eps
        self.adam_scale = source.filled(shape, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised values; the last dimensions of x are those of the scale."""
        return (
            x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.adam_scale
        )


class DegreeNorm(nn.Module):
    """Coefficients over the root of their mean square, in which all degrees count the same.

    Degree 0 is centred over its channels before, and has a bias.

    Args:
        lmax: L.
        channels: C.
        eps: added to the mean square.
        source: of the initial parameters.
    """

    def __init__(self, lmax: int, channels: int, eps: float, source: Source) -> None:
        super().__init__()
        self.eps = eps
        self.adam_scale = source.filled((lmax + 1, 1, channels), 1.0)
        self.bias = source.filled((1, channels), 0.0)
        # a mean over the degrees of means over their 2 l + 1 orders and their channels
        share = [
            1 / ((2 * degree + 1) * (lmax + 1) * channels) for degree in range(lmax + 1)
        ]
        self._share = nn.Buffer(
            by_degree(torch.tensor(share, dtype=source.dtype)), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (D, N, C) from (D, N, C)."""
        # only degree 0 may be shifted: a shift of other degrees would depend on the orientation
        centred = torch.cat([x[:1] - x[:1].mean(-1, keepdim=True), x[1:]])
        # (N, 1), for all degrees of an atom or a pair
        mean_square = (self._share @ centred.square().sum(-1))[:, None]
        out = centred * (mean_square + self.eps).rsqrt() * by_degree(self.adam_scale)
        return with_bias(out, self.bias)


class OrderedNorm(nn.Module):
    """`DegreeNorm` for coefficients in the frames of pairs, which have only some of the orders.

    Args:
        degrees: degree of each of the R coefficients.
        channels: C.
        streams: F.
        source: of the initial parameters.
    """

    def __init__(
        self, degrees: Sequence[int], channels: int, streams: int, source: Source
    ) -> None:
        super().__init__()
        lmax = max(degrees)
        # all orders of a degree share a scale, or the result would depend on the orientation
        self.adam_scale = source.filled((streams, lmax + 1, channels), 1.0)
        self.bias0 = source.filled((streams, channels), 0.0)
        # means over the orders that a degree has here
        share = [
            1 / (degrees.count(degree) * (lmax + 1) * channels) for degree in degrees
        ]
        self._share = nn.Buffer(
            torch.tensor(share, dtype=source.dtype), persistent=False
        )
        one_hot = nn.functional.one_hot(torch.tensor(degrees), lmax + 1).to(
            source.dtype
        )
        self._degrees = nn.Buffer(one_hot, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (F, E, R, C) from (F, E, R, C)."""
        centred = torch.cat(
            [x[:, :, :1] - x[:, :, :1].mean(-1, keepdim=True), x[:, :, 1:]], 2
        )
        # (F, E, 1, 1), and the scale of each coefficient (F, 1, R, C)
        mean_square = (centred.square().sum(-1) @ self._share)[..., None, None]
        out = (
            centred
            * (mean_square + NORM_EPS).rsqrt()
            * (self._degrees @ self.adam_scale)[:, None]
        )
        return torch.cat([out[:, :, :1] + self.bias0[:, None, None], out[:, :, 1:]], 2)


class DegreeGate(nn.Module):
    """Degree 0 through an activation function, other degrees times sigmoids of maps of degree 0.

    Factors that do not change under rotation keep the coefficients equivariant.

    Args:
        lmax: L.
        channels: C of a stream.
        act: name of the activation function.
        source: of the initial parameters.
        streams: F.
        bias: whether the maps have one.
    """

    def __init__(
        self,
        lmax: int,
        channels: int,
        act: str,
        source: Source,
        *,
        streams: int = 1,
        bias: bool,
    ) -> None:
        super().__init__()
        self.lmax = lmax
        self.activation = activation(act)
        if lmax:
            self.gate_linear = StreamLinear(
                channels,
                lmax * channels,
                source,
                streams=streams,
                bias=bias,
                spread=SMALL,
            )

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return (D, N, C) from (D, N, C), gated by degree 0 of ``gate`` (D, N, C), or of x."""
        if gate is None:
            first = self.activation.value(x[:1])
        else:
            first = x[:1] * self.activation.value(gate[:1])
        if not self.lmax:
            return first
        gates = self.gates((x if gate is None else gate)[:1])[0].transpose(
            0, 1
        )  # (L, N, C)
        # degree 0 is filled up and dropped again, so that one expansion serves all degrees
        return torch.cat([first, x[1:] * by_degree(torch.cat([gates[:1], gates]))[1:]])

    def gates(self, scalar: Tensor) -> Tensor:
        """Return the factors (F, N, L, C) of the degrees from 1 on by degree 0 (F, N, C)."""
        linear = self.gate_linear
        logits = torch.bmm(scalar, linear.matrices())
        if linear.bias is not None:
            logits = logits + linear.bias.view(linear.streams, 1, -1)
        return torch.sigmoid(logits).unflatten(-1, (self.lmax, -1))


def swiglu(x: Tensor) -> Tensor:
    """Return ``silu(a) b`` of both halves of the last dimension (Shazeer, arXiv:2002.05202)."""
    first, second = x.chunk(2, -1)
    return nn.functional.silu(first) * second
