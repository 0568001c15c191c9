"""Sharded tensors (FSDP2): the shard of this rank, the full tensor, and the way between them.

Every function takes plain tensors as well and returns them unchanged, so that callers need not ask.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only a shard of ``tensor``."""
    return isinstance(tensor, DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """Return the shard of ``tensor`` on this rank, sharing memory and detached; a plain tensor is returned itself."""
    # not to_local(): with gradients on, that one records an operation and returns another object each time
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return ``tensor`` gathered from all ranks. Every rank must call this if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """Return ``shard`` as a tensor that is sharded as ``like`` is, without communication."""
    if not isinstance(like, DTensor):
        return shard
    # shape and stride must be given: guessed from one shard they are wrong where shards differ in size
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of ``full``, which every rank holds, cut as ``like`` is; without communication."""
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    replicated = DTensor.from_local(full.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, like.placements).to_local()
