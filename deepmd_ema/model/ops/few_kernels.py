"""Operations of message passing whose first and second derivatives take few kernels, for a GPU.

There is no third derivative, which Hessians in a loss need: these are made of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# A atoms, C channels, X axis channels, M numbers of the last dimension


class _MomentProducts(torch.autograd.Function):
    """``M[:, :X]^T M`` (A, X, C) of moments (A, 3, C)."""

    @staticmethod
    def forward(moments: Tensor, num_axis: int) -> Tensor:
        return torch.bmm(moments[..., :num_axis].mT, moments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _MomentProductsVjp.apply(grad, *ctx.saved_tensors), None


class _MomentProductsVjp(torch.autograd.Function):
    """Gradient by the moments (A, 3, C) from that by the products (A, X, C)."""

    @staticmethod
    def forward(grad: Tensor, moments: Tensor) -> Tensor:
        return _by_moments(grad, moments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor]:
        grad, moments = ctx.saved_tensors
        num_axis = grad.shape[1]
        by_grad = torch.bmm(moments[..., :num_axis].mT, change)
        by_grad.baddbmm_(change[..., :num_axis].mT, moments)
        # it is linear in the moments, and symmetric in these and the change
        return by_grad, _by_moments(grad, change)


def _by_moments(grad: Tensor, moments: Tensor) -> Tensor:
    """Return the gradient by moments as both factors of the products, without a sum with zeros."""
    num_axis = grad.shape[1]
    out = torch.bmm(moments[..., :num_axis], grad)
    out[..., :num_axis].baddbmm_(moments, grad.mT)
    return out


class _Standardised(torch.autograd.Function):
    """``n = (x - mean) / sqrt(variance + eps)`` over the last dimension, and ``1 / sqrt(variance + eps)``."""

    @staticmethod
    def forward(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        return _StandardisedVjp.apply(grad, *ctx.saved_tensors), None


class _StandardisedVjp(torch.autograd.Function):
    """``L(g) = r (g - mean(g) - n mean(g n))``, the gradient by x from g, that by n; r the inverse root of above.

    L is symmetric. With a change h of its value, ``a = mean(g n)``, ``b = mean(h n)`` and ``q = mean(h L(g))``::

        by g: L(h)        by x: -L(r (b g + a h)) - r q n
    """

    @staticmethod
    def forward(grad: Tensor, x: Tensor, normal: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        return _by_standardised(grad, x, mean, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        grad, x, normal, mean, scale, by_x = ctx.saved_tensors
        along_grad = (grad * normal).mean(-1, keepdim=True)
        along_change = (change * normal).mean(-1, keepdim=True)
        stretch = (change * by_x).mean(-1, keepdim=True) * scale
        by_normal = torch.addcmul(along_change * grad, along_grad, change) * scale
        by_input = _by_standardised(by_normal, x, mean, scale)
        by_input = -torch.addcmul(by_input, stretch, normal)
        return _by_standardised(change, x, mean, scale), by_input, None, None, None


def _by_standardised(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    only_x = [True, False, False]
    found: Tensor = torch.ops.aten.native_layer_norm_backward(grad, x, x.shape[-1:], mean, scale, None, None, only_x)[0]
    return found


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Do :func:`deepmd_ema.model.nn.norm.normalised`."""
    normal: Tensor = _Standardised.apply(x, eps)[0]
    return normal * weight + bias


def symmetrized(features: Tensor, vectors: Tensor, num_axis: int) -> Tensor:
    """Do :func:`deepmd_ema.model.ops.reference.symmetrized`."""
    moments = torch.bmm(vectors.transpose(1, 2), features)
    products: Tensor = _MomentProducts.apply(moments, num_axis)
    return products.flatten(1)
