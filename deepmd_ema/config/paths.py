"""Files that an input names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_READ = ("systems", "stat_file", "tab_file", "use_srtab")  # options that name files to read


def with_absolute_paths(values: Mapping[str, Any], folder: str | Path) -> dict[str, Any]:
    """Return values of an input with absolute paths of the files that are read.

    Args:
        values: normalized.
        folder: that relative paths begin in.
    """
    return {key: _absolute(value, key, os.path.abspath(folder)) for key, value in values.items()}


def _absolute(value: Any, key: str, folder: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(one, name, folder) for name, one in value.items()}
    if isinstance(value, list):
        return [_absolute(one, key, folder) for one in value]
    return os.path.normpath(os.path.join(folder, value)) if key in _READ and isinstance(value, str) else value
