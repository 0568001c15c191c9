"""Protocol of data formats: single frames for batches, arrays of many frames for checks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deepmd_ema.config.labels import APARAM, ENERGY, FPARAM, LABELS, WEIGHTS
from deepmd_ema.geometry import Array
from deepmd_ema.text import counted
from deepmd_ema.utils import even_places

if TYPE_CHECKING:
    from deepmd_ema.config import ModelConfig


COORD, BOX = "coord", "box"  # arrays of a chunk beside labels and conditions
_TYPES = "atom types"
# numbers of one array in a chunk (8 MB), so that a data set need not fit in memory
_NUMBERS_AT_ONCE = 1_000_000


@dataclass(frozen=True, eq=False)
class Frame:
    """One configuration: real atoms only, in the order of the file.  N atoms.

    Attributes:
        coord: (N, 3) float64, angstrom.
        atom_type: (N,) int64, indices into the model's type map.
        box: (3, 3) float64, angstrom, rows are cell vectors; None for an open system.
        labels: label name (see ``labels``) to float64 array, only labels that this frame has;
            energy is (), virial (9,), per atom labels (N,) or (N, 3), a Hessian (9 N^2,).
        fparam: (P,) float64 or None.
        aparam: (N, Q) float64 or None.
        source: system name and frame number in the system, for messages.
        file_index: (N,) int64, place of each atom in the file, where virtual atoms count too; None
            without any.
    """

    coord: Array
    atom_type: Array
    box: Array | None = None
    labels: Mapping[str, Array] = field(default_factory=dict)
    fparam: Array | None = None
    aparam: Array | None = None
    source: tuple[str, int] = ("", 0)
    file_index: Array | None = None

    @property
    def num_atoms(self) -> int:
        """Number of real atoms."""
        return len(self.atom_type)

    def describe_atom(self, atom: int, type_map: Sequence[str]) -> str:
        """Return the number of an atom in the file, with its element."""
        number = atom if self.file_index is None else self.file_index[atom]
        return f"{number} ({type_map[self.atom_type[atom]]})"


@dataclass(frozen=True)
class ReadSpec:
    """Labels and elements that are read from every source.

    Attributes:
        type_map: the model's elements; types count in it.
        labels: names of labels (see ``labels``) to read where they are present.
        numb_fparam: frame parameters per frame, 0 for none.
        numb_aparam: atomic parameters per atom, 0 for none.
        default_fparam: frame parameters where the data have none; None to refuse such data.
        selected: elements whose atoms alone may have rows in labels of atoms; None: all have.
        takes_numbers: whether data that name no elements are read, with types that count in
            ``type_map``.
        results: folder of what is known of files that must be read completely when they are opened;
            None to read them.
    """

    type_map: Sequence[str]
    labels: Sequence[str] = ()
    numb_fparam: int = 0
    numb_aparam: int = 0
    default_fparam: Sequence[float] | None = None
    selected: Sequence[str] | None = None
    takes_numbers: bool = True
    results: Path | None = field(default=None, repr=False, compare=False)

    @property
    def conditions(self) -> dict[str, int]:
        """Number of values of ``fparam`` per frame and of ``aparam`` per atom, if it is not 0."""
        numbers = {FPARAM: self.numb_fparam, APARAM: self.numb_aparam}
        return {name: number for name, number in numbers.items() if number}

    @property
    def ignored(self) -> list[str]:
        """Parameters that the model does not take, and weights of frames that are not used."""
        used = {*self.labels, *self.conditions}
        return [name for name in (FPARAM, APARAM, *WEIGHTS) if name not in used]

    @classmethod
    def of_model(cls, model: ModelConfig, labels: Sequence[str]) -> ReadSpec:
        """Return the specification for the section ``model``: ``labels`` and its conditions."""
        fitting = model.fitting_net
        excluded = model.excluded_types
        selected = (
            [name for t, name in enumerate(model.type_map) if t not in excluded]
            if excluded
            else None
        )
        # energies are sums over all atoms: rows of selected atoms are of tensors alone
        return cls(
            model.type_map,
            labels,
            fitting.numb_fparam,
            fitting.numb_aparam,
            fitting.default_fparam,
            None if ENERGY in fitting.labels else selected,
        )


class Place(NamedTuple):
    """Place of a frame, for messages: file or folder, the frame's number from 0, its frames."""

    file: str
    frame: int
    num_frames: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Arrays of consecutive frames that have the same arrays.  C frames, M atoms of the largest.

    Attributes:
        first: number of the first frame in its source.
        types: (C, M) model types; -1 where a frame has no atom (it is smaller, or the atom is
            virtual).
        arrays: by name, float64: (C, numbers) if a frame has a row, (C, M, numbers) if an atom has
            one, (C, 3 M, 3 M) for Hessians; ``coord``, ``box`` (rows of 9; absent for open frames),
            labels, ``fparam``, ``aparam``. Rows of atoms that do not exist hold anything.
    """

    first: int
    types: Array
    arrays: Mapping[str, Array]


@dataclass(eq=False)
class FrameSource(ABC):
    """Frames that are stored in one place: a system, a trajectory, a data base.

    Sizes may differ between frames.

    Sources are keys of caches: two are equal only if they are the same object.

    Attributes:
        name: path of the frames, for messages.
        frame_sizes: (num_frames,) integers: atoms of each frame as stored, virtual atoms included.
        unread: parameters that are stored and that the model does not take, and weights of frames
            that are not used.
        notes: remarks for the user on how the frames are read: units, signs, and arrays that are
            left out.
        kinds: kind of calculation of each frame, empty where it has no name; None if the format
            knows none.
        is_slow: whether reading a frame takes so long that even small ones are worth keeping.
        warnings: what of the stored frames is not read although it may have been meant, with its
            place.
        units: unit that the frames state of properties, which have none that labels know.
        numbers: (num_frames,) of the frames in the source that was opened.
    """

    name: str
    frame_sizes: Array = field(repr=False)
    unread: Sequence[str] = ()
    notes: Sequence[str] = field(default=(), repr=False)
    kinds: Sequence[str] | None = field(default=None, repr=False)
    is_slow: bool = True
    warnings: Sequence[str] = field(default=(), repr=False)
    units: Mapping[str, str] = field(default_factory=dict, repr=False)
    _whole: FrameSource | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.numbers: Array = np.arange(self.num_frames)

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return len(self.frame_sizes)

    @property
    def whole(self) -> FrameSource:
        """The source that was opened, of which this may be a part."""
        return self._whole or self

    @abstractmethod
    def files(self) -> Sequence[Path]:
        """Return every file that the frames are read from."""

    @abstractmethod
    def frame(self, index: int) -> Frame:
        """Return one frame, without virtual atoms; IndexError if there is no such frame."""

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order as chunks that fit in memory.

        Args:
            names: arrays of the chunks; None for all.
        """
        first = 0
        most = 0  # atoms of the largest frame in ``rows``
        rows = list[dict[str, Array]]()
        for index in range(self.num_frames):
            frame = self.frame(index)
            arrays = {
                COORD: frame.coord,
                BOX: frame.box,
                **frame.labels,
                FPARAM: frame.fparam,
                APARAM: frame.aparam,
            }
            row = {_TYPES: frame.atom_type}  # each further array is (rows, numbers)
            num_rows = {
                "atom": frame.num_atoms,
                "pair": 3 * frame.num_atoms,
                "frame": 1,
            }
            for name, array in arrays.items():
                if array is not None and (names is None or name in names):
                    row[name] = array.reshape(num_rows[rows_per(name)], -1)
            most = max(most, frame.num_atoms)
            # a chunk ends where frames have other arrays, or where its largest frame makes it too
            # large
            if rows and (
                row.keys() != rows[0].keys() or len(rows) >= frames_at_once(most, row)
            ):
                yield _stack(first, rows)
                first = index
                rows = []
                most = frame.num_atoms
            rows.append(row)
        if rows:
            yield _stack(first, rows)

    def where(self, index: int, array: str = "") -> Place:
        """Return the place where a frame, or one of its arrays, is stored."""
        return Place(self.name, index, self.num_frames)


class FrameSubset(FrameSource):
    """Some frames of a source, which keep their sources and their numbers in the whole one.

    Args:
        whole: the source, which may be a part itself.
        frames: (num_frames,) numbers of the frames in it, rising.
        part: which of several parts it is, for its name.
    """

    def __init__(self, whole: FrameSource, frames: Array, part: str = "") -> None:
        kinds = (
            None if whole.kinds is None else [whole.kinds[k] for k in frames.tolist()]
        )
        super().__init__(
            f"{whole.name} ({part})" if part else whole.name,
            whole.frame_sizes[frames],
            whole.unread,
            whole.notes,
            kinds,
            whole.is_slow,
            whole.warnings,
            whole.units,
        )
        # a part of a part refers to the source that was opened, so that frames are read in one step
        self._whole = whole.whole
        self.numbers = whole.numbers[frames]

    def files(self) -> Sequence[Path]:
        """Return every file of the whole source."""
        return self.whole.files()

    def frame(self, index: int) -> Frame:
        """Return one frame."""
        return self.whole.frame(int(self.numbers[index]))

    def chunks(self, names: Collection[str] | None = None) -> Iterator[Chunk]:
        """Yield all frames in order as chunks that fit in memory, with all arrays or ``names``."""
        # whole chunks are read even if this part has few of their frames: files are read in order
        first = 0
        for chunk in self.whole.chunks(names):
            start, stop = np.searchsorted(
                self.numbers, [chunk.first, chunk.first + len(chunk.types)]
            )
            rows = self.numbers[start:stop] - chunk.first
            if len(rows):
                arrays = {name: array[rows] for name, array in chunk.arrays.items()}
                yield Chunk(first, chunk.types[rows], arrays)
                first += len(rows)

    def where(self, index: int, array: str = "") -> Place:
        """Return the place where a frame, or one of its arrays, is stored."""
        return self.whole.where(int(self.numbers[index]), array)


def describe_amount(sources: Sequence[FrameSource]) -> str:
    """Return such as ``360 frames of 5 systems``."""
    frames = sum(source.num_frames for source in sources)
    return f"{counted(frames, 'frame')} of {counted(len(sources), 'system')}"


def evenly_spaced(sources: Sequence[FrameSource], most: int) -> list[FrameSource]:
    """Return at most so many frames, evenly spaced over all of ``sources``."""
    ends = np.cumsum([source.num_frames for source in sources])
    if not len(ends) or ends[-1] <= most:
        return list(sources)
    chosen = np.array(even_places(int(ends[-1]), most), np.int64)
    parts = np.split(chosen, np.searchsorted(chosen, ends[:-1]))
    starts = [0, *ends[:-1].tolist()]
    return [
        FrameSubset(source, part - start)
        for source, part, start in zip(sources, parts, starts)
        if len(part)
    ]


def rows_per(name: str) -> str:
    """Return the owner of a row of an array: ``frame``, ``atom``, or ``pair`` of coordinates."""
    if name not in LABELS:
        return "atom" if name in (COORD, APARAM) else "frame"
    return (
        "atom"
        if LABELS[name].per_atom
        else "pair"
        if LABELS[name].per_pair
        else "frame"
    )


def of_atoms(name: str, array: Array, chosen: Array) -> Array:
    """Return the rows of the chosen atoms of an array of a frame, in their order.

    An array that has no rows of atoms is returned as it is.

    Args:
        name: of the array.
        array: as in a :class:`Frame` of N atoms: (N, ...), or (9 N^2,) of pairs of coordinates.
        chosen: numbers of atoms.
    """
    per = rows_per(name)
    if per == "pair":
        # rows and columns x, y and z of each chosen atom
        coordinates = (3 * chosen[:, None] + np.arange(3)).ravel()
        width = math.isqrt(array.size)
        return array.reshape(width, width)[np.ix_(coordinates, coordinates)].reshape(-1)
    return array[chosen] if per == "atom" else array


def frames_at_once(num_atoms: int, names: Collection[str] = ()) -> int:
    """Return the largest number of frames of ``num_atoms`` atoms in a chunk with ``names``."""
    has_pairs = any(rows_per(name) == "pair" for name in names)
    # coordinates or forces are the largest array, unless there is a Hessian
    return max(
        1, _NUMBERS_AT_ONCE // ((3 * num_atoms) ** 2 if has_pairs else 3 * num_atoms)
    )


def _stack(first: int, rows: Sequence[Mapping[str, Array]]) -> Chunk:
    """Return frames that have the same arrays as a chunk, in which smaller ones are padded."""
    stacked = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        # rows of atoms that a smaller frame does not have: type -1, and 0 in the other arrays
        shape = np.max([part.shape for part in parts], axis=0)
        stacked[name] = np.full((len(parts), *shape), -1 if name == _TYPES else 0.0)
        for place, part in zip(stacked[name], parts):
            place[tuple(map(slice, part.shape))] = part
        if rows_per(name) == "frame" and name != _TYPES:
            stacked[name] = stacked[name][:, 0]
    return Chunk(first, stacked.pop(_TYPES), stacked)
