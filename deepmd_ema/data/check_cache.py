"""Results of checks in small files, valid for the content of the data, options and this package.

The content of the data is hashed at every start. Times of files are not enough: a write through a
memory map that was open before the check changes neither of them (on ext4 until the page is written
back, on tmpfs never).
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from deepmd_ema.errors import WriteError
from deepmd_ema.files import atomic_write, file_digest, writing
from deepmd_ema.utils import __version__

logger = logging.getLogger(__name__)

# results in one folder, which runs on other data or with other options may share
_MAX_RESULTS = 256
_PACKAGE = Path(__file__).parents[1]


def recall_or_find(
    folder: Path | None,
    files: Iterable[Path],
    about: Mapping[str, Any],
    find: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Return the result of ``find`` for the content of files, from ``folder`` if stored there.

    Args:
        folder: need not exist; None to find it always.
        files: all that ``find`` reads.
        about: options that the result depends on, JSON values.
        find: gives JSON values with keys that are text. They are stored with their ``date``, unless
            there are ``problems`` among them.
    """
    files = list(dict.fromkeys(files))  # many systems may be in one
    key = None if folder is None else _key(files, about)
    if folder is None or key is None:
        return find()
    stored = recall(folder, key)
    if stored is not None:
        return stored
    result = find()
    # files that were changed while they were read have another key now
    if result.get("problems") or _key(files, about) != key:
        return result
    dated = json.dumps({"date": time.strftime("%Y-%m-%d %H:%M:%S"), **result})
    # a digest of the key as well, so that a file that was renamed is not taken for another
    digest = hashlib.sha256((key + dated).encode()).hexdigest()
    try:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / f"{key}.json") as part:
            part.write_text(json.dumps([digest, dated]), encoding="utf-8")
        with suppress(OSError):  # another run removes them at the same time
            results = sorted(
                folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns
            )
            for file in results[:-_MAX_RESULTS]:
                file.unlink()
    except WriteError as error:
        logger.warning(
            "%s The check of the data is not remembered: the next run reads all of them again.",
            error,
        )
    return result


def recall(folder: Path, key: str) -> dict[str, Any] | None:
    """Return the result that was stored under a key; None without one, or if it was changed."""
    try:
        digest, stored = json.loads(
            (folder / f"{key}.json").read_text(encoding="utf-8")
        )
        is_whole = digest == hashlib.sha256((key + stored).encode()).hexdigest()
        result: dict[str, Any] | None = json.loads(stored) if is_whole else None
        return result
    # there is none, it was damaged, or something else has written it
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _key(files: Iterable[Path], about: Mapping[str, Any]) -> str | None:
    """Return a key of files and of everything else that a result depends on; None if unreadable.

    Every byte of the files is read, at about 1 GB/s from the page cache, 30 times as fast as the
    checks read them.
    """
    try:
        contents = [(str(path), file_digest(path)) for path in files]
    except OSError:
        return None
    everything = json.dumps(
        [__version__, _source_digest(), about, contents], sort_keys=True
    )
    return hashlib.sha256(everything.encode()).hexdigest()[:32]


@cache
def _source_digest() -> str:
    """Return the digest of the source of this package."""
    # a version number alone is the same for many commits, which may check data differently
    files = sorted(_PACKAGE.rglob("*.py"))
    sources = [
        (str(path.relative_to(_PACKAGE)), path.read_text(encoding="utf-8"))
        for path in files
    ]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()
