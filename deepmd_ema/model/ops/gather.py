"""Maps between atoms and pairs whose sums have a fixed order: no device adds atomically, so a restart is bitwise.

``neighbor`` names the atom in every slot, ``reverse`` the slots in which an atom stands as a neighbor. With both, the
two maps are each other's adjoint, so that either one, its gradient and the gradient of that only read::

    gather_neighbors(node)[i, k] = node[neighbor[i, k]], 0 where there is none
    sum_over_reverse(pair)[j]    = sum of pair[i, k] over the slots (i, k) that hold j

Both take ``(values, neighbor, reverse)`` of a `deepmd_ema.batch.Neighborhood`. Sums from pairs to their own centres are
plain sums over the dimension of the slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepmd_ema.model.ops.twin import Kernel, applied

# A atoms, K neighbor slots, M reverse slots, C channels


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        return _rows(node, neighbor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # separate, as torch.func needs it
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_pair: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad_pair, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
        return _rows(pair.flatten(0, 1), reverse).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_node: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad_node, *ctx.saved_tensors), None, None


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]``, zeros where the index is one past the end (index_select is 3 times faster than [])."""
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    return padded.index_select(0, index.flatten()).view(*index.shape, table.shape[1])


def _plain_gather(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    # written into the slots instead of read from the atoms: autograd derives a sum over `reverse` from that, while the
    # derivative of node[neighbor] would add atomically. Slots that no atom writes keep 0; the last row is thrown away
    out = node.new_zeros(neighbor.numel() + 1, node.shape[1])
    out = out.index_put((reverse,), node.unsqueeze(1).expand(*reverse.shape, -1))
    return out[:-1].view(*neighbor.shape, node.shape[1])


def _plain_sum(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    # the derivative adds into slots, each of which is read once: its order does not matter
    return _rows(pair.flatten(0, 1), reverse).sum(1)


def _exported_gather(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    return _rows(node, neighbor)


def _exported_sum(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    # adds to the atoms instead of reading from the slots: only the length of `reverse` is asked for
    out = pair.new_zeros(reverse.shape[0] + 1, pair.shape[-1])
    return out.index_add(0, neighbor.flatten(), pair.flatten(0, 1))[:-1]


gather_neighbors = Kernel("gather_neighbors", applied(_Gather), _plain_gather, _exported_gather)
sum_over_reverse = Kernel("sum_over_reverse", applied(_Sum), _plain_sum, _exported_sum)
