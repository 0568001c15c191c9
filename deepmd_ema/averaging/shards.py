"""A tensor that is averaged, and the shard of it that this process averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from deepmd_ema.dist.dtensor import from_local, full_tensor, local_shard, shard_like

if TYPE_CHECKING:
    from torch import Tensor


class Shard:
    """An averaged tensor with all its names, as the modules hold it.

    Attributes:
        names: at least one.
        parameter: the tensor as the optimizer sees it, or a buffer.
        local: the part of it that this process averages, the same memory; all of it when nothing is sharded.
    """

    def __init__(self, name: str, parameter: Tensor) -> None:
        self.names = [name]
        self.parameter = parameter
        self.local = local_shard(parameter)

    @property
    def is_sharded(self) -> bool:
        """Whether other processes average other parts of it."""
        return self.local is not self.parameter

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor."""
        return tuple(self.parameter.shape)

    def full_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local shard. A collective when sharded."""
        return full_tensor(from_local(part.detach(), self.parameter))

    def local_shard(self, full: Tensor) -> Tensor:
        """Return the local shard of ``full``, which every rank has."""
        return shard_like(full, self.parameter)

    def all_gather_into_param(self) -> None:
        """Bring what all ranks wrote to ``local`` into ``parameter``. A collective of a :class:`RangeShard`."""


class RangeShard(Shard):
    """A tensor that every process holds whole, of which each averages a range of elements.

    Args:
        shard: the tensor.
    """

    def __init__(self, shard: Shard) -> None:
        self.names, self.parameter = shard.names, shard.parameter
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._length = -(-shard.parameter.numel() // self._size)  # of the longest range
        self.local = self.local_shard(shard.parameter.detach().view(-1))  # a reshape may copy: then not live memory

    def full_tensor(self, part: Tensor) -> Tensor:
        """Return the tensor of which ``part`` is the local range. A collective."""
        if self._size == 1:
            return part.detach().view(self.shape)
        padded = part.new_zeros(self._length)  # all_gather needs parts of one size
        padded[: part.numel()] = part
        ranges = [torch.empty_like(padded) for _ in range(self._size)]
        dist.all_gather(ranges, padded)
        return torch.cat(ranges)[: self.parameter.numel()].view(self.shape)

    def local_shard(self, full: Tensor) -> Tensor:
        """Return the local range of ``full``."""
        return full.reshape(-1)[self._rank * self._length : (self._rank + 1) * self._length]

    @torch.no_grad()
    def all_gather_into_param(self) -> None:
        """Write the ranges of all ranks into the parameter. A collective."""
        if self._size > 1:
            self.parameter.copy_(self.full_tensor(self.local))
