"""Optimizers of our own: a step that the device can skip, and Adam as one of their updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.dist.dtensor import local_shard

ADAM_EPS = 1e-8  # the default of Adam (arXiv:1412.6980, algorithm 1), of torch and of DeePMD-kit


class GuardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose :meth:`step` is skipped where ``found_inf`` is 1, as the fused ones of torch do.

    State is allocated at construction. A parameter without a gradient is left as it is.

    Args:
        params: parameters that are trained, or groups of them.
        options: those of the section of the optimizer by their names there, and ``lr``.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, options)
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


def adam_state(p: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the moments of Adam before the first update; those of :func:`adam_change` are in float32."""
    moments = {name: torch.zeros_like(p, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=p.device), **moments}


def adam_change(
    p: Tensor, group: dict[str, Any], state: dict[str, Tensor], eps: float = ADAM_EPS, decay: float = 0.0
) -> dict[str, Tensor]:
    """Return what an update of Adam, with moments in float32, makes of a parameter and its state.

    ``w <- (1 - lr * decay) * w - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` (arXiv:1412.6980, algorithm 1;
    the decay as in arXiv:1711.05101). With ``lr_adjust > 0`` the learning rate is divided by it.

    Args:
        p: the parameter, with a gradient.
        group: options ``lr``, ``lr_adjust``, ``adam_beta1`` and ``adam_beta2``.
        state: from :func:`adam_state`.
        eps: keeps the denominator from zero.
        decay: decoupled weight decay.
    """
    lr, b1, b2 = group["lr"], group["adam_beta1"], group["adam_beta2"]
    lr = lr / group["lr_adjust"] if group["lr_adjust"] > 0 else lr
    assert p.grad is not None
    gradient = local_shard(p.grad).to(torch.float32)
    step = state["step"] + 1
    mean = local_shard(state["exp_avg"]).lerp(gradient, 1 - b1)
    square = local_shard(state["exp_avg_sq"]).lerp(gradient.square(), 1 - b2)
    wide = step.to(torch.float64)  # b2^t is close to 1: float32 would lose the digits of 1 - b2^t
    rate = lr / (1 - b1**wide)
    direction = mean / ((square / (1 - b2**wide)).sqrt() + eps)
    new = local_shard(p) * (1 - lr * decay) - rate * direction
    return {"": new, "step": step, "exp_avg": mean, "exp_avg_sq": square}
