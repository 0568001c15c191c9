"""From the paths of a config to the systems that stand there: folders, parents of folders and HDF5 files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from deepmd_ema.data.folder import Folder, NpyFolder
from deepmd_ema.data.hdf5 import hdf5_folders
from deepmd_ema.errors import DataError

_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf")
_MOST_NAMES = 8  # neighbors of a missing path that a message lists


def find_folders(
    paths: Sequence[str], rglob_patterns: Sequence[str] | None = None, where: str = "systems"
) -> tuple[list[Folder], list[str]]:
    """Return the systems at ``paths``, sorted within each path, and the problems met.

    Args:
        paths: folders with ``type.raw``, parents of such folders at any depth, ``file.h5`` or ``file.h5#/group``.
        rglob_patterns: when given, only folders below each path that match one of these patterns are taken.
        where: what to call the list in messages.
    """
    folders: list[Folder] = []
    problems: list[str] = []
    for number, path in enumerate(paths):
        here: list[str] = []
        folders += _at(str(path), rglob_patterns, here)
        problems += [f"{where}[{number}]: {text}" for text in here]
    return folders, problems


def _at(path: str, patterns: Sequence[str] | None, problems: list[str]) -> list[Folder]:
    try:
        found = _expand(path, patterns)
    except DataError as error:
        problems += error.problems
        return []
    if not found:
        problems.append(_nothing_found(path, patterns))
    return found


def _expand(path: str, patterns: Sequence[str] | None) -> list[Folder]:
    file, _, group = path.partition("#")
    if file.rstrip("/").endswith(".lmdb") or (Path(path) / "data.mdb").exists():
        raise DataError(f"{path}: LMDB data sets are not supported yet. Write deepmd/npy or HDF5 instead.")
    if not Path(file).exists():
        raise DataError(f"{file}: no such file or folder.{_similar(Path(file))}")
    if file.endswith(_HDF5_SUFFIXES) and Path(file).is_file():
        return list(hdf5_folders(Path(file), group))
    if not Path(path).is_dir():
        raise DataError(f"{path}: is a file. Expected a folder with type.raw, a parent of such folders, or HDF5.")
    if patterns:
        matches = {p for pattern in patterns for p in Path(path).rglob(pattern) if (p / "type.raw").is_file()}
        return [NpyFolder(p) for p in sorted(matches)]
    return [NpyFolder(p) for p in sorted(_below(Path(path), set()))]


def _below(folder: Path, seen: set[str]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in seen:  # a link to a folder above would never end
        return
    seen.add(real)
    with os.scandir(folder) as entries:
        names = sorted((e.name, e.is_dir()) for e in entries)
    if ("type.raw", False) in names:
        yield folder
    for name, is_folder in names:
        if is_folder and not name.startswith("set."):
            yield from _below(folder / name, seen)


def _similar(path: Path) -> str:
    from_here = "" if path.is_absolute() else f" (looked up from {Path.cwd()})"
    parent = path.parent
    while not parent.exists():
        path, parent = parent, parent.parent
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {parent / close[0]}?"
    listed = ", ".join(names[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")
    return f" {parent}{from_here} holds: {listed or 'nothing'}."


def _nothing_found(path: str, patterns: Sequence[str] | None) -> str:
    if patterns:
        return f"{path}: no folder below it matches rglob_patterns {list(patterns)} and has a type.raw."
    sets = [] if "#" in path or not Path(path).is_dir() else sorted(Path(path).glob("set.*"))
    if sets:
        return f"{path}: type.raw is missing (the folder has {sets[0].name}). It lists the type of each atom."
    return f"{path}: no system in it or below it. A system has type.raw and set.*/coord.npy."
