"""Networks of tanh layers with one output and their gradients by the inputs; the backward pass of
both written out.

With ``t = tanh(x W + b)`` and ``d = 1 - t^2``, a layer is ``y = t idt + skip(x)``. The gradient G
of the output goes down by ``q = G d idt``, ``G_below = q W^T + skip^T(G)``. In the backward pass
the gradient H by G goes up through the layers, like a change of the inputs, and then the gradient P
by y goes down::

    h = H W,              H_above = h d idt + skip(H),    W gets H^T q,  t gets c = -2 h G t idt
    p = (P idt + c) d,    P_below = p W^T + skip^T(P),    W gets x^T p,  b gets p,
                                                          idt gets h G d + P t

Autograd takes some 40 operations for each layer. T networks are stacks of matrices (T, B, ...) in
place of (B, ...): on a GPU, where launching an operation costs more than its arithmetic, all are
evaluated together, on a CPU each alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.cpu.product import products
from deepmd_ema.model.ops.reference import values_and_gradients

# inputs of networks with those of rows that fill up: more are bound by arithmetic, and fewer by
# launches
MAX_STACKED = 1 << 22

# A rows of all networks, B rows of one of T, N inputs and M outputs of a layer


def tanh_values_and_gradients(
    x: Tensor, nets: Sequence[Network], shares: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) of networks and their gradients by the inputs (A, N), one after the
    other.

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: of the same options, with a last layer of one output.
        shares: rows of each network.
    """
    if not nets[0].is_scalar_tanh:
        return values_and_gradients(x, nets, shares)
    if len(nets) == 1:
        return _of_stack(x, nets)
    found = [_of_stack(own, [net]) for net, own in zip(nets, x.split(list(shares)), strict=True)]
    values, grads = zip(*found, strict=True)
    return torch.cat(values), torch.cat(grads)


def stacked_values_and_gradients(
    x: Tensor, nets: Sequence[Network], shares: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Do :func:`tanh_values_and_gradients` together, with rows of zeros after those of a network of
    few rows.
    """
    if len(nets) == 1:
        return tanh_values_and_gradients(x, nets, shares)
    most = max(shares)
    if not nets[0].is_scalar_tanh or len(nets) * most * x.shape[1] > MAX_STACKED:
        return values_and_gradients(x, nets, shares)
    values, grads = _of_stack(
        nn.utils.rnn.pad_sequence(list(x.split(list(shares))), batch_first=True), nets
    )
    flat_values, flat_grads = values.flatten(), grads.flatten(0, 1)
    if min(shares) == most:
        return flat_values, flat_grads
    own = [slice(t * most, t * most + count) for t, count in enumerate(shares)]
    return torch.cat([flat_values[at] for at in own]), torch.cat([flat_grads[at] for at in own])


def _of_stack(x: Tensor, nets: Sequence[Network]) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, B) of T networks and their gradients (T, B, N); of one network without
    the dimension T.
    """
    flat: list[Tensor | None] = []
    *hidden, last = zip(*(net.layers for net in nets))
    for layers in hidden:
        flat += [
            _stack([layer.weight for layer in layers]),
            _stack([layer.bias for layer in layers]),
        ]
        flat.append(None if layers[0].idt is None else _stack([layer.idt for layer in layers]))
    flat += [_stack([layer.weight for layer in last]), _stack([layer.bias for layer in last])]
    copies = tuple(layers[0].copies for layers in hidden)
    return cast("Any", _ValuesAndGradients.apply(x, copies, *flat))


def _stack(parameters: Sequence[Any]) -> Tensor:
    """Return (T, N, M) of weights, (T, 1, M) of vectors; what is of one network as it is."""
    if len(parameters) == 1:
        return cast("Tensor", parameters[0])
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
        out = products(by_z, self.weight.mT)
        for part in by_y.chunk(self.copies, -1) if self.copies else ():
            out.add_(part)
        return out


class _ValuesAndGradients(torch.autograd.Function):
    """Outputs (T, B) and gradients (T, B, N), which can be differentiated once by the inputs and
    the parameters.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: tuple[int, ...], *flat: Any) -> tuple[Tensor, Tensor]:
        layers, (last, bias) = _layers(flat, copies), flat[-2:]
        inputs, tanhs = [x], []
        for layer in layers:
            tanhs.append(products(x, layer.weight).add_(layer.bias).tanh_())
            # a copy, because the skip connection is added in place and t is kept
            y = tanhs[-1].clone() if layer.idt is None else tanhs[-1] * layer.idt
            x = layer.add_skip(y, x)
            inputs.append(x)
        grad, kept = last.mT.expand(x.shape), [x]
        for layer, before, tanh in zip(layers[::-1], inputs[-2::-1], tanhs[::-1]):
            slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1)
            by_z = layer.times_idt_(grad * slope)
            kept[1:1] = before, tanh, slope, by_z, grad  # x, t, d, q and G of each layer
            grad = layer.below(by_z, grad)
        if any(ctx.needs_input_grad):
            ctx.copies, ctx.num_flat = copies, len(flat)
            ctx.save_for_backward(*flat, *kept)
            ctx.set_materialize_grads(
                False
            )  # a loss of energies alone has no gradient H, nor the work for it
        return products(x, last).add_(bias).squeeze(-1), grad

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_values: Tensor | None, grad_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        flat, (top, *kept) = ctx.saved_tensors[: ctx.num_flat], ctx.saved_tensors[ctx.num_flat :]
        layers = _layers(flat, ctx.copies)
        last = flat[-2]
        wants_x = ctx.needs_input_grad[0]
        grad_value = (
            top.new_zeros(top.shape[:-1]) if grad_values is None else grad_values
        ).unsqueeze(-1)
        values = [kept[start : start + 5] for start in range(0, len(kept), 5)]
        of_last = products(top.mT, grad_value)
        past: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # gradients by W and by t, and that by idt for each row
        if grad_grads is not None:
            for layer, (_, tanh, slope, by_z, grad) in zip(layers, values):
                change = products(grad_grads, layer.weight)
                of_slope = change * grad
                of_weight, of_idt = products(grad_grads.mT, by_z), of_slope * slope
                past.append((of_weight, layer.times_idt_(of_slope.mul_(tanh).mul_(-2)), of_idt))
                # in place: `change` is not read any more
                grad_grads = layer.add_skip(layer.times_idt_(change.mul_(slope)), grad_grads)
            of_last += grad_grads.sum(-2).unsqueeze(-1)
        grad = grad_value * last.mT
        found: list[Tensor | None] = [of_last, grad_value.sum(-2).view(flat[-1].shape)]
        for k in reversed(range(len(layers))):
            layer, (x, tanh, slope, _, _) = layers[k], values[k]
            by_tanh = grad if layer.idt is None else grad * layer.idt
            by_z = by_tanh * slope if not past else (by_tanh + past[k][1]).mul_(slope)
            if x.is_cpu or not past:
                of_weight = products(x.mT, by_z)
            else:
                add_product_ = past[k][0].addmm_ if x.ndim == 2 else past[k][0].baddbmm_
                of_weight = add_product_(x.mT, by_z)
            if x.is_cpu and past:
                of_weight += past[k][0]
            of_idt = torch.addcmul(past[k][2], grad, tanh) if past else grad * tanh
            by_idt = None if layer.idt is None else of_idt.sum(-2).view(layer.idt.shape)
            found = [of_weight, by_z.sum(-2).view(layer.bias.shape), by_idt, *found]
            if k or wants_x:  # features of a descriptor that is not trained need no gradient
                grad = layer.below(by_z, grad)
        return grad if wants_x else None, None, *found


def _layers(flat: Sequence[Any], copies: Sequence[int]) -> list[_Layer]:
    return [
        _Layer(flat[3 * k], flat[3 * k + 1], flat[3 * k + 2], number)
        for k, number in enumerate(copies)
    ]
