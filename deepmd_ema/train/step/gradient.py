"""Training steps that follow the gradient of the loss with an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.optim.build import clip_gradients, guarded_step, load_optimizer_state, optimizer_state
from deepmd_ema.train.step.base import Outcome, Step

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.optim.schedule import Schedule
    from deepmd_ema.train.task import Task


class GradientStep(Step):
    """Follows the gradient of the loss with an optimizer.

    Args:
        module: owner of the parameters, by the names that checkpoints use.
        optimizer: from :func:`build_optimizer`, over ``module``'s trainable parameters.
        schedule: learning rate as a function of the 0-based step.
        max_norm: largest global L2 norm of the gradient, or None for no clipping.
        all_reduce_sum: adds a scalar up over the ranks, when each holds a part of every gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        max_norm: float | None,
        all_reduce_sum: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(module)
        self._all_reduce_sum = all_reduce_sum
        self._optimizer, self._schedule, self._max_norm = optimizer, schedule, max_norm

    def __call__(self, task: Task, batch: Batch, step: int) -> Outcome:
        """Update the weights with one batch; ``step`` counts from 1."""
        rate = self._schedule(step - 1)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=True)
        prediction = task.parallel_module(task.name, batch, need_virial=task.loss.need_virial)
        total, values = task.loss(prediction, batch, rate)
        total.backward()
        norm = clip_gradients(self._trained, self._max_norm, self._all_reduce_sum)
        # both are the same on all ranks
        finite = torch.isfinite(norm) & torch.isfinite(values["rmse"])
        ok = self._note(finite, step, own=torch.isfinite(total.detach()))
        guarded_step(self._optimizer, 1 - ok)
        return Outcome(rate, values, ok)

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return moments and counters by parameter name; every rank takes part, and those that ``keep`` get them."""
        return optimizer_state(self._optimizer, self._named, keep)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the moments and counters of ``state``."""
        load_optimizer_state(self._optimizer, self._named, state)
