"""Nested dictionaries with arrays in DeePMD-kit's ``.dp`` (HDF5), ``.yaml`` and ``.pt2`` files."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import CheckpointError, refusal_of
from deepmd_ema.files import atomic_write
from deepmd_ema.text import show_text

Tree: TypeAlias = dict[str, Any]

SOFTWARE = "dp-ema"  # in our files
PACKAGED_TREE = "model/extra/model.json"  # in a .pt2
VARIABLES = "@variables"  # every array is under such a key
_ARRAY = {"@class": "np.ndarray", "@is_variable": True, "@version": 1}
# key of the digest of all else in the file; DeePMD-kit does not look at it, and its own files have
# none
_DIGEST = "digest"
_ADDED = ("time",)  # by DeePMD-kit, when it writes a file again that it has read
_DEEPEST = (
    1000  # levels of a YAML text; the reader in C recurses, and a model has twenty
)
_MAX_COMPRESSION = 1100  # deflate does not do better


def write_tree(
    path: Path, tree: Tree, check: Callable[[Path], None] | None = None
) -> None:
    """Write ``tree`` with its digest to a ``.yaml`` or HDF5 file, which appears whole or not.

    Args:
        path: the file; its suffix says which format.
        tree: what it will hold.
        check: called with the path of the whole file before it takes its name; what it raises keeps
            an older file.

    Raises:
        WriteError: if the file cannot be written.
    """
    write = _write_yaml if path.suffix.lower() in (".yaml", ".yml") else _write_hdf5
    tree = {
        _DIGEST: _digest(tree),
        **tree,
    }  # first: a YAML text that was cut is still YAML
    with atomic_write(path, "Choose another -o, or make room.") as part:
        write(part, tree)
        if check is not None:
            check(part)


def read_tree(path: Path) -> Tree:
    """Return the tree that ``write_tree`` or DeePMD-kit wrote, without the checked digest.

    Raises:
        CheckpointError: if the file is missing, damaged or of another kind.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file.")
    read, kind = _READERS.get(path.suffix.lower(), (_read_hdf5, "an HDF5"))
    try:
        tree = read(path)
    except CheckpointError:
        raise
    # bytes that were changed can make the readers of HDF5, JSON and YAML fail in any way
    except Exception as error:
        if (refused := refusal_of(error)) is not None:
            raise CheckpointError(f"{path}: cannot be read {refused}") from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"{path}: damaged, or not {kind} model file ({reason})."
        ) from error
    if not isinstance(tree, dict):
        raise CheckpointError(
            f"{path}: holds {type(tree).__name__}, expected the dictionary of a model."
        )
    expected = tree.pop(_DIGEST, None)
    # files of 0.1 have none, like those of DeePMD-kit; in files of 0.2.0 it is the last entry
    has_one = tree.get("software") == SOFTWARE and not str(
        tree.get("version")
    ).startswith("0.1.")
    if (has_one or expected is not None) and expected != _digest(tree):
        raise CheckpointError(
            f"{path}: damaged, its content is not what was written (another digest). Freeze the "
            "model again."
        )
    return tree


def _digest(tree: Tree) -> str:
    return content_digest(
        {name: part for name, part in tree.items() if name not in (_DIGEST, *_ADDED)}
    )


def packaged_text(tree: Tree) -> str:
    """Return ``tree`` with its digest as the JSON text of a ``.pt2`` file."""
    return json.dumps(
        _replaced({**tree, _DIGEST: _digest(tree)}, _as_lists), separators=(",", ":")
    )


def _replaced(
    value: Any, change: Callable[[Any], Any], is_variable: bool = False
) -> Any:
    """Return a copy in which ``change`` was applied to every leaf under ``@variables``."""
    if isinstance(value, dict) and "@is_variable" not in value:
        return {
            k: _replaced(v, change, is_variable or k == VARIABLES)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(v, change, is_variable) for v in value]
    return change(value) if is_variable and value is not None else value


def _write_hdf5(path: Path, tree: Tree) -> None:
    import h5py

    # in memory: HDF5 ends the process where a disk becomes full under an open file
    content = io.BytesIO()
    with h5py.File(content, "w") as file:

        def store(array: Any) -> str:
            name = f"/variable_{len(file):04d}"
            file.create_dataset(name, data=array)
            return name

        file.attrs["json"] = json.dumps(_replaced(tree, store), separators=(",", ":"))
    path.write_bytes(content.getvalue())


def _read_hdf5(path: Path) -> Any:
    import h5py

    with h5py.File(path, "r") as file:
        most = _MAX_COMPRESSION * path.stat().st_size

        def read(name: str) -> Any:
            if file[name].nbytes > most:
                raise CheckpointError(
                    f"{path}: damaged, {name} says that it is larger than the file can hold."
                )
            return file[name][()]

        if "json" not in file.attrs:
            raise CheckpointError(
                f"{path}: HDF5, but no model inside (no attribute json)."
            )
        return _replaced(json.loads(file.attrs["json"]), read)


def _write_yaml(path: Path, tree: Tree) -> None:
    import yaml

    with path.open("w", encoding="utf-8") as file:
        yaml.dump(
            _replaced(tree, _as_lists),
            file,
            getattr(yaml, "CSafeDumper", yaml.SafeDumper),
            sort_keys=False,
        )


def _as_lists(array: Any) -> Tree:
    array = np.asarray(array)
    return {**_ARRAY, "dtype": array.dtype.name, "value": array.tolist()}


def _as_array(lists: Tree) -> Any:
    return np.array(lists["value"], dtype=lists["dtype"])


@contextmanager
def opened_package(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a ``.pt2`` after a look at the names and sizes of its members.

    torch is going to unpack it.

    Raises:
        CheckpointError: if one has no place in a package.
    """
    with zipfile.ZipFile(path) as package:
        names = package.namelist()
        twice = [name for name, number in Counter(names).items() if number > 1]
        if twice:
            raise CheckpointError(
                f"{path}: damaged, it holds {show_text(twice[0])} twice. Freeze the model again."
            )
        outside = [
            name
            for name in names
            if name.startswith("/") or ".." in re.split(r"[/\\]", name)
        ]
        if outside:
            raise CheckpointError(
                f"{path}: its member {show_text(outside[0])} would be written outside of the "
                "folder into which torch unpacks the file, which no program that compiles models "
                "does. Do not use this file."
            )
        if (
            sum(member.file_size for member in package.infolist())
            > _MAX_COMPRESSION * path.stat().st_size
        ):
            raise CheckpointError(
                f"{path}: damaged, its members say that they are larger than the file can hold."
            )
        yield package


def _read_packaged(path: Path) -> Any:
    with opened_package(path) as package:
        return _replaced(json.loads(package.read(PACKAGED_TREE)), _as_array)


def _read_yaml(path: Path) -> Any:
    import yaml

    text = path.read_text(encoding="utf-8")
    # at least as many levels as the text has: by indentation and dashes, or by brackets
    indented = max(map(len, re.findall(r"^[ ?:-]*", text, re.MULTILINE)))
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    if indented + max(accumulate(steps), default=0) > _DEEPEST:
        raise CheckpointError(f"{path}: nested too deeply to be a model file.")
    tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    # with anchors, one value may stand in several places
    waiting, most = [tree], len(text) + 1
    while waiting and most >= 0:
        value = waiting.pop()
        inside = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            inside = ()
        most -= 1 + len(inside)
        waiting.extend(inside)
    if most < 0:
        raise CheckpointError(
            f"{path}: its anchors stand for more values than a model file of this length has."
        )
    return _replaced(tree, _as_array)


_READERS = {
    ".pt2": (_read_packaged, "a compiled"),
    ".yaml": (_read_yaml, "a YAML"),
    ".yml": (_read_yaml, "a YAML"),
}
