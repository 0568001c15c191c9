"""Files of DeePMD-kit's systems in folders (npy and text), and in groups of HDF5 files.

A dataset of HDF5 is a file here. A few rows of an array are read at a time.
"""

from __future__ import annotations

import math
import os
import re
import resource
import stat
import threading
import tokenize
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.data.formats.properties import refuse_other_units
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import Array
from deepmd_ema.text import first_few

_MAX_ROWS = 2**48  # rows of any array that a computer can hold
_MAX_REASON_CHARACTERS = 200  # letters of the message of a reader
_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf")
_MAX_OPEN_FILES = (
    1000  # files kept open, and at most a quarter of what the process may have open
)
# the end of the name of a set that someone has put aside: set.000.bak, set.000_old2, set.orig,
# set.000~
_BACKUP = re.compile(
    r"[._-](bak|bkp|backup|orig|original|old|copy|save|saved)[._-]?\d*$|~$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class NpyStore:
    """A system in a folder: type.raw, type_map.raw, nopbc, set.*/coord.npy and so on."""

    name: str
    # names of files in each folder
    _names: dict[str, frozenset[str]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def set_names(self, backups: bool = False) -> list[str]:
        """Return the names of the set.* folders, sorted; DataError if one is a file.

        Args:
            backups: whether to return folders that are named as backups, and not the others.
        """
        self.has("")
        names = sorted(name for name in self._names[""] if name.startswith("set."))
        folders = [
            name
            for name in names
            if self.has(name) and os.path.isdir(f"{self.name}/{name}")
        ]
        for name in set(names) - set(folders):
            # a file such as set.000.tar.gz is no mistake
            if name.removeprefix("set.").isdigit():
                place = Path(self.name, name)
                raise DataError(
                    f"{place}: is a file, expected a folder with coord.npy. Remove or rename it."
                )
        return [name for name in folders if bool(_BACKUP.search(name)) is backups]

    def has(self, file: str) -> bool:
        """Whether there is ``file``; DataError if it is a link to what does not exist."""
        folder, name = os.path.split(file)
        # most files do not exist, and to look for each of them takes longer than a list of all
        if folder not in self._names:
            with readable(Path(self.name, folder)):
                self._names[folder] = frozenset(os.listdir(f"{self.name}/{folder}"))
        return name in self._names[folder] and is_there(Path(self.name, file))

    def words(self, file: str) -> list[str] | None:
        """Return the words of a small text file, None if there is no such file."""
        if not self.has(file):
            return None
        path = Path(self.name, file)
        with readable(path, "a text file", "one word per line"):
            return path.read_text(encoding="utf-8").split()

    def array_names(self, folder: str) -> set[str]:
        """Return the names of the npy files in a folder, without their ends."""
        return {path.stem for path in Path(self.name, folder).glob("*.npy")}

    def text_files(self) -> list[Path]:
        """Return the small files of the folder, which hold no arrays."""
        return [
            Path(self.name, name)
            for name in ("type.raw", "type_map.raw", "nopbc")
            if self.has(name)
        ]

    def array(self, file: str) -> StoredArray | None:
        """Return the npy file, of which only the header is read now; None if there is no such file.

        Raises:
            DataError: if it is not an npy file, holds Python objects or text, or is shorter than
                its header says.
        """
        if not self.has(file):
            return None
        path = Path(self.name, file)
        with (
            readable(path, "an npy file", "an array written by numpy.save"),
            path.open("rb") as opened,
        ):
            version = np.lib.format.read_magic(opened)
            header = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran, dtype = header(opened)
            offset = opened.tell()
            status = os.fstat(opened.fileno())
        if dtype.hasobject:
            raise DataError(
                f"{path}: holds pickled Python objects, which are not read. Save an array of "
                "float64."
            )
        if dtype.kind not in "fiu":
            raise DataError(
                f"{path}: holds {dtype}, expected float64, float32 or integers."
            )
        # integers of Python: a damaged header may state 2**64 rows
        needed = offset + dtype.itemsize * math.prod(shape)
        if min(shape, default=0) < 0 or max(shape, default=0) > _MAX_ROWS:
            said = f"{path}: its header is damaged: it says shape {shape}"
            raise DataError(f"{said}. Copy it again, or save the array anew.")
        if status.st_size < needed:
            size = (
                f"{path}: is truncated: {status.st_size} bytes, expected "
                f"{needed} for shape {shape}"
            )
            raise DataError(f"{size}. Copy it again.")
        array = StoredArray(
            str(path), shape, path, dtype, offset, (status.st_dev, status.st_ino)
        )
        # in the order of Fortran the numbers of a row are not next to each other
        if fortran and len(shape) > 1:
            array.load = lambda start, stop: np.array(
                np.load(path, mmap_mode="r")[start:stop]
            )
        return array


@dataclass(frozen=True)
class Hdf5Store:
    """One system in a group of an HDF5 file, which stays open."""

    group: Any
    name: str

    def set_names(self, backups: bool = False) -> list[str]:
        """Return the names of the set.* groups, sorted; DataError if one is no group.

        Args:
            backups: whether to return groups that are named as backups, and not the others.
        """
        with _readable_hdf5(self.name):
            names = sorted(name for name in self.group if name.startswith("set."))
        for name in names:
            if not hasattr(self._item(name), "keys"):
                raise DataError(
                    f"{self.name}/{name}: is no group, expected one with coord.npy. Remove or "
                    "rename it."
                )
        return [name for name in names if bool(_BACKUP.search(name)) is backups]

    def has(self, file: str) -> bool:
        """Whether there is a dataset or group ``file``; DataError if it is a link to nothing."""
        return self._item(file) is not None

    def words(self, file: str) -> list[str] | None:
        """Return the entries of a dataset as words, None if there is no such dataset."""
        dataset = self._dataset(file)
        if dataset is None:
            return None
        with _readable_hdf5(f"{self.name}/{file}"):
            return " ".join(np.ravel(dataset[()]).astype(str)).split()

    def close(self) -> None:
        """Close the file, with all its groups; another program may write it then."""
        if self.group:
            self.group.file.close()

    def array_names(self, folder: str) -> set[str]:
        """Return the names of the datasets in a group that are named as npy files are."""
        return {Path(name).stem for name in self.group[folder]}

    def text_files(self) -> list[Path]:
        """Return the HDF5 file, which holds the group and its small datasets."""
        return [Path(self.group.file.filename)]

    def array(self, file: str) -> StoredArray | None:
        """Return the dataset ``file``, None if there is no such dataset.

        One that is neither chunked nor compressed is read without HDF5, 50 times as fast.
        """
        dataset = self._dataset(file)
        name = f"{self.name}/{file}"
        if dataset is None:
            return None
        with _readable_hdf5(name):
            if dataset.dtype.kind not in "fiu":
                raise DataError(
                    f"{name}: holds {dataset.dtype}, expected float64, float32 or integers."
                )
            path = Path(dataset.file.filename)
            shape = tuple(dataset.shape)
            array = StoredArray(name, shape, path, dataset.dtype)
            # place of the numbers in a file of the plain driver; None if they are in chunks
            offset = dataset.id.get_offset()
            if (
                dataset.file.driver == "sec2"
                and offset is not None
                and shape
                and dataset.size
            ):
                status = path.stat()
                array.offset = offset
                array.identity = (status.st_dev, status.st_ino)
                # the first row is compared with that of HDF5, in case the offset is another one
                if array.read(0, 1).tobytes() == np.asarray(dataset[:1]).tobytes():
                    # the array does not hold the dataset, which takes 28 kB; a run may have 50,000
                    return array

        def load(start: int, stop: int) -> Array:
            with _readable_hdf5(name):
                return np.asarray(dataset[start:stop] if shape else dataset[()])

        array.load = load
        return array

    def _item(self, file: str) -> Any:
        """Return a group or dataset, None if there is none."""
        with _readable_hdf5(f"{self.name}/{file}"):
            if file in self.group:
                _refuse_other_files(
                    self.group[file], self.group.file.filename, f"{self.name}/{file}"
                )
                return self.group[file]
            folder, last = os.path.split(file)
            parent = self.group.get(folder) if folder else self.group
            if hasattr(parent, "keys") and parent.id.links.exists(last.encode()):
                link = f"{self.name}/{file}: is a link to what does not exist"
                raise DataError(f"{link}. Restore its target, or remove the link.")
        return None

    def _dataset(self, file: str) -> Any:
        """Return a dataset that holds data, None if there is none.

        Raises:
            DataError: if a part of it was never written: it takes no room in the file and is read
                as zeros.
        """
        item = self._item(file)
        name = f"{self.name}/{file}"
        if item is None:
            return None
        if not hasattr(item, "shape"):
            raise DataError(f"{name}: is a group, expected a dataset.")
        with _readable_hdf5(name):
            refuse_other_units(f"{name}: ", item.attrs, Path(file).stem)
            if item.shape is not None and (
                not math.prod(item.shape) or item.is_virtual
            ):
                return item
            if item.shape is None or not item.id.get_storage_size():
                raise DataError(
                    f"{name}: has shape {item.shape} and holds no data. Was the file written "
                    "completely?"
                )
            parts = math.prod(
                -(-length // chunk)
                for length, chunk in zip(item.shape, item.chunks or ())
            )
            if (
                item.chunks is not None
                and (written := item.id.get_num_chunks()) < parts
            ):
                raise DataError(
                    f"{name}: has shape {item.shape}, and {written:,} of its {parts:,} chunks "
                    "were written. Was the file written completely? Write it again with the "
                    "frames that there are."
                )
        return item


@dataclass
class StoredArray:
    """An array on disk, of which rows are read when they are needed.

    Rows are read at their offset, and the page cache of the operating system keeps what is read
    often, as it would for a mapped file. It is not mapped, because a file that another program cuts
    would then end the process without a message. The files that were read last stay open, so that a
    data set may have any number of them.

    Attributes:
        name: path, for messages.
        shape: its shape; the first dimension counts frames.
        file: that holds all of it.
        dtype: of the numbers.
        offset: of the first row in the file, bytes.
        identity: device and inode: another file of this path is not read in its place.
        load: returns rows ``start`` to ``stop`` where they do not stand in the file as they are;
            else None.
    """

    name: str
    shape: tuple[int, ...]
    file: Path
    dtype: np.dtype
    offset: int = 0
    identity: tuple[int, int] = (0, 0)
    load: Callable[[int, int], Array] | None = None

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        if self.load is not None:
            return self.load(start, stop).reshape(stop - start, -1)
        width = math.prod(self.shape[1:])
        flat = np.empty((stop - start) * width, self.dtype)
        target = flat.view(np.uint8).data
        offset = self.offset + start * width * flat.itemsize
        size = 0  # bytes read
        with readable(self.file):
            # kept open: to open a file anew takes longer than to read a row
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            most = (
                _MAX_OPEN_FILES
                if allowed == resource.RLIM_INFINITY
                else max(1, min(_MAX_OPEN_FILES, allowed // 4))
            )
            with _LOCK:
                file = _OPEN.pop(self.identity, None) or _OpenFile(
                    os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
                )
                status = os.fstat(file.handle)
                if (status.st_dev, status.st_ino) != self.identity:
                    raise DataError(
                        f"{self.file}: has been replaced by another file while it was in use. "
                        "Start again."
                    )
                _OPEN[self.identity] = file
                while len(_OPEN) > most:
                    _OPEN.popitem(
                        last=False
                    )  # a thread that reads from it still refers to it
            # the system may return a part of a large array
            while size < len(target) and (
                number := os.preadv(file.handle, [target[size:]], offset + size)
            ):
                size += number
        if size != flat.nbytes:
            raise DataError(
                f"{self.file}: has become shorter while it was in use: frames {start} to {stop} "
                "are gone."
            )
        return flat.reshape(stop - start, width)


@dataclass
class _OpenFile:
    """A file that is open until nobody refers to it any more."""

    handle: int

    def __del__(self) -> None:
        os.close(self.handle)


# open files by device and inode, the files read last at the end
_OPEN: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()
_LOCK = threading.Lock()


def is_there(path: Path) -> bool:
    """Whether there is a file or folder at ``path``.

    Raises:
        DataError: if it is a link to a file that does not exist, which is a loss and no absence,
            if it is a pipe or a device, or if its status cannot be read.
    """
    with readable(path):
        try:
            kind = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                link = f"{path}: is a link to {os.readlink(path)}, which does not exist"
                raise DataError(
                    f"{link}. Restore its target, or remove the link."
                ) from None
            return False
    # to read from a pipe would wait for its writer for ever
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise DataError(
            f"{path}: is a pipe or a device, expected a file. Put the data there."
        )
    return True


@contextmanager
def readable(
    path: Path, kind: str = "readable", expected: str = "its content as it was written"
) -> Iterator[None]:
    """Raise DataError for every failure to read a file, which names its kind and content."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}."
        ) from error
    except (
        ValueError,
        EOFError,
        SyntaxError,
        TypeError,
        OverflowError,
        RecursionError,
        tokenize.TokenError,
    ) as error:
        # errors of numpy and of codecs for damaged content
        raise DataError(
            f"{path}: is not {kind}, or it is damaged. Expected {expected}."
        ) from error


def _refuse_other_files(item: Any, file: str, name: str) -> None:
    """Raise DataError if an item of a file, or a part of it, is in another file."""
    # links of HDF5 may lead to any file of this machine, also those of a data set from elsewhere
    linked = [item.file.filename] if item.file.filename != file else []
    if hasattr(item, "shape"):
        linked += [path for path, *_ in item.external or ()]
        for source in item.virtual_sources() if item.is_virtual else ():
            if source.file_name == ".":
                _refuse_other_files(item.file[source.dset_name], file, name)
            else:
                linked.append(source.file_name)
    if linked:
        raise DataError(
            f"{name}: refers to the file {linked[0]}. Expected data in {file} itself: write them "
            "there."
        )


def is_hdf5(path: Path) -> bool:
    """Whether ``path`` is a file named as HDF5 files are."""
    return path.suffix in _HDF5_SUFFIXES and path.is_file()


def hdf5_stores(file: Path, group: str) -> list[Hdf5Store]:
    """Return the systems in ``group`` of ``file`` and in the groups below it, sorted by name.

    Raises:
        DataError: if the file is not HDF5 or has no such group.
    """
    import h5py

    try:
        with _readable_hdf5(str(file), "it is truncated or not an HDF5 file"):
            root = h5py.File(file, "r")
    except DataError as error:
        if isinstance(error.__cause__, BlockingIOError):  # the lock of HDF5
            advice = (
                "Wait until it has closed it, or set HDF5_USE_FILE_LOCKING=FALSE if it does not "
                "write any more."
            )
            raise DataError(
                f"{file}: another program has it open for writing. {advice}"
            ) from error
        raise
    top = "/" + group.strip("/")
    with ExitStack() as stack, _readable_hdf5(f"{file}#{top}"):
        stack.callback(root.close)
        if top not in root or not isinstance(root[top], h5py.Group):
            raise DataError(
                f"{file}: has no group {top}. Groups of the file: "
                f"{first_few(sorted(root)) or 'none'}."
            )
        _refuse_other_files(root[top], root.filename, f"{file}#{top}")
        groups = {"": root[top]}  # groups by their names below ``top``
        root[top].visititems(
            lambda name, item: (
                groups.update({name: item}) if isinstance(item, h5py.Group) else None
            )
        )
        for entry in (root, *groups.values()):
            refuse_other_units(f"{file}#{entry.name}: ", entry.attrs)
        # a link that leads nowhere counts: it is reported when it is read
        systems = sorted(
            (name, group)
            for name, group in groups.items()
            if group.id.links.exists(b"type.raw")
        )
        stack.pop_all()  # the file stays open for the systems
    return [
        Hdf5Store(group, f"{file}#{top.rstrip('/')}/{name}".rstrip("/"))
        for name, group in systems
    ]


def _readable_hdf5(
    name: str, advice: str = "the file is damaged, or a link in it leads nowhere"
) -> AbstractContextManager[None]:
    # h5py raises any of these for a damaged file
    failures = (OSError, KeyError, ValueError, TypeError, RuntimeError, OverflowError)
    return readable_as(f"HDF5: {advice}", name, failures)


@contextmanager
def readable_as(
    kind: str, name: str, failures: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Raise DataError for every failure to read ``name`` as a ``kind`` of file, with its reason."""
    try:
        yield
    except failures as error:
        reason = (
            " ".join(str(error.args[-1] if error.args else error).split())
            or type(error).__name__
        )
        raise DataError(
            f"{name}: cannot be read as {kind} ({reason[:_MAX_REASON_CHARACTERS]})."
        ) from error
