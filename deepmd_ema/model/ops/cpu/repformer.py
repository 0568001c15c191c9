"""Layers of the repformer with their gradient and the gradient of that written out, as one function.

Autograd would take some 1,000 operations for two layers, most of them on few numbers, and copies for each of them what
it differentiates. Notation as in :mod:`~deepmd_ema.model.ops.cpu.repformer_layer`. The layers begin with ``tanh(n)``
and ``g = tanh(s w_0 + b_0)``, s the radial column of the rows of the environment.

As in :mod:`~deepmd_ema.model.ops.cpu.attention`, the gradient of ``g . J t``, t the cotangent of the gradient
``J^T g``, is found together with the gradient by the result: :class:`_LayersVjp` leaves t behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.ops.cpu import repformer_layer as layer
from deepmd_ema.model.ops.cpu.portions import backward_pass
from deepmd_ema.model.ops.cpu.repformer_layer import LayerOptions, LayerWeights, Neighbors, Pairs, Past

# A atoms, K neighbor slots, M reverse slots, C channels of an atom, G of a pair


def repformer_layers_and_vjp(
    stack: Any, node: Tensor, rows: Tensor, around: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Return the features after all layers by hand, and what makes of their gradient that by the inputs.

    Args:
        stack: the layers.
        node: (A, C).
        rows: (A, K, 4).
        around: the neighbors, with a ``weight`` (A, K).

    Returns:
        The features (A, C) and a function from their gradient to those by node, rows and weight.
    """
    *start, layers = stack.weights()
    call = _Call(Neighbors(around.neighbor, around.reverse), stack.layer_options(around))
    inputs = (node, rows, around.weight, *start, *(part for one in layers for part in one))
    found: Tensor = _Layers.apply(call, *inputs)
    return found, lambda grad: _LayersVjp.apply(_Gradient(call), grad, found, *inputs)


class _Call:
    """One evaluation of all layers, with the numbers that its derivatives need.

    Args:
        near: maps between atoms and pairs.
        options: of the layers.
    """

    def __init__(self, near: Neighbors, options: LayerOptions) -> None:
        self._near, self._options = near, options
        self._values: list[layer.Values] = []
        self._pairs: Pairs
        self._rows: Tensor
        self._past: list[tuple[Any, ...]] = []

    def value(self, node: Tensor, rows: Tensor, weight: Tensor, flat: Sequence[Any]) -> Tensor:
        """Return the features (A, C) after all layers."""
        self._rows = rows
        radial, vectors = rows.split([1, 3], -1)
        weight = weight.unsqueeze(-1)
        self._pairs = Pairs(weight, vectors * weight)
        node, pair = node.tanh(), torch.addcmul(flat[1], radial, flat[0][0]).tanh_()
        for weights in _layers(flat):
            node, pair, values = layer.evaluate(node, pair, self._pairs, self._near, weights, self._options)
            self._values.append(values)
        return node

    def gradient(self, grad: Tensor, flat: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
        """Return the gradients by node, rows and weight, and their intermediate values."""
        by_pair, found = None, []
        by_weight, by_sides = torch.zeros_like(self._pairs.weight), torch.zeros_like(self._pairs.sides)
        for v, weights in zip(reversed(self._values), reversed(_layers(flat))):
            grad, by_pair, cot = layer.pull(v, grad, by_pair, self._pairs, self._near, weights, None, self._options)
            of_weight, of_sides = layer.by_pairs(v, cot)
            by_weight.add_(of_weight)
            by_sides.add_(of_sides)
            found.append(cot)
        start = self._values[0]
        by_start = torch.ops.aten.tanh_backward(by_pair, start.pair)
        vectors = self._rows[..., 1:]
        by_rows = torch.cat([by_start @ flat[0].T, by_sides * self._pairs.weight], -1)
        by_weight = by_weight.add_((by_sides * vectors).sum(-1, keepdim=True)).squeeze(-1)
        by_node = torch.ops.aten.tanh_backward(grad, start.node)
        return by_node, by_rows, by_weight, [found, grad, by_pair, by_start]

    def change(self, of: list[Any], node: Tensor, rows: Tensor, weight: Tensor, flat: Sequence[Any]) -> Tensor:
        """Return the change of the result as the inputs change, and keep it for :meth:`taken`."""
        start, weight = self._values[0], weight.unsqueeze(-1)
        radial, vectors = rows.split([1, 3], -1)
        d_pairs = Pairs(weight, torch.addcmul(vectors * self._pairs.weight, self._rows[..., 1:], weight))
        embedded = radial * flat[0][0]
        inputs = (node, embedded, radial)
        node = torch.ops.aten.tanh_backward(node, start.node)
        pair = torch.ops.aten.tanh_backward(embedded, start.pair)
        changes = []
        for v, weights in zip(self._values, _layers(flat)):
            node, pair, found = layer.push(v, node, pair, d_pairs, self._pairs, self._near, weights, self._options)
            changes.append(found)
        self._past.append((backward_pass(), of, changes, inputs))
        return node

    def taken(self) -> list[Any]:
        """Return the gradients that changed in this backward pass with their changes, and forget all."""
        now, past, self._past = backward_pass(), self._past, []
        return [one[1:] for one in past if one[0] == now]

    def second_gradient(self, grad: Tensor, past: Any, flat: Sequence[Any]) -> list[Tensor | None]:
        """Return the gradients by node and parameters of ``grad`` times the result and ``g`` times its change.

        Args:
            grad: (A, C) by the result.
            past: a gradient and its change, or None.
            flat: the parameters.
        """
        by_pair: Any = None
        found: list[Tensor | None] = []
        of_layers: list[Past | None] = [None] * len(self._values)
        if past is not None:
            (cots, by_first, by_first_pair, by_first_start), changes, (d_node, d_embedded, d_radial) = past
            of_layers = list(zip(reversed(cots), changes))
        for v, weights, of_layer in reversed(list(zip(self._values, _layers(flat), of_layers))):
            grad, by_pair, cot = layer.pull(
                v, grad, by_pair, self._pairs, self._near, weights, of_layer, self._options
            )  # fmt: skip
            found = [*layer.by_weights(v, cot, of_layer, weights, self._options), *found]
        start = self._values[0]
        if past is not None:
            grad = torch.addcmul(grad, by_first * d_node, start.node, value=-2)
            by_pair = torch.addcmul(by_pair, by_first_pair * d_embedded, start.pair, value=-2)
        by_start = torch.ops.aten.tanh_backward(by_pair, start.pair).flatten(0, 1)
        radial = self._rows[..., :1].flatten(0, 1)
        of_embedding = torch.mm(radial.T, by_start)
        if past is not None:
            of_embedding.addmm_(d_radial.flatten(0, 1).T, by_first_start.flatten(0, 1))
        return [torch.ops.aten.tanh_backward(grad, start.node), of_embedding, by_start.sum(0), *found]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, node: Tensor, rows: Tensor, weight: Tensor, *flat: Any) -> Tensor:
        return call.value(node, rows, weight, flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.call, *tensors = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, node, rows, weight, *flat = ctx.saved_tensors
        call: _Call = ctx.call
        if torch.is_grad_enabled():  # the gradient is differentiated
            if any(ctx.needs_input_grad[4:]):
                raise NotImplementedError("second derivatives by parameters: use the reference operations")
            found = _LayersVjp.apply(_Gradient(call), grad, output, node, rows, weight, *flat)
            return (None, *found, *[None] * len(flat))
        past, of_positions = call.taken(), any(ctx.needs_input_grad[2:4])
        if past and of_positions:
            raise NotImplementedError("second derivatives by positions: use the reference operations")
        by_rows = by_weight = None
        if of_positions:
            _, by_rows, by_weight, _ = call.gradient(grad, flat)
        by_node, *by_flat = call.second_gradient(grad, past[0] if past else None, flat)
        for more in past[1:]:  # the gradient was asked for several times
            again = call.second_gradient(torch.zeros_like(grad), more, flat)
            by_node, *by_flat = (None if a is None or b is None else a + b for a, b in zip((by_node, *by_flat), again))
        return (None, by_node, by_rows, by_weight, *by_flat)


class _Gradient:
    """A gradient of the layers, with its intermediate values."""

    found: list[Any]

    def __init__(self, call: _Call) -> None:
        self.call = call


class _LayersVjp(torch.autograd.Function):
    """Gradients by node, rows and weight, differentiable by the given gradient, the node and the parameters."""

    @staticmethod
    def forward(
        gradient: _Gradient, grad: Tensor, output: Tensor, node: Tensor, rows: Tensor, weight: Tensor, *flat: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        *found, gradient.found = gradient.call.gradient(grad, flat)
        return found[0], found[1], found[2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gradient = inputs[0]
        ctx.save_for_backward(*inputs[6:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, node: Tensor, rows: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.saved_tensors
        change = ctx.gradient.call.change(ctx.gradient.found, node, rows, weight, flat)
        # the gradients by node and parameters come from _Layers, to which zeros lead in any case
        return None, change, change.new_zeros(()).expand_as(change), None, None, None, *[None] * len(flat)


def _layers(flat: Sequence[Any]) -> list[LayerWeights]:
    size = len(LayerWeights._fields)
    return [LayerWeights(*flat[start : start + size]) for start in range(2, len(flat), size)]
