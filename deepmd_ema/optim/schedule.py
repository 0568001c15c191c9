"""Learning rate as a function of the step: warm-up, then exponential, cosine, warm-up-stable-decay, inverse root."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from deepmd_ema.config.schema.optim import (
    CosineScheduleConfig,
    ExpScheduleConfig,
    InvSqrtScheduleConfig,
    ScheduleConfig,
    WsdScheduleConfig,
)
from deepmd_ema.errors import ConfigError, counted

Schedule: TypeAlias = Callable[[int], float]
"""The learning rate of the update that follows after this many updates."""

MIN_STOP_LR = 1e-10  # a decay to zero has no rate: the exponential one aims here and is cut at stop_lr


def build_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
    """Return the schedule that ``config`` describes for a run of ``num_steps`` updates.

    During the ``warmup_steps`` the rate grows linearly from ``warmup_factor * start_lr`` to ``start_lr``, then it
    follows the decay of ``type``.

    Raises:
        ConfigError: if the warm-up is as long as the run, or the rate can never reach ``stop_lr``.
    """
    start, warmup = config.start_lr, config.num_warmup_steps(num_steps)
    if num_steps and warmup >= num_steps:
        raise ConfigError(
            f"learning_rate.warmup_steps = {warmup}: the run has only {counted(num_steps, 'step')}. Make the warm-up "
            "shorter or training.numb_steps larger."
        )
    decay = DECAYS[config.type](config, max(1, num_steps - warmup), num_steps)
    first = config.warmup_start_factor * start

    def rate(step: int) -> float:
        return first + (start - first) * step / warmup if step < warmup else decay(step - warmup)

    return rate


def _exp(config: ExpScheduleConfig, length: int, num_steps: int) -> Schedule:
    start, stop, every, rate = config.start_lr, config.end_lr, config.used_decay_steps(num_steps), config.decay_rate
    if rate is None:
        rate = math.exp(math.log(max(stop, MIN_STOP_LR) / start) / (length / every))
    smooth, factor = config.smooth, rate
    return lambda step: max(start * factor ** (step / every if smooth else step // every), stop)


def _cosine(config: CosineScheduleConfig, length: int, _: int) -> Schedule:
    start, stop = config.start_lr, config.end_lr
    return lambda step: _fall("cosine", step / length, start, stop) if step < length else stop


def _wsd(config: WsdScheduleConfig, length: int, num_steps: int) -> Schedule:
    return _with_fall(lambda step: config.start_lr, config, length, num_steps)


def _invsqrt(config: InvSqrtScheduleConfig, length: int, num_steps: int) -> Schedule:
    start, a = config.start_lr, config.a
    return _with_fall(lambda step: start * math.sqrt(a / (a + step)), config, length, num_steps)


def _with_fall(before: Schedule, config: WsdScheduleConfig, length: int, num_steps: int) -> Schedule:
    """Return ``before``, and in the last part of the run the way from where it is down to the last rate."""
    if config.decay_phase_ratio == 0:
        return before
    stop, kind = config.end_lr, config.decay_type
    if kind == "inverse_linear" and stop == 0:
        raise ConfigError(
            "learning_rate.stop_lr = 0: decay_type inverse_linear never reaches 0. Use a stop_lr above 0, or linear."
        )
    falling = max(1, min(int(config.decay_phase_ratio * num_steps), length))
    stable = length - falling
    highest = before(stable)
    stop = min(stop, highest)

    def rate(step: int) -> float:
        if step < stable:
            return before(step)
        return _fall(kind, (step - stable) / falling, highest, stop) if step < length else stop

    return rate


def _fall(kind: str, part: float, start: float, stop: float) -> float:
    """Return the rate after ``part`` (0 to 1) of the way from ``start`` down to ``stop``."""
    if kind == "inverse_linear":
        return 1 / (part / stop + (1 - part) / start)
    if kind == "cosine":
        return stop + (start - stop) * (0.5 * (1 + math.cos(math.pi * part)))
    return start + (stop - start) * part


DECAYS: dict[str, Callable[..., Schedule]] = {"exp": _exp, "cosine": _cosine, "wsd": _wsd, "invsqrt": _invsqrt}
