"""The settings of an average, and the decay that its formula gives to each update."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from deepmd_ema.average_settings import (
    AverageSettings,
    EmaSettings,
    PowerSettings,
    ScheduleFreeSettings,
    SwaSettings,
    redeclared,
    sigma_rel_check,
)
from deepmd_ema.checks import positive
from deepmd_ema.errors import ConfigError
from deepmd_ema.optim.schedule_free import share_of_next


@dataclass(frozen=True)
class Profile(AverageSettings):
    """The settings of one average: use :class:`EmaProfile`, :class:`PowerProfile` or :class:`SwaProfile`.

    All follow ``s <- d * s + (1 - d) * w`` (s: average, w: live weights); they differ in the decay d. No update comes
    before ``start_step``; there the average is the live weights.

    Attributes:
        name: in file names and logs.
        start_step: optimizer steps before the average starts.
        update_every: optimizer steps between two updates; decays are corrected for it.
        device: ``live`` keeps the average where the weights are, ``cpu`` in host memory. Weights of a GPU are then
            copied asynchronously, and used when the next update begins or the average is read.
        dtype: ``float64`` or ``float32``; never narrower than the weights themselves. An average in ``float32`` of
            weights in float32 loses updates that are smaller than its rounding: at the end of a run in which the
            learning rate decays, 7 to 10 % of its distance from the live weights (decay 0.999 to 0.9999).
        layout: ``local_shard`` averages what each rank holds, without communication; ``full_tensor`` gathers sharded
            weights at each update and holds the whole average on every rank.
        buffers: ``copy`` leaves buffers alone, so that the live ones complete the average; ``average`` averages the
            floating-point ones that are in the state dict. Integer and bool ones never are.
        should_update: ``should_update(step, epoch)`` decides instead of ``update_every`` which steps after the start
            count; the epoch is what the trainer hands to ``AverageBank.update``. It must be possible to pickle it. A
            subclass may have a method of this name instead.
    """

    should_update: Callable[[int, Any], bool] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.should_update is None and callable(type(self).should_update):
            object.__delattr__(self, "should_update")  # it would hide the method of a subclass
        problems = [f"average {self.name!r}: {problem}" for problem in self.problems()]
        if problems:
            raise ConfigError(problems)

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay of the update that follows after ``updates`` updates.

        Of a tensor in float64, a counter that only the device knows, it is a tensor, and nothing waits for the device.
        """
        raise NotImplementedError

    def is_due(self, step: int, epoch: float | None = None) -> bool:
        """Whether the average is updated after optimizer step ``step``."""
        if step <= self.start_step:
            return step == self.start_step
        if self.should_update is not None:
            return bool(self.should_update(step, epoch))
        return self.update_every == 1 or (step - self.start_step) % self.update_every == 0

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, ``type`` first, without the name; a hook by its name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        hook = self.should_update
        found["should_update"] = None if hook is None else getattr(hook, "__qualname__", type(hook).__qualname__)
        return {"type": self.type, **found}

    def problems(self) -> Iterator[str]:
        """Yield each wrong setting with its value and what is expected."""
        yield from super().problems()
        hook = self.should_update
        if hook is None:
            return
        if not callable(hook):
            yield f"should_update {hook!r}, expected a function of (step, epoch) or an object that can be called."
            return
        if self.update_every != 1:
            yield f"update_every {self.update_every} beside should_update, which decides alone: leave it 1."
        try:
            pickle.dumps(hook)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            yield f"should_update cannot be pickled ({error}); use a function or a class of a module."


@dataclass(frozen=True)
class EmaProfile(Profile, EmaSettings):
    """An exponential average.

    Attributes:
        decay: d, 0 <= d < 1, per optimizer step; the window is ``1 / (1 - d)`` steps.
        warmup: whether step t (from 0, counted from the start) has the decay ``min(d, (1 + t) / (10 + t))``, so that
            the start is soon forgotten. An update has the product of the decays of its ``update_every`` steps. With
            ``should_update`` the updates are counted instead of the steps.
    """

    decay: float = redeclared(EmaSettings, "decay", 0.999)

    @classmethod
    def from_half_life(cls, name: str, steps: float, **more: Any) -> EmaProfile:
        """Return the average in which a weight counts half after ``steps`` optimizer steps: ``d = 0.5 ** (1 / steps)``.

        Args:
            name: of the average.
            steps: above 0.
            more: the other settings.
        """
        if not positive.test(steps) or steps == math.inf:
            raise ConfigError(f"average {name!r}: a half-life of {steps!r} steps, expected {positive.wants}.")
        return cls(name, decay=0.5 ** (1 / steps), **more)

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay over the ``update_every`` steps after ``updates`` updates: the product of theirs."""
        every = self.update_every
        done = updates * every if every > 1 else updates
        if isinstance(done, int):
            if not self.warmup:
                return self.decay**every
            return math.prod(min(self.decay, (1 + t) / (10 + t)) for t in range(done, done + every))
        if not self.warmup:
            return torch.full_like(done, self.decay**every)
        t = done.unsqueeze(-1) + torch.arange(every, dtype=done.dtype, device=done.device) if every > 1 else done
        decays = ((1 + t) / (10 + t)).clamp(max=self.decay)
        return decays.prod(-1) if every > 1 else decays


@dataclass(frozen=True)
class PowerProfile(Profile, PowerSettings):
    """An average whose window grows with the run: the power function of EDM2 (arXiv:2312.02696, section 3.1).

    The weights of step tau after t steps are in the ratio of ``tau ** gamma``. Update t = 1, 2, ... has the decay
    ``(1 - 1 / t) ** (gamma + 1)`` (equation 127), so the first one takes the live weights as they are. With
    ``update_every`` k the same decays come every k steps, and the live weights of step tau count exactly
    ``(tau ** (gamma + 1) - (tau - k) ** (gamma + 1)) / t ** (gamma + 1)``, steps counted from the start.

    Attributes:
        gamma: at least 0; 0 gives equal weights, higher ones forget the start sooner.
    """

    gamma: float = redeclared(PowerSettings, "gamma")

    @classmethod
    def from_sigma_rel(cls, name: str, sigma_rel: float, **more: Any) -> PowerProfile:
        """Return the average whose weights spread over ``sigma_rel`` (a standard deviation) of the run so far.

        Args:
            name: of the average.
            sigma_rel: above 0, at most 0.2887 (equal weights).
            more: the other settings.
        """
        try:
            return cls(name, gamma=gamma_of(sigma_rel), **more)
        except ValueError as error:
            raise ConfigError(f"average {name!r}: {error}") from error

    @property
    def sigma_rel(self) -> float:
        """Standard deviation of the weights over the steps, as a share of the steps since the start."""
        return sigma_rel_of(self.gamma)

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay of the update that follows after ``updates`` updates."""
        return (updates / (updates + 1)) ** (self.gamma + 1)


@dataclass(frozen=True)
class SwaProfile(Profile, SwaSettings):
    """Equal weights of all steps since the start: a :class:`PowerProfile` with gamma 0."""

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay of the update that follows after ``updates`` updates."""
        return updates / (updates + 1)


@dataclass(frozen=True)
class ScheduleFreeProfile(Profile, ScheduleFreeSettings):
    """The averaged point x of :class:`deepmd_ema.optim.schedule_free.AdamWScheduleFree`, whose weights are y.

    From ``y = b1 * x + (1 - b1) * z`` and ``x <- (1 - c) * x + c * z`` follows ``x <- d * x + (1 - d) * y`` with
    ``d = (1 - c) * (1 - b1) / (1 - b1 + c * b1)``, so that x is an average of y.

    Attributes:
        adam_beta1: of the optimizer, b1.
        warmup_steps: of the learning rate.
        warmup_start_factor: of the learning rate.
        r: of the optimizer.
    """

    adam_beta1: float = field(default=0.9, kw_only=True)
    warmup_steps: int = field(default=0, kw_only=True)
    warmup_start_factor: float = field(default=0.0, kw_only=True)
    r: float = field(default=0.0, kw_only=True)

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay of the update that follows after ``updates`` updates."""
        if isinstance(updates, int):
            return float(self.decay_at(torch.tensor(updates, dtype=torch.float64)))
        share = share_of_next(updates, self.warmup_steps, self.warmup_start_factor, self.r)
        of_z = 1 - self.adam_beta1
        return (1 - share) * of_z / (of_z + share * self.adam_beta1)

    def problems(self) -> Iterator[str]:
        """Yield each wrong setting, and that updates are left out."""
        yield from super().problems()
        if self.start_step or self.update_every != 1 or self.should_update is not None:
            yield "start_step, update_every or should_update is given; the averaged point needs every step."


class CustomRule(Protocol):
    """The formula of an average that another distribution adds: a section of ``training.averaging``."""

    type: ClassVar[str]

    @property
    def own_options(self) -> dict[str, Any]:
        """Return its options as plain values."""

    def decay_at(self, done: Tensor) -> Tensor | float:
        """Return the decay of each step, ``done`` steps after the start."""


@dataclass(frozen=True)
class CustomProfile(Profile):
    """An average whose decay another distribution gives.

    Attributes:
        rule: what gives it, for each step; an update has the product of those of its ``update_every`` steps.
    """

    rule: CustomRule = field(kw_only=True)

    @property
    def type(self) -> str:  # type: ignore[override]
        """Name of the rule."""
        return self.rule.type

    def decay_at(self, updates: int | Tensor) -> Any:
        """Return the decay of the update that follows after ``updates`` updates."""
        if isinstance(updates, int):
            return float(self.decay_at(torch.tensor(updates, dtype=torch.float64)))
        every = self.update_every
        if every == 1:
            return self._decays(updates)
        offsets = torch.arange(every, dtype=updates.dtype, device=updates.device)
        return self._decays(updates.unsqueeze(-1) * every + offsets).prod(-1)

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, those of the rule as ``options``."""
        found = super().settings()
        del found["rule"]
        return found | {"options": self.rule.own_options}

    def problems(self) -> Iterator[str]:
        """Yield each wrong setting, and what is wrong with the decays."""
        yield from super().problems()
        done = torch.tensor([0.0, 1.0, 2.0, 10.0, 1e3, 1e6], dtype=torch.float64)
        try:
            decays = self._decays(done)
            self._decays(done.to("meta"))  # as on a GPU, where no number may be read in a step
        except Exception as error:  # whatever the code of others raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            yield f"decay_at of type {self.type!r} fails for a tensor of steps ({reason}). Use operations of tensors."
            return
        wrong = [k for k, decay in enumerate(decays.tolist()) if not 0 <= decay <= 1]
        if wrong:
            n, decay = int(done[wrong[0]]), float(decays[wrong[0]])
            yield f"decay_at of type {self.type!r} is {decay:g} after {n:,} steps, expected a number from 0 to 1."

    def _decays(self, done: Tensor) -> Tensor:
        found = self.rule.decay_at(done)
        return found.expand_as(done) if isinstance(found, Tensor) else torch.full_like(done, found)


PROFILES: dict[str, type[Profile]] = {
    kind.type: kind for kind in (EmaProfile, PowerProfile, SwaProfile, ScheduleFreeProfile)
}


def make_profile(kind: str, settings: Mapping[str, Any]) -> Profile:
    """Return a profile from settings by name, such as the options of an average in an input.

    Args:
        kind: its type; one that is not in ``PROFILES`` has a ``rule`` in its settings.
        settings: ``half_life`` (in steps) may stand for ``decay``, ``sigma_rel`` for ``gamma``. None is the default;
            names that are not settings of this type are not looked at.
    """
    profile = PROFILES.get(kind, CustomProfile)
    known = {f.name: settings[f.name] for f in fields(profile) if settings.get(f.name) is not None}
    if profile is CustomProfile:
        return profile(**known)
    if settings.get("half_life") is not None:
        return EmaProfile.from_half_life(known.pop("name"), settings["half_life"], **known)
    if settings.get("sigma_rel") is not None:
        return PowerProfile.from_sigma_rel(known.pop("name"), settings["sigma_rel"], **known)
    return profile(**known)


def sigma_rel_of(gamma: float) -> float:
    """Return the relative width of a power profile (arXiv:2312.02696, equation 123).

    ``sigma_rel = (gamma + 1) ** (1 / 2) * (gamma + 2) ** -1 * (gamma + 3) ** (-1 / 2)``
    """
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


def gamma_of(sigma_rel: float) -> float:
    """Return the gamma of a relative width, the inverse of :func:`sigma_rel_of` (arXiv:2312.02696, equation 126).

    Raises:
        ValueError: if no gamma of at least 0 has this width.
    """
    if not sigma_rel_check.test(sigma_rel):
        raise ValueError(f"sigma_rel {sigma_rel!r}, expected {sigma_rel_check.wants}.")
    # sigma_rel falls with gamma and is below 1 / (gamma + 2)
    low, high = 0.0, 1 / sigma_rel
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if sigma_rel_of(middle) > sigma_rel else (low, middle)
    return low
