"""Averages of the weights: a class per kind is its section in the input, its rules and its formula.

``deepmd_ema.averaging`` tracks them. The formulas use operators and methods of numbers and tensors
only, so that this module needs no torch, and one formula serves counters of the host and of a
device.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from deepmd_ema.config.fields import option, options, plain, section
from deepmd_ema.config.messages import Values, show
from deepmd_ema.config.registry import Registry
from deepmd_ema.config.schema.profile import Profile, StepsPer
from deepmd_ema.errors import ConfigError
from deepmd_ema.findings import Findings, error
from deepmd_ema.utils import Check, fraction, is_number, not_negative, positive_int

if TYPE_CHECKING:
    from deepmd_ema.config.schema.run import RunConfig

# width of equal weights over the run, the widest of a power average (EDM2, arXiv:2312.02696,
# section 3.1)
MAX_SIGMA_REL = 1 / math.sqrt(12)
DEFAULT_DECAY = 0.999  # for averages that Python code builds without a length

# half-lives of 1e16 steps give a decay of 1
_half_life = Check(lambda v: is_number(v) and 0 < v <= 1e9, "a number > 0 and <= 1e9")
_sigma_rel = Check(
    lambda v: is_number(v) and 0 < v <= MAX_SIGMA_REL * (1 + 1e-12),
    f"a number > 0 and <= {math.floor(MAX_SIGMA_REL * 1e6) / 1e6} (1/sqrt(12): gamma is 0 there, "
    "equal weights)",
)


@dataclass(frozen=True)
class EmaProfile(Profile):
    """Exponential moving average: in each step
    `average <- decay * average + (1 - decay) * weights`.

    With ``warmup`` step t (from 0, counted from the start) has the decay ``min(decay, (1 + t) / (10
    + t))``, so that the start is soon forgotten. With ``should_update`` the updates are counted
    instead of the steps.

    Attributes:
        decay: d, 0 <= d < 1, per optimizer step; the window is ``1 / (1 - d)`` steps.
        warmup: whether the decay starts low.
        half_life: length in place of ``decay``, in ``half_life_unit``; frames and epochs have a
            length in steps in a run only.
    """

    type = "ema"
    formula = ("decay", "warmup")
    lengths = ("decay", "half_life")

    decay: float | None = option(
        None,
        "Decay per step: `average <- decay * average + (1 - decay) * weights`; its window is "
        "1/(1-decay) steps. Exactly one of `decay` and `half_life` is given.",
        fraction,
    )
    warmup: bool = option(
        True,
        "Whether the decay starts low and grows to its value, min(decay, (1+t)/(10+t)), t updates "
        "after the start, so that the initial weights have little influence.",
    )
    half_life: float | None = option(
        None,
        "Time in which the weight of a step goes down to a half, in `half_life_unit`, instead of "
        "`decay`: decay = 0.5^(1/half_life) in steps.",
        _half_life,
    )
    half_life_unit: str = option(
        "steps",
        "Unit of `half_life`. Half-lives in frames or epochs stay the same for other batch sizes.",
        choices=("steps", "frames", "epochs"),
    )

    @classmethod
    def from_half_life(cls, name: str, steps: float, **more: Any) -> EmaProfile:
        """Return the average in which a weight counts half after ``steps`` optimizer steps.

        Its decay is ``0.5 ** (1 / steps)``.

        Args:
            name: name of the average.
            steps: half-life, above 0.
            more: the other settings.
        """
        return cls(name, half_life=steps, **more).in_steps({"steps": 1.0})

    def in_steps(self, steps_per: StepsPer, **changes: Any) -> EmaProfile:
        """Return the average with a start in steps and a decay, 0.999 without a half-life."""
        if self.half_life is not None:
            decay = 0.5 ** (1 / (self.half_life * steps_per[self.half_life_unit]))
            changes |= {"decay": decay, "half_life": None, "half_life_unit": "steps"}
        elif self.decay is None:
            changes["decay"] = DEFAULT_DECAY
        return super().in_steps(steps_per, **changes)

    def decay_at(self, done: Any) -> Any:
        """Return the decay of a step."""
        if not self.warmup:
            return self.decay
        rising = (1 + done) / (10 + done)
        # min() of a tensor on a GPU would wait for the device
        return (
            min(self.decay, rising)
            if isinstance(done, int)
            else rising.clamp(max=self.decay)
        )

    def decay_of_update(self, updates: Any) -> Any:
        """Return the decay of an update."""
        if self.warmup:
            return super().decay_of_update(updates)
        return self.decay_at(0) ** self.update_every

    def describe_length(self, steps_per: StepsPer) -> str:
        """Return the decay, or the half-life with its length in steps once they are known."""
        (name, value) = self.length
        unit = self.half_life_unit
        warmup = ", warm-up" if self.warmup else ""
        if name == "decay":
            return (
                f"EMA over about {1 / (1 - value):,.0f} steps, decay {value:g}{warmup}"
            )
        steps = f" ({value * steps_per[unit]:,.0f} steps)" if unit in steps_per else ""
        return f"EMA, half-life {value:g} {unit}{steps}{warmup}"


@section
class SwaProfile(Profile):
    """Stochastic weight averaging: equal weights of all steps since the start; the same as `power`
    with gamma 0.
    """

    type = "swa"
    gamma: ClassVar[float | None] = 0.0  # all steps weigh the same

    snapshots: bool = option(  # type: ignore[misc]
        False,
        "Whether copies of the average are kept in the folder `snapshots`, all of them, for "
        "`dp-ema posthoc`, which makes averages of any other length from those of two power "
        "averages.",
    )
    snapshot_freq: int | None = option(  # type: ignore[misc]
        None,
        "Steps between two snapshots; null: `save_freq`.",
        positive_int,
        unit="steps",
    )

    def decay_at(self, done: Any) -> Any:
        """Return the decay of a step."""
        assert self.gamma is not None, "in_steps() takes it from sigma_rel"
        decay = done / (done + 1)
        return (
            decay ** (self.gamma + 1) if self.gamma else decay
        )  # one kernel less on a GPU

    def decay_of_update(self, updates: Any) -> Any:
        """Return the decay of an update, which follows their number as that of a step does."""
        return self.decay_at(updates)

    def describe_length(self, steps_per: StepsPer) -> str:
        """Return that it has no length."""
        return "equal weights"


@dataclass(frozen=True)
class PowerProfile(SwaProfile):
    """Power average of EDM2 (arXiv:2312.02696): step t has the weight t^gamma, so its length grows
    with the run.

    The weights of step tau after t steps are in the ratio of ``tau ** gamma`` (section 3.1). Update
    t = 1, 2, ... has the decay ``(1 - 1 / t) ** (gamma + 1)`` (equation 127), so the first one
    takes the live weights as they are. With ``update_every`` k the same decays come every k steps,
    and the live weights of step tau count exactly ``(tau ** (gamma + 1) - (tau - k) ** (gamma + 1))
    / t ** (gamma + 1)``, steps counted from the start.

    Attributes:
        gamma: at least 0; 0 gives equal weights, higher ones forget the start sooner.
        sigma_rel: relative width in place of ``gamma``.
    """

    type = "power"
    formula = ("gamma",)
    lengths = ("gamma", "sigma_rel")

    gamma: float | None = option(  # type: ignore[misc]
        None,
        "Power of the step in its weight: 0 is equal weights, larger is shorter. Exactly one of "
        "`gamma` and `sigma_rel` is given.",
        not_negative,
    )
    sigma_rel: float | None = option(
        None,
        "Width (standard deviation of the steps under their weights) as a fraction of the run, "
        "instead of `gamma`; larger is longer. 0.05 looks back over 5 % of the run on average.",
        _sigma_rel,
    )

    @classmethod
    def from_sigma_rel(cls, name: str, sigma_rel: float, **more: Any) -> PowerProfile:
        """Return the average whose weights spread over ``sigma_rel`` of the run so far.

        Args:
            name: name of the average.
            sigma_rel: standard deviation, above 0, at most 0.2887 (equal weights).
            more: the other settings.
        """
        return cls(name, sigma_rel=sigma_rel, **more).in_steps({"steps": 1.0})

    def in_steps(self, steps_per: StepsPer, **changes: Any) -> PowerProfile:
        """Return the average with a start in steps and gamma."""
        if self.sigma_rel is not None:
            changes |= {"gamma": gamma_of(self.sigma_rel), "sigma_rel": None}
        elif self.gamma is None:
            raise ConfigError(f"average {self.name!r}: gamma or sigma_rel is required.")
        return super().in_steps(steps_per, **changes)

    def describe_length(self, steps_per: StepsPer) -> str:
        """Return the width or the power."""
        name, value = self.length
        width = (
            f" over about {100 * value:g} % of the steps so far"
            if name == "sigma_rel"
            else ""
        )
        return f"power{width}, {name} {value:g}"


@section
class ScheduleFreeProfile(Profile):
    """Averaged point x of the optimizer `AdamWScheduleFree`, updated in each step from the start.

    Its weights are y. From ``y = b1 * x + (1 - b1) * z`` and ``x <- (1 - c) * x + c * z`` follows
    ``x <- d * x + (1 - d) * y`` with ``d = (1 - c) * (1 - b1) / (1 - b1 + c * b1)``, so that x is
    an average of y.

    Attributes:
        adam_beta1: option of the optimizer, b1.
        warmup_steps: option of the learning rate.
        warmup_start_factor: option of the learning rate.
        r: option of the optimizer.
    """

    type = "schedule_free"
    formula = ("adam_beta1", "warmup_steps", "warmup_start_factor", "r")
    counts_on_tensors = True

    # a run takes them from the sections of the optimizer and of the learning rate
    adam_beta1: float = 0.9
    warmup_steps: int = 0
    warmup_start_factor: float = 0.0
    r: float = 0.0

    def decay_at(self, done: Any) -> Any:
        """Return the decay of a step."""
        share = share_of_next(done, self.warmup_steps, self.warmup_start_factor, self.r)
        z_fraction = 1 - self.adam_beta1  # part of z in y, the live weights
        return (1 - share) * z_fraction / (z_fraction + share * self.adam_beta1)

    def conflicts(self) -> Findings:
        """Yield errors of options by which updates would be left out."""
        for name, default in (
            ("start_step", 0),
            ("start_epoch", None),
            ("update_every", 1),
            ("should_update", None),
        ):
            if (value := getattr(self, name)) != default:
                shown = "given" if callable(value) else f"{value:g}"
                yield error(
                    name,
                    f" = {shown}: the averaged point of the optimizer is updated in every step. "
                    "Remove it.",
                )

    def findings(self, run: RunConfig) -> Findings:
        """Yield findings in a run, first the error that its optimizer has no averaged point."""
        if run.optimizer.type != "AdamWScheduleFree":
            yield error(
                "type",
                f' = "schedule_free": optimizer.type is {run.optimizer.type}, and only '
                "AdamWScheduleFree has this average. Change one of the two.",
            )
        yield from super().findings(run)

    def describe_length(self, steps_per: StepsPer) -> str:
        """Return its origin."""
        return "averaged point of the optimizer"


@section
class CustomAverage(Profile):
    """Base class of averages that other distributions add: section in the input, and rule, in one.

    The averages are ``average <- d * average + (1 - d) * weights`` after each optimizer step. A
    subclass says what d is, and may say which steps count; both must follow from the arguments and
    the options alone, so that a restart is
    exact: there is no other state. The module must not import torch, so that checking an input
    starts fast::

        @section
        class CycleAverage(CustomAverage):
            # equal weights of the steps since the begin of a cycle
            type: ClassVar[str] = "cycle"
            period: int = option(1000, check=positive_int, unit="steps", doc="Length of a cycle.")

            def decay_at(self, done):
                place = done % self.period
                return place / (place + 1)

    It has the options of all averages: ``start_step``, ``update_every``, ``full_validation``, ... A
    method ``should_update(self, step, epoch)`` is a rule in place of ``update_every``: whether the
    average is updated with the weights of a step. Its arguments are the optimizer steps of the run,
    after the start of the average, and the passes over the training data so far.
    """

    counts_on_tensors = True

    @abstractmethod
    def decay_at(self, done: Any) -> Any:
        """Return the decay of the next step, d, 0 to 1.

        With ``update_every`` an update has the product of the decays of its steps.

        Args:
            done: steps since the start of the average, or updates if there is a method
                ``should_update``: a tensor in float64, of any shape, perhaps on a GPU. Each element
                is a case of its own: use operators and functions of tensors, and ``torch.where`` in
                place of ``if``.

        Returns:
            A tensor of the shape of ``done``, or one number for all steps.
        """

    @property
    def own_options(self) -> Values:
        """Return the options that only this type has, as plain values."""
        common = {o.name for o in options(CustomAverage)}
        names = [o.name for o in options(type(self)) if o.name not in common]
        return {name: plain(getattr(self, name)) for name in names}

    def settings(self) -> Values:
        """Return the settings as plain values, those of the type as ``options``."""
        return super().settings() | {"options": self.own_options}

    def describe_length(self, steps_per: StepsPer) -> str:
        """Return the type and its options."""
        texts = [f"{name} {show(value)}" for name, value in self.own_options.items()]
        return ", ".join([self.type, *texts])


AVERAGES = Registry(
    {
        kind.type: f"{__name__}:{kind.__name__}"
        for kind in (EmaProfile, PowerProfile, SwaProfile, ScheduleFreeProfile)
    },
    group="deepmd_ema.averages",
    base=CustomAverage,
)


@section
class EmaShorthand:
    """Options of `training` for one average named `ema`, as DeePMD-kit has them."""

    enable_ema: bool = option(
        False,
        "Whether an exponential moving average (EMA) of the weights is kept beside the live ones.",
    )
    ema_decay: float = option(
        0.999,
        "Decay per step: `average <- decay * average + (1 - decay) * weights`; its window is "
        "1/(1-decay) steps.",
        fraction,
    )
    ema_warmup: bool = option(
        True,
        "Whether the decay starts low and grows to `ema_decay`, min(ema_decay, (1+t)/(10+t)), so "
        "that short runs do not remember the initial weights. False is the formula of DeePMD-kit. "
        "Only in dp-ema.",
    )
    ema_ckpt_keep: int | None = option(
        None,
        "Averaged checkpoints kept; null: as many as `max_ckpt_keep`.",
        positive_int,
    )


@section
class EmaValidationShorthand:
    """The option of `validating` for the average named `ema`."""

    ema_full_validation: bool = option(
        False, "The same for the averaged weights; needs `training.enable_ema`."
    )


def sigma_rel_of(gamma: float) -> float:
    """Return the relative width of a power profile (arXiv:2312.02696, equation 123).

    ``sigma_rel = (gamma + 1) ** (1 / 2) * (gamma + 2) ** -1 * (gamma + 3) ** (-1 / 2)``
    """
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


def gamma_of(sigma_rel: float) -> float:
    """Return the gamma of a relative width (arXiv:2312.02696, equation 126).

    The inverse of :func:`sigma_rel_of`.

    Raises:
        ValueError: if no gamma of at least 0 has this width.
    """
    if not _sigma_rel.test(sigma_rel):
        raise ValueError(f"sigma_rel {sigma_rel!r}, expected {_sigma_rel.wants}.")
    # Bisection: sigma_rel falls with gamma and is below 1 / (gamma + 2), which bounds gamma. It
    # ends when no number is between the bounds, after about 60 halvings.
    low, high = 0.0, 1 / sigma_rel
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if sigma_rel_of(middle) > sigma_rel:
            low = middle
        else:
            high = middle
    return low


def share_of_next(done: Any, warmup_steps: int, start_factor: float, r: float) -> Any:
    """Return the share c of the next point z in the average x of :class:`AdamWScheduleFree`.

    It is the weight of z over the sum of all weights so far.
    The weight of point n, counted from 1, is ``lr^2 * n (n + 1) ... (n + r - 1)``, with gamma
    functions where r is no whole number, so that c is ``(r + 1) / (n + r)`` at a constant rate
    (polynomial-decay averaging; Shamir and Zhang, arXiv:1212.1824, section 4). The rate is the
    largest one so far where it falls. That of the warm-up rises linearly; skipped steps do not
    count.

    Args:
        done: number of points in x, a float64 tensor.
        warmup_steps: length of the linear warm-up of the learning rate.
        start_factor: first learning rate of the warm-up over the last one.
        r: power of the weights.
    """
    first, length = (start_factor, warmup_steps) if warmup_steps else (1.0, 1)
    slope = (1 - first) / length
    n = done + 1
    m = n.clamp(max=length)  # points of the warm-up
    # the square of the rate of point n is a polynomial of n + r, each term of which has a sum in
    # closed form
    u = m + r
    start = first - slope * (1 + r)
    linear = (2 * start - slope) * slope * (u + 1) / (r + 2)
    square = slope**2 * (u + 1) * (u + 2) / (r + 3)
    rising = u * (start**2 / (r + 1) + linear + square)
    # sums are in units of the product of point n, so that none overflows; `last` is the product of
    # point m, the last one of the warm-up
    last = (
        ((m + r).lgamma() - m.lgamma() + n.lgamma() - (n + r).lgamma()).exp()
        if r
        else 1.0
    )
    rate = first + slope * done.clamp(max=length)
    constant = (n + r - last * u) / (r + 1)
    # a first rate of 0 has a sum of 0, and no share
    return rate**2 / (last * rising + constant).clamp(min=sys.float_info.min)
