"""Moments of layers of attention among the neighbors of an atom; the gradient and the gradient of that written out.

With the channels X (K, M) of the pairs of an atom, the switch w and the directions d of its neighbors a layer is::

    [q, k, v] = X W_in + b_in            each row of length 1 if ``unit``
    P = softmax(scaling q k^T)           if smooth, of (scaling q_j . k_k + 20) w_j w_k - 20
    U_jk = P_jk w_j w_k (d_j . d_k)      the last factor if ``gated``
    Y = layer_norm(X + U v W_out + b_out)

The switch goes into the rows: with ``q' = scaling w q`` and ``k' = w k`` the logits are ``q' k'^T + 20 w w^T`` up to
the constant 20, and with ``h = w d`` the factor of P is ``h h^T``. So there are few passes over (K, K). After the last
layer the moments are ``R^T Y`` with rows R (K, C).

Portions of atoms go through all layers while they stay in a cache, sorted by their numbers of slots, so that few empty
ones are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.ops.cpu.attention_layer import Past, Surroundings, Values, by_surroundings, evaluate, pull, push
from deepmd_ema.model.ops.cpu.engine import Evaluation, portions, value_and_vjp
from deepmd_ema.model.ops.reference import Attended, AttentionOptions

# A atoms, K neighbor slots, M channels of a pair, H hidden width, C columns of rows


def attended_moments(
    given: Attended, layers: Sequence[Weights], options: AttentionOptions, numbers_in_cache: int
) -> Tensor:
    """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers.

    Args:
        given: inputs of the layers, with at least one atom and slot.
        layers: parameters.
        options: of the layers.
        numbers_in_cache: of queries, keys and values of a portion of atoms, for each thread.
    """
    smooth, rows, mask, switch, counts = options.shift is not None, given.rows, given.mask, given.switch, given.counts
    if not smooth:
        switch = mask.to(rows.dtype)
    sides = switch.unsqueeze(-1)
    if options.gated:
        sides = given.direction * sides if smooth else given.direction
    if not smooth:
        switch = torch.ones_like(switch)  # the mask is in `sides`, and queries and keys are not scaled by it
    if counts is None:
        counts = torch.full_like(mask[:, 0], rows.shape[1], dtype=torch.int64)
    # atoms with equally many neighbors next to each other: a portion is as wide as its widest atom
    counts, order = counts.sort(stable=True)
    most = max(1, int(counts[-1]))
    parts = portions(len(counts), most * len(layers[0].in_bias), numbers_in_cache)
    sized = [(part, max(1, int(counts[part][-1]))) for part in parts]
    mask, rows, switch, sides, *inputs = (t.index_select(0, order) for t in (mask, rows, switch, sides, *given.inputs))
    evaluation = _Attention(options, sized, None if smooth else mask, given.num_slots)
    weights = [weight for layer in layers for weight in layer]
    found, _ = value_and_vjp(evaluation, (given.embed(*inputs), rows, switch, sides), weights)
    return found.index_select(0, order.argsort())  # back in the order of the batch


class _Portion(NamedTuple):
    """Some of the atoms, with the values of all layers that their derivatives need."""

    part: slice  # the atoms
    width: int  # N, the slots that are computed
    rows: Tensor  # (A, N, C)
    values: list[Values]  # of each layer
    out: Tensor  # (A, N, M), the channels after all layers

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of tensors (A, K, ...) of all atoms."""
        return [tensor[self.part, : self.width] for tensor in tensors]


class _Attention(Evaluation):
    """The moments (A, C, M) of pairs (A, K, M), rows (A, K, C), the switch (A, K) and factors h (A, K, columns).

    Args:
        options: of the layers.
        parts: of the atoms, with the slots that are computed of each.
        mask: (A, K) bool, where there is a neighbor; None where the switch says it.
        num_slots: slots of an atom with those that are not here.
    """

    def __init__(
        self, options: AttentionOptions, parts: list[tuple[slice, int]], mask: Tensor | None, num_slots: int
    ) -> None:
        super().__init__()
        self._options, self._parts, self._mask, self._num_slots = options, parts, mask, num_slots
        self._portions: list[_Portion] = []
        self._inputs: Sequence[Tensor] = ()

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return the moments."""
        self._inputs, found = inputs, []
        for part, width in self._parts:
            pairs, rows, switch, sides = (one[part, :width] for one in inputs)
            mask = None if self._mask is None else self._mask[part, :width]
            around, values = Surroundings(switch, sides, mask, self._num_slots - width), []
            pairs = pairs.flatten(0, 1)
            for layer in _by_layer(weights):
                pairs, of_layer = evaluate(pairs, around, layer, self._options)
                values.append(of_layer)
            out = pairs.view(len(rows), width, -1)
            self._portions.append(_Portion(part, width, rows, values, out))
            found.append(torch.bmm(rows.transpose(1, 2), out))
        return torch.cat(found)

    def gradient(self, grad: Tensor, weights: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
        """Return the gradients by the inputs, and their intermediate values by portion and layer."""
        found, cotangents = [torch.zeros_like(one) for one in self._inputs], []
        for portion in self._portions:
            # views, which are written to: slots beyond the width of a portion keep the gradient 0
            by_pairs, by_rows, by_switch, by_sides = portion.of(found)
            torch.bmm(portion.out, grad[portion.part].transpose(1, 2), out=by_rows)
            given, of_portion = torch.bmm(portion.rows, grad[portion.part]).flatten(0, 1), []
            for values, layer in zip(portion.values[::-1], _by_layer(weights)[::-1]):
                given, of_layer = pull(values, given, layer, None, None, self._options)
                of_switch, of_sides = by_surroundings(values, of_layer, self._options)
                by_switch.add_(of_switch)
                by_sides.add_(of_sides)
                of_portion.append(of_layer)
            by_pairs.copy_(given.view(by_pairs.shape))
            cotangents.append(of_portion[::-1])
        return found, (grad, cotangents)

    def change(self, changes: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the change of the moments as the inputs change, and what led there by portion and layer."""
        found, details = [], []
        for portion in self._portions:
            pairs, rows, switch, sides = portion.of(changes)
            pairs, of_portion = pairs.flatten(0, 1), []
            for values, layer in zip(portion.values, _by_layer(weights)):
                pairs, of_layer = push(values, pairs, switch, sides, layer, self._options)
                of_portion.append(of_layer)
            out = torch.bmm(rows.transpose(1, 2), portion.out)
            found.append(out.baddbmm_(portion.rows.transpose(1, 2), pairs.view(portion.out.shape)))
            details.append(of_portion)
        return torch.cat(found), (changes[1], details)

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return the gradients by the pairs and by the weights."""
        sums, by_pairs = [torch.zeros_like(one) for one in weights], torch.zeros_like(self._inputs[0])
        layers = list(zip(_by_layer(weights), _by_layer(sums)))
        for number, portion in enumerate(self._portions):
            given = torch.bmm(portion.rows, grad[portion.part])
            of_layers: list[Past | None] = [None] * len(layers)
            if past is not None:
                (other, cotangents), (rows, changes) = past
                given.baddbmm_(portion.of([rows])[0], other[portion.part])
                of_layers = list(zip(cotangents[number], changes[number]))
            given = given.flatten(0, 1)
            for values, (layer, of_layer), before in zip(portion.values[::-1], layers[::-1], of_layers[::-1]):
                given, _ = pull(values, given, layer, of_layer, before, self._options)
            by_pairs[portion.part, : portion.width] = given.view(portion.out.shape)
        return [by_pairs], sums


def _by_layer(weights: Sequence[Tensor]) -> list[Weights]:
    size = len(Weights._fields)
    return [Weights(*weights[start : start + size]) for start in range(0, len(weights), size)]
