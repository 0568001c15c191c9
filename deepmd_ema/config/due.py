"""Validations and checkpoints that are due in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmd_ema.config.schema.run import RunConfig


@dataclass(frozen=True)
class Due:
    """Steps after which something is done: every so many from the first on, and after the last step.

    Attributes:
        first: first of the steps; 0: ``every``.
        every: steps between two; 0: only after the last step.
        last: the last step of the run.
    """

    first: int
    every: int
    last: int

    def count(self, after: int = 0) -> int:
        """Return the number of times it is due in the steps after step ``after``."""
        if after >= self.last:
            return 0
        start = self.first or self.every
        if self.every > 0 and start <= after:
            start += (after - start) // self.every * self.every + self.every
        due = range(start, self.last + 1, self.every) if self.every > 0 else range(0)
        return len(due) + (self.last not in due)


def due_in(config: RunConfig, num_steps: int) -> dict[str, Due]:
    """Return when a run of so many steps writes a ``checkpoint``, and when it does a full ``validation`` if ever."""
    found = {"checkpoint": Due(0, config.training.save_freq, num_steps)}
    start = config.validating.full_val_start
    if start != 1 and config.fully_validated and config.has_validation_data:
        first = int(start * num_steps) if start < 1 else int(start)
        found["validation"] = Due(first, config.validating.validation_freq, num_steps)
    return found
