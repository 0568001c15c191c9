"""DeePMD-kit's systems in an HDF5 file: a group is a folder, a dataset is a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepmd_ema.arrays import Array
from deepmd_ema.data.formats.system import StoredArray
from deepmd_ema.errors import DataError

_SUFFIXES = (".h5", ".hdf5", ".hdf")


@dataclass(frozen=True)
class Hdf5Store:
    """One system in a group of an HDF5 file, which stays open."""

    group: Any
    name: str

    def set_names(self) -> list[str]:
        """Return the names of the set.* groups, sorted."""
        # of groups only: a dataset has no keys
        return sorted(k for k in self.group if k.startswith("set.") and hasattr(self.group[k], "keys"))

    def has(self, file: str) -> bool:
        """Whether there is a dataset or group ``file``."""
        return file in self.group

    def words(self, file: str) -> list[str] | None:
        """Return the entries of a dataset as words, None if there is no such dataset."""
        if file not in self.group:
            return None
        values = np.atleast_1d(self.group[file][()]).ravel().tolist()
        return " ".join(v.decode() if isinstance(v, bytes) else str(v) for v in values).split()

    def array(self, file: str) -> StoredArray | None:
        """Return the dataset ``file``, None if there is no such dataset."""
        if file not in self.group:
            return None
        dataset, name = self.group[file], f"{self.name}/{file}"
        if not hasattr(dataset, "shape"):
            raise DataError(f"{name}: is a group, expected a dataset.")
        if dataset.dtype.kind not in "fiu":
            raise DataError(f"{name}: holds {dataset.dtype}, expected float64, float32 or integers.")
        return Hdf5Array(dataset, name, tuple(dataset.shape))


@dataclass(frozen=True)
class Hdf5Array:
    """The rows of one dataset."""

    dataset: Any
    name: str
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start`` to ``stop`` as (rows, numbers per row)."""
        try:
            return np.asarray(self.dataset[start:stop]).reshape(stop - start, -1)
        except OSError as error:
            raise DataError(f"{self.name}: cannot be read: {error}") from error


def is_hdf5(path: Path) -> bool:
    """Whether ``path`` is a file named as HDF5 files are."""
    return path.suffix in _SUFFIXES and path.is_file()


def hdf5_stores(file: Path, group: str) -> list[Hdf5Store]:
    """Return the systems in ``group`` of ``file`` and in the groups below it, sorted by name.

    Raises:
        DataError: if the file is not HDF5 or has no such group.
    """
    import h5py

    try:
        root = h5py.File(file, "r")
    except OSError as error:
        raise DataError(f"{file}: cannot be read as HDF5: it is truncated or not an HDF5 file ({error}).") from error
    top = "/" + group.strip("/")
    if top not in root or not isinstance(root[top], h5py.Group):
        known = ", ".join(sorted(root)) or "none"
        raise DataError(f"{file}: has no group {top}. Groups of the file: {known}.")
    found = {"": root[top]}  # name below the group to group
    root[top].visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Group) else None)
    systems = sorted((name, group) for name, group in found.items() if "type.raw" in group)
    return [Hdf5Store(group, f"{file}#{top.rstrip('/')}/{name}".rstrip("/")) for name, group in systems]
