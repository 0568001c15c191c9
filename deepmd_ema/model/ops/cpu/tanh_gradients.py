"""Networks of tanh layers with one output and their gradients by the inputs; the backward pass of both written out.

With ``t = tanh(x W + b)`` and ``d = 1 - t^2``, a layer is ``y = t idt + skip(x)``. The gradient G of the output goes
down by ``q = G d idt``, ``G_below = q W^T + skip^T(G)``. In the backward pass the gradient H by G goes up through the
layers, like a change of the inputs, and then the gradient P by y goes down::

    h = H W,                 H_above = h d idt + skip(H),      W gets H^T q,   t gets c = -2 h G t idt
    p = (P idt + c) d,       P_below = p W^T + skip^T(P),      W gets x^T p,   b gets p,   idt gets h G d + P t

Autograd takes some 40 operations for each layer. On a GPU, where launching an operation costs more than its arithmetic,
T networks are evaluated together, as stacks of matrices (T, B, ...) in place of (B, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network

# A rows of all networks, B rows of one of T, N inputs and M outputs of a layer


def stacked_values_and_gradients(x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) and their gradients with respect to the inputs (A, N), of equal tanh networks.

    A network of few rows has rows of zeros after them.

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: with a last layer of one output.
        shares: rows of each network.
    """
    most = max(shares)
    rows = nn.utils.rnn.pad_sequence(list(x.split(list(shares))), batch_first=True)  # (T, B, N)
    flat = [None if p[0] is None else _stack(p) for p in zip(*map(_parameters, nets))]
    copies = tuple(layer.copies for layer in nets[0].layers[:-1])
    values, grads = _ValuesAndGradients.apply(rows, copies, *flat)
    if min(shares) == most:
        return values.flatten(), grads.flatten(0, 1)
    own = [slice(t * most, t * most + count) for t, count in enumerate(shares)]
    flat_values, flat_grads = values.flatten(), grads.flatten(0, 1)
    return torch.cat([flat_values[at] for at in own]), torch.cat([flat_grads[at] for at in own])


def _parameters(net: Network) -> list[Tensor | None]:
    *hidden, last = net.layers
    return [*(p for layer in hidden for p in (layer.weight, layer.bias, layer.idt)), last.weight, last.bias]


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return (T, N, M) of weights, (T, 1, M) of vectors."""
    stacked = torch.stack(list(parameters))
    return stacked if stacked.ndim > 2 else stacked[:, None]


class _Layer(NamedTuple):
    """Parameters of a hidden layer of T networks."""

    weight: Tensor  # (T, N, M)
    bias: Tensor  # (T, 1, M)
    idt: Tensor | None  # (T, 1, M)
    copies: int  # of x in the skip connection

    def times_idt_(self, y: Tensor) -> Tensor:
        return y if self.idt is None else y.mul_(self.idt)

    def add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        return y if not self.copies else y.add_(x if self.copies == 1 else torch.cat([x, x], -1))

    def below(self, by_z: Tensor, by_y: Tensor) -> Tensor:
        """Return the gradient by x (T, B, N) from those by ``x W + b`` and by y (T, B, M)."""
        out = torch.bmm(by_z, self.weight.mT)
        for part in by_y.chunk(self.copies, -1) if self.copies else ():
            out.add_(part)
        return out


class _Values(NamedTuple):
    """Values of a hidden layer."""

    x: Tensor  # (T, B, N)
    tanh: Tensor  # (T, B, M), t
    slope: Tensor  # (T, B, M), d
    by_z: Tensor  # (T, B, M), q
    grad: Tensor  # (T, B, M), G


class _ValuesAndGradients(torch.autograd.Function):
    """Outputs and gradients, which can be differentiated once by the inputs and the parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: tuple[int, ...], *flat: Any) -> tuple[Tensor, Tensor]:
        values, grads, kept = _evaluate(x, flat, copies)
        if any(ctx.needs_input_grad):
            ctx.copies, ctx.num_flat = copies, len(flat)
            ctx.save_for_backward(*flat, *kept)
            ctx.set_materialize_grads(False)  # a loss of energies alone has no gradient H, nor the work for it
        return values, grads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor | None, grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, kept = ctx.saved_tensors[: ctx.num_flat], ctx.saved_tensors[ctx.num_flat :]
        if grad_values is None:
            grad_values = flat[0].new_zeros(kept[0].shape[:-1])
        below, of_flat = _differentiate(flat, kept, grad_values, grad_grads, ctx.copies, ctx.needs_input_grad[0])
        return below if ctx.needs_input_grad[0] else None, None, *of_flat


def _evaluate(x: Tensor, flat: Sequence[Any], copies: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the outputs (T, B), their gradients (T, B, N), and the values that the backward pass needs."""
    layers, (last, bias) = _layers(flat, copies), flat[-2:]
    inputs, tanhs, kept = [x], [], []
    for layer in layers:
        tanhs.append(torch.bmm(x, layer.weight).add_(layer.bias).tanh_())
        # a copy, because the skip connection is added in place and t is kept
        y = tanhs[-1].clone() if layer.idt is None else tanhs[-1] * layer.idt
        x = layer.add_skip(y, x)
        inputs.append(x)
    grad = last.mT.expand(x.shape)
    for layer, before, tanh in zip(layers[::-1], inputs[-2::-1], tanhs[::-1]):
        slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1)
        by_z = layer.times_idt_(grad * slope)
        kept.append(_Values(before, tanh, slope, by_z, grad))
        grad = layer.below(by_z, grad)
    return torch.bmm(x, last).add_(bias).squeeze(-1), grad, [x, *(part for values in kept[::-1] for part in values)]


def _differentiate(
    flat: Sequence[Any], kept: Sequence[Tensor], grad_value: Tensor, grad_grad: Tensor | None, copies: Sequence[int],
    wants_x: bool,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the gradient by the inputs (T, B, N), if wanted, and those by the parameters."""
    layers, last = _layers(flat, copies), flat[-2]
    grad_value = grad_value.unsqueeze(-1)
    values = [_Values(*kept[start : start + 5]) for start in range(1, len(kept), 5)]
    of_last = torch.bmm(kept[0].mT, grad_value)
    past: list[tuple[Tensor, Tensor, Tensor]] = []  # gradients by W and by t, and that by idt for each row
    if grad_grad is not None:
        for layer, v in zip(layers, values):
            change = torch.bmm(grad_grad, layer.weight)
            of_slope = change * v.grad
            of_weight, of_idt = torch.bmm(grad_grad.mT, v.by_z), of_slope * v.slope
            past.append((of_weight, layer.times_idt_(of_slope.mul_(v.tanh).mul_(-2)), of_idt))
            # in place: `change` is not read any more
            grad_grad = layer.add_skip(layer.times_idt_(change.mul_(v.slope)), grad_grad)
        of_last += grad_grad.sum(-2).unsqueeze(-1)
    grad = grad_value * last.mT
    found: list[Tensor | None] = [of_last, _sum_of_rows(grad_value, flat[-1])]
    for k in reversed(range(len(layers))):
        layer, v = layers[k], values[k]
        by_tanh = grad if layer.idt is None else grad * layer.idt
        by_z = by_tanh * v.slope if not past else (by_tanh + past[k][1]).mul_(v.slope)
        of_weight = past[k][0].baddbmm_(v.x.mT, by_z) if past else torch.bmm(v.x.mT, by_z)
        of_idt = torch.addcmul(past[k][2], grad, v.tanh) if past else grad * v.tanh
        by_idt = None if layer.idt is None else _sum_of_rows(of_idt, layer.idt)
        found = [of_weight, _sum_of_rows(by_z, layer.bias), by_idt, *found]
        if k or wants_x:  # features of a descriptor that is not trained need no gradient
            grad = layer.below(by_z, grad)
    return grad, found


def _sum_of_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return the sum over the rows (..., B, M) in the shape of the parameter ``like``."""
    return values.sum(-2).view(like.shape)


def _layers(flat: Sequence[Any], copies: Sequence[int]) -> list[_Layer]:
    return [_Layer(flat[3 * k], flat[3 * k + 1], flat[3 * k + 2], number) for k, number in enumerate(copies)]
