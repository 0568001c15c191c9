"""Sharded tensors (FSDP2): the shard of this rank, the full tensor, the way between them, and what a rank saves.

Every function takes plain tensors as well and returns them unchanged, so that callers need not ask.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from deepmd_ema.distributed.tensors import HostCopies, RowShard, StoredTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SMALL = 4096  # elements: rank 0 writes replicated tensors of fewer, which cost more to distribute than to write


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether each rank holds only a shard of ``tensor``."""
    # not imported: that takes half a second, and before somebody has done it there is no sharded tensor
    # another thread, which writes a sharded checkpoint, may be importing it: then it has no DTensor yet
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of ``tensor`` on this rank, sharing memory and detached; a plain tensor is returned itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():  # with gradients on, it records an operation and returns another object each time
        return tensor.to_local()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` gathered from all ranks, in memory of its own. Every rank must call this if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    mesh = tensor.device_mesh
    if not is_row_sharded(tensor):  # what an operation on shards returned, as a norm
        return tensor.full_tensor().clone()  # where it is the same on all ranks, it is the local one
    # DTensor's own way takes twice as long: most of it is bookkeeping, and the tensors of a model are small
    return all_gather_rows(local_shard(tensor).detach(), tensor.shape[0], mesh.size(), mesh.get_group())


def all_gather_rows(part: Tensor, rows: int, size: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the parts of all ranks, one after the other along dim 0. A collective.

    Args:
        part: rows of this rank, cut as ``torch.chunk`` does: equally many on all ranks but the last ones.
        rows: of all ranks together.
        size: number of ranks.
        group: of these ranks; the default group if None.
    """
    longest = -(-rows // size)
    if len(part) < longest:  # all_gather needs parts of one size
        padded = part.new_zeros(longest, *part.shape[1:])
        padded[: len(part)] = part
        part = padded
    whole = part.new_empty(size * longest, *part.shape[1:])
    dist.all_gather(list(whole.chunk(size)), part.contiguous(), group=group)
    return whole[:rows]


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """Return ``shard`` as a tensor that is sharded as ``like`` is, without communication."""
    if not is_sharded(like):
        return shard
    from torch.distributed.tensor import DTensor

    # shape and stride must be given: guessed from one shard they are wrong where shards differ in size
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def is_row_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds rows of ``tensor``, as FSDP2 shards parameters."""
    if not is_sharded(tensor):
        return False
    from torch.distributed.tensor import Shard

    return tuple(tensor.placements) == (Shard(0),)


def first_row(tensor: Tensor) -> int:
    """Return the number of the first row that this rank holds of a row-sharded tensor."""
    assert is_sharded(tensor)
    return rows_of(tensor.shape[0], tensor.device_mesh.get_local_rank(), tensor.device_mesh.size())[0]


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first row of a rank and how many it has, cut as ``torch.chunk`` does."""
    longest = -(-rows // size)
    first = min(rank * longest, rows)
    return first, min(longest, rows - first)


def shard_like(full: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, cut as ``like`` is; without communication.

    Args:
        full: a tensor that every rank holds, or one on the disk, of which only this shard is read.
        like: a tensor of that shape, sharded or not.
    """
    if isinstance(full, StoredTensor):
        if is_row_sharded(like):
            return full.read(first_row(like), len(local_shard(like)))
        full = full.whole()
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    replicated = DTensor.from_local(full.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, like.placements).to_local()


@dataclass(frozen=True)
class WholeTensors:
    """Copies whole tensors to host memory. Every rank must call it, for the same tensors, where they are sharded.

    Attributes:
        copies: makes the copies of what is not gathered; None: it is returned itself.
        keep: whether this rank wants the result; else it takes part in collectives only and gets None.
    """

    copies: HostCopies | None = field(default_factory=partial(HostCopies, wait=True))
    keep: bool = True

    def __call__(self, tensor: Tensor) -> Tensor | None:
        """Return the whole of ``tensor``."""
        whole = full_tensor(tensor)
        if not self.keep:
            return None
        if is_sharded(tensor):
            return whole.cpu()  # one after the other: no device holds the whole model at once
        return whole if self.copies is None else self.copies(whole)

    def owned(self, tensor: Tensor) -> Tensor:
        """Return all of a tensor that only this rank holds, complete, so that it can be sent."""
        return tensor.to("cpu", copy=True)


@dataclass(frozen=True)
class OwnRows:
    """Copies the rows of tensors that this rank writes into a sharded checkpoint to host memory.

    Of a tensor that is sharded these are the rows that the rank holds, without communication. Rows of one that every
    rank holds are distributed evenly over the ranks.

    Attributes:
        rank: of this process.
        size: number of processes.
        copies: makes the copies.
    """

    keep: ClassVar[bool] = True  # every rank writes
    rank: int
    size: int
    copies: HostCopies

    def __call__(self, tensor: Tensor) -> RowShard | Tensor:
        """Return the rows of this rank, or all of a small tensor that every rank holds.

        Args:
            tensor: sharded as FSDP2 does it, or the same on all ranks.
        """
        if is_row_sharded(tensor):
            return RowShard(self.copies(local_shard(tensor)), first_row(tensor), tuple(tensor.shape))
        found = full_tensor(tensor).detach()
        if found.numel() <= SMALL:
            return self.copies(found)
        first, count = rows_of(found.shape[0], self.rank, self.size)
        rows = found[first : first + count]
        return RowShard(self.copies(rows), first, tuple(found.shape))

    def owned(self, tensor: Tensor) -> RowShard:
        """Return all of a tensor that only this rank holds."""
        return RowShard(self.copies(tensor), 0, tuple(tensor.shape))


Take: TypeAlias = WholeTensors | OwnRows
"""What a rank saves of a tensor."""
