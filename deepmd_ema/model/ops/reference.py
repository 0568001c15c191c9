"""The reference operations of descriptors, in plain torch, and derivatives by ``torch.func``.

Every function here returns new tensors. This is the code that is compiled, exported, differentiated
by ``torch.func`` or twice. :mod:`deepmd_ema.model.ops.cpu` has what is faster in eager mode
on a CPU or a GPU, and :mod:`deepmd_ema.model.ops.operations` selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from deepmd_ema.model.nn.activation import Activation
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.nn.type_embedding import pick

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, M channels of a pair, X axis channels, N inputs and C columns


@dataclass(frozen=True)
class Moments:
    """``sum_k rows[k, c] G(s_k)`` over the neighbors of each atom, s = rows[..., 0], and its vjp.

    Attributes:
        rows: (A, K, 4) normalised environment matrix in the precision of the net, a constant.
        value: (A, 4, M), a function of the parameters of the net.
        jet: (A, 2, K, M), G and dG/ds at ``rows[..., 0]``, functions of its parameters.
    """

    rows: Tensor
    value: Tensor
    jet: Tensor

    def vjp(self, grad_moments: Tensor) -> Tensor:
        """Return the gradient by the rows (A, K, 4), also through s, from that by the moments."""
        # (A, 2, K, 4): G and dG/ds times the gradient
        both = torch.bmm(self.jet.flatten(1, 2), grad_moments.transpose(1, 2))
        both = both.view(*self.jet.shape[:3], 4)
        through_s = (both[:, 1] * self.rows).sum(-1, keepdim=True)
        return torch.cat([both[:, 0, :, :1] + through_s, both[:, 0, :, 1:]], -1)


def activated(z: Tensor, function: Activation) -> Tensor:
    """Return ``function(z)``."""
    return function.value(z)


def moments(rows: Tensor, net: Network) -> Moments:
    """Return the moments of a net of one number; ``rows`` are (A, K, 4)."""
    # atoms and slots stay two dimensions: inductor cannot lower a view that splits a product of two
    # symbolic sizes
    jet = torch.stack(net.value_and_derivative(rows[..., :1].contiguous()), 1)
    return Moments(rows, torch.bmm(rows.transpose(1, 2), jet[:, 0]), jet)


def values_and_gradients(
    x: Tensor, nets: Sequence[Network], shares: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the outputs (A,) of networks of one output and their gradients by the inputs (A, N).

    Args:
        x: (A, N), the rows of each network one after the other.
        nets: all of the same options.
        shares: rows of each network.
    """
    # the number of rows may be a symbol of a graph, whose value a split would need
    if len(nets) == 1:
        return nets[0].value_and_gradient(x)
    parts = zip(nets, x.split(list(shares)), strict=True)
    results = [net.value_and_gradient(rows) for net, rows in parts]
    values, grads = zip(*results, strict=True)
    return torch.cat(values), torch.cat(grads)


def triple_sums_and_vjp(
    products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """Return ``sum_jk c_jk G(c_jk, E_j, E_k)`` (A, M), and its vjp by ``products``.

    Args:
        products: (A, K, K), the c; 0 where there is no neighbor.
        types: (A, K) of the neighbors.
        mask: (A, K) bool, where there is a neighbor.
        table: (T, E) type embeddings.
        net: G.
    """
    embedded = pick(table, types)  # (A, K, E)
    width = products.shape[1]
    # embeddings of j and of k for each pair, (A, K, K, E)
    first = embedded[:, :, None].expand(-1, -1, width, -1)
    second = embedded[:, None].expand(-1, width, -1, -1)

    # (A, K K, M) values of all pairs, also of those with an empty slot, whose c is 0
    def sums(products: Tensor) -> Tensor:
        values = net(torch.cat([products[..., None], first, second], -1))
        return torch.bmm(products.flatten(1)[:, None], values.flatten(1, 2)).squeeze(1)

    return cast("Any", vjp_of(sums, products))


def vjp_of(
    function: Callable[..., Tensor], *inputs: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return ``function(*inputs)`` and its vjp, an ordinary function of the parameters.

    Args:
        function: of operations that ``torch.func`` knows.
        inputs: any tensors.
    """
    # with parameters as constants of the function, by which autograd differentiates the result
    if torch.compiler.is_compiling():
        return cast("Any", torch.func.vjp(function, *inputs))
    evaluated: list[tuple[Tensor, tuple[Tensor, ...]]] = []

    def recorded(*variables: Tensor) -> Tensor:
        output = function(*variables)
        evaluated.append((output, variables))
        return output

    value, vjp = cast("Any", torch.func.vjp(recorded, *inputs))
    output, variables = evaluated[0]
    if not output.requires_grad:  # a function of none of the inputs
        return value, vjp

    def eager_vjp(grad: Tensor) -> tuple[Tensor, ...]:
        # The call that `vjp` makes. `vjp` also loads torch._dynamo, which takes a second, to turn
        # off compiled autograd (torch 2.13).
        grads = torch.autograd.grad(
            output,
            variables,
            grad,
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
        return tuple(
            torch.zeros_like(x) if by_x is None else by_x
            for by_x, x in zip(grads, inputs, strict=True)
        )

    return value, eager_vjp


def with_vjp(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Vjp]:
    """Return ``function(x)`` and its vjp, as from the vectors of a batch to features."""
    value, vjp = vjp_of(function, x)
    return value, lambda grad_features: vjp(grad_features)[0]


def axis_features(moments: Tensor, axis: int) -> Tensor:
    """Return ``g^T g[:X]`` (A, M X) of moments (A, 4, M)."""
    return torch.bmm(moments.transpose(1, 2), moments[..., :axis]).flatten(1)


def axis_features_vjp(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
    """Return the gradient by the moments (A, 4, M) from that by the features (A, M X)."""
    # both factors of g^T g[:X] depend on the moments: the first X channels get two terms
    grad = grad.view(moments.shape[0], -1, axis)
    whole = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
    first = whole[..., :axis] + torch.bmm(moments, grad)
    return torch.cat([first, whole[..., axis:]], -1)


def symmetrized(features: Tensor, vectors: Tensor, num_axis: int) -> Tensor:
    """Return ``M[:, :X]^T M`` as (A, X C) with the moments ``M = sum_k h_k g_k^T`` (A, 3, C).

    The terms ``grrg`` and ``drrd`` of DPA-2, Zhang et al., arXiv:2312.15492, which are divided by 3
    there.

    Args:
        features: (A, K, C) g, zero where there is no neighbor.
        vectors: (A, K, 3) h, which turn with the frame, times all factors of the moments.
        num_axis: X.
    """
    moments = torch.bmm(vectors.transpose(1, 2), features)
    return torch.bmm(moments[..., :num_axis].transpose(1, 2), moments).flatten(1)
