"""Linear maps in the frames of pairs that commute with rotations about the axis, with gates or products between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepmd_ema.families.dpa4.frames import Edges, Frames, pair_degrees, pair_places
from deepmd_ema.families.dpa4.grids import GridNet, GridOptions
from deepmd_ema.families.dpa4.layers import ALMOST_NONE, SMALL, DegreeGate, OrderedNorm, ScalarNorm, Source
from deepmd_ema.model.nn.layers import module_list

if TYPE_CHECKING:
    from deepmd_ema.families.dpa4.section import DPA4Config

# E pairs, R coefficients of a pair, F streams, C channels of a stream, W = F C channels of all, L largest degree

FOCUS_SMOOTHING = 0.02  # least weight of all streams together


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
        self, lmax: int, mmax: int, num_in: int, num_out: int, streams: int, bias: bool, source: Source
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
        """Return (F, I, O) for each order: of the coefficients of -m and of m together, where m is not 0."""
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
                lmax, mmax, self.width, (2 if on_grid and k < last else 1) * self.width, self.streams,
                config.mlp_bias, source.part("linear", k),
            )
            for k in layers
        )  # fmt: skip
        normed = [config.so2_norm and k < last for k in layers]
        self.so2_inter_norms = nn.ModuleList(
            OrderedNorm(found, self.width, self.streams, source) if one else nn.Identity() for one in normed
        )
        sphere = GridOptions(lmax, mmax, None, pair_places(lmax, mmax), "glu")
        self.non_linearities = nn.ModuleList()
        for k in layers:
            part: nn.Module = nn.Identity()
            if k < last and on_grid:
                part = GridNet(self.width, sphere, source.part("grid", k), streams=self.streams, bias=config.mlp_bias)
            elif k < last:
                part = DegreeGate(
                    lmax, self.width, act, source.part("gate", k), streams=self.streams, bias=config.mlp_bias
                )
            self.non_linearities.append(part)
        self.adam_so2_layer_scales: nn.ParameterList | None = None
        if config.layer_scale:
            self.adam_so2_layer_scales = nn.ParameterList(
                source.filled((self.streams, self.width), ALMOST_NONE) for _ in layers
            )

        if self.streams > 1:
            self.focus_compete_norm = (
                ScalarNorm((self.streams, self.width), config.eps, source) if config.edge_norm else nn.Identity()
            )
            self.adamw_focus_compete_w = source.normal("focus", (self.width, self.streams), SMALL)
            self.focus_compete_bias = source.filled((self.streams,), 0.0) if config.mlp_bias else None

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
            near = (radial * edges.envelope.view(-1, 1)).unflatten(-1, (self.streams, -1)).transpose(0, 1)
        out = self._evaluated(x, near)
        return out if self.streams == 1 else self._shared(out, x)

    def _evaluated(self, x: Tensor, near: Tensor | None) -> Tensor:
        """Return the coefficients (E, R, W) after all layers; ``near`` (F, E, C) is a factor of the first bias."""
        of_streams = x.unflatten(-1, (self.streams, -1)).movedim(2, 0)
        parts: Sequence[Tensor] = [part.flatten(2) for part in of_streams.split(self.sizes, 2)]
        layers = zip(self.so2_linears, self.so2_inter_norms, self.non_linearities)
        for index, (linear, norm, act) in enumerate(layers):
            scale = None if self.adam_so2_layer_scales is None else self.adam_so2_layer_scales[index]
            parts = self._layer(parts, linear, norm, act, scale, near if index == 0 else None)
        return torch.cat(list(parts), -1).unflatten(-1, (-1, self.width)).movedim(0, 2).flatten(2)

    def _shared(self, out: Tensor, before: Tensor) -> Tensor:
        """Return the coefficients times the weights of their streams, by the scalars before the layers."""
        return (out.unflatten(-1, (self.streams, -1)) * self.competition(before[:, 0])[:, None, :, None]).flatten(2)

    def competition(self, scalars: Tensor) -> Tensor:
        """Return the weights of the streams (E, F) by their scalars (E, W)."""
        of_streams = self.focus_compete_norm(scalars.unflatten(-1, (self.streams, -1)))
        logits = (of_streams * self.adamw_focus_compete_w.T).sum(-1)
        if self.focus_compete_bias is not None:
            logits = logits + self.focus_compete_bias
        return logits.softmax(-1) * (1 - FOCUS_SMOOTHING) + FOCUS_SMOOTHING / self.streams

    def _layer(
        self, parts: Sequence[Tensor], linear: OrderLinear, norm: nn.Module, act: nn.Module, scale: Tensor | None,
        near: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """Return the coefficients of each |m| (F, E, rows C) after one layer."""
        inputs = self._normed(parts, norm)
        outputs = [torch.bmm(part, matrix) for part, matrix in zip(inputs, linear.matrices())]
        if linear.bias0 is not None:
            bias = linear.bias0.view(self.streams, 1, -1)
            if near is not None:
                bias = bias * torch.cat([near] * (bias.shape[-1] // self.width), -1)
            outputs[0] = outputs[0] + nn.functional.pad(bias, (0, outputs[0].shape[-1] - bias.shape[-1]))
        outputs = self._activated(outputs, act)
        if scale is not None:
            outputs = [(part.unflatten(-1, (-1, self.width)) * scale[:, None, None]).flatten(2) for part in outputs]
        return [part + more for part, more in zip(parts, outputs)]

    def _normed(self, parts: Sequence[Tensor], norm: nn.Module) -> Sequence[Tensor]:
        if isinstance(norm, nn.Identity):
            return parts
        whole: Tensor = norm(torch.cat(list(parts), -1).unflatten(-1, (-1, self.width)))
        return whole.flatten(2).split([part.shape[-1] for part in parts], -1)

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
            whole = torch.cat([part.unflatten(-1, (-1, 2 * self.width)) for part in parts], 2).movedim(2, 0)
            left, right = whole.transpose(1, 2).chunk(2, -1)
            product: Tensor = act(left, right).transpose(1, 2).movedim(0, 2).flatten(2)
            return list(product.split([part.shape[-1] // 2 for part in parts], -1))
        return list(parts)
