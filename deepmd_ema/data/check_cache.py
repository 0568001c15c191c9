"""Results of checks in small files, valid for the content of the data, the options and the source of the program.

The content of the data is hashed at every start. Times of files are not enough: a write through a memory map that was
open before the check changes neither of them (on ext4 until the page is written back, on tmpfs never).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from deepmd_ema.errors import WriteError
from deepmd_ema.files import atomic_write, writing
from deepmd_ema.version import __version__

logger = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_FINDINGS = 256  # in one folder, which runs on other data or with other options may share
_BYTES_AT_ONCE = 1 << 20
_SUFFIX = ".json"
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Memory:
    """A folder with one small file for each finding.

    Attributes:
        folder: need not exist.
    """

    folder: Path

    def key(self, files: Iterable[Path] | None, about: Mapping[str, Any]) -> str | None:
        """Return a key of the content of files and of everything else that a result depends on.

        Every byte of the files is read, at about 1 GB/s from the page cache, 30 times as fast as the checks read them.

        Args:
            files: all that the finding is found in; None if they are not known.
            about: JSON values.

        Returns:
            A hexadecimal number; None if the files are not known or cannot be read.
        """
        if files is None:
            return None
        digest = hashlib.sha256(json.dumps([__version__, _source_digest(), about], sort_keys=True).encode())
        for path in files:
            content = content_digest(path)
            if content is None:
                return None
            digest.update(json.dumps([str(path), content]).encode())
        return digest.hexdigest()[:32]

    def recall(self, key: str) -> dict[str, Any] | None:
        """Return the result that was stored under a key; None if there is none, or if it was changed."""
        try:
            stored = json.loads((self.folder / f"{key}{_SUFFIX}").read_text(encoding="utf-8"))
            finding: dict[str, Any] = stored["finding"]
            return finding if stored["digest"] == _digest_of(key, finding) else None
        # there is none, it was damaged, or something else has written it
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def remember(self, key: str, finding: Mapping[str, Any]) -> None:
        """Write a finding, JSON values with keys that are text, and remove the oldest ones.

        Raises:
            WriteError: if the system refuses to write.
        """
        path = self.folder / f"{key}{_SUFFIX}"
        dated = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), **finding}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps({"digest": _digest_of(key, dated), "finding": dated}), encoding="utf-8")
        with suppress(OSError):  # another run removes them at the same time
            files = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-_MAX_FINDINGS]:
                file.unlink()


def recall_or_find(
    memory: Memory | None,
    files: Iterable[Path] | None,
    about: Mapping[str, Any],
    find: Callable[[], T],
    to_dict: Callable[[T], dict[str, Any] | None],
    from_dict: Callable[[Mapping[str, Any]], T],
) -> T:
    """Return the finding that is remembered of the content of files, or find it and remember it.

    Args:
        memory: None to find it always.
        files: see :meth:`Memory.key`; may be read twice.
        about: see :meth:`Memory.key`.
        find: reads the files.
        to_dict: gives JSON values with keys that are text; None for a result that is not remembered.
        from_dict: the inverse.
    """
    key = memory.key(files, about) if memory is not None else None
    if memory is None or key is None:
        return find()
    known = memory.recall(key)
    if known is not None:
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):  # something else has written it
            return from_dict(known)
    found = find()
    finding = to_dict(found)
    if finding is not None and memory.key(files, about) == key:  # else they were changed while they were read
        try:
            memory.remember(key, finding)
        except WriteError as error:
            logger.warning("%s The check of the data is not remembered: the next run reads all of them again.", error)
    return found


def content_digest(path: Path, most: float = math.inf) -> str | None:
    """Return the digest of a file, from evenly spaced parts if it has more than ``most`` bytes; None if unreadable."""
    content, buffer = hashlib.sha256(), memoryview(bytearray(_BYTES_AT_ONCE))
    try:
        with path.open("rb", buffering=0) as file:
            skipped = _BYTES_AT_ONCE * int(os.fstat(file.fileno()).st_size / most)
            while found := file.readinto(buffer):
                content.update(buffer[:found])
                file.seek(skipped, os.SEEK_CUR)
    except OSError:
        return None
    return content.hexdigest()


def _digest_of(key: str, finding: Mapping[str, Any]) -> str:
    """Return the digest of a finding and of its key, so that a file that was renamed is not taken for another."""
    return hashlib.sha256(json.dumps([key, finding], sort_keys=True).encode()).hexdigest()


@cache
def _source_digest() -> str:
    """Return the digest of the source of this package, which changes between commits of one version."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(json.dumps([str(path.relative_to(_PACKAGE)), path.read_text(encoding="utf-8")]).encode())
    return digest.hexdigest()
