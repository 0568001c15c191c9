"""Systems of DeePMD-kit's npy formats, plain and mixed: opened with all checks of names and shapes, read by frame."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from deepmd_ema.data.folder import Folder, StoredArray
from deepmd_ema.data.frame import Frame
from deepmd_ema.data.locate import find_folders
from deepmd_ema.errors import DataError, did_you_mean
from deepmd_ema.labels import LABELS

Array: TypeAlias = np.ndarray

TYPES = "real_atom_types"


@dataclass(frozen=True)
class Wanted:
    """What is read from every system.

    Attributes:
        type_map: the model's elements, which are what types count.
        labels: names of labels (see ``labels``) to read where they are present.
        numb_fparam: frame parameters per frame, 0 for none.
        numb_aparam: atomic parameters per atom, 0 for none.
        default_fparam: frame parameters where a set has none; None to refuse such a set.
    """

    type_map: tuple[str, ...]
    labels: tuple[str, ...] = ()
    numb_fparam: int = 0
    numb_aparam: int = 0
    default_fparam: tuple[float, ...] | None = None


@dataclass(frozen=True)
class FrameSet:
    """One set.* of a system: its first frame's number in the system, and its arrays by name."""

    name: str
    first: int
    num_frames: int
    arrays: Mapping[str, StoredArray]


class System:
    """Frames of one folder, read when asked for.

    Attributes:
        name: path, for messages.
        num_frames: number of frames of all sets.
        natoms: number of atoms in the files; mixed frames may have fewer, the rest being virtual.
        is_mixed: whether each frame has its own types.
        periodic: whether the frames have cells.
        labels: names of the labels that at least one set has.
        sets: the sets with their arrays, for reading in bulk.
    """

    def __init__(
        self,
        name: str,
        wanted: Wanted,
        sets: Sequence[FrameSet],
        atom_type: Array | None,
        index_of: Array,
        natoms: int,
        periodic: bool,
    ) -> None:
        self.name = name
        self.sets = tuple(sets)
        self.num_frames = sum(s.num_frames for s in sets)
        self.natoms = natoms
        self.is_mixed = atom_type is None
        self.periodic = periodic
        self.labels = tuple(label for label in wanted.labels if any(label in s.arrays for s in sets))
        self._wanted = wanted
        self._types = atom_type
        self._index_of = index_of  # file type -> model type, with -1 for itself at the end
        self._firsts = [s.first for s in sets]

    def __repr__(self) -> str:
        return f"System({self.name!r}, num_frames={self.num_frames}, natoms={self.natoms})"

    def locate(self, index: int) -> tuple[FrameSet, int]:
        """Return the set of a frame and the frame's number in the set."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        part = self.sets[bisect_right(self._firsts, index) - 1]
        return part, index - part.first

    def frame(self, index: int) -> Frame:
        """Return one frame, without its virtual atoms."""
        part, k = self.locate(index)
        types = self.types(part, k, k + 1)[0]
        real = None if types.min() >= 0 else np.flatnonzero(types >= 0)
        labels = {}
        for label in self.labels:
            if label in part.arrays:
                labels[label] = self._label(label, _row(part, label, k), real)
        return Frame(
            coord=_pick(_row(part, "coord", k).reshape(self.natoms, 3), real),
            atom_type=_pick(types, real),
            box=_row(part, "box", k).reshape(3, 3) if self.periodic else None,
            labels=labels,
            fparam=self._fparam(part, k),
            aparam=self._aparam(part, k, real),
            source=(self.name, index),
            file_index=real,
        )

    def types(self, part: FrameSet, start: int, stop: int) -> Array:
        """Return (stop - start, natoms) the model types of some frames of a set, -1 for virtual atoms."""
        if self._types is not None:
            return np.broadcast_to(self._types, (stop - start, self.natoms))
        return self._index_of[part.arrays[TYPES].read(start, stop).astype(np.int64)]

    def _label(self, label: str, numbers: Array, real: Array | None) -> Array:
        if LABELS[label].per_atom:
            return _pick(numbers.reshape(self.natoms, *LABELS[label].shape), real)
        return numbers.reshape(LABELS[label].shape)

    def _fparam(self, part: FrameSet, k: int) -> Array | None:
        if not self._wanted.numb_fparam:
            return None
        if "fparam" not in part.arrays:
            return np.array(self._wanted.default_fparam, np.float64)
        return _row(part, "fparam", k)

    def _aparam(self, part: FrameSet, k: int, real: Array | None) -> Array | None:
        if not self._wanted.numb_aparam:
            return None
        return _pick(_row(part, "aparam", k).reshape(self.natoms, -1), real)


def open_systems(
    paths: Sequence[str] | str,
    type_map: Sequence[str],
    labels: Sequence[str] = (),
    numb_fparam: int = 0,
    numb_aparam: int = 0,
    rglob_patterns: Sequence[str] | None = None,
    default_fparam: Sequence[float] | None = None,
    where: str = "systems",
) -> list[System]:
    """Return the systems at ``paths`` after checking names, shapes and numbers of frames of all their files.

    Values are not read yet (``check.check_systems`` does), only headers and types.

    Args:
        paths: folders, parents of folders, HDF5 files or groups, see ``locate.find_folders``.
        type_map: the model's elements.
        labels: names of the labels to read where present; a set without a file has no such label.
        numb_fparam: frame parameters per frame; their file is then required, unless ``default_fparam`` is given.
        numb_aparam: atomic parameters per atom; their file is then required.
        rglob_patterns: see ``locate.find_folders``.
        default_fparam: frame parameters of sets without the file.
        where: what to call ``paths`` in messages.

    Raises:
        DataError: with all problems of all systems.
    """
    folders, problems = find_folders([paths] if isinstance(paths, str) else paths, rglob_patterns, where)
    default = None if default_fparam is None else tuple(default_fparam)
    wanted = Wanted(tuple(type_map), tuple(labels), numb_fparam, numb_aparam, default)
    systems = [system for folder in folders if (system := _try_to_open(folder, wanted, problems)) is not None]
    if problems:
        raise DataError(problems)
    if not systems:
        raise DataError(f"{where}: is empty. Name at least one folder with type.raw.")
    return systems


def open_system(folder: Folder, wanted: Wanted) -> System:
    """Return the system in ``folder``.

    Raises:
        DataError: with all problems of its files.
    """
    file_types = _read_types(folder)
    names = folder.words("type_map.raw")
    set_names = folder.set_names()
    if not set_names:
        raise DataError(f"{folder.name}: no frames: it has type.raw but no set.* folder. Add one, or leave it out.")
    mixed = {name: folder.has(f"{name}/{TYPES}.npy") for name in set_names}
    if len(set(mixed.values())) > 1:
        raise DataError(
            f"{folder.name}: mixed and plain sets in one folder: {_named(mixed, True)} with {TYPES}.npy, "
            f"{_named(mixed, False)} without. Put them into two systems."
        )
    is_mixed = mixed[set_names[0]]
    if is_mixed and names is None:
        raise DataError(f"{folder.name}/type_map.raw: missing. A mixed system (with {TYPES}.npy) needs it.")
    periodic = not folder.has("nopbc")
    problems: list[str] = []
    sets, first = [], 0
    for name in set_names:
        part = _open_set(folder, name, first, len(file_types), is_mixed, periodic, wanted, problems)
        if part is not None and part.num_frames:
            sets.append(part)
            first += part.num_frames
    if not sets and not problems:
        problems.append(f"{folder.name}: no frames: the arrays of {', '.join(set_names)} have no rows. Leave it out.")
    index_of = _type_table(folder, wanted, names, file_types, sets if is_mixed else None, problems)
    if problems:
        raise DataError(problems)
    atom_type = None if is_mixed else index_of[file_types]
    return System(folder.name, wanted, sets, atom_type, index_of, len(file_types), periodic)


def _try_to_open(folder: Folder, wanted: Wanted, problems: list[str]) -> System | None:
    try:
        return open_system(folder, wanted)
    except DataError as error:
        problems += error.problems
        return None


def _read_types(folder: Folder) -> Array:
    words = folder.words("type.raw") or []
    if not words:
        raise DataError(f"{folder.name}/type.raw: is empty. Expected one integer per atom.")
    bad = [w for w in words if not w.isdigit()]
    if bad:
        raise DataError(f"{folder.name}/type.raw: {bad[0]!r} is not a type. Expected one integer from 0 per atom.")
    return np.array(words, np.int64)


def _open_set(
    folder: Folder,
    name: str,
    first: int,
    natoms: int,
    is_mixed: bool,
    periodic: bool,
    wanted: Wanted,
    problems: list[str],
) -> FrameSet | None:
    """Return a set whose arrays all fit together; None after adding to ``problems`` where they do not."""
    before = len(problems)
    found: dict[str, StoredArray] = {}
    for key, spellings, _ in _expected_arrays(natoms, is_mixed, periodic, wanted):
        broken = len(problems)
        array = _first_there(folder, name, spellings, problems)
        reason = _why_required(folder, key, wanted)
        if array is not None:
            found[key] = array
        elif reason and len(problems) == broken:
            problems.append(f"{folder.name}/{name}/{spellings[0]}.npy: missing. {reason}")
    _refuse_copies(folder, name, problems)
    if "coord" not in found:
        return None
    frames = found["coord"].shape[0] if found["coord"].shape else 0
    for key, _, numbers in _expected_arrays(natoms, is_mixed, periodic, wanted):
        if key in found:
            problems += _shape_problems(found[key], frames, numbers, natoms)
    return FrameSet(f"{folder.name}/{name}", first, frames, found) if len(problems) == before else None


def _expected_arrays(
    natoms: int, is_mixed: bool, periodic: bool, wanted: Wanted
) -> list[tuple[str, tuple[str, ...], int]]:
    """Return name, spellings of the file and numbers per frame of each array to look for."""
    arrays: list[tuple[str, tuple[str, ...], int]] = [("coord", ("coord",), 3 * natoms)]
    if periodic:
        arrays.append(("box", ("box",), 9))
    if is_mixed:
        arrays.append((TYPES, (TYPES,), natoms))
    for label in wanted.labels:
        one = LABELS[label]
        arrays.append((label, one.files, math.prod(one.shape) * (natoms if one.per_atom else 1)))
    if wanted.numb_fparam:
        arrays.append(("fparam", ("fparam",), wanted.numb_fparam))
    if wanted.numb_aparam:
        arrays.append(("aparam", ("aparam",), wanted.numb_aparam * natoms))
    return arrays


def _first_there(folder: Folder, name: str, spellings: Sequence[str], problems: list[str]) -> StoredArray | None:
    for spelling in spellings:
        try:
            array = folder.array(f"{name}/{spelling}.npy")
        except DataError as error:
            problems += error.problems
            return None
        if array is not None:
            return array
    return None


def _why_required(folder: Folder, key: str, wanted: Wanted) -> str:
    if key == "coord":
        return "Every set needs it."
    if key == "box":
        return f"A periodic system needs it; for open boundaries add an empty file {folder.name}/nopbc."
    if key == "fparam" and wanted.default_fparam is None:
        return f"numb_fparam = {wanted.numb_fparam} needs it, unless default_fparam is given."
    if key == "aparam":
        return f"numb_aparam = {wanted.numb_aparam} needs it."
    return ""


def _refuse_copies(folder: Folder, name: str, problems: list[str]) -> None:
    try:
        copies = folder.array(f"{name}/numb_copy.npy")
    except DataError as error:
        problems += error.problems
        return
    if copies is not None and copies.shape and (copies.read(0, copies.shape[0]) != 1).any():
        problems.append(f"{copies.name}: numb_copy is not supported. Remove the file and write such frames repeatedly.")


def _shape_problems(array: StoredArray, frames: int, numbers: int, natoms: int) -> list[str]:
    shape = tuple(int(n) for n in array.shape)
    width = int(np.prod(shape[1:], dtype=np.int64))
    if shape and shape[0] == frames and width == numbers:
        return []
    expected = (frames, numbers) if numbers > 1 else (frames,)
    unit = f" for {natoms} atoms" if numbers % natoms == 0 and numbers > 9 else ""
    if shape and width == numbers:
        unit = f": coord.npy has {frames} frames"
    return [f"{array.name}: shape {shape}, expected {expected}{unit}."]


def _type_table(
    folder: Folder,
    wanted: Wanted,
    names: list[str] | None,
    file_types: Array,
    mixed_sets: Sequence[FrameSet] | None,
    problems: list[str],
) -> Array:
    """Return the model type of each file type, -1 last for virtual atoms; elements that do not occur may be unknown."""
    used = np.unique(file_types)
    place = f"{folder.name}/type.raw"
    if mixed_sets is not None:
        used, place = _used_in_mixed(mixed_sets, problems), f"{folder.name}/set.*/{TYPES}.npy"
    known = names if names is not None else list(wanted.type_map)
    source = "type_map.raw" if names is not None else "model.type_map"
    if used.size and used.max() >= len(known):
        problems.append(f"{place}: type {used.max()}, but {source} has only {len(known)} elements (types from 0).")
        return np.full(1, -1)
    table = np.full(len(known) + 1, -1)
    for number, element in enumerate(known):
        if element in wanted.type_map:
            table[number] = wanted.type_map.index(element)
        elif number in used:
            problems.append(
                f'{folder.name}/type_map.raw: element "{element}" is not in model.type_map. '
                f"{did_you_mean(element, wanted.type_map)} "
                "Add it to model.type_map, or leave the system out."
            )
    return table


def _used_in_mixed(sets: Sequence[FrameSet], problems: list[str]) -> Array:
    used: set[int] = set()
    for part in sets:
        array = part.arrays[TYPES]
        types = array.read(0, part.num_frames)
        used |= set(np.unique(types).astype(np.int64).tolist())
        if types.min() < -1 or (types != np.floor(types)).any():
            problems.append(f"{array.name}: has {types.min()}. Expected types from 0, and -1 for virtual atoms.")
        empty = np.flatnonzero((types < 0).all(axis=1))
        if len(empty):
            problems.append(f"{array.name}: frame {empty[0]} has only virtual atoms (type -1).")
    return np.array(sorted(t for t in used if t >= 0), np.int64)


def _named(mixed: Mapping[str, bool], kind: bool) -> str:
    return ", ".join(name for name, is_mixed in mixed.items() if is_mixed is kind)


def _row(part: FrameSet, name: str, k: int) -> Array:
    return part.arrays[name].read(k, k + 1)[0].astype(np.float64)


def _pick(per_atom: Array, real: Array | None) -> Array:
    return per_atom if real is None else per_atom[real]
