"""DeePMD-kit's systems (type.raw and set.*), plain and mixed: names and shapes are checked when
they are opened.
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
from deepmd_ema.errors import DataError, collect_problems, did_you_mean, first_few, show_text
from deepmd_ema.geometry import Array

TYPES = "real_atom_types"
_MAX_TYPE_DIGITS = 9  # of a type
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
    """Frames of one system, read on demand; slow where a frame takes more than its rows, as of a
    compressed array.

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
        of_one = self._read(part, part.arrays, k, k + 1)
        types, arrays = of_one.types[0], {name: rows[0] for name, rows in of_one.arrays.items()}
        real = None
        if types.min() < 0:
            real = np.flatnonzero(types >= 0)
            types = types[real]
            arrays = {name: of_atoms(name, array, real) for name, array in arrays.items()}
        fparam = arrays.get(FPARAM)
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
            arrays[COORD], types, box, labels, fparam, arrays.get(APARAM), (self.name, index), real
        )

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order, some of one set at a time, with the arrays ``names``, or with
        all.
        """
        for part in self.sets:
            wanted = [name for name in part.arrays if names is None or name in names]
            step = frames_at_once(self.natoms, wanted)
            for start in range(0, part.num_frames, step):
                yield self._read(part, wanted, start, min(start + step, part.num_frames))

    def where(self, index: int, array: str = "") -> Place:
        """Return the set of a frame, or the file of one of its arrays, and the frame's number
        there.
        """
        part, k = self._locate(index)
        return Place(part.arrays[array].name if array else part.name, k, part.num_frames)

    def _locate(self, index: int) -> tuple[FrameSet, int]:
        """Return the set of a frame and the frame's number in the set."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        part = self.sets[bisect_right(self.sets, index, key=lambda one: one.first) - 1]
        return part, index - part.first

    def _read(self, part: FrameSet, names: Iterable[str], start: int, stop: int) -> Chunk:
        """Return some frames of a set."""
        number, arrays = stop - start, {}
        for name in names:
            if name != TYPES:
                rows, per = (
                    part.arrays[name].read(start, stop).astype(np.float64, copy=False),
                    rows_per(name),
                )
                if (
                    self.selected is not None
                    and name in LABELS
                    and rows[0].size < math.prod(LABELS[name].shape_of(self.natoms))
                ):
                    of_selected = rows.reshape(number, len(self.selected), -1)
                    rows = np.zeros((number, self.natoms, of_selected.shape[2]))
                    rows[:, self.selected] = of_selected
                shape = {
                    "atom": (self.natoms, -1),
                    "pair": (3 * self.natoms, 3 * self.natoms),
                    "frame": (-1,),
                }[per]
                arrays[name] = rows.reshape(number, *shape)
        if self.atom_type is not None:
            types = np.broadcast_to(self.atom_type, (number, self.natoms))
        else:
            types = self.index_of[part.arrays[TYPES].read(start, stop).astype(np.int64)]
        return Chunk(part.first + start, types, arrays)


class _Expected(NamedTuple):
    """An array to look for: names of its file, numbers per frame, and why a set must have it, if it
    must.

    ``of_selected`` is another number per frame, if there may be one: of the rows of selected atoms.
    """

    name: str
    files: tuple[str, ...]
    numbers: int
    reason: str = ""
    of_selected: int = -1


def open_system(store: ArrayStore, spec: ReadSpec) -> DeepmdSystem:
    """Return the system in ``store``.

    Raises:
        DataError: with all problems of its files.
    """
    words = store.words("type.raw") or []
    if not words:
        raise DataError(f"{store.name}/type.raw: is empty. Expected one integer per atom.")
    # isdigit alone takes superscript digits, which are no numbers
    bad = [w for w in words if not (w.isascii() and w.isdigit() and len(w) <= _MAX_TYPE_DIGITS)]
    if bad:
        shown = f"{store.name}/type.raw: {show_text(bad[0], _MAX_SHOWN)}"
        raise DataError(f"{shown} is not a type. Expected one integer from 0 per atom.")
    file_types, natoms = np.array(words, np.int64), len(words)
    names = read_type_map(store)
    set_names, backups = store.set_names(), backups_of(store)
    if not set_names:
        why = (
            f"{backups[0]} Rename one to set.000"
            if backups
            else "it has type.raw but no set.* folder. Add one"
        )
        raise DataError(f"{store.name}: no frames: {why}, or leave it out.")
    mixed = [name for name in set_names if store.has(f"{name}/{TYPES}.npy")]
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
    # the arrays of every set
    expected, periodic = (
        [_Expected(COORD, (COORD,), 3 * natoms, "Every set needs it.")],
        not store.has("nopbc"),
    )
    if periodic:
        reason = (
            f"A periodic system needs it; for open boundaries add an empty file {store.name}/nopbc."
        )
        expected.append(_Expected(BOX, (BOX,), 9, reason))
    if mixed:
        expected.append(_Expected(TYPES, (TYPES,), natoms))
    labels = [LABELS[name] for name in spec.labels]
    selected = None
    if spec.selected is not None and not mixed:
        elements = [*(names or spec.type_map)]
        selected = np.flatnonzero(
            [t < len(elements) and elements[t] in spec.selected for t in file_types]
        )
    for label in labels:
        numbers = [
            math.prod(label.shape_of(n))
            for n in (natoms, len(selected) if selected is not None else natoms)
        ]
        of_selected = numbers[1] if label.per_atom and selected is not None else -1
        expected.append(_Expected(label.name, label.files, numbers[0], of_selected=of_selected))
    for name, number in spec.num_conditions.items():
        if number:
            needs = f"numb_{name} = {number} needs it" + (
                ", unless default_fparam is given" if name == FPARAM else ""
            )
            reason = f"{needs}." if name == APARAM or spec.default_fparam is None else ""
            expected.append(
                _Expected(name, (name,), number * (natoms if name == APARAM else 1), reason)
            )
    problems, sets = list[str](), list[FrameSet]()
    for name in set_names:
        first = sets[-1].first + sets[-1].num_frames if sets else 0
        part = _open_set(store, name, first, natoms, expected, problems)
        sets += [part] if part is not None and part.num_frames else []
    if not sets and not problems:
        problems.append(
            f"{store.name}: no frames: the arrays of {', '.join(set_names)} have no rows. Leave "
            "it out."
        )
    used = _used_in_mixed(sets, problems) if mixed else np.unique(file_types)
    place = f"{store.name}/set.*/{TYPES}.npy" if mixed else f"{store.name}/type.raw"
    index_of = type_table(f"{store.name}/type_map.raw", place, spec, names, used, problems)
    DataError.raise_if_any(problems)
    unread = [
        name for name in spec.ignored if any(store.has(f"{part}/{name}.npy") for part in set_names)
    ]
    sizes = np.broadcast_to(
        np.int64(natoms), sum(part.num_frames for part in sets)
    )  # takes no memory
    is_slow = any(array.load is not None for part in sets for array in part.arrays.values())
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


def _open_set(
    store: ArrayStore,
    name: str,
    first: int,
    natoms: int,
    expected: Sequence[_Expected],
    problems: list[str],
) -> FrameSet | None:
    """Return a set whose arrays all fit together; None after adding to ``problems`` where they do
    not.
    """
    before, arrays = len(problems), dict[str, StoredArray]()
    for one in expected:
        with collect_problems(problems):
            stored = (store.array(f"{name}/{file}.npy") for file in one.files)
            array = next((array for array in stored if array is not None), None)
            if array is not None:
                arrays[one.name] = array
            elif one.reason:
                problems.append(f"{store.name}/{name}/{one.files[0]}.npy: missing. {one.reason}")
    with collect_problems(problems):
        copies = store.array(f"{name}/numb_copy.npy")
        # of one number per frame; other shapes cannot be copies
        is_counted = copies is not None and copies.shape and math.prod(copies.shape[1:]) == 1
        if copies is not None and (not is_counted or (copies.read(0, copies.shape[0]) != 1).any()):
            reason = "numb_copy is not supported. Remove the file and write such frames repeatedly."
            problems.append(f"{copies.name}: {reason}")
    if COORD not in arrays:
        return None
    shape = arrays[COORD].shape
    # a single frame may have been saved without its axis, (3 N,) or (N, 3)
    frames = shape[0] if len(shape) > 1 and math.prod(shape) != 3 * natoms else 1
    for one in expected:
        if one.name not in arrays:
            continue
        array = arrays[one.name]
        if frames == 1 and math.prod(array.shape) == one.numbers:
            if (load := array.load) is not None:
                array.load = lambda start, stop, load=load, width=one.numbers: load(0, width)
            array.shape = (1, one.numbers)
        shape = tuple(int(n) for n in array.shape)
        fits = bool(shape) and math.prod(shape[1:]) in (one.numbers, one.of_selected)
        if not fits or shape[0] != frames:
            wanted = (frames, one.numbers) if one.numbers > 1 else (frames,)
            of_atoms = one.name == TYPES or rows_per(one.name) != "frame"
            unit = (
                f": coord.npy has {frames} frames"
                if fits
                else f" for {natoms} atoms"
                if of_atoms
                else ""
            )
            unit += (
                f", or {(frames, one.of_selected)} for those of sel_type"
                if one.of_selected > 0 and not fits
                else ""
            )
            problems.append(f"{array.name}: shape {shape}, expected {wanted}{unit}.")
    return (
        FrameSet(f"{store.name}/{name}", first, frames, arrays) if len(problems) == before else None
    )


def system_frames(
    store: ArrayStore, selected: Sequence[str] | None = None
) -> Iterator[StoredFrame]:
    """Yield the frames of a system with all labels and parameters that it has, without virtual
    atoms.

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
    natoms, widths = max(1, len(store.words("type.raw") or ())), dict.fromkeys((FPARAM, APARAM), 0)
    for name, place in product(widths, store.set_names()):
        array, coord = (store.array(f"{place}/{file}.npy") for file in (name, COORD))
        if array and coord:
            rows = max(1, math.prod(coord.shape) // (3 * natoms)) * (
                natoms if name == APARAM else 1
            )
            widths[name] = max(widths[name], math.prod(array.shape) // rows)
    system = open_system(
        store, ReadSpec(names, tuple(LABELS), widths[FPARAM], widths[APARAM], selected=selected)
    )
    for frame in map(system.frame, range(system.num_frames)):
        arrays = {**frame.labels, FPARAM: frame.fparam, APARAM: frame.aparam}
        per_atom, per_frame = (
            {n: a for n, a in arrays.items() if a is not None and (rows_per(n) == "atom") is kind}
            for kind in (True, False)
        )
        yield StoredFrame(
            [names[t] for t in frame.atom_type.tolist()],
            frame.coord,
            frame.box,
            per_frame,
            per_atom,
        )


def backups_of(store: ArrayStore) -> list[str]:
    """Return a remark on the sets that are left out because their names say that they are backups,
    if there are any.
    """
    names = store.set_names(backups=True)
    return [f"left out, since their names end as those of backups do: {first_few(names)}."] * bool(
        names
    )


def read_type_map(store: ArrayStore) -> list[str] | None:
    """Return the elements that a system names, None without type_map.raw.

    Raises:
        DataError: if one is named twice.
    """
    names = store.words("type_map.raw")
    if twice := sorted(name for name, count in Counter(names or []).items() if count > 1):
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
    """Return the model type of each file type, -1 last for virtual atoms; elements that do not
    occur may be unknown.

    Args:
        where: where ``names`` are stored, for messages.
        place: where types are stored, for messages.
        spec: with the model's elements.
        names: elements that types of the file count in; None if these are the model's.
        used: types that occur.
        problems: what is wrong is added here.
    """
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
    """Return the types that occur in a mixed system; what is wrong is added to ``problems``, of
    each set the first.
    """
    used: set[int] = set()
    for part in sets:
        array, before = part.arrays[TYPES], len(problems)
        for start in range(0, part.num_frames, step := frames_at_once(math.prod(array.shape[1:]))):
            types = array.read(start, min(start + step, part.num_frames))
            is_type = (types >= -1) & (types < 10**_MAX_TYPE_DIGITS) & (types == np.floor(types))
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
