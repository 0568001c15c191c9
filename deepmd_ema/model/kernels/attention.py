"""A layer of attention among the neighbors of an atom, with its gradient and the gradient of that written out.

With the channels X (K, M) of the pairs of an atom, the switch w and the directions d of its neighbors::

    [q, k, v] = X W_in + b_in            each row of length 1 if ``unit``
    P = softmax(scaling q k^T)           if smooth, of (scaling q_j . k_k + 20) w_j w_k - 20
    U_jk = P_jk w_j w_k (d_j . d_k)      the last factor if ``gated``
    Y = layer_norm(X + U v W_out + b_out)

The switch goes into the rows: with ``q' = scaling w q`` and ``k' = w k`` the logits are ``q' k'^T + 20 w w^T`` up to
the constant 20, and with ``h = w d`` the factor of P is ``h h^T``. So there are few passes over (K, K).

The kernel by hand goes through portions of atoms that stay in a cache, sorted by their numbers of neighbors, so that
few empty slots are computed. Its gradient ``J^T g`` becomes forces, of which a loss asks the gradient by g and by the
parameters. With the cotangent t of ``J^T g`` these are ``J t``, the change of Y as the inputs change by t, and the
gradient of ``g . J t``. The latter is found together with the gradient by Y itself, in one pass over the portions:
:class:`_LayerVjp` leaves t behind, and returns zeros as the gradient by Y, so that autograd comes to :class:`_Layer` in
any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.kernels.attention_layer import (
    AttentionOptions,
    Changes,
    Cotangents,
    Past,
    Surroundings,
    Values,
    by_surroundings,
    evaluate,
    pull,
    push,
)
from deepmd_ema.model.kernels.norm import normalised
from deepmd_ema.model.kernels.twin import Kernel
from deepmd_ema.model.kernels.unit import unit_rows
from deepmd_ema.model.nn.attention import Weights

# A atoms, K neighbor slots, M channels of a pair, H hidden width

NUMBERS_IN_CACHE = 1 << 17  # of queries, keys and values of a portion of atoms, for each thread of a CPU
LOGIT_SHIFT = 20.0  # a neighbor at the cutoff has the logit of an empty slot, -20, in smooth attention; as DeePMD-kit


def softmax_with_absent(logits: Tensor, num_slots: int) -> Tensor:
    """Return the softmax of ``logits`` (..., K) among ``num_slots`` of which those beyond K are empty, at -20."""
    absent = torch.full_like(logits[..., :1], num_slots - logits.shape[-1]).log() - LOGIT_SHIFT
    return torch.cat([logits, absent], -1).softmax(-1)[..., :-1]


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax of ``logits`` (..., K) where ``mask`` is true; equal numbers where it is nowhere true."""
    # finite, so that a row of empty slots has no nan
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1)


def _plain(
    pairs: Tensor, mask: Tensor, switch: Tensor, direction: Tensor, num_slots: int, layers: Sequence[Weights],
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    for weights in layers:
        pairs = _plain_layer(pairs, mask, switch, direction, num_slots, weights, options)
    return pairs


def _plain_layer(
    pairs: Tensor, mask: Tensor, switch: Tensor, direction: Tensor, num_slots: int, weights: Weights,
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    flat = torch.addmm(weights.in_bias, pairs.flatten(0, -2), weights.in_weight)
    projected = flat.view(*pairs.shape[:-1], len(weights.in_bias)).unflatten(-1, (3, -1))
    query, key, value = (unit_rows(projected) if options.unit else projected).unbind(-2)
    logits = torch.bmm(query * options.scaling, key.transpose(1, 2))
    both = switch[:, :, None] * switch[:, None, :]
    if options.shift is not None:
        logits = (logits + options.shift) * both - options.shift
        attention, factor = softmax_with_absent(logits, num_slots), both  # 0 where there is no neighbor
    else:
        attention, factor = masked_softmax(logits, mask[:, None, :]), mask[:, :, None].to(logits.dtype)
    if options.gated:
        factor = factor * torch.bmm(direction, direction.transpose(1, 2))
    attended = torch.bmm(attention * factor, value)
    flat = torch.addmm(weights.out_bias, attended.flatten(0, -2), weights.out_weight)
    return normalised(pairs + flat.view(pairs.shape), weights.norm_weight, weights.norm_bias, options.eps)


def _by_hand(
    pairs: Tensor, mask: Tensor, switch: Tensor, direction: Tensor, num_slots: int, layers: Sequence[Weights],
    options: AttentionOptions,
) -> Tensor:  # fmt: skip
    if not pairs.numel():
        return _plain(pairs, mask, switch, direction, num_slots, layers, options)
    smooth = options.shift is not None
    inside = switch.detach() != 0 if smooth else mask
    if not smooth:
        switch = mask.to(pairs.dtype)
    sides = switch.unsqueeze(-1)
    if options.gated:
        sides = direction * sides if smooth else direction
    if not smooth:
        switch = torch.ones_like(switch)
    on_cpu = pairs.device.type == "cpu"  # elsewhere all at once, without asking the device
    portions = [(slice(0, len(pairs)), pairs.shape[1])]
    if on_cpu:
        counts, order = _last(inside).sort(stable=True)
        portions = _portions(counts, layers[0])
        mask, pairs, switch, sides = (t.index_select(0, order) for t in (mask, pairs, switch, sides))
    for weights in layers:
        call = _Call(options, portions, None if smooth else mask, num_slots)
        pairs = _Layer.apply(call, pairs, switch, sides, *weights)
    return pairs.index_select(0, order.argsort()) if on_cpu else pairs


def _last(inside: Tensor) -> Tensor:
    """Return how many slots (A,) there are up to the last one that is ``inside`` (A, K), at least 1."""
    places = torch.arange(1, inside.shape[1] + 1, device=inside.device)
    return (inside * places).amax(1).clamp(min=1)


def _portions(counts: Tensor, weights: Weights) -> list[tuple[slice, int]]:
    """Return portions of atoms that stay in the cache of a CPU, and their slots, from those of each atom, ascending."""
    most, step = int(counts[-1]), NUMBERS_IN_CACHE * torch.get_num_threads()
    step = max(1, step // (most * len(weights.in_bias)))
    parts = [slice(start, start + step) for start in range(0, len(counts), step)]
    return [(part, int(counts[part][-1])) for part in parts]


class _Call:
    """One evaluation of a layer, with the numbers that its derivatives need.

    Args:
        options: of the layer.
        portions: of atoms, with the slots up to the last neighbor of each.
        mask: (A, K) bool, where there is a neighbor; None where the switch says it.
        num_slots: slots of an atom with those that are not here.
    """

    def __init__(
        self, options: AttentionOptions, portions: list[tuple[slice, int]], mask: Tensor | None, num_slots: int
    ) -> None:
        self._options, self._portions, self._mask, self._num_slots = options, portions, mask, num_slots
        self._values: list[Values] = []
        self._past: list[tuple[int, list[Cotangents], list[Changes]]] = []

    def value(self, pairs: Tensor, switch: Tensor, sides: Tensor, weights: Weights) -> Tensor:
        """Return the output (A, K, M)."""
        out = torch.empty_like(pairs)
        for part, width in self._portions:
            mask = None if self._mask is None else self._mask[part, :width]
            around = Surroundings(switch[part, :width], sides[part, :width], mask, self._num_slots - width)
            out[part], values = evaluate(pairs[part], around, weights, self._options)
            self._values.append(values)
        return out

    def gradient(
        self, grad: Tensor, weights: Weights, sums: Weights | None
    ) -> tuple[Tensor, Tensor, Tensor, list[Cotangents]]:
        """Return the gradients by pairs, switch and sides, and their intermediate values.

        Args:
            grad: (A, K, M) by the output.
            weights: of the layer.
            sums: gradients by the parameters, which are added to, or None.
        """
        by_pairs, found = torch.empty_like(grad), []
        columns = self._values[0].around.sides.shape[-1]
        by_switch, by_sides = grad.new_zeros(grad.shape[:2]), grad.new_zeros(*grad.shape[:2], columns)
        for (part, width), values in zip(self._portions, self._values):
            by_pairs[part], cotangents = pull(values, grad[part], weights, sums, None, self._options)
            by_switch[part, :width], by_sides[part, :width] = by_surroundings(values, cotangents, self._options)
            found.append(cotangents)
        return by_pairs, by_switch, by_sides, found

    def change(self, of: list[Cotangents], pairs: Tensor, switch: Tensor, sides: Tensor, weights: Weights) -> Tensor:
        """Return the change of the output (A, K, M) as the inputs change, and keep it for :meth:`taken`."""
        out, found = torch.empty_like(pairs), []
        for (part, width), values in zip(self._portions, self._values):
            inputs = (pairs[part], switch[part, :width], sides[part, :width])
            out[part], changes = push(values, *inputs, weights, self._options)
            found.append(changes)
        self._past.append((_backward_pass(), of, found))
        return out

    def taken(self) -> list[list[Past]]:
        """Return the gradients that changed in this backward pass with their changes, and forget all."""
        now, past, self._past = _backward_pass(), self._past, []
        return [list(zip(of, changes)) for made, of, changes in past if made == now]

    def second_gradient(self, grad: Tensor, past: list[Past], weights: Weights, sums: Weights) -> Tensor:
        """Return the gradient by the pairs (A, K, M) of ``grad`` times the output and ``g`` times its change.

        Args:
            grad: (A, K, M) by the output.
            past: a gradient of each portion and its change.
            weights: of the layer.
            sums: gradients by the parameters, which are added to.
        """
        found = torch.empty_like(grad)
        for (part, _), values, of_part in zip(self._portions, self._values, past):
            found[part], _ = pull(values, grad[part], weights, sums, of_part, self._options)
        return found


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(call: _Call, pairs: Tensor, switch: Tensor, sides: Tensor, *weights: Tensor) -> Tensor:
        return call.value(pairs, switch, sides, Weights(*weights))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.call, *tensors = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        output, pairs, switch, sides, *weights = ctx.saved_tensors
        call: _Call = ctx.call
        if torch.is_grad_enabled():  # the gradient is differentiated
            if any(ctx.needs_input_grad[4:]):
                raise NotImplementedError("second derivatives by parameters: use plain_kernels()")
            inputs = (pairs, switch, sides, *weights)
            return (None, *_LayerVjp.apply(_Gradient(call), grad, output, *inputs), *[None] * len(weights))
        past, of_layer = call.taken(), Weights(*weights)
        sums = Weights(*(torch.zeros_like(one) for one in weights))
        if not past:
            *found, _ = call.gradient(grad, of_layer, sums)
            return (None, *found, *sums)
        if any(ctx.needs_input_grad[2:4]):
            raise NotImplementedError("second derivatives by positions: use plain_kernels()")
        by_pairs = call.second_gradient(grad, past[0], of_layer, sums)
        for more in past[1:]:  # the gradient was asked for several times
            by_pairs += call.second_gradient(torch.zeros_like(grad), more, of_layer, sums)
        return (None, by_pairs, None, None, *sums)


class _Gradient:
    """A gradient of a layer, with its intermediate values."""

    found: list[Cotangents]

    def __init__(self, call: _Call) -> None:
        self.call = call


class _LayerVjp(torch.autograd.Function):
    """Gradients by pairs, switch and sides, differentiable by the given gradient, the pairs and the parameters."""

    @staticmethod
    def forward(
        gradient: _Gradient, grad: Tensor, output: Tensor, pairs: Tensor, switch: Tensor, sides: Tensor,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        *found, gradient.found = gradient.call.gradient(grad, Weights(*weights), None)
        return found[0], found[1], found[2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.gradient = inputs[0]
        ctx.save_for_backward(*inputs[6:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, pairs: Tensor, switch: Tensor, sides: Tensor) -> tuple[Tensor | None, ...]:
        weights = Weights(*ctx.saved_tensors)
        change = ctx.gradient.call.change(ctx.gradient.found, pairs, switch, sides, weights)
        # the gradients by pairs and parameters come from _Layer, to which zeros lead in any case
        return None, change, change.new_zeros(()).expand_as(change), None, None, None, *[None] * len(weights)


def _backward_pass() -> int:
    """Return a number of the backward pass that is under way."""
    return int(torch._C._current_graph_task_id())


attention_layers = Kernel("attention_layers", _by_hand, _plain)
