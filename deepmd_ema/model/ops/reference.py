"""The reference operations of descriptors, in plain torch, and how a module gets another set of operations.

Every function here returns new tensors. This is the code that is compiled, exported, differentiated by ``torch.func``
or twice. :mod:`deepmd_ema.model.ops.cpu` replaces what is faster in eager mode on a CPU or a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from deepmd_ema.model.nn.activation import Activation
from deepmd_ema.model.nn.attention import Weights
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.nn.type_embedding import pick
from deepmd_ema.model.ops.attention import Attended, AttentionOptions, attended_moments

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp

# A atoms, K neighbor slots, M channels of a pair, X axis channels, N inputs and C columns

ModuleT = TypeVar("ModuleT", bound=nn.Module)


@dataclass(frozen=True)
class Moments:
    """``sum_k rows[k, c] G(s_k)`` over the neighbors of each atom, s = rows[..., 0], and its vector-Jacobian product.

    Attributes:
        rows: (A, K, 4) normalised environment matrix in the precision of the net, a constant.
        value: (A, 4, M), a function of the parameters of the net.
        jet: (A, 2, K, M), G and dG/ds at ``rows[..., 0]``, functions of its parameters.
    """

    rows: Tensor
    value: Tensor
    jet: Tensor

    def vjp(self, grad_moments: Tensor) -> Tensor:
        """Return the gradient with respect to the rows (A, K, 4), also through s, from that of the moments."""
        both = torch.bmm(self.jet.flatten(1, 2), grad_moments.transpose(1, 2)).view(*self.jet.shape[:3], 4)
        through_s = (both[:, 1] * self.rows).sum(-1, keepdim=True)
        return torch.cat([both[:, 0, :, :1] + through_s, both[:, 0, :, 1:]], -1)


class Operations:
    """The operations of which there may be several versions of equal values and derivatives.

    Attributes:
        is_for_cpu: whether operations work in place, in portions, and may read numbers, for which a GPU would wait.
            Those of the reference can be traced, and differentiated any number of times by anything; those of other
            sets need eager mode, and their gradients can be differentiated by the parameters alone.
        numbers_in_cache: of a portion, for each thread; 0: all at once.
    """

    is_for_cpu: ClassVar[bool] = False
    numbers_in_cache: int = 0

    def activated(self, z: Tensor, function: Activation) -> Tensor:
        """Return ``function(z)``."""
        return function.value(z)

    def moments(self, rows: Tensor, net: Network) -> Moments:
        """Return the moments of a net of one number; ``rows`` are (A, K, 4)."""
        # atoms and slots stay two dimensions: inductor cannot lower a view that splits a product of two symbolic sizes
        jet = torch.stack(net.value_and_derivative(rows[..., :1].contiguous()), 1)
        return Moments(rows, torch.bmm(rows.transpose(1, 2), jet[:, 0]), jet)

    def values_and_gradients(self, x: Tensor, nets: Sequence[Network], shares: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the outputs (A,) of networks of one output and their gradients by the inputs (A, N).

        Args:
            x: (A, N), the rows of each network one after the other.
            nets: all of the same options.
            shares: rows of each network.
        """
        if len(nets) == 1:  # the number of rows may be a symbol of a graph, whose value a split would need
            return nets[0].value_and_gradient(x)
        found = [net.value_and_gradient(own) for net, own in zip(nets, x.split(list(shares)), strict=True)]
        values, grads = zip(*found, strict=True)
        return torch.cat(values), torch.cat(grads)

    def attended_moments(self, given: Attended, layers: Sequence[Weights], options: AttentionOptions) -> Tensor:
        """Return ``rows^T Y`` (A, C, M), Y the channels of the pairs after all layers of attention."""
        return attended_moments(given, layers, options)

    def triple_sums_and_vjp(
        self, products: Tensor, types: Tensor, mask: Tensor, table: Tensor, net: Network
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
        """Return ``sum_jk c_jk G(c_jk, E_j, E_k)`` (A, M), and a function from its gradient to that by ``products``.

        Args:
            products: (A, K, K), the c; 0 where there is no neighbor.
            types: (A, K) of the neighbors.
            mask: (A, K) bool, where there is a neighbor.
            table: (T, E) type embeddings.
            net: G.
        """
        embedded, width = pick(table, types), products.shape[1]
        first, second = embedded[:, :, None].expand(-1, -1, width, -1), embedded[:, None].expand(-1, width, -1, -1)

        def sums(products: Tensor) -> Tensor:
            values = net(torch.cat([products[..., None], first, second], -1))
            return torch.bmm(products.flatten(1)[:, None], values.flatten(1, 2)).squeeze(1)

        return cast("Any", vjp_of(sums, products))

    def portions(self, count: int, numbers: int) -> list[slice]:
        """Return slices of ``count`` rows that stay in the cache, with ``numbers`` of each row."""
        if not numbers:
            return []
        # torch gives each thread a part of a portion
        step = max(1, self.numbers_in_cache * torch.get_num_threads() // numbers) if self.numbers_in_cache else count
        return [slice(start, start + step) for start in range(0, count, max(1, step))]


REFERENCE = Operations()


class UsesOperations(nn.Module):
    """A module that calls operations of the set which :func:`use_operations` gave it."""

    _operations: Operations = REFERENCE

    @property
    def ops(self) -> Operations:
        """The set of operations; while a graph is made, the reference."""
        return REFERENCE if torch.compiler.is_compiling() else self._operations


def use_operations(module: nn.Module, operations: Operations) -> None:
    """Give a module and all modules in it a set of operations."""
    for part in module.modules():
        if isinstance(part, UsesOperations):
            part._operations = operations


def with_operations(module: ModuleT, operations: Operations) -> ModuleT:
    """Return a module with another set of operations and the same parameters, buffers and other attributes.

    It is for one evaluation: attributes that are set later on the given module are not seen.
    """
    children = {name: child and with_operations(child, operations) for name, child in module._modules.items()}
    same = all(child is module._modules[name] for name, child in children.items())
    if same and not isinstance(module, UsesOperations):
        return module  # so that hooks of sharded networks, and tables by network, find the same object
    found: ModuleT = object.__new__(type(module))
    found.__dict__.update(vars(module), _modules=children)
    if isinstance(found, UsesOperations):
        found._operations = operations
    return found


def vjp_of(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return ``function(*inputs)`` and its vector-Jacobian product, an ordinary function of the parameters.

    Args:
        function: of operations that ``torch.func`` knows.
        inputs: any tensors.
    """
    return cast("Any", torch.func.vjp(function, *inputs))


def with_vjp(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Vjp]:
    """Return ``function(x)`` and its vector-Jacobian product, as from the vectors of a batch to features."""
    value, vjp = vjp_of(function, x)
    return value, lambda grad_features: vjp(grad_features)[0]


def axis_features(moments: Tensor, axis: int) -> Tensor:
    """Return ``g^T g[:X]`` (A, M X) of moments (A, 4, M)."""
    return torch.bmm(moments.transpose(1, 2), moments[..., :axis]).flatten(1)


def axis_features_vjp(grad: Tensor, moments: Tensor, axis: int) -> Tensor:
    """Return the gradient by the moments (A, 4, M) from that by the features (A, M X)."""
    grad = grad.view(moments.shape[0], -1, axis)
    whole = torch.bmm(moments[..., :axis], grad.transpose(1, 2))
    first = whole[..., :axis] + torch.bmm(moments, grad)
    return torch.cat([first, whole[..., axis:]], -1)
