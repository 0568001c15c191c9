"""Wording helpers for messages."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[str], most: int = 10) -> str:
    """Return ``names`` separated by commas; of more than ``most`` the first ones and ``and N more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
