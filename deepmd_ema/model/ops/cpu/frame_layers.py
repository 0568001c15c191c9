"""Layers of linear maps and gates, with their gradient and the gradient of that written out, in portions of rows.

The coefficients of a row are groups x_m, m = 0, 1, ...: the first one has a part for each degree 0..L, the others two
for each degree from m on. A layer is, with products for each degree and sigma the logistic function::

    z_m = x_m W_m
    S = sigma([z_00, z_00 G])         z_00 the part of degree 0
    y_m = x_m + z_m S                 S of the degrees from m on

The last layer is ``y_m = x_m + x_m W_m``. In the notation below g is the gradient by y, t a change of x, and a bar is a
gradient in the backward pass of a loss of ``g . J t``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_ema.model.ops.cpu.engine import Evaluation, portions, value_and_vjp
from deepmd_ema.model.ops.cpu.product import add_product_, product

# E rows, C channels, L largest degree, M largest m

Parts = list[Tensor]


class Layer(NamedTuple):
    """Weights of a layer.

    Attributes:
        maps: W_m, square.
        gates: G (C, L C); None of the last layer.
    """

    maps: Sequence[Tensor]
    gates: Tensor | None


def frame_layers(x: Tensor, layers: Sequence[Layer], numbers_in_cache: int) -> Tensor:
    """Return the coefficients (E, N) after all layers.

    Args:
        x: (E, N) before, the groups side by side.
        layers: at least one; only the last one has no gates.
        numbers_in_cache: of a portion, for each thread.
    """
    widths = [len(one) for one in layers[0].maps]
    flat = [part for one in layers for part in (*one.maps, *([] if one.gates is None else [one.gates]))]
    return value_and_vjp(
        _FrameLayers(widths, portions(len(x), sum(widths) * x.element_size() // 4, 2 * numbers_in_cache)), [x], flat
    )[0]


class _Values(NamedTuple):
    """Of one layer and portion: x, and of layers with gates z and S."""

    x: Parts
    z: Parts
    s: Tensor | None


class _Cotangents(NamedTuple):
    """Of one layer and portion: g, the gradients by z, by S and by the argument of sigma."""

    g: Parts
    z: Parts
    s: Tensor | None
    q: Tensor | None


class _Changes(NamedTuple):
    """Of one layer and portion: those of x, z, of the argument of sigma and of S."""

    x: Parts
    z: Parts
    q: Tensor | None
    s: Tensor | None


class _FrameLayers(Evaluation):
    """The coefficients (E, N) after all layers.

    Args:
        widths: numbers of each group.
        parts: portions of rows.
    """

    def __init__(self, widths: list[int], parts: list[slice]) -> None:
        super().__init__()
        self._widths, self._parts = widths, parts
        self._values: list[list[_Values]] = []

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return the coefficients after all layers."""
        out = torch.empty_like(inputs[0])
        *gated, last = self._layers(weights)
        for part in self._parts:
            x, kept = self._split(inputs[0][part]), []
            for layer in gated:
                z = [product(a, w) for a, w in zip(x, layer.maps)]
                s = _arguments(z[0], layer).sigmoid_()
                kept.append(_Values(x, z, s))
                x = [_plus_times(a, b, s, m) for m, (a, b) in enumerate(zip(x, z))]
            kept.append(_Values(x, [], None))
            self._values.append(kept)
            self._join(out[part], [add_product_(a.clone(), a, w) for a, w in zip(x, last.maps)])
        return out

    def gradient(self, grad: Tensor, weights: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
        """Return the gradient by x, and those of all layers."""
        found = torch.empty_like(grad)
        *gated, last = self._layers(weights)
        cotangents = []
        for part, values in zip(self._parts, self._values):
            g = self._split(grad[part])
            kept = [_Cotangents(g, g, None, None)]
            g = [add_product_(a.clone(), a, w.T) for a, w in zip(g, last.maps)]
            for layer, v in reversed(list(zip(gated, values))):
                assert v.s is not None
                by_s = _sum_times(g, v.z, v.s)
                by_q = torch.ops.aten.sigmoid_backward(by_s, v.s)
                by_z = [_times(a, v.s, m) for m, a in enumerate(g)]
                _add_arguments_(by_z[0], by_q, layer)
                kept.append(_Cotangents(g, by_z, by_s, by_q))
                g = [add_product_(a.clone(), b, w.T) for a, b, w in zip(g, by_z, layer.maps)]
            self._join(found[part], g)
            cotangents.append(kept[::-1])
        return (found,), cotangents

    def change(self, changes: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the change of the coefficients, and those of all layers."""
        out = torch.empty_like(changes[0])
        *gated, last = self._layers(weights)
        found = []
        for part, values in zip(self._parts, self._values):
            x, kept = self._split(changes[0][part]), []
            for layer, v in zip(gated, values):
                assert v.s is not None
                z = [product(a, w) for a, w in zip(x, layer.maps)]
                q = _arguments(z[0], layer)
                s = torch.ops.aten.sigmoid_backward(q, v.s)
                kept.append(_Changes(x, z, q, s))
                x = [_plus_times(_plus_times(a, b, v.s, m), c, s, m) for m, (a, b, c) in enumerate(zip(x, z, v.z))]
            kept.append(_Changes(x, [], None, None))
            found.append(kept)
            self._join(out[part], [add_product_(a.clone(), a, w) for a, w in zip(x, last.maps)])
        return out, found

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return the gradients by x and by the weights."""
        found = torch.empty_like(grad)
        layers = self._layers(weights)
        sums = self._layers([torch.zeros_like(weight) for weight in weights])
        for index, (part, values) in enumerate(zip(self._parts, self._values)):
            bar = self._split(grad[part])
            before = None if past is None else list(zip(past[0][index], past[1][index]))
            for k in range(len(layers) - 1, -1, -1):
                bar = _pulled(bar, layers[k], values[k], None if before is None else before[k], sums[k])
            self._join(found[part], bar)
        return [found], [part for one in sums for part in (*one.maps, *([] if one.gates is None else [one.gates]))]

    def _layers(self, weights: Sequence[Any]) -> list[Layer]:
        count = len(self._widths)
        starts = range(0, len(weights), count + 1)
        return [Layer(weights[n : n + count], weights[n + count] if n + count < len(weights) else None) for n in starts]

    def _split(self, rows: Tensor) -> Parts:
        return [part.contiguous() for part in rows.split(self._widths, 1)]

    def _join(self, out: Tensor, parts: Parts) -> None:
        for place, part in zip(out.split(self._widths, 1), parts):
            place.copy_(part)


def _pulled(
    bar: Parts, layer: Layer, v: _Values, past: tuple[_Cotangents, _Changes] | None, sums: Layer
) -> Parts:  # fmt: skip
    """Return the gradient by x from that by y, and add those by the weights to ``sums``."""
    if layer.gates is None or v.s is None:
        by_z = bar
    else:
        by_z = [_times(a, v.s, m) for m, a in enumerate(bar)]
        by_s = _sum_times(bar, v.z, v.s)
        if past is not None:
            cot, change = past
            assert cot.s is not None
            assert change.q is not None
            assert change.s is not None
            by_z = [_plus_times(a, b, change.s, m) for m, (a, b) in enumerate(zip(by_z, cot.g))]
            by_s = by_s.add_(_sum_times(cot.g, change.z, v.s))
            # sigma'' = sigma' (1 - 2 sigma), and the factor sigma' follows below
            by_s.addcmul_(cot.s * change.q, 1 - 2 * v.s)
        by_q = torch.ops.aten.sigmoid_backward(by_s, v.s)
        _add_arguments_(by_z[0], by_q, layer)
        width = len(layer.gates)
        assert sums.gates is not None
        sums.gates.addmm_(v.z[0][:, :width].T, by_q[:, width:])
        if past is not None:
            cot, change = past
            assert cot.q is not None
            sums.gates.addmm_(change.z[0][:, :width].T, cot.q[:, width:])
    for m, total in enumerate(sums.maps):
        add_product_(total, v.x[m].T, by_z[m])
        if past is not None:
            add_product_(total, past[1].x[m].T, past[0].z[m])
    return [add_product_(a.clone(), b, w.T) for a, b, w in zip(bar, by_z, layer.maps)]


def _arguments(z: Tensor, layer: Layer) -> Tensor:
    """Return the arguments of sigma (E, (L + 1) C) from the first group."""
    assert layer.gates is not None
    scalar = z[:, : len(layer.gates)]
    return torch.cat([scalar, torch.mm(scalar, layer.gates)], 1)


def _add_arguments_(by_z: Tensor, by_q: Tensor, layer: Layer) -> None:
    """Add to the gradient by the first group that by the arguments of sigma."""
    assert layer.gates is not None
    width = len(layer.gates)
    by_z[:, :width].add_(by_q[:, :width]).addmm_(by_q[:, width:], layer.gates.T)


def _of_group(s: Tensor, width: int, m: int) -> Tensor:
    """Return S of the degrees of a group with so many numbers, for broadcasting."""
    return s if not m else s[:, s.shape[1] - width // 2 :].unsqueeze(1)


def _pairs(x: Tensor, m: int) -> Tensor:
    return x if not m else x.view(len(x), 2, -1)


def _times(x: Tensor, s: Tensor, m: int) -> Tensor:
    """Return ``x_m S``."""
    return (_pairs(x, m) * _of_group(s, x.shape[1], m)).view(x.shape)


def _plus_times(a: Tensor, b: Tensor, s: Tensor, m: int) -> Tensor:
    """Return ``a_m + b_m S``."""
    return torch.addcmul(_pairs(a, m), _pairs(b, m), _of_group(s, a.shape[1], m)).view(a.shape)


def _sum_times(a: Parts, b: Parts, s: Tensor) -> Tensor:
    """Return ``sum_m a_m b_m`` (E, (L + 1) C), that of both signs of m together."""
    found = a[0] * b[0]
    for m in range(1, len(a)):
        x, y = _pairs(a[m], m), _pairs(b[m], m)
        into = found[:, found.shape[1] - x.shape[2] :]
        into.addcmul_(x[:, 0], y[:, 0]).addcmul_(x[:, 1], y[:, 1])
    return found
