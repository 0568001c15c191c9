"""Networks of one output and their gradients by the inputs, with a backward pass of both that is written out.

With ``t = tanh(x W + b)`` and ``d = 1 - t^2``, a layer is ``y = t idt + skip(x)``. The gradient G of the output goes
down by ``q = G d idt``, ``G_below = q W^T + skip^T(G)``. In the backward pass the gradient H by G goes up through the
layers, like a change of the inputs, and then the gradient P by y goes down::

    h = H W,                 H_above = h d idt + skip(H),      W gets H^T q,   t gets c = -2 h G t idt
    p = (P idt + c) d,       P_below = p W^T + skip^T(P),      W gets x^T p,   b gets p,   idt gets h G d + P t

For these autograd would take some 40 operations on each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.cpu.product import add_product_, product
from deepmd_ema.model.ops.twin import Kernel

# A rows of all networks, B rows of one, N inputs and M outputs of a layer


class GradientNetwork(Network):
    """A network of one output whose gradient comes from the kernel, if its layers are of tanh.

    Attributes:
        has_kernel: whether they are.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        *hidden, last = self.stack
        self.has_kernel = last.activation.name == "none" and last.weight.shape[1] == 1
        self.has_kernel &= all(layer.activation.name == "tanh" and layer.bias is not None for layer in hidden)

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output (B,) and its gradient with respect to the inputs (B, N)."""
        return values_and_gradients(x, [self], [x.shape[0]])


def values_and_gradients(x: Tensor, nets: Sequence[GradientNetwork], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) of networks and their gradients with respect to their inputs (A, N).

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: all of the same options.
        shares: rows of each network.
    """
    return _tanh_gradients(x, nets, shares) if nets[0].has_kernel else _one_by_one(x, nets, shares)


def _one_by_one(x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    found = [Network.value_and_gradient(net, own) for net, own in zip(nets, x.split(list(shares)), strict=True)]
    values, grads = zip(*found, strict=True)
    return torch.cat(values), torch.cat(grads)


def _by_hand(x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    flat: list[Tensor | None] = []
    for net in nets:
        *hidden, last = net.stack
        flat += [p for layer in hidden for p in (layer.weight, layer.bias, layer.idt)]
        flat += [last.weight, last.bias]
    values, grads = _TanhGradients.apply(x, tuple(shares), tuple(layer.copies for layer in hidden), *flat)
    return values, grads


_tanh_gradients = Kernel("tanh_gradients", _by_hand, _one_by_one)


class _TanhGradients(torch.autograd.Function):
    """Outputs and gradients of networks, which can be differentiated once by the inputs and the parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: tuple[int, ...], copies: tuple[int, ...], *flat: Any
    ) -> tuple[Tensor, Tensor]:
        values, grads = x.new_empty(x.shape[0]), x.new_empty(x.shape)
        nets = _nets(len(shares), copies, flat)
        for net, *own in zip(nets, x.split(shares), values.split(shares), grads.split(shares)):
            net.forward(*own)
        if any(ctx.needs_input_grad):
            ctx.shares, ctx.copies = shares, copies
            ctx.save_for_backward(*flat, *(part for net in nets for part in net.kept()))
            ctx.set_materialize_grads(False)
        return values, grads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor | None, grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_nets, saved, wanted = len(ctx.shares), ctx.saved_tensors, ctx.needs_input_grad
        num_flat = len(wanted) - 3
        nets = _nets(num_nets, ctx.copies, saved[:num_flat], wanted[3:])
        num_kept = (len(saved) - num_flat) // num_nets
        num_rows, start, below = sum(ctx.shares), 0, None
        if grad_values is None:
            grad_values = saved[0].new_zeros(num_rows)
        if wanted[0]:
            below = saved[0].new_empty(num_rows, saved[0].shape[0])
        for i, (net, count) in enumerate(zip(nets, ctx.shares)):
            net.keep(saved[num_flat + num_kept * i :][:num_kept])
            own = slice(start, start + count)
            given = None if grad_grads is None else grad_grads[own]
            net.backward(grad_values[own], given, None if below is None else below[own])
            start += count
        return below, None, None, *(part for net in nets for part in net.gradients())


class _Net:
    """The passes through one network.

    Args:
        copies: how often the input of each hidden layer is in its skip connection.
        flat: weight, bias and idt of each hidden layer, weight and bias of the last one.
        wanted: which of them get gradients.
    """

    def __init__(self, copies: Sequence[int], flat: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._layers = [
            _Layer(weight, bias, idt, number, trained)
            for weight, bias, idt, number, trained in zip(flat[0:-2:3], flat[1:-2:3], flat[2:-2:3], copies, wanted[::3])
        ]
        self._last, self._bias, self._top = flat[-2][:, 0], flat[-1], flat[-1]
        self._of_last, self._of_bias = flat[-1], flat[-1]

    def forward(self, x: Tensor, value: Tensor, grad: Tensor) -> None:
        """Write the output (B,) and its gradient (B, N) for the inputs (B, N)."""
        for layer in self._layers:
            x = layer.value(x)
        self._top = x
        torch.addmv(self._bias, x, self._last, out=value)
        by_y = self._last.expand(x.shape)
        for layer in reversed(self._layers):
            by_y = layer.gradient(by_y, grad if layer is self._layers[0] else None)

    def kept(self) -> list[Tensor]:
        """Return what the backward pass needs."""
        return [self._top, *(part for layer in self._layers for part in layer.kept)]

    def keep(self, kept: Sequence[Tensor]) -> None:
        """Take what the forward pass has kept."""
        self._top, number = kept[0], (len(kept) - 1) // len(self._layers)
        for i, layer in enumerate(self._layers):
            layer.kept = kept[1 + number * i :][:number]

    def backward(self, grad_value: Tensor, grad_grad: Tensor | None, below: Tensor | None) -> None:
        """Write the gradient by the inputs (B, N), if it is wanted, and keep those by the parameters."""
        self._of_last = torch.mv(self._top.T, grad_value)
        if grad_grad is not None:
            for layer in self._layers:
                grad_grad = layer.up(grad_grad)
            self._of_last += grad_grad.sum(0)
        self._of_bias = grad_value.sum(0, keepdim=True)
        by_y = torch.outer(grad_value, self._last)
        for layer in reversed(self._layers):
            by_z = layer.down(by_y)
            if layer is not self._layers[0]:
                by_y = layer.below(by_z, by_y)
            elif below is not None:
                layer.below(by_z, by_y, below)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients by the parameters."""
        hidden = [part for layer in self._layers for part in (layer.of_weight, layer.of_bias, layer.of_idt)]
        return [*hidden, self._of_last[:, None], self._of_bias]


@dataclass
class _Layer:
    """A hidden layer in the passes through it, in the letters of the formulas above.

    Attributes:
        weight: (N, M).
        bias: (M,).
        idt: (M,) or None.
        copies: how often x is in the skip connection.
        wanted: whether the parameters get gradients.
        kept: x (B, N), t, d, q and G (B, M).
    """

    weight: Tensor
    bias: Tensor
    idt: Tensor | None
    copies: int
    wanted: bool
    kept: Sequence[Tensor] = ()
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    of_idt: Tensor | None = None
    of_tanh: Tensor | None = None

    def value(self, x: Tensor) -> Tensor:
        """Return y (B, M)."""
        tanh = product(x, self.weight).add_(self.bias).tanh_()
        self.kept = (x, tanh)
        if not self.copies:
            return tanh
        return self._skip(x) + tanh if self.idt is None else torch.addcmul(self._skip(x), tanh, self.idt)

    def gradient(self, grad: Tensor, out: Tensor | None) -> Tensor:
        """Return G of the layer below (B, N) from that of this one (B, M)."""
        x, tanh = self.kept
        slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1)
        by_z = self._times_idt_(grad * slope)
        self.kept = (x, tanh, slope, by_z, grad)
        return self.below(by_z, grad, out)

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
        """Return p (B, M) from P."""
        x, tanh, slope, *_ = self.kept
        by_tanh = grad if self.idt is None else grad * self.idt
        by_z = by_tanh * slope if self.of_tanh is None else (by_tanh + self.of_tanh).mul_(slope)
        if self.wanted:
            self.of_bias = by_z.sum(0)
            if self.idt is not None:
                of_idt = (grad * tanh).sum(0)
                self.of_idt = of_idt if self.of_idt is None else of_idt.add_(self.of_idt)
            of_weight = self.of_weight
            self.of_weight = product(x.T, by_z) if of_weight is None else add_product_(of_weight, x.T, by_z)
        return by_z

    def below(self, by_z: Tensor, by_y: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the gradient by x (B, N) from those by ``x W + b`` and by y (B, M)."""
        out = product(by_z, self.weight.T, out)
        for part in by_y.chunk(self.copies, 1) if self.copies else ():
            out.add_(part)
        return out

    def _skip(self, x: Tensor) -> Tensor:
        return x if self.copies == 1 else torch.cat([x, x], 1)

    def _times_idt_(self, y: Tensor) -> Tensor:
        return y if self.idt is None else y.mul_(self.idt)


def _nets(number: int, copies: Sequence[int], flat: Sequence[Any], wanted: Sequence[bool] = ()) -> list[_Net]:
    size = len(flat) // number
    wanted = wanted or [True] * len(flat)
    return [_Net(copies, *(part[size * i : size * (i + 1)] for part in (flat, wanted))) for i in range(number)]
