"""A function with a written-out gradient and gradient of that: the layers of attention.

A function D of inputs x and weights W is evaluated by an object that keeps the values which its
derivatives need, and whose first input alone may depend on parameters. Forces are made of the
gradient ``J^T g``, of which a loss needs the gradient by g, by W and by that input. With the
cotangent t of ``J^T g`` these are ``J t``, the change of D as x changes by t, and the gradient of
``g . J t``. That is computed in one pass with the gradient by D itself: :class:`_Gradient` leaves t
in the evaluation, and returns zeros as the gradient by D, so that autograd calls :class:`Value` in
any case.

The object has ``past``, a list that is empty at first, and four methods:

- ``value(inputs, weights)`` returns D,
- ``gradient(g, weights)`` the gradients ``J^T g`` by the inputs, and what the last method needs of
  g,
- ``change(t, weights)`` the change ``J t`` of D as the inputs change, and what the last method
  needs of t,
- ``second_gradient(g, past, weights)`` the gradients by the first input and by the weights;
  ``past`` are the needs of another g and of t, for the gradient of ``g . J t``, which is added, or
  None.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Value(torch.autograd.Function):
    """D of an evaluation, the number of its inputs, these and the weights."""

    @staticmethod
    def forward(evaluation: Any, number: int, *tensors: Any) -> Tensor:
        """Return D."""
        value: Tensor = evaluation.value(tensors[:number], tensors[number:])
        return value

    # separate, as torch.func needs it
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the evaluation and the tensors."""
        ctx.evaluation = inputs[0]
        ctx.number = inputs[1]
        ctx.save_for_backward(output, *inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients by inputs and weights."""
        output, *tensors = ctx.saved_tensors
        evaluation = ctx.evaluation
        number = ctx.number
        needed = ctx.needs_input_grad[2:]
        weights = tensors[number:]
        if torch.is_grad_enabled():  # the gradient is differentiated
            if any(needed[number:]):
                raise NotImplementedError(
                    "second derivatives by parameters: use the reference operations"
                )
            # D is an input of the gradient, so that in a backward pass the gradient comes before
            # the value
            grads = _Gradient.apply(
                evaluation, SimpleNamespace(), number, grad, output, *tensors
            )
            return None, None, *grads, *[None] * len(weights)
        # entries of another pass were left by one that did not reach the value, for example because
        # it raised
        this_pass = backward_pass()
        entries = evaluation.past
        evaluation.past = []
        past = [
            (cotangents, changes)
            for pass_number, cotangents, changes in entries
            if pass_number == this_pass
        ]
        # derivatives by positions belong to the evaluation of the gradient, those by parameters to
        # the backward pass of a loss
        other_grads: list[Tensor | None] = [None] * (number - 1)
        if any(needed[1:number]):
            if past:
                raise NotImplementedError(
                    "second derivatives by positions: use the reference operations"
                )
            other_grads = list(evaluation.gradient(grad, weights)[0][1:])
        first_past = past[0] if past else None
        first, weight_grads = evaluation.second_gradient(grad, first_past, weights)
        for more in past[1:]:  # the gradient was computed several times
            # the gradient by D itself is counted once
            zeros = torch.zeros_like(grad)
            more_first, more_grads = evaluation.second_gradient(zeros, more, weights)
            first = first + more_first
            weight_grads = [a + b for a, b in zip(weight_grads, more_grads)]
        return None, None, first, *other_grads, *weight_grads


class _Gradient(torch.autograd.Function):
    """Gradients by the inputs, differentiable by the gradient of D, the first input and weights."""

    @staticmethod
    def forward(
        evaluation: Any,
        store: SimpleNamespace,
        number: int,
        grad: Tensor,
        output: Tensor,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        # not in a list, of which torch.func makes another one
        grads, store.cotangents = evaluation.gradient(grad, tensors[number:])
        return tuple(grads)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        # evaluation, store, number, gradient, D, the inputs and the weights
        ctx.evaluation = inputs[0]
        ctx.store = inputs[1]
        ctx.number = inputs[2]
        ctx.save_for_backward(*inputs[5 + ctx.number :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *changes: Tensor) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        evaluation = ctx.evaluation
        change, details = evaluation.change(changes, weights)
        evaluation.past.append((backward_pass(), ctx.store.cotangents, details))
        # the gradients by inputs and weights come from Value, to which zeros lead in any case;
        # expanded, they take no memory
        zeros = change.new_zeros(()).expand_as(change)
        return None, None, None, change, zeros, *[None] * (ctx.number + len(weights))


def backward_pass() -> int:
    """Return a number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())
