"""The averages of an input, with every length in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import RunConfig
from deepmd_ema.config.outputs import Schedule
from deepmd_ema.config.schema.averaging import ScheduleFreeProfile
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.errors import ConfigError, counted, every_steps
from deepmd_ema.model.model_set import ModelSet

Hook = Callable[[int, float], bool]


def tracked_averages(
    config: RunConfig, steps_per: Mapping[str, float], should_update: Mapping[str, Hook] | None, num_steps: int
) -> list[Profile]:
    """Return the profile of each average of the list ``training.averaging``.

    Args:
        config: of the run.
        steps_per: steps of one of ``steps``, ``frames`` and ``epochs``.
        should_update: for some averages by name, called before each update.
        num_steps: length of the run.

    Raises:
        ConfigError: if ``should_update`` names an average that the run does not track.
    """
    hooks, profiles, lr = dict(should_update or {}), [], config.learning_rate
    for average in config.training.averaging:
        changes: dict[str, Any] = {"should_update": hooks.pop(average.name, None)}
        if isinstance(average, ScheduleFreeProfile):
            assert isinstance(config.optimizer, AdamWScheduleFreeConfig)  # a rule of the input
            changes |= {"adam_beta1": config.optimizer.adam_beta1, "r": config.optimizer.r}
            changes |= {"warmup_steps": lr.num_warmup_steps(num_steps), "warmup_start_factor": lr.warmup_start_factor}
        profiles.append(average.in_steps(steps_per, **changes))
    if hooks:
        known = ", ".join(profile.name for profile in profiles) or "none"
        raise ConfigError(f"should_update: no average is called {', '.join(hooks)}. This run tracks: {known}.")
    return profiles


def build_bank(
    config: RunConfig,
    models: ModelSet,
    steps_per: Mapping[str, float],
    should_update: Mapping[str, Hook] | None,
    num_steps: int,
) -> AverageBank | None:
    """Return the averages of a run, or None if it has none; ``models`` may be sharded."""
    profiles = tracked_averages(config, steps_per, should_update, num_steps)
    return AverageBank(models.by_task, profiles, around=models) if profiles else None


def snapshot_lines(schedule: Schedule, profiles: Sequence[Profile], num_bytes: int) -> Iterator[str]:
    """Yield the size on disk of the snapshots of each average; ``num_bytes`` is the size of one."""
    total = 0
    for profile in profiles:
        if (due := schedule.snapshots.get(profile.name)) is not None:
            files = due.count(profile.start_step)
            total += files * num_bytes
            size = f"{counted(files, 'file')} of {num_bytes / 1e6:.2f} MB"
            yield f"{profile.name} {every_steps(due.steps.step)}: {size}"
    if total:
        yield f"{total / 1e6:,.2f} MB of disk in all, in float32; `dp-ema posthoc` finds the best length from them"


def describe_averages(bank: AverageBank) -> str:
    """Return the current window of every average, on one line; may wait for the device."""
    facts = ((name, bank.info(name)) for name in bank.names)
    return "; ".join(
        f"{name}: decay {info['effective_decay']:.6g}, looks back {info['mean_age']:,.1f} steps on average"
        if info["updates"]
        else f"{name}: no update yet"
        for name, info in facts
    )
