"""The sum over pairs of neighbors of a network of their angle and elements, with its gradient written out.

With the scalar products ``c_jk = R_j . R_k`` of an atom and the embeddings E of the elements of its neighbors::

    D = sum_jk c_jk G(c_jk, E_j, E_k)

The gradient by c is ``G + c dG/dc`` times that of D: an ordinary function of the parameters, because the derivative of
the network is carried through its layers with the value. The elements enter the first layer as one term for each
element of j and one for each element of k, so that no pair has its own copy of their embeddings.

Only pairs of two neighbors are evaluated, not those with an empty slot. Channels come first and pairs last:
the layers are narrow, and so each operation goes along many pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.ops.cpu.engine import Evaluation, value_and_vjp

# A atoms, J and K neighbor slots, P pairs of neighbors, T types, E numbers of a type embedding, N inputs and M outputs
# of a layer
# a "jet" (M, 2, P) holds values in [:, 0] and derivatives with respect to c in [:, 1]


def triple_sums_and_vjp(
    products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return D (A, M), and a function from its gradient to that by ``products``.

    Args:
        products: (A, K, K), the c.
        types: (A, K) of the neighbors.
        mask: (A, K) bool, where there is a neighbor.
        table: (T, E) type embeddings.
        net: G, of tanh layers.
    """
    start, *later = net.layers
    assert start.bias is not None
    of_c, *of_elements = start.weight.split([1, table.shape[1], table.shape[1]])
    first, second = (table @ weight for weight in of_elements)
    evaluation = _Triples(_Pairs(types, mask), [layer.copies for layer in later])
    weights = [of_c[0], first + start.bias, second, *(p for layer in later for p in (layer.weight, layer.bias))]
    found, vjp = value_and_vjp(evaluation, [products], weights)
    return found, lambda grad: vjp(grad)[0]


class _Triples(Evaluation):
    """The sums D (A, M) of products (A, K, K).

    Args:
        pairs: of neighbors.
        copies: how often the input of each layer but the first is in its skip connection.
    """

    num_trained = 0

    def __init__(self, pairs: _Pairs, copies: list[int]) -> None:
        super().__init__()
        self._pairs, self._jets = pairs, _Jets(copies)
        self._c: Tensor  # (P,)
        self._slopes: Tensor  # (M, P), G + c dG/dc

    def value(self, inputs: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
        """Return D."""
        pairs, (of_c, first, second, *flat) = self._pairs, weights
        self._c = c = pairs.chosen(inputs[0])
        z = first.T.index_select(1, pairs.first).add_(second.T.index_select(1, pairs.second))
        jet = self._jets.evaluate(c, z, of_c, flat)
        # d(c G)/dc, of which both the gradient and the change are made
        self._slopes = torch.addcmul(jet[:, 0], jet[:, 1], c)
        return pairs.sums(jet[:, 0] * c)

    def gradient(self, grad: Tensor, weights: Sequence[Any]) -> tuple[Sequence[Tensor], Any]:
        """Return the gradient by the products."""
        return [self._pairs.placed((self._pairs.spread(grad) * self._slopes).sum(0))], grad

    def change(self, changes: Sequence[Tensor], weights: Sequence[Any]) -> tuple[Tensor, Any]:
        """Return the change of D as the products change."""
        change = self._pairs.chosen(changes[0])
        return self._pairs.sums(self._slopes * change), change

    def second_gradient(
        self, grad: Tensor, past: tuple[Any, Any] | None, weights: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor | None]]:
        """Return the gradients by the weights."""
        pairs, (_, first, second, *flat) = self._pairs, weights
        by_value = pairs.spread(grad) * self._c
        by_derivative = torch.zeros_like(by_value)
        if past is not None:
            by_slope = pairs.spread(past[0]) * past[1]
            by_value, by_derivative = by_value + by_slope, by_slope * self._c
        by_jet = torch.stack([by_value, by_derivative], 1)
        by_z, of_c, others = self._jets.gradients(by_jet, self._c, flat)
        return [], [of_c, _added(by_z, pairs.first, len(first)).T, _added(by_z, pairs.second, len(second)).T, *others]


class _Pairs:
    """The pairs of neighbors of the atoms of a batch.

    Args:
        types: (A, K) of the neighbors.
        mask: (A, K) bool, where there is a neighbor.

    Attributes:
        first: (P,) type of j.
        second: (P,) type of k.
    """

    def __init__(self, types: Tensor, mask: Tensor) -> None:
        num_atoms, width = types.shape
        self.shape = (num_atoms, width, width)
        first, second = (t.expand(self.shape).reshape(-1) for t in (types[:, :, None], types[:, None]))
        # picked, not masked: a slot without a neighbor would cost the net as much as one with two
        self._place = (mask[:, :, None] & mask[:, None]).view(-1).nonzero().squeeze(1)
        self._atom = self._place.div(max(1, width * width), rounding_mode="floor")
        self.first, self.second = (t.index_select(0, self._place) for t in (first, second))

    def chosen(self, of_slots: Tensor) -> Tensor:
        """Return the numbers of the pairs (P,) of (A, J, K)."""
        return of_slots.reshape(-1).index_select(0, self._place)

    def placed(self, of_pairs: Tensor) -> Tensor:
        """Return (A, J, K), the numbers of the pairs (P,) in their slots, zeros in the others."""
        numbers = of_pairs.new_zeros(self.shape[0] * self.shape[1] * self.shape[2])
        return numbers.index_copy_(0, self._place, of_pairs).view(self.shape)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums over the pairs of each atom (A, M) of (M, P)."""
        return _added(values, self._atom, self.shape[0]).T

    def spread(self, of_atoms: Tensor) -> Tensor:
        """Return the numbers (M, P) that each pair has of its atom, of (A, M)."""
        return of_atoms.T.index_select(1, self._atom)


class _Jets:
    """The jets of a network in one evaluation of it, in letters of the formulas of `moments`.

    Args:
        copies: how often the input of each layer but the first is in its skip connection.
    """

    def __init__(self, copies: list[int]) -> None:
        self._copies = copies
        self._jets: list[Tensor] = []

    def evaluate(self, c: Tensor, z: Tensor, of_c: Tensor, flat: Sequence[Tensor]) -> Tensor:
        """Return the jet (M, 2, P) of the output.

        Args:
            c: (P,).
            z: (M, P) what the elements give to the first layer, with its bias; overwritten.
            of_c: (M,) the weights of c in the first layer.
            flat: weight and bias of each other layer.
        """
        value = z.addr_(of_c, c).tanh_()  # in place: z has no other reader
        jet = torch.stack([value, torch.addcmul(of_c[:, None], value.square(), of_c[:, None], value=-1)], 1)
        self._jets = [jet]
        for weight, bias, copies in zip(flat[::2], flat[1::2], self._copies):
            out = torch.mm(weight.T, jet.flatten(1)).view(weight.shape[1], 2, len(c))
            value = out[:, 0].add_(bias[:, None]).tanh_()
            out[:, 1].addcmul_(value.square(), out[:, 1], value=-1)
            if copies:
                out.view(copies, *jet.shape).add_(jet)
            jet = out
            self._jets.append(jet)
        return jet

    def gradients(self, grad: Tensor, c: Tensor, flat: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients by z (M, P), the weights of c (M,), and weight and bias of each other layer.

        Args:
            grad: (M, 2, P) by the jet of the output.
            c: (P,).
            flat: weight and bias of each layer but the first.
        """
        found: list[Tensor] = []
        for index in range(len(self._copies) - 1, -1, -1):
            jet, before, copies, weight = self._jets[index + 1], self._jets[index], self._copies[index], flat[2 * index]
            if copies:  # tanh alone, which the derivatives are functions of
                jet = (jet.view(copies, *before.shape) - before).view(jet.shape)
            grad_z = _by_z(grad, jet)
            found = [torch.mm(before.flatten(1), grad_z.flatten(1).T), grad_z[:, 0].sum(1), *found]
            below = torch.mm(weight, grad_z.flatten(1)).view(before.shape)
            for part in grad.chunk(copies) if copies else ():
                below.add_(part)
            grad = below
        grad_z = _by_z(grad, self._jets[0])
        return grad_z[:, 0], torch.mv(grad_z[:, 0], c) + grad_z[:, 1].sum(1), found


def _by_z(grad: Tensor, jet: Tensor) -> Tensor:
    """Return the gradient by z and dz/dc from that by ``y = tanh(z)`` and ``dy/dc = (1 - y^2) dz/dc``."""
    value, derivative = jet[:, 0], jet[:, 1]
    grad_z = torch.addcmul(grad, grad, value.square()[:, None], value=-1)
    grad_z[:, 0].addcmul_(value * derivative, grad[:, 1], value=-2)
    return grad_z


def _added(values: Tensor, index: Tensor, number: int) -> Tensor:
    """Return (M, number): the numbers (M, P) added up by ``index``, in a fixed order."""
    # on a CPU it goes through the index in order, with any number of threads: a restart is bitwise
    return values.new_zeros(len(values), number).index_add_(1, index, values)
