"""DeePMD-kit's systems in folders: npy files of which a few rows are read at a time, and small text files."""

from __future__ import annotations

import math
import os
import resource
import stat
import threading
import tokenize
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
        with _readable(self.path):
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
        with _readable(path, "a text file", "one word per line"):
            return path.read_text(encoding="utf-8").split()

    def text_files(self) -> list[Path]:
        """Return the small files of the folder."""
        return [path for name in ("type.raw", "type_map.raw", "nopbc") if (path := self.path / name).exists()]

    def array(self, file: str) -> NpyFile | None:
        """Return the npy file, of which only the header is read now; None if there is no such file."""
        path = self.path / file
        return open_npy(path) if is_there(path) else None


@dataclass(frozen=True)
class NpyFile:
    """The rows of one npy file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    fortran_order: bool
    identity: tuple[int, int]  # device and inode: another file of this path is not read in its place

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def file(self) -> Path:
        """The path."""
        return self.path

    @property
    def is_direct(self) -> bool:
        """Whether the numbers of a row stand side by side."""
        return not self.fortran_order

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        rows = stop - start
        if self.fortran_order:
            return np.array(np.load(self.path, mmap_mode="r")[start:stop]).reshape(rows, -1)
        return Rows(self.path, self.dtype, math.prod(self.shape[1:]), self.offset, self.identity).read(start, stop)


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
        flat = np.empty((stop - start) * self.width, self.dtype)
        with _readable(self.path):
            file = _OPEN.get(self.path, self.identity)
            found = file.read_into(flat.view(np.uint8).data, self.offset + start * self.width * flat.itemsize)
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

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill ``target`` from ``offset`` on, and return how many bytes there were."""
        found = 0
        while found < len(target):  # of a large array the system may give a part
            number = os.preadv(self.handle, [target[found:]], offset + found)
            if not number:
                break
            found += number
        return found


class _OpenFiles:
    """Files that were read last, kept open: to open one anew takes longer than to read a row."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, identity: tuple[int, int]) -> _OpenFile:
        """Return the file that ``path`` was when it had this device and inode, open."""
        with self._lock:
            file = self._files.get(identity)
            if file is None:
                file = self._files[identity] = _OpenFile(path, identity)
                while len(self._files) > _most_open():
                    self._files.popitem(last=False)  # a thread that reads from it still refers to it
            self._files.move_to_end(identity)
        return file


def _most_open() -> int:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MAX_OPEN_FILES if allowed == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN_FILES, allowed // 4))


_OPEN = _OpenFiles()


def open_npy(path: Path) -> NpyFile:
    """Return the npy file at ``path`` after checking its header and size.

    Raises:
        DataError: if it is not an npy file, holds Python objects or text, or is shorter than its header says.
    """
    with _readable(path, "an npy file", "an array written by numpy.save"), path.open("rb") as file:
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
    return NpyFile(path, shape, dtype, offset, fortran and len(shape) > 1, (found.st_dev, found.st_ino))


def is_there(path: Path) -> bool:
    """Whether there is a file or folder at ``path``.

    Raises:
        DataError: if it is a link to what does not exist, which is a loss and no absence, a pipe, or cannot be
            looked at.
    """
    with _readable(path):
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
def _readable(path: Path, kind: str = "readable", expected: str = "its content as it was written") -> Iterator[None]:
    """Raise DataError for every failure to read the file at ``path``, of a kind and with the content expected."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, SyntaxError, TypeError, OverflowError, RecursionError, tokenize.TokenError) as error:
        # what numpy and codecs raise for damaged content
        raise DataError(f"{path}: is not {kind}, or it is damaged. Expected {expected}.") from error
