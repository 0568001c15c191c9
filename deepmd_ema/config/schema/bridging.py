"""Options of zone bridging: an analytic pair energy for close atoms, with clamped distances.

The descriptor sees the clamped distances.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepmd_ema.config.fields import Check

METHODS = ("zbl",)
DEFAULT_INNER, DEFAULT_OUTER = 0.5, 0.8  # angstrom, as in DeePMD-kit


@dataclass(frozen=True)
class Window:
    """Distances between which the clamped distance goes from a constant to the distance itself.

    Attributes:
        inner: the constant, angstrom.
        outer: distance from which on nothing is clamped, angstrom.
    """

    inner: float
    outer: float


bridging_method = Check(
    lambda v: method_name(v) in (None, *METHODS), '"zbl", or "none"'
)


def method_name(value: str) -> str | None:
    """Return the method that a text chooses, in any case; None for ``none`` and an empty text."""
    return None if value.lower() in ("none", "") else value.lower()
