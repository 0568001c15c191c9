"""Base class of averages of the weights: common options, rules, due updates and summaries."""

from __future__ import annotations

import math
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from deepmd_ema.config.fields import MAX_INTEGER, option, options
from deepmd_ema.config.messages import Names, Values
from deepmd_ema.errors import ConfigError
from deepmd_ema.findings import Findings, error, unused
from deepmd_ema.text import every_steps
from deepmd_ema.utils import (
    LIVE,
    POSTHOC,
    Check,
    not_negative,
    not_negative_int,
    positive_int,
)

if TYPE_CHECKING:
    from deepmd_ema.config.schema.run import RunConfig

P = TypeVar("P", bound="Profile")
StepsPer: TypeAlias = Mapping[str, float]
"""Optimizer steps of one of ``steps``, ``frames`` and ``epochs``."""

REMOVE_ONE = "Remove one of the two."
BY_RATIO = "ckpt_keep_ratio says how many checkpoints are kept"
NEVER = "full_val_start = 1 means never"
_WITH_CHECKPOINTS = "with the checkpoints"
NEEDS_DATA = (
    " = true: needs training.validation_data (or validation_fraction). Add it, or set this to "
    "false."
)


# `model_a-10.pt`, the link of an average a-10, would be the file of step 10 of an average a
_NAME = re.compile(r"(?!.*-[0-9]+$)[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_name = Check(
    lambda v: _NAME.fullmatch(v) is not None and v.lower() not in (LIVE, POSTHOC),
    "a name of at most 40 letters, digits, _ and -, the first a letter or digit, without a number "
    f"after a - at the end, and not {LIVE} or {POSTHOC}",
)


@dataclass(frozen=True)
class Profile(ABC):
    """One average: use :class:`EmaProfile`, :class:`PowerProfile` or :class:`SwaProfile`.

    All follow ``s <- d * s + (1 - d) * w`` (s: average, w: live weights); they differ in the decay
    d. No update comes before ``start_step``; there the average is the live weights. The options of
    files and validation are those of a run; ``AverageBank`` alone does not read them.

    Attributes:
        name: part of file names, and name in logs.
        start_step: optimizer steps before the average starts.
        update_every: optimizer steps between two updates; decays are corrected for it.
        device: ``live`` keeps the average where the weights are, ``cpu`` in host memory. Weights of
            a GPU are then copied asynchronously, and used when the next update begins or the
            average is read.
        dtype: ``float64`` or ``float32``; never narrower than the weights themselves. An average in
            ``float32`` of weights in float32 loses updates that are smaller than its rounding: at
            the end of a run in which the learning rate decays, 7 to 10 % of its distance from the
            live weights (decay 0.999 to 0.9999).
        layout: ``local_shard`` averages what each rank holds, without communication;
            ``full_tensor`` gathers sharded weights at each update and holds the whole average on
            every rank.
        buffers: ``copy`` leaves buffers alone, so that the live ones complete the average;
            ``average`` averages the floating-point ones that are in the state dict. Integer and
            bool ones never are.
        should_update: ``should_update(step, epoch)`` decides instead of ``update_every`` which
            steps after the start count; the epoch is what the trainer hands to
            ``AverageBank.update``. It must be possible to pickle it. A subclass may have a method
            of this name instead.
        formula: names of the settings that give the decay, in files.
        lengths: options of which an input gives exactly one; none for equal weights.
        counts_on_tensors: whether the formula takes tensors only.
    """

    name: str = option(
        check=_name,
        doc="Name of the average in the log, in checkpoints and in names of files: "
        "`model_NAME.ckpt-*`, `best_NAME.ckpt-*`, `val_NAME.log`, `lcurve_NAME.out`.",
    )
    _: KW_ONLY
    type: ClassVar[str]
    formula: ClassVar[Names] = ()
    lengths: ClassVar[Names] = ()
    counts_on_tensors = False
    snapshots: ClassVar[bool] = False
    snapshot_freq: ClassVar[int | None] = None

    start_step: int = option(
        0,
        "Step at which the average starts, as a copy of the live weights; before it there is none.",
        not_negative_int,
        unit="steps",
    )
    start_epoch: float | None = option(
        None,
        "The start in epochs instead of `start_step`; may be a fraction.",
        not_negative,
        unit="epochs",
    )
    update_every: int = option(
        1,
        "Steps between two updates. The decay is corrected for it: the length of the average is "
        "the same.",
        positive_int,
        unit="steps",
    )
    device: str = option(
        "live",
        "Where the average is held: `live`: on the device of the live weights; `cpu`: in host "
        "memory, to which live weights are copied asynchronously.",
        choices=(LIVE, "cpu"),
    )
    dtype: str = option(
        "float64",
        "Precision of the average; never less than that of the live weights. In `float32` an "
        "average of float32 weights with a decay of 0.999 or more stays behind, because single "
        "updates are smaller than its rounding.",
        choices=("float32", "float64"),
    )
    layout: str = option(
        "local_shard",
        "On several ranks, `local_shard`: each averages the weights that it holds, without "
        "communication; `full_tensor`: each holds the whole average, gathered at each update "
        "(zero_stage 2 and 3).",
        choices=("local_shard", "full_tensor"),
        removed={
            "rank_range": (
                "Use local_shard (default); zero_stage 2 and 3 shard averages with the weights."
            )
        },
    )
    buffers: str = option(
        "copy",
        "Buffers of the averaged model (numbers that are not trained): `copy`: the live ones; "
        "`average`: their average, floating-point numbers only.",
        choices=("copy", "average"),
    )
    full_validation: bool = option(
        False,
        "Whether the average is validated on all validation data, when `validating` says, in "
        "`val_NAME.log`, and its best weights are kept in `best_NAME.ckpt-*`.",
    )
    lcurve: bool = option(
        False,
        "Whether displayed errors are shown for the average too, on the same batches, in "
        "`lcurve_NAME.out`.",
    )
    ckpt_keep: int | None = option(
        None,
        "Checkpoints of the average kept; null: as many as `max_ckpt_keep`.",
        positive_int,
    )
    # only Python code can give it; without metadata it is no option of inputs
    should_update: Callable[[int, Any], bool] | None = field(
        default=None, compare=False
    )

    def __post_init__(self) -> None:
        hook = self.should_update
        # A subclass may have a method of this name. The field, which is None then, would hide it,
        # and the dataclass is frozen.
        if hook is None and callable(type(self).should_update):
            object.__delattr__(self, "should_update")
            hook = self.should_update
        from deepmd_ema.config.argcheck import (
            fault,
            field_of,
        )  # argcheck imports this module

        # an average that Python code builds has not been through the checks of an input
        faults = (
            (o.name, fault(field_of(o), getattr(self, o.name)))
            for o in options(type(self))
        )
        problems = [f"{name}{fault}" for name, fault in faults if fault]
        if hook is not None and not callable(hook):
            problems.append(
                f"should_update = {hook!r}: expected a function of (step, epoch) or an object "
                "that can be called."
            )
        elif "should_update" in vars(self) and hook is not None:
            # checkpoints and processes of a run get the average with its function
            try:
                pickle.dumps(hook)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                problems.append(
                    f"should_update: cannot be pickled ({error}); use a function or a class of a "
                    "module."
                )
        ConfigError.raise_if_any(
            [f"average {self.name!r}: {problem}" for problem in problems]
        )

    @abstractmethod
    def decay_at(self, done: Any) -> Any:
        """Return the decay d of the next step.

        Args:
            done: steps since the start, an int or a float64 tensor.
        """

    def decay_of_update(self, updates: Any) -> Any:
        """Return the decay of the update after ``updates`` updates.

        It is the product of the decays of the ``update_every`` steps of the update.

        Args:
            updates: an int; or a float64 tensor, a counter that only the device knows: nothing
                waits for the device.
        """
        every = self.update_every
        if every == 1:
            return self.decay_at(updates)
        if isinstance(updates, int):
            return math.prod(
                self.decay_at(done)
                for done in range(updates * every, (updates + 1) * every)
            )
        # (..., every): the steps of each update. cumsum makes 0, 1, ... in float64 on the device,
        # without importing torch here.
        steps = updates.unsqueeze(-1) * every + (updates.new_ones(every).cumsum(0) - 1)
        decays = self.decay_at(steps)
        if not hasattr(decays, "prod"):  # one number for all steps
            decays = steps.new_full(steps.shape, decays)
        return decays.prod(-1)

    def is_due(self, step: int, epoch: float | None = None) -> bool:
        """Whether the average is updated after optimizer step ``step``."""
        if step <= self.start_step:
            return step == self.start_step
        if self.should_update is not None:
            return bool(self.should_update(step, epoch))
        return (
            self.update_every == 1 or (step - self.start_step) % self.update_every == 0
        )

    def in_steps(self: P, steps_per: StepsPer, **changes: Any) -> P:
        """Return the average with its start in steps and its length as the decay needs it.

        Args:
            steps_per: steps of one of ``steps``, ``frames`` and ``epochs``.
            changes: other settings.
        """
        if self.start_epoch is not None:
            # any later start is never as well, and would not fit 64 bits
            start = min(self.start_epoch * steps_per["epochs"], MAX_INTEGER - 1)
            changes |= {"start_step": math.ceil(start), "start_epoch": None}
        return replace(
            self, **{"should_update": vars(self).get("should_update"), **changes}
        )

    def settings(self) -> Values:
        """Return the settings as plain values, ``type`` first, without the name of the average.

        A function ``should_update`` is represented by its name.
        """
        names = ("start_step", "update_every", "device", "dtype", "layout", "buffers")
        values = {name: getattr(self, name) for name in (*names, *self.formula)}
        hook: Any = self.should_update
        if hook is not None:
            hook = getattr(hook, "__qualname__", type(hook).__qualname__)
        return {"type": self.type, **values, "should_update": hook}

    def conflicts(self) -> Findings:
        """Yield errors of options that exclude each other, in a run or in a bank without one."""
        if self.start_step > 0 and self.start_epoch is not None:
            yield error(
                "start_epoch",
                f" = {self.start_epoch:g}: start_step = {self.start_step} is given too. "
                f"{REMOVE_ONE}",
            )
        if self.should_update is not None and self.update_every != 1:
            who = (
                "should_update"
                if "should_update" in vars(self)
                else f"type {self.type}"
            )
            yield error(
                "update_every",
                f" = {self.update_every}: {who} says itself which steps count. Remove it.",
            )
        lengths = [
            (name, value)
            for name in self.lengths
            if (value := getattr(self, name)) is not None
        ]
        if len(lengths) > 1:
            (first, a), (second, b) = lengths
            yield error(second, f" = {b:g}: {first} = {a:g} is given too. {REMOVE_ONE}")

    def findings(self, run: RunConfig) -> Findings:
        """Yield errors of options that do not fit to others of a run, and those without effect."""
        training = run.training
        if self.full_validation and not run.has_validation_data:
            yield error("full_validation", NEEDS_DATA)
        if self.lcurve and not training.disp_training:
            yield error(
                "lcurve",
                " = true: needs training.disp_training, which is false. Set it to true, or remove "
                "this.",
            )
        if self.snapshots and self.snapshot_freq is None and training.save_freq <= 0:
            yield error(
                "snapshots",
                " = true: needs snapshot_freq, because training.save_freq = "
                f"{training.save_freq} writes the last step only. Add it, e.g. "
                '"snapshot_freq": 1000.',
            )
        yield from self.conflicts()
        if self.lengths and all(getattr(self, name) is None for name in self.lengths):
            example = '"decay": 0.999' if self.type == "ema" else '"sigma_rel": 0.05'
            yield error(
                "",
                f": {' or '.join(self.lengths)} is required for type {self.type}. Add one, e.g. "
                f"{example}.",
            )
        if self.length[0] == "decay":
            yield unused("half_life_unit", "decay is given, and no half_life")
        if not self.snapshots:
            yield unused("snapshot_freq", "snapshots is false")
        if training.ckpt_keep_ratio is not None:
            yield unused("ckpt_keep", BY_RATIO)
        if run.validating.full_val_start == 1:
            yield unused("full_validation", f"validating.{NEVER}")
        if self.layout == "full_tensor" and training.zero_stage <= 1:
            stage = training.zero_stage
            yield unused(
                "layout", f"every process holds all weights at zero_stage {stage}"
            )

    @property
    def length(self) -> tuple[str, float]:
        """Name and value of the option that gives the length of the average.

        Equal weights are a power of 0.
        """
        for name in self.lengths:
            if (value := getattr(self, name)) is not None:
                return name, value
        return "gamma", 0.0

    def summary(self, steps_per: StepsPer) -> str:
        """Return type, length and other options as text.

        Args:
            steps_per: steps of one of ``frames`` and ``epochs``, once they are known.
        """
        texts = [self.describe_length(steps_per)]
        if self.start_epoch:
            texts.append(f"from epoch {self.start_epoch:g}")
            if "epochs" in steps_per:
                texts[-1] += (
                    f" (step {math.ceil(self.start_epoch * steps_per['epochs']):,})"
                )
        if self.start_step:
            texts.append(f"from step {self.start_step:,}")
        if self.update_every > 1:
            texts.append(every_steps(self.update_every))
        # values of options that are not their defaults
        descriptions = {
            "cpu": "in host memory",
            "float32": "float32",
            "full_tensor": "whole on every process",
            "average": "with averaged buffers",
        }
        values = (self.device, self.dtype, self.layout, self.buffers)
        texts += [descriptions[value] for value in values if value in descriptions]
        if self.snapshots:
            interval = (
                every_steps(self.snapshot_freq)
                if self.snapshot_freq
                else _WITH_CHECKPOINTS
            )
            texts.append(f"snapshots {interval}")
        return ", ".join(texts)

    @abstractmethod
    def describe_length(self, steps_per: StepsPer) -> str:
        """Return type and length as text; ``steps_per`` as for :meth:`summary`."""


# typing.get_type_hints of Python 3.10 raises an error for the mark KW_ONLY, which is no type. This
# can go when Python 3.10 is no longer supported.
del Profile.__annotations__["_"]
