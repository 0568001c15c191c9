"""Schedule-free AdamW: an average of the weights in place of a decaying learning rate."""

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
    """Schedule-free AdamW (Defazio et al., arXiv:2405.15682, algorithm 1).

    It gives the numbers of the package schedulefree.
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
        """Return z at the weights, and zero moments.

        ``step`` counts gradients, ``averaged`` the points in x.
        """
        # Two counters: with several tasks a step gives a gradient to the parameters of one task
        # only, while the average x of all parameters takes in a point at every step.
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
        # The counter is stored in float32, exact up to 2^24; the share, about 1 / steps, is
        # computed in float64, so that the average does not drift in a long run.
        done = values["averaged"].to(torch.float64)  # (parameters,)
        share = share_of_next(
            done, group["warmup_steps"], group["warmup_start_factor"], group["r"]
        )
        new = {
            **values,
            "averaged": torch.add(values["averaged"], 1, out=out["averaged"]),
        }
        # x and y lie on a line through z: as x moves by the share c towards z, so does y
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
        # the decay is taken at y, as in the package; y is unchanged in memory until the last lines
        direction = torch.add(direction, y, alpha=group["weight_decay"])
        # A move of z by d moves x by c * d, so y = b1 * x + (1 - b1) * z moves by
        # (b1 * c + 1 - b1) * d, which is the factor below.
        moves = (lr * (1 - b1 * (1 - share))).to(y.dtype)
        new |= {
            "exp_avg_sq": square,
            WEIGHT: torch.sub(
                near, direction * vector.per_entry(moves), out=out[WEIGHT]
            ),
        }
        return {**new, "z": torch.sub(z, (direction * lr).to(z.dtype), out=out["z"])}
