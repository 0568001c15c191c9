"""Networks of tanh layers with one output and their gradients by the inputs; the backward pass of both written out.

With ``t = tanh(x W + b)`` and ``d = 1 - t^2``, a layer is ``y = t idt + skip(x)``. The gradient G of the output goes
down by ``q = G d idt``, ``G_below = q W^T + skip^T(G)``. In the backward pass the gradient H by G goes up through the
layers, like a change of the inputs, and then the gradient P by y goes down::

    h = H W,                 H_above = h d idt + skip(H),      W gets H^T q,   t gets c = -2 h G t idt
    p = (P idt + c) d,       P_below = p W^T + skip^T(P),      W gets x^T p,   b gets p,   idt gets h G d + P t

Autograd takes some 40 operations for each layer, and 1.1 to 1.3 times as long. Several networks are evaluated one after
the other, or, where launching an operation costs more than its arithmetic, together: the T networks as stacks of
matrices, with (T, B, ...) in place of (B, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.cpu.product import add_product_, product

# A rows of all networks, B rows of one, N inputs and M outputs of a layer


def values_and_gradients(x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) and their gradients with respect to the inputs (A, N), of equal tanh networks.

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: with a last layer of one output.
        shares: rows of each network.
    """
    flat = [p for net in nets for p in _parameters(net)]
    values, grads = _ValuesAndGradients.apply(x, tuple(shares), _copies(nets[0]), *flat)
    return values, grads


def stacked_values_and_gradients(x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Do :func:`values_and_gradients` by stacks of matrices, with rows of zeros after those of a network of few."""
    most = max(shares)
    rows = nn.utils.rnn.pad_sequence(list(x.split(list(shares))), batch_first=True)  # (T, B, N)
    flat = [None if p[0] is None else _stack(p) for p in zip(*map(_parameters, nets))]
    values, grads = _ValuesAndGradients.apply(rows, (len(nets),), _copies(nets[0]), *flat)
    if min(shares) == most:
        return values.flatten(), grads.flatten(0, 1)
    own = [slice(t * most, t * most + count) for t, count in enumerate(shares)]
    flat_values, flat_grads = values.flatten(), grads.flatten(0, 1)
    return torch.cat([flat_values[at] for at in own]), torch.cat([flat_grads[at] for at in own])


def _parameters(net: Network) -> list[Tensor | None]:
    *hidden, last = net.layers
    return [*(p for layer in hidden for p in (layer.weight, layer.bias, layer.idt)), last.weight, last.bias]


def _copies(net: Network) -> tuple[int, ...]:
    return tuple(layer.copies for layer in net.layers[:-1])


def _stack(parameters: Sequence[Tensor]) -> Tensor:
    """Return (T, N, M) of weights, (T, 1, M) of vectors."""
    stacked = torch.stack(list(parameters))
    return stacked if stacked.ndim > 2 else stacked[:, None]


class _Layer(NamedTuple):
    """Parameters of a hidden layer, or of that of T networks: (T, N, M) and (T, 1, M)."""

    weight: Tensor  # (N, M)
    bias: Tensor  # (M,)
    idt: Tensor | None  # (M,)
    copies: int  # of x in the skip connection

    def times_idt_(self, y: Tensor) -> Tensor:
        return y if self.idt is None else y.mul_(self.idt)

    def add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        return y if not self.copies else y.add_(x if self.copies == 1 else torch.cat([x, x], -1))

    def below(self, by_z: Tensor, by_y: Tensor) -> Tensor:
        """Return the gradient by x (B, N) from those by ``x W + b`` and by y (B, M)."""
        out = product(by_z, self.weight.mT)
        for part in by_y.chunk(self.copies, -1) if self.copies else ():
            out.add_(part)
        return out


class _Values(NamedTuple):
    """Values of a hidden layer."""

    x: Tensor  # (B, N)
    tanh: Tensor  # (B, M), t
    slope: Tensor  # (B, M), d
    by_z: Tensor  # (B, M), q
    grad: Tensor  # (B, M), G


class _ValuesAndGradients(torch.autograd.Function):
    """Outputs and gradients, which can be differentiated once by the inputs and the parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shares: tuple[int, ...], copies: tuple[int, ...], *flat: Any
    ) -> tuple[Tensor, Tensor]:
        found = [_evaluate(own, net, copies) for own, net in zip(x.split(shares), _by_net(flat, len(shares)))]
        values, grads, kept = zip(*found)
        if any(ctx.needs_input_grad):
            ctx.shape, ctx.shares, ctx.copies, ctx.num_flat = x.shape[:-1], shares, copies, len(flat)
            ctx.save_for_backward(*flat, *(part for net in kept for part in net))
            ctx.set_materialize_grads(False)  # a loss of energies alone has no gradient H, nor the work for it
        return torch.cat(values), torch.cat(grads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor | None, grad_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        flat, kept = ctx.saved_tensors[: ctx.num_flat], ctx.saved_tensors[ctx.num_flat :]
        shares, number = ctx.shares, len(ctx.shares)
        if grad_values is None:
            grad_values = flat[0].new_zeros(ctx.shape)
        of_grads = [None] * number if grad_grads is None else grad_grads.split(shares)
        nets = zip(_by_net(flat, number), _by_net(kept, number), grad_values.split(shares), of_grads)
        found = [_differentiate(*net, ctx.copies, ctx.needs_input_grad[0]) for net in nets]
        below, of_flat = zip(*found)
        of_x = torch.cat(below) if ctx.needs_input_grad[0] else None
        return of_x, None, None, *(part for net in of_flat for part in net)


def _evaluate(x: Tensor, flat: Sequence[Any], copies: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the output (B,), its gradient (B, N), and the values that the backward pass needs."""
    layers, (last, bias) = _layers(flat, copies), flat[-2:]
    inputs, tanhs, kept = [x], [], []
    for layer in layers:
        tanhs.append(product(x, layer.weight).add_(layer.bias).tanh_())
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
    return _column(x, last).add_(bias).squeeze(-1), grad, [x, *(part for values in kept[::-1] for part in values)]


def _differentiate(
    flat: Sequence[Any], kept: Sequence[Tensor], grad_value: Tensor, grad_grad: Tensor | None, copies: Sequence[int],
    wants_x: bool,
) -> tuple[Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the gradient by the inputs (B, N), if wanted, and those by the parameters of a network."""
    layers, last = _layers(flat, copies), flat[-2]
    grad_value = grad_value.unsqueeze(-1)
    values = [_Values(*kept[start : start + 5]) for start in range(1, len(kept), 5)]
    of_last = _column(kept[0].mT, grad_value)
    past: list[tuple[Tensor, Tensor, Tensor]] = []  # gradients by W and by t, and that by idt for each row
    if grad_grad is not None:
        for layer, v in zip(layers, values):
            change = product(grad_grad, layer.weight)
            of_slope = change * v.grad
            of_weight, of_idt = product(grad_grad.mT, v.by_z), of_slope * v.slope
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
        of_weight = add_product_(past[k][0], v.x.mT, by_z) if past else product(v.x.mT, by_z)
        of_idt = torch.addcmul(past[k][2], grad, v.tanh) if past else grad * v.tanh
        by_idt = None if layer.idt is None else _sum_of_rows(of_idt, layer.idt)
        found = [of_weight, _sum_of_rows(by_z, layer.bias), by_idt, *found]
        if k or wants_x:  # features of a descriptor that is not trained need no gradient
            grad = layer.below(by_z, grad)
    return grad, found


def _column(a: Tensor, column: Tensor) -> Tensor:
    """Return ``a @ column`` (..., B, 1) of (..., B, N) and (..., N, 1)."""
    return torch.bmm(a, column) if a.ndim > 2 else torch.mv(a, column[:, 0])[:, None]


def _sum_of_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return the sum over the rows (..., B, M) in the shape of the parameter ``like``."""
    return values.sum(-2).view(like.shape)


def _by_net(flat: Sequence[Any], number: int) -> list[Sequence[Any]]:
    size = len(flat) // number
    return [flat[size * i : size * (i + 1)] for i in range(number)]


def _layers(flat: Sequence[Any], copies: Sequence[int]) -> list[_Layer]:
    return [_Layer(flat[3 * k], flat[3 * k + 1], flat[3 * k + 2], number) for k, number in enumerate(copies)]
