"""Moments of layers of attention among the neighbors of an atom; the gradient and the gradient of that written out.

With the channels X (K, M) of the pairs of an atom, the switch w and the directions d of its neighbors a layer is::

    [q, k, v] = X W_in + b_in            each row of length 1 if ``unit``
    P = softmax(scaling q k^T)           if smooth, of (scaling q_j . k_k + 20) w_j w_k - 20
    U_jk = P_jk w_j w_k (d_j . d_k)      the last factor if ``gated``
    Y = layer_norm(X + U v W_out + b_out)

The switch goes into the rows: with ``q' = scaling w q`` and ``k' = w k`` the logits are ``q' k'^T + 20 w w^T`` up to
the constant 20, and with ``h = w d`` the factor of P is ``h h^T``. So there are few passes over (K, K). After the last
layer the moments are ``R^T Y`` with rows R (K, C).

The kernel by hand takes portions of atoms through all layers while they stay in a cache, sorted by their numbers of
slots, so that few empty ones are computed. Its gradient ``J^T g`` becomes forces, of which a loss asks the gradient by
g and by the parameters. With the cotangent t of ``J^T g`` these are ``J t``, the change of the moments as the inputs
change by t, and the gradient of ``g . J t``. The latter is found together with the gradient by the moments themselves,
in one pass over the portions: :class:`_MomentsVjp` leaves t behind, and returns zeros as the gradient by the moments,
so that autograd comes to :class:`_Moments` in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.ops.cpu.attention_layer import (
    Changes,
    Cotangents,
    Surroundings,
    by_surroundings,
    evaluate,
    pull,
    push,
)
from deepmd_ema.model.ops.cpu.portions import backward_pass, portions
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
        switch = torch.ones_like(switch)
    if counts is None:
        counts = torch.full_like(mask[:, 0], rows.shape[1], dtype=torch.int64)
    counts, order = counts.sort(stable=True)
    most = max(1, int(counts[-1]))
    parts = portions(len(counts), most * len(layers[0].in_bias), numbers_in_cache)
    sized = [(part, max(1, int(counts[part][-1]))) for part in parts]
    mask, rows, switch, sides, *inputs = (t.index_select(0, order) for t in (mask, rows, switch, sides, *given.inputs))
    call = _Call(options, sized, None if smooth else mask, given.num_slots)
    pairs = given.embed(*inputs)
    found: Tensor = _Moments.apply(call, pairs, rows, switch, sides, *(w for layer in layers for w in layer))
    return found.index_select(0, order.argsort())


class _Inputs(NamedTuple):
    """What the moments depend on beside the parameters, or their change or gradient."""

    pairs: Tensor  # (A, K, M)
    rows: Tensor  # (A, K, C)
    switch: Tensor  # (A, K)
    sides: Tensor  # (A, K, columns of h)


class _Portion:
    """Some of the atoms, with the values of all layers that their derivatives need.

    Args:
        part: the atoms.
        width: N, the slots that are computed.
        inputs: of all atoms.
        around: of the slots.
        layers: parameters.
        options: of the layers.

    Attributes:
        value: the moments (A, C, M).
    """

    def __init__(
        self,
        part: slice,
        width: int,
        inputs: _Inputs,
        around: Surroundings,
        layers: Sequence[Weights],
        options: AttentionOptions,
    ) -> None:
        self.part, self.width, self._options = part, width, options
        pairs, self._rows, *_ = self._of(inputs)
        pairs, self._values = pairs.flatten(0, 1), []
        for weights in layers:
            pairs, values = evaluate(pairs, around, weights, options)
            self._values.append(values)
        self._out = pairs.view(len(self._rows), width, -1)
        self.value = torch.bmm(self._rows.transpose(1, 2), self._out)

    def gradient(
        self, grad: Tensor, layers: Sequence[Weights], sums: Sequence[Weights] | None, found: _Inputs
    ) -> list[Cotangents]:
        """Write the gradients by the inputs into ``found``, and return the intermediate values, last layer first.

        Args:
            grad: (A, C, M) by the moments.
            layers: parameters.
            sums: gradients by the parameters, which are added to, or None.
            found: of all atoms.
        """
        by_pairs, by_rows, by_switch, by_sides = self._of(found)
        torch.bmm(self._out, grad.transpose(1, 2), out=by_rows)
        given, cotangents = torch.bmm(self._rows, grad).flatten(0, 1), []
        for k in reversed(range(len(self._values))):
            values = self._values[k]
            given, of_layer = pull(values, given, layers[k], None if sums is None else sums[k], None, self._options)
            for total, part in zip((by_switch, by_sides), by_surroundings(values, of_layer, self._options)):
                total += part
            cotangents.append(of_layer)
        by_pairs.copy_(given.view(by_pairs.shape))
        return cotangents

    def change(self, inputs: _Inputs, layers: Sequence[Weights]) -> tuple[Tensor, list[Changes]]:
        """Return the change of the moments (A, C, M) as the inputs of all atoms change, and what led there."""
        pairs, rows, switch, sides = self._of(inputs)
        pairs, changes = pairs.flatten(0, 1), []
        for values, weights in zip(self._values, layers):
            pairs, of_layer = push(values, pairs, switch, sides, weights, self._options)
            changes.append(of_layer)
        out = torch.bmm(rows.transpose(1, 2), self._out)
        return out.baddbmm_(self._rows.transpose(1, 2), pairs.view(self._out.shape)), changes

    def second_gradient(
        self,
        grad: Tensor | None,
        past: _Past,
        number: int,
        layers: Sequence[Weights],
        sums: Sequence[Weights],
        by_pairs: Tensor,
    ) -> None:
        """Write or add the gradient by the pairs of ``grad`` times the moments and ``g`` times their change.

        Args:
            grad: (A, C, M) by the moments; None: what is found is added.
            past: of all atoms.
            number: of this portion.
            layers: parameters.
            sums: gradients by the parameters, which are added to.
            by_pairs: (A, K, M) of all atoms.
        """
        given = torch.bmm(past.change.rows[self.part, : self.width], past.grad[self.part])
        if grad is not None:
            given.baddbmm_(self._rows, grad[self.part])
        given = given.flatten(0, 1)
        for k, cotangents in zip(reversed(range(len(self._values))), past.cotangents[number]):
            of_layer = cotangents, past.changes[number][k]
            given, _ = pull(self._values[k], given, layers[k], sums[k], of_layer, self._options)
        found = by_pairs[self.part, : self.width]
        if grad is None:
            found += given.view(found.shape)
        else:
            found.copy_(given.view(found.shape))

    def _of(self, inputs: _Inputs) -> _Inputs:
        return _Inputs(*(t[self.part, : self.width] for t in inputs))


class _Past(NamedTuple):
    """A gradient that was asked for, and how it changed."""

    made: int  # number of the backward pass of the change
    grad: Tensor  # (A, C, M), g
    cotangents: list[list[Cotangents]]
    change: _Inputs
    changes: list[list[Changes]]


class _Call:
    """One evaluation of all layers, with the numbers that its derivatives need.

    Args:
        options: of the layers.
        portions: of atoms, with the slots that are computed of each.
        mask: (A, K) bool, where there is a neighbor; None where the switch says it.
        num_slots: slots of an atom with those that are not here.
    """

    def __init__(
        self, options: AttentionOptions, portions: list[tuple[slice, int]], mask: Tensor | None, num_slots: int
    ) -> None:
        self._options, self._parts, self._mask, self._num_slots = options, portions, mask, num_slots
        self._portions: list[_Portion] = []
        self._past: list[_Past] = []

    def value(self, inputs: _Inputs, layers: Sequence[Weights]) -> Tensor:
        """Return the moments (A, C, M)."""
        for part, width in self._parts:
            mask = None if self._mask is None else self._mask[part, :width]
            around = Surroundings(
                inputs.switch[part, :width], inputs.sides[part, :width], mask, self._num_slots - width
            )
            self._portions.append(_Portion(part, width, inputs, around, layers, self._options))
        return torch.cat([portion.value for portion in self._portions])

    def gradient(
        self, grad: Tensor, inputs: _Inputs, layers: Sequence[Weights], sums: Sequence[Weights] | None
    ) -> tuple[_Inputs, list[list[Cotangents]]]:
        """Return the gradients by the inputs, and their intermediate values.

        Args:
            grad: (A, C, M) by the moments.
            inputs: of the evaluation.
            layers: parameters.
            sums: gradients by the parameters, which are added to, or None.
        """
        small = (torch.zeros_like(one) for one in inputs[1:])
        found = _Inputs(self._new_pairs(inputs.pairs), *small)
        return found, [portion.gradient(grad[portion.part], layers, sums, found) for portion in self._portions]

    def change(
        self, grad: Tensor, cotangents: list[list[Cotangents]], change: _Inputs, layers: Sequence[Weights]
    ) -> Tensor:
        """Return the change of the moments (A, C, M) as the inputs change, and keep it for :meth:`taken`."""
        values, changes = zip(*(portion.change(change, layers) for portion in self._portions))
        self._past.append(_Past(backward_pass(), grad, cotangents, change, list(changes)))
        return torch.cat(values)

    def taken(self) -> list[_Past]:
        """Return the gradients that changed in this backward pass with their changes, and forget all."""
        now, past, self._past = backward_pass(), self._past, []
        return [one for one in past if one.made == now]

    def second_gradient(
        self, grad: Tensor, past: list[_Past], pairs: Tensor, layers: Sequence[Weights], sums: Sequence[Weights]
    ) -> Tensor:
        """Return the gradient by the pairs (A, K, M) of ``grad`` times the moments and each ``g`` times its change.

        Args:
            grad: (A, C, M) by the moments.
            past: the gradients that were asked for; usually one.
            pairs: (A, K, M).
            layers: parameters.
            sums: gradients by the parameters, which are added to.
        """
        found = self._new_pairs(pairs)
        for k, one in enumerate(past):
            for number, portion in enumerate(self._portions):
                portion.second_gradient(None if k else grad, one, number, layers, sums, found)
        return found

    def _new_pairs(self, like: Tensor) -> Tensor:
        """Return an array (A, K, M) for the gradient by the pairs, with zeros in the slots that are not computed."""
        out = torch.empty_like(like)
        for part, width in self._parts:
            out[part, width:] = 0
        return out


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, pairs: Tensor, rows: Tensor, switch: Tensor, sides: Tensor, *weights: Tensor) -> Tensor:
        return call.value(_Inputs(pairs, rows, switch, sides), _by_layer(weights))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.call, *tensors = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, *tensors = ctx.saved_tensors
        call: _Call = ctx.call
        inputs, weights, layers = _Inputs(*tensors[:4]), tensors[4:], _by_layer(tensors[4:])
        if torch.is_grad_enabled():  # the gradient is differentiated
            if any(ctx.needs_input_grad[5:]):
                raise NotImplementedError("second derivatives by parameters: use the reference operations")
            found = _MomentsVjp.apply(_Gradient(call), grad, output, *tensors)
            return (None, *found, *[None] * len(weights))
        past, sums = call.taken(), [torch.zeros_like(one) for one in weights]
        if not past:
            by_inputs, _ = call.gradient(grad, inputs, layers, _by_layer(sums))
            return (None, *by_inputs, *sums)
        if any(ctx.needs_input_grad[2:5]):
            raise NotImplementedError("second derivatives by positions: use the reference operations")
        by_pairs = call.second_gradient(grad, past, inputs.pairs, layers, _by_layer(sums))
        return (None, by_pairs, None, None, None, *sums)


class _Gradient:
    """A gradient of the moments, with its intermediate values."""

    cotangents: list[list[Cotangents]]

    def __init__(self, call: _Call) -> None:
        self.call = call


class _MomentsVjp(torch.autograd.Function):
    """Gradients by the inputs, differentiable by the given gradient, the pairs and the parameters."""

    @staticmethod
    def forward(
        gradient: _Gradient, grad: Tensor, output: Tensor, pairs: Tensor, rows: Tensor, switch: Tensor, sides: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        inputs = _Inputs(pairs, rows, switch, sides)
        found, gradient.cotangents = gradient.call.gradient(grad, inputs, _by_layer(weights), None)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gradient, grad, _, *tensors = inputs
        ctx.save_for_backward(grad, *tensors[4:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *change: Tensor) -> tuple[Tensor | None, ...]:
        grad, *weights = ctx.saved_tensors
        found = ctx.gradient.call.change(grad, ctx.gradient.cotangents, _Inputs(*change), _by_layer(weights))
        # the gradients by pairs and parameters come from _Moments, to which zeros lead in any case
        return None, found, found.new_zeros(()).expand_as(found), *[None] * (4 + len(weights))


def _by_layer(weights: Sequence[Tensor]) -> list[Weights]:
    size = len(Weights._fields)
    return [Weights(*weights[start : start + size]) for start in range(0, len(weights), size)]
