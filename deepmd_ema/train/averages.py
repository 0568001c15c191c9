"""The averages that an input asks for, with every length in optimizer steps, and what is made of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepmd_ema.averaging import EmaProfile, PowerProfile, Profile, SwaProfile
from deepmd_ema.errors import ConfigError

if TYPE_CHECKING:
    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.config import RunConfig
    from deepmd_ema.train.task import TaskMixture

EMA = "ema"  # name of the average of the short form, training.enable_ema

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
    """Return every average of the run: that of ``enable_ema`` first, then the list ``training.averaging``.

    Args:
        config: of the run.
        sampler: turns epochs and frames into steps.
        should_update: for some averages by name, asked before each update.

    Raises:
        ConfigError: if ``should_update`` names an average that the run does not track.
    """
    training = config.training
    hooks = dict(should_update or {})
    keep = training.max_ckpt_keep if training.ema_ckpt_keep is None else training.ema_ckpt_keep
    tracked = []
    if training.enable_ema:
        profile = EmaProfile(EMA, training.ema_decay, training.ema_warmup, should_update=hooks.pop(EMA, None))
        tracked.append(Tracked(profile, config.validating.ema_full_validation, lcurve=False, keep=keep))
    tracked += [
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


def _profile(section: Any, sampler: TaskMixture, hook: Hook | None) -> Profile:
    """Return the profile of one entry of ``training.averaging``."""
    start = section.start_step
    if section.start_epoch is not None:
        start = math.ceil(section.start_epoch * sampler.batches_per_epoch)
    common: dict[str, Any] = {
        "start_step": start,
        "update_every": section.update_every,
        "device": section.device,
        "dtype": section.dtype,
        "layout": section.layout,
        "buffers": section.buffers,
        "should_update": hook,
    }
    if section.type == "swa":
        return SwaProfile(section.name, **common)
    if section.type == "power":
        if section.gamma is not None:
            return PowerProfile(section.name, section.gamma, **common)
        return PowerProfile.from_sigma_rel(section.name, section.sigma_rel, **common)
    common["warmup"] = section.warmup
    if section.decay is not None:
        return EmaProfile(section.name, section.decay, **common)
    unit = {"steps": 1.0, "frames": 1 / sampler.frames_per_step, "epochs": float(sampler.batches_per_epoch)}
    return EmaProfile.from_half_life(section.name, section.half_life * unit[section.half_life_unit], **common)


def _snapshot_every(section: Any, save_freq: int) -> int:
    if not getattr(section, "snapshots", False):
        return 0
    every = section.snapshot_freq if section.snapshot_freq is not None else save_freq
    return max(0, every)
