"""Products of functions on a grid from their coefficients, in portions of columns, and all derivatives.

``Z ((X a) * (Y b))`` is linear in a and in b, so that its gradients are of the same form: by a it is
``X^T ((Z^T g) * (Y b))``. The values on the grid are computed again each time: to keep them takes more memory, and more
time than the small products of matrices.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from deepmd_ema.model.ops.cpu.engine import portions

# J coefficients, G points of the grid, N columns


def grid_product(a: Tensor, b: Tensor, maps: tuple[Tensor, Tensor, Tensor], numbers_in_cache: int) -> Tensor:
    """Return ``Z ((X a) * (Y b))`` (J, N).

    Args:
        a: (J, N).
        b: (J, N).
        maps: X (G, J), Y (G, J) and Z (J, G), constants.
        numbers_in_cache: of a portion, for each thread.
    """
    return cast("Tensor", _Product.apply(a, b, *maps, numbers_in_cache))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, x: Tensor, y: Tensor, z: Tensor, numbers_in_cache: int) -> Tensor:
        out = a.new_empty(len(z), a.shape[1])
        for part in portions(a.shape[1], 2 * len(x), numbers_in_cache):
            values = torch.mm(x, a[:, part])
            values.mul_(torch.mm(y, b[:, part]))
            out[:, part] = torch.mm(z, values)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        *tensors, ctx.numbers_in_cache = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, x, y, z = ctx.saved_tensors
        by_a = grid_product(grad, b, (z.T, y, x.T), ctx.numbers_in_cache) if ctx.needs_input_grad[0] else None
        by_b = grid_product(grad, a, (z.T, x, y.T), ctx.numbers_in_cache) if ctx.needs_input_grad[1] else None
        return by_a, by_b, None, None, None, None
