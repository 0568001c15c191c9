"""Addition of updates to features, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepmd_ema.utils import seed_for


class Update(nn.Module):
    """``u + sum_k r_k u_k``, ``u + sum_k u_k / sqrt(n)`` or ``(u + sum_k u_k) / sqrt(n + 1)``.

    There are n updates ``u_k``.

    Args:
        width: of the features and the updates.
        num_updates: n.
        options: a section with ``update_style``, which is ``res_residual`` with trained vectors
            ``r_k``, ``res_incr`` or ``res_avg``, in the order above; ``update_residual``, the size
            of the ``r_k`` at the start; and ``update_residual_init``, ``const`` (all have this
            size) or ``norm`` (random, of this spread).
        dtype: precision of the ``r_k``.
        seed: of the ``r_k``.
    """

    def __init__(
        self,
        width: int,
        num_updates: int,
        options: Any,
        *,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        super().__init__()
        style = options.update_style
        size = options.update_residual
        is_random = options.update_residual_init == "norm"
        self.factor = {"res_incr": num_updates**-0.5}.get(style, 1.0)
        self.scale = (num_updates + 1) ** -0.5 if style == "res_avg" else 1.0
        self.num_updates = num_updates
        self.factors = nn.ParameterList()
        for k in range(num_updates if style == "res_residual" else 0):
            generator = torch.Generator().manual_seed(seed_for("update", seed, k))
            # drawn in float64 whatever the precision, so that both precisions start from the same
            # numbers
            drawn = torch.randn(width, dtype=torch.float64, generator=generator)
            self.factors.append(
                (size * (drawn if is_random else torch.ones_like(drawn))).to(dtype)
            )

    def forward(self, features: Tensor, updates: Sequence[Tensor]) -> Tensor:
        """Return the updated features (..., width)."""
        if len(self.factors) and features.dim() == 2:
            # features of atoms are few: all updates take one product and one sum. Those of pairs
            # are many, and a stack would copy them
            factors = torch.stack(
                [self.factors[k] for k in range(len(updates))]
            )  # (n, width)
            scaled = torch.stack(list(updates), 1) * factors  # (A, n, width)
            features = features + scaled.sum(1)
        else:
            for k, update in enumerate(updates):
                if len(self.factors):
                    features = features + update * self.factors[k]
                else:
                    features = torch.add(features, update, alpha=self.factor)
        return features if self.scale == 1 else features * self.scale

    def each_factor(self, like: Tensor) -> list[Tensor]:
        """Return the ``r_k``, or their equal number as tensors without dimensions.

        These are of the kind of ``like``.
        """
        if len(self.factors):
            return list(self.factors)
        return [like.new_full((), self.factor)] * self.num_updates
