"""What was found in data whose files have not changed since: small files, so that a start need not read the data again.

A finding belongs to the paths, sizes, inodes and times (of the last change of content and of anything else) of all
files that it was found in, to whatever else it depends on, and to the version of the program.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmd_ema import __version__
from deepmd_ema.files import atomic_write, writing

_MOST_FINDINGS = 256  # in one folder, which runs on other data or with other options may share
_UNSURE_S = 2.0  # a file younger than this may change again without another time; some file systems count in 2 s
_SUFFIX = ".json"


@dataclass(frozen=True)
class Memory:
    """A folder with one small file for each finding.

    Attributes:
        folder: need not exist.
        opened: when the data were opened, or earlier; seconds since the epoch.
    """

    folder: Path
    opened: float

    def key(self, files: Iterable[Path] | None, about: Mapping[str, Any]) -> str | None:
        """Return what identifies files and whatever else a finding depends on; None if that is not certain.

        Args:
            files: all that the finding is found in; None if they are not known.
            about: JSON values.
        """
        if files is None:
            return None
        digest = hashlib.sha256(json.dumps([__version__, about], sort_keys=True).encode())
        for file in files:
            try:
                found = os.stat(file)
            except OSError:
                return None
            if max(found.st_mtime, found.st_ctime) > self.opened - _UNSURE_S:
                return None
            facts = [str(file), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
            digest.update(json.dumps(facts).encode())
        return digest.hexdigest()[:32]

    def recall(self, key: str | None) -> dict[str, Any] | None:
        """Return what was remembered under a key; None if nothing was."""
        if key is None:
            return None
        try:
            found = json.loads((self.folder / f"{key}{_SUFFIX}").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # there is none, or something else has written it
            return None
        return found if isinstance(found, dict) else None

    def remember(self, key: str, finding: Mapping[str, Any]) -> None:
        """Write a finding, JSON values, and remove the oldest ones.

        Raises:
            WriteError: if the system refuses to write.
        """
        path = self.folder / f"{key}{_SUFFIX}"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as part:
            part.write_text(json.dumps({"date": time.strftime("%Y-%m-%d %H:%M:%S"), **finding}), encoding="utf-8")
        with suppress(OSError):  # another run removes them at the same time
            files = sorted(self.folder.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime_ns)
            for file in files[:-_MOST_FINDINGS]:
                file.unlink()
