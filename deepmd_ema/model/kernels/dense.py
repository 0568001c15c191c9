"""A network of one output and its gradient by the inputs, with a backward pass of both that is written out.

With ``t = tanh(x W + b)`` and ``d = 1 - t^2``, a layer is ``y = t idt + skip(x)``. The gradient G of the output goes down by
``q = G d idt``, ``G_below = q W^T + skip^T(G)``. In the backward pass the gradient H by G goes up through the layers, like a
change of the inputs, and then the gradient P by y goes down::

    h = H W,                 H_above = h d idt + skip(H),      W gets H^T q,   t gets c = -2 h G t idt
    p = (P idt + c) d,       P_below = p W^T + skip^T(P),      W gets x^T p,   b gets p,   idt gets h G d + P t

For these autograd would take some 40 operations on each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.kernels.product import add_product_, product
from deepmd_ema.model.kernels.twin import Kernel
from deepmd_ema.model.nn.layers import Network

# B rows, N inputs and M outputs of a layer

Evaluate = Callable[[Tensor, Network], tuple[Tensor, Tensor]]


class GradientNetwork(Network):
    """A network whose output and gradient come from the fastest function that serves it, chosen at construction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._evaluate: Evaluate = _tanh_gradient if _is_tanh_net(self) else _by_layers

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B,) and its gradient with respect to the inputs (B, N)."""
        return self._evaluate(x, self)


def _by_layers(x: Tensor, net: Network) -> tuple[Tensor, Tensor]:
    return Network.value_and_gradient(net, x)


def _is_tanh_net(net: Network) -> bool:
    *hidden, last = net.stack
    return (
        all(layer.activation.name == "tanh" and layer.bias is not None for layer in hidden)
        and last.activation.name == "none"
        and last.bias is not None
        and last.weight.shape[1] == 1
    )


def _by_hand(x: Tensor, net: Network) -> tuple[Tensor, Tensor]:
    *hidden, last = net.stack
    flat = [p for layer in hidden for p in (layer.weight, layer.bias, layer.idt)]
    copies = tuple(layer.copies for layer in hidden)
    value, grad = _TanhGradient.apply(x, copies, *flat, last.weight, last.bias)
    return value, grad


_tanh_gradient = Kernel("tanh_gradient", _by_hand, _by_layers)


class _TanhGradient(torch.autograd.Function):
    """The output and its gradient, which can be differentiated once by the inputs and the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: tuple[int, ...], *flat: Any) -> tuple[Tensor, Tensor]:
        layers, last = list(_layers(copies, flat)), flat[-2][:, 0]
        for layer in layers:
            x = layer.value(x)
        value, grad = torch.addmv(flat[-1], x, last), last.expand(x.shape)
        for layer in reversed(layers):
            grad = layer.gradient(grad)
        if any(ctx.needs_input_grad):
            ctx.copies = copies
            ctx.save_for_backward(*flat, x, *(part for layer in layers for part in layer.kept))
            ctx.set_materialize_grads(False)
        return value, grad

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor | None, grad_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        num_flat = 3 * len(ctx.copies) + 2
        flat, (x, *kept) = ctx.saved_tensors[:num_flat], ctx.saved_tensors[num_flat:]
        layers, last = list(_layers(ctx.copies, flat)), flat[-2][:, 0]
        for i, layer in enumerate(layers):
            layer.kept, layer.wanted = kept[_KEPT * i : _KEPT * (i + 1)], ctx.needs_input_grad[2 + 3 * i]
        of_last = torch.zeros_like(last)
        if grad_grad is not None:
            for layer in layers:
                grad_grad = layer.up(grad_grad)
            of_last = grad_grad.sum(0)
        if grad_value is None:
            grad_value = x.new_zeros(len(x))
        of_last.addmv_(x.T, grad_value)
        grad = torch.outer(grad_value, last)
        for layer in reversed(layers):
            grad = layer.down(grad)
        of_flat = [part for layer in layers for part in (layer.of_weight, layer.of_bias, layer.of_idt)]
        return grad, None, *of_flat, of_last[:, None], grad_value.sum(0, keepdim=True)


_KEPT = 5  # tensors of a layer for the backward pass: x, t, d, q, G


@dataclass
class _Layer:
    """A hidden layer in the four passes through it, in the letters of the formulas above.

    Attributes:
        weight: (N, M).
        bias: (M,).
        idt: (M,) or None.
        copies: how often x is in the skip connection.
        kept: x (B, N), t, d, q and G (B, M).
        wanted: whether the parameters get gradients.
    """

    weight: Tensor
    bias: Tensor
    idt: Tensor | None
    copies: int
    kept: Any = ()
    wanted: bool = True
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    of_idt: Tensor | None = None
    of_tanh: Tensor | None = None

    def value(self, x: Tensor) -> Tensor:
        """Return y (B, M)."""
        tanh = product(x, self.weight).add_(self.bias).tanh_()
        self.kept = [x, tanh]
        if not self.copies:
            return tanh
        return self._skip(x) + tanh if self.idt is None else torch.addcmul(self._skip(x), tanh, self.idt)

    def gradient(self, grad: Tensor) -> Tensor:
        """Return G of the layer below (B, N) from that of this one (B, M)."""
        tanh = self.kept[1]
        slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1)
        by_z = self._times_idt_(grad * slope)
        self.kept += [slope, by_z, grad]
        return self._below(by_z, grad)

    def up(self, grad_grad: Tensor) -> Tensor:
        """Return H of the layer above (B, M) from that of this one (B, N)."""
        _, tanh, slope, by_z, grad = self.kept
        if self.wanted:
            self.of_weight = product(grad_grad.T, by_z)
        change = product(grad_grad, self.weight)
        of_slope = change * grad
        if self.wanted and self.idt is not None:
            self.of_idt = (of_slope * slope).sum(0)
        self.of_tanh = self._times_idt_(of_slope.mul_(tanh).mul_(-2))
        above = self._times_idt_(change.mul_(slope))
        return above.add_(self._skip(grad_grad)) if self.copies else above

    def down(self, grad: Tensor) -> Tensor:
        """Return P of the layer below (B, N) from that of this one (B, M)."""
        x, tanh, slope, *_ = self.kept
        by_z = grad if self.idt is None else grad * self.idt
        by_z = by_z * slope if self.of_tanh is None else (by_z + self.of_tanh).mul_(slope)
        if self.wanted:
            self.of_bias = by_z.sum(0)
            if self.idt is not None:
                of_idt = (grad * tanh).sum(0)
                self.of_idt = of_idt if self.of_idt is None else self.of_idt.add_(of_idt)
            self.of_weight = (
                product(x.T, by_z) if self.of_weight is None else add_product_(self.of_weight, x.T, by_z)
            )
        return self._below(by_z, grad)

    def _skip(self, x: Tensor) -> Tensor:
        return x if self.copies == 1 else torch.cat([x, x], 1)

    def _below(self, by_z: Tensor, by_y: Tensor) -> Tensor:
        out = product(by_z, self.weight.T)
        for part in by_y.chunk(self.copies, 1) if self.copies else ():
            out.add_(part)
        return out

    def _times_idt_(self, y: Tensor) -> Tensor:
        return y if self.idt is None else y.mul_(self.idt)


def _layers(copies: tuple[int, ...], flat: Any) -> Iterator[_Layer]:
    for i, number in enumerate(copies):
        yield _Layer(*flat[3 * i : 3 * i + 3], copies=number)
