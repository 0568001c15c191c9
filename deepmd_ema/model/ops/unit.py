"""Rows of length 1, with a first and a second derivative in few passes over the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.model.ops.twin import Kernel

EPS = 1e-12  # shorter rows are divided by this number; as torch.nn.functional.normalize

# With y = x / |x|, forwards and backwards:
#   vjp(g)            = (g - y (y.g)) / |x|
#   its vjp by g      = (h - y (y.h)) / |x|
#   its vjp by x      = -((y.g) h + (y.h) g + (g.h - 3 (y.g) (y.h)) y) / |x|^2
# autograd takes some 50 passes for these, as it divides whole rows again and again


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * _inverse(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = _UnitVjp.apply(grad, *ctx.saved_tensors)
        return found


class _UnitVjp(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, x: Tensor) -> Tensor:
        inverse = _inverse(x)
        y = x * inverse
        return torch.addcmul(grad, y, _dot(y, grad), value=-1).mul_(inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        grad, x = ctx.saved_tensors
        inverse = _inverse(x)
        y = x * inverse
        along, grad_along = _dot(y, grad_out), _dot(y, grad)
        by_grad = torch.addcmul(grad_out, y, along, value=-1) * inverse
        both = _dot(grad, grad_out) - 3 * along * grad_along
        by_x = torch.addcmul(torch.addcmul(y * both, grad_out, grad_along), grad, along)
        return by_grad, by_x * -inverse.square()


def _inverse(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=EPS).reciprocal()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, keepdim=True)


def _plain(x: Tensor) -> Tensor:
    return functional.normalize(x, dim=-1, eps=EPS)


unit_rows = Kernel("unit_rows", _Unit.apply, _plain)
