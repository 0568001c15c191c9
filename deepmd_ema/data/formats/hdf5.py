"""DeePMD-kit's systems in an HDF5 file: a group is a folder, a dataset is a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.data.formats.npy import StoredArray
from deepmd_ema.errors import DataError, first_few
from deepmd_ema.sorting import Array

_MAX_REASON_CHARACTERS = 200  # letters of HDF5's own words
_SUFFIXES = (".h5", ".hdf5", ".hdf")


@dataclass(frozen=True)
class Hdf5Store:
    """One system in a group of an HDF5 file, which stays open."""

    group: Any
    name: str

    def set_names(self) -> list[str]:
        """Return the names of the set.* groups, sorted; DataError if one is anything else."""
        with _readable(self.name):
            names = sorted(name for name in self.group if name.startswith("set."))
        for name in names:
            if not hasattr(self._item(name), "keys"):
                raise DataError(f"{self.name}/{name}: is no group, expected one with coord.npy. Remove or rename it.")
        return names

    def has(self, file: str) -> bool:
        """Whether there is a dataset or group ``file``; DataError if it is a link to what does not exist."""
        return self._item(file) is not None

    def words(self, file: str) -> list[str] | None:
        """Return the entries of a dataset as words, None if there is no such dataset."""
        dataset = self._dataset(file)
        if dataset is None:
            return None
        with _readable(f"{self.name}/{file}"):
            values = np.atleast_1d(dataset[()]).ravel().tolist()
            return " ".join(v.decode() if isinstance(v, bytes) else str(v) for v in values).split()

    def text_files(self) -> list[Path]:
        """Return the HDF5 file, which holds the group and its small datasets."""
        return [Path(self.group.file.filename)]

    def array(self, file: str) -> StoredArray | None:
        """Return the dataset ``file``, None if there is no such dataset.

        One that is neither chunked nor compressed is read without HDF5, 50 times as fast.
        """
        dataset, name = self._dataset(file), f"{self.name}/{file}"
        if dataset is None:
            return None
        with _readable(name):
            if dataset.dtype.kind not in "fiu":
                raise DataError(f"{name}: holds {dataset.dtype}, expected float64, float32 or integers.")
            path, shape = Path(dataset.file.filename), tuple(dataset.shape)
            array, offset = StoredArray(name, shape, path, dataset.dtype), dataset.id.get_offset()
            if dataset.file.driver == "sec2" and offset is not None and shape and dataset.size:
                status = path.stat()
                array.offset, array.identity = offset, (status.st_dev, status.st_ino)
                if array.read(0, 1).tobytes() == np.asarray(dataset[:1]).tobytes():
                    return array  # without the open dataset, which takes 28 kB, and there may be 50,000

        def load(start: int, stop: int) -> Array:
            with _readable(name):
                return np.asarray(dataset[start:stop] if shape else dataset[()])

        array.load = load
        return array

    def _item(self, file: str) -> Any:
        """Return a group or dataset, None if there is none."""
        with _readable(f"{self.name}/{file}"):
            if file in self.group:
                _refuse_other_files(self.group[file], self.group.file.filename, f"{self.name}/{file}")
                return self.group[file]
            folder, _, last = file.rpartition("/")
            parent = self.group.get(folder) if folder else self.group
            if hasattr(parent, "keys") and parent.id.links.exists(last.encode()):
                link = f"{self.name}/{file}: is a link to what does not exist"
                raise DataError(f"{link}. Restore its target, or remove the link.")
        return None

    def _dataset(self, file: str) -> Any:
        """Return a dataset that holds data, None if there is none.

        Raises:
            DataError: if a part of it was never written: it takes no room in the file and is read as zeros.
        """
        item, name = self._item(file), f"{self.name}/{file}"
        if item is None:
            return None
        if not hasattr(item, "shape"):
            raise DataError(f"{name}: is a group, expected a dataset.")
        with _readable(name):
            if item.shape is not None and (not math.prod(item.shape) or item.is_virtual):
                return item
            if item.shape is None or not item.id.get_storage_size():
                raise DataError(f"{name}: has shape {item.shape} and holds no data. Was the file written completely?")
            parts = math.prod(-(-length // chunk) for length, chunk in zip(item.shape, item.chunks or ()))
            if item.chunks is not None and (written := item.id.get_num_chunks()) < parts:
                raise DataError(
                    f"{name}: has shape {item.shape}, and {written:,} of its {parts:,} chunks were written. Was the "
                    "file written completely? Write it again with the frames that there are."
                )
        return item


def _refuse_other_files(item: Any, file: str, name: str) -> None:
    """Raise DataError if an item of a file is in another one, or a part of it: that may be any on this machine."""
    others = [item.file.filename] * (item.file.filename != file)
    if hasattr(item, "shape"):
        others += [path for path, *_ in item.external or ()]
        for source in item.virtual_sources() if item.is_virtual else ():
            if source.file_name == ".":
                _refuse_other_files(item.file[source.dset_name], file, name)
            else:
                others.append(source.file_name)
    if others:
        raise DataError(f"{name}: refers to the file {others[0]}. Expected data in {file} itself: write them there.")


def is_hdf5(path: Path) -> bool:
    """Whether ``path`` is a file named as HDF5 files are."""
    return path.suffix in _SUFFIXES and path.is_file()


def hdf5_stores(file: Path, group: str) -> list[Hdf5Store]:
    """Return the systems in ``group`` of ``file`` and in the groups below it, sorted by name.

    Raises:
        DataError: if the file is not HDF5 or has no such group.
    """
    import h5py

    with _readable(str(file), "it is truncated or not an HDF5 file"):
        root = h5py.File(file, "r")
    top = "/" + group.strip("/")
    with _readable(f"{file}#{top}"):
        if top not in root or not isinstance(root[top], h5py.Group):
            raise DataError(f"{file}: has no group {top}. Groups of the file: {first_few(sorted(root)) or 'none'}.")
        _refuse_other_files(root[top], root.filename, f"{file}#{top}")
        groups = {"": root[top]}  # by name below the group
        root[top].visititems(lambda name, item: groups.update({name: item}) if isinstance(item, h5py.Group) else None)
        # a link that leads nowhere counts: it is reported when it is read
        systems = sorted((name, group) for name, group in groups.items() if group.id.links.exists(b"type.raw"))
    return [Hdf5Store(group, f"{file}#{top.rstrip('/')}/{name}".rstrip("/")) for name, group in systems]


@contextmanager
def _readable(name: str, advice: str = "the file is damaged, or a link in it leads nowhere") -> Iterator[None]:
    """Raise DataError for every failure to read ``name``, whichever exception h5py has for it."""
    try:
        yield
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error.args[0] if error.args else error).split())
        raise DataError(f"{name}: cannot be read as HDF5: {advice} ({reason[:_MAX_REASON_CHARACTERS]}).") from error
