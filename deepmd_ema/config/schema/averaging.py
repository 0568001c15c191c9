"""The sections of ``training.averaging``: one average of the weights each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from deepmd_ema.average_settings import (
    AverageSettings,
    EmaSettings,
    PowerSettings,
    ScheduleFreeSettings,
    SwaSettings,
    sigma_rel_check,
)
from deepmd_ema.config.fields import Check, fraction, not_negative, option, options, plain, positive_int
from deepmd_ema.config.messages import show
from deepmd_ema.errors import every_steps
from deepmd_ema.registry import Registry

_MAX_HALF_LIFE = 1e9  # half-lives of 1e16 steps give a decay of 1
_half_life = Check(lambda v: 0 < v <= _MAX_HALF_LIFE, "a number > 0 and <= 1e9")


@dataclass(frozen=True, kw_only=True)
class _Average(AverageSettings):
    """Options of all averages in an input.

    Attributes:
        lengths: options of which exactly one is given; none for equal weights.
    """

    lengths: ClassVar[tuple[str, ...]] = ()

    start_epoch: float | None = option(
        None, check=not_negative, unit="epochs", doc="The start in epochs instead of `start_step`; may be a fraction."
    )
    full_validation: bool = option(
        False,
        doc="Whether the average is validated on all validation data, when `validating` says, in `val_NAME.log`, and "
        "its best weights are kept in `best_NAME.ckpt-*`.",
    )
    lcurve: bool = option(
        False,
        doc="Whether the displayed errors are shown for the average as well, on the same batches, in "
        "`lcurve_NAME.out`.",
    )
    ckpt_keep: int | None = option(
        None, check=positive_int, doc="Checkpoints of the average kept; null: as many as `max_ckpt_keep`."
    )

    @property
    def length(self) -> tuple[str, float]:
        """Name and value of the option that gives the length of the average; equal weights are a power of 0."""
        given = ((name, getattr(self, name)) for name in self.lengths)
        return next(((name, value) for name, value in given if value is not None), ("gamma", 0.0))

    def summary(self, steps_per: Mapping[str, float]) -> str:
        """Return type, length and other options as text.

        Args:
            steps_per: steps of one of ``frames`` and ``epochs``, once they are known.
        """
        return ", ".join([self._length_words(steps_per), *self._more_words(steps_per)])

    def _length_words(self, steps_per: Mapping[str, float]) -> str:
        name, value = self.length
        width = f" over about {100 * value:g} % of the steps so far" * (name == "sigma_rel")
        return f"{self.type}{width}, {name} {value:g}" if self.lengths else "equal weights"

    def _more_words(self, steps_per: Mapping[str, float]) -> Iterator[str]:
        if self.start_epoch:
            step = f" (step {math.ceil(self.start_epoch * steps_per['epochs']):,})" if "epochs" in steps_per else ""
            yield f"from epoch {self.start_epoch:g}{step}"
        if self.start_step:
            yield f"from step {self.start_step:,}"
        if self.update_every > 1:
            yield every_steps(self.update_every)
        said = {"cpu": "in host memory", "float32": "float32", "full_tensor": "whole on every process",
                "average": "with averaged buffers"}  # fmt: skip
        yield from (said[v] for v in (self.device, self.dtype, self.layout, self.buffers) if v in said)


@dataclass(frozen=True, kw_only=True)
class _Stored(_Average):
    """Options of averages that can be stored for `dp-ema posthoc`."""

    snapshots: bool = option(
        False,
        doc="Whether copies of the average are kept in the folder `snapshots`, all of them, for `dp-ema posthoc`, "
        "which makes averages of any other length from those of two power averages.",
    )
    snapshot_freq: int | None = option(
        None, check=positive_int, unit="steps", doc="Steps between two snapshots; null: `save_freq`."
    )

    def _more_words(self, steps_per: Mapping[str, float]) -> Iterator[str]:
        yield from super()._more_words(steps_per)
        if self.snapshots:
            yield "snapshots " + (every_steps(self.snapshot_freq) if self.snapshot_freq else "with the checkpoints")


@dataclass(frozen=True, kw_only=True)
class EmaAverageConfig(_Average, EmaSettings):
    """Exponential moving average: in each step `average <- decay * average + (1 - decay) * weights`."""

    lengths: ClassVar[tuple[str, ...]] = ("decay", "half_life")
    snapshots: ClassVar[bool] = False
    snapshot_freq: ClassVar[None] = None

    half_life: float | None = option(
        None,
        check=_half_life,
        doc="Time in which the weight of a step goes down to a half, in `half_life_unit`, instead of `decay`: "
        "decay = 0.5^(1/half_life) in steps.",
    )
    half_life_unit: str = option(
        "steps",
        choices=("steps", "frames", "epochs"),
        doc="Unit of `half_life`. Half-lives in frames or epochs stay the same for other batch sizes.",
    )

    def _length_words(self, steps_per: Mapping[str, float]) -> str:
        (name, value), unit, warmup = self.length, self.half_life_unit, ", warm-up" * self.warmup
        if name == "decay":
            return f"EMA over about {1 / (1 - value):,.0f} steps, decay {value:g}{warmup}"
        steps = f" ({value * steps_per[unit]:,.0f} steps)" if unit in steps_per else ""
        return f"EMA, half-life {value:g} {unit}{steps}{warmup}"


@dataclass(frozen=True, kw_only=True)
class PowerAverageConfig(_Stored, PowerSettings):
    """Power average of EDM2 (arXiv:2312.02696): step t has the weight t^gamma, so its length grows with the run."""

    lengths: ClassVar[tuple[str, ...]] = ("gamma", "sigma_rel")

    sigma_rel: float | None = option(
        None,
        check=sigma_rel_check,
        doc="Width (standard deviation of the steps under their weights) as a fraction of the run, instead of "
        "`gamma`; larger is longer. 0.05 looks back over 5 % of the run on average.",
    )


@dataclass(frozen=True, kw_only=True)
class SwaAverageConfig(_Stored, SwaSettings):
    """Stochastic weight averaging: equal weights of all steps since the start; the same as `power` with gamma 0."""


@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAverageConfig(_Average, ScheduleFreeSettings):
    """Averaged point x of the optimizer `AdamWScheduleFree`, updated in each step from the start."""

    snapshots: ClassVar[bool] = False
    snapshot_freq: ClassVar[None] = None

    def _length_words(self, steps_per: Mapping[str, float]) -> str:
        return "averaged point of the optimizer"


@dataclass(frozen=True, kw_only=True)
class CustomAverage(_Average, ABC):
    """Base class of averages that other distributions add: their section in the input and their rule in one.

    The averages are ``average <- d * average + (1 - d) * weights`` after each optimizer step. A subclass says what d
    is, and may say which steps count; both must follow from the arguments and the options alone, so that a restart is
    exact: there is no other state. The module must not import torch, so that checking an input starts fast::

        @dataclass(frozen=True, kw_only=True)
        class CycleAverage(CustomAverage):
            # equal weights of the steps since the begin of a cycle
            type: ClassVar[str] = "cycle"
            period: int = option(1000, check=positive_int, unit="steps", doc="Length of a cycle.")

            def decay_at(self, done):
                place = done % self.period
                return place / (place + 1)

    It has the options of all averages: ``start_step``, ``update_every``, ``full_validation``, ...
    """

    snapshots: ClassVar[bool] = False
    snapshot_freq: ClassVar[None] = None

    @abstractmethod
    def decay_at(self, done: Any) -> Any:
        """Return the decay of the next step, d, 0 to 1.

        With ``update_every`` an update has the product of the decays of its steps.

        Args:
            done: steps since the start of the average, or updates if :meth:`should_update` is overridden: a tensor in
                float64, of any shape, perhaps on a GPU. Each element is a case of its own: use operators and functions
                of tensors, and ``torch.where`` in place of ``if``.

        Returns:
            A tensor of the shape of ``done``, or one number for all steps.
        """

    def should_update(self, step: int, epoch: float) -> bool:
        """Whether the average is updated with the weights of a step; override it for a rule beside ``update_every``.

        Args:
            step: optimizer steps of the run, after the start of the average.
            epoch: passes over the training data so far.
        """
        return True

    @property
    def update_rule(self) -> Callable[[int, float], bool] | None:
        """Return :meth:`should_update` if a subclass overrides it."""
        return None if type(self).should_update is CustomAverage.should_update else self.should_update

    @property
    def own_options(self) -> dict[str, Any]:
        """Return the options that only this type has, as plain values."""
        common = {o.name for o in options(CustomAverage)}
        return {o.name: plain(getattr(self, o.name)) for o in options(type(self)) if o.name not in common}

    def _length_words(self, steps_per: Mapping[str, float]) -> str:
        return ", ".join([self.type, *(f"{name} {show(value)}" for name, value in self.own_options.items())])


AverageConfig = EmaAverageConfig | PowerAverageConfig | SwaAverageConfig | ScheduleFreeAverageConfig | CustomAverage
AVERAGES = Registry(
    {
        "ema": f"{__name__}:EmaAverageConfig",
        "power": f"{__name__}:PowerAverageConfig",
        "swa": f"{__name__}:SwaAverageConfig",
        ScheduleFreeSettings.type: f"{__name__}:ScheduleFreeAverageConfig",
    },
    group="deepmd_ema.averages",
    base=CustomAverage,
)


@dataclass(frozen=True, kw_only=True)
class EmaShorthand:
    """Options of `training` for one average named `ema`, as DeePMD-kit has them."""

    enable_ema: bool = option(
        False, doc="Whether an exponential moving average (EMA) of the weights is kept beside the live ones."
    )
    ema_decay: float = option(
        0.999,
        check=fraction,
        doc="Decay per step: `average <- decay * average + (1 - decay) * weights`; its window is 1/(1-decay) steps.",
    )
    ema_warmup: bool = option(
        True,
        doc="Whether the decay starts low and grows to `ema_decay`, min(ema_decay, (1+t)/(10+t)), so that short runs "
        "do not remember the initial weights. False is the formula of DeePMD-kit. Only in dp-ema.",
    )
    ema_ckpt_keep: int | None = option(
        None, check=positive_int, doc="Averaged checkpoints kept; null: as many as `max_ckpt_keep`."
    )


@dataclass(frozen=True, kw_only=True)
class EmaValidationShorthand:
    """The option of `validating` for the average named `ema`."""

    ema_full_validation: bool = option(False, doc="The same for the averaged weights; needs `training.enable_ema`.")
