"""Functions of the distance in DPA4C, and their mixtures for each pair of elements."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.layers import (
    Dense,
    DistanceFunctions,
    Source,
    swiglu,
)
from deepmd_ema.model.nn.layers import module_list

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4c.section import DPA4CConfig

# B pairs of atoms, N radial functions, H hidden numbers, T types, C channels, R modes, M = C + R

WIDTH_MULTIPLE = 8  # hidden widths are multiples of it
PAIR_SCALE = (
    0.1  # of the outputs of the network of pairs of elements, before they are bounded
)


def gated_width(width: int) -> int:
    """Return the hidden width of a gated network, about 8/3 of ``width``.

    It has about as many parameters as a plain network with a hidden width of four times ``width``.
    """
    return WIDTH_MULTIPLE * math.ceil(8 * width / 3 / WIDTH_MULTIPLE)


class GatedNetwork(nn.Module):
    """``silu(x V) (x W)``, then a linear map, without biases (Shazeer, arXiv:2002.05202).

    Args:
        num_in: inputs.
        num_hidden: H.
        num_out: outputs.
        source: of the initial parameters.
    """

    def __init__(
        self, num_in: int, num_hidden: int, num_out: int, source: Source
    ) -> None:
        super().__init__()
        self.layers = module_list(
            [
                Dense(num_in, 2 * num_hidden, source.part(0)),
                Dense(num_hidden, num_out, source.part(1)),
            ]
        )


class RadialNetwork(DistanceFunctions):
    """Channels and modes of a distance.

    Called as a network of one number (`deepmd_ema.model.nn.layers.Network`), it computes in the
    precision of its input.

    Args:
        config: the section ``model.descriptor``.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4CConfig, source: Source) -> None:
        super().__init__(config, source.dtype)
        count, hidden = config.n_radial, gated_width(config.channels)
        self.embedding = GatedNetwork(
            count, hidden, config.channels, source.part("channels")
        )
        self.mode_head = (
            Dense(hidden, config.radial_modes, source.part("modes"))
            if config.radial_modes
            else None
        )

    @property
    def numbers_per_row(self) -> int:
        """Numbers of all layers for a distance."""
        hidden, channels = self.embedding.layers[1].matrix.shape
        modes = 0 if self.mode_head is None else self.mode_head.matrix.shape[1]
        # gates and values, their products, and the outputs
        return 3 * hidden + channels + modes

    def forward(self, distance: Tensor) -> Tensor:
        """Return (..., M) from distances (..., 1), angstrom."""
        return swiglu(self.functions(distance) @ self._first(distance)) @ self._last(
            distance
        )

    def value_and_derivative(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return the value (..., M) and its derivative (..., M) by the distances (..., 1)."""
        basis = self.functions(distance)
        first = self._first(distance)
        last = self._last(distance)
        freqs = self.adam_freqs.to(distance)
        if self.is_bessel:
            # (sin(w r) / r)' = (w cos(w r) - sin(w r) / r) / r
            slope = (freqs * torch.cos(distance * freqs) - basis) / distance
        else:
            slope = 2 * self.coefficient * (distance - freqs) * basis
        gate, value = (basis @ first).chunk(2, -1)
        d_gate, d_value = (slope @ first).chunk(2, -1)
        # silu' = sigmoid (1 + x - silu)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        changed = sigmoid * (1 + gate - silu) * d_gate * value + silu * d_value
        return (silu * value) @ last, changed @ last

    def _first(self, like: Tensor) -> Tensor:
        """Return the map (N, 2 H)."""
        matrix: Tensor = self.embedding.layers[0].matrix.to(like.dtype)
        return matrix

    def _last(self, like: Tensor) -> Tensor:
        """Return the map (H, M)."""
        # channels and modes from the same hidden numbers, side by side
        matrix: Tensor = self.embedding.layers[1].matrix
        if self.mode_head is not None:
            matrix = torch.cat([matrix, self.mode_head.matrix], 1)
        return matrix.to(like.dtype)


class PairTables(NamedTuple):
    """Coefficients of the amplitudes of pairs, ``scale g + shift + mix q``.

    g are the channels and q the modes of the distance.

    Attributes:
        scale: (T, T, C), by the types of centre and neighbor.
        shift: (T, T, C).
        mix: (T, T, C, R), or None without modes.
    """

    scale: Tensor
    shift: Tensor
    mix: Tensor | None


class PairNetwork(nn.Module):
    """Tables of pairs of elements from their embeddings.

    Args:
        config: the section ``model.descriptor``.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4CConfig, source: Source) -> None:
        super().__init__()
        self.channels = config.channels
        self.modes = config.radial_modes
        inputs = 2 * config.channels
        outputs = config.channels * (2 + config.radial_modes)
        self.network = GatedNetwork(inputs, gated_width(inputs), outputs, source)

    def forward(self, table: Tensor) -> PairTables:
        """Return the tables from the embeddings of the elements (T, C)."""
        first, last = (layer.matrix for layer in self.network.layers)
        # the map of both embeddings side by side is a sum: (T, 1, H) of centres plus (T, H)
        centre_map, neighbor_map = first.split(self.channels)
        hidden = (table @ centre_map)[:, None] + table @ neighbor_map
        # bounded, so that a scale is between 0 and 2
        bounded = torch.tanh(PAIR_SCALE * (swiglu(hidden) @ last))
        scale, shift, mix = bounded.split(
            [self.channels, self.channels, self.channels * self.modes], -1
        )
        mixed = mix.unflatten(-1, (self.channels, self.modes)) if self.modes else None
        return PairTables(1 + scale, table[:, None] + table + shift, mixed)
