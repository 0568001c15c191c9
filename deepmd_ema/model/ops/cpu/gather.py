"""The maps between atoms and pairs of :mod:`deepmd_ema.model.ops.gather` as functions that are each other's derivative.

Autograd derives the map to pairs from a write into all slots, which costs zeros and a further pass.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from deepmd_ema.model.ops.gather import gather_neighbors, sum_over_reverse

# A atoms, K neighbor slots, M reverse slots, C channels


def gather(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    """Return (A, K, C) from (A, C), as ``gather_neighbors``."""
    return cast("Tensor", _Gather.apply(node, neighbor, reverse))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        # a batch without columns of `reverse` takes the branch that only reads
        return gather_neighbors(node, neighbor, reverse[:, :0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return cast("Tensor", _Sum.apply(grads[0], *ctx.saved_tensors)), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        if reverse.shape[1] == 1:  # nothing to be added
            return gather_neighbors(pair.flatten(0, 1), reverse, reverse[:0, :0]).squeeze(1)
        return sum_over_reverse(pair, neighbor, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return cast("Tensor", _Gather.apply(grads[0], *ctx.saved_tensors)), None, None
