"""Tensors of many ranks in one folder, each written by the ranks that hold its rows (torch.distributed.checkpoint)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from enum import EnumMeta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    metadata,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from deepmd_ema.checkpoint.archive import DamagedError
from deepmd_ema.dist.world import World
from deepmd_ema.files import file_digest
from deepmd_ema.tensors import RowShard, StoredTensor

TABLE = ".metadata"  # where the rows of each tensor are, a pickle of torch
_OF_A_TABLE = {  # what such a pickle may refer to, beside precisions and the classes of torch that make it up
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}


def write_shards(folder: Path, shards: Mapping[str, RowShard], world: World) -> dict[str, str]:
    """Write the rows of all ranks into ``folder``. Every rank must call this.

    Args:
        folder: is there already, and is seen by every rank.
        shards: by name; those of this rank.
        world: the processes of the run.

    Returns:
        On rank 0 the SHA-256 of every file by its name; nothing on other ranks.
    """
    planner, storage = _RowPlanner(shards), _Writer(folder, per_thread_copy_ahead=0)
    with world.all_ranks_ok():
        storage.set_up_storage_writer(world.is_main)
        plan = storage.prepare_local_plan(planner.create_local_plan())
    plans, table = world.gather(plan), None
    with world.all_ranks_ok():
        if world.is_main:
            plans, table = planner.create_global_plan(plans)
            plans = storage.prepare_global_plan(plans)
    plan = planner.finish_plan(world.scatter(plans))
    with world.all_ranks_ok():
        results = storage.write_data(plan, planner).wait()
        digests = {name: file_digest(folder / name) for name in {r.storage_data.relative_path for r in results}}
    written = world.gather((results, digests))
    with world.all_ranks_ok():
        if not world.is_main:
            return {}
        assert table is not None
        storage.finish(table, [found for found, _ in written])
        files = {name: digest for _, own in written for name, digest in own.items()}
        return {**files, TABLE: file_digest(folder / TABLE)}


class _Writer(FileSystemWriter):
    """Writes the same bytes for the same content."""

    def storage_meta(self) -> None:
        """Return nothing: it would be the path of the half-written folder, and a number drawn for each writer."""


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor in ``folder`` by name, with its rows left on the disk.

    Raises:
        DamagedError: if the table of the tensors is not one.
    """
    try:
        with (folder / TABLE).open("rb") as file:
            table = _TableUnpickler(file).load()
        assert isinstance(table, Metadata)
        storage = FileSystemReader(folder)
        storage.set_up_storage_reader(table, is_coordinator=True)
        infos = table.state_dict_metadata
        return {
            name: StoredTensor(info.size, info.properties.dtype, partial(_read_rows, storage, name, info))
            for name, info in infos.items()
            if isinstance(info, TensorStorageMetadata)
        }
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a pickle that was changed can fail in any way
        raise DamagedError(f"{TABLE} is not the table of its tensors ({type(error).__name__})") from error


def _read_rows(storage: FileSystemReader, name: str, info: TensorStorageMetadata, first: int, count: int) -> Tensor:
    target = torch.empty((count, *info.size[1:]) if info.size else (), dtype=info.properties.dtype)
    offsets = torch.Size((first, *(0 for _ in info.size[1:])) if info.size else ())
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=target.size())
    plan = LoadPlan(create_read_items_for_chunk_list(name, info, [chunk]))
    storage.read_data(plan, _RowLoader(target)).wait()
    return target


class _RowPlanner(DefaultSavePlanner):
    """Plans to write rows of tensors, by name."""

    def __init__(self, shards: Mapping[str, RowShard]) -> None:
        super().__init__(flatten_state_dict=False)
        self._shards = shards

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, shard) for name, shard in self._shards.items() if shard.part.numel()]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._shards[index.fqn].part


class _RowLoader(DefaultLoadPlanner):
    """Has rows of one tensor read into ``target``."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target


class _TableUnpickler(pickle.Unpickler):
    """Refuses every object that is not part of a table: a pickle could run any program."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == metadata.__name__:
            found = getattr(metadata, name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if name in _OF_A_TABLE.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration of torch: Python 3.11.0 to 3.11.3 pickles it as an attribute of its class."""
    if isinstance(kind, EnumMeta) and kind.__module__ == metadata.__name__ and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"attribute {name!r} of {kind!r}")


def _write_item(name: str, shard: RowShard) -> WriteItem:
    offsets = torch.Size((shard.first, *(0 for _ in shard.shape[1:])) if shard.shape else ())
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=shard.part.size())
    properties = TensorProperties.create_from_tensor(shard.part)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(shard.shape))
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)
