"""DeePMD-kit's systems in folders: npy files of which a few rows are read at a time, and small text files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepmd_ema.arrays import Array
from deepmd_ema.errors import DataError


@dataclass(frozen=True)
class NpyStore:
    """A system in a folder: type.raw, type_map.raw, nopbc, set.*/coord.npy and so on."""

    path: Path

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def set_names(self) -> list[str]:
        """Return the names of the set.* folders, sorted."""
        return sorted(p.name for p in self.path.glob("set.*") if p.is_dir())

    def has(self, file: str) -> bool:
        """Whether there is ``file``."""
        return (self.path / file).exists()

    def words(self, file: str) -> list[str] | None:
        """Return the words of a small text file, None if there is no such file."""
        path = self.path / file
        try:
            return path.read_text().split()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as text: {error}") from error

    def array(self, file: str) -> NpyFile | None:
        """Return the npy file, of which only the header is read now; None if there is no such file."""
        path = self.path / file
        return open_npy(path) if path.exists() else None


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
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        offset = self.offset + self.dtype.itemsize * start * width
        try:
            flat = np.fromfile(self.path, self.dtype, rows * width, offset=offset)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read any more: {error}") from error
        if len(flat) != rows * width:
            raise DataError(f"{self.path}: has become shorter while it was in use: frames {start} to {stop} are gone.")
        return flat.reshape(rows, width)


def open_npy(path: Path) -> NpyFile:
    """Return the npy file at ``path`` after checking its header and size.

    Raises:
        DataError: if it is not an npy file, holds Python objects or text, or is shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(file)
            offset = file.tell()
            size = file.seek(0, 2)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: is not an npy file. Expected an array written by numpy.save.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}.") from error
    if dtype.hasobject:
        raise DataError(f"{path}: holds pickled Python objects, which are not read. Save an array of float64.")
    if dtype.kind not in "fiu":
        raise DataError(f"{path}: holds {dtype}, expected float64, float32 or integers.")
    needed = offset + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if size < needed:
        raise DataError(f"{path}: is truncated: {size} bytes, expected {needed} for shape {shape}. Copy it again.")
    return NpyFile(path, shape, dtype, offset, fortran and len(shape) > 1)
