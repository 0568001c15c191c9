"""The sum over pairs of neighbors of a network of their angle and elements, with its gradient written out.

With the scalar products ``c_jk = R_j . R_k`` of an atom and the embeddings E of the elements of its neighbors::

    D = sum_jk c_jk G(c_jk, E_j, E_k)

The gradient by c is ``G + c dG/dc`` times that of D: an ordinary function of the parameters, because the derivative of
the network is carried through its layers with the value. The elements enter the first layer as one term for each
element of j and one for each element of k, so that no pair has its own copy of their embeddings.

On a CPU only pairs of two neighbors are evaluated, not those with an empty slot. Channels come first and pairs last:
the layers are narrow, and so each operation goes along many pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.nn.type_embedding import one_hot

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
    pairs = _Pairs(types, mask)
    c = pairs.chosen(products.detach())
    start, *later = net.stack
    assert start.bias is not None
    of_c, *of_elements = start.weight.split([1, table.shape[1], table.shape[1]])
    terms = [table @ weight for weight in of_elements]
    flat = [p for layer in later for p in (layer.weight, layer.bias)]
    jets = _Jets([layer.copies for layer in later])
    values, slopes = _Evaluate.apply(jets, pairs, c, of_c[0], terms[0] + start.bias, terms[1], *flat)
    found: Tensor = _Sum.apply(pairs, products, c, values, slopes)
    return found, lambda grad: _SumVjp.apply(pairs, grad, slopes)


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
        self.shape, self.num_atoms = (num_atoms, width, width), num_atoms
        first, second = (t.expand(self.shape).reshape(-1) for t in (types[:, :, None], types[:, None]))
        self._place: Tensor | None = None
        if mask.device.type == "cpu":  # to ask how many there are is to wait for a GPU
            self._place = (mask[:, :, None] & mask[:, None]).view(-1).nonzero().squeeze(1)
            self._atom = self._place.div(max(1, width * width), rounding_mode="floor")
            first, second = (t.index_select(0, self._place) for t in (first, second))
        self.first, self.second = first, second

    def chosen(self, of_slots: Tensor) -> Tensor:
        """Return the numbers of the pairs (P,) of (A, J, K)."""
        flat = of_slots.reshape(-1)
        return flat if self._place is None else flat.index_select(0, self._place)

    def placed(self, of_pairs: Tensor) -> Tensor:
        """Return (A, J, K), the numbers of the pairs (P,) in their slots, zeros in the others."""
        if self._place is not None:
            numbers = of_pairs.new_zeros(self.shape[0] * self.shape[1] * self.shape[2])
            of_pairs = numbers.index_copy_(0, self._place, of_pairs)
        return of_pairs.view(self.shape)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums over the pairs of each atom (A, M) of (M, P)."""
        if self._place is None:
            return values.view(len(values), self.num_atoms, self.shape[1] * self.shape[2]).sum(2).T
        return _added(values, self._atom, self.num_atoms).T

    def spread(self, of_atoms: Tensor) -> Tensor:
        """Return the numbers (M, P) that each pair has of its atom, of (A, M)."""
        if self._place is not None:
            return of_atoms.T.index_select(1, self._atom)
        return of_atoms.T[..., None].expand(-1, -1, self.shape[1] * self.shape[2]).flatten(1)


class _Jets:
    """The jets of a network in one evaluation of it, in letters of the formulas of `moments`.

    Args:
        copies: how often the input of each layer but the first is in its skip connection.
    """

    def __init__(self, copies: list[int]) -> None:
        self._copies = copies
        self._jets: list[Tensor] = []

    def evaluate(self, c: Tensor, z: Tensor, of_c: Tensor, flat: tuple[Tensor, ...]) -> Tensor:
        """Return the jet (M, 2, P) of the output.

        Args:
            c: (P,).
            z: (M, P) what the elements give to the first layer, with its bias; overwritten.
            of_c: (M,) the weights of c in the first layer.
            flat: weight and bias of each other layer.
        """
        value = z.addr_(of_c, c).tanh_()
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

    def gradients(self, grad: Tensor, c: Tensor, flat: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the gradients by z (M, P), the weights of c (M,), and weight and bias of each other layer.

        Args:
            grad: (M, 2, P) by the jet of the output.
            c: (P,).
            flat: weight and bias of each layer but the first.
        """
        found: list[Tensor] = []
        for index in range(len(self._copies) - 1, -1, -1):
            jet, before, copies, weight = self._jets[index + 1], self._jets[index], self._copies[index], flat[2 * index]
            if copies:
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


class _Evaluate(torch.autograd.Function):
    """``G`` and ``G + c dG/dc`` of all pairs (M, P), which can be differentiated by the parameters alone."""

    @staticmethod
    def forward(
        jets: _Jets, pairs: _Pairs, c: Tensor, of_c: Tensor, first: Tensor, second: Tensor, *flat: Tensor
    ) -> tuple[Tensor, Tensor]:
        z = first.T.index_select(1, pairs.first).add_(second.T.index_select(1, pairs.second))
        jet = jets.evaluate(c, z, of_c, flat)
        return jet[:, 0].contiguous(), torch.addcmul(jet[:, 0], jet[:, 1], c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # for torch.func
        ctx.jets, ctx.pairs, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor, grad_slope: Tensor) -> tuple[Tensor | None, ...]:
        c, _, first, second, *flat = ctx.saved_tensors
        grad = torch.stack([grad_value + grad_slope, grad_slope * c], 1)
        by_z, of_c, others = ctx.jets.gradients(grad, c, flat)
        pairs = ctx.pairs
        of_first, of_second = _added(by_z, pairs.first, len(first)).T, _added(by_z, pairs.second, len(second)).T
        return None, None, None, of_c, of_first, of_second, *others


class _Sum(torch.autograd.Function):
    """``sum c G``, differentiable by the products, whose gradient is that through c and G, and by G."""

    @staticmethod
    def forward(pairs: _Pairs, products: Tensor, c: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        return pairs.sums(values * c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pairs, _, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        c, _, slopes = ctx.saved_tensors
        by_products = _SumVjp.apply(ctx.pairs, grad, slopes) if ctx.needs_input_grad[1] else None
        by_values = ctx.pairs.spread(grad) * c if ctx.needs_input_grad[3] else None
        return None, by_products, None, by_values, None


class _SumVjp(torch.autograd.Function):
    """The gradient by the products, differentiable by the given gradient and the parameters."""

    @staticmethod
    def forward(pairs: _Pairs, grad: Tensor, slopes: Tensor) -> Tensor:
        return pairs.placed((pairs.spread(grad) * slopes).sum(0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.pairs, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, ...]:
        grad, slopes = ctx.saved_tensors
        of_pairs = ctx.pairs.chosen(change)
        by_grad = ctx.pairs.sums(slopes * of_pairs) if ctx.needs_input_grad[1] else None
        by_slopes = ctx.pairs.spread(grad) * of_pairs if ctx.needs_input_grad[2] else None
        return None, by_grad, by_slopes


def _added(values: Tensor, index: Tensor, number: int) -> Tensor:
    """Return (M, number): the numbers (M, P) added up by ``index``, in a fixed order."""
    if values.device.type == "cpu":  # elsewhere index_add has none
        return values.new_zeros(len(values), number).index_add_(1, index, values)
    return values @ one_hot(index, number, values.dtype)
