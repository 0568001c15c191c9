"""The activation functions silu and silut, with a first and a second derivative in few passes over the numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepmd_ema.config.schema.text_options import ActivationName
from deepmd_ema.model.nn.activation import activation
from deepmd_ema.model.ops.twin import Kernel

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
        s = torch.sigmoid(z)
        second = torch.addcmul(s, s, s, value=-1) * (torch.addcmul(z, z, s, value=-2) + 2)
        return torch.ops.aten.silu_backward(grad_out, z), second * grad * grad_out


def _silut(z: Tensor, bend: float) -> Tensor:
    # the tanh is rarely reached; to ask costs one reading pass on a CPU, and a wait on a GPU
    if z.device.type == "cpu" and z.numel() and bool(z.detach().amax() < bend):
        found: Tensor = _Silu.apply(z)
        return found
    return _plain_silut(z, bend)


def _plain_silut(z: Tensor, bend: float) -> Tensor:
    return activation(f"silut:{bend}").value(z)


silu = Kernel("silu", _Silu.apply, functional.silu)
silut = Kernel("silut", _silut, _plain_silut)


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation function called ``name``, as a kernel if there is one."""
    read = ActivationName(name)
    if read.kind == "silut":
        return partial(silut, bend=read.bend)
    return silu if read.kind == "silu" else activation(name).value
