"""Features from the moments of an environment, ``D = g^T g[:X]``, with their gradient and its own derivative.

Both are of second order in what they are given, so that one function V serves three times::

    V(D', g)[c, m]  = sum_x D'[m, x] g[c, x] + (m < X) sum_n D'[n, m] g[c, n]       the gradient by g
    the derivative of (h . V) by g is V(D', h), and by D' it is  h^T g[:X] + g^T h[:X]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.ops.twin import Kernel, applied

# A atoms, M channels, X axis channels


def _plain(moments: Tensor, axis: int) -> Tensor:
    return torch.bmm(moments.transpose(1, 2), moments[..., :axis]).flatten(1)


def _plain_vjp(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
    grad = grad.view(moments.shape[0], -1, axis)
    whole = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
    first = whole[..., :axis] + torch.bmm(moments, grad)
    return torch.cat([first, whole[..., axis:]], -1)


class _AxisFeatures(torch.autograd.Function):
    @staticmethod
    def forward(moments: Tensor, axis: int) -> Tensor:
        return _plain(moments, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(inputs[0])
        ctx.axis = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AxisFeaturesVjp.apply(grad, *ctx.saved_tensors, ctx.axis), None


class _AxisFeaturesVjp(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
        return _gradient(grad, moments, axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.axis = inputs[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad, moments = ctx.saved_tensors
        by_grad = by_moments = None
        if ctx.needs_input_grad[0]:
            left = torch.cat([change, moments], 1)
            right = torch.cat([moments[..., : ctx.axis], change[..., : ctx.axis]], 1)
            by_grad = torch.bmm(left.transpose(1, 2), right).flatten(1)
        if ctx.needs_input_grad[1]:
            by_moments = _gradient(grad, change, ctx.axis)
        return by_grad, by_moments, None


def _gradient(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
    grad = grad.view(moments.shape[0], -1, axis)
    out = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
    out[..., :axis] += torch.bmm(moments, grad)
    return out


axis_features = Kernel("axis_features", applied(_AxisFeatures), _plain)
axis_features_vjp = Kernel("axis_features_vjp", applied(_AxisFeaturesVjp), _plain_vjp)
