"""The settings of an average of the weights, declared once: for inputs (``config``) and in Python (``averaging``)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from deepmd_ema.checks import Check, fraction, is_number, not_negative, not_negative_int, positive_int
from deepmd_ema.weight_names import LIVE, POSTHOC

# width of equal weights over the run, the widest of a power average (EDM2, arXiv:2312.02696, section 3.1)
MAX_SIGMA_REL = 1 / math.sqrt(12)


def setting(default: Any = dataclasses.MISSING, *, kw_only: bool = True, **about: Any) -> Any:
    """Declare a setting; ``about`` are attributes of an option of an input: doc, unit, check, choices, removed."""
    return dataclasses.field(default=default, kw_only=kw_only, metadata=about)


def redeclared(settings: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare a setting as ``settings`` does, with another default."""
    declared = next(f for f in fields(settings) if f.name == name)
    return dataclasses.field(default=default, kw_only=declared.kw_only, metadata=declared.metadata)


def _is_name(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    # `model_a-10.pt`, the link of an average a-10, would be the file of step 10 of an average a
    like_a_step = re.search(r"-[0-9]+$", value) is not None
    is_word = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", value) is not None
    return is_word and not like_a_step and value.lower() not in (LIVE, POSTHOC)


_name = Check(
    _is_name,
    f"a name of at most 40 letters, digits, _ and -, the first a letter or digit, without a number after a - at the "
    f"end, and not {LIVE} or {POSTHOC}",
)
sigma_rel_check = Check(
    lambda v: is_number(v) and 0 < v <= MAX_SIGMA_REL * (1 + 1e-12),
    f"a number > 0 and <= {math.floor(MAX_SIGMA_REL * 1e6) / 1e6} (1/sqrt(12): gamma is 0 there, equal weights)",
)


@dataclass(frozen=True)
class AverageSettings:
    """Settings of all averages."""

    type: ClassVar[str]

    name: str = setting(
        kw_only=False,
        check=_name,
        doc="Name of the average in the log, in checkpoints and in names of files: `model_NAME.ckpt-*`, "
        "`best_NAME.ckpt-*`, `val_NAME.log`, `lcurve_NAME.out`.",
    )
    start_step: int = setting(
        0,
        check=not_negative_int,
        unit="steps",
        doc="Step at which the average starts, as a copy of the live weights; before it there is none.",
    )
    update_every: int = setting(
        1,
        check=positive_int,
        unit="steps",
        doc="Steps between two updates. The decay is corrected for it, so that the length of the average does not "
        "change.",
    )
    device: str = setting(
        "live",
        choices=(LIVE, "cpu"),
        doc="Where the average is held: `live`: on the device of the live weights; `cpu`: in host memory, to which "
        "live weights are copied asynchronously.",
    )
    dtype: str = setting(
        "float64",
        choices=("float32", "float64"),
        doc="Precision of the average; never less than that of the live weights. In `float32` an average of float32 "
        "weights with a decay of 0.999 or more stays behind, because single updates are smaller than its rounding.",
    )
    layout: str = setting(
        "local_shard",
        choices=("local_shard", "full_tensor"),
        removed={"rank_range": "Use local_shard (default); zero_stage 2 and 3 shard averages with the weights."},
        doc="On several ranks, `local_shard`: each averages the weights that it holds, without communication; "
        "`full_tensor`: each holds the whole average, gathered at each update (zero_stage 2 and 3).",
    )
    buffers: str = setting(
        "copy",
        choices=("copy", "average"),
        doc="Buffers of the averaged model (numbers that are not trained): `copy`: the live ones; `average`: their "
        "average, floating-point numbers only.",
    )

    def problems(self) -> Iterator[str]:
        """Yield each wrong setting with its value and what is expected."""
        for field in fields(self):
            value, about = getattr(self, field.name), field.metadata
            choices, check = about.get("choices", ()), about.get("check")
            if choices and value not in choices:
                yield f"{field.name} {value!r}, expected one of: {', '.join(choices)}."
            elif check is not None and not check.test(value):
                yield f"{field.name} {value!r}, expected {check.wants}."
            elif isinstance(value, float) and not math.isfinite(value):
                yield f"{field.name} {value!r}, expected a finite number."
            elif isinstance(field.default, bool) and not isinstance(value, bool):
                yield f"{field.name} {value!r}, expected true or false."


@dataclass(frozen=True)
class EmaSettings(AverageSettings):
    """Settings of exponential moving averages."""

    type: ClassVar[str] = "ema"

    decay: float | None = setting(
        None,
        kw_only=False,
        check=fraction,
        doc="Decay per step: `average <- decay * average + (1 - decay) * weights`; its window is 1/(1-decay) steps. "
        "Exactly one of `decay` and `half_life` is given.",
    )
    warmup: bool = setting(
        True,
        kw_only=False,
        doc="Whether the decay starts low and grows to its value, min(decay, (1+t)/(10+t)), t updates after the start, "
        "so that the initial weights have little influence.",
    )


@dataclass(frozen=True)
class PowerSettings(AverageSettings):
    """Settings of power averages."""

    type: ClassVar[str] = "power"

    gamma: float | None = setting(
        None,
        kw_only=False,
        check=not_negative,
        doc="Power of the step in its weight: 0 is equal weights, larger is shorter. Exactly one of `gamma` and "
        "`sigma_rel` is given.",
    )


@dataclass(frozen=True)
class SwaSettings(AverageSettings):
    """Settings of averages of equal weights."""

    type: ClassVar[str] = "swa"


@dataclass(frozen=True)
class ScheduleFreeSettings(AverageSettings):
    """Settings of the averaged point of the optimizer AdamWScheduleFree."""

    type: ClassVar[str] = "schedule_free"
