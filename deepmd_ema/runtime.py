"""Device, precision, rank and named random seeds of a process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from deepmd_ema.errors import UserError
from deepmd_ema.launch import find_launch

PRECISIONS = {
    "default": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
    "float32": torch.float32,
    "single": torch.float32,
}


# parameters of mallopt(3): free memory that is kept at the top, what is taken at once, blocks outside the heap
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


@dataclass(frozen=True)
class Runtime:
    """Where this process computes and which of how many processes it is."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    @property
    def chief(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0


def make_runtime(device: str | None = None) -> Runtime:
    """Return the runtime of this process: CUDA when there is one, or ``device``; the rank from the environment.

    Raises:
        UserError: if ``device`` is unknown or absent on this machine.
    """
    launch = find_launch()
    if device is None:
        device = f"cuda:{launch.local_rank}" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"--device {device}: unknown device. Use cpu, cuda or cuda:0.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {device}: no CUDA device is visible to torch {torch.__version__}. Use --device cpu.")
    try:
        torch.zeros((), dtype=torch.float64, device=chosen).item()
    except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise UserError(f"--device {device}: is not usable here ({reason}). Use cpu, cuda or cuda:0.") from error
    return Runtime(chosen, launch.rank, launch.size)


def precision(name: str) -> torch.dtype:
    """Return the torch dtype of a ``precision`` option; ``default`` is float64."""
    return PRECISIONS[name]


def seed_for(stream: str, *numbers: int) -> int:
    """Return a 63-bit seed for a named stream; the same name and numbers give the same seed on every machine."""
    text = ":".join([stream, *map(str, numbers)]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def keep_freed_memory() -> None:
    """Let the C library keep what tensors free, instead of giving it back to the system at every step.

    A training step frees and takes the same large blocks again; each time the system maps and clears fresh pages,
    which took a fifth of a step of 96 atoms on two cores. Does nothing where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_MAX, 0)
    library.mallopt(M_TRIM_THRESHOLD, -1)
    library.mallopt(M_TOP_PAD, 64 << 20)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; on success it becomes ``path`` in one move, else it is removed.

    The file and its folder are flushed to the disk, so that a crash at any moment leaves the old file or the new one.
    What a process that was killed has left half-written under this name is removed first.
    """
    final = Path(path)
    sweep(final.parent, re.escape(final.name))
    part = final.with_name(f"{final.name}.{os.getpid()}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, final)
        _sync_folder(final.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sweep(folder: Path, names: str) -> None:
    """Remove half-written files in ``folder``, of names that match ``names``, that a killed process has left."""
    pattern = re.compile(rf"^(?:{names})\.(?P<pid>\d+)\.part$")
    for path in folder.iterdir() if folder.is_dir() else ():
        match = pattern.match(path.name)
        if match is not None and not _is_running(int(match["pid"])):
            path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
