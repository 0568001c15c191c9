"""Networks of tanh layers with one output and their gradients, with written-out backward passes.

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

# inputs of all networks, padding included: more are bound by arithmetic, fewer by launches
MAX_STACKED = 1 << 22

# A rows of all networks, B rows of one of T, N inputs and M outputs of a layer


def tanh_values_and_gradients(
    x: Tensor, nets: Sequence[Network], shares: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) of networks and their gradients by the inputs (A, N).

    The rows of the networks come one after the other.

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: of the same options, with a last layer of one output.
        shares: rows of each network.
    """
    if not nets[0].is_scalar_tanh:
        return values_and_gradients(x, nets, shares)
    if len(nets) == 1:
        return _of_stack(x, nets)
    parts = zip(nets, x.split(list(shares)), strict=True)
    results = [_of_stack(rows, [net]) for net, rows in parts]
    values, grads = zip(*results, strict=True)
    return torch.cat(values), torch.cat(grads)


def stacked_values_and_gradients(
    x: Tensor, nets: Sequence[Network], shares: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Do :func:`tanh_values_and_gradients` for all networks together.

    Rows of zeros come after those of a network of few rows.
    """
    if len(nets) == 1:
        return tanh_values_and_gradients(x, nets, shares)
    most = max(shares)
    if not nets[0].is_scalar_tanh or len(nets) * most * x.shape[1] > MAX_STACKED:
        return values_and_gradients(x, nets, shares)
    padded = nn.utils.rnn.pad_sequence(
        list(x.split(list(shares))), batch_first=True
    )  # (T, B, N)
    values, grads = _of_stack(padded, nets)
    flat_values = values.flatten()
    flat_grads = grads.flatten(0, 1)
    if min(shares) == most:
        return flat_values, flat_grads
    # the rows of each network without those that fill up
    places = [slice(t * most, t * most + count) for t, count in enumerate(shares)]
    return torch.cat([flat_values[at] for at in places]), torch.cat(
        [flat_grads[at] for at in places]
    )


def _of_stack(x: Tensor, nets: Sequence[Network]) -> tuple[Tensor, Tensor]:
    """Return the outputs (T, B) of T networks and their gradients (T, B, N).

    Those of one network lack the dimension T.
    """
    # weight, bias and idt of each hidden layer, then weight and bias of the last one: an autograd
    # function has gradients by its arguments that are tensors, not by tensors in other objects
    flat: list[Tensor | None] = []
    *hidden, last = zip(*(net.layers for net in nets))
    for layers in hidden:
        flat += [
            _stack([layer.weight for layer in layers]),
            _stack([layer.bias for layer in layers]),
        ]
        flat.append(
            None if layers[0].idt is None else _stack([layer.idt for layer in layers])
        )
    flat += [
        _stack([layer.weight for layer in last]),
        _stack([layer.bias for layer in last]),
    ]
    copies = tuple(layers[0].copies for layers in hidden)
    return cast("Any", _ValuesAndGradients.apply(x, copies, *flat))


def _stack(parameters: Sequence[Any]) -> Tensor:
    """Return (T, N, M) of weights, (T, 1, M) of vectors; parameters of one network as they are."""
    if len(parameters) == 1:
        return cast("Tensor", parameters[0])
    stacked = torch.stack(list(parameters))
    return stacked if stacked.ndim > 2 else stacked[:, None]


class _Layer(NamedTuple):
    """Parameters of a hidden layer of T networks."""

    weight: Tensor  # (T, N, M)
    bias: Tensor  # (T, 1, M)
    idt: Tensor | None  # (T, 1, M)
    copies: int  # how often the skip connection adds x

    def times_idt_(self, y: Tensor) -> Tensor:
        return y if self.idt is None else y.mul_(self.idt)

    def add_skip(self, y: Tensor, x: Tensor) -> Tensor:
        return (
            y
            if not self.copies
            else y.add_(x if self.copies == 1 else torch.cat([x, x], -1))
        )

    def below(self, by_z: Tensor, by_y: Tensor) -> Tensor:
        """Return the gradient by x (T, B, N) from those by ``x W + b`` and by y (T, B, M)."""
        out = products(by_z, self.weight.mT)
        for part in by_y.chunk(self.copies, -1) if self.copies else ():
            out.add_(part)
        return out


class _Values(NamedTuple):
    """Values of a layer in the forward pass that the backward pass needs."""

    x: Tensor  # (T, B, N)
    tanh: Tensor  # (T, B, M), t
    slope: Tensor  # (T, B, M), d
    by_z: Tensor  # (T, B, M), q
    grad: Tensor  # (T, B, M), G


class _Past(NamedTuple):
    """Gradients that the way up of a backward pass leaves for the way down, of a layer."""

    by_weight: Tensor  # (T, N, M)
    by_tanh: Tensor  # (T, B, M), c
    row_by_idt: Tensor  # (T, B, M), by idt, of each row


class _ValuesAndGradients(torch.autograd.Function):
    """Outputs (T, B) and gradients (T, B, N).

    They can be differentiated once by the inputs and the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, copies: tuple[int, ...], *flat: Any
    ) -> tuple[Tensor, Tensor]:
        layers = _layers(flat, copies)
        last, bias = flat[-2:]
        inputs = [x]
        tanhs = []
        for layer in layers:
            tanhs.append(products(x, layer.weight).add_(layer.bias).tanh_())
            # a copy, because the skip connection is added in place and t is kept
            y = tanhs[-1].clone() if layer.idt is None else tanhs[-1] * layer.idt
            x = layer.add_skip(y, x)
            inputs.append(x)
        grad = last.mT.expand(x.shape)
        saved = [x]
        for layer, before, tanh in zip(layers[::-1], inputs[-2::-1], tanhs[::-1]):
            slope = torch.addcmul(tanh.new_ones(()), tanh, tanh, value=-1)
            by_z = layer.times_idt_(grad * slope)
            saved[1:1] = _Values(before, tanh, slope, by_z, grad)
            grad = layer.below(by_z, grad)
        if any(ctx.needs_input_grad):
            ctx.copies = copies
            ctx.num_flat = len(flat)
            ctx.save_for_backward(*flat, *saved)
            # a loss of energies alone has no gradient H, nor the work for it
            ctx.set_materialize_grads(False)
        return products(x, last).add_(bias).squeeze(-1), grad

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_values: Tensor | None, grad_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        flat = ctx.saved_tensors[: ctx.num_flat]
        top, *saved = ctx.saved_tensors[ctx.num_flat :]
        layers = _layers(flat, ctx.copies)
        last = flat[-2]
        wants_x = ctx.needs_input_grad[0]
        if grad_values is None:
            grad_values = top.new_zeros(top.shape[:-1])
        grad_value = grad_values.unsqueeze(-1)  # (T, B, 1)
        size = len(_Values._fields)
        values = [
            _Values(*saved[start : start + size])
            for start in range(0, len(saved), size)
        ]
        by_last = products(top.mT, grad_value)
        # upwards: H through the layers
        past: list[_Past] = []
        if grad_grads is not None:
            for layer, v in zip(layers, values):
                change = products(grad_grads, layer.weight)
                by_slope = change * v.grad
                by_weight = products(grad_grads.mT, v.by_z)
                row_by_idt = by_slope * v.slope
                by_tanh = layer.times_idt_(by_slope.mul_(v.tanh).mul_(-2))
                past.append(_Past(by_weight, by_tanh, row_by_idt))
                # in place: `change` is not read any more
                grad_grads = layer.add_skip(
                    layer.times_idt_(change.mul_(v.slope)), grad_grads
                )
            by_last += grad_grads.sum(-2).unsqueeze(-1)
        # downwards: P through the layers
        grad = grad_value * last.mT
        grads: list[Tensor | None] = [by_last, grad_value.sum(-2).view(flat[-1].shape)]
        for k in reversed(range(len(layers))):
            layer = layers[k]
            v = values[k]
            x = v.x
            by_tanh = grad if layer.idt is None else grad * layer.idt
            by_z = (
                by_tanh * v.slope
                if not past
                else (by_tanh + past[k].by_tanh).mul_(v.slope)
            )
            # x^T p, added to H^T q in one operation on a GPU; products of a CPU have no such form
            if x.is_cpu or not past:
                by_weight = products(x.mT, by_z)
            else:
                so_far = past[k].by_weight
                add_product_ = so_far.addmm_ if x.ndim == 2 else so_far.baddbmm_
                by_weight = add_product_(x.mT, by_z)
            if x.is_cpu and past:
                by_weight += past[k].by_weight
            row_by_idt = (
                torch.addcmul(past[k].row_by_idt, grad, v.tanh)
                if past
                else grad * v.tanh
            )
            by_idt = (
                None if layer.idt is None else row_by_idt.sum(-2).view(layer.idt.shape)
            )
            grads = [by_weight, by_z.sum(-2).view(layer.bias.shape), by_idt, *grads]
            if (
                k or wants_x
            ):  # features of a descriptor that is not trained need no gradient
                grad = layer.below(by_z, grad)
        return grad if wants_x else None, None, *grads


def _layers(flat: Sequence[Any], copies: Sequence[int]) -> list[_Layer]:
    return [
        _Layer(flat[3 * k], flat[3 * k + 1], flat[3 * k + 2], number)
        for k, number in enumerate(copies)
    ]
