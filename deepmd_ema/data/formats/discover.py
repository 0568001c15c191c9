"""From the paths of a config to the sources that are stored there."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple, TypeAlias

from deepmd_ema.config.labels import ATOM_DIPOLE, ATOM_POLAR, LABELS
from deepmd_ema.data.formats.extxyz import (
    XYZ_SUFFIXES,
    extxyz_frames,
    is_extxyz,
    open_extxyz,
)
from deepmd_ema.data.formats.lmdb import find_lmdb, is_lmdb, lmdb_frames
from deepmd_ema.data.formats.properties import StoredFrame
from deepmd_ema.data.formats.stores import (
    Hdf5Store,
    NpyStore,
    hdf5_stores,
    is_hdf5,
    is_there,
)
from deepmd_ema.data.formats.system import ArrayStore, open_system, read_type_map
from deepmd_ema.data.source import FrameSource, ReadSpec
from deepmd_ema.errors import DataError, collect_problems
from deepmd_ema.findings import Finding, warning
from deepmd_ema.text import command, first_few

Opener: TypeAlias = Callable[[ReadSpec], FrameSource]

_MAX_NAMES = 8  # neighbors of a missing path that a message lists


class Format(NamedTuple):
    """A format that is recognised by its path.

    Folders that no format claims are searched for DeePMD-kit's systems.

    Attributes:
        claims: whether a path is of this format, without its part after ``#``.
        find: returns openers of the sources at a path (with the part after ``#``), sorted; may
            raise DataError.
        frames: yields the frames at a path with all that is stored, for ``convert``; None if
            there are systems at it, whose files ``find_stores`` returns.
    """

    claims: Callable[[Path], bool]
    find: Callable[[Path, str], Sequence[Opener]]
    frames: Callable[[Path], Iterator[StoredFrame]] | None


# the first format that claims a path reads it
FORMATS = [
    Format(is_lmdb, find_lmdb, lmdb_frames),
    Format(
        is_hdf5,
        lambda file, group: [
            partial(open_system, store) for store in hdf5_stores(file, group)
        ],
        None,
    ),
    Format(
        is_extxyz,
        lambda file, choice: [partial(open_extxyz, file, choice)],
        extxyz_frames,
    ),
]


def format_of(path: Path) -> Format | None:
    """Return the format of a file or folder that exists; None if no format claims it."""
    return next((entry for entry in FORMATS if entry.claims(path)), None)


def open_systems(
    paths: Sequence[str] | str,
    spec: ReadSpec,
    rglob_patterns: Sequence[str] | None = None,
    where: str = "systems",
) -> list[FrameSource]:
    """Return the sources at ``paths``, sorted within each path.

    Names and shapes of all their arrays are checked. Values are not read yet
    (``check.check_systems`` does), only headers and types.

    Args:
        paths: folders with ``type.raw``, parents of such folders at any depth, ``file.h5`` or
            ``file.h5#/group``, ``file.extxyz`` or ``file.extxyz#energy=REF_energy``, ``data.lmdb``.
        spec: what to read; a set without the file of a label does not have this label.
        rglob_patterns: when given, only folders below each path that match one of these patterns
            are taken.
        where: what to call ``paths`` in messages.

    Raises:
        DataError: with all problems of all systems.
    """
    # two passes: a path that is wrong and a system that is wrong are named in one message
    problems = list[str]()
    openers = list[Opener]()
    sources = list[FrameSource]()
    for number, path in enumerate([paths] if isinstance(paths, str) else paths):
        with collect_problems(problems, f"{where}[{number}]: "):
            openers += _find(str(path), rglob_patterns)
    for opener in openers:
        with collect_problems(problems):
            sources.append(opener(spec))
    if problems:
        # The error refers to the open files as long as it lives (Python 3.12 and later), and a
        # program that mends a file needs to write it.
        for store in map(_store_of, openers):
            if isinstance(store, Hdf5Store):
                store.close()
    DataError.raise_if_any(problems)
    if not sources:
        raise DataError(f"{where}: is empty. Name at least one folder with type.raw.")
    return sources


def stored_type_map(
    paths: Sequence[str], rglob_patterns: Sequence[str] | None = None
) -> list[str]:
    """Return the elements in type_map.raw of the systems at ``paths``, each once, in their order.

    Raises:
        DataError: if a path cannot be read, or data do not say which elements they have.
    """
    elements: dict[str, None] = {}
    for path in paths:
        for store in find_stores(path, rglob_patterns):
            names = None if store is None else read_type_map(store)
            if names is None:
                where = path if store is None else f"{store.name}/type_map.raw"
                raise DataError(
                    f"{where}: names no elements in the order of their numbers. Name them all "
                    "with -t."
                )
            elements |= dict.fromkeys(names)
    return list(elements)


def find_stores(
    path: str, rglob_patterns: Sequence[str] | None = None
) -> list[ArrayStore | None]:
    """Return the files of each system at ``path``; None for formats without systems.

    Systems are in a folder, in folders below it, or in HDF5.

    Raises:
        DataError: if there is none.
    """
    return [_store_of(opener) for opener in _find(path, rglob_patterns)]


def selected_elements(
    paths: Iterable[str], type_map: Sequence[str] = ()
) -> tuple[str, ...] | None:
    """Return the elements whose atoms alone have rows in tensors of atoms; None if all have.

    The numbers of rows show them: they are the sum of the numbers of atoms of some elements.

    Args:
        paths: what ``train`` reads.
        type_map: elements of systems that name none.

    Raises:
        DataError: if several choices of elements have these numbers of atoms, or a system cannot be
            opened.
    """
    # name, atoms of each element, and rows of each array
    tensors = list[tuple[str, Counter[str], float]]()
    for store in (
        store for path in paths for store in find_stores(path) if store is not None
    ):
        names = read_type_map(store) or type_map
        system = open_system(store, ReadSpec(names))
        if system.atom_type is None:  # tensors of mixed systems have rows of all atoms
            continue
        counts = Counter(names[number] for number in system.atom_type.tolist())
        for part, label in product(
            system.sets, (LABELS[ATOM_DIPOLE], LABELS[ATOM_POLAR])
        ):
            for file in label.files:
                array = store.array(
                    f"{part.name.removeprefix(store.name)[1:]}/{file}.npy"
                )
                if array is not None:
                    rows = (
                        math.prod(array.shape)
                        / part.num_frames
                        / math.prod(label.shape)
                    )
                    tensors.append((array.name, counts, rows))
    elements = sorted({element for _, counts, _ in tensors for element in counts})
    choices = [
        chosen
        for number in range(1, len(elements) + 1)
        for chosen in combinations(elements, number)
        if all(
            sum(map(counts.__getitem__, chosen)) == rows for _, counts, rows in tensors
        )
    ]
    if len(choices) > 1:
        name, counts, rows = tensors[0]
        listed = first_few(list(map(" ".join, choices)), 3)
        raise DataError(
            f"{name}: has rows of {rows:g} of {counts.total()} atoms, which may be those of one "
            f"of: {listed}. Name the elements, such as --sel-type {' '.join(choices[0])}."
        )
    return choices[0] if choices and len(choices[0]) < len(elements) else None


def is_cp2k_trajectory(path: Path) -> bool:
    """Whether a file is named and begins as the trajectories of CP2K do."""
    if not re.fullmatch(r".+-(pos|frc|vel)-\d+\.xyz", path.name):
        return False
    # the comment line " i = 0, time = ..., E = ...", which no extended XYZ has; lengths of lines
    # are bounded, as the file may be anything
    with path.open("rb") as file:
        file.readline(100)
        return (
            re.match(rb"\s*i\s*=\s*\d+\s*,.*\bE\s*=", file.readline(1000)) is not None
        )


def split_address(path: str) -> tuple[Path, str]:
    """Return the file or folder of ``path``, the longest that exists, and the part after ``#``."""
    # names of files may have a # themselves
    ends = [k for k, letter in enumerate(path) if letter == "#"]
    end = next(
        (k for k in (len(path), *reversed(ends)) if Path(path[:k]).exists()),
        min(ends, default=len(path)),
    )
    return Path(path[:end]), path[end + 1 :]


def repeated(
    training: Iterable[str], validation: Iterable[str] = (), test: Iterable[str] = ()
) -> Iterator[Finding]:
    """Yield warnings about sources, by name, that are listed more than once.

    Within one part their frames count as often; in two parts errors look too good.
    """
    parts: list[dict[str, list[str]]] = []
    for names in (training, validation, test):
        parts.append({})  # names of sources by real path and group
        for name in names:
            path, group = split_address(name)
            # after # only HDF5 has a group; other formats have choices of names of the same frames
            place = f"{path.resolve()}#{group if is_hdf5(path) else ''}"
            parts[-1].setdefault(place, []).append(name)
        often = [
            f"{same[0]} ({len(same)} times)"
            for same in parts[-1].values()
            if len(same) > 1
        ]
        if often:
            advice = "Their frames count as often; list each system once."
            yield warning("", f"listed more than once: {first_few(often)}. {advice}")
    split = ", or let training.validation_fraction choose frames"
    for part, kind, advice in zip(parts[1:], ("validation", "test"), (split, "")):
        if both := [names[0] for place, names in parts[0].items() if place in part]:
            yield warning(
                "",
                f"listed in training_data and in {kind}_data: {first_few(both)}. {kind.title()} "
                f"errors will look too good; leave them out of one{advice}.",
            )


def _store_of(opener: Opener) -> ArrayStore | None:
    """Return the files of a system that ``opener`` opens; None of other formats."""
    return (
        opener.args[0]
        if isinstance(opener, partial) and opener.func is open_system
        else None
    )


def _find(path: str, patterns: Sequence[str] | None) -> Sequence[Opener]:
    """Return the openers of the sources at a path; DataError if there is none."""
    file, group = split_address(path)
    file_format = format_of(file)
    if file_format is None and not file.exists():
        raise DataError(f"{file}: no such file or folder.{_similar(file)}")
    what = ""
    if file.is_file() and is_cp2k_trajectory(file):
        what = f"{file}: is a trajectory of CP2K. Make folders of it first"
    elif file_format is None and not Path(path).is_dir():
        what = (
            f"{path}: is a file. Expected a folder with type.raw, a parent of such folders, HDF5, "
            "LMDB or extended XYZ. What ASE and dpdata read becomes folders by"
        )
    if what:
        raise DataError(f"{what}: {command('dp-ema', 'convert', path, 'my_data')}")
    if file_format is not None:
        openers = file_format.find(file, group)
    else:
        openers = [
            partial(open_system, NpyStore(str(folder)))
            for folder in _folders(Path(path), patterns)
        ]
    if openers:
        return openers
    if patterns:
        raise DataError(
            f"{path}: no folder below it matches rglob_patterns {list(patterns)} and has a "
            "type.raw."
        )
    if sets := sorted(Path(path).glob("set.*")):
        has = f"{path}: type.raw is missing (the folder has {sets[0].name})"
        raise DataError(f"{has}. It lists the type of each atom.")
    names = os.listdir(path) if Path(path).is_dir() else []
    xyz = sorted(
        f"{path}/{name}" for name in names if name.lower().endswith(XYZ_SUFFIXES)
    )
    system = (
        f"Name its XYZ files themselves: {first_few(xyz)}"
        if xyz
        else "A system has type.raw and set.*/coord.npy"
    )
    raise DataError(f"{path}: no system in it or below it. {system}.")


def _folders(root: Path, patterns: Sequence[str] | None) -> list[Path]:
    """Return the folders with a type.raw, sorted.

    Args:
        root: folder to search.
        patterns: of folders below ``root``; None for all of them and ``root`` itself.
    """
    if patterns:
        absolute = [
            pattern for pattern in patterns if not pattern or pattern.startswith("/")
        ]
        if absolute:
            raise DataError(
                f"{root}: rglob_patterns has {absolute[0]!r}, expected names below it, e.g. "
                "'*/water*'."
            )
        try:
            matching = (path for pattern in patterns for path in root.rglob(pattern))
            return sorted({path for path in matching if (path / "type.raw").is_file()})
        except RecursionError:
            raise DataError(
                f"{root}: its folders are nested too deeply to search. Name one further down."
            ) from None
    # not rglob: it does not follow links to folders, and passes over links that lead nowhere
    systems = list[Path]()
    seen = set[tuple[int, int]]()
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        status = os.stat(folder)
        if (
            status.st_dev,
            status.st_ino,
        ) in seen:  # a link to a folder above would never end
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            names = {e.name: e.is_dir() for e in entries}
        if names.get("type.raw") is False:
            systems.append(folder)
        for name, is_folder in sorted(names.items()):
            if is_folder and not name.startswith("set."):
                waiting.append(folder / name)
            elif not is_folder and not name.startswith(
                "."
            ):  # hidden ones are locks of editors
                is_there(
                    folder / name
                )  # a link that leads nowhere may have been a system
    return sorted(systems)


def _similar(path: Path) -> str:
    parent, from_here = (
        path.parent,
        "" if path.is_absolute() else f" (looked up from {Path.cwd()})",
    )
    while not parent.exists():
        path, parent = parent, parent.parent
    names = (
        sorted(n for n in os.listdir(parent) if not n.startswith("."))
        if parent.is_dir()
        else []
    )
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {parent / close[0]}?"
    listed = ", ".join(names[:_MAX_NAMES]) + (
        ", ..." if len(names) > _MAX_NAMES else ""
    )
    place = str(Path.cwd()) if parent == Path() else f"{parent}{from_here}"
    return f" {place} holds: {listed or 'nothing'}."
