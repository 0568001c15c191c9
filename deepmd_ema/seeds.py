"""Named seeds: every random stream of a run has a seed of its own, a function of its name and numbers."""

from __future__ import annotations

import hashlib


def seed_for(stream: str, *numbers: int) -> int:
    """Return a 63-bit seed for a named stream; the same name and numbers give the same seed on every machine."""
    text = ":".join([stream, *map(str, numbers)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def stream_of(name: str, task: str) -> str:
    """Return the name of a random stream of a task; a task without a name has that of the run."""
    return f"{name} of {task}" if task else name
