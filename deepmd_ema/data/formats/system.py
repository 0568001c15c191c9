"""DeePMD-kit's systems (type.raw and set.*), plain and mixed.

Names and shapes of arrays are checked when a system is opened.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from deepmd_ema.config.labels import APARAM, FPARAM, LABELS
from deepmd_ema.data.formats.properties import StoredFrame
from deepmd_ema.data.formats.stores import Hdf5Store, NpyStore, StoredArray
from deepmd_ema.data.source import (
    BOX,
    COORD,
    Chunk,
    Frame,
    FrameSource,
    Place,
    ReadSpec,
    frames_at_once,
    of_atoms,
    rows_per,
)
from deepmd_ema.errors import DataError, collect_problems
from deepmd_ema.geometry import Array
from deepmd_ema.text import did_you_mean, first_few, show_text

TYPES = "real_atom_types"
# names of arrays that are read, or looked at
_FILES = {COORD, BOX, TYPES, FPARAM, APARAM, "numb_copy"}
_FILES |= {file for label in LABELS.values() for file in label.files}
_MAX_TYPE_DIGITS = 9  # a larger number is no type, and would not fit into all integers
_MAX_SHOWN = 40  # letters of a word in a message

ArrayStore: TypeAlias = "NpyStore | Hdf5Store"
"""The files of one system, in a folder or in a group of an HDF5 file."""


class FrameSet(NamedTuple):
    """One set.* of a system: its first frame's number in the system, and its arrays by name."""

    name: str
    first: int
    num_frames: int
    arrays: Mapping[str, StoredArray]


@dataclass(eq=False, kw_only=True)
class DeepmdSystem(FrameSource):
    """Frames of one system, read on demand.

    Reading is slow where more than the rows of a frame must be read, as of a compressed array.

    Attributes:
        natoms: number of atoms in the files; mixed frames may have fewer, the rest being virtual.
        periodic: whether the frames have cells.
        spec: what is read.
        sets: its parts.
        atom_type: model type of each atom; None in a mixed system, where each frame has its own
            types.
        index_of: type in the files to model type, with -1 for itself at the end.
        text_files: those of its files that hold no arrays.
        selected: places of the atoms of which some labels have rows; None in a mixed system.
    """

    natoms: int
    periodic: bool
    spec: ReadSpec = field(repr=False)
    sets: Sequence[FrameSet] = field(repr=False)
    atom_type: Array | None = field(repr=False)
    index_of: Array = field(repr=False)
    text_files: Sequence[Path] = field(repr=False)
    selected: Array | None = field(default=None, repr=False)

    def files(self) -> list[Path]:
        """Return the files of the system."""
        return [
            *self.text_files,
            *(array.file for part in self.sets for array in part.arrays.values()),
        ]

    def frame(self, index: int) -> Frame:
        """Return one frame, without its virtual atoms."""
        part, k = self._locate(index)
        chunk = self._read(part, part.arrays, k, k + 1)
        types = chunk.types[0]  # (N,)
        arrays = {name: rows[0] for name, rows in chunk.arrays.items()}
        real = None  # places of real atoms among those of the files
        if types.min() < 0:
            real = np.flatnonzero(types >= 0)
            types = types[real]
            arrays = {
                name: of_atoms(name, array, real) for name, array in arrays.items()
            }
        fparam = arrays.get(FPARAM)
        # open_system has refused sets without parameters if there is no default
        if fparam is None and self.spec.numb_fparam:
            fparam = np.array(self.spec.default_fparam, np.float64)
        box = arrays[BOX].reshape(3, 3) if self.periodic else None
        shapes = {
            name: LABELS[name].shape_in_frame(len(types))
            for name in self.spec.labels
            if name in arrays
        }
        labels = {name: arrays[name].reshape(shape) for name, shape in shapes.items()}
        return Frame(
            arrays[COORD],
            types,
            box,
            labels,
            fparam,
            arrays.get(APARAM),
            (self.name, index),
            real,
        )

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order, some of one set at a time, with all arrays or ``names``."""
        for part in self.sets:
            wanted = [name for name in part.arrays if names is None or name in names]
            step = frames_at_once(self.natoms, wanted)
            for start in range(0, part.num_frames, step):
                yield self._read(
                    part, wanted, start, min(start + step, part.num_frames)
                )

    def where(self, index: int, array: str = "") -> Place:
        """Return the set of a frame, or the file of one of its arrays, and its number there."""
        part, k = self._locate(index)
        return Place(
            part.arrays[array].name if array else part.name, k, part.num_frames
        )

    def _locate(self, index: int) -> tuple[FrameSet, int]:
        """Return the set of a frame and the frame's number in the set."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        part = self.sets[
            bisect_right(self.sets, index, key=lambda place: place.first) - 1
        ]
        return part, index - part.first

    def _read(
        self, part: FrameSet, names: Iterable[str], start: int, stop: int
    ) -> Chunk:
        """Return some frames of a set."""
        number = stop - start
        arrays = {}
        for name in names:
            if name != TYPES:
                rows = (
                    part.arrays[name].read(start, stop).astype(np.float64, copy=False)
                )
                per = rows_per(name)
                # Tensors may have rows of the selected atoms alone (sel_type), which their size
                # shows: they get their places among all atoms, and the other rows are 0.
                if (
                    self.selected is not None
                    and name in LABELS
                    and rows[0].size < math.prod(LABELS[name].shape_of(self.natoms))
                ):
                    selected_rows = rows.reshape(number, len(self.selected), -1)
                    rows = np.zeros((number, self.natoms, selected_rows.shape[2]))
                    rows[:, self.selected] = selected_rows
                shape = {
                    "atom": (self.natoms, -1),
                    "pair": (3 * self.natoms, 3 * self.natoms),
                    "frame": (-1,),
                }[per]
                arrays[name] = rows.reshape(number, *shape)
        if self.atom_type is not None:
            types = np.broadcast_to(self.atom_type, (number, self.natoms))
        else:
            # type -1 of virtual atoms is the last entry of the table, which is -1
            types = self.index_of[part.arrays[TYPES].read(start, stop).astype(np.int64)]
        return Chunk(part.first + start, types, arrays)


class _Expected(NamedTuple):
    """An array to look for in each set.

    Attributes:
        name: of the array.
        files: names that its file may have.
        numbers: per frame.
        reason: why a set must have it; empty if it need not.
        selected_numbers: numbers per frame of an array with rows of the selected atoms alone; -1 if
            it must have rows of all atoms.
    """

    name: str
    files: tuple[str, ...]
    numbers: int
    reason: str = ""
    selected_numbers: int = -1


def open_system(store: ArrayStore, spec: ReadSpec) -> DeepmdSystem:
    """Return the system in ``store``.

    Raises:
        DataError: with all problems of its files.
    """
    entries = store.words("type.raw") or []
    if not entries:
        raise DataError(
            f"{store.name}/type.raw: is empty. Expected one integer per atom."
        )
    # isdigit alone takes superscript digits, which are no numbers
    bad = [
        e
        for e in entries
        if not (e.isascii() and e.isdigit() and len(e) <= _MAX_TYPE_DIGITS)
    ]
    if bad:
        shown = f"{store.name}/type.raw: {show_text(bad[0], _MAX_SHOWN)}"
        raise DataError(f"{shown} is not a type. Expected one integer from 0 per atom.")
    file_types = np.array(entries, np.int64)
    natoms = len(entries)
    names = read_type_map(store)
    set_names = store.set_names()
    backups = backups_of(store)
    if not set_names:
        why = (
            f"{backups[0]} Rename one to set.000"
            if backups
            else "it has type.raw but no set.* folder. Add one"
        )
        raise DataError(f"{store.name}: no frames: {why}, or leave it out.")
    mixed = [name for name in set_names if store.has(f"{name}/{TYPES}.npy")]
    # type.raw of a mixed system says nothing but the number of atoms, so that a plain set beside a
    # mixed one would have wrong types
    if mixed and len(mixed) < len(set_names):
        plain = [name for name in set_names if name not in mixed]
        raise DataError(
            f"{store.name}: mixed and plain sets in one folder: {', '.join(mixed)} with "
            f"{TYPES}.npy, {', '.join(plain)} without. Put them into two systems."
        )
    if mixed and names is None:
        raise DataError(
            f"{store.name}/type_map.raw: missing. A mixed system (with {TYPES}.npy) needs it."
        )
    # the arrays of every set; mixed sets have types of their own
    expected = [_Expected(COORD, (COORD,), 3 * natoms, "Every set needs it.")]
    periodic = not store.has("nopbc")
    if periodic:
        reason = (
            "A periodic system needs it; for open boundaries add an empty file "
            f"{store.name}/nopbc."
        )
        expected.append(_Expected(BOX, (BOX,), 9, reason))
    if mixed:
        expected.append(_Expected(TYPES, (TYPES,), natoms))
    labels = [LABELS[name] for name in spec.labels]
    # places in type.raw of the atoms that alone may have rows in tensors
    selected = None
    if spec.selected is not None and not mixed:
        elements = [*(names or spec.type_map)]
        selected = np.flatnonzero(
            [t < len(elements) and elements[t] in spec.selected for t in file_types]
        )
    for label in labels:
        entry = _Expected(label.name, label.files, math.prod(label.shape_of(natoms)))
        if label.per_atom and selected is not None:
            entry = entry._replace(
                selected_numbers=math.prod(label.shape_of(len(selected)))
            )
        expected.append(entry)
    expected += _conditions(spec, natoms)
    # all sets are opened before the first problem is raised, so that a user sees every one at once
    problems = list[str]()
    sets = list[FrameSet]()
    for name in set_names:
        first = sets[-1].first + sets[-1].num_frames if sets else 0
        part = _open_set(store, name, first, natoms, expected, problems)
        if part is not None and part.num_frames:
            sets.append(part)
    if not sets and not problems:
        problems.append(
            f"{store.name}: no frames: the arrays of {', '.join(set_names)} have no rows. Leave "
            "it out."
        )
    # elements of type_map.raw that occur nowhere need not be in the model
    used = _used_in_mixed(sets, problems) if mixed else np.unique(file_types)
    place = f"{store.name}/set.*/{TYPES}.npy" if mixed else f"{store.name}/type.raw"
    index_of = type_table(
        f"{store.name}/type_map.raw", place, spec, names, used, problems
    )
    DataError.raise_if_any(problems)
    unread = [
        name
        for name in spec.ignored
        if any(store.has(f"{part}/{name}.npy") for part in set_names)
    ]
    # one number for all frames, which takes no memory
    sizes = np.broadcast_to(np.int64(natoms), sum(part.num_frames for part in sets))
    # compressed arrays of HDF5, and npy files in the order of Fortran
    is_slow = any(
        array.load is not None for part in sets for array in part.arrays.values()
    )
    return DeepmdSystem(
        store.name,
        sizes,
        unread,
        is_slow=is_slow,
        natoms=natoms,
        periodic=periodic,
        spec=spec,
        sets=sets,
        atom_type=None if mixed else index_of[file_types],
        index_of=index_of,
        text_files=store.text_files(),
        warnings=[f"{store.name}: {text}" for text in backups],
        selected=selected,
    )


def _conditions(spec: ReadSpec, natoms: int) -> Iterator[_Expected]:
    """Yield the arrays of parameters that the model takes."""
    if number := spec.numb_fparam:
        reason = f"numb_fparam = {number} needs it, unless default_fparam is given."
        has_default = spec.default_fparam is not None
        yield _Expected(FPARAM, (FPARAM,), number, "" if has_default else reason)
    if number := spec.numb_aparam:
        yield _Expected(
            APARAM, (APARAM,), number * natoms, f"numb_aparam = {number} needs it."
        )


def _open_set(
    store: ArrayStore,
    name: str,
    first: int,
    natoms: int,
    expected: Sequence[_Expected],
    problems: list[str],
) -> FrameSet | None:
    """Return a set whose arrays all fit together; None, and ``problems`` are added, if not."""
    before = len(problems)
    arrays = dict[str, StoredArray]()
    for entry in expected:
        with collect_problems(problems):
            stored = (store.array(f"{name}/{file}.npy") for file in entry.files)
            # the first name that exists; a label without a file is missing in this set
            array = next((array for array in stored if array is not None), None)
            if array is not None:
                arrays[entry.name] = array
            elif entry.reason:
                path = f"{store.name}/{name}/{entry.files[0]}.npy"
                problems.append(f"{path}: missing. {entry.reason}")
    # DeePMD-kit trains on each frame as often as numb_copy says: to ignore it would weight frames
    # in another way
    with collect_problems(problems):
        copies = store.array(f"{name}/numb_copy.npy")
        # one number per frame; arrays of other shapes cannot be numbers of copies
        is_counted = (
            copies is not None and copies.shape and math.prod(copies.shape[1:]) == 1
        )
        if copies is not None and (
            not is_counted or (copies.read(0, copies.shape[0]) != 1).any()
        ):
            reason = "numb_copy is not supported. Remove the file and write such frames repeatedly."
            problems.append(f"{copies.name}: {reason}")
    if COORD not in arrays:
        return None
    shape = arrays[COORD].shape
    # a single frame may have been saved without its axis, (3 N,) or (N, 3)
    frames = shape[0] if len(shape) > 1 and math.prod(shape) != 3 * natoms else 1
    for entry in expected:
        if entry.name not in arrays:
            continue
        array = arrays[entry.name]
        if frames == 1 and math.prod(array.shape) == entry.numbers:
            # whatever its axes, the array is one row; a loader reads rows of the axes in the file
            if (load := array.load) is not None:
                array.load = lambda start, stop, load=load, width=entry.numbers: load(
                    0, width
                )
            array.shape = (1, entry.numbers)
        shape = tuple(int(n) for n in array.shape)
        fits = bool(shape) and math.prod(shape[1:]) in (
            entry.numbers,
            entry.selected_numbers,
        )
        if not fits or shape[0] != frames:
            wanted = (frames, entry.numbers) if entry.numbers > 1 else (frames,)
            unit = ""
            if fits:
                unit = f": coord.npy has {frames} frames"
            elif entry.name == TYPES or rows_per(entry.name) != "frame":
                unit = f" for {natoms} atoms"
            if entry.selected_numbers > 0 and not fits:
                unit += f", or {(frames, entry.selected_numbers)} for those of sel_type"
            problems.append(f"{array.name}: shape {shape}, expected {wanted}{unit}.")
    if len(problems) > before:
        return None
    return FrameSet(f"{store.name}/{name}", first, frames, arrays)


def system_frames(
    store: ArrayStore, selected: Sequence[str] | None = None
) -> Iterator[StoredFrame]:
    """Yield the frames of a system with all its labels and parameters, without virtual atoms.

    Args:
        store: its files.
        selected: elements whose atoms alone may have rows in labels of atoms, where the others are
            0.

    Raises:
        DataError: with all problems of its files, or if it names no elements.
    """
    names = read_type_map(store)
    if names is None:
        path = f"{store.name}/type_map.raw"
        raise DataError(
            f"{path}: missing. Expected the elements that the types of type.raw count in."
        )
    # without a model, the number of parameters follows from the shapes of their arrays
    natoms = max(1, len(store.words("type.raw") or ()))
    widths = dict.fromkeys((FPARAM, APARAM), 0)
    files = {name for place in store.set_names() for name in store.array_names(place)}
    unread = files - _FILES
    for name, place in product(widths, store.set_names()):
        array = store.array(f"{place}/{name}.npy")
        coord = store.array(f"{place}/{COORD}.npy")
        if array and coord:
            rows = max(1, math.prod(coord.shape) // (3 * natoms))
            rows *= natoms if name == APARAM else 1
            widths[name] = max(widths[name], math.prod(array.shape) // rows)
    system = open_system(
        store,
        ReadSpec(
            names, tuple(LABELS), widths[FPARAM], widths[APARAM], selected=selected
        ),
    )
    for frame in map(system.frame, range(system.num_frames)):
        parameters = {FPARAM: frame.fparam, APARAM: frame.aparam}
        arrays = {
            **frame.labels,
            **{n: a for n, a in parameters.items() if a is not None},
        }
        per_atom = {n: a for n, a in arrays.items() if rows_per(n) == "atom"}
        per_frame = {n: a for n, a in arrays.items() if n not in per_atom}
        symbols = [names[t] for t in frame.atom_type.tolist()]
        yield StoredFrame(symbols, frame.coord, frame.box, per_frame, per_atom, unread)


def backups_of(store: ArrayStore) -> list[str]:
    """Return a remark on the sets that are named as backups and left out; empty without any."""
    names = store.set_names(backups=True)
    if not names:
        return []
    return [
        f"left out, since their names end as those of backups do: {first_few(names)}."
    ]


def read_type_map(store: ArrayStore) -> list[str] | None:
    """Return the elements that a system names, None without type_map.raw.

    Raises:
        DataError: if one is named twice.
    """
    names = store.words("type_map.raw")
    if twice := sorted(
        name for name, count in Counter(names or []).items() if count > 1
    ):
        raise DataError(
            f"{store.name}/type_map.raw: names {', '.join(twice)} more than once, so that a type "
            "of type.raw may be either. Expected each element once; merge their numbers in "
            "type.raw."
        )
    return names


def type_table(
    where: str,
    place: str,
    spec: ReadSpec,
    names: Sequence[str] | None,
    used: Array,
    problems: list[str],
) -> Array:
    """Return the model type of each file type, and -1 last for virtual atoms.

    Elements that do not occur may be missing in the model.

    Args:
        where: where ``names`` are stored, for messages.
        place: where types are stored, for messages.
        spec: with the model's elements.
        names: elements that types of the file count in; None if these are the model's.
        used: types that occur.
        problems: what is wrong is added here.
    """
    # without type_map.raw types count in the type map of the model, as in DeePMD-kit
    elements = names if names is not None else spec.type_map
    table = np.full(len(elements) + 1, -1)
    if names is None and not spec.takes_numbers:
        problems.append(
            f"{where}: names no elements in the order of their numbers. Name them all with -t."
        )
    elif used.size and used.max() >= len(elements):
        source = where.rpartition("/")[2] if names is not None else "model.type_map"
        problems.append(
            f"{place}: type {used.max()}, but {source} has only {len(elements)} elements (types "
            "from 0)."
        )
    else:
        for number, element in enumerate(elements):
            if element in spec.type_map:
                table[number] = spec.type_map.index(element)
            elif number in used:
                problems.append(
                    f'{where}: element "{element}" is not in model.type_map. '
                    f"{did_you_mean(element, spec.type_map)} "
                    "Add it to model.type_map, or leave the system out."
                )
    return table


def _used_in_mixed(sets: Sequence[FrameSet], problems: list[str]) -> Array:
    """Return the types that occur in a mixed system, and add the first problems of each set."""
    used: set[int] = set()
    for part in sets:
        array = part.arrays[
            TYPES
        ]  # (frames, natoms), of integers or of floating-point numbers
        before = len(problems)
        for start in range(
            0, part.num_frames, step := frames_at_once(math.prod(array.shape[1:]))
        ):
            types = array.read(start, min(start + step, part.num_frames))
            # NaN and fractions are no types, and a conversion to integers would hide them
            is_type = (
                (types >= -1)
                & (types < 10**_MAX_TYPE_DIGITS)
                & (types == np.floor(types))
            )
            if not is_type.all():
                wrong = types[~is_type][0]
                problems.append(
                    f"{array.name}: has {wrong:g}. Expected types from 0, and -1 for virtual atoms."
                )
            empty = np.flatnonzero((types < 0).all(axis=1))
            if len(empty):
                problems.append(
                    f"{array.name}: frame {start + empty[0]} has only virtual atoms (type -1)."
                )
            used |= set(np.unique(types[is_type]).astype(np.int64).tolist())
            if len(problems) > before:
                break
    return np.array(sorted(t for t in used if t >= 0), np.int64)
