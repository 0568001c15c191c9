"""Nested dictionaries with arrays in DeePMD-kit's ``.dp`` (HDF5) and ``.yaml`` files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from deepmd_ema.errors import CheckpointError
from deepmd_ema.files import atomic_write

Tree: TypeAlias = dict[str, Any]

VARIABLES = "@variables"  # every array is under such a key
_ARRAY = {"@class": "np.ndarray", "@is_variable": True, "@version": 1}


def write_tree(path: Path, tree: Tree, check: Callable[[Path], None] | None = None) -> None:
    """Write ``tree`` to a ``.yaml`` or an HDF5 file; it appears whole or not at all.

    Args:
        path: the file; its suffix says which format.
        tree: what it will hold.
        check: called with the path of the whole file before it takes its name; what it raises keeps an older file.

    Raises:
        WriteError: if the file cannot be written.
    """
    write = _write_yaml if _is_yaml(path) else _write_hdf5
    with atomic_write(path, "Choose another -o, or make room.") as part:
        write(part, tree)
        if check is not None:
            check(part)


def read_tree(path: Path) -> Tree:
    """Return what ``write_tree`` or DeePMD-kit wrote.

    Raises:
        CheckpointError: if the file is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file.")
    tree = (_read_yaml if _is_yaml(path) else _read_hdf5)(path)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path}: holds {type(tree).__name__}, expected the dictionary of a model.")
    return tree


def _is_yaml(path: Path) -> bool:
    return path.suffix.lower() in (".yaml", ".yml")


def _replaced(value: Any, change: Callable[[Any], Any], is_variable: bool = False) -> Any:
    """Return a copy in which ``change`` was applied to every leaf under ``@variables``."""
    if isinstance(value, dict) and "@is_variable" not in value:
        return {k: _replaced(v, change, is_variable or k == VARIABLES) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(v, change, is_variable) for v in value]
    return change(value) if is_variable and value is not None else value


def _write_hdf5(path: Path, tree: Tree) -> None:
    import h5py

    with h5py.File(path, "w") as file:

        def store(array: Any) -> str:
            name = f"/variable_{len(file):04d}"
            file.create_dataset(name, data=array)
            return name

        file.attrs["json"] = json.dumps(_replaced(tree, store), separators=(",", ":"))


def _read_hdf5(path: Path) -> Any:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            if "json" not in file.attrs:
                raise CheckpointError(f"{path}: HDF5, but no model inside (no attribute json).")
            return _replaced(json.loads(file.attrs["json"]), lambda name: file[name][()])
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: truncated or not an HDF5 model file ({error}).") from error


def _write_yaml(path: Path, tree: Tree) -> None:
    import yaml

    def store(array: Any) -> Tree:
        array = np.asarray(array)
        return {**_ARRAY, "dtype": array.dtype.name, "value": array.tolist()}

    with path.open("w", encoding="utf-8") as file:
        yaml.dump(_replaced(tree, store), file, getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False)


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        with path.open(encoding="utf-8") as file:
            tree = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return _replaced(tree, lambda v: np.array(v["value"], dtype=v["dtype"]))
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: not a YAML model file ({' '.join(str(error).split())[:200]}).") from error
