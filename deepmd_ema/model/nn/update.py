"""How features take the changes that the terms of a layer compute for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepmd_ema.seeds import seed_for

# C channels


class Update(nn.Module):
    """One of three styles of taking the changes ``u_1 ... u_n`` of features u.

    ``res_avg``: ``(u + u_1 + ... + u_n) / sqrt(n + 1)``; ``res_incr``: ``u + (u_1 + ... + u_n) / sqrt(n)``;
    ``res_residual``: ``u + r_1 u_1 + ... + r_n u_n``, each r a trained vector (C,).

    Args:
        style: its name.
        num_changes: n.
        width: C.
        scale: size of the numbers r at the start.
        init: ``norm``, random numbers of this standard deviation, or ``const``, this number.
        dtype: precision of the parameters.
        seed: of the initial parameters.
    """

    def __init__(
        self, style: str, num_changes: int, width: int, *, scale: float, init: str, dtype: torch.dtype, seed: int
    ) -> None:
        super().__init__()
        self.style = style
        generator = torch.Generator().manual_seed(seed_for("residual", seed))

        def draw() -> Tensor:
            if init == "const":
                return torch.full((width,), scale, dtype=dtype)
            return (scale * torch.randn(width, dtype=torch.float64, generator=generator)).to(dtype)

        trained = num_changes if style == "res_residual" else 0
        self.residuals = nn.ParameterList(nn.Parameter(draw()) for _ in range(trained))

    def forward(self, features: Tensor, changes: Sequence[Tensor]) -> Tensor:
        """Return the features (..., C) with their changes, each (..., C)."""
        if self.style == "res_residual":
            for residual, change in zip(self.residuals, changes, strict=True):
                features = features + residual * change
            return features
        if not changes:
            return features
        total = torch.stack(list(changes)).sum(0) if len(changes) > 1 else changes[0]
        if self.style == "res_incr":
            return features + total * len(changes) ** -0.5
        return (features + total) * (len(changes) + 1) ** -0.5
