"""Sharded checkpoints: a folder with one file of plain values and small tensors, and the shards of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepmd_ema.checkpoint.archive import DamagedError, read_archive, write_archive
from deepmd_ema.config.outputs import HEAD
from deepmd_ema.dist.world import World
from deepmd_ema.errors import CheckpointError, first_few
from deepmd_ema.files import file_digest, part_of, remove, replace_folder, sweep
from deepmd_ema.tensors import RowShard, StoredTensor

SHARDS = "shards"  # in it: the files of the shards, and the tensors that are there under another name
_BETWEEN = "/"  # names of a path in the tree; none of them contains it


def write_folder(path: Path, payload: Mapping[str, Any], world: World) -> None:
    """Write ``payload`` to the folder ``path``, which appears when it is complete. Every rank must call this.

    Args:
        path: the folder; what is there is replaced.
        payload: as :func:`deepmd_ema.checkpoint.save` takes it, with :class:`~deepmd_ema.tensors.RowShard` in place of
            tensors that are distributed over the ranks; everything else is that of rank 0.
        world: the processes of the run, with a group that nobody else uses meanwhile.

    Raises:
        CheckpointError: if a rank cannot see the folder that rank 0 has made.
    """
    shards: dict[str, RowShard] = {}
    aliases: dict[str, str] = {}
    content = _without_shards(payload, shards, aliases)
    part = world.broadcast_from_rank0(partial(_make_part, path))
    try:
        with world.all_ranks_ok():
            if not part.is_dir():
                raise CheckpointError(
                    f"{path}: rank {world.rank} does not see the folder that rank 0 writes it to. A sharded checkpoint "
                    "needs a folder that all ranks share (training.save_dir); without one set "
                    'training.checkpoint_format to "gathered".'
                )
        files = _dcp().write_shards(part, shards, world)
        head = {**content, SHARDS: {"files": files, "aliases": aliases}}
        with world.all_ranks_ok():
            if world.is_main:
                write_archive(part / HEAD, head)
                replace_folder(part, path)
    except BaseException:
        if world.is_main:
            remove(part)
        raise


def read_folder(path: Path, share: tuple[int, int] | None = (0, 1)) -> dict[str, Any]:
    """Return the content of a sharded checkpoint with the tensors of its shards left on the disk.

    Args:
        path: the folder.
        share: number k and n of the processes that read it together: this one checks the bytes of every n-th file from
            the k-th on, and the head. None: of no file but the head.

    Raises:
        CheckpointError: if a file cannot be read.
        DamagedError: if a file is missing, or its bytes are not those that were written.
    """
    if not (path / HEAD).is_file():
        raise DamagedError(f"incomplete: {HEAD} is missing, with which a run ends a sharded checkpoint")
    try:
        content = read_archive(path / HEAD)
    except DamagedError as error:
        raise DamagedError(f"{HEAD}: {error}") from error
    if not isinstance(content, dict) or SHARDS not in content:
        raise DamagedError(f"{HEAD} is not the head of a sharded checkpoint")
    found = content.pop(SHARDS)
    _check_files(path, found["files"], share)
    tensors = _dcp().stored_tensors(path)
    names = {name: name for name in tensors} | found["aliases"]
    for name, stored in names.items():
        if stored not in tensors:
            raise DamagedError(f"the rows of {stored} are missing")
        _put(content, name.split(_BETWEEN), tensors[stored])
    return content


def _dcp() -> Any:
    # half a second to import, and no other checkpoint needs it
    from deepmd_ema.checkpoint import shards

    return shards


def _make_part(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    part = part_of(path)
    part.mkdir()
    return part


def _check_files(path: Path, files: Mapping[str, str], share: tuple[int, int] | None) -> None:
    missing = [name for name in sorted(files) if not (path / name).is_file()]
    if missing:
        raise DamagedError(
            f"incomplete: {first_few(missing, 8)} missing, of {len(files)} files with shards. Copy the whole folder"
        )
    first, step = (len(files), 1) if share is None else share
    for name in sorted(files)[first::step]:
        if file_digest(path / name) != files[name]:
            raise DamagedError(f"{name} is not what was written (another digest)")


def _without_shards(tree: Any, shards: dict[str, RowShard], aliases: dict[str, str]) -> Any:
    """Return ``tree`` with None in place of every shard, which is entered by its place; one of two places once."""
    seen: dict[Any, str] = {}

    def strip(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, RowShard):
            if not torch.Size(value.shape).numel():
                return torch.empty(value.shape, dtype=value.part.dtype)  # has no rows that a rank could write
            name, key = _BETWEEN.join(place), (id(value.part), value.shape)
            if key in seen:
                aliases[name] = seen[key]
            else:
                seen[key] = name
                shards[name] = value
            return None
        if isinstance(value, Mapping):
            return {key: strip(each, (*place, str(key))) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(strip(each, (*place, str(k))) for k, each in enumerate(value))
        return value

    return strip(tree, ())


def _put(content: dict[str, Any], place: list[str], tensor: StoredTensor) -> None:
    *above, name = place
    parent: Any = content
    for key in above:
        parent = parent[int(key)] if isinstance(parent, list) else parent.setdefault(key, {})
    parent[int(name) if isinstance(parent, list) else name] = tensor
