"""Maps between atoms and pairs whose sums have a fixed order.

No device adds atomically, so a restart is bitwise.

``neighbor`` names the atom in every slot, ``reverse`` the slots in which an atom is a neighbor.
With both, the two maps are each other's adjoint, so that on a GPU either one, its gradient and the
gradient of that only read::

    gather_neighbors(node)[i, k] = node[neighbor[i, k]], 0 where there is none
    sum_over_reverse(pair)[j]    = sum of pair[i, k] over the slots (i, k) that hold j

Both take ``(values, neighbor, reverse)`` of a `deepmd_ema.batch.Neighborhood`. Sums from pairs to
their own centres are plain sums over the dimension of the slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A atoms, K neighbor slots, M reverse slots, C channels


def gather_neighbors(node: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    """Return (A, K, C) from (A, C)."""
    if _adds_in_order(node) or not reverse.shape[1]:
        return _rows(node, neighbor)
    # written into the slots instead of read from the atoms: autograd derives a sum over `reverse`
    # from that, while the derivative of node[neighbor] would add atomically. Slots that no atom
    # writes keep 0; the last row is thrown away
    out = node.new_zeros(neighbor.numel() + 1, node.shape[1])
    out = out.index_put((reverse,), node.unsqueeze(1).expand(*reverse.shape, -1))
    return out[:-1].view(*neighbor.shape, node.shape[1])


def sum_over_reverse(pair: Tensor, neighbor: Tensor, reverse: Tensor) -> Tensor:
    """Return (A, C) from (A, K, C)."""
    if _adds_in_order(pair) or not reverse.shape[1]:
        # the last row takes the slots without a neighbor
        out = pair.new_zeros(reverse.shape[0] + 1, pair.shape[-1])
        return out.index_add(0, neighbor.flatten(), pair.flatten(0, 1))[:-1]
    # the derivative adds into slots, each of which is read once: its order does not matter
    return _rows(pair.flatten(0, 1), reverse).sum(1)


def _adds_in_order(x: Tensor) -> bool:
    """Return whether ``index_add`` has a fixed order, as on a CPU.

    ``reverse`` is then not needed.
    """
    return x.is_cpu and not torch.compiler.is_compiling()


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Return ``table[index]`` (..., C), zeros where the index is one past the end."""
    # index_select is 3 times faster than []
    padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
    return padded.index_select(0, index.flatten()).view(*index.shape, table.shape[1])
