"""The base of training steps: the outcome of one, and the guard against numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepmd_ema.errors import DivergedError

if TYPE_CHECKING:
    from deepmd_ema.batch import Batch
    from deepmd_ema.train.task import Task, TaskMixture


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step, on the device.

    Attributes:
        learning_rate: the rate that the step used.
        values: name to detached scalar for the learning curve (``rmse``, ``rmse_e``, ...).
        ok: scalar, 1 when loss and gradients were finite and the update was made, else 0.
    """

    learning_rate: float
    values: Mapping[str, Tensor]
    ok: Tensor


class Step:
    """Takes the steps of a run; a subclass says how one batch changes the weights.

    After the first step that was not finite no later one changes the weights, on the device and without waiting for
    it; :meth:`raise_if_diverged` then names the step.

    Args:
        module: owner of the parameters, by the names that checkpoints use.
    """

    stands = "as before that step"  # the weights, after a step that was not finite
    remedy = "lower learning_rate.start_lr, or set training.gradient_max_norm"

    def __init__(self, module: nn.Module) -> None:
        # asked now: a module that FSDP has left gathered after a forward pass names other objects
        self._named = dict(module.named_parameters())
        self._trained = [p for p in self._named.values() if p.requires_grad]
        self._first_bad = torch.zeros((), dtype=torch.int64, device=self._trained[0].device)
        self._own_fault = torch.zeros((), dtype=torch.bool, device=self._trained[0].device)

    def __call__(self, task: Task, batch: Batch, step: int) -> Outcome:
        """Update the weights with one batch; ``step`` counts from 1."""
        raise NotImplementedError

    def state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Return what the optimizer remembers, by parameter name; every rank takes part, those that ``keep`` get it."""
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what the optimizer of ``state`` remembers."""
        raise NotImplementedError

    @property
    def checks_are_free(self) -> bool:
        """Whether reading a number from the device costs no wait, so that each step may be checked."""
        return self._first_bad.device.type == "cpu"

    def is_own_fault(self) -> bool:
        """Whether it was the loss of this rank's own frames that was not finite; waits for the device."""
        return bool(self._own_fault)

    def raise_if_diverged(self, tasks: TaskMixture, last_step: int) -> None:
        """Raise :class:`DivergedError` with step, task and frames if any step so far was not finite."""
        bad = int(self._first_bad)  # waits for the device
        if not bad:
            return
        task = tasks.draw(bad)
        behind = sum(tasks.draw(step) is task for step in range(bad, last_step + 1))
        loader = task.train_loader
        frames = loader.frames_at(loader.position - behind)
        shown = ", ".join(f"{system} frame {index}" for system, index in frames[:8])
        more = f" and {len(frames) - 8} more" if len(frames) > 8 else ""
        named = f" (task {task.name})" if task.name else ""
        raise DivergedError(
            f"step {bad}{named}: the loss or a gradient is not finite. Frames of the batch: {shown}{more}. The weights "
            f"stand {self.stands} and no checkpoint with bad numbers was written. Look at these frames with "
            f"`dp-ema check`, {self.remedy}."
        )

    def _note(self, finite: Tensor, step: int, own: Tensor | None = None) -> Tensor:
        """Return 1, or 0 if ``step`` or one before it was not finite, and remember the first such step.

        Args:
            finite: scalar, the same on all ranks, so that all of them decide alike.
            step: from 1.
            own: whether what this rank alone has computed is finite; ``finite`` if not given.
        """
        good = finite & (self._first_bad == 0)
        self._own_fault = torch.where(self._first_bad == 0, ~(finite if own is None else own), self._own_fault)
        self._first_bad = torch.where(good | (self._first_bad > 0), self._first_bad, step)
        return good.to(torch.float32)
