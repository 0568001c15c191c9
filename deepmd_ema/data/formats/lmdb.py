"""DeePMD-kit's LMDB data sets.

They have a record per frame, written with msgpack, and a description under ``__metadata__``.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from deepmd_ema.config.elements import SYMBOLS
from deepmd_ema.config.labels import APARAM, FPARAM, HESSIAN, LABELS, NAMES_OF_DPDATA
from deepmd_ema.data.check_cache import recall_or_find
from deepmd_ema.data.formats.properties import (
    StoredFrame,
    make_frame,
    refuse_other_units,
)
from deepmd_ema.data.formats.stores import is_there, readable_as
from deepmd_ema.data.formats.system import type_table
from deepmd_ema.data.source import (
    BOX,
    COORD,
    Frame,
    FrameSource,
    ReadSpec,
    of_atoms,
    rows_per,
)
from deepmd_ema.errors import DataError, collect_problems
from deepmd_ema.geometry import Array
from deepmd_ema.text import counted, first_few, show_text

_ATYPE = "atype"
_META = "__metadata__"
_KIND = "DeePMD-kit's LMDB"
_NAME_OF = {
    **NAMES_OF_DPDATA,
    "atom_types": _ATYPE,
    **{f: n for n, label in LABELS.items() for f in label.files},
}
# names in records that say nothing that other names do not say
_DESCRIBE = {"natoms", "real_natoms_vec", "atom_numbs", "atom_names", "orig", "fid"}
_MAX_PROBLEMS = 5


class _Store:
    """An open data base; a path is open once in a process, which LMDB demands.

    Attributes:
        path: of the data base.
        file: the same, or the file in this folder.
        key_format: of the number of a frame.
    """

    def __init__(self, path: Path) -> None:
        import lmdb
        import msgpack

        self._unpack = partial(msgpack.unpackb, raw=False, strict_map_key=False)
        self._failures = (
            lmdb.Error,
            msgpack.UnpackException,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        )
        self.path = path
        self.key_format = "012d"
        self.file = file = path / "data.mdb" if path.is_dir() else path
        is_there(file)
        # no lock: a file of locks would be written, and data sets may be on a read-only disk;
        # no readahead: frames are read in random order
        with readable_as(_KIND, str(path), self._failures):
            self._env = lmdb.open(
                str(path),
                subdir=path.is_dir(),
                readonly=True,
                lock=False,
                readahead=False,
            )
            needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        # LMDB maps the file: to read pages that it does not have would end the process (SIGBUS)
        if file.stat().st_size < needed:
            raise DataError(
                f"{file}: is truncated: {file.stat().st_size} bytes, expected {needed}. Copy it "
                "again."
            )

    def record(self, key: str) -> dict[str, Any] | None:
        """Return the values under ``key``, arrays decoded; None if there is no such key."""
        with readable_as(_KIND, f"{self.path} {key}", self._failures):
            # buffers=True: the record is not copied, and is unpacked before its transaction ends
            with self._env.begin(buffers=True) as transaction:
                raw = transaction.get(key.encode())
                if raw is None:
                    return None
                values = {str(name): value for name, value in self._unpack(raw).items()}
            for name, value in values.items():
                if isinstance(
                    value, dict
                ):  # an array is written as {type, shape, data}
                    parts = {
                        k.decode() if isinstance(k, bytes) else k: part
                        for k, part in value.items()
                    }
                    if {"type", "data"} <= parts.keys():
                        flat = np.frombuffer(parts["data"], np.dtype(parts["type"]))
                        values[name] = (
                            flat.reshape(tuple(parts["shape"]))
                            if "shape" in parts
                            else flat
                        )
            return values

    def frame(self, index: int) -> dict[str, Array]:
        """Return the arrays of a frame by the names of ``labels``.

        Arrays that the frame marks as missing (``find_NAME`` = 0) are left out.
        """
        key = format(index, self.key_format)
        record = self.record(key)
        if record is None:
            raise DataError(
                f"there is no record {key}. Was the data set written completely?"
            )
        refuse_other_units("", record)
        arrays = {_NAME_OF.get(name, name): value for name, value in record.items()}
        absent = {
            name.removeprefix("find_")
            for name, flag in arrays.items()
            if name.startswith("find_") and not flag
        }
        # flags have the names of DeePMD-kit or of dpdata
        absent |= {_NAME_OF.get(name, name) for name in absent}
        arrays = {
            n: a
            for n, a in arrays.items()
            if n not in absent and not n.startswith("find_")
        }
        arrays[_ATYPE] = types = np.asarray(arrays.get(_ATYPE, ()))
        if types.ndim != 1 or not types.size or types.dtype.kind not in "iu":
            raise DataError(
                "atom_types: missing or wrong. Expected one integer per atom."
            )
        return arrays


# open data bases by their real path
_OPEN: WeakValueDictionary[str, _Store] = WeakValueDictionary()


@dataclass(eq=False, kw_only=True)
class LmdbFile(FrameSource):
    """The frames of one data base, whatever sizes they have.

    Attributes:
        store: the open data base.
        spec: what is read.
        index_of: type in the file to model type, with -1 for itself at the end.
    """

    store: _Store = field(repr=False)
    spec: ReadSpec = field(repr=False)
    index_of: Array = field(repr=False)

    def files(self) -> list[Path]:
        """Return the file of the data base."""
        return [self.store.file]

    def frame(self, index: int) -> Frame:
        """Return one frame, without virtual atoms."""
        if not 0 <= index < self.num_frames:
            raise IndexError(f"{self.name}: frame {index} of {self.num_frames}")
        record = self.store.frame(index)
        try:
            return _frame(record, self.index_of, self.spec, (self.name, index))
        except DataError as error:
            raise DataError(f"{self.name}: frame {index}: {error}") from None


def is_lmdb(path: Path) -> bool:
    """Whether ``path`` is a data base, or named as one."""
    return (path.suffix == ".lmdb" and path.exists()) or (path / "data.mdb").exists()


def find_lmdb(path: Path, group: str) -> list[partial[LmdbFile]]:
    """Return the function that opens the data base at ``path``."""
    if group:
        raise DataError(
            f"{path}#{group}: an LMDB data set has no parts. Remove the part after #."
        )
    return [partial(open_lmdb, path)]


def open_lmdb(path: Path, spec: ReadSpec) -> LmdbFile:
    """Return the frames of a data base.

    All of it is read once, unless the result of that was stored.

    Raises:
        DataError: with the first problems of its frames.
    """
    real = os.path.realpath(path)
    # training and validation data, and threads, may read one data base
    store = _OPEN.get(real) or _OPEN.setdefault(real, _Store(path))
    meta = store.record(_META)
    if meta is None or not isinstance(meta.get("nframes"), int):
        raise DataError(
            f"{path}: has no {_META} with nframes. Expected a data set that DeePMD-kit or dpdata "
            "wrote."
        )
    names = meta.get("type_map")
    key_format = str(meta.get("frame_idx_fmt", "012d"))
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise DataError(
            f"{path}/{_META}: type_map = {show_text(str(names))}, expected a list of elements."
        )
    # a larger width would make a text of any length of each number
    if not re.fullmatch("0?[0-9]{0,2}d", key_format):
        place = f"{path}/{_META}: frame_idx_fmt = {show_text(key_format)}"
        raise DataError(
            f"{place}, expected a format of whole numbers with at most 99 digits such as 012d."
        )
    store.key_format = key_format
    refuse_other_units(f"{path}/{_META}: ", meta)
    num_types = len(names if names is not None else spec.type_map)
    num_frames = meta["nframes"]
    options = [
        list(spec.labels),
        spec.numb_fparam,
        spec.numb_aparam,
        spec.default_fparam,
    ]
    # the options that the result depends on: sizes and names do not depend on the model's elements
    about = {
        "lmdb": str(path),
        "frames": num_frames,
        "types": num_types,
        "format": key_format,
        "read": options,
    }

    def read_all() -> dict[str, Any]:
        """Return sizes of all frames, types that occur, and numbers of frames with each name."""
        sizes = list[int]()
        types = set[int]()
        occurring = Counter[str]()
        problems = list[str]()
        # each type of the file is an element of its own here, so that the result, which is stored,
        # is the same for all models
        plain = np.append(np.arange(num_types), -1)
        elements = [str(t) for t in range(num_types)]
        for index in range(num_frames):
            with collect_problems(problems, f"{store.path}: frame {index} (from 0): "):
                record = store.frame(index)
                sizes.append(len(record[_ATYPE]))
                types.update(np.unique(record[_ATYPE]).tolist())
                _frame(record, plain, replace(spec, type_map=elements), ("", index))
                occurring.update(record.keys())
            if len(problems) >= _MAX_PROBLEMS:
                raise DataError(
                    [
                        *problems,
                        f"{store.path}: the frames after this one were not read.",
                    ]
                )
        DataError.raise_if_any(problems)
        return {
            "sizes": sizes,
            "types": sorted(t for t in types if t >= 0),
            "names": dict(occurring),
        }

    contents = recall_or_find(spec.results, [store.file], about, read_all)
    sizes = np.array(contents["sizes"], np.int64)
    problems = list[str]()
    if not sizes.size:
        problems.append(f"{path}: no frames. Leave it out.")
    types = np.array(contents["types"], np.int64)
    index_of = type_table(f"{path}/{_META}", str(path), spec, names, types, problems)
    DataError.raise_if_any(problems)
    left = [
        f"{name} in {counted(contents['names'][name], 'frame')}"
        for name in _unread(contents["names"], spec)
    ]
    notes = [f"does not read {first_few(left)}"] if left else []
    unread = tuple(name for name in spec.ignored if name in contents["names"])
    return LmdbFile(
        str(path), sizes, unread, notes, store=store, spec=spec, index_of=index_of
    )


def lmdb_frames(path: Path) -> Iterator[StoredFrame]:
    """Yield the frames of a data base with all its labels and parameters, without virtual atoms.

    Raises:
        DataError: as ``open_lmdb``, and if it names no elements.
    """
    file = open_lmdb(path, ReadSpec(SYMBOLS, tuple(LABELS), takes_numbers=False))
    for index in range(file.num_frames):
        record = file.store.frame(index)
        frame = _stored(record, file.index_of, SYMBOLS)[0]
        yield replace(frame, unread=_unread(record, file.spec))


def _unread(names: Iterable[str], spec: ReadSpec) -> list[str]:
    """Return the names in a data base whose arrays are not read."""
    files = {file for name in spec.labels for file in LABELS[name].files}
    read = {*LABELS, *files, FPARAM, APARAM, COORD, BOX, _ATYPE, *_DESCRIBE}
    return sorted({*names} - read)


def _frame(
    record: Mapping[str, Array],
    index_of: Array,
    spec: ReadSpec,
    source: tuple[str, int],
) -> Frame:
    # labels whose width the model sets are not in the table of names
    names = {
        file: name
        for name in spec.labels
        if name not in record
        for file in LABELS[name].files
    }
    record = {names.get(key, key): value for key, value in record.items()}
    stored, real = _stored(record, index_of, spec.type_map)
    sources = {name: name for name in (*stored.per_frame, *stored.per_atom)}
    frame = make_frame(stored, sources, spec, source)
    return (
        frame if len(real) == len(record[_ATYPE]) else replace(frame, file_index=real)
    )


def _stored(
    record: Mapping[str, Array], index_of: Array, type_map: Sequence[str]
) -> tuple[StoredFrame, Array]:
    """Return a frame, and the numbers of its real atoms in the file."""
    types = record[_ATYPE]
    # the last entry of the table is that of virtual atoms (type -1)
    if types.max() >= len(index_of) - 1:
        raise DataError(
            f"atom_types: has {types.max()}, but there are only {len(index_of) - 1} elements."
        )
    real = np.flatnonzero(types >= 0)
    per_atom = {}  # by name, (N real, numbers)
    for name in record:
        if rows_per(name) == "atom":
            values = np.asarray(record[name])
            if (
                values.dtype.kind not in "fiu"
                or not values.size
                or values.size % len(types)
            ):
                has = f"has shape {values.shape} of {values.dtype}"
                raise DataError(
                    f"{name}: {has}, expected numbers for {len(types)} atoms."
                )
            per_atom[name] = values.reshape(len(types), -1).astype(np.float64)[real]
    coord = per_atom.pop(COORD, None)
    if coord is None or coord.shape[1] != 3 or not real.size:
        raise DataError(
            f"{COORD}: missing or wrong. Expected three numbers for each atom, and an atom that "
            "is real."
        )
    box = np.asarray(record.get(BOX, np.zeros(9)), np.float64)
    if box.size != 9:
        raise DataError(f"{BOX}: has {box.size} numbers, expected 9.")
    names = (name for name in record if name in LABELS or name == FPARAM)
    per_frame = {name: record[name] for name in names if rows_per(name) != "atom"}
    # a Hessian has rows and columns of virtual atoms too
    if HESSIAN in per_frame and np.size(per_frame[HESSIAN]) == LABELS[HESSIAN].num_rows(
        len(types)
    ):
        per_frame[HESSIAN] = of_atoms(HESSIAN, np.asarray(per_frame[HESSIAN]), real)
    symbols = [type_map[number] for number in index_of[types[real]].tolist()]
    cell = (
        box.reshape(3, 3) if box.any() else None
    )  # open frames have a cell of zeros, or none
    return StoredFrame(symbols, coord, cell, per_frame, per_atom), real
