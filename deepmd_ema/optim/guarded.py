"""What optimizers of our own share: a step that the device can call off, and parameters of which a rank has a part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.dist.dtensor import local_shard


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` looks at ``found_inf``, as the fused ones of torch do.

    Its state stands from the start. A parameter without a gradient is left as it is.

    Attributes:
        knows_found_inf: that a step can be called off by setting ``found_inf`` (scalar, 1: nothing changes).
    """

    knows_found_inf = True

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = self.first_state(p, group)

    def first_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first update."""
        raise NotImplementedError

    def change(self, p: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return what one update makes of a parameter that has a gradient; nothing is written here.

        Args:
            p: the parameter, of which this rank may have a part.
            group: its options, with ``lr``.
            state: its state.

        Returns:
            This rank's part of the new state by the names of ``state``, and of the new parameter as ``""``.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Sharded parameters: every rank must call this."""
        assert closure is None, "no optimizer here evaluates the loss again"
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for name, value in self.change(p, group, state).items():
                    target = local_shard(state[name] if name else p)
                    target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value))


def adam_state(p: Tensor) -> dict[str, Tensor]:
    """Return the moments of :func:`adam_change` before the first update."""
    moments = {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}


def adam_change(
    p: Tensor, state: dict[str, Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float = 0.0
) -> dict[str, Tensor]:
    """Return what an update of Adam, with moments in float32, makes of a parameter and its state.

    ``w <- (1 - lr * decay) * w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` (arXiv:1412.6980, algorithm 1;
    the decay as in arXiv:1711.05101).

    Args:
        p: the parameter, with a gradient.
        state: from :func:`adam_state`.
        lr: learning rate.
        betas: decays b1 and b2 of the means of gradient and squared gradient.
        eps: keeps the denominator from zero.
        decay: decoupled weight decay.
    """
    assert p.grad is not None
    gradient = local_shard(p.grad).to(torch.float32)
    step = state["step"] + 1
    mean = local_shard(state["exp_avg"]).lerp(gradient, 1 - betas[0])
    square = local_shard(state["exp_avg_sq"]).lerp(gradient.square(), 1 - betas[1])
    wide = step.to(torch.float64)
    rate = lr / (1 - betas[0] ** wide)
    direction = mean / ((square / (1 - betas[1] ** wide)).sqrt() + eps)
    new = local_shard(p) * (1 - lr * decay) - rate * direction
    return {"": new, "step": step, "exp_avg": mean, "exp_avg_sq": square}
