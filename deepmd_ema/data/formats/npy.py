"""DeePMD-kit's systems in folders: npy files of which a few rows are read at a time, and small text files."""

from __future__ import annotations

import math
import os
import stat
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepmd_ema.arrays import Array
from deepmd_ema.errors import DataError

_MOST_ROWS = 2**48  # of any array that a computer can hold


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

    def array(self, file: str) -> NpyFile | None:
        """Return the npy file, of which only the header is read now; None if there is no such file."""
        path = self.path / file
        return open_npy(path) if is_there(path) else None


@dataclass(frozen=True)
class NpyFile:
    """The rows of one npy file.

    Rows are read at their offset. No file stays open or mapped, so that a data set may have any number of files; the
    page cache of the operating system keeps what is read often.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    fortran_order: bool

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        rows = stop - start
        if self.fortran_order:
            return np.array(np.load(self.path, mmap_mode="r")[start:stop]).reshape(rows, -1)
        width = math.prod(self.shape[1:])
        offset = self.offset + self.dtype.itemsize * start * width
        with _readable(self.path):
            flat = np.fromfile(self.path, self.dtype, rows * width, offset=offset)
        if len(flat) != rows * width:
            raise DataError(f"{self.path}: has become shorter while it was in use: frames {start} to {stop} are gone.")
        return flat.reshape(rows, width)


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
        size = file.seek(0, 2)
    if dtype.hasobject:
        raise DataError(f"{path}: holds pickled Python objects, which are not read. Save an array of float64.")
    if dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {dtype}, expected float64, float32 or integers.")
    needed = offset + dtype.itemsize * math.prod(shape)  # of Python: a damaged header may say 2**64 rows
    if min(shape, default=0) < 0 or max(shape, default=0) > _MOST_ROWS:
        raise DataError(f"{path}: its header is damaged: it says shape {shape}. Copy it again, or save the array anew.")
    if size < needed:
        raise DataError(f"{path}: is truncated: {size} bytes, expected {needed} for shape {shape}. Copy it again.")
    return NpyFile(path, shape, dtype, offset, fortran and len(shape) > 1)


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
