"""The averages of an input, with every length in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepmd_ema.config import RunConfig
from deepmd_ema.config.schema.averaging import ScheduleFreeProfile
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig
from deepmd_ema.config.schema.profile import Profile
from deepmd_ema.errors import ConfigError

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
