"""Pairs of atoms in DPA-4 before messages: distances, directions, radial functions, and the surroundings of atoms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.layers import Dense, ScalarNorm, Source, TypeTable
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.nn.layers import module_list
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.model.ops.reference import axis_features

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.families.dpa4.section import DPA4Config

# A atoms, S neighbor slots, N radial functions, C channels

RADIAL_NORM_EPS = 1e-7


def cutoff_envelope(distance: Tensor, rcut: float, exponent: int) -> Tensor:
    """Return ``(1 - x)^4 sum_(k < p) binom(k + 3, 3) x^k``, x = r / rcut, which is 0 from the cutoff on.

    It is 1 at 0 with p - 1 derivatives of 0, and has three derivatives of 0 at the cutoff.
    """
    u = (1 - distance / rcut).clamp(0, 1)
    x = 1 - u
    series = torch.full_like(x, math.comb(exponent + 2, 3))
    for k in range(exponent - 2, -1, -1):
        series = math.comb(k + 3, 3) + x * series
    return u.square().square() * series


@dataclass(frozen=True)
class Pairs:
    """Pairs of atoms in the precision of the descriptor.

    Attributes:
        distance: (A, S) angstrom.
        direction: (A, S, 3) unit vectors.
        envelope: (A, S) of edges; 0 where there is no neighbor.
        is_seen: (A, S) bool, False of pairs that are excluded; None where none is.
    """

    distance: Tensor
    direction: Tensor
    envelope: Tensor
    is_seen: Tensor | None

    @classmethod
    def of(cls, vector: Tensor, config: DPA4Config, dropped: Tensor | None) -> Pairs:
        """Return the pairs of vectors (A, S, 3) without those ``dropped`` (A, S)."""
        distance = (vector.square().sum(-1) + config.eps**2).sqrt()
        envelope = cutoff_envelope(distance, config.rcut, config.env_exp[1])
        if dropped is not None:
            envelope = envelope.masked_fill(dropped, 0)
        return cls(distance, vector / distance[..., None], envelope, None if dropped is None else ~dropped)


class RadialBasis(nn.Module):
    """Functions of the distance that are 0 at the cutoff: ``sin(w r) / r`` or gaussians, times an envelope.

    Args:
        config: the section ``model.descriptor``.
        dtype: precision of the parameters.
    """

    def __init__(self, config: DPA4Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.rcut, self.exponent, self.is_bessel = config.rcut, config.env_exp[0], config.basis_type == "bessel"
        count = config.n_radial
        start = (
            torch.arange(1, count + 1, dtype=torch.float64) * (math.pi / config.rcut)
            if self.is_bessel
            else torch.linspace(0, config.rcut, count, dtype=torch.float64)
        )
        self.adam_freqs = nn.Parameter(start[None].to(dtype))
        self.coefficient = -0.5 * (max(count - 1, 1) / config.rcut) ** 2

    def forward(self, pairs: Pairs) -> Tensor:
        """Return (A, S, N)."""
        distance = pairs.distance[..., None]
        if self.is_bessel:
            found = torch.sin(distance * self.adam_freqs) / distance
        else:
            found = torch.exp((distance - self.adam_freqs).square() * self.coefficient)
        envelope = cutoff_envelope(distance, self.rcut, self.exponent)
        if pairs.is_seen is not None:
            envelope = envelope * pairs.is_seen[..., None]
        return found * envelope


class Activated(nn.Module):
    """An activation function as a module.

    Args:
        name: as in the input.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.activation = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return y, of the shape of x."""
        return self.activation.value(x)


class RadialNetwork(nn.Module):
    """Dense layers without biases, so that what vanishes at the cutoff is mapped to what vanishes there.

    Args:
        config: the section ``model.descriptor``.
        num_out: outputs.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, num_out: int, source: Source) -> None:
        super().__init__()
        hidden = [width or config.channels for width in config.radial_mlp]
        modules: list[nn.Module] = []
        for index, (num_in, width) in enumerate(pairwise([config.n_radial, *hidden])):
            modules.append(Dense(num_in, width, source.part(index)))
            if config.edge_norm:
                modules.append(ScalarNorm((width,), RADIAL_NORM_EPS, source))
            modules.append(Activated(config.activation_function))
        modules.append(Dense([config.n_radial, *hidden][-1], num_out, source.part("last")))
        self.net = module_list(modules)

    def forward(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the last hidden layer (..., H) from (..., N), and the map after it (H, num_out)."""
        *hidden, last = self.net
        for module in hidden:
            basis = module(basis)
        return basis, cast("Dense", last).matrix


class EnvironmentSeed(nn.Module):
    """Scale and shift of the embedding of an atom by its surroundings, as Deep Potential descriptors see them.

    Args:
        config: the section ``model.descriptor``.
        num_types: number of elements.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, num_types: int, source: Source) -> None:
        super().__init__()
        channels, act, bias = config.channels, config.activation_function, config.mlp_bias
        width = min(channels, 128)
        of_type = min(32, max(8, channels // 4))
        self.axis = min(4 if width < 64 else 8, max(1, width - 1))
        of_radial = max(32, width - 2 * of_type)
        hidden = min(256, max(2 * width, of_radial + 2 * of_type))
        self.rbf_proj_layer1 = Dense(config.n_radial, of_radial, source.part("radial", 1), act, bias)
        self.rbf_proj_layer2 = Dense(of_radial, of_radial, source.part("radial", 2), bias=bias)
        self.env_type_embed = TypeTable(num_types, of_type, source.part("elements"))
        self.g_layer1 = Dense(of_radial + 2 * of_type, hidden, source.part("pairs", 1), act, bias)
        self.g_layer2 = Dense(hidden, width, source.part("pairs", 2), bias=bias)
        self.output_proj = Dense(width * self.axis, 2 * channels, source.part("out"), zero=True)

    def forward(self, pairs: Pairs, basis: Tensor, gate: Tensor, scale: Tensor, batch: Batch) -> Tensor:
        """Return (A, 2 C).

        Args:
            pairs: of atoms.
            basis: (A, S, N) radial functions.
            gate: (A, S) factors of neighbors.
            scale: (A,) factor of sums over neighbors.
            batch: for the elements.
        """
        strength = (pairs.envelope * gate / pairs.distance * scale[:, None])[..., None]
        rows = torch.cat([strength, strength * pairs.direction], -1).transpose(1, 2)  # A, 4, S
        table = self.env_type_embed()
        neighbor = pick(table, batch.neighbor_type)
        own = pick(table, batch.atom_type)[:, None].expand_as(neighbor)
        radial = self.rbf_proj_layer2(self.rbf_proj_layer1(basis))
        embedded = self.g_layer2(self.g_layer1(torch.cat([radial, neighbor, own], -1)))
        moments = torch.bmm(rows, embedded)
        out: Tensor = self.output_proj(axis_features(moments, self.axis))
        return out
