"""What the averages of a config come to: options without effect, things to be careful about, a line for each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from deepmd_ema.config.messages import dotted
from deepmd_ema.config.schema.averaging import (
    AverageConfig,
    EmaAverageConfig,
    PowerAverageConfig,
    SwaAverageConfig,
)

if TYPE_CHECKING:
    from deepmd_ema.config.schema.run import RunConfig

_LONGEST_WINDOW = 0.2  # of the run: a longer average still remembers the untrained weights
_FEWEST_SNAPSHOTS = 4  # of one average; fewer tell little about averages of other lengths
_LAST_REPLICATED_STAGE = 1  # the largest zero_stage at which every process holds all weights


def averages_unused(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the paths of options of averages that do nothing, with the reason."""
    for path, average in _entries(config):
        yield from ((f"{path}.{name}", why) for name, why in _of_one(average, config))


def bank_warnings(config: RunConfig, num_steps: int | None, steps_per: Mapping[str, float]) -> Iterator[str]:
    """Yield what is likely not meant.

    Args:
        config: of the run.
        num_steps: length of the run; None while it is not known, and then little can be said.
        steps_per: steps of one of ``steps``, ``frames``, ``epochs``, as far as they are known.
    """
    yield from _snapshots_that_do_not_combine(config)
    if num_steps is None:
        return
    training = config.training
    for path, average in _entries(config):
        if isinstance(average, EmaAverageConfig):
            yield from _long_window(config, path, average, num_steps, steps_per)
        spelled, start = dotted(config.source.path(path)), _start(average, steps_per)
        if start is not None and start >= num_steps:
            yield _never_starts(spelled, average, num_steps)
        elif isinstance(average, PowerAverageConfig | SwaAverageConfig) and average.snapshots:
            yield from _few_snapshots(spelled, average, start or 0, num_steps, training.save_freq)


def average_words(config: RunConfig, steps_per: Mapping[str, float]) -> list[str]:
    """Return a line for each average of the run; ``steps_per`` as for :func:`bank_warnings`."""
    return [
        ", ".join([f"{a.name}: {_kind_words(a, steps_per)}", *_more_words(a, steps_per)])
        for a in config.training.averaging
    ] or ["none"]


def _entries(config: RunConfig) -> Iterator[tuple[str, AverageConfig]]:
    for n, average in enumerate(config.training.averaging):
        yield f"training.averaging[{n}]", average


# ---- options without effect


def _of_one(average: AverageConfig, config: RunConfig) -> Iterator[tuple[str, str]]:
    if isinstance(average, EmaAverageConfig) and average.half_life is None:
        yield "half_life_unit", "decay is given, and no half_life"
    if isinstance(average, PowerAverageConfig | SwaAverageConfig) and not average.snapshots:
        yield "snapshot_freq", "snapshots is false"
    if config.training.ckpt_keep_ratio is not None:
        yield "ckpt_keep", "ckpt_keep_ratio says how many checkpoints are kept"
    if config.validating.full_val_start == 1:
        yield "full_validation", "validating.full_val_start = 1 means never"
    if average.layout == "full_tensor" and config.training.zero_stage <= _LAST_REPLICATED_STAGE:
        yield "layout", f"every process holds all weights at zero_stage {config.training.zero_stage}"
    if average.layout == "rank_range" and config.training.zero_stage > _LAST_REPLICATED_STAGE:
        yield "layout", f"every process holds a part of the weights only at zero_stage {config.training.zero_stage}"


# ---- allowed, but likely not meant


def _long_window(
    config: RunConfig, path: str, average: EmaAverageConfig, num_steps: int, steps_per: Mapping[str, float]
) -> Iterator[str]:
    longest, better_window = _LONGEST_WINDOW * num_steps, _LONGEST_WINDOW / 2 * num_steps
    if average.decay is not None:
        window = 1 / (1 - average.decay)
        better = max(0.0, 1 - 1 / max(1.0, better_window))
        name, value = "decay", f"{average.decay:g}"
    elif average.half_life is not None and average.half_life_unit in steps_per:
        unit = steps_per[average.half_life_unit]
        window = 1 / -math.expm1(-math.log(2) / (average.half_life * unit))
        better = math.log(2) * better_window / unit
        name, value = "half_life", f"{average.half_life:g} {average.half_life_unit}"
    else:
        return
    if window > longest:
        option = dotted(config.source.path(f"{path}.{name}"))
        yield f"{option} = {value}: {_lags(window, num_steps)} Try {better:.3g}."


def _lags(window: float, num_steps: int) -> str:
    return (
        f"the average looks back {window:.0f} steps, more than a fifth of the run of {num_steps}, so it may lag "
        "behind the live weights."
    )


def _start(average: AverageConfig, steps_per: Mapping[str, float]) -> float | None:
    """Return the step at which the average starts, or None when epochs cannot be counted yet."""
    if average.start_epoch is None:
        return average.start_step
    return average.start_epoch * steps_per["epochs"] if "epochs" in steps_per else None


def _never_starts(path: str, average: AverageConfig, num_steps: int) -> str:
    given = "start_step" if average.start_epoch is None else "start_epoch"
    return (
        f"{path}.{given} = {getattr(average, given):g}: the run ends at step {num_steps}, so that nothing is averaged "
        f"and {average.name} is the live weights. Choose an earlier start."
    )


def _few_snapshots(
    path: str, average: PowerAverageConfig | SwaAverageConfig, start: float, num_steps: int, save_freq: int
) -> Iterator[str]:
    given = "save_freq" if average.snapshot_freq is None else "snapshot_freq"
    every = save_freq if average.snapshot_freq is None else average.snapshot_freq
    files = math.ceil((num_steps - start) / every)  # the last step is stored in any case
    if files < _FEWEST_SNAPSHOTS:
        better = max(1, int(num_steps - start) // (2 * _FEWEST_SNAPSHOTS))
        yield (
            f"{path}.snapshots: {files} snapshot{'s' * (files != 1)} in the run of {num_steps} steps ({given} = "
            f'{every}), too few for `dp-ema posthoc`. Try "snapshot_freq": {better}.'
        )


def _snapshots_that_do_not_combine(config: RunConfig) -> Iterator[str]:
    stored = [a for _, a in _entries(config) if isinstance(a, PowerAverageConfig | SwaAverageConfig) and a.snapshots]
    if stored and len({_length(a) for a in stored}) == 1:
        yield (
            f"training.averaging: all snapshots are of averages of one length ({stored[0].name}). `dp-ema posthoc` "
            "finds other lengths best from two: add a power average of another sigma_rel with snapshots."
        )
    if len({a.buffers for a in stored}) > 1:
        names = ", ".join(f"{a.name} {a.buffers}" for a in stored)
        yield (
            f"training.averaging: snapshots are of averages with different buffers ({names}). `dp-ema posthoc` takes "
            "averages of the same tensors only: give them the same."
        )


def _length(average: PowerAverageConfig | SwaAverageConfig) -> tuple[str, float]:
    if isinstance(average, PowerAverageConfig) and average.sigma_rel is not None:
        return "sigma_rel", average.sigma_rel
    return "gamma", (average.gamma or 0.0) if isinstance(average, PowerAverageConfig) else 0.0


# ---- words of the summary


def _kind_words(average: AverageConfig, steps_per: Mapping[str, float]) -> str:
    if isinstance(average, SwaAverageConfig):
        return "equal weights"
    if isinstance(average, PowerAverageConfig):
        name, value = _length(average)
        return f"power, {name} {value:g}"
    warmup = ", warm-up" * average.warmup
    if average.decay is not None:
        return f"EMA, decay {average.decay:g}, window {1 / (1 - average.decay):.0f} steps{warmup}"
    assert average.half_life is not None, "the other length of an average of this type"
    unit = average.half_life_unit
    steps = f" ({average.half_life * steps_per[unit]:,.0f} steps)" if unit in steps_per else ""
    return f"EMA, half-life {average.half_life:g} {unit}{steps}{warmup}"


def _more_words(average: AverageConfig, steps_per: Mapping[str, float]) -> Iterator[str]:
    if average.start_epoch:
        step = f" (step {math.ceil(average.start_epoch * steps_per['epochs']):,})" if "epochs" in steps_per else ""
        yield f"from epoch {average.start_epoch:g}{step}"
    if average.start_step:
        yield f"from step {average.start_step}"
    if average.update_every > 1:
        yield f"every {average.update_every} steps"
    if average.device == "cpu":
        yield "in host memory"
    if average.dtype == "float64":
        yield average.dtype
    if average.layout == "full_tensor":
        yield "whole on every process"
    if average.layout == "rank_range":
        yield "a range of it on each process"
    if average.buffers == "average":
        yield "with averaged buffers"
    if isinstance(average, PowerAverageConfig | SwaAverageConfig) and average.snapshots:
        freq = average.snapshot_freq
        yield f"snapshots every {freq} steps" if freq else "snapshots with the checkpoints"
