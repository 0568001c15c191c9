"""Options of zone bridging: an analytic pair energy for close atoms, whose distances are clamped for the descriptor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.fields import Check
from deepmd_ema.config.messages import show

METHODS = ("zbl",)
DEFAULT_INNER, DEFAULT_OUTER = 0.5, 0.8  # angstrom, as in DeePMD-kit


@dataclass(frozen=True)
class Window:
    """Distances between which the clamped distance goes from a constant to the distance itself.

    Attributes:
        inner: the constant, angstrom.
        outer: from this on distances are not changed, angstrom.
    """

    inner: float
    outer: float


bridging_method = Check(lambda v: method_name(v) in (None, *METHODS), '"zbl", or "none"')


def method_name(value: str) -> str | None:
    """Return the method that a text chooses, in upper or lower case, or None for ``none`` and an empty text."""
    return None if value.lower() in ("none", "") else value.lower()


def window_problems(
    window: Window, names: tuple[str, str], type_map: Sequence[str], rcut: float
) -> Iterator[tuple[str, str]]:
    """Yield an option and the rest of a message of what does not fit together in a model with bridging.

    Args:
        window: where the pair energy takes over.
        names: of the options of its two distances.
        type_map: names of the elements.
        rcut: cutoff of the descriptor, angstrom.
    """
    first, last = names
    if not window.inner < window.outer <= rcut:
        expected = f"more than {first} = {window.inner:g}, at most rcut = {rcut:g} (angstrom)"
        yield last, f" = {window.outer:g}: expected {expected}."
    unknown = [name for name in type_map if name not in SYMBOLS]
    if unknown:
        yield "type_map", f" = {show(list(type_map))}: {unknown[0]} is no element, whose charge zbl needs."
