"""Links to files, and what is in their place on file systems that refuse symbolic links."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from deepmd_ema.files import UNSUPPORTED, file_digest, remove, sync, taking_the_place_of

logger = logging.getLogger(__name__)

# errors of a file system without links (exFAT, SMB, blob storage), and of a hard link or copy where
# the target is a folder
_NO_LINKS = (*UNSUPPORTED, errno.EXDEV, errno.EMLINK, errno.EISDIR)


def link(path: Path, target: Path) -> None:
    """Let ``path`` be a link to ``target``, relative to its folder; it is replaced in one move.

    Where the file system refuses symbolic links it is a hard link, else a copy; nothing for a
    folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    refusal = _lay(
        path, lambda part: os.symlink(os.path.relpath(target, path.parent), part)
    )
    if not refusal:
        return
    # to move a hard link over another one of the same file does nothing
    if path.exists() and os.path.samefile(path, target):
        return
    if not _lay(path, lambda part: os.link(target, part)):
        way = "hard links are used"
    elif not _lay(path, lambda part: _copy(target, part)):
        way = "copies are used"
    else:
        way = f"there is no {path.name}"
        remove(path)  # it would lead to an older file
    _report_no_links(path.parent.absolute(), refusal, way)


def _lay(path: Path, lay: Callable[[Path], object]) -> str:
    """Put what ``lay`` makes in the place of ``path``; return the refusal of a file system."""
    try:
        with taking_the_place_of(path) as part:
            lay(part)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return str(error.strerror)
    return ""


def _copy(source: Path, part: Path) -> None:
    shutil.copyfile(source, part)
    sync(part)


@cache
def _report_no_links(folder: Path, refusal: str, way: str) -> None:
    logger.warning(
        "%s: the file system refuses symbolic links (%s): %s.", folder, refusal, way
    )


def is_copy(path: Path) -> bool:
    """Whether a file is in the place of a link: it has the content of another one beside it."""
    size = path.stat().st_size
    siblings = [
        file
        for file in path.parent.glob(f"*{path.suffix}")
        if file != path and file.is_file()
    ]
    # sizes first: a digest takes a second per gigabyte
    return any(
        file.stat().st_size == size and file_digest(file) == file_digest(path)
        for file in siblings
    )
