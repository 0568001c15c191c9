"""The averages that an input asks for, with every length in optimizer steps, and what is made of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepmd_ema.averaging.profile import Profile, make_profile
from deepmd_ema.config.schema.averaging import EmaAverageConfig
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.config import RunConfig
    from deepmd_ema.config.schema.averaging import AverageConfig
    from deepmd_ema.train.task import TaskMixture

Hook = Callable[[int, float], bool]


@dataclass(frozen=True)
class Tracked:
    """One average of a run.

    Attributes:
        profile: how it is averaged.
        full_validation: whether it is validated on all validation data and has best files.
        lcurve: whether the displayed errors are also those of this average.
        keep: how many of its checkpoint files stay.
        snapshot_every: steps between two kept copies for ``dp-ema posthoc``; 0 for none.
    """

    profile: Profile
    full_validation: bool
    lcurve: bool
    keep: int
    snapshot_every: int = 0

    @property
    def name(self) -> str:
        """Name of the average in file names and logs."""
        return self.profile.name


def tracked_averages(
    config: RunConfig, sampler: TaskMixture, should_update: Mapping[str, Hook] | None
) -> list[Tracked]:
    """Return the averages of the list ``training.averaging``.

    Args:
        config: of the run.
        sampler: turns epochs and frames into steps.
        should_update: for some averages by name, asked before each update.

    Raises:
        ConfigError: if ``should_update`` names an average that the run does not track.
    """
    training, hooks = config.training, dict(should_update or {})
    tracked = [
        Tracked(
            _profile(section, sampler, hooks.pop(section.name, None)),
            section.full_validation,
            section.lcurve,
            training.max_ckpt_keep if section.ckpt_keep is None else section.ckpt_keep,
            _snapshot_every(section, training.save_freq),
        )
        for section in training.averaging
    ]
    if hooks:
        known = ", ".join(t.name for t in tracked) or "none"
        raise ConfigError(f"should_update: no average is called {', '.join(hooks)}. This run tracks: {known}.")
    return tracked


def snapshot_lines(tracked: Sequence[Tracked], num_steps: int, num_bytes: int) -> Iterator[str]:
    """Yield what the kept copies of averages will take on the disk; ``num_bytes`` is the size of one."""
    total = 0
    for t in tracked:
        if t.snapshot_every:
            every, start = t.snapshot_every, t.profile.start_step
            files = max(0, num_steps // every - start // every) + (num_steps % every > 0)
            total += files * num_bytes
            yield f"{t.name} every {t.snapshot_every:,} steps: {files:,} files of {num_bytes / 1e6:.2f} MB"
    if total:
        yield f"{total / 1e6:,.2f} MB of disk in all, in float32; `dp-ema posthoc` finds the best length from them"


def averages_in_words(bank: AverageBank) -> str:
    """Return how far every average looks back now, on one line; may wait for the device."""
    facts = ((name, bank.info(name)) for name in bank.names)
    return "; ".join(
        f"{name}: decay {info['effective_decay']:.6g}, mean age {info['mean_age']:,.1f} steps"
        if info["updates"]
        else f"{name}: no update yet"
        for name, info in facts
    )


def _profile(section: AverageConfig, sampler: TaskMixture, hook: Hook | None) -> Profile:
    """Return the profile of one average, with every length in optimizer steps."""
    settings = vars(section) | {"should_update": hook}
    epoch = float(sampler.batches_per_epoch)
    if section.start_epoch is not None:
        settings["start_step"] = math.ceil(section.start_epoch * epoch)
    if settings.get("half_life") is not None:
        unit = {"steps": 1.0, "frames": 1 / sampler.frames_per_step, "epochs": epoch}
        settings["half_life"] *= unit[settings["half_life_unit"]]
    return make_profile(section.type, settings)


def _snapshot_every(section: AverageConfig, save_freq: int) -> int:
    if isinstance(section, EmaAverageConfig) or not section.snapshots:
        return 0
    return max(0, save_freq if section.snapshot_freq is None else section.snapshot_freq)
