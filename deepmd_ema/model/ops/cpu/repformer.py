"""Layers of the repformer with their gradient and the gradient of that written out, as one function.

Autograd would take some 1,000 operations for two layers, most of them on few numbers, and copies for each of them what
it differentiates. Notation as in :mod:`~deepmd_ema.model.ops.cpu.repformer_layer`. The layers begin with ``tanh(n)``
and ``g = tanh(s w_0 + b_0)``, s the radial column of the rows of the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from deepmd_ema.model.ops.cpu import repformer_layer as layer
from deepmd_ema.model.ops.cpu.engine import Evaluation, value_and_vjp
from deepmd_ema.model.ops.cpu.repformer_layer import LayerOptions, LayerWeights, Neighbors, Pairs, Past

# A atoms, K neighbor slots, M reverse slots, C channels of an atom, G of a pair


def repformer_layers_and_vjp(
    stack: Any, node: Tensor, rows: Tensor, around: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Return the features after all layers, and a function from their gradient to those by the inputs.

    Args:
        stack: the layers.
        node: (A, C).
        rows: (A, K, 4).
        around: the neighbors, with a ``weight`` (A, K).

    Returns:
        The features (A, C) and a function from their gradient to those by node, rows and weight.
    """
    *start, layers = stack.weights()  # flat from here, as autograd wants them: the embedding, then layer by layer
    evaluation = _Repformer(Neighbors(around.neighbor, around.reverse), stack.layer_options(around))
    weights = [*start, *(part for one in layers for part in one)]
    found, vjp = value_and_vjp(evaluation, (node, rows, around.weight), weights)
    return found, cast("Any", vjp)


class _Repformer(Evaluation):
    """The features of atoms (A, C) after all layers, of node (A, C), rows (A, K, 4) and weight (A, K).

    Args:
        near: maps between atoms and pairs.
        options: of the layers.
    """

    def __init__(self, near: Neighbors, options: LayerOptions) -> None:
        super().__init__()
        self._near, self._options = near, options
        self._values: list[layer.Values] = []
        self._pairs: Pairs
        self._rows: Tensor

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return the features after all layers."""
        node, self._rows, weight = inputs
        radial, vectors = self._rows.split([1, 3], -1)
        weight = weight.unsqueeze(-1)
        self._pairs = Pairs(weight, vectors * weight)
        node, pair = node.tanh(), torch.addcmul(weights[1], radial, weights[0][0]).tanh_()
        for own in _layers(weights):
            node, pair, values = layer.evaluate(node, pair, self._pairs, self._near, own, self._options)
            self._values.append(values)
        return node

    def gradient(self, grad: Tensor, weights: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
        """Return the gradients by the inputs, and their intermediate values."""
        by_pair, found = None, []
        by_weight, by_sides = torch.zeros_like(self._pairs.weight), torch.zeros_like(self._pairs.sides)
        for v, own in zip(self._values[::-1], _layers(weights)[::-1]):
            grad, by_pair, cot = layer.pull(v, grad, by_pair, self._pairs, self._near, own, None, self._options)
            of_weight, of_sides = layer.by_pairs(v, cot)
            by_weight.add_(of_weight)
            by_sides.add_(of_sides)
            found.append(cot)
        start = self._values[0]
        by_start = torch.ops.aten.tanh_backward(by_pair, start.pair)
        vectors = self._rows[..., 1:]
        by_rows = torch.cat([by_start @ weights[0].T, by_sides * self._pairs.weight], -1)
        # so far with w h fixed; w is also a factor of that
        by_weight = by_weight.add_((by_sides * vectors).sum(-1, keepdim=True)).squeeze(-1)
        by_node = torch.ops.aten.tanh_backward(grad, start.node)
        return (by_node, by_rows, by_weight), (found[::-1], grad, by_pair, by_start)

    def change(self, changes: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the change of the features as the inputs change, and what led there."""
        start, (d_node, d_rows, d_weight) = self._values[0], changes
        d_weight = d_weight.unsqueeze(-1)
        d_radial, d_vectors = d_rows.split([1, 3], -1)
        d_pairs = Pairs(d_weight, torch.addcmul(d_vectors * self._pairs.weight, self._rows[..., 1:], d_weight))
        d_embedded = d_radial * weights[0][0]
        node = torch.ops.aten.tanh_backward(d_node, start.node)
        pair = torch.ops.aten.tanh_backward(d_embedded, start.pair)
        found = []
        for v, own in zip(self._values, _layers(weights)):
            node, pair, of_layer = layer.push(v, node, pair, d_pairs, self._pairs, self._near, own, self._options)
            found.append(of_layer)
        return node, (found, d_node, d_embedded, d_radial)

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return the gradients by node and by the weights."""
        by_pair: Any = None
        found: list[Tensor | None] = []
        of_layers: list[Past | None] = [None] * len(self._values)
        if past is not None:
            (cots, by_first, by_first_pair, by_first_start), (changes, d_node, d_embedded, d_radial) = past
            of_layers = list(zip(cots, changes))
        for v, own, of_layer in reversed(list(zip(self._values, _layers(weights), of_layers))):
            grad, by_pair, cot = layer.pull(v, grad, by_pair, self._pairs, self._near, own, of_layer, self._options)
            found = [*layer.by_weights(v, cot, of_layer, own, self._options), *found]
        start = self._values[0]
        # tanh'' = -2 tanh tanh', and the factor tanh' follows below
        if past is not None:
            grad = torch.addcmul(grad, by_first * d_node, start.node, value=-2)
            by_pair = torch.addcmul(by_pair, by_first_pair * d_embedded, start.pair, value=-2)
        by_start = torch.ops.aten.tanh_backward(by_pair, start.pair).flatten(0, 1)
        radial = self._rows[..., :1].flatten(0, 1)
        of_embedding = torch.mm(radial.T, by_start)
        if past is not None:
            of_embedding.addmm_(d_radial.flatten(0, 1).T, by_first_start.flatten(0, 1))
        return [torch.ops.aten.tanh_backward(grad, start.node)], [of_embedding, by_start.sum(0), *found]


def _layers(weights: Sequence[Any]) -> list[LayerWeights]:
    size = len(LayerWeights._fields)
    return [LayerWeights(*weights[start : start + size]) for start in range(2, len(weights), size)]
