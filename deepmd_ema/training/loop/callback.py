"""Callbacks of a run, and the request to stop it."""

from __future__ import annotations

import signal
import time
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepmd_ema.training.loop.trainer import Trainer

SAME_CTRL_C_S = 1.0  # torchrun and the terminal both send it, and the second is no wish to end at once


class StopRequest:
    """The first SIGTERM, SIGHUP or Ctrl-C, which the loop checks after a step; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._since = 0.0

    def request(self, number: int, _frame: FrameType | None = None) -> None:
        """Ask the run to stop, as the signal ``number`` does."""
        if self.signal is None:
            self.signal, self._since = signal.Signals(number), time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._since > SAME_CTRL_C_S:
            raise KeyboardInterrupt


class Callback:
    """Watches a run; the trainer calls these methods, which do nothing here. It must not change what it is shown.

    Everything of the trainer that has no underscore may be read; ``trainer.stop.request`` ends a run as a signal does.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step, after a restart has loaded everything."""

    def during(self, trainer: Trainer, phase: str) -> AbstractContextManager[Any]:
        """Return the context of a ``step`` with all that is due after it, or in it of one of these.

        They are a ``display``, a ``validation`` and a ``checkpoint``.
        """
        return nullcontext()

    def after_update(self, trainer: Trainer) -> None:
        """Called when weights and averages are those of a step, before anything that is due is shown or saved."""

    def in_validation(self, trainer: Trainer, weights: str) -> None:
        """Called with the weights ``live``, or those of an average, in the models, before they are evaluated."""

    def after_step(self, trainer: Trainer) -> None:
        """Called when everything that was due after a step is done."""

    def on_end(self, trainer: Trainer) -> None:
        """Called after the last step, when all is saved and closed."""
