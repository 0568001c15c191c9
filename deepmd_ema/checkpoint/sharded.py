"""Sharded checkpoints: a folder with a head, the plain values and small tensors, and shards.

Shards are written and read by torch.distributed.checkpoint; each rank writes the rows that it
holds.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from enum import EnumMeta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from deepmd_ema.checkpoint.file import SHARDS, DamagedError, read_archive, write_archive
from deepmd_ema.config.outputs import HEAD
from deepmd_ema.distributed.tensors import RowShard, StoredTensor
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError
from deepmd_ema.files import file_digest, part_of, remove, replace_folder, sweep
from deepmd_ema.text import first_few

_BETWEEN = "/"  # names of a path in the tree; none of them contains it
TABLE = ".metadata"  # places of the rows of each tensor, a pickle of torch
# objects that such a pickle may refer to, beside precisions and the classes of its own module
_TABLE_OBJECTS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


def write_folder(path: Path, payload: Mapping[str, Any], world: World) -> None:
    """Write ``payload`` to the folder ``path``, which appears when it is complete.

    Every rank must call this.

    Args:
        path: the folder; what is there is replaced.
        payload: as for :func:`deepmd_ema.checkpoint.file.save`, with
            :class:`~deepmd_ema.distributed.tensors.RowShard` in place of tensors that are
            distributed over the ranks; everything else is that of rank 0.
        world: the processes of the run, with a group that nobody else uses meanwhile.

    Raises:
        CheckpointError: if a rank cannot see the folder that rank 0 has made.
    """
    shards: dict[str, RowShard] = {}
    aliases: dict[str, str] = {}
    content = _without_shards(payload, shards, aliases)
    # Written under another name, and moved by rank 0 when every file is on the disk: a kill leaves
    # the old folder.
    part = world.broadcast_from_rank0(partial(_make_part, path))
    try:
        # a folder on the disk of one machine is a common mistake, and torch would write half of the
        # checkpoint to each
        with world.all_ranks_ok():
            if not part.is_dir():
                raise CheckpointError(
                    f"{path}: rank {world.rank} does not see the folder that rank 0 writes it to. "
                    "A sharded checkpoint "
                    "needs a folder that all ranks share (training.save_dir); without one set "
                    'training.checkpoint_format to "gathered".'
                )
        files = _write_shards(part, shards, world)
        # The head comes last: a folder without it is incomplete. It has the digests of all files
        # with shards, and a digest of itself.
        head = {**content, SHARDS: {"files": files, "aliases": aliases}}
        with world.all_ranks_ok():
            if world.is_main:
                write_archive(part / HEAD, head)
                replace_folder(part, path)
    except BaseException:
        if world.is_main:
            remove(part)
        raise


def read_folder(path: Path, share: tuple[int, int]) -> dict[str, Any]:
    """Return the content of a sharded checkpoint with the tensors of its shards left on the disk.

    Args:
        path: the folder.
        share: number k and n of the processes that read it together: this one checks the bytes of
            every n-th file from the k-th on, and the head.

    Raises:
        CheckpointError: if a file cannot be read.
        DamagedError: if a file is missing, or its bytes are not those that were written.
    """
    if not (path / HEAD).is_file():
        raise DamagedError(
            f"incomplete: {HEAD} is missing, with which a run ends a sharded checkpoint"
        )
    try:
        content = read_archive(path / HEAD)
    except DamagedError as error:
        raise DamagedError(f"{HEAD}: {error}") from error
    if not isinstance(content, dict) or SHARDS not in content:
        raise DamagedError(f"{HEAD} is not the head of a sharded checkpoint")
    table = content.pop(SHARDS)  # digests of the files, and names that share a tensor
    files = table["files"]
    if missing := [name for name in sorted(files) if not (path / name).is_file()]:
        raise DamagedError(
            f"incomplete: {first_few(missing, 8)} missing, of {len(files)} files with shards. "
            "Copy the whole folder"
        )
    # a digest takes a second per gigabyte: each process checks its part of the files
    for name in sorted(files)[share[0] :: share[1]]:
        if file_digest(path / name) != files[name]:
            raise DamagedError(f"{name} is not what was written (another digest)")
    tensors = _stored_tensors(path)
    # a tensor is stored under the first of its names
    names = {name: name for name in tensors} | table["aliases"]
    # The head is that of rank 0. It has None in the place of a shard, and lacks moments that only
    # another rank holds (zero_stage 1): setdefault() makes the containers of those.
    for name, stored in names.items():
        if stored not in tensors:
            raise DamagedError(f"the rows of {stored} are missing")
        *above, last = name.split(_BETWEEN)
        parent: Any = content
        for key in above:
            parent = (
                parent[int(key)]
                if isinstance(parent, list)
                else parent.setdefault(key, {})
            )
        parent[int(last) if isinstance(parent, list) else last] = tensors[stored]
    return content


def _make_part(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)  # what a killed run has left may be as large as a checkpoint
    part = part_of(path)
    part.mkdir()
    return part


def _without_shards(
    tree: Any, shards: dict[str, RowShard], aliases: dict[str, str]
) -> Any:
    """Return ``tree`` with None in place of every shard.

    Args:
        tree: nested containers.
        shards: is filled with the shards by their places in the tree, such as ``model/weight``.
        aliases: is filled with the first place of a shard by each of its other places.
    """
    seen: dict[Any, str] = {}

    def strip(value: Any, place: tuple[str, ...]) -> Any:
        if isinstance(value, RowShard):
            # an empty tensor has no rows that a rank could write
            if not torch.Size(value.shape).numel():
                return torch.empty(value.shape, dtype=value.part.dtype)
            name = _BETWEEN.join(place)
            # HostCopies has one copy of a tensor that has several names
            key = (id(value.part), value.shape)
            if key in seen:
                aliases[name] = seen[key]
            else:
                seen[key] = name
                shards[name] = value
            return None
        if isinstance(value, Mapping):
            return {key: strip(each, (*place, str(key))) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(
                strip(each, (*place, str(k))) for k, each in enumerate(value)
            )
        return value

    return strip(tree, ())


def _write_shards(
    folder: Path, shards: Mapping[str, RowShard], world: World
) -> dict[str, str]:
    """Write the rows of all ranks into ``folder``. Every rank must call this.

    Args:
        folder: is there already, and is seen by every rank.
        shards: by name; those of this rank.
        world: the processes of the run.

    Returns:
        On rank 0 the SHA-256 of every file by its name; nothing on other ranks.
    """
    # The steps of torch.distributed.checkpoint.save(), which would use the default group: here the
    # ranks meet in the group of the writing threads. All is in host memory: no copies ahead.
    rows = _RowPlanner(shards)
    storage = _Writer(folder, per_thread_copy_ahead=0)
    with world.all_ranks_ok():
        storage.set_up_storage_writer(world.is_main)
        plan = storage.prepare_local_plan(rows.create_local_plan())
    plans = world.gather(plan)

    # the plan of all ranks: files and rows of each
    def plan_together() -> tuple[list[planner.SavePlan], metadata.Metadata]:
        together, table = rows.create_global_plan(plans)
        return storage.prepare_global_plan(together), table

    plans, table = world.broadcast_from_rank0(plan_together)
    plan = rows.finish_plan(plans[world.rank])
    with world.all_ranks_ok():
        # torch before 2.11 warns of a call of its own, in threads where warnings cannot be caught
        warnings.filterwarnings(
            "ignore", "TypedStorage is deprecated", UserWarning, r"torch\.distributed"
        )
        results = storage.write_data(plan, rows).wait()
        # each rank reads its own files again, which are in its cache
        names = {result.storage_data.relative_path for result in results}
        digests = {name: file_digest(folder / name) for name in names}
    written = world.gather((results, digests))
    with world.all_ranks_ok():
        if not world.is_main:
            return {}
        # writes the table, by which a reader finds the rows of any rank
        storage.finish(table, [results for results, _ in written])
        files = {
            name: digest for _, digests in written for name, digest in digests.items()
        }
        return {**files, TABLE: file_digest(folder / TABLE)}


class _Writer(dcp.FileSystemWriter):
    """Writes the same bytes for the same content."""

    def storage_meta(self) -> None:
        """Return nothing: torch would store the half-written folder's path and a random number."""


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in ``folder`` by name, with its rows left on the disk.

    Raises:
        DamagedError: if the table of the tensors is not one.
    """
    try:
        with (folder / TABLE).open("rb") as file:
            table = _TableUnpickler(file).load()
        assert isinstance(table, metadata.Metadata)
        storage = dcp.FileSystemReader(folder)
        storage.set_up_storage_reader(table, is_coordinator=True)
        infos = table.state_dict_metadata
        return {
            name: StoredTensor(
                info.size,
                info.properties.dtype,
                partial(_read_rows, storage, name, info),
            )
            for name, info in infos.items()
            if isinstance(info, metadata.TensorStorageMetadata)
        }
    # a fault of the machine is not one of the file
    except (OSError, MemoryError):
        raise
    # a pickle that was changed can fail in any way
    except Exception as error:
        raise DamagedError(
            f"{TABLE} is not the table of its tensors ({type(error).__name__})"
        ) from error


def _read_rows(
    storage: dcp.FileSystemReader,
    name: str,
    info: metadata.TensorStorageMetadata,
    first: int,
    count: int,
) -> Tensor:
    # a scalar has no rows: all of it is read
    target = torch.empty(
        (count, *info.size[1:]) if info.size else (), dtype=info.properties.dtype
    )
    offsets = torch.Size((first, *(0 for _ in info.size[1:])) if info.size else ())
    # torch finds the files that have these rows, however the ranks that wrote them had cut them
    chunk = metadata.ChunkStorageMetadata(offsets=offsets, sizes=target.size())
    plan = planner.LoadPlan(create_read_items_for_chunk_list(name, info, [chunk]))
    storage.read_data(plan, _RowLoader(target)).wait()
    return target


class _RowPlanner(dcp.DefaultSavePlanner):
    """Plans to write rows of tensors, by name."""

    def __init__(self, shards: Mapping[str, RowShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = shards

    def create_local_plan(self) -> planner.SavePlan:
        items = []
        # a rank may have no rows of a tensor with fewer rows than there are ranks
        for name, shard in self._shards.items():
            if shard.part.numel():
                offsets = torch.Size(
                    (shard.first, *(0 for _ in shard.shape[1:])) if shard.shape else ()
                )
                chunk = metadata.ChunkStorageMetadata(
                    offsets=offsets, sizes=shard.part.size()
                )
                properties = metadata.TensorProperties.create_from_tensor(shard.part)
                data = planner.TensorWriteData(
                    chunk=chunk, properties=properties, size=torch.Size(shard.shape)
                )
                index = metadata.MetadataIndex(name, offsets)
                kind = planner.WriteItemType.SHARD
                items.append(
                    planner.WriteItem(index=index, type=kind, tensor_data=data)
                )
        self.plan = planner.SavePlan(items)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Tensor:
        return self._shards[index.fqn].part


class _RowLoader(dcp.DefaultLoadPlanner):
    """Has rows of one tensor read into ``target``."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: metadata.MetadataIndex) -> Tensor:
        return self._target


class _TableUnpickler(pickle.Unpickler):
    """Refuses every object that is not part of a table: a pickle could run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == metadata.__name__:
            kind = getattr(metadata, name, None)
            # defined there, not imported
            if isinstance(kind, type) and kind.__module__ == module:
                return kind
        if name in _TABLE_OBJECTS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration of torch."""
    # Python 3.11.0 to 3.11.3 pickles it as an attribute of its class; this can go when a file of
    # these versions need not be read
    if (
        isinstance(kind, EnumMeta)
        and kind.__module__ == metadata.__name__
        and name in kind.__members__
    ):
        return kind[name]
    raise pickle.UnpicklingError(f"attribute {name!r} of {kind!r}")
