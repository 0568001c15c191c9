"""DeePMD-kit's systems (type.raw and set.*), plain and mixed: names and shapes are checked when they are opened."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TypeAlias

import numpy as np

from deepmd_ema.data.formats.hdf5 import Hdf5Store
from deepmd_ema.data.formats.npy import NpyStore, StoredArray
from deepmd_ema.data.formats.properties import StoredFrame
from deepmd_ema.data.source import (
    BOX,
    COORD,
    Chunk,
    Frame,
    FrameSource,
    Place,
    ReadSpec,
    frames_at_once,
    is_per_atom,
    is_per_pair,
    of_atoms,
)
from deepmd_ema.errors import DataError, collect_problems, did_you_mean
from deepmd_ema.labels import APARAM, FPARAM, LABELS
from deepmd_ema.sorting import Array

TYPES = "real_atom_types"
_MAX_TYPE_DIGITS = 9  # of a type
_MAX_SHOWN = 40  # letters of a word in a message


ArrayStore: TypeAlias = "NpyStore | Hdf5Store"
"""The files of one system, in a folder or in a group of an HDF5 file."""


@dataclass(frozen=True)
class FrameSet:
    """One set.* of a system: its first frame's number in the system, and its arrays by name."""

    name: str
    first: int
    num_frames: int
    arrays: Mapping[str, StoredArray]


@dataclass(eq=False, kw_only=True)
class DeepmdSystem(FrameSource):
    """Frames of one system, read on demand; slow where a frame takes more than its rows, as of a compressed array.

    Attributes:
        natoms: number of atoms in the files; mixed frames may have fewer, the rest being virtual.
        periodic: whether the frames have cells.
        spec: what is read.
        sets: its parts.
        atom_type: model type of each atom; None in a mixed system, where each frame has its own types.
        index_of: type in the files to model type, with -1 for itself at the end.
        text_files: those of its files that hold no arrays.
    """

    natoms: int
    periodic: bool
    spec: ReadSpec = field(repr=False)
    sets: Sequence[FrameSet] = field(repr=False)
    atom_type: Array | None = field(repr=False)
    index_of: Array = field(repr=False)
    text_files: Sequence[Path] = field(repr=False)

    def files(self) -> list[Path]:
        """Return the files of the system."""
        return [*self.text_files, *(array.file for part in self.sets for array in part.arrays.values())]

    def frame(self, index: int) -> Frame:
        """Return one frame, without its virtual atoms."""
        part, k = self._locate(index)
        types = self._types_of(part, k, k + 1)[0]
        arrays = {name: self._read(part, name, k, k + 1)[0] for name in part.arrays if name != TYPES}
        real = None
        if types.min() < 0:
            real = np.flatnonzero(types >= 0)
            types = types[real]
            arrays = {name: of_atoms(name, array, real) for name, array in arrays.items()}
        fparam = arrays.get(FPARAM)
        if fparam is None and self.spec.numb_fparam:
            fparam = np.array(self.spec.default_fparam, np.float64)
        return Frame(
            coord=arrays[COORD],
            atom_type=types,
            box=arrays[BOX].reshape(3, 3) if self.periodic else None,
            labels={
                name: arrays[name].reshape(LABELS[name].shape_in_frame(len(types)))
                for name in self.spec.labels
                if name in arrays
            },
            fparam=fparam,
            aparam=arrays.get(APARAM),
            source=(self.name, index),
            file_index=real,
        )

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order, some of one set at a time, with the arrays ``names``, or with all."""
        for part in self.sets:
            wanted = [name for name in part.arrays if name != TYPES and (names is None or name in names)]
            step = frames_at_once(self.natoms, wanted)
            for start in range(0, part.num_frames, step):
                stop = min(start + step, part.num_frames)
                arrays = {name: self._read(part, name, start, stop) for name in wanted}
                yield Chunk(part.first + start, self._types_of(part, start, stop), arrays)

    def where(self, index: int, array: str = "") -> Place:
        """Return the set of a frame, or the file of one of its arrays, and the frame's number there."""
        part, k = self._locate(index)
        return Place(part.arrays[array].name if array else part.name, k, part.num_frames)

    def _locate(self, index: int) -> tuple[FrameSet, int]:
        """Return the set of a frame and the frame's number in the set."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        part = self.sets[bisect_right(self.sets, index, key=lambda one: one.first) - 1]
        return part, index - part.first

    def _types_of(self, part: FrameSet, start: int, stop: int) -> Array:
        """Return (stop - start, natoms) the model types of some frames of a set, -1 for virtual atoms."""
        if self.atom_type is not None:
            return np.broadcast_to(self.atom_type, (stop - start, self.natoms))
        return self.index_of[part.arrays[TYPES].read(start, stop).astype(np.int64)]

    def _read(self, part: FrameSet, name: str, start: int, stop: int) -> Array:
        """Return an array of some frames of a set, as in a :class:`Chunk`."""
        rows = part.arrays[name].read(start, stop).astype(np.float64, copy=False)
        if is_per_pair(name):
            return rows.reshape(stop - start, 3 * self.natoms, 3 * self.natoms)
        return rows.reshape(stop - start, self.natoms, -1) if is_per_atom(name) else rows


def open_system(store: ArrayStore, spec: ReadSpec) -> DeepmdSystem:
    """Return the system in ``store``.

    Raises:
        DataError: with all problems of its files.
    """
    file_types = _read_types(store)
    names = read_type_map(store)
    set_names = store.set_names()
    if not set_names:
        raise DataError(f"{store.name}: no frames: it has type.raw but no set.* folder. Add one, or leave it out.")
    mixed = {name: store.has(f"{name}/{TYPES}.npy") for name in set_names}
    if len(set(mixed.values())) > 1:
        having, lacking = (", ".join(name for name in set_names if mixed[name] is kind) for kind in (True, False))
        raise DataError(
            f"{store.name}: mixed and plain sets in one folder: {having} with {TYPES}.npy, {lacking} without. Put them "
            "into two systems."
        )
    is_mixed = mixed[set_names[0]]
    if is_mixed and names is None:
        raise DataError(f"{store.name}/type_map.raw: missing. A mixed system (with {TYPES}.npy) needs it.")
    periodic = not store.has("nopbc")
    problems: list[str] = []
    sets: list[FrameSet] = []
    expected = _expected_arrays(store.name, len(file_types), is_mixed, periodic, spec)
    for name in set_names:
        first = sets[-1].first + sets[-1].num_frames if sets else 0
        part = _open_set(store, name, first, len(file_types), expected, problems)
        sets += [part] if part is not None and part.num_frames else []
    if not sets and not problems:
        problems.append(f"{store.name}: no frames: the arrays of {', '.join(set_names)} have no rows. Leave it out.")
    used = _used_in_mixed(sets, problems) if is_mixed else np.unique(file_types)
    place = f"{store.name}/set.*/{TYPES}.npy" if is_mixed else f"{store.name}/type.raw"
    index_of = type_table(store.name, spec, names, used, place, problems)
    if problems:
        raise DataError(problems)
    atom_type = None if is_mixed else index_of[file_types]
    ignored = [name for name, number in spec.num_conditions.items() if not number]
    unread = [name for name in ignored if any(store.has(f"{part}/{name}.npy") for part in set_names)]
    sizes = np.broadcast_to(np.int64(len(file_types)), sum(part.num_frames for part in sets))  # takes no memory
    is_slow = any(array.rows is None for part in sets for array in part.arrays.values())
    return DeepmdSystem(
        store.name, sizes, unread, is_slow=is_slow, natoms=len(file_types), periodic=periodic, spec=spec, sets=sets,
        atom_type=atom_type, index_of=index_of, text_files=store.text_files(),
    )  # fmt: skip


def system_frames(store: ArrayStore) -> Iterator[StoredFrame]:
    """Yield the frames of a system with all labels and parameters that it has, without virtual atoms.

    Raises:
        DataError: with all problems of its files, or if it names no elements.
    """
    names = read_type_map(store)
    if names is None:
        raise DataError(
            f"{store.name}/type_map.raw: missing. Expected the elements that the types of type.raw count in."
        )
    natoms = len(_read_types(store))
    widths = dict.fromkeys((FPARAM, APARAM), 0)
    for name, place in product(widths, store.set_names()):
        array, coord = (store.array(f"{place}/{file}.npy") for file in (name, COORD))
        if array and coord:
            frames = max(1, math.prod(coord.shape) // (3 * natoms))
            width = math.prod(array.shape) // frames // (natoms if is_per_atom(name) else 1)
            widths[name] = max(widths[name], width)
    system = open_system(store, ReadSpec(names, tuple(LABELS), widths[FPARAM], widths[APARAM]))
    for frame in map(system.frame, range(system.num_frames)):
        arrays = {**frame.labels, FPARAM: frame.fparam, APARAM: frame.aparam}
        per_atom, per_frame = (
            {n: a for n, a in arrays.items() if a is not None and is_per_atom(n) is kind} for kind in (True, False)
        )
        yield StoredFrame([names[t] for t in frame.atom_type.tolist()], frame.coord, frame.box, per_frame, per_atom)


def read_type_map(store: ArrayStore) -> list[str] | None:
    """Return the elements that a system names, None without type_map.raw.

    Raises:
        DataError: if one is named twice.
    """
    names = store.words("type_map.raw")
    twice = sorted(name for name, count in Counter(names or []).items() if count > 1)
    if twice:
        raise DataError(
            f"{store.name}/type_map.raw: names {', '.join(twice)} more than once, so that a type of type.raw may be "
            "either. Expected each element once; merge their numbers in type.raw."
        )
    return names


def _read_types(store: ArrayStore) -> Array:
    words = store.words("type.raw") or []
    if not words:
        raise DataError(f"{store.name}/type.raw: is empty. Expected one integer per atom.")
    # isdigit alone takes superscript digits, which are no numbers
    bad = [w for w in words if not (w.isascii() and w.isdigit() and len(w) <= _MAX_TYPE_DIGITS)]
    if bad:
        shown = bad[0] if len(bad[0]) <= _MAX_SHOWN else bad[0][:_MAX_SHOWN] + "..."
        raise DataError(f"{store.name}/type.raw: {shown!r} is not a type. Expected one integer from 0 per atom.")
    return np.array(words, np.int64)


def _open_set(
    store: ArrayStore, name: str, first: int, natoms: int, expected: Sequence[_Expected], problems: list[str]
) -> FrameSet | None:
    """Return a set whose arrays all fit together; None after adding to ``problems`` where they do not."""
    before = len(problems)
    arrays: dict[str, StoredArray] = {}
    for one in expected:
        with collect_problems(problems):
            stored = (store.array(f"{name}/{file}.npy") for file in one.files)
            array = next((found for found in stored if found is not None), None)
            if array is not None:
                arrays[one.name] = array
            elif one.required:
                problems.append(f"{store.name}/{name}/{one.files[0]}.npy: missing. {one.required}")
    with collect_problems(problems):
        copies = store.array(f"{name}/numb_copy.npy")
        # of one number per frame; other shapes cannot be copies
        counted = copies is not None and copies.shape and math.prod(copies.shape[1:]) == 1
        if copies is not None and (not counted or (copies.read(0, copies.shape[0]) != 1).any()):
            problems.append(
                f"{copies.name}: numb_copy is not supported. Remove the file and write such frames repeatedly."
            )
    if COORD not in arrays:
        return None
    shape = arrays[COORD].shape
    frames = shape[0] if len(shape) > 1 else 1  # a single frame may have been saved without its axis
    for one in expected:
        if one.name in arrays:
            if frames == 1 and math.prod(arrays[one.name].shape) == one.numbers:
                arrays[one.name] = arrays[one.name].as_row()
            problems += _shape_problems(arrays[one.name], one, frames, natoms)
    return FrameSet(f"{store.name}/{name}", first, frames, arrays) if len(problems) == before else None


@dataclass(frozen=True)
class _Expected:
    """An array to look for: names of its file, numbers per frame, whether atoms have them, and why a set must have it.

    Attributes:
        required: the reason; empty if a set need not have it.
    """

    name: str
    files: tuple[str, ...]
    numbers: int
    of_atoms: bool
    required: str = ""


def _expected_arrays(path: str, natoms: int, is_mixed: bool, periodic: bool, spec: ReadSpec) -> list[_Expected]:
    expected = [_Expected(COORD, (COORD,), 3 * natoms, True, "Every set needs it.")]
    if periodic:
        reason = f"A periodic system needs it; for open boundaries add an empty file {path}/nopbc."
        expected.append(_Expected(BOX, (BOX,), 9, False, reason))
    if is_mixed:
        expected.append(_Expected(TYPES, (TYPES,), natoms, True))
    for label in (LABELS[name] for name in spec.labels):
        numbers = math.prod(label.shape_of(natoms))
        expected.append(_Expected(label.name, label.files, numbers, label.per_atom or label.per_pair))
    if spec.numb_fparam:
        reason = f"numb_fparam = {spec.numb_fparam} needs it, unless default_fparam is given."
        required = reason if spec.default_fparam is None else ""
        expected.append(_Expected(FPARAM, (FPARAM,), spec.numb_fparam, False, required))
    if spec.numb_aparam:
        reason = f"numb_aparam = {spec.numb_aparam} needs it."
        expected.append(_Expected(APARAM, (APARAM,), spec.numb_aparam * natoms, True, reason))
    return expected


def _shape_problems(array: StoredArray, expected: _Expected, frames: int, natoms: int) -> list[str]:
    shape = tuple(int(n) for n in array.shape)
    width = math.prod(shape[1:])
    if shape and shape[0] == frames and width == expected.numbers:
        return []
    wanted = (frames, expected.numbers) if expected.numbers > 1 else (frames,)
    unit = f" for {natoms} atoms" if expected.of_atoms else ""
    if shape and width == expected.numbers:
        unit = f": coord.npy has {frames} frames"
    return [f"{array.name}: shape {shape}, expected {wanted}{unit}."]


def type_table(
    system: str,
    spec: ReadSpec,
    names: Sequence[str] | None,
    used: Array,
    place: str,
    problems: list[str],
    file: str = "type_map.raw",
) -> Array:
    """Return the model type of each file type, -1 last for virtual atoms; elements that do not occur may be unknown.

    Args:
        system: name of the system, for messages.
        spec: with the model's elements.
        names: elements that types of the file count in; None if these are the model's.
        used: types that occur.
        place: where types are stored, for messages.
        problems: what is wrong is added here.
        file: where in the system ``names`` are stored.
    """
    type_map = spec.type_map
    if names is None and not spec.takes_numbers:
        problems.append(f"{system}/{file}: names no elements in the order of their numbers. Name them all with -t.")
        return np.full(1, -1)
    known = names if names is not None else type_map
    source = file if names is not None else "model.type_map"
    if used.size and used.max() >= len(known):
        problems.append(f"{place}: type {used.max()}, but {source} has only {len(known)} elements (types from 0).")
        return np.full(1, -1)
    table = np.full(len(known) + 1, -1)
    for number, element in enumerate(known):
        if element in type_map:
            table[number] = type_map.index(element)
        elif number in used:
            problems.append(
                f'{system}/{file}: element "{element}" is not in model.type_map. '
                f"{did_you_mean(element, type_map)} "
                "Add it to model.type_map, or leave the system out."
            )
    return table


def _used_in_mixed(sets: Sequence[FrameSet], problems: list[str]) -> Array:
    """Return the types that occur in a mixed system; what is wrong is added to ``problems``, of each set the first."""
    used: set[int] = set()
    for part in sets:
        array, before = part.arrays[TYPES], len(problems)
        for start in range(0, part.num_frames, step := frames_at_once(math.prod(array.shape[1:]))):
            types = array.read(start, min(start + step, part.num_frames))
            is_type = (types >= -1) & (types < 10**_MAX_TYPE_DIGITS) & (types == np.floor(types))
            if not is_type.all():
                found = types[~is_type][0]
                problems.append(f"{array.name}: has {found:g}. Expected types from 0, and -1 for virtual atoms.")
            empty = np.flatnonzero((types < 0).all(axis=1))
            if len(empty):
                problems.append(f"{array.name}: frame {start + empty[0]} has only virtual atoms (type -1).")
            used |= set(np.unique(types[is_type]).astype(np.int64).tolist())
            if len(problems) > before:
                break
    return np.array(sorted(t for t in used if t >= 0), np.int64)
