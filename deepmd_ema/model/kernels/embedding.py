"""Values of a network of tanh layers, with a backward pass that is written out.

With ``t = tanh(x W + b)`` a layer is ``y = t + skip(x)``. The gradient P of the output goes down by
``p = P (1 - t^2)``, ``P_below = p W^T + skip^T(P)``, and W gets ``x^T p``, b gets ``p``. Autograd would take some 10
operations on each layer, which for the few rows of a series are most of its time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.twin import Kernel

# B rows, N inputs and M outputs of a layer


def embed(x: Tensor, net: Network) -> Tensor:
    """Return ``net(x)`` (..., M) of inputs (..., N), in their precision."""
    if not all(layer.activation.name == "tanh" and layer.idt is None and layer.bias is not None for layer in net.stack):
        return net(x)
    return _tanh_network(x.flatten(0, -2), net).unflatten(0, x.shape[:-1])


def _plain(x: Tensor, net: Network) -> Tensor:
    out: Tensor = net(x)
    return out


def _by_hand(x: Tensor, net: Network) -> Tensor:
    flat = [p for layer in net.stack for p in (layer.weight, layer.bias)]
    out: Tensor = _TanhNetwork.apply(x, tuple(layer.copies for layer in net.stack), *flat)[0]
    return out


class _TanhNetwork(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, copies: tuple[int, ...], *flat: Tensor) -> tuple[Tensor, ...]:
        tanhs, outputs = [], [x]
        for weight, bias, number in zip(flat[0::2], flat[1::2], copies):
            below = outputs[-1]
            tanh = torch.addmm(bias.to(x.dtype), below, weight.to(x.dtype)).tanh_()
            tanhs.append(tanh)
            # also without a skip connection a tensor of its own: no output of a function may be another one
            outputs.append(_split(tanh, number).add(below.unsqueeze(1)).flatten(1) if number else tanh.clone())
        return outputs[-1], *outputs[1:-1], *tanhs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, ctx.copies, *flat = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, *output[1:], *flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        size, saved = len(ctx.copies), ctx.saved_tensors
        inputs, tanhs, flat = saved[:size], saved[size : 2 * size], saved[2 * size :]
        found: list[Tensor] = []
        for i in reversed(range(size)):
            by_z = torch.ops.aten.tanh_backward(grad, tanhs[i])
            weight, bias = flat[2 * i : 2 * i + 2]
            found = [torch.mm(inputs[i].T, by_z).to(weight.dtype), by_z.sum(0).to(bias.dtype), *found]
            if i or ctx.needs_input_grad[0]:
                below = torch.mm(by_z, weight.T.to(by_z.dtype))
                for part in grad.chunk(ctx.copies[i], 1) if ctx.copies[i] else ():
                    below += part
                grad = below
        return grad if ctx.needs_input_grad[0] else None, None, *found


def _split(x: Tensor, number: int) -> Tensor:
    return x.view(x.shape[0], number, x.shape[1] // number)


_tanh_network = Kernel("tanh_network", _by_hand, _plain)
