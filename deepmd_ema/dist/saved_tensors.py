"""Copies of tensors in host memory as a rank saves them: whole, or the rows that it writes itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, TypeAlias

from torch import Tensor

from deepmd_ema.dist.dtensor import first_row, full_tensor, is_row_sharded, is_sharded, local_shard, rows_of
from deepmd_ema.tensors import HostCopies, RowShard

SMALL = 4096  # elements: rank 0 writes replicated tensors of fewer, which cost more to distribute than to write


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
