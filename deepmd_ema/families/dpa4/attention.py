"""Attention: weights with which an atom sums what its neighbors send, and gates of the sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.frames import Edges, Frames
from deepmd_ema.families.dpa4.layers import SMALL, DegreeLinear, ScalarNorm, Source, StreamLinear

if TYPE_CHECKING:
    from deepmd_ema.families.dpa4.section import DPA4Config

# A atoms, S neighbor slots, E = A S pairs, L largest degree, D coefficients of an atom, G groups of channels, H heads,
# W channels of all groups

Z_BIAS = 0.5413  # softplus of it is 1


class Attention(nn.Module):
    """Attention whose weights vanish at the cutoff.

    Args:
        config: the section ``model.descriptor``.
        lmax: L.
        wide: W.
        source: of the initial parameters.
    """

    def __init__(self, config: DPA4Config, lmax: int, wide: int, source: Source) -> None:
        super().__init__()
        self.heads, self.eps = config.n_atten_head, config.eps
        self.groups = 1 if config.atten_f_mix else config.n_focus
        width = wide // self.groups
        width = wide // self.groups
        self.attn_qk_norm = ScalarNorm((self.groups, width), self.eps, source)
        self.attn_q_proj = StreamLinear(width, width, source.part("query"), streams=self.groups)
        self.attn_k_proj = StreamLinear(width, width, source.part("key"), streams=self.groups)
        self.attn_focus_mix = DegreeLinear(lmax, wide, wide, source.part("mix")) if config.atten_f_mix else None
        self.attn_v_proj = (
            DegreeLinear(lmax, width, width, source.part("value"), streams=self.groups) if config.atten_v_proj else None
        )
        self.attn_o_proj = (
            DegreeLinear(lmax, width, width, source.part("out"), streams=self.groups) if config.atten_o_proj else None
        )
        self.adamw_attn_logit_w = source.normal("logit", (width, self.groups, self.heads), SMALL)
        self.adamw_attn_z_bias_raw = source.filled((self.groups, self.heads), Z_BIAS)
        self.attn_output_gate_norm = ScalarNorm((self.groups, width), self.eps, source)
        self.adamw_attn_gate_w = source.normal("gate", (width, self.groups, self.heads), SMALL)

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
        products = (query.flatten(1)[:, None] * keys).unflatten(-1, (self.groups, self.heads, -1)).sum(-1)
        of_radial = torch.block_diag(*self.adamw_attn_logit_w.unbind(1))  # W, G H
        bias = edges.radial.map((of_radial if project is None else project @ of_radial)[None])
        logits = products * (query.shape[-1] // self.heads) ** -0.5 + bias.view(products.shape)
        # beside the neighbors there is a weight of nothing, so that all weights go to 0 with the envelope
        nothing = nn.functional.softplus(self.adamw_attn_z_bias_raw) + self.eps
        absent = (edges.weight == 0)[..., None, None]
        masked = logits.detach().masked_fill(absent, torch.finfo(logits.dtype).min)
        # that of nothing among them, also because there may be no slots
        largest = torch.cat([nothing.detach().log().expand(masked.shape[0], 1, -1, -1), masked], 1).amax(
            1, keepdim=True
        )
        mass = (edges.envelope * edges.weight)[..., None, None] * torch.exp((logits - largest).masked_fill(absent, 0))
        return mass / (mass.sum(1, keepdim=True) + nothing * torch.exp(-largest))

    def mapped(self, coefficients: Tensor, frames: Frames) -> Tensor:
        """Return the coefficients in frames (E, R, W) after the maps of channels before the sum."""
        for linear in (self.attn_focus_mix, self.attn_v_proj):
            if linear is not None:
                maps = frames.of_rows(linear.weight.unflatten(-1, (linear.streams, -1)))  # R, I, F, O
                split = coefficients.unflatten(-1, (linear.streams, -1))
                coefficients = torch.einsum("erfi,rifo->erfo", split, maps).flatten(2)
        return coefficients

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the sums of attention (D, A, W) times a factor of each head."""
        scalars = self.attn_output_gate_norm(x[0].unflatten(-1, (self.groups, -1)))
        gate = torch.sigmoid(torch.einsum("agi,igh->agh", scalars, self.adamw_attn_gate_w))
        out = (out.unflatten(-1, (self.groups, self.heads, -1)) * gate[..., None]).flatten(2)
        return out if self.attn_o_proj is None else self.attn_o_proj(out)
