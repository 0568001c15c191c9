"""The memory of this process: settings of the C library for what is freed, and the largest use."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4  # of malloc.h of the GNU C library
_MAX_THRESHOLD = 32 << 20  # that it accepts, bytes


def keep_freed_memory(most: int | None = None) -> bool:
    """Have the C library keep freed memory for the next step, and return whether it does.

    By default it gives large blocks back to the system, which hands them out page by page again, filled with zeros: a
    third of the time of a training step of dpa3 on a CPU. The largest memory of a run stays the same. Nothing is
    changed where the user has set ``MALLOC_*`` or ``GLIBC_TUNABLES``, or where it is not the GNU C library.
    Call it while the process has one thread: glibc documents ``mallopt`` as unsafe beside other threads.

    Args:
        most: bytes that are kept, of blocks below 32 MiB: for a process that does other things as well. None: all.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    if most is not None:
        return bool(mallopt(_M_MMAP_THRESHOLD, _MAX_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, most))
    # no blocks of their own, which are always given back, and no giving back of the end of the heap
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1) and mallopt(_M_TOP_PAD, 64 << 20))


def peak_memory() -> int:
    """Return the largest memory that this process has had, bytes; 0 where the system does not say."""
    with suppress(OSError):  # getrusage counts what the parent had when it started this process, on Linux
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # not a Unix
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
