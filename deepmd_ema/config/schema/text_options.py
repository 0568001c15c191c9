"""Text options of several parts, such as ``max:64`` and ``F:RMSE``, which are read once, here.

They are texts: they compare, print and are written to files as such.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import ClassVar, TypeVar

from deepmd_ema.config.labels import METRICS
from deepmd_ema.errors import ConfigError

T = TypeVar("T", bound="TextOption")


class TextOption(str):
    """Base class: a text that is read when the object is made.

    Attributes:
        option: name, for messages.
        wants: description of such a text, for messages.
    """

    option: ClassVar[str]
    wants: ClassVar[str]

    def __new__(cls: type[T], text: str) -> T:
        """Read a text.

        Raises:
            ConfigError: if it cannot be understood.
        """
        self = super().__new__(cls, text)
        if not self.read():
            raise ConfigError(f'{cls.option} = "{self}": expected {cls.wants}.')
        return self

    def read(self) -> bool:
        """Set the parts, and return whether the text can be understood."""
        raise NotImplementedError

    @classmethod
    def is_readable(cls, text: str) -> bool:
        """Whether a text can be understood."""
        try:
            cls(text)
        except ConfigError:
            return False
        return True


class BatchSizeRule(TextOption):
    """Frames of a batch.

    Attributes:
        kind: ``auto`` (at least ``number`` atoms in a batch), ``max`` (at most), ``filter`` (at
            most, and frames of more are left out), ``mixed`` (``number`` frames of all systems) or
            ``mix`` (frames of all systems with at most ``number`` atoms).
        number: number of atoms or frames; 32 for a plain ``auto``, as in DeePMD-kit.
    """

    option = "batch_size"
    wants = (
        'a whole number > 0, a list of them, or "auto", "auto:N", "max:N", "filter:N", "mixed:N" '
        'or "mix:N"'
    )
    kind: str
    number: int

    @classmethod
    def is_readable(cls, value: str | int | list[int]) -> bool:
        """Whether a text can be understood, or numbers are above 0."""
        if isinstance(value, str):
            return super().is_readable(value)
        return min(value if isinstance(value, list) else [value], default=0) > 0

    def read(self) -> bool:
        """Set kind and number."""
        # 18 digits fit 64 bits
        match = re.fullmatch(r"(auto|max|filter|mixed|mix):([0-9]{1,18})|auto", self)
        if match is None:
            return False
        self.kind = match[1] or "auto"
        self.number = int(match[2] or 32)
        return self.number > 0

    @property
    def is_mixed(self) -> bool:
        """Whether a batch has frames of several systems."""
        return self.kind in ("mixed", "mix")


class SystemProbability(TextOption):
    """Probability of a system: ``auto_prob``.

    Attributes:
        kind: ``prob_uniform`` (all alike) or ``prob_sys_size`` (by the number of batches).
        blocks: ``(start, stop, weight)`` of blocks of systems, within which ``kind`` holds; empty
            for one block of all.
    """

    option = "auto_prob"
    wants = '"prob_uniform", "prob_sys_size" or "prob_sys_size;begin:end:weight;..."'
    kind: str
    blocks: tuple[tuple[int, int, Fraction], ...]

    def read(self) -> bool:
        """Set kind and blocks, of which a begin is before its end, and one has a weight above 0."""
        self.kind, *texts = (part.strip() for part in self.split(";"))
        block = re.compile(
            r"([0-9]{1,18}):([0-9]{1,18}):([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?)"
        )
        matches = [block.fullmatch(text) for text in texts if text]
        # fractions, so that weights of blocks are added up and divided without rounding
        self.blocks = tuple(
            (int(m[1]), int(m[2]), Fraction(float(m[3])))
            for m in matches
            if m is not None
        )
        if self.kind not in ("prob_uniform", "prob_sys_size") or (
            texts and self.kind == "prob_uniform"
        ):
            return False
        in_order = None not in matches and all(
            start < stop for start, stop, _ in self.blocks
        )
        return in_order and (not texts or any(weight for *_, weight in self.blocks))


class ActivationName(TextOption):
    """An activation function.

    Attributes:
        choices: names that an input may have, beside ``silut:T``; other capital letters are read
            here and refused there.
        kind: the name in lower case, ``silut`` for one with a number.
        bend: where ``silut`` bends into a tanh; 3 without a number, as in DeePMD-kit.
    """

    choices = (
        "tanh",
        "relu",
        "relu6",
        "softplus",
        "sigmoid",
        "gelu",
        "gelu_tf",
        "silu",
        "silut",
        "linear",
        "none",
        "None",
    )
    option = "activation_function"
    wants = f"one of {', '.join(choices)}, or silut:T, e.g. silut:3"
    kind: str
    bend: float

    def read(self) -> bool:
        """Set kind and bend."""
        match = re.fullmatch(r"silut:(\d+(?:\.\d*)?)", self.lower())
        self.kind = self.partition(":")[0].lower()
        self.bend = float(match[1]) if match else 3.0
        return match is not None or self.lower() in self.choices


class Metric(TextOption):
    """One error of a model, such as that which ranks weights.

    Attributes:
        quantity: letter of what the error is of, such as ``E``, ``F``, ``V`` or ``S``.
        error: ``MAE`` or ``RMSE``.
    """

    option = "metric"
    wants = (
        "E, F, V, S (energy, force, virial, stress) or D, W, A, B, N, M, P, a colon, MAE or RMSE: "
        "e.g. E:MAE"
    )
    quantity: str
    error: str

    def __new__(cls, text: str) -> Metric:
        """Read a text, in upper or lower case."""
        return super().__new__(cls, text.upper())

    def read(self) -> bool:
        """Set quantity and error."""
        parts = self.partition(":")
        self.quantity = parts[0]
        self.error = parts[2]
        return self.quantity in METRICS and self.error in ("MAE", "RMSE")

    @property
    def full_name(self) -> str:
        """Name in tables, such as ``Force RMSE``."""
        return f"{METRICS[self.quantity].title} {self.error}"

    @property
    def unit(self) -> str:
        """Unit of tables, such as ``meV/Å``."""
        return METRICS[self.quantity].display_unit

    @property
    def column(self) -> str:
        """Name of its column in validation logs, such as ``F_RMSE(meV/Å)``."""
        return f"{self.quantity}_{self.error}({self.unit})"
