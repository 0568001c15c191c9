"""The vector-Jacobian product of a descriptor that has none written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp


def with_vjp(function: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[Tensor, Vjp]:
    """Return ``function(vector)`` and its vector-Jacobian product, an ordinary function of the parameters.

    Args:
        function: from the vectors of a batch (A, K, 3) to features (A, D); only operations that ``torch.func`` knows.
        vector: ``batch.vector``.
    """
    features, vjp = torch.func.vjp(function, vector)  # type: ignore[misc]  # three values with has_aux only

    def grad_vector(grad_features: Tensor) -> Tensor:
        (grad,) = vjp(grad_features)
        return grad

    return features, grad_vector
