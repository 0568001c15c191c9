"""Text options of several parts, such as ``max:64`` and ``F:RMSE``: read once, here, and handed on with their parts.

They compare, print and are written to files as the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import ClassVar

from deepmd_ema.config.labels import METRICS
from deepmd_ema.errors import ConfigError, did_you_mean


class BatchSizeRule(str):
    """Frames of a batch.

    Attributes:
        kind: ``auto`` (at least ``number`` atoms in a batch), ``max`` (at most), ``filter`` (at most, and frames of
            more are left out), ``mixed`` (``number`` frames of all systems) or ``mix`` (frames of all systems with at
            most ``number`` atoms).
        number: of atoms or frames; that of a plain ``auto`` is 32, as in DeePMD-kit.
    """

    kind: str
    number: int

    def __new__(cls, text: str) -> BatchSizeRule:
        """Read a text.

        Raises:
            ConfigError: if it cannot be understood.
        """
        self = super().__new__(cls, text)
        found = re.fullmatch(r"(auto|max|filter|mixed|mix):([0-9]{1,18})|auto", self)
        if found is None or (found[2] is not None and int(found[2]) < 1):
            raise ConfigError(
                f'batch_size = "{self}" is unknown. Known: a number, a list, auto, auto:N, max:N, filter:N, mixed:N, '
                "mix:N."
            )
        self.kind, self.number = found[1] or "auto", int(found[2] or 32)
        return self

    @property
    def is_mixed(self) -> bool:
        """Whether a batch has frames of several systems."""
        return self.kind in ("mixed", "mix")


class SystemProbability(str):
    """Probability of a system: ``auto_prob``.

    Attributes:
        kind: ``prob_uniform`` (all alike) or ``prob_sys_size`` (by the number of batches).
        blocks: ``(start, stop, weight)`` of blocks of systems, within which ``kind`` holds; empty for one block of all.
    """

    kind: str
    blocks: tuple[tuple[int, int, Fraction], ...]

    def __new__(cls, text: str) -> SystemProbability:
        """Read a text.

        Raises:
            ConfigError: if it cannot be understood.
        """
        self = super().__new__(cls, text)
        self.kind, *texts = (part.strip() for part in self.split(";"))
        if self.kind not in ("prob_uniform", "prob_sys_size") or (texts and self.kind == "prob_uniform"):
            raise ConfigError(
                f'auto_prob = "{self}" is unknown. Known: prob_uniform, prob_sys_size, '
                "prob_sys_size;start:stop:weight;..."
            )
        blocks = []
        for text in filter(None, texts):
            found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18}):([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,2})?)", text)
            if found is None:
                raise ConfigError(f'auto_prob = "{self}": "{text}" is not start:stop:weight.')
            blocks.append((int(found[1]), int(found[2]), Fraction(float(found[3]))))
        if any(start >= stop for start, stop, _ in blocks) or (texts and not sum(weight for *_, weight in blocks)):
            raise ConfigError(f'auto_prob = "{self}": expected start < stop, and a weight above 0.')
        self.blocks = tuple(blocks)
        return self


class ActivationName(str):
    """An activation function.

    Attributes:
        known: what an input may say, beside ``silut:T``; other capital letters are read here and refused there.
        kind: the name in lower case, ``silut`` for one with a number.
        bend: where ``silut`` bends into a tanh; 3 without a number, as in DeePMD-kit.
    """

    known: ClassVar[tuple[str, ...]] = (
        "tanh", "relu", "relu6", "softplus", "sigmoid", "gelu", "gelu_tf", "silu", "silut", "linear", "none", "None",
    )  # fmt: skip
    kind: str
    bend: float

    def __new__(cls, text: str) -> ActivationName:
        """Read a text.

        Raises:
            ConfigError: if it cannot be understood.
        """
        self = super().__new__(cls, text)
        found = re.fullmatch(r"silut:(\d+(?:\.\d*)?)", self.lower())
        if found is None and self.lower() not in self.known:
            raise ConfigError(f'activation_function "{self}" is unknown. {did_you_mean(self, self.known)}')
        self.kind, self.bend = self.partition(":")[0].lower(), float(found[1]) if found else 3.0
        return self


METRIC_WORDS = "E, F, V or S (energy, force, virial, stress), a colon, and MAE or RMSE: e.g. E:MAE"


class Metric(str):
    """The error that ranks weights.

    Attributes:
        quantity: ``E``, ``F``, ``V`` or ``S``.
        error: ``MAE`` or ``RMSE``.
    """

    quantity: str
    error: str

    def __new__(cls, text: str) -> Metric:
        """Read a text.

        Raises:
            ConfigError: if it cannot be understood.
        """
        self = super().__new__(cls, text.upper())
        self.quantity, _, self.error = self.partition(":")
        if self.quantity not in METRICS or self.error not in ("MAE", "RMSE"):
            raise ConfigError(f'"{self}" is no metric. Known: {METRIC_WORDS}.')
        return self


def is_readable(kind: Callable[[str], str], text: str) -> bool:
    """Whether a text can be read as that kind of option."""
    try:
        kind(text)
    except ConfigError:
        return False
    return True
