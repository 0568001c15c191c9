"""Blocks of DPA-4: messages between atoms, and networks of each atom, added to its coefficients.

A message is a linear map in the frame of a pair (eSCN). In a frame whose z axis is the direction of
a pair, a map that commutes with rotations is a map that commutes with rotations about z: one matrix
for m = 0, and a pair of matrices, like a complex number, for each m > 0 (Passaro and Zitnick,
arXiv:2302.03655).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.model.families.dpa4.frames import (
    Edges,
    Frames,
    Mixing,
    RadialMixer,
    pair_places,
)
from deepmd_ema.model.families.dpa4.grids import GridNet, GridOptions
from deepmd_ema.model.families.dpa4.layers import (
    ALMOST_NONE,
    NORM_EPS,
    SMALL,
    DegreeGate,
    DegreeLinear,
    DegreeNorm,
    ScalarNorm,
    Source,
    StreamLinear,
    by_degree,
)
from deepmd_ema.model.families.dpa4.rotations import (
    num_coefficients,
    truncation_factors,
)
from deepmd_ema.model.nn.layers import module_list

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.section import DPA4Config

# A atoms, S neighbor slots, E = A S pairs, L largest degree, D coefficients of an atom, R of a
# pair, F streams, C channels of a stream, W = F C channels of all, G groups and H heads of
# attention

Z_BIAS = 0.5413  # softplus of it is 1, the first weight of nothing in the attention


class Convolution(nn.Module):
    """Messages to each atom (DPA-4, arXiv:2606.02419, section 3).

    The coefficients of a neighbor are rotated into the frame of the pair, mixed by matrices that
    depend on the distance, by linear maps and gates, rotated back, and summed with weights of
    attention.

    Args:
        config: the section ``model.descriptor``.
        lmax: L of the block.
        mmax: largest order of the block.
        source: of the initial parameters.
    """

    def __init__(
        self, config: DPA4Config, lmax: int, mmax: int, source: Source
    ) -> None:
        super().__init__()
        self.streams, width = config.n_focus, config.focus_dim or config.channels
        wide, bias = self.streams * width, config.mlp_bias
        self.frames = Frames(lmax, mmax, source.dtype)
        self.mixing = Mixing(config, self.frames, source.part("mixing"))
        self.attention = (
            Attention(config, lmax, wide, source.part("attention"))
            if config.n_atten_head
            else None
        )
        # radial numbers have C channels; streams of another width need a map of them
        needs_map = wide != config.channels
        self.radial_hidden_proj = (
            StreamLinear(config.channels, wide, source.part("radial"))
            if needs_map
            else None
        )
        self.radial_degree_mixer: RadialMixer | None = None
        if config.radial_so2_mode != "none":
            self.radial_degree_mixer = RadialMixer(
                self.frames,
                wide,
                config.radial_so2_mode,
                config.radial_so2_rank,
                source.part("degrees"),
            )
        kmax = min(config.kmax, lmax)

        def product(
            place: int, part: str, order: int, places: Sequence[int], on_rotations: bool
        ) -> GridNet:
            operation = config.grid_operation(place)
            options = GridOptions(
                lmax, order, kmax if on_rotations else None, places, *operation
            )
            return GridNet(
                width,
                options,
                source.part(part),
                streams=self.streams,
                bias=bias,
                is_cross=True,
            )

        self.node_wise_grid_product: GridNet | None = None
        self.message_node_grid_product: GridNet | None = None
        if config.node_wise_s2 or config.node_wise_so3:
            self.node_wise_grid_product = product(
                0, "pairs", mmax, pair_places(lmax, mmax), config.node_wise_so3
            )
        if config.message_node_s2 or config.message_node_so3:
            everything = range(num_coefficients(lmax))
            self.message_node_grid_product = product(
                1, "atoms", lmax, everything, config.message_node_so3
            )
        self.pre_focus_mix = DegreeLinear(
            lmax, config.channels, wide, source.part("before"), bias=bias
        )
        # zeros: messages have no effect at the start
        self.post_focus_mix = DegreeLinear(
            lmax, wide, config.channels, source.part("after"), bias=bias, zero=True
        )
        # otherwise a message is multiplied by a number per degree, the same in every frame
        self.needs_frame = (
            config.mixing_layers > 0
            or self.radial_degree_mixer is not None
            or self.node_wise_grid_product is not None
        )
        # (D, 1, 1), for the orders beyond mmax, which are lost in the frames
        factors = torch.tensor(truncation_factors(lmax, mmax), dtype=source.dtype)
        self._enlarged = nn.Buffer(by_degree(factors)[:, None, None], persistent=False)

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Return the messages (D, A, C) to atoms from their coefficients (D, A, C)."""
        x = self.pre_focus_mix(x)
        by_atom = x.transpose(0, 1).contiguous()  # (A, D, W), whose rows neighbors read
        out = (
            self._summed(by_atom, edges)
            if self.needs_frame
            else self._scaled(by_atom, edges)
        )
        if self.attention is not None:
            out = self.attention.gated(out, x)
        if self.message_node_grid_product is not None:
            # messages and coefficients of the atom, (D, A, F, C)
            both = (part.unflatten(-1, (self.streams, -1)) for part in (out, x))
            out = out + self.message_node_grid_product(*both).flatten(2)
        return self.post_focus_mix(out)

    @property
    def _projection(self) -> Tensor | None:
        """The map of radial numbers (C, W), or None where W is C."""
        return (
            None if self.radial_hidden_proj is None else self.radial_hidden_proj.weight
        )

    def _radial(self, edges: Edges) -> Tensor:
        """Return the radial numbers (E, L + 1, W)."""
        radial = edges.radial.values(self.frames.lmax)
        return (
            radial
            if self.radial_hidden_proj is None
            else self.radial_hidden_proj(radial)
        )

    def _summed(self, x: Tensor, edges: Edges) -> Tensor:
        """Return (D, A, W), weighted sums of coefficients that are mixed in the frames of pairs.

        Args:
            x: (A, D, W) coefficients of atoms.
            edges: pairs.
        """
        rows = self.frames.rows(edges)  # (E, R, D)
        if self.radial_degree_mixer is None:
            mixed = edges.turned(rows, x) * self.frames.of_rows(self._radial(edges), 1)
        else:
            mixed = self.radial_degree_mixer(x, self._projection, rows, edges)
        if self.node_wise_grid_product is not None:
            mixed = mixed + self._times_centre(
                self.node_wise_grid_product, mixed, x, rows, edges
            )
        mixed = self.mixing(mixed, self._projection, edges)
        if self.attention is not None:
            mixed = self.attention.mapped(mixed, self.frames)
        weights = self._weights(x, edges)
        # one weight for all channels is a factor of the rotation, which has fewer numbers
        if weights.shape[1:].numel() == 1:
            rows = rows * weights
        else:
            mixed = _times(mixed, weights)
        # rotation back (the transposed matrix) and sum over neighbors in one product for each atom:
        # (A, D, S R) times (A, S R, W)
        num_atoms, slots = edges.neighbor.shape
        back = rows.view(num_atoms, slots * rows.shape[1], rows.shape[2]).transpose(
            1, 2
        )
        out = torch.bmm(
            back, mixed.reshape(num_atoms, slots * mixed.shape[1], mixed.shape[2])
        )
        return out.transpose(0, 1).contiguous() * self._enlarged

    def _scaled(self, x: Tensor, edges: Edges) -> Tensor:
        """Return (D, A, W), weighted sums of the neighbors' coefficients times radial numbers."""
        sent = edges.sent(x).flatten(0, 1)  # (E, D, W)
        sent = sent * by_degree(self._radial(edges), 1)
        if self.streams > 1:
            share = self.mixing.competition(sent[:, 0])
            sent = _times(sent, share[..., None])
        if self.attention is not None:
            for linear in (self.attention.attn_focus_mix, self.attention.attn_v_proj):
                sent = (
                    sent
                    if linear is None
                    else linear(sent.transpose(0, 1)).transpose(0, 1)
                )
        weighted = _times(sent, self._weights(x, edges))
        messages = weighted.view(*edges.neighbor.shape, *sent.shape[1:])  # (A, S, D, W)
        return messages.sum(1).transpose(0, 1).contiguous()

    def _times_centre(
        self, product: GridNet, mixed: Tensor, x: Tensor, rows: Tensor, edges: Edges
    ) -> Tensor:
        """Return the products of coefficients of pairs (E, R, W) with those of the centre."""
        num_atoms, slots = edges.neighbor.shape
        # the coefficients of the centre in the frames of all its pairs, one product for each atom
        turns = rows.view(num_atoms, slots * rows.shape[1], rows.shape[2])
        centre = torch.bmm(turns, x).view(mixed.shape)
        both = (
            part.unflatten(-1, (self.streams, -1)).transpose(0, 1)
            for part in (mixed, centre)
        )
        out: Tensor = product(*both)
        return out.flatten(2).transpose(0, 1)

    def _weights(self, x: Tensor, edges: Edges) -> Tensor:
        """Return the weights of the pairs (E, G, H)."""
        if self.attention is not None:
            return self.attention.weights(x[:, 0], self._projection, edges).flatten(
                0, 1
            )
        return (edges.weight * edges.scale[:, None]).view(-1, 1, 1)


def _times(values: Tensor, factors: Tensor) -> Tensor:
    """Return values (N, rows, W) times factors (N, G, H) of the channels of groups and heads."""
    return (
        values.unflatten(-1, (*factors.shape[1:], -1)) * factors[:, None, ..., None]
    ).flatten(2)


class Attention(nn.Module):
    """Attention whose weights vanish at the cutoff.

    Args:
        config: the section ``model.descriptor``.
        lmax: L.
        wide: W.
        source: of the initial parameters.
    """

    def __init__(
        self, config: DPA4Config, lmax: int, wide: int, source: Source
    ) -> None:
        super().__init__()
        self.heads = config.n_atten_head
        self.eps = config.eps
        self.groups = 1 if config.atten_f_mix else config.n_focus
        width = wide // self.groups
        self.attn_qk_norm = ScalarNorm((self.groups, width), self.eps, source)
        self.attn_q_proj = StreamLinear(
            width, width, source.part("query"), streams=self.groups
        )
        self.attn_k_proj = StreamLinear(
            width, width, source.part("key"), streams=self.groups
        )
        self.attn_focus_mix = (
            DegreeLinear(lmax, wide, wide, source.part("mix"))
            if config.atten_f_mix
            else None
        )
        # maps of the values before the sum, and of the sum
        self.attn_v_proj, self.attn_o_proj = (
            DegreeLinear(lmax, width, width, source.part(part), streams=self.groups)
            if is_used
            else None
            for part, is_used in (
                ("value", config.atten_v_proj),
                ("out", config.atten_o_proj),
            )
        )
        self.adamw_attn_logit_w = source.normal(
            "logit", (width, self.groups, self.heads), SMALL
        )
        self.adamw_attn_z_bias_raw = source.filled((self.groups, self.heads), Z_BIAS)
        self.attn_output_gate_norm = ScalarNorm((self.groups, width), self.eps, source)
        self.adamw_attn_gate_w = source.normal(
            "gate", (width, self.groups, self.heads), SMALL
        )

    def weights(self, scalar: Tensor, project: Tensor | None, edges: Edges) -> Tensor:
        """Return the weights of the neighbors (A, S, G, H).

        Args:
            scalar: (A, W) coefficients of degree 0.
            project: (C, W) map of radial numbers, if W is not C.
            edges: pairs.
        """
        normed = self.attn_qk_norm(scalar.unflatten(-1, (self.groups, -1)))
        query, key = self.attn_q_proj(normed), self.attn_k_proj(normed)
        keys = edges.sent(key.flatten(1))
        products = (
            (query.flatten(1)[:, None] * keys)
            .unflatten(-1, (self.groups, self.heads, -1))
            .sum(-1)
        )
        # logits have a bias by the radial numbers of degree 0; channels of a group act on its heads
        radial_map = torch.block_diag(*self.adamw_attn_logit_w.unbind(1))  # (W, G H)
        bias = edges.radial.map(
            (radial_map if project is None else project @ radial_map)[None]
        )
        logits = products * (query.shape[-1] // self.heads) ** -0.5 + bias.view(
            products.shape
        )
        # beside the neighbors there is a mass of nothing in the softmax. Masses of neighbors have
        # the envelope as a factor, so that all weights go to 0 with it
        nothing = nn.functional.softplus(self.adamw_attn_z_bias_raw) + self.eps
        absent = (edges.weight == 0)[..., None, None]
        masked = logits.detach().masked_fill(absent, torch.finfo(logits.dtype).min)
        # exponents are counted from the largest, which is detached because it cancels; nothing is
        # among them, also because an atom may have no slots
        absent_logit = nothing.detach().log().expand(masked.shape[0], 1, -1, -1)
        largest = torch.cat([absent_logit, masked], 1).amax(1, keepdim=True)
        exponent = (logits - largest).masked_fill(absent, 0)
        mass = (edges.envelope * edges.weight)[..., None, None] * torch.exp(exponent)
        return mass / (mass.sum(1, keepdim=True) + nothing * torch.exp(-largest))

    def mapped(self, coefficients: Tensor, frames: Frames) -> Tensor:
        """Return the coefficients in frames (E, R, W) after the maps of channels before the sum."""
        for linear in (self.attn_focus_mix, self.attn_v_proj):
            if linear is not None:
                # (R, I, F, O), the map of the degree of each coefficient
                maps = frames.of_rows(linear.weight.unflatten(-1, (linear.streams, -1)))
                split = coefficients.unflatten(-1, (linear.streams, -1))
                coefficients = torch.einsum("erfi,rifo->erfo", split, maps).flatten(2)
        return coefficients

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the sums of attention (D, A, W) times a factor of each head."""
        # degree 0 of the atom, (A, G, channels)
        scalars = self.attn_output_gate_norm(x[0].unflatten(-1, (self.groups, -1)))
        gate = torch.sigmoid(
            torch.einsum("agi,igh->agh", scalars, self.adamw_attn_gate_w)
        )
        out = (
            out.unflatten(-1, (self.groups, self.heads, -1)) * gate[..., None]
        ).flatten(2)
        return out if self.attn_o_proj is None else self.attn_o_proj(out)


# A atoms, D coefficients, C channels


class FeedForward(nn.Module):
    """A network of the coefficients of each atom, between two linear maps of the channels.

    Args:
        config: the section ``model.descriptor``.
        lmax: largest degree.
        hidden: width of the hidden layer.
        grid: functions that are multiplied; None: gates instead.
        source: of the initial parameters.
    """

    def __init__(
        self,
        config: DPA4Config,
        lmax: int,
        hidden: int,
        grid: GridOptions | None,
        source: Source,
    ) -> None:
        super().__init__()
        channels, bias = config.channels, config.mlp_bias
        # products need two factors; gates may come from channels of their own
        self.has_two = grid is not None or config.glu_activation
        wide = hidden * (1 if grid is None else grid.num_frames)
        self.so3_linear_1 = DegreeLinear(
            lmax,
            channels,
            wide * (2 if self.has_two else 1),
            source.part("first"),
            bias=bias,
        )
        self.act: nn.Module = (
            DegreeGate(
                lmax, hidden, config.activation_function, source.part("gate"), bias=bias
            )
            if grid is None
            else GridNet(hidden, grid, source.part("grid"), bias=bias)
        )
        self.so3_linear_2 = DegreeLinear(
            lmax, wide, channels, source.part("second"), bias=bias, zero=True
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (D, A, C) from (D, A, C)."""
        x = self.so3_linear_1(x)
        if isinstance(self.act, GridNet):
            # a dimension of one stream
            left, right = x[:, :, None].chunk(2, -1)
            x = self.act(left, right)[:, :, 0]
        else:
            x = self.act(*x.chunk(2, -1)) if self.has_two else self.act(x)
        out: Tensor = self.so3_linear_2(x)
        return out


class Block(nn.Module):
    """``x + norm(convolution(norm(x)))``, then ``x + norm(network(norm(x)))`` at least once.

    Args:
        config: the section ``model.descriptor``.
        index: number of the block.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, index: int, source: Source) -> None:
        super().__init__()
        lmax, mmax = config.degrees[index], config.orders[index]
        # atoms may have higher degrees than messages: their networks fill these
        atom_lmax, channels = lmax + config.extra_node_l, config.channels
        self.num_sent = num_coefficients(lmax)
        before, after = config.sandwich_norm[:2]
        before_network, after_network = config.sandwich_norm[2:]

        def norm(wanted: bool, degree: int, eps: float = NORM_EPS) -> nn.Module:
            return (
                DegreeNorm(degree, channels, eps, source) if wanted else nn.Identity()
            )

        self.pre_so2_norm = norm(before, lmax)
        # without norms of pairs (edge_norm), a small message keeps its size: it is divided by 1 or
        # more, instead of being enlarged by up to eps^-1/2
        self.post_so2_norm = norm(after, lmax, NORM_EPS if config.edge_norm else 1.0)
        self.so2_conv = Convolution(config, lmax, mmax, source.part("convolution"))
        networks = range(config.ffn_blocks)
        self.pre_ffn_norms = nn.ModuleList(
            norm(before_network, atom_lmax) for _ in networks
        )
        self.post_ffn_norms = nn.ModuleList(
            norm(after_network, atom_lmax) for _ in networks
        )
        places = range(num_coefficients(atom_lmax))
        grid: GridOptions | None = None
        if config.ffn_so3_grid or config.s2_activation[1]:
            kmax = min(config.kmax, lmax) if config.ffn_so3_grid else None
            grid = GridOptions(
                atom_lmax, atom_lmax, kmax, places, *config.grid_operation(2)
            )
        hidden = config.hidden_width(config.glu_activation or grid is not None)
        self.ffns = module_list(
            FeedForward(config, atom_lmax, hidden, grid, source.part("network", k))
            for k in networks
        )
        self.adam_ffn_layer_scales: nn.ParameterList | None = None
        if config.layer_scale:
            self.adam_ffn_layer_scales = nn.ParameterList(
                source.filled((channels,), ALMOST_NONE) for _ in networks
            )

    def forward(self, x: Tensor, edges: Edges) -> Tensor:
        """Return the coefficients of atoms (D, A, C) after the block."""
        # messages have the first coefficients only; the others get zeros
        messages: Tensor = self.post_so2_norm(
            self.so2_conv(self.pre_so2_norm(x[: self.num_sent]), edges)
        )
        x = x + nn.functional.pad(messages, (0, 0, 0, 0, 0, len(x) - self.num_sent))
        for k, network in enumerate(self.ffns):
            change: Tensor = self.post_ffn_norms[k](network(self.pre_ffn_norms[k](x)))
            if self.adam_ffn_layer_scales is not None:
                change = change * self.adam_ffn_layer_scales[k]
            x = x + change
        return x
