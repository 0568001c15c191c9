"""The activation functions silu and silut, with a first and a second derivative in few passes over the numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.model.nn.activation import Activation

# numbers from which this pays: a function with its own derivatives takes 0.35 ms more to call in torch.func.vjp
MIN_NUMBERS = 1 << 14

# With s = sigmoid(z), silu(z) = z s:
#   silu'(z)  = s (1 + z (1 - s))
#   silu''(z) = s (1 - s) (2 + z (1 - 2 s))


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor) -> Tensor:
        return functional.silu(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found: Tensor = _SiluVjp.apply(grad, *ctx.saved_tensors)
        return found


class _SiluVjp(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, z: Tensor) -> Tensor:
        return torch.ops.aten.silu_backward(grad, z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor]:
        grad, z = ctx.saved_tensors
        # made again: to keep it would take as much memory as z, for every layer
        s = torch.sigmoid(z)
        second = torch.addcmul(s, s, s, value=-1) * (torch.addcmul(z, z, s, value=-2) + 2)
        return torch.ops.aten.silu_backward(grad_out, z), second * grad * grad_out


def activated(z: Tensor, function: Activation) -> Tensor:
    """Return ``function(z)``."""
    # the tanh of silut is rarely reached, and to look for it costs one reading pass
    bend = function.bend
    if bend is None or z.numel() < MIN_NUMBERS or (bend < math.inf and not bool(z.detach().amax() < bend)):
        return function.value(z)
    found: Tensor = _Silu.apply(z)
    return found


def activated_on_gpu(z: Tensor, function: Activation) -> Tensor:
    """Return ``function(z)``: a kernel for silu and one for its derivative, where autograd launches seven."""
    if function.bend != math.inf:
        return function.value(z)
    values: Tensor = _Silu.apply(z)
    return values
