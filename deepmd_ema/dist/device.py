"""The device a process computes on, and how its memory is kept."""

from __future__ import annotations

import ctypes
import platform

import torch

from deepmd_ema.errors import UserError

# parameters of mallopt(3): free memory that is kept at the top, what is taken at once, blocks outside the heap
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def select_device(name: str | None = None, local_rank: int = 0) -> torch.device:
    """Return the device called ``name``; without one CUDA where there is a GPU, else the CPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:N``.
        local_rank: of this process on its machine: which GPU ``cuda`` without a number is.

    Raises:
        UserError: if the device is unknown or absent on this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: unknown device. Use cpu, cuda or cuda:0.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: no CUDA device is visible to torch {torch.__version__}. Use --device cpu.")
    try:
        torch.zeros((), dtype=torch.float64, device=chosen).item()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise UserError(f"--device {name}: is not usable here ({reason}). Use cpu, cuda or cuda:0.") from error
    return chosen


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, instead of giving it back to the system at every step.

    A training step frees and takes the same large blocks again; each time the system maps and clears fresh pages,
    which took a fifth of a step of 96 atoms on two cores. Does nothing where the C library is not glibc. Call it while
    the process has one thread: glibc documents ``mallopt`` as unsafe beside other threads.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
    library.mallopt(M_TOP_PAD, 64 << 20)
