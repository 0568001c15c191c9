"""Maps between atoms and pairs whose sums have a fixed order: no device adds atomically, so a restart is bitwise.

``neighbor`` names the atom in every slot, ``reverse`` the slots in which an atom is a neighbor. With both, the
two maps are each other's adjoint, so that either one, its gradient and the gradient of that only read::

    gather_neighbors(node)[i, k] = node[neighbor[i, k]], 0 where there is none
    sum_over_reverse(pair)[j]    = sum of pair[i, k] over the slots (i, k) that hold j

Both take ``(values, neighbor, reverse)`` of a `deepmd_ema.batch.Neighborhood`. Sums from pairs to their own centres are
plain sums over the dimension of the slots.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# A atoms, K neighbor slots, M reverse slots, C channels


def gather_neighbors(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    """Return (A, K, C) from (A, C)."""
    if not reverse.shape[1]:  # a batch made inside of an exported graph, which has no backward pass
        return _rows(node, neighbor)
    if not torch.compiler.is_compiling():
        return cast("Tensor", _Gather.apply(node, neighbor, reverse))
    # written into the slots instead of read from the atoms: autograd derives a sum over `reverse` from that, while the
    # derivative of node[neighbor] would add atomically. Slots that no atom writes keep 0; the last row is thrown away
    out = node.new_zeros(neighbor.numel() + 1, node.shape[1])
    out = out.index_put((reverse,), node.unsqueeze(1).expand(*reverse.shape, -1))
    return out[:-1].view(*neighbor.shape, node.shape[1])


def sum_over_reverse(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    """Return (A, C) from (A, K, C)."""
    if not reverse.shape[1]:
        out = pair.new_zeros(reverse.shape[0] + 1, pair.shape[-1])
        return out.index_add(0, neighbor.flatten(), pair.flatten(0, 1))[:-1]
    if not torch.compiler.is_compiling():
        return cast("Tensor", _Sum.apply(pair, neighbor, reverse))
    # the derivative adds into slots, each of which is read once: its order does not matter
    return _summed(pair, reverse)


class _Gather(torch.autograd.Function):
    """``gather_neighbors`` with ``sum_over_reverse`` as its derivative, of which no zeros are written."""

    @staticmethod
    def forward(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        """Return (A, K, C) from (A, C)."""
        return _rows(node, neighbor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the maps."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by the atoms."""
        return cast("Tensor", _Sum.apply(grads[0], *ctx.saved_tensors)), None, None


class _Sum(torch.autograd.Function):
    """``sum_over_reverse`` with ``gather_neighbors`` as its derivative."""

    @staticmethod
    def forward(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        """Return (A, C) from (A, K, C)."""
        return _summed(pair, reverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the maps."""
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient by the slots."""
        return cast("Tensor", _Gather.apply(grads[0], *ctx.saved_tensors)), None, None


def _summed(pair: Tensor, reverse: Tensor) -> Tensor:
    found = _rows(pair.flatten(0, 1), reverse)
    return found.squeeze(1) if reverse.shape[1] == 1 else found.sum(1)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]``, zeros where the index is one past the end (index_select is 3 times faster than [])."""
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    return padded.index_select(0, index.flatten()).view(*index.shape, table.shape[1])
