"""Learning rate as a function of the step: warm-up, then exponential, cosine or warm-up-stable-decay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from deepmd_ema.config import CosineScheduleConfig, ExpScheduleConfig, WsdScheduleConfig

LEAST_STOP_LR = 1e-10  # a decay to zero has no rate: the exponential one aims here and is cut at stop_lr


@dataclass(frozen=True)
class Schedule:
    """A learning rate for each step of a run.

    During the ``warmup_steps`` it grows linearly from ``warmup_start_factor * start_lr`` to ``start_lr``, then it
    follows ``decay``.

    Attributes:
        start_lr: rate at the end of the warm-up.
        stop_lr: rate at the end of the run.
        num_steps: length of the run, warm-up included.
        warmup_steps: length of the warm-up.
        warmup_start_factor: first rate over ``start_lr``.
        decay: rate as a function of the steps after the warm-up.
    """

    start_lr: float
    stop_lr: float
    num_steps: int
    warmup_steps: int
    warmup_start_factor: float
    decay: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """Return the rate of the update that follows ``step`` updates."""
        if step < self.warmup_steps:
            first = self.warmup_start_factor * self.start_lr
            return first + (self.start_lr - first) * step / self.warmup_steps
        return self.decay(step - self.warmup_steps)


def build_schedule(config: ExpScheduleConfig | CosineScheduleConfig | WsdScheduleConfig, num_steps: int) -> Schedule:
    """Return the schedule that ``config`` describes for a run of ``num_steps`` updates.

    Raises:
        ConfigError: if the warm-up is as long as the run, or the rate can never reach ``stop_lr``.
    """
    start, stop, warmup = config.start_lr, config.end_lr, config.num_warmup_steps(num_steps)
    if warmup and warmup >= num_steps:
        raise ConfigError(
            f"learning_rate.warmup_steps = {warmup}: the run has only {num_steps} steps. Make the warm-up shorter or "
            "training.numb_steps larger."
        )
    decay = DECAYS[config.type](config, max(1, num_steps - warmup), num_steps)
    return Schedule(start, stop, num_steps, warmup, config.warmup_start_factor, decay)


def _exp(config: ExpScheduleConfig, length: int, _: int) -> Callable[[int], float]:
    every, rate = config.decay_steps, config.decay_rate
    if rate is None:
        if every >= length:
            # one decay per run would be none: the peer's rule for short runs
            every = 100 if length // 10 > 100 else length // 100 + 1
        rate = math.exp(math.log(max(config.end_lr, LEAST_STOP_LR) / config.start_lr) / (length / every))
    return partial(_exp_value, start=config.start_lr, stop=config.end_lr, rate=rate, every=every, smooth=config.smooth)


def _exp_value(step: int, *, start: float, stop: float, rate: float, every: int, smooth: bool) -> float:
    return max(start * rate ** (step / every if smooth else step // every), stop)


def _cosine(config: CosineScheduleConfig, length: int, _: int) -> Callable[[int], float]:
    return partial(_cosine_value, start=config.start_lr, stop=config.end_lr, length=length)


def _cosine_value(step: int, *, start: float, stop: float, length: int) -> float:
    return stop + (start - stop) * _half_cosine(step / length) if step < length else stop


def _wsd(config: WsdScheduleConfig, length: int, num_steps: int) -> Callable[[int], float]:
    if config.decay_type == "inverse_linear" and config.end_lr == 0:
        raise ConfigError(
            "learning_rate.stop_lr = 0: decay_type inverse_linear never reaches 0. Use a stop_lr above 0, or linear."
        )
    falling = max(1, min(int(config.decay_phase_ratio * num_steps), length))
    fall = partial(FALLS[config.decay_type], start=config.start_lr, stop=config.end_lr)
    return partial(_wsd_value, start=config.start_lr, stop=config.end_lr, length=length, falling=falling, fall=fall)


def _wsd_value(
    step: int, *, start: float, stop: float, length: int, falling: int, fall: Callable[[float], float]
) -> float:
    if step < length - falling:
        return start
    return fall((step - (length - falling)) / falling) if step < length else stop


def _linear(part: float, *, start: float, stop: float) -> float:
    return start + (stop - start) * part


def _inverse_linear(part: float, *, start: float, stop: float) -> float:
    return 1 / (part / stop + (1 - part) / start)


def _falling_cosine(part: float, *, start: float, stop: float) -> float:
    return stop + (start - stop) * _half_cosine(part)


def _half_cosine(part: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * part))


DECAYS: dict[str, Callable[..., Callable[[int], float]]] = {"exp": _exp, "cosine": _cosine, "wsd": _wsd}
FALLS: dict[str, Callable[..., float]] = {
    "inverse_linear": _inverse_linear,
    "cosine": _falling_cosine,
    "linear": _linear,
}
