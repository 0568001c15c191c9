"""Checks of single values: of options of an input, and of settings that are given in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """A test of one value; ``wants`` completes the sentence ``expected ...``."""

    test: Callable[[Any], bool]
    wants: str


def is_number(value: Any) -> bool:
    """Whether a value is a number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


positive = Check(lambda v: is_number(v) and v > 0, "a number > 0")
positive_int = Check(lambda v: is_whole(v) and v > 0, "a whole number > 0")
not_negative = Check(lambda v: is_number(v) and v >= 0, "a number >= 0")
not_negative_int = Check(lambda v: is_whole(v) and v >= 0, "a whole number >= 0")
fraction = Check(lambda v: is_number(v) and 0 <= v < 1, "a number >= 0 and < 1")
