"""Functions whose gradient, and the gradient of that gradient, are written out.

A function D of inputs x and weights W is evaluated by an object that keeps the values which its derivatives need.
Forces are made of the gradient ``J^T g``, of which a loss needs the gradient by g, by W and by some of the x. With the
cotangent t of ``J^T g`` these are ``J t``, the change of D as x changes by t, and the gradient of ``g . J t``. That is
computed in one pass with the gradient by D itself: :class:`_Gradient` leaves t in the evaluation, and returns zeros as
the gradient by D, so that autograd calls :class:`_Value` in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Evaluation:
    """One evaluation of a function, with the values that its derivatives need.

    Attributes:
        num_trained: how many of the inputs, from the first one on, may depend on parameters.
    """

    num_trained: ClassVar[int] = 1

    def __init__(self) -> None:
        self._past: list[tuple[int, Any, Any]] = []  # backward pass, cotangents and changes

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return D."""
        raise NotImplementedError

    def gradient(self, grad: Tensor, weights: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
        """Return the gradients ``J^T g`` by the inputs from that by D, and what :meth:`second_gradient` needs of g."""
        raise NotImplementedError

    def change(self, changes: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the change ``J t`` of D as the inputs change, and what :meth:`second_gradient` needs of t."""
        raise NotImplementedError

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return gradients by the trained inputs and by the weights.

        Args:
            grad: g of D, whose gradient these are.
            past: of another g and of t; the gradient of ``g . J t`` is added. Or None.
            weights: as in :meth:`value`.
        """
        raise NotImplementedError

    def pop_past(self) -> list[tuple[Any, Any]]:
        """Return and forget the records of the gradients that were differentiated in this backward pass."""
        # those of another pass were left by one that did not reach the value, such as one that raised
        now, past, self._past = backward_pass(), self._past, []
        return [(cotangents, changes) for made, cotangents, changes in past if made == now]

    def keep_past(self, cotangents: Any, changes: Any) -> None:
        """Keep for :meth:`pop_past` in this backward pass."""
        self._past.append((backward_pass(), cotangents, changes))


def value_and_vjp(
    evaluation: Evaluation, inputs: Sequence[Tensor], weights: Sequence[Any]
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return D and a function from the gradient by it to those by the inputs, which depends on the weights."""
    number = len(inputs)
    # D is an input of the gradient, so that in a backward pass the gradient comes before the value
    found: Tensor = _Value.apply(evaluation, number, *inputs, *weights)
    return found, lambda grad: _Gradient.apply(_Kept(evaluation), number, grad, found, *inputs, *weights)


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(evaluation: Evaluation, number: int, *tensors: Any) -> Tensor:
        return evaluation.value(tensors[:number], tensors[number:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.evaluation, ctx.number, *tensors = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, *tensors = ctx.saved_tensors
        evaluation, number, needed = ctx.evaluation, ctx.number, ctx.needs_input_grad[2:]
        weights = tensors[number:]
        if torch.is_grad_enabled():  # the gradient is differentiated
            if any(needed[number:]):
                raise NotImplementedError("second derivatives by parameters: use the reference operations")
            found = _Gradient.apply(_Kept(evaluation), number, grad, output, *tensors)
            return None, None, *found, *[None] * len(weights)
        past, trained = evaluation.pop_past(), evaluation.num_trained
        # by positions only while the gradient is evaluated, by parameters only in the backward pass of a loss
        of_inputs: list[Tensor | None] = [None] * number
        if any(needed[trained:number]):
            if past:
                raise NotImplementedError("second derivatives by positions: use the reference operations")
            of_inputs = list(evaluation.gradient(grad, weights)[0])
        of_inputs[:trained], of_weights = evaluation.second_gradient(grad, past[0] if past else None, weights)
        for more in past[1:]:  # the gradient was computed several times
            again = evaluation.second_gradient(torch.zeros_like(grad), more, weights)
            of_inputs[:trained] = [a + b for a, b in zip(of_inputs, again[0])]
            of_weights = [None if a is None or b is None else a + b for a, b in zip(of_weights, again[1])]
        return None, None, *of_inputs, *of_weights


class _Kept:
    """A gradient of an evaluation."""

    cotangents: Any

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation


class _Gradient(torch.autograd.Function):
    """Gradients by the inputs, differentiable by the given gradient, the trained inputs and the weights."""

    @staticmethod
    def forward(kept: _Kept, number: int, grad: Tensor, output: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        found, kept.cotangents = kept.evaluation.gradient(grad, tensors[number:])
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kept, number, _, _, *tensors = inputs
        ctx.number = number
        ctx.save_for_backward(*tensors[number:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *changes: Tensor) -> tuple[Tensor | None, ...]:
        weights, evaluation = ctx.saved_tensors, ctx.kept.evaluation
        change, details = evaluation.change(changes, weights)
        evaluation.keep_past(ctx.kept.cotangents, details)
        # the gradients by inputs and weights come from _Value, to which zeros lead in any case; expanded, they take no
        # memory
        return None, None, change, change.new_zeros(()).expand_as(change), *[None] * (ctx.number + len(weights))


def backward_pass() -> int:
    """Return a number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())
