"""The sum over pairs of neighbors of a network of their angle and elements, and its gradient.

It is written out.

With the scalar products ``c_jk = R_j . R_k`` of an atom and the embeddings E of the elements of its
neighbors::

    D = sum_jk c_jk G(c_jk, E_j, E_k)

The gradient by c is ``G + c dG/dc`` times that of D: an ordinary function of the parameters,
because the derivative of the network is carried through its layers with the value. The elements
enter the first layer as one term for each element of j and one for each element of k, so that no
pair has its own copy of their embeddings.

Only pairs of two neighbors are evaluated, not those with an empty slot. Channels come first and
pairs last: the layers are narrow, and so each operation goes along many pairs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops import reference

# A atoms, J and K neighbor slots, P pairs of neighbors, T types, E numbers of a type embedding, M
# channels of a layer


def triple_sums_and_vjp(
    products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """Return D (A, M), and a function from its gradient to that by ``products``.

    It is written out if G is of tanh layers.

    Args:
        products: (A, K, K), the c.
        types: (A, K) of the neighbors.
        mask: (A, K) bool, where there is a neighbor.
        table: (T, E) type embeddings.
        net: G.
    """
    if not net.is_tanh:
        return reference.triple_sums_and_vjp(products, types, mask, table, net)
    start, *later = net.layers
    shape = products.shape
    # picked, not masked: a slot without a neighbor would cost the net as much as one with two
    place = (mask[:, :, None] & mask[:, None]).view(-1).nonzero().squeeze(1)
    atom = place.div(max(1, shape[1] * shape[2]), rounding_mode="floor")
    # (P,) elements of j and of k of each pair
    kinds = [
        t.expand(shape).reshape(-1).index_select(0, place)
        for t in (types[:, :, None], types[:, None])
    ]
    c = products.reshape(-1).index_select(0, place)
    c_weight, *element_weights = start.weight.split([1, table.shape[1], table.shape[1]])
    first, second = (table @ weight for weight in element_weights)  # (T, M)
    # index_select is differentiated by an addition in the order of the pairs, with any number of
    # threads
    z = (first + start.bias).T.index_select(1, kinds[0]) + second.T.index_select(
        1, kinds[1]
    )
    value = torch.addr(z, c_weight[0], c).tanh()
    # (M, P), the derivative by c
    slope = torch.ops.aten.tanh_backward(c_weight.T.expand_as(value), value)
    for layer in later:
        y = torch.addmm(layer.bias[:, None], layer.weight.T, value).tanh()
        dy = torch.ops.aten.tanh_backward(layer.weight.T @ slope, y)
        if layer.copies:
            y = y + torch.cat([value] * layer.copies)
            dy = dy + torch.cat([slope] * layer.copies)
        value = y
        slope = dy
    slopes = torch.addcmul(value, slope, c)  # d(c G)/dc

    def vjp(grad: Tensor) -> tuple[Tensor]:
        by_c = (grad.T.index_select(1, atom) * slopes).sum(0)
        return (
            by_c.new_zeros(products.numel()).index_copy(0, place, by_c).view(shape),
        )

    return value.new_zeros(len(value), shape[0]).index_add(1, atom, value * c).T, vjp
