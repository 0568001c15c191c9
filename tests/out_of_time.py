"""A run whose time is over at a known step."""

from __future__ import annotations

from deepmd_ema.training.trainer import Callback


class OutOfTime(Callback):
    """Lets the time be over: after a step, or in the validation of the averaged weights after it."""

    def __init__(self, step, in_validation=False):
        self.step, self.in_average = step, in_validation

    def after_update(self, trainer):
        if trainer.step == self.step and not self.in_average:
            trainer.deadline = 0.0

    def in_validation(self, trainer, weights):
        if trainer.step == self.step and weights == "ema":
            trainer.deadline = 0.0
