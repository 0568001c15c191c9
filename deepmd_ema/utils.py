"""The version, seeds, freed memory, checks of types, and the name of the live weights."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__version__ = "0.4.0.dev0"


LIVE = "live"  # the weights that are trained; no average may have this name
POSTHOC = "posthoc"  # the average that `dp-ema posthoc` makes


def seed_for(stream: str, *numbers: int) -> int:
    """Return a 63-bit seed for a named stream, the same on every machine."""
    # hash() of Python differs between processes; 63 bits fit a signed integer of torch or numpy
    text = ":".join([stream, *map(str, numbers)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def stream_of(name: str, task: str) -> str:
    """Return the name of a random stream of a task; a task without a name has that of the run."""
    return f"{name} of {task}" if task else name


# parameters of mallopt, from malloc.h of the GNU C library
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4
_MAX_THRESHOLD = 32 << 20  # bytes, the largest threshold that mallopt accepts


def keep_freed_memory(most: int | None = None) -> bool:
    """Have the C library keep freed memory for the next step, and return whether it does.

    By default it gives large blocks back to the system, which hands them out page by page again,
    filled with zeros: a third of the time of a training step of dpa3 on a CPU. The largest memory
    of a run stays the same. Nothing is changed where the user has set ``MALLOC_*`` or
    ``GLIBC_TUNABLES``, or where it is not the GNU C library. Call it while the process has one
    thread: glibc documents ``mallopt`` as unsafe beside other threads.

    Args:
        most: bytes that are kept, of blocks below 32 MiB: for a process that does other things as
            well. None: all.
    """
    if any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    if most is not None:
        return bool(
            mallopt(_M_MMAP_THRESHOLD, _MAX_THRESHOLD)
            and mallopt(_M_TRIM_THRESHOLD, most)
        )
    # No blocks outside of the heap, which are always given back, no giving back of the end of the
    # heap, and growth by 64 MiB at a time.
    return bool(
        mallopt(_M_MMAP_MAX, 0)
        and mallopt(_M_TRIM_THRESHOLD, -1)
        and mallopt(_M_TOP_PAD, 64 << 20)
    )


def peak_memory() -> int:
    """Return the largest memory that this process has had, bytes; 0 where it is not known."""
    # on Linux getrusage includes the memory of the parent at the start of this process
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


@dataclass(frozen=True)
class Check:
    """A test of one value; ``wants`` completes the sentence ``expected ...``."""

    test: Callable[[Any], bool]
    wants: str


def even_places(number: int, most: int) -> list[int]:
    """Return at most ``most`` places from 0 to ``number`` - 1, evenly spaced, with both ends."""
    most = min(most, number)
    return [round(k * (number - 1) / max(most - 1, 1)) for k in range(most)]


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
