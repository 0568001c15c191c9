"""What is averaged how: the settings of one average."""

from __future__ import annotations

from dataclasses import dataclass

from deepmd_ema.errors import ConfigError


@dataclass(frozen=True)
class AverageProfile:
    """One exponential average.

    Attributes:
        name: in file names (``model_<name>.ckpt``) and logs.
        decay: d, 0 <= d < 1, per optimizer step.
        warmup: whether update t (from 0) uses ``min(d, (1 + t) / (10 + t))``, so that the start is soon forgotten.
        start_step: the average is the live weights up to this step, and is updated after it.
        update_every: optimizer steps between two updates; the decay is corrected for it.
    """

    name: str
    decay: float
    warmup: bool = True
    start_step: int = 0
    update_every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigError(f"average {self.name!r}: decay {self.decay}, expected 0 <= decay < 1.")
        if self.update_every < 1 or self.start_step < 0:
            raise ConfigError(f"average {self.name!r}: update_every must be at least 1 and start_step at least 0.")

    def decay_at(self, updates: int) -> float:
        """Return the decay over ``update_every`` steps that follows after ``updates`` updates."""
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        return decay if self.update_every == 1 else decay**self.update_every

    def is_due(self, step: int) -> bool:
        """Whether the average is updated after optimizer step ``step``."""
        return step >= self.start_step and (step - self.start_step) % self.update_every == 0
