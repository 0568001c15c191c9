"""Blocks of DPA-4: a convolution and networks of each atom, added to its coefficients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from deepmd_ema.families.dpa4.convolution import Convolution
from deepmd_ema.families.dpa4.frames import Edges
from deepmd_ema.families.dpa4.grids import GridNet, GridOptions
from deepmd_ema.families.dpa4.layers import ALMOST_NONE, NORM_EPS, DegreeGate, DegreeLinear, DegreeNorm, Source
from deepmd_ema.families.dpa4.rotations import num_coefficients
from deepmd_ema.model.nn.layers import module_list

if TYPE_CHECKING:
    from deepmd_ema.families.dpa4.section import DPA4Config

# A atoms, D coefficients, C channels


class FeedForward(nn.Module):
    """A network of the coefficients of each atom, between two linear maps of the channels.

    Args:
        lmax: largest degree.
        channels: C.
        hidden: width of the hidden layer.
        grid: functions that are multiplied; None: gates instead.
        act: name of the activation function of the gates.
        gated: whether gates come from channels of their own.
        bias: whether degree 0 has biases.
        source: of the initial parameters.
    """

    def __init__(
        self, lmax: int, channels: int, hidden: int, grid: GridOptions | None, *, act: str, gated: bool, bias: bool,
        source: Source,
    ) -> None:  # fmt: skip
        super().__init__()
        self.has_two = grid is not None or gated
        wide = hidden * (1 if grid is None else grid.num_frames)
        self.so3_linear_1 = DegreeLinear(
            lmax, channels, wide * (2 if self.has_two else 1), source.part("first"), bias=bias
        )
        self.act: nn.Module = (
            DegreeGate(lmax, hidden, act, source.part("gate"), bias=bias)
            if grid is None
            else GridNet(hidden, grid, source.part("grid"), bias=bias)
        )
        self.so3_linear_2 = DegreeLinear(lmax, wide, channels, source.part("second"), bias=bias, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return (D, A, C) from (D, A, C)."""
        x = self.so3_linear_1(x)
        if isinstance(self.act, GridNet):
            left, right = x[:, :, None].chunk(2, -1)
            x = self.act(left, right)[:, :, 0]
        else:
            x = self.act(*x.chunk(2, -1)) if self.has_two else self.act(x)
        out: Tensor = self.so3_linear_2(x)
        return out


class Block(nn.Module):
    """``x + norm(convolution(norm(x)))``, then ``x + norm(network(norm(x)))`` once or several times.

    Args:
        config: the section ``model.descriptor``.
        index: number of the block.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, index: int, source: Source) -> None:
        super().__init__()
        lmax, mmax = config.degrees[index], config.orders[index]
        of_atoms, channels = lmax + config.extra_node_l, config.channels
        self.num_sent = num_coefficients(lmax)
        before, after, before_network, after_network = config.sandwich_norm

        def norm(wanted: bool, degree: int, eps: float = NORM_EPS) -> nn.Module:
            return DegreeNorm(degree, channels, eps, source) if wanted else nn.Identity()

        self.pre_so2_norm = norm(before, lmax)
        # without norms of pairs, a small message keeps its size: it is divided by 1 or more
        self.post_so2_norm = norm(after, lmax, NORM_EPS if config.edge_norm else 1.0)
        self.so2_conv = Convolution(config, lmax, mmax, source.part("convolution"))
        networks = range(config.ffn_blocks)
        self.pre_ffn_norms = nn.ModuleList(norm(before_network, of_atoms) for _ in networks)
        self.post_ffn_norms = nn.ModuleList(norm(after_network, of_atoms) for _ in networks)
        places = range(num_coefficients(of_atoms))
        grid: GridOptions | None = None
        if config.ffn_so3_grid or config.s2_activation[1]:
            kmax = min(config.kmax, lmax) if config.ffn_so3_grid else None
            grid = GridOptions(of_atoms, of_atoms, kmax, places, *config.grid_operation(2))
        self.ffns = module_list(
            FeedForward(
                of_atoms, channels, config.hidden_width(config.glu_activation or grid is not None), grid,
                act=config.activation_function, gated=config.glu_activation, bias=config.mlp_bias,
                source=source.part("network", k),
            )
            for k in networks
        )  # fmt: skip
        self.adam_ffn_layer_scales: nn.ParameterList | None = None
        if config.layer_scale:
            self.adam_ffn_layer_scales = nn.ParameterList(source.filled((channels,), ALMOST_NONE) for _ in networks)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Return the coefficients of atoms (D, A, C) after the block."""
        messages: Tensor = self.post_so2_norm(self.so2_conv(self.pre_so2_norm(x[: self.num_sent]), edges))
        x = x + nn.functional.pad(messages, (0, 0, 0, 0, 0, len(x) - self.num_sent))
        for k, network in enumerate(self.ffns):
            change: Tensor = self.post_ffn_norms[k](network(self.pre_ffn_norms[k](x)))
            if self.adam_ffn_layer_scales is not None:
                change = change * self.adam_ffn_layer_scales[k]
            x = x + change
        return x
