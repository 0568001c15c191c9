"""Atomic writes: a file appears whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; on success it becomes ``path`` in one move, else it is removed.

    The file and its folder are flushed to the disk, so that a crash at any moment leaves the old file or the new one.
    A half-written file of this name that a killed process has left is removed first.
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
    except OSError as error:  # PermissionError: it runs, but belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True
