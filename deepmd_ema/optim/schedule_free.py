"""Schedule-free AdamW: gradients between a fast point and an average of it, in place of a decaying
learning rate.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from deepmd_ema.config.schema.averaging import share_of_next
from deepmd_ema.optim.guarded import (
    ADAM_EPS,
    WEIGHT,
    GuardedOptimizer,
    Out,
    ParameterVector,
    Values,
)


class AdamWScheduleFree(GuardedOptimizer):
    """Schedule-free AdamW (Defazio et al., arXiv:2405.15682, algorithm 1, as in the package
    schedulefree).

    The weights are y, at which the gradient g is taken. z is moved by it, and x is an average of
    all z:

        v <- b2 * v + (1 - b2) * g^2                               b1, b2 = adam_beta1, adam_beta2
        z <- z - lr * (g / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * y)
        x <- (1 - c) * x + c * z                                   c from :func:`share_of_next`
        y <- b1 * x + (1 - b1) * z

    x is not stored here: ``x = (y - (1 - b1) * z) / b1``. It is an average of y as well, which
    :class:`deepmd_ema.config.schema.averaging.ScheduleFreeProfile` describes. Without a gradient, z
    of a parameter stays, and its x and y come closer to z.

    Args:
        params: parameters that are trained, or groups of them.
        options: those of the section AdamWScheduleFree, ``lr``, and the ``warmup_steps`` and
            ``warmup_start_factor`` of the learning rate.
    """

    with_gradient_only: ClassVar[bool] = False

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return z at the weights, and zero moments; ``step`` counts gradients, ``averaged`` points
        in x.
        """
        counts = {
            name: torch.zeros((), dtype=torch.float32, device=p.device)
            for name in ("step", "averaged")
        }
        return {**counts, "z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}

    def updated(
        self, vector: ParameterVector, values: Values, out: Out, group: dict[str, Any]
    ) -> Values:
        """Return new weights and states by the formulas of the class."""
        y = values[WEIGHT]
        z = values["z"]
        lr = group["lr"]
        b1 = group["adam_beta1"]
        b2 = group["adam_beta2"]
        done, warmup = (
            values["averaged"].to(torch.float64),
            (group["warmup_steps"], group["warmup_start_factor"]),
        )
        share = share_of_next(done, *warmup, group["r"])
        new = {**values, "averaged": torch.add(values["averaged"], 1, out=out["averaged"])}
        near = torch.lerp(y, z, vector.per_entry(share.to(y.dtype)))
        if vector.parameters[0].grad is None:
            return {**new, WEIGHT: near}
        gradient = vector.gradient()
        new["step"] = torch.add(values["step"], 1, out=out["step"])
        square = torch.lerp(
            values["exp_avg_sq"], gradient * gradient, 1 - b2, out=out["exp_avg_sq"]
        )
        corrections = 1 - b2 ** new["step"].to(torch.float64)
        direction = gradient / (
            (square / vector.per_entry(corrections.to(y.dtype))).sqrt() + ADAM_EPS
        )
        direction = torch.add(direction, y, alpha=group["weight_decay"])
        moves = (lr * (1 - b1 * (1 - share))).to(y.dtype)
        new |= {
            "exp_avg_sq": square,
            WEIGHT: torch.sub(near, direction * vector.per_entry(moves), out=out[WEIGHT]),
        }
        return {**new, "z": torch.sub(z, (direction * lr).to(z.dtype), out=out["z"])}
