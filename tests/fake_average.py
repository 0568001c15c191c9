"""An average of another distribution: equal weights of the steps since the begin of a cycle."""

from dataclasses import dataclass
from typing import ClassVar

from deepmd_ema.config import CustomAverage, option, positive_int


@dataclass(frozen=True, kw_only=True)
class CycleAverage(CustomAverage):
    """Equal weights of the steps since the begin of the cycle."""

    type: ClassVar[str] = "cycle"
    period: int = option(
        1000, check=positive_int, unit="steps", doc="Length of a cycle."
    )

    def decay_at(self, done):
        place = done % self.period
        return place / (place + 1)


@dataclass(frozen=True, kw_only=True)
class OddAverage(CustomAverage):
    """A decay of a half in every other step."""

    type: ClassVar[str] = "odd"

    def decay_at(self, done):
        return 0.5

    def should_update(self, step, epoch):
        return step % 2 == 1
