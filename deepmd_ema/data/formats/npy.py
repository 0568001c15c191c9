"""DeePMD-kit's systems in folders: npy files of which a few rows are read at a time, and small text files."""

from __future__ import annotations

import math
import os
import resource
import stat
import threading
import tokenize
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from deepmd_ema.errors import DataError
from deepmd_ema.sorting import Array

_MAX_ROWS = 2**48  # of any array that a computer can hold
_MAX_OPEN_FILES = 1000  # files kept open, and at most a quarter of what the process may have open


@dataclass(frozen=True)
class NpyStore:
    """A system in a folder: type.raw, type_map.raw, nopbc, set.*/coord.npy and so on."""

    path: Path

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def set_names(self) -> list[str]:
        """Return the names of the set.* folders, sorted; DataError if one is anything else."""
        with readable(self.path):
            names = sorted(name for name in os.listdir(self.path) if name.startswith("set."))
        folders = [name for name in names if is_there(self.path / name) and (self.path / name).is_dir()]
        for name in set(names) - set(folders):
            if name.removeprefix("set.").isdigit():  # not set.000.tar.gz
                raise DataError(
                    f"{self.path / name}: is a file, expected a folder with coord.npy. Remove or rename it."
                )
        return folders

    def has(self, file: str) -> bool:
        """Whether there is ``file``; DataError if it is a link to what does not exist."""
        return is_there(self.path / file)

    def words(self, file: str) -> list[str] | None:
        """Return the words of a small text file, None if there is no such file."""
        path = self.path / file
        if not is_there(path):
            return None
        with readable(path, "a text file", "one word per line"):
            return path.read_text(encoding="utf-8").split()

    def text_files(self) -> list[Path]:
        """Return the small files of the folder, which hold no arrays."""
        return [path for name in ("type.raw", "type_map.raw", "nopbc") if (path := self.path / name).exists()]

    def array(self, file: str) -> StoredArray | None:
        """Return the npy file, of which only the header is read now; None if there is no such file."""
        path = self.path / file
        return open_npy(path) if is_there(path) else None


@dataclass(frozen=True)
class StoredArray:
    """An array on disk, of which rows are read when they are needed.

    Attributes:
        name: path, for messages.
        shape: its shape; the first dimension counts frames.
        file: that holds all of it.
        rows: where its rows stand in the file; None if they do not stand there as they are.
        load: returns rows ``start`` to ``stop`` where there are no ``rows``.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    rows: Rows | None
    load: Callable[[int, int], Array]

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        if self.rows is not None:
            return self.rows.read(start, stop)
        return self.load(start, stop).reshape(stop - start, -1)

    def as_row(self) -> StoredArray:
        """Return the array as that of one frame."""
        width = math.prod(self.shape)
        rows = replace(self.rows, width=width) if self.rows is not None else None
        return replace(self, shape=(1, width), rows=rows, load=lambda start, stop: self.load(0, width))


@dataclass(frozen=True)
class Rows:
    """Numbers that stand row after row in a file.

    Rows are read at their offset, and the page cache of the operating system keeps what is read often, as it would for
    a mapped file. It is not mapped, because a file that another program cuts would then end the process without a
    message. The files that were read last stay open, so that a data set may have any number of them.

    Attributes:
        path: of the file.
        dtype: of the numbers.
        width: numbers of a row.
        offset: of the first row, bytes.
        identity: device and inode: another file of this path is not read in its place.
    """

    path: Path
    dtype: np.dtype
    width: int
    offset: int
    identity: tuple[int, int]

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        flat, found = np.empty((stop - start) * self.width, self.dtype), 0
        target, offset = flat.view(np.uint8).data, self.offset + start * self.width * flat.itemsize
        with readable(self.path):
            file = _open_file(self.path, self.identity)
            # of a large array the system may give a part
            while found < len(target) and (number := os.preadv(file.handle, [target[found:]], offset + found)):
                found += number
        if found != flat.nbytes:
            raise DataError(f"{self.path}: has become shorter while it was in use: frames {start} to {stop} are gone.")
        return flat.reshape(stop - start, self.width)


class _OpenFile:
    """A file that is open until nobody refers to it any more."""

    def __init__(self, path: Path, identity: tuple[int, int]) -> None:
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.handle)
        if (found.st_dev, found.st_ino) != identity:
            raise DataError(f"{path}: has been replaced by another file while it was in use. Start again.")

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)


_OPEN: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()  # by device and inode, those read last at the end
_LOCK = threading.Lock()


def _open_file(path: Path, identity: tuple[int, int]) -> _OpenFile:
    """Return an open file, kept open: to open one anew takes longer than to read a row."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = _MAX_OPEN_FILES if allowed == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, allowed // 4))
    with _LOCK:
        file = _OPEN.pop(identity) if identity in _OPEN else _OpenFile(path, identity)
        _OPEN[identity] = file
        while len(_OPEN) > most:
            _OPEN.popitem(last=False)  # a thread that reads from it still refers to it
    return file


def open_npy(path: Path) -> StoredArray:
    """Return the npy file at ``path`` after checking its header and size.

    Raises:
        DataError: if it is not an npy file, holds Python objects or text, or is shorter than its header says.
    """
    with readable(path, "an npy file", "an array written by numpy.save"), path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(file)
        offset = file.tell()
        found = os.fstat(file.fileno())
    if dtype.hasobject:
        raise DataError(f"{path}: holds pickled Python objects, which are not read. Save an array of float64.")
    if dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {dtype}, expected float64, float32 or integers.")
    needed = offset + dtype.itemsize * math.prod(shape)  # of Python: a damaged header may say 2**64 rows
    if min(shape, default=0) < 0 or max(shape, default=0) > _MAX_ROWS:
        raise DataError(f"{path}: its header is damaged: it says shape {shape}. Copy it again, or save the array anew.")
    if found.st_size < needed:
        raise DataError(
            f"{path}: is truncated: {found.st_size} bytes, expected {needed} for shape {shape}. Copy it again."
        )
    rows = Rows(path, dtype, math.prod(shape[1:]), offset, (found.st_dev, found.st_ino))
    by_columns = fortran and len(shape) > 1
    return StoredArray(
        str(path), shape, path, None if by_columns else rows, lambda a, b: np.array(np.load(path, mmap_mode="r")[a:b])
    )


def is_there(path: Path) -> bool:
    """Whether there is a file or folder at ``path``.

    Raises:
        DataError: if it is a link to what does not exist, which is a loss and no absence, a pipe, or cannot be
            looked at.
    """
    with readable(path):
        try:
            kind = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                target = os.readlink(path)
                raise DataError(
                    f"{path}: is a link to {target}, which does not exist. Restore its target, or remove the link."
                ) from None
            return False
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # to read from a pipe would wait for its writer for ever
        raise DataError(f"{path}: is a pipe or a device, expected a file. Put the data there.")
    return True


@contextmanager
def readable(path: Path, kind: str = "readable", expected: str = "its content as it was written") -> Iterator[None]:
    """Raise DataError for every failure to read the file at ``path``, of a kind and with the content expected."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, RecursionError, tokenize.TokenError) as error:
        # what numpy and codecs raise for damaged content
        raise DataError(f"{path}: is not {kind}, or it is damaged. Expected {expected}.") from error
