"""Learning rate as a function of the step: warm-up, then one of several decays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from deepmd_ema.config.schema import optim
from deepmd_ema.errors import ConfigError
from deepmd_ema.text import counted

Schedule: TypeAlias = Callable[[int], float]
"""The learning rate of the update that follows after this many updates."""

# An exponential decay to zero has no factor: it aims at this rate and is cut at stop_lr.
MIN_STOP_LR = 1e-10


def build_schedule(config: optim.ScheduleConfig, num_steps: int) -> Schedule:
    """Return the schedule that ``config`` describes for a run of ``num_steps`` updates.

    During the ``warmup_steps`` the rate grows linearly from ``warmup_factor * start_lr`` to
    ``start_lr``, then it follows the decay of ``type``.

    Raises:
        ConfigError: if the warm-up is as long as the run, or the rate can never reach ``stop_lr``.
    """
    start, warmup = config.start_lr, config.num_warmup_steps(num_steps)
    # a run of 0 steps writes its starting point, as in DeePMD-kit, and never takes a rate
    if num_steps and warmup >= num_steps:
        raise ConfigError(
            f"learning_rate.warmup_steps = {warmup}: the run has only "
            f"{counted(num_steps, 'step')}. Make the warm-up shorter or training.numb_steps "
            "larger."
        )
    length, stop = max(1, num_steps - warmup), config.end_lr
    every, factor = 1, 1.0
    if isinstance(config, optim.ExpScheduleConfig):
        # without a decay_rate in the input, the factor of each `every` steps is the one with which
        # the rate is stop_lr after the last step
        every = config.used_decay_steps(num_steps)
        log_of_whole = math.log(max(stop, MIN_STOP_LR) / start)
        decay_rate = config.decay_rate
        factor = (
            math.exp(log_of_whole / (length / every))
            if decay_rate is None
            else decay_rate
        )

    def before(step: int) -> float:
        """Return the rate before the final decay, ``step`` steps after the warm-up."""
        if isinstance(config, optim.ExpScheduleConfig):
            return max(
                start * factor ** (step / every if config.smooth else step // every),
                stop,
            )
        if isinstance(config, optim.InvSqrtScheduleConfig):
            return start * math.sqrt(config.a / (config.a + step))
        return start

    # In the last `falling` steps of the run the rate goes from where it is down to the last one:
    # all steps after the warm-up with cosine, a share of the run with wsd and invsqrt, none with
    # exp, which falls from the start.
    kind = "cosine"
    falling = length if isinstance(config, optim.CosineScheduleConfig) else 0
    if isinstance(config, optim.WsdScheduleConfig) and config.decay_phase_ratio > 0:
        kind = config.decay_type
        falling = max(1, min(int(config.decay_phase_ratio * num_steps), length))
    if falling and kind == "inverse_linear" and stop == 0:
        raise ConfigError(
            "learning_rate.stop_lr = 0: decay_type inverse_linear never reaches 0. Use a stop_lr "
            "above 0, or linear."
        )
    stable = length - falling
    # an inverse root may be below stop_lr when the final decay begins: it then stays
    highest = before(stable)
    lowest, first = min(stop, highest), config.warmup_start_factor * start

    def rate(step: int) -> float:
        if step < warmup:
            return first + (start - first) * step / warmup
        step -= warmup
        if not falling or step < stable:
            return before(step)
        if step >= length:
            return lowest
        part = (step - stable) / falling  # share of the way down, from 0 to 1
        if kind == "inverse_linear":
            return 1 / (part / lowest + (1 - part) / highest)
        if kind == "cosine":
            return lowest + (highest - lowest) * (0.5 * (1 + math.cos(math.pi * part)))
        return highest + (lowest - highest) * part

    return rate
