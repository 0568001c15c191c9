"""Functions whose first and second derivatives are written out, where autograd takes many passes.

There is no third derivative, which Hessians in a loss need: these are made of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A atoms, C channels, X axis channels


class Rule(NamedTuple):
    """A function of a tensor x and an option, and its derivatives.

    Attributes:
        value: of (x, option).
        vjp: of (x, option, gradient by the value), the gradient by x.
        vjp_of_vjp: of (x, option, gradient by the value, gradient by that of x), those by the last
            two but one: x and the gradient by the value.
    """

    value: Callable[[Tensor, Any], Tensor]
    vjp: Callable[[Tensor, Any, Tensor], Tensor]
    vjp_of_vjp: Callable[[Tensor, Any, Tensor, Tensor], tuple[Tensor, Tensor]]

    def __call__(self, x: Tensor, option: Any = None) -> Tensor:
        """Return the value, for autograd or ``torch.func`` to differentiate."""
        value: Tensor = _Value.apply(x, option, self)
        return value


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, option: Any, rule: Rule) -> Tensor:
        return rule.value(x, option)

    # separate, as torch.func needs it
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.option_and_rule = inputs[1:]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Vjp.apply(*ctx.saved_tensors, grad, *ctx.option_and_rule), None, None


class _Vjp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, grad: Tensor, option: Any, rule: Rule) -> Tensor:
        return rule.vjp(x, option, grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.option_and_rule = inputs[2:]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        x, grad = ctx.saved_tensors
        option, rule = ctx.option_and_rule
        return *rule.vjp_of_vjp(x, option, grad, change), None, None


def _silu_vjp_of_vjp(
    z: Tensor, _: None, grad: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    # with s = sigmoid(z): silu'' = s (1 - s) (2 + z (1 - 2 s)). s is made again: to keep it would
    # take as much memory as z, for every layer
    s = torch.sigmoid(z)
    second = torch.addcmul(s, s, s, value=-1) * (torch.addcmul(z, z, s, value=-2) + 2)
    # silu'(z) is linear in the gradient: its gradient by that is silu'(z) times the change
    return second * grad * change, torch.ops.aten.silu_backward(change, z)


silu = Rule(
    lambda z, _: torch.nn.functional.silu(z),
    lambda z, _, grad: torch.ops.aten.silu_backward(grad, z),
    _silu_vjp_of_vjp,
)


def _by_moments(moments: Tensor, num_axis: int, grad: Tensor) -> Tensor:
    """Return the gradient by moments as both factors of the products, without a sum with zeros."""
    out = torch.bmm(moments[..., :num_axis], grad)
    # added in place to the first X channels, which are in both factors
    out[..., :num_axis].baddbmm_(moments, grad.mT)
    return out


def _by_moments_and_grad(
    moments: Tensor, num_axis: int, grad: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    # (A, X, C): the change of M[:, :X]^T M through both factors, as the moments change
    by_grad = torch.bmm(moments[..., :num_axis].mT, change)
    by_grad.baddbmm_(change[..., :num_axis].mT, moments)
    # linear in the moments, and symmetric in these and the change
    return _by_moments(change, num_axis, grad), by_grad


# M[:, :X]^T M (A, X, C) of moments M (A, 3, C)
moment_products = Rule(
    lambda moments, num_axis: torch.bmm(moments[..., :num_axis].mT, moments),
    _by_moments,
    _by_moments_and_grad,
)


def symmetrized(features: Tensor, vectors: Tensor, num_axis: int) -> Tensor:
    """Do :func:`deepmd_ema.model.ops.reference.symmetrized`."""
    return moment_products(
        torch.bmm(vectors.transpose(1, 2), features), num_axis
    ).flatten(1)


def _normal(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``n = (x - mean) r`` over the last dimension, the mean and r.

    ``r = (variance + eps)^-1/2``.
    """
    return torch.native_layer_norm(x, x.shape[-1:], None, None, eps)


def _by_normal(x: Tensor, eps: float, *grads: Tensor) -> list[Tensor]:
    """Return ``L(g) = r (g - mean(g) - n mean(g n))`` of each g, the gradient by x from that by n.

    L is symmetric.
    """
    _, *statistics = _normal(x, eps)
    backward = torch.ops.aten.native_layer_norm_backward
    return [
        backward(g, x, x.shape[-1:], *statistics, None, None, [True, False, False])[0]
        for g in grads
    ]


def _by_normal_and_grad(
    x: Tensor, eps: float, grad: Tensor, change: Tensor
) -> tuple[Tensor, Tensor]:
    # with a = mean(g n), b = mean(h n) and q = mean(g L(h)) of the gradient g and the change h:
    # L(h) by g, -L(r (b g + a h)) - r q n by x
    normal, _, scale = _normal(x, eps)
    a, b = ((factor * normal).mean(-1, keepdim=True) for factor in (grad, change))
    by_grad, by_x = _by_normal(
        x, eps, change, torch.addcmul(b * grad, a, change) * scale
    )
    stretch = (grad * by_grad).mean(-1, keepdim=True) * scale
    return -torch.addcmul(by_x, stretch, normal), by_grad


normal = Rule(
    lambda x, eps: _normal(x, eps)[0],
    lambda x, eps, grad: _by_normal(x, eps, grad)[0],
    _by_normal_and_grad,
)


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Do :func:`deepmd_ema.model.nn.norm.normalised`."""
    return normal(x, eps) * weight + bias
